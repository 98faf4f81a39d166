"""The cache of search results.

Results are cached for one set of readable access sets and are returned again only after a check against the ledger:
every passage that they contain or count must still be readable by this caller, and no store may have changed a document
that this caller may read. So revocations, deletions and edits take effect as without a cache, and changes to documents
that the caller may not read are not visible, not even in the response time (docs/adr/0019-retrieval.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from sys import getsizeof
from uuid import UUID

from cachetools import TTLCache

from pipeline.core.model import Generation
from pipeline.stores.postgres import Connection
from query.access.callers import Caller, Readable
from query.access.filters import Filters
from query.model import Mode, Passage, Result, Sort, Step

RESULTS_TTL_SECONDS = 300.0
"""The lifetime of cached results: changes that the ledger does not record (a restored index, other analysis settings)
take effect after it."""
MAX_BYTES = 64 * 2**20
"""The memory of all cached results, about. Six hundred searches, as many as one caller may make in RESULTS_TTL_SECONDS,
took 450 MiB with results of a hundred long passages, and as much with filters of three hundred names."""
RESULT_BYTES = 1_000
"""The size of a result besides its texts."""
MAX_SETTLED_DOCUMENTS = 1_000
"""The most changed documents that are checked one by one; after more of them, the search runs again."""


@dataclass(frozen=True, slots=True)
class Key:
    """Two searches with equal keys at the same moment have the same results."""

    query: str
    mode: Mode
    top: int
    filters: Filters
    rerank: bool
    sort: Sort
    cursor: str | None
    generation: Generation
    tenant: str
    access: bytes
    """The ``access_digest`` of what the caller may read."""

    @property
    def digest(self) -> bytes:
        """A digest is kept of the key, because a search may have filters of a megabyte."""
        return blake2b(repr(self).encode("utf-8", "surrogatepass"), digest_size=32).digest()


def access_digest(readable: Readable) -> bytes:
    """A digest that is equal for equal access, whatever the order. It has 32 bytes: a caller may satisfy 100,000 access
    sets, and thousands of results are cached."""
    digest = blake2b(array("q", sorted(readable.access_ids)).tobytes(), digest_size=32)
    for tags in (readable.acl_tags, readable.required_tags):
        digest.update("\0".join(["", *sorted(tags), ""]).encode())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class ChunkKey:
    chunk_id: UUID
    document_id: UUID


def packed(chunks: Iterable[ChunkKey | Passage]) -> bytes:
    """The ids of chunks and of their documents, in 32 bytes each."""
    return b"".join(chunk.chunk_id.bytes + chunk.document_id.bytes for chunk in chunks)


def unpacked(chunks: bytes) -> list[ChunkKey]:
    ids = [UUID(bytes=chunks[at : at + 16]) for at in range(0, len(chunks), 16)]
    return [ChunkKey(chunk, document) for chunk, document in zip(ids[::2], ids[1::2], strict=True)]


@dataclass(frozen=True, slots=True)
class CachedResults:
    results: Sequence[Result]
    steps: Sequence[Step]
    relevant: bool
    cursor: str | None
    counted: bytes
    """Everything that was ranked, because the counts in the steps depend on it; ``packed``, in a ninth of the memory of
    objects, of which a search has up to two thousand."""
    snapshot: str
    """The pg_snapshot from before the stores were queried."""


def memory(cached: CachedResults) -> int:
    """About how many bytes they take."""
    texts = (
        text
        for result in cached.results
        for text in (
            result.text,
            *result.headings,
            *(
                part
                for passage in (result.passage, *result.also)
                for part in (passage.external_id, passage.title, passage.source_url, passage.author)
            ),
        )
    )
    results = sum(1 + len(result.also) for result in cached.results)
    return sum(map(getsizeof, texts)) + RESULT_BYTES * (1 + results) + len(cached.counted)


class Cache:
    """Results, of bounded number and size. Safe to use within one event loop."""

    def __init__(self, size: int) -> None:
        """size: the most results; 0 disables the cache."""
        self.enabled = size > 0
        # Each counts as its part of MAX_BYTES at least, so that there are no more than ``size``.
        least = MAX_BYTES // max(1, size)
        self._results: TTLCache[bytes, CachedResults] = TTLCache(
            MAX_BYTES, RESULTS_TTL_SECONDS, getsizeof=lambda cached: max(least, memory(cached))
        )

    def results(self, key: Key) -> CachedResults | None:
        return self._results.get(key.digest) if self.enabled else None

    def store_results(self, key: Key, results: CachedResults) -> None:
        if self.enabled:
            with suppress(ValueError):  # it alone is larger than the cache
                self._results[key.digest] = results

    def forget(self, key: Key) -> None:
        self._results.pop(key.digest, None)


async def snapshot(connection: Connection) -> str:
    cursor = await connection.execute("SELECT pg_current_snapshot()::text")
    row = await cursor.fetchone()
    return str(row[0]) if row else ""


async def changed_since(
    connection: Connection, before: str, generation: str, caller: Caller, readable: Readable
) -> bool:
    """Whether a store was updated, for a document that the caller may read, in a transaction that the snapshot
    ``before`` did not see.

    It reads at most MAX_SETTLED_DOCUMENTS rows, all of them settled since, even while an unrelated transaction stays
    open for long. Rows with ids of future transactions are ignored: a ledger that was restored from a dump has them
    from another server.
    """
    cursor = await connection.execute(
        """
        WITH settled AS MATERIALIZED (
            SELECT document_id FROM (
                SELECT document_id, generation FROM index_state
                WHERE settled_xid >= pg_snapshot_xmax(%(before)s::pg_snapshot)
                  AND settled_xid < pg_snapshot_xmax(pg_current_snapshot())
                UNION ALL  -- and transactions that were in progress then
                SELECT document_id, generation FROM index_state
                WHERE settled_xid = ANY(ARRAY(SELECT pg_snapshot_xip(%(before)s::pg_snapshot)))
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
            "before": before,
            "generation": generation,
            "most": MAX_SETTLED_DOCUMENTS,
            "tenant": caller.tenant,
            "ids": list(readable.access_ids),
        },
    )
    row = await cursor.fetchone()
    return row is None or bool(row[0])
