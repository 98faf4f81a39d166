"""The sinks' side of the ledger: the desired state of documents, and recording how far a store has come."""

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
from pipeline.stores.postgres import GENERATIONS_LOCK, Connection


@dataclass(frozen=True, slots=True)
class Work:
    """One document for a sink: its desired state (as of ``want_seq``) and what this store confirmed before."""

    identity: Identity
    want_seq: int
    searchable: bool
    """It is alive and readable by somebody; otherwise the store shall hold nothing of it."""
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

    @property
    def chunk_ids(self) -> tuple[UUID, ...]:
        """The chunks that the store shall hold, in reading order."""
        return self.manifest.chunk_ids if self.searchable and self.manifest else ()

    @property
    def spans(self) -> dict[UUID, tuple[Span, ...]]:
        """The spans of each desired chunk in the text."""
        return dict(zip(self.chunk_ids, self.manifest.spans, strict=True)) if self.searchable and self.manifest else {}

    @property
    def needs_chunking(self) -> bool:
        """The manifest is missing or was cut from another text."""
        return self.searchable and (self.manifest is None or self.manifest.content_hash != self.content_hash)


_WORK = """
    SELECT d.id, d.tenant, d.source, d.external_id, s.want_seq, d.deleted_at IS NULL AND d.version IS NOT NULL AS alive,
        d.content_hash, d.access_id, a.acl_tags, a.required_tags, d.title, d.source_url, d.author, d.media_type,
        d.source_modified_at, d.lane, s.claimed, s.confirmed, s.confirmed_hashes, s.refused, s.attempts,
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
    """The work still to do for these documents, in the order of their ids; settled ones are absent, and so are all of a
    retired generation. One statement, so that the desired state and want_seq belong together."""
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
    """Work from the columns of a document, its access set and its manifest (whose hash is ``manifest_hash``)."""
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
        manifest=manifest,
        lane=row["lane"],
        claimed=claimed,
        confirmed=confirmed or {},
        refused=refused,
        attempts=attempts,
    )


async def bodies(connection: Connection, works: Collection[Work]) -> dict[UUID, tuple[str, dict[str, object]]]:
    """Normalised text and metadata of documents, as far as the text is still the one that their manifests were cut
    from: a document that changed since it was loaded is absent (its spans would cut the new text wrongly), and so is
    one whose stored text has rotted (nothing shall be made from that; the audit names it)."""
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
    """Lock these documents' states in this store and return their want_seq; of a retired generation there are none.
    Law: until the transaction ends nothing newer can be accepted for them, and the generation is not retired.

    Were it retired meanwhile, its want_seq would stand still, and what it then writes or deletes would be wrong in a
    table or index that a living generation shares. For keywords the states of all generations that share the index are
    locked (in detect's order: by generation, then document), because they are claimed and reopened together.
    """
    await connection.execute("SELECT pg_advisory_xact_lock_shared(%s)", [GENERATIONS_LOCK])
    cursor = await connection.execute(
        f"""
        SELECT s.document_id, s.want_seq, s.generation FROM index_state s
        WHERE s.document_id = ANY(%(ids)s) AND s.store = %(store)s
          AND (s.generation = %(generation)s OR s.store = 'keywords') AND s.generation IN ({_SHARING})
        ORDER BY s.generation, s.document_id FOR UPDATE OF s
        """,  # noqa: S608 — constants of this module
        {"generation": generation, "store": store, "ids": list(ids)},
    )
    return {id_: want for id_, want, of in await cursor.fetchall() if of == generation}


_SHARING = """SELECT g.name FROM generations g JOIN generations mine ON mine.name = %(generation)s
    WHERE g.state <> 'retired' AND (g.name = mine.name OR g.keyword_index = mine.keyword_index)"""
"""This generation and those that share its index, as far as they live."""


async def settle_vectors(
    connection: Connection, generation: str, reached: Sequence[tuple[UUID, int, Sequence[UUID], int, str | None]]
) -> None:
    """pgvector now equals the ledger for each (document, seq, refused chunk ids, newly embedded, error)."""
    await connection.cursor().executemany(
        "UPDATE index_state SET seq = %s, settled_at = clock_timestamp(), refused = %s, written = written + %s,"
        " attempts = 0, error = %s WHERE document_id = %s AND generation = %s AND store = 'vectors'",
        [(seq, list(refused), embedded, error, id_, generation) for id_, seq, refused, embedded, error in reached],
    )


async def claim(
    connection: Connection, generation: str, claims: Sequence[tuple[UUID, int, Sequence[UUID]]]
) -> set[UUID]:
    """Before writing to Elasticsearch, for each (document, want_seq, ids of all chunks to be written or deleted): they
    may stand there in any form from now on, so they become claimed and are confirmed no more. Skips a document whose
    want_seq has moved; returns those that were claimed."""
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
"""The entries that may stand in an index are known to every generation that shares it: one of them goes on when the
other retires. The caller has locked the rows. (builds.fill copies rows under the same lock, so none is missed.)"""


async def confirm_keywords(
    connection: Connection, generation: str, reached: Sequence[tuple[UUID, int, Mapping[UUID, int], int]]
) -> None:
    """After a refresh: Elasticsearch holds exactly these entries, for each (document, seq, chunk → hash, written).

    The caller holds the rows' locks and has seen want_seq = seq.
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
    """Our operations may have landed after those of a newer worker: for each (document, our seq, ids that we wrote or
    deleted) put the ids back into claimed, forget their confirmation and lower the reached seq: the document converges
    again."""
    await connection.cursor().executemany(
        f"UPDATE index_state s SET {_CLAIMED}, seq = least(s.seq, %(seq)s) {_OF_ALL}",  # noqa: S608 — constants of this module
        [{"ids": list(ids), "seq": seq, "document": id_, "generation": generation} for id_, seq, ids in late],
    )


async def raise_want(connection: Connection, generation: str, store: Store, document: UUID, above: int) -> int:
    """Draw a new sequence number above ``above`` for one document, wanted by this store alone; returns it.

    Elasticsearch can be ahead of a ledger restored from a backup, or remember a tombstone's version.
    """
    cursor = await connection.execute("SELECT seq FROM documents WHERE id = %s FOR UPDATE", [document])
    await cursor.fetchone()
    cursor = await connection.execute(
        # What was announced stays announced: nothing changed for anybody, and freshness counts no repair.
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
    """One document failed while others succeed: set it aside with its reason; the sweeper brings it back."""
    await connection.execute(
        "UPDATE index_state SET attempts = attempts + 1, error = %s,"
        " next_at = clock_timestamp() + make_interval(secs => %s)"
        " WHERE document_id = %s AND generation = %s AND store = %s",
        [error[:500], retry_in_seconds, document, generation, store],
    )


async def pending(connection: Connection, generation: str, *, within_seconds: float, most: int) -> int:
    """Waits of this generation's documents for a store that began no longer ago than that and have not failed, counted
    no further than ``most``. What waits longer may wait for a store that is away."""
    cursor = await connection.execute(
        "SELECT count(*) FROM (SELECT FROM index_state WHERE seq < want_seq AND attempts = 0 AND generation = %s"
        " AND pending_since > clock_timestamp() - make_interval(secs => %s) LIMIT %s) waiting",
        [generation, within_seconds, most],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def is_live_late(connection: Connection, generation: str, seconds: float, *, at_most: float) -> bool:
    """Whether the live change that has waited longest for a store, without having failed, has done so for more than so
    many seconds. A store where it is more than ``at_most`` is away, and does not count."""
    cursor = await connection.execute(
        "SELECT FROM index_state s JOIN documents d ON d.id = s.document_id"
        " WHERE s.seq < s.want_seq AND s.attempts = 0 AND s.generation = %s AND d.lane = 'live' GROUP BY s.store"
        " HAVING clock_timestamp() - min(s.pending_since)"
        "  BETWEEN make_interval(secs => %s) AND make_interval(secs => %s)",
        [generation, seconds, at_most],
    )
    return await cursor.fetchone() is not None


async def pending_backfill(connection: Connection) -> dict[str, tuple[int, datetime]]:
    """store → how many documents that came by backfill wait for it, in the active generation and without having failed,
    and since when the first of them does. A store that none waits for is absent."""
    cursor = await connection.execute(
        "SELECT s.store, count(*), min(s.pending_since) FROM index_state s JOIN documents d ON d.id = s.document_id"
        " WHERE s.seq < s.want_seq AND s.attempts = 0 AND d.lane = 'backfill'"
        " AND s.generation = (SELECT name FROM generations WHERE state = 'active') GROUP BY s.store"
    )
    return {store: (count, since) for store, count, since in await cursor.fetchall()}


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Work that stayed pending past its time."""

    identity: Identity
    generation: str
    lane: Lane


async def due(connection: Connection, *, limit: int, again_in_seconds: float) -> list[PendingWork]:
    """Take pending work whose time has come, each (document, generation) once, and put it off: by again_in_seconds, or
    by as long as it has been pending already (what waits in a long queue is not hinted over and over).

    now() and not clock_timestamp(), which no index can be asked for: all that is pending would be read every time.
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
