"""Open bulks: bulk requests to Elasticsearch whose outcome is unknown, and which of their entries must be deleted.

A row is written with the claim, before the request is sent, and removed when every operation was answered. A row that
remains belongs to a worker that died or got no answer, whose request may reach Elasticsearch at any later time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from pipeline.stores.postgres import Connection

ANSWERED_SECONDS = 300.0
"""An answer that comes longer than this after the claim is not relied on. It is half of ``index.gc_deletes`` (600 s),
the time for which Elasticsearch remembers a delete and refuses older writes."""


class Entry(NamedTuple):
    """One entry that a bulk request writes, and the version that it is written with."""

    document: UUID
    chunk: UUID
    seq: int


class OpenBulk(NamedTuple):
    """A recorded bulk request."""

    id: UUID
    keyword_index: str
    entries: Sequence[Entry]
    expired: bool
    """True if it was sent so long ago that it can no longer arrive."""


class Unwanted(NamedTuple):
    """The entries of an open bulk that the index must not hold."""

    entries: Sequence[Entry]
    """The entries to delete, each with the version for the delete. If the entry is desired later, its version is
    higher."""
    complete: bool
    """False when some entries could not be judged, because their documents' chunks are not known yet."""
    confirmed: Sequence[Entry]
    """Those of the entries that are confirmed in the ledger: the sink has not processed the change yet that makes them
    unwanted."""


async def record_open(connection: Connection, index: str, entries: Sequence[Entry], *, check_in_seconds: float) -> UUID:
    """Record a bulk that is about to be sent, in the transaction that claims its documents; returns its id. The same
    bulk has the same id each time it is sent."""
    ordered = sorted(entries)
    digest = hashlib.blake2b(index.encode(), digest_size=16)
    for entry in ordered:
        digest.update(entry.document.bytes + entry.chunk.bytes + entry.seq.to_bytes(8, "big"))
    bulk = UUID(bytes=digest.digest())
    await connection.execute(
        """
        INSERT INTO open_bulks AS o (id, keyword_index, documents, chunks, seqs, next_at)
        VALUES (%s, %s, %s, %s, %s, clock_timestamp() + make_interval(secs => %s))
        ON CONFLICT (id) DO UPDATE SET unanswered = o.unanswered + 1, sent_at = clock_timestamp()
        """,
        [
            bulk,
            index,
            [entry.document for entry in ordered],
            [entry.chunk for entry in ordered],
            [entry.seq for entry in ordered],
            check_in_seconds,
        ],
    )
    return bulk


async def record_answered(connection: Connection, bulk: UUID) -> None:
    """Record that every operation of a bulk was answered. The row stays while the same bulk, sent another time, has no
    answer. It also stays where the claim is older than ANSWERED_SECONDS: Elasticsearch may then have forgotten a delete
    and accepted our older entries after it, and they must be checked again."""
    young = "id = %s AND sent_at > clock_timestamp() - make_interval(secs => %s)"
    cursor = await connection.execute(
        f"DELETE FROM open_bulks WHERE unanswered = 1 AND {young}",  # noqa: S608 — literals of this function
        [bulk, ANSWERED_SECONDS],
    )
    if not cursor.rowcount:
        await connection.execute(
            f"UPDATE open_bulks SET unanswered = unanswered - 1 WHERE unanswered > 1 AND {young}",  # noqa: S608 — literals of this function
            [bulk, ANSWERED_SECONDS],
        )


async def due(
    connection: Connection, *, limit: int, again_in_seconds: float, expire_after_seconds: float
) -> list[OpenBulk]:
    """Take at most ``limit`` bulks whose check is due, and set their next check, so that several workers share them.
    again_in_seconds: time until the next check. expire_after_seconds: the age from which a bulk is expired."""
    cursor = await connection.execute(
        """
        WITH taken AS (
            SELECT id FROM open_bulks WHERE next_at <= now() ORDER BY next_at LIMIT %s FOR UPDATE SKIP LOCKED
        )
        UPDATE open_bulks o SET next_at = clock_timestamp() + make_interval(secs => %s) FROM taken t WHERE o.id = t.id
        RETURNING o.id, o.keyword_index, o.documents, o.chunks, o.seqs,
            o.sent_at < clock_timestamp() - make_interval(secs => %s)
        """,
        [limit, again_in_seconds, expire_after_seconds],
    )
    return [
        OpenBulk(id_, index, [Entry(*entry) for entry in zip(documents, chunks, seqs, strict=True)], expired)
        for id_, index, documents, chunks, seqs, expired in await cursor.fetchall()
    ]


async def user_of(connection: Connection, index: str) -> str | None:
    """The name of a generation that is not retired and uses this index; None: there is none."""
    cursor = await connection.execute(
        "SELECT name FROM generations WHERE keyword_index = %s AND state <> 'retired' LIMIT 1", [index]
    )
    row = await cursor.fetchone()
    return None if row is None else str(row[0])


async def unwanted(connection: Connection, bulk: OpenBulk) -> Unwanted:
    """Find the entries of an open bulk that no generation desires; several generations may share an index.

    One statement reads a desired state together with its sequence number. The result stays true until the caller's
    transaction ends if the caller has locked the documents' states (``work.lock_wants``).
    """
    cursor = await connection.execute(
        """
        SELECT s.document_id, s.want_seq, w.wanted, m.chunk_ids, m.content_hash = d.content_hash, s.confirmed
        FROM index_state s
        JOIN generations g ON g.name = s.generation AND g.state <> 'retired' AND g.keyword_index = %s
        JOIN documents d ON d.id = s.document_id
        LEFT JOIN access_sets a ON a.id = d.access_id
        LEFT JOIN manifests m ON m.document_id = s.document_id AND m.generation = s.generation
        CROSS JOIN LATERAL (
            SELECT d.deleted_at IS NULL AND d.version IS NOT NULL AND coalesce(cardinality(a.acl_tags), 0) > 0
        ) w (wanted)
        WHERE s.store = 'keywords' AND s.document_id = ANY (%s)
        """,
        [bulk.keyword_index, list({entry.document for entry in bulk.entries})],
    )
    wants: dict[UUID, int] = {}
    desired: set[UUID] = set()
    unknown: set[UUID] = set()
    confirmed: set[UUID] = set()
    for document, want_seq, is_desired, chunks, is_cut, stands in await cursor.fetchall():
        confirmed.update(stands)
        wants[document] = max(want_seq, wants.get(document, 0))
        if is_desired and not is_cut:
            unknown.add(document)
        elif is_desired:
            desired.update(chunks)
    entries = [
        Entry(entry.document, entry.chunk, max(entry.seq, wants.get(entry.document, 0)))
        for entry in bulk.entries
        if entry.chunk not in desired and entry.document not in unknown
    ]
    return Unwanted(entries, not unknown, [entry for entry in entries if entry.chunk in confirmed])


async def forget(connection: Connection, bulk: UUID) -> None:
    """Delete the record of a bulk."""
    await connection.execute("DELETE FROM open_bulks WHERE id = %s", [bulk])
