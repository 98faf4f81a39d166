"""The sinks' side of the ledger: read the desired state of documents, and record how far a store has reached it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg.rows import dict_row

from pipeline.core.identity import content_hash
from pipeline.core.model import Lane, Manifest, Span, Store
from pipeline.ledger.documents import Identity
from pipeline.ledger.generations import keep_unchanged
from pipeline.stores.postgres import Connection


@dataclass(frozen=True, slots=True)
class Work:
    """One document that a store has not reached: its desired state (as of ``want_seq``) and what is known of the
    store."""

    identity: Identity
    want_seq: int
    searchable: bool
    """True if it has content, is not deleted, and somebody may read it; otherwise the store must hold nothing of it."""
    content_hash: bytes | None
    access_id: int | None
    acl_tags: tuple[str, ...]
    required_tags: tuple[str, ...]
    title: str
    source_url: str | None
    author: str | None
    media_type: str
    source_modified_at: datetime | None
    manifest: Manifest | None
    lane: Lane
    claimed: tuple[UUID, ...]
    confirmed: Mapping[UUID, int]
    refused: tuple[UUID, ...]
    attempts: int
    keys: tuple[str, ...] = ()
    """The terms of its declared keys of metadata."""

    @property
    def chunk_ids(self) -> tuple[UUID, ...]:
        """The desired chunks, in reading order."""
        return self.manifest.chunk_ids if self.searchable and self.manifest else ()

    @property
    def spans(self) -> dict[UUID, tuple[Span, ...]]:
        """The spans of each desired chunk in the text."""
        return dict(zip(self.chunk_ids, self.manifest.spans, strict=True)) if self.searchable and self.manifest else {}

    @property
    def needs_chunking(self) -> bool:
        """Whether the manifest is missing or was built from another text."""
        return self.searchable and (self.manifest is None or self.manifest.content_hash != self.content_hash)


_WORK = """
    SELECT d.id, d.tenant, d.source, d.external_id, s.want_seq, d.deleted_at IS NULL AND d.version IS NOT NULL AS alive,
        d.content_hash, d.access_id, a.acl_tags, a.required_tags, d.title, d.source_url, d.author, d.media_type,
        d.source_modified_at, d.keys, d.lane, s.claimed, s.confirmed, s.confirmed_hashes, s.refused, s.attempts,
        m.content_hash AS manifest_hash, m.chunk_ids, m.token_counts, m.spans, m.headings
    FROM index_state s
    JOIN generations g ON g.name = s.generation AND g.state <> 'retired'
    JOIN documents d ON d.id = s.document_id
    LEFT JOIN access_sets a ON a.id = d.access_id
    LEFT JOIN manifests m ON m.document_id = s.document_id AND m.generation = s.generation
    WHERE s.generation = %s AND s.store = %s AND s.document_id = ANY(%s) AND s.seq < s.want_seq
    ORDER BY d.id
"""


async def load(connection: Connection, generation: str, store: Store, ids: Collection[UUID]) -> list[Work]:
    """The pending work of these documents, in the order of their ids. Documents that the store has reached are absent,
    and so are all of a retired generation. One statement reads a desired state together with its want_seq."""
    cursor = await connection.cursor(row_factory=dict_row).execute(_WORK, [generation, store, list(ids)])
    return [
        work_of(
            row,
            want_seq=row["want_seq"],
            claimed=tuple(row["claimed"]),
            confirmed=dict(zip(row["confirmed"], row["confirmed_hashes"], strict=True)),
            refused=tuple(row["refused"]),
            attempts=row["attempts"],
        )
        for row in await cursor.fetchall()
    ]


def work_of(
    row: Mapping[str, Any],
    *,
    want_seq: int,
    claimed: tuple[UUID, ...] = (),
    confirmed: Mapping[UUID, int] | None = None,
    refused: tuple[UUID, ...] = (),
    attempts: int = 0,
) -> Work:
    """Make Work from a row with the columns of a document, its access set and its manifest (its content hash is called
    ``manifest_hash``)."""
    manifest = None
    if row["manifest_hash"] is not None:
        manifest = Manifest(
            row["manifest_hash"],
            tuple(row["chunk_ids"]),
            tuple(tuple((start, end) for start, end in spans) for spans in row["spans"]),
            tuple(row["token_counts"]),
            tuple(tuple(path) for path in row["headings"]),
        )
    return Work(
        identity=Identity(row["id"], row["tenant"], row["source"], row["external_id"]),
        want_seq=want_seq,
        searchable=bool(row["alive"] and row["acl_tags"]),
        content_hash=row["content_hash"],
        access_id=row["access_id"],
        acl_tags=tuple(row["acl_tags"] or ()),
        required_tags=tuple(row["required_tags"] or ()),
        title=row["title"] or "",
        source_url=row["source_url"],
        author=row["author"],
        media_type=row["media_type"] or "text/plain",
        source_modified_at=row["source_modified_at"],
        keys=tuple(row["keys"]),
        manifest=manifest,
        lane=row["lane"],
        claimed=claimed,
        confirmed=confirmed or {},
        refused=refused,
        attempts=attempts,
    )


async def bodies(connection: Connection, works: Collection[Work]) -> dict[UUID, tuple[str, dict[str, object]]]:
    """The normalised texts and the metadata of these documents. A document that has changed since it was loaded is
    absent, because its spans do not fit the new text. So is one whose stored text does not have its content hash: the
    audit reports such damage, and nothing is made from it."""
    hashes = {w.identity.id: w.content_hash for w in works}
    cursor = await connection.execute(
        "SELECT b.document_id, b.text, b.metadata, d.content_hash FROM document_bodies b"
        " JOIN documents d ON d.id = b.document_id WHERE b.document_id = ANY(%s)",
        [list(hashes)],
    )
    return {
        id_: (text, data)
        for id_, text, data, digest in await cursor.fetchall()
        if digest == hashes[id_] and content_hash(text) == digest
    }


async def lock_wants(connection: Connection, generation: str, store: Store, ids: Sequence[UUID]) -> dict[UUID, int]:
    """Lock these documents' states in this store, and return each one's want_seq; none for a retired generation.

    Law: until the transaction ends nothing newer is accepted for these documents, and the generation is not retired. If
    it were retired meanwhile, its want_seq would no longer follow the document, and its writes would be wrong in a
    table or index that it shares with another generation. For keywords the states of all generations that share the
    index are locked (in detect's order: by generation, then document), because they are claimed and reopened together.
    """
    await keep_unchanged(connection)
    cursor = await connection.execute(
        f"""
        SELECT s.document_id, s.want_seq, s.generation FROM index_state s
        WHERE s.document_id = ANY(%(ids)s) AND s.store = %(store)s
          AND (s.generation = %(generation)s OR s.store = 'keywords') AND s.generation IN ({_SHARING})
        ORDER BY s.generation, s.document_id FOR UPDATE OF s
        """,  # noqa: S608 — constants of this module
        {"generation": generation, "store": store, "ids": list(ids)},
    )
    return {id_: want for id_, want, name in await cursor.fetchall() if name == generation}


_SHARING = """SELECT g.name FROM generations g JOIN generations mine ON mine.name = %(generation)s
    WHERE g.state <> 'retired' AND (g.name = mine.name OR g.keyword_index = mine.keyword_index)"""
"""This generation and the others that use its index, without retired ones."""


async def settle_vectors(
    connection: Connection, generation: str, reached: Sequence[tuple[UUID, int, Sequence[UUID], int, str | None]]
) -> None:
    """Record that the table holds the desired state ``seq`` of documents: (document, seq, refused chunks, number of
    newly embedded chunks, error or None)."""
    await connection.cursor().executemany(
        "UPDATE index_state SET seq = %s, settled_at = clock_timestamp(), refused = %s, written = written + %s,"
        " attempts = 0, error = %s WHERE document_id = %s AND generation = %s AND store = 'vectors'",
        [(seq, list(refused), embedded, error, id_, generation) for id_, seq, refused, embedded, error in reached],
    )


async def vectors_expected(
    connection: Connection, generation: str, ids: Sequence[UUID], *, within_seconds: float
) -> set[UUID]:
    """Those of these documents whose vectors have been pending for at most ``within_seconds`` and have not failed."""
    if not ids:
        return set()
    cursor = await connection.execute(
        "SELECT document_id FROM index_state WHERE document_id = ANY(%s) AND generation = %s AND store = 'vectors'"
        " AND seq < want_seq AND attempts = 0 AND pending_since > clock_timestamp() - make_interval(secs => %s)",
        [list(ids), generation, within_seconds],
    )
    return {id_ for (id_,) in await cursor.fetchall()}


async def reopen_for_vectors(
    connection: Connection, generation: str, ids: Sequence[UUID], *, again_in_seconds: float
) -> list[PendingWork]:
    """Make the keyword entries of documents pending whose rows were written, because they carry the vectors; returns
    all of these documents. again_in_seconds: how long the sweeper leaves them to their hints.

    The caller is in the transaction that settles the vectors, and locks the states in detect's order.
    """
    cursor = await connection.execute(
        """
        WITH locked AS (
            SELECT document_id FROM index_state
            WHERE document_id = ANY(%(ids)s) AND generation = %(generation)s AND store = 'keywords'
            ORDER BY document_id FOR UPDATE
        )
        UPDATE index_state s SET seq = least(s.seq, s.want_seq - 1),
            pending_since = CASE WHEN s.seq < s.want_seq THEN s.pending_since ELSE clock_timestamp() END,
            next_at = CASE WHEN s.seq < s.want_seq THEN s.next_at
                ELSE clock_timestamp() + make_interval(secs => %(again)s) END
        FROM locked JOIN documents d ON d.id = locked.document_id
        WHERE s.document_id = d.id AND s.generation = %(generation)s AND s.store = 'keywords'
        RETURNING d.id, d.tenant, d.source, d.external_id, d.lane
        """,
        {"ids": list(ids), "generation": generation, "again": again_in_seconds},
    )
    return [
        PendingWork(Identity(id_, tenant, source, external_id), generation, lane)
        for id_, tenant, source, external_id, lane in await cursor.fetchall()
    ]


async def claim(
    connection: Connection, generation: str, claims: Sequence[tuple[UUID, int, Sequence[UUID]]]
) -> set[UUID]:
    """Claim documents before Elasticsearch is written to: (document, want_seq, all chunks to be written or deleted).

    From now on these entries may be in the index in any form, so they become claimed, and are no longer confirmed.
    Skips the documents for which something newer was accepted; returns the others' ids.
    """
    wants = await lock_wants(connection, generation, "keywords", [id_ for id_, _, _ in claims])
    still = [(id_, chunk_ids) for id_, want_seq, chunk_ids in claims if wants.get(id_) == want_seq]
    await connection.cursor().executemany(
        f"UPDATE index_state s SET {_CLAIMED} {_OF_ALL}",  # noqa: S608 — constants of this module
        [{"ids": list(chunk_ids), "document": id_, "generation": generation} for id_, chunk_ids in still],
    )
    return {id_ for id_, _ in still}


_REMAINING = """SELECT coalesce(array_agg(c.{column} ORDER BY c.n), '{{}}')
    FROM unnest(s.confirmed, s.confirmed_hashes) WITH ORDINALITY AS c (id, hash, n)
    WHERE c.id <> ALL (%(ids)s::uuid[])"""
_CLAIMED = f"""
    claimed = ARRAY(SELECT unnest(s.claimed) UNION SELECT unnest(%(ids)s::uuid[])),
    confirmed = ({_REMAINING.format(column="id")}), confirmed_hashes = ({_REMAINING.format(column="hash")})
"""
_OF_ALL = f"WHERE s.document_id = %(document)s AND s.store = 'keywords' AND s.generation IN ({_SHARING})"
"""The states of a document in all generations that share an index. Each of them must know the entries that may be in
the index, because it may be the one that remains when the others are retired. The caller has locked the rows.
(``builds.fill`` copies rows under the same lock, so none is missed.)"""


async def confirm_keywords(
    connection: Connection, generation: str, reached: Sequence[tuple[UUID, int, Mapping[UUID, int], int]]
) -> None:
    """Record, after a refresh, that the index holds exactly these entries of documents: (document, seq, hashes by
    chunk, number of entries written). The caller has locked the rows and seen that want_seq = seq.
    """
    await connection.cursor().executemany(
        "UPDATE index_state SET seq = %s, settled_at = clock_timestamp(), claimed = %s, confirmed = %s,"
        " confirmed_hashes = %s, written = written + %s, attempts = 0, error = NULL"
        " WHERE document_id = %s AND generation = %s AND store = 'keywords'",
        [
            (seq, list(entries), list(entries), list(entries.values()), written, id_, generation)
            for id_, seq, entries, written in reached
        ],
    )


async def reopen_keywords(
    connection: Connection, generation: str, late: Sequence[tuple[UUID, int, Sequence[UUID]]]
) -> None:
    """Make documents pending again for which something newer was accepted while we wrote: (document, our seq, chunks
    that we wrote or deleted). Our operations may have been applied after those of the worker that wrote the newer
    state, so the chunks become claimed again and lose their confirmation, and the document converges once more."""
    await connection.cursor().executemany(
        f"UPDATE index_state s SET {_CLAIMED}, seq = least(s.seq, %(seq)s) {_OF_ALL}",  # noqa: S608 — constants of this module
        [{"ids": list(ids), "seq": seq, "document": id_, "generation": generation} for id_, seq, ids in late],
    )


async def raise_want(connection: Connection, generation: str, store: Store, document: UUID, above: int) -> int:
    """Draw a sequence number above ``above`` for one document, which only this store has to reach; returns it.

    The index can hold a version that is ahead of the ledger: after the ledger was restored from a backup, or from a
    delete that Elasticsearch remembers.
    """
    cursor = await connection.execute("SELECT seq FROM documents WHERE id = %s FOR UPDATE", [document])
    await cursor.fetchone()
    cursor = await connection.execute(
        # An announced document stays announced, because readers see no change, and freshness must not count a repair.
        "UPDATE documents d SET seq = drawn.seq,"
        " announced_seq = CASE WHEN d.announced_seq = d.seq THEN drawn.seq ELSE d.announced_seq END"
        " FROM (SELECT greatest(nextval('ledger_seq'), seq + 1, %s + 1) AS seq FROM documents WHERE id = %s) drawn"
        " WHERE d.id = %s RETURNING d.seq",
        [above, document, document],
    )
    row = await cursor.fetchone()
    seq = int(row[0]) if row else above + 1
    await connection.execute(
        "UPDATE index_state SET want_seq = %s,"
        " pending_since = CASE WHEN seq < want_seq THEN pending_since ELSE clock_timestamp() END"
        " WHERE document_id = %s AND generation = %s AND store = %s",
        [seq, document, generation, store],
    )
    return seq


async def set_aside(
    connection: Connection, generation: str, store: Store, document: UUID, *, error: str, retry_in_seconds: float
) -> None:
    """Record that a document failed in a store while others succeed. The sweeper hints it again after
    ``retry_in_seconds``."""
    await connection.execute(
        "UPDATE index_state SET attempts = attempts + 1, error = %s,"
        " next_at = clock_timestamp() + make_interval(secs => %s)"
        " WHERE document_id = %s AND generation = %s AND store = %s",
        [error[:500], retry_in_seconds, document, generation, store],
    )


async def put_off(
    connection: Connection,
    generation: str,
    store: Store,
    document: UUID,
    *,
    reason: str,
    least_seconds: float,
    most_seconds: float,
) -> None:
    """Record why a document is still pending in a store, which is no failure of it. The sweeper hints it again after as
    long as it has been pending, within these bounds."""
    await connection.execute(
        "UPDATE index_state SET error = %s, next_at = clock_timestamp() + least(make_interval(secs => %s),"
        " greatest(make_interval(secs => %s), clock_timestamp() - pending_since))"
        " WHERE document_id = %s AND generation = %s AND store = %s AND seq < want_seq",
        [reason[:500], most_seconds, least_seconds, document, generation, store],
    )


async def pending(connection: Connection, generation: str, *, within_seconds: float, most: int) -> int:
    """The number of states of this generation that have been pending for at most ``within_seconds`` and have not
    failed, counted up to ``most``. What has been pending longer may wait for a store with an outage."""
    # Ordered, so that the index of what is pending is read: Postgres takes a third of all states for pending, and would
    # read the whole table, of which hardly any is.
    cursor = await connection.execute(
        "SELECT count(*) FROM (SELECT FROM index_state WHERE seq < want_seq AND attempts = 0 AND generation = %s"
        " AND pending_since > clock_timestamp() - make_interval(secs => %s) ORDER BY next_at LIMIT %s) waiting",
        [generation, within_seconds, most],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def is_live_late(connection: Connection, generation: str, seconds: float, *, at_most: float) -> bool:
    """Whether in some store the oldest pending live change that has not failed has been pending for at least this many
    seconds. A store where it is more than ``at_most`` seconds has an outage, and does not count."""
    cursor = await connection.execute(
        "SELECT FROM index_state s JOIN documents d ON d.id = s.document_id"
        " WHERE s.seq < s.want_seq AND s.attempts = 0 AND s.generation = %s AND d.lane = 'live' GROUP BY s.store"
        " HAVING clock_timestamp() - min(s.pending_since)"
        "  BETWEEN make_interval(secs => %s) AND make_interval(secs => %s)",
        [generation, seconds, at_most],
    )
    return await cursor.fetchone() is not None


async def pending_backfill(connection: Connection) -> dict[str, tuple[int, datetime]]:
    """By store: how many backfilled documents are pending in it, in the active generation and without having failed,
    and since when the oldest of them has been. A store without any is absent."""
    cursor = await connection.execute(
        "SELECT s.store, count(*), min(s.pending_since) FROM index_state s JOIN documents d ON d.id = s.document_id"
        " WHERE s.seq < s.want_seq AND s.attempts = 0 AND d.lane = 'backfill'"
        " AND s.generation = (SELECT name FROM generations WHERE state = 'active') GROUP BY s.store"
    )
    return {store: (count, since) for store, count, since in await cursor.fetchall()}


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Work that is due to be hinted again."""

    identity: Identity
    generation: str
    lane: Lane


async def due(connection: Connection, *, limit: int, again_in_seconds: float) -> list[PendingWork]:
    """Take pending work that is due, each (document, generation) once, and make it due again later: after
    again_in_seconds, or after as long as it has been pending already if that is more, so that work in a long queue is
    not hinted over and over.

    The statement compares with now(): with clock_timestamp() Postgres could not use the index, and would read all
    pending work each time.
    """
    cursor = await connection.execute(
        """
        WITH taken AS (
            SELECT document_id, generation, store FROM index_state
            WHERE seq < want_seq AND next_at <= now()
              AND generation IN (SELECT name FROM generations WHERE state <> 'retired')
            ORDER BY next_at LIMIT %s FOR UPDATE SKIP LOCKED
        ), put_off AS (
            UPDATE index_state s SET next_at = clock_timestamp()
                + greatest(make_interval(secs => %s), clock_timestamp() - s.pending_since)
            FROM taken t
            WHERE (s.document_id, s.generation, s.store) = (t.document_id, t.generation, t.store)
            RETURNING s.document_id, s.generation
        )
        SELECT DISTINCT d.id, d.tenant, d.source, d.external_id, p.generation, d.lane
        FROM put_off p JOIN documents d ON d.id = p.document_id
        """,
        [limit, again_in_seconds],
    )
    return [
        PendingWork(Identity(id_, tenant, source, external_id), generation, lane)
        for id_, tenant, source, external_id, generation, lane in await cursor.fetchall()
    ]
