"""Bulk requests to Elasticsearch whose outcome is unknown, and which of their entries must not stand in the index.

A row is written with the claim, before the request is sent, and removed once every operation was answered. A row that
stays belongs to a worker that died or got no answer: its request may arrive at any later time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from pipeline.stores.postgres import Connection

ANSWERED_SECONDS = 300.0
"""An answer that comes later than so long after the claim is no certain one: half of ``index.gc_deletes`` (600), within
which Elasticsearch remembers every delete that was accepted since the claim, and so refuses what is older."""


class Entry(NamedTuple):
    """One entry that a bulk request writes, and the version that it is written with."""

    document: UUID
    chunk: UUID
    seq: int


class OpenBulk(NamedTuple):
    id: UUID
    keyword_index: str
    entries: Sequence[Entry]
    expired: bool
    """It was sent so long ago that it can no longer arrive."""


class Unwanted(NamedTuple):
    """The entries of an open bulk that the index shall not hold."""

    entries: Sequence[Entry]
    """Each with a version at which the index shall not hold it; if it is desired later, that has a higher one."""
    complete: bool
    """False: a document's chunks are not known yet, so its entries could not be judged."""
    confirmed: Sequence[Entry]
    """Those of them that the ledger holds to stand in the index: a delete that was accepted was not processed yet."""


async def record_open(connection: Connection, index: str, entries: Sequence[Entry], *, check_in_seconds: float) -> UUID:
    """Record a bulk that is about to be sent; returns its id. In the transaction that claims its documents."""
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
    """Every operation of one sending was answered. The row stays while another sending of the same bulk was not, and
    where the claim is older than ANSWERED_SECONDS: the entries may have been accepted after a delete of them was
    forgotten, and a worker that confirms that delete after us would undo our second look."""
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
    """Take the bulks whose check is due, and put off their next one, so that several workers share them."""
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
    """A generation that is not retired and keeps its entries in this index; None: there is none."""
    cursor = await connection.execute(
        "SELECT name FROM generations WHERE keyword_index = %s AND state <> 'retired' LIMIT 1", [index]
    )
    row = await cursor.fetchone()
    return None if row is None else str(row[0])


async def unwanted(connection: Connection, bulk: OpenBulk) -> Unwanted:
    """Compare an open bulk with the ledger, in one statement: a desired state and its sequence number belong together.

    An index may be shared by several generations: an entry is unwanted when none of them desires it. Law, where the
    caller has locked the documents' states: nothing newer is accepted before its transaction ends.
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
    await connection.execute("DELETE FROM open_bulks WHERE id = %s", [bulk])
