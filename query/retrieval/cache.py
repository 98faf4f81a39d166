"""What was asked before: vectors of questions, and answers.

An answer is kept for an access set, never for anybody else, and is given again only after the ledger was asked once
more: every passage that it shows or counts must still be readable by this caller, and no store may have followed since
in a document that this caller may read. So a revocation, a deletion or an edit is answered as without a cache, and
nothing that happens to what the caller may not read shows, not even in how long an answer takes
(docs/adr/0019-retrieval.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from uuid import UUID

from cachetools import TTLCache

from pipeline.core.model import Generation
from pipeline.embedding.port import Embedder, Vectors
from pipeline.stores.postgres import Connection
from query.access.callers import Caller, Readable
from query.access.filters import Filters
from query.model import Mode, Result, Step

KEPT_SECONDS = 300.0
"""However quiet it is: what the ledger cannot tell (a restored index, another server's analysis) shows after this."""
VECTORS_KEPT_SECONDS = 3_600.0
"""What somebody asked stands in memory no longer than this (`penstock forget` says so)."""
MOST_CHANGES = 1_000
"""Settled documents that are looked at one by one; after more of them an answer is worked out anew."""


@dataclass(frozen=True, slots=True)
class Key:
    """Two questions with equal keys, asked at the same moment, have the same answer."""

    query: str
    mode: Mode
    top: int
    filters: Filters
    rerank: bool
    generation: Generation
    tenant: str
    access: bytes
    """``access_of`` what the caller may read."""


def access_of(readable: Readable) -> bytes:
    """Equal where as much is readable, whatever the order. 32 bytes: a wide reader satisfies 100,000 access sets, and
    thousands of answers are kept."""
    digest = blake2b(array("q", sorted(readable.access_ids)).tobytes(), digest_size=32)
    for tags in (readable.acl_tags, readable.required_tags):
        digest.update("\0".join(["", *sorted(tags), ""]).encode())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Ref:
    chunk_id: UUID
    document_id: UUID


@dataclass(frozen=True, slots=True)
class Remembered:
    results: Sequence[Result]
    steps: Sequence[Step]
    relevant: bool
    counted: Sequence[Ref]
    """Everything that was ranked: the steps' counts tell of it."""
    snapshot: str
    """pg_snapshot taken before the stores were asked."""


Embedded = tuple[Embedder, Vectors]


class Cache:
    """Bounded; safe within one event loop."""

    def __init__(self, size: int) -> None:
        """size: questions whose vectors are kept, and answers; 0: none of either."""
        self._vectors: TTLCache[tuple[str, str, int, str], Embedded] = TTLCache(size, VECTORS_KEPT_SECONDS)
        self._answers: TTLCache[Key, Remembered] = TTLCache(size, KEPT_SECONDS)
        self.enabled = size > 0

    def vector(self, generation: Generation, caller: Caller, query: str) -> Embedded | None:
        """By that generation's model. For whoever holds the same tags: nobody else learns from the time what was
        asked."""
        return self._vectors.get((generation.name, caller.tenant, hash(caller.tags), query))

    def keep_vector(self, generation: Generation, caller: Caller, query: str, embedded: Embedded) -> None:
        if self.enabled:
            self._vectors[generation.name, caller.tenant, hash(caller.tags), query] = embedded

    def answer(self, key: Key) -> Remembered | None:
        return self._answers.get(key)

    def keep_answer(self, key: Key, remembered: Remembered) -> None:
        if self.enabled:
            self._answers[key] = remembered

    def forget(self, key: Key) -> None:
        self._answers.pop(key, None)


async def snapshot(connection: Connection) -> str:
    cursor = await connection.execute("SELECT pg_current_snapshot()::text")
    row = await cursor.fetchone()
    return str(row[0]) if row else ""


async def changed_since(
    connection: Connection, taken: str, generation: str, caller: Caller, readable: Readable
) -> bool:
    """Whether a store has followed the ledger, in a document that the caller may read, in a transaction that a snapshot
    did not see. Reads what was settled since and no more than MOST_CHANGES of that, however long a transaction that
    has nothing to do with it stays open.

    Ids of transactions that are yet to come were brought along from another server, by a ledger restored from a dump.
    """
    cursor = await connection.execute(
        """
        WITH settled AS MATERIALIZED (
            SELECT document_id FROM (
                SELECT document_id, generation FROM index_state
                WHERE settled_xid >= pg_snapshot_xmax(%(taken)s::pg_snapshot)
                  AND settled_xid < pg_snapshot_xmax(pg_current_snapshot())
                UNION ALL  -- and what was under way then
                SELECT document_id, generation FROM index_state
                WHERE settled_xid = ANY(ARRAY(SELECT pg_snapshot_xip(%(taken)s::pg_snapshot)))
            ) unseen
            WHERE generation = %(generation)s
            LIMIT %(most)s + 1
        )
        SELECT (SELECT count(*) FROM settled) > %(most)s OR EXISTS (
            SELECT FROM settled s JOIN documents d ON d.id = s.document_id
            WHERE d.tenant = %(tenant)s AND d.access_id = ANY(%(ids)s::bigint[])
        )
        """,
        {
            "taken": taken,
            "generation": generation,
            "most": MOST_CHANGES,
            "tenant": caller.tenant,
            "ids": list(readable.access_ids),
        },
    )
    row = await cursor.fetchone()
    return row is None or bool(row[0])
