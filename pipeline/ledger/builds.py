"""Building a non-active generation: begin, fill page by page, wait for the sinks, then cut over or give up.

A build *replaces* some stores, and *shares* the others with the generation that it starts from (its origin): a rebuild
of keywords has a new index and the origin's chunk table; a new model has both new. Live changes reach a build from its
beginning, because detect and the sinks serve every generation that is not retired. ``generation_tables`` removes what
was replaced. The reasons are in docs/adr/0011-rebuild-as-a-generation.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from psycopg import sql

from pipeline.core.errors import Misconfigured
from pipeline.core.model import STORES, Generation, Store
from pipeline.ledger import generations
from pipeline.ledger.documents import Identity
from pipeline.stores import vectors
from pipeline.stores.postgres import Connection, point_readers_at

FOLLOWED_SECONDS = 60.0
"""Live work that has been pending for less than this does not delay the cut-over: on a busy system some always is."""
LOCK_WAIT = "5s"
"""How long to wait for the lock of the view or table. All other readers wait behind us, so a slow reader must not delay
them for longer."""


@dataclass(frozen=True, slots=True)
class Build:
    """A generation that is being built, and how far it is."""

    generation: Generation
    origin: Generation
    replaces: frozenset[Store]
    filled: int
    """The number of documents that ``fill`` has added."""
    filled_at: datetime | None
    """When ``fill`` had added all documents."""
    ready_at: datetime | None
    """When both stores and the graph were complete, which permits the cut-over."""

    @property
    def same_chunks(self) -> bool:
        """Whether both generations chunk and embed in the same way. Then manifests, and vectors of equal chunk ids, are
        copied from the origin."""
        mine, theirs = self.generation, self.origin
        return (mine.model, mine.revision, mine.dimensions, mine.vector_type, mine.document_prefix, mine.params) == (
            theirs.model,
            theirs.revision,
            theirs.dimensions,
            theirs.vector_type,
            theirs.document_prefix,
            theirs.params,
        )


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Documents of a build that are pending in its replaced stores, counted once for each store."""

    pending: int
    failed: int
    """Pending documents that were set aside after a failure."""
    holding: int
    """Pending documents that delay the cut-over: all but live work that has been pending for less than
    FOLLOWED_SECONDS; with ``before``, that work too if it was pending at that time."""
    early: int
    """Pending documents that were pending at the time ``before``, and have neither failed nor been put off."""
    held: int
    """The same as ``holding``, but a document that is pending in both stores counts once."""
    put_off: int
    """Documents of ``holding`` whose text alone the model defers (429), while it answers others."""


async def next_name(connection: Connection) -> str:
    """The name of the next generation: ``g2`` after ``g1``. A name is never used twice."""
    numbers = [int(g.name[1:]) for g in await generations.every(connection) if g.name[1:].isdecimal()]
    return f"g{max(numbers, default=0) + 1}"


async def begin(connection: Connection, generation: Generation, origin: Generation) -> Build:
    """Begin a build. Its table and index must exist: the origin's where they are shared, empty ones where they are
    replaced. From now on every accepted change reaches it. Raises Misconfigured when another build is in progress, or
    the origin is not the active generation."""
    replaces = [
        store
        for store, mine, theirs in (
            ("vectors", generation.chunk_table, origin.chunk_table),
            ("keywords", generation.keyword_index, origin.keyword_index),
        )
        if mine != theirs
    ]
    async with connection.transaction():
        await generations.lock_for_change(connection)
        if (other := await under_way(connection)) is not None:
            raise Misconfigured(occupied(other))
        if (await generations.active(connection)).name != origin.name:
            raise Misconfigured(f"generation {origin.name} is not the active one any more: run the command again")
        await generations.add(connection, generation)
        if generations.same_model(generation, origin):
            await connection.execute(
                "UPDATE generations g SET reference = o.reference, centre = CASE WHEN g.centred THEN o.centre END"
                " FROM generations o WHERE o.name = %s AND g.name = %s",
                [origin.name, generation.name],
            )
        await connection.execute(
            "INSERT INTO builds (generation, origin, replaces) VALUES (%s, %s, %s)",
            [generation.name, origin.name, replaces],
        )
    build = await under_way(connection)
    assert build is not None
    return build


async def under_way(connection: Connection) -> Build | None:
    """The build that has begun and has neither been cut over nor given up; None: there is none."""
    cursor = await connection.execute(
        "SELECT b.generation, b.origin, b.replaces, b.filled, b.filled_at, b.ready_at"
        " FROM builds b JOIN generations g ON g.name = b.generation WHERE g.state = 'building'"
    )
    row = await cursor.fetchone()
    if row is None:
        return None
    by_name = {g.name: g for g in await generations.every(connection)}
    return Build(by_name[row[0]], by_name[row[1]], frozenset(row[2]), *row[3:])


def occupied(other: Build) -> str:
    """The message that says why no other build can begin, and what to do."""
    name, [store, *more] = other.generation.name, sorted(other.replaces)
    if more:
        return (
            f"generation {name} is being built: finish it (`penstock generation build --wait`, then `cutover`), or give"
            f" it up with `penstock generation retire {name}`"
        )
    return f"generation {name} is being built (new {store}): finish that first, with `penstock rebuild {store}`"


async def add_tokens(connection: Connection, generation: str, tokens: int) -> None:
    """Count tokens that the workers sent to the model of a build."""
    await connection.execute("UPDATE builds SET tokens = tokens + %s WHERE generation = %s", [tokens, generation])


async def tokens(connection: Connection, build: Build) -> int:
    """The tokens that the build's model has read so far."""
    cursor = await connection.execute("SELECT tokens FROM builds WHERE generation = %s", [build.generation.name])
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def mark_ready(connection: Connection, build: Build) -> None:
    """Record that both stores and the graph are complete. Repeats are harmless."""
    await connection.execute(
        "UPDATE builds SET ready_at = coalesce(ready_at, clock_timestamp()) WHERE generation = %s",
        [build.generation.name],
    )


async def give_up(connection: Connection, name: str) -> None:
    """Retire a build that was never cut over; ``clear`` removes what it made."""
    async with connection.transaction():
        await generations.lock_for_change(connection)
        await connection.execute(
            "UPDATE generations SET state = 'retired', since = clock_timestamp()"
            " WHERE name = %s AND state = 'building'",
            [name],
        )


async def moment(connection: Connection) -> datetime:
    """The present time on the ledger's clock."""
    row = await (await connection.execute("SELECT clock_timestamp()")).fetchone()
    assert row is not None
    return row[0]  # type: ignore[no-any-return]


async def outstanding(connection: Connection, build: Build, *, before: datetime | None = None) -> Outstanding:
    """Count the documents that are pending in the replaced stores, which is cheap while they are few. before: the time
    that ``early`` and ``holding`` refer to."""
    cursor = await connection.execute(
        """
        SELECT count(*), count(*) FILTER (WHERE s.attempts > 0), count(*) FILTER (WHERE h.holding),
            count(*) FILTER (WHERE s.attempts = 0 AND s.error IS NULL AND s.pending_since <= %s::timestamptz),
            count(DISTINCT s.document_id) FILTER (WHERE h.holding),
            count(*) FILTER (WHERE h.holding AND s.attempts = 0 AND s.error IS NOT NULL)
        FROM index_state s JOIN builds b ON b.generation = s.generation
        CROSS JOIN LATERAL (SELECT s.attempts > 0 OR b.filled_at IS NULL OR s.pending_since <= b.filled_at
            OR s.pending_since < clock_timestamp() - make_interval(secs => %s)
            OR coalesce(s.pending_since <= %s::timestamptz, false)) h (holding)
        WHERE s.generation = %s AND s.store = ANY (b.replaces) AND s.seq < s.want_seq
        """,
        [before, FOLLOWED_SECONDS, before, build.generation.name],
    )
    row = await cursor.fetchone()
    assert row is not None
    return Outstanding(*row)


async def retry_failures(connection: Connection, build: Build) -> None:
    """Make the documents that failed, or were put off, in an earlier run be tried again."""
    await connection.execute(
        "UPDATE index_state SET attempts = 0, error = NULL WHERE generation = %s AND seq < want_seq"
        " AND (attempts > 0 OR error IS NOT NULL)",
        [build.generation.name],
    )


async def leave_out(connection: Connection, build: Build) -> int:
    """Have the workers bring the documents that failed in the build's vectors, or were put off, into it without the
    passages that its table lacks, as if the model had refused these. Returns the number of documents; none where the
    table has no row, because then the model, not a text, is at fault. Nor is one counted, or tried again, that failed
    without these passages, too: it fails for another reason."""
    cursor = await connection.execute(
        sql.SQL(
            """
            WITH locked AS (
                SELECT document_id, generation, store FROM index_state
                WHERE generation = %s AND store = 'vectors' AND seq < want_seq AND (attempts > 0 OR error IS NOT NULL)
                  AND EXISTS (SELECT FROM {table})
                ORDER BY document_id FOR UPDATE
            )
            UPDATE index_state s SET attempts = 0, error = NULL, next_at = clock_timestamp(), refused = lacking.ids
            FROM locked JOIN manifests m USING (document_id, generation) CROSS JOIN LATERAL (SELECT
                ARRAY(SELECT i FROM unnest(m.chunk_ids) i WHERE NOT EXISTS (SELECT FROM {table} c WHERE c.id = i)) ids
            ) lacking
            WHERE (s.document_id, s.generation, s.store) = (locked.document_id, locked.generation, locked.store)
              AND NOT (s.refused @> lacking.ids AND s.refused <@ lacking.ids)
            """
        ).format(table=sql.Identifier(build.generation.chunk_table)),
        [build.generation.name],
    )
    return cursor.rowcount


async def pending(connection: Connection, build: Build, *, limit: int) -> list[Identity]:
    """At most ``limit`` documents that are pending in a store and have not failed."""
    cursor = await connection.execute(
        "SELECT DISTINCT d.id, d.tenant, d.source, d.external_id FROM index_state s"
        " JOIN documents d ON d.id = s.document_id WHERE s.generation = %s AND s.seq < s.want_seq"
        " AND s.attempts = 0 LIMIT %s",
        [build.generation.name, limit],
    )
    return [Identity(*row) for row in await cursor.fetchall()]


async def failures(
    connection: Connection, build: Build, *, limit: int
) -> tuple[int, list[tuple[Identity, Store, str]]]:
    """The number of documents, in each store, that were set aside or put off, and at most ``limit`` of them with the
    store and the reason."""
    cursor = await connection.execute(
        "SELECT d.id, d.tenant, d.source, d.external_id, s.store, coalesce(s.error, ''), count(*) OVER ()"
        " FROM index_state s"
        " JOIN builds b ON b.generation = s.generation JOIN documents d ON d.id = s.document_id"
        " WHERE s.generation = %s AND s.store = ANY (b.replaces) AND s.seq < s.want_seq"
        " AND (s.attempts > 0 OR s.error IS NOT NULL) ORDER BY d.id LIMIT %s",
        [build.generation.name, limit],
    )
    rows = await cursor.fetchall()
    return rows[0][-1] if rows else 0, [(Identity(*row[:4]), row[4], row[5]) for row in rows]


async def cut_over(
    connection: Connection, build: Build, *, before: datetime | None = None, keep_origin: bool = False
) -> int:
    """Make the build the active generation, and let the readers' view show it, in one transaction. The generation that
    was active is retired; with ``keep_origin`` it becomes the previous one, and an older previous one is retired.

    before: work that was pending at this time delays the cut-over, however short a time it has been pending: queries
    find such a document in the present generation, and must find it in the new one. Returns 0 when the build is active
    now (or was already), otherwise the number of documents that delay the cut-over, in which case nothing was changed.
    Raises Misconfigured when the build is not complete, or when it shares a store with its origin and the origin is not
    active any more; Retryable (by ``translated``) when a reader keeps the view locked for LOCK_WAIT.
    """
    async with changing(connection):
        active = await generations.active(connection)
        if active.name == build.generation.name:
            return 0
        if active.name != build.origin.name and len(build.replaces) < len(STORES):
            raise Misconfigured(
                f"generation {active.name} became active while {build.generation.name} was built from"
                f" {build.origin.name}: nothing was swapped"
            )
        cursor = await connection.execute(
            "SELECT filled_at, ready_at FROM builds WHERE generation = %s", [build.generation.name]
        )
        filled_at, ready_at = await cursor.fetchone() or (None, None)
        if filled_at is None or (keep_origin and ready_at is None):
            raise Misconfigured(f"generation {build.generation.name} is not complete yet: nothing was swapped")
        if held := (await outstanding(connection, build, before=before)).held:
            return held
        await make_active(connection, build.generation, active, keep=keep_origin)
    return 0


@asynccontextmanager
async def changing(connection: Connection) -> AsyncIterator[None]:
    """A transaction that locks the list of generations."""
    async with connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT}'")
        await generations.lock_for_change(connection)
        yield


async def make_active(connection: Connection, new: Generation, old: Generation, *, keep: bool) -> None:
    """Switch vectors, keywords and the queries' model to the new generation together. keep: the old one becomes the
    previous one, for a rollback, instead of being retired. The caller is inside ``changing``."""
    if keep:
        await connection.execute(
            "UPDATE generations SET state = 'retired', since = clock_timestamp()"
            " WHERE state = 'previous' AND name <> %s",
            [new.name],
        )
    # At most one generation may be active and one previous at any time, so the order of these updates matters.
    for name, state in ((new.name, "building"), (old.name, "previous" if keep else "retired"), (new.name, "active")):
        await connection.execute(
            "UPDATE generations SET state = %s, since = clock_timestamp() WHERE name = %s", [state, name]
        )
    await point_readers_at(connection, new)


@dataclass(frozen=True, slots=True)
class Page:
    """The result of one call of ``fill``."""

    documents: int
    """The number of documents added; 0: all were added before."""
    pending: tuple[Identity, ...] = ()
    """Those of them that a sink has to write."""


async def next_token_counts(connection: Connection, build: Build, *, limit: int) -> list[int]:
    """The token counts of the documents that ``fill`` adds next, in its order, according to the origin's manifests."""
    cursor = await connection.execute(
        "SELECT coalesce((SELECT sum(t) FROM unnest(m.token_counts) t), 0)::bigint FROM documents d"
        " LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = %s"
        " WHERE d.id > (SELECT position FROM builds WHERE generation = %s) ORDER BY d.id LIMIT %s",
        [build.origin.name, build.generation.name, limit],
    )
    return [tokens for (tokens,) in await cursor.fetchall()]


async def fill(connection: Connection, build: Build, *, limit: int, grace_seconds: float) -> Page:
    """Add the next ``limit`` documents to the build, in one transaction that also records the position, so that the
    next call continues after a crash. grace_seconds: how long the sweeper leaves them to the hints.

    Under the documents' locks nothing newer is accepted for them, and a row that detect wrote meanwhile is not changed.
    """
    async with connection.transaction():
        await generations.keep_unchanged(connection)
        cursor = await connection.execute(
            "SELECT id, tenant, source, external_id FROM documents"
            " WHERE id > (SELECT position FROM builds WHERE generation = %s) ORDER BY id LIMIT %s FOR NO KEY UPDATE",
            [build.generation.name, limit],
        )
        documents = [Identity(*row) for row in await cursor.fetchall()]
        if not documents:
            await connection.execute(
                "UPDATE builds SET filled_at = coalesce(filled_at, clock_timestamp()) WHERE generation = %s",
                [build.generation.name],
            )
            return Page(0)
        ids = [d.id for d in documents]
        names = {
            "ids": ids,
            "new": build.generation.name,
            "old": build.origin.name,
            "grace": grace_seconds,
            "count": len(ids),
            "last": ids[-1],
        }
        if build.same_chunks:
            await connection.execute(_COPY_MANIFESTS, names)
        for store in STORES:
            if store in build.replaces:
                cursor = await connection.execute(_WANT, names | {"store": store})
                fresh = [id_ for (id_,) in await cursor.fetchall()]
                if store == "vectors" and build.same_chunks:
                    await _copy_vectors(connection, build, ids, fresh)
            else:
                await connection.execute(_SHARE, names | {"store": store})
        await connection.execute(
            "UPDATE builds SET position = %(last)s, filled = filled + %(count)s WHERE generation = %(new)s", names
        )
        cursor = await connection.execute(
            "SELECT DISTINCT document_id FROM index_state"
            " WHERE document_id = ANY(%(ids)s) AND generation = %(new)s AND seq < want_seq",
            names,
        )
        pending = {id_ for (id_,) in await cursor.fetchall()}
    return Page(len(documents), tuple(d for d in documents if d.id in pending))


_COPY_MANIFESTS = """
    INSERT INTO manifests (document_id, generation, content_hash, chunk_ids, token_counts, spans, headings)
    SELECT document_id, %(new)s, content_hash, chunk_ids, token_counts, spans, headings
    FROM manifests WHERE generation = %(old)s AND document_id = ANY(%(ids)s)
    ON CONFLICT DO NOTHING
"""
_SEARCHABLE = "d.deleted_at IS NULL AND d.version IS NOT NULL AND coalesce(cardinality(a.acl_tags), 0) > 0"
_WANT = f"""
    INSERT INTO index_state (document_id, generation, store, want_seq, seq, settled_at, pending_since, next_at)
    SELECT d.id, %(new)s, %(store)s, d.seq, CASE WHEN {_SEARCHABLE} THEN 0 ELSE d.seq END,
        CASE WHEN {_SEARCHABLE} THEN NULL ELSE clock_timestamp() END, clock_timestamp(),
        clock_timestamp() + make_interval(secs => %(grace)s)
    FROM documents d LEFT JOIN access_sets a ON a.id = d.access_id
    WHERE d.id = ANY(%(ids)s) AND d.seq > 0
    ORDER BY d.id
    ON CONFLICT DO NOTHING RETURNING document_id
"""  # noqa: S608 — constants of this module
"""The states in a replaced store: every document is pending, except those that nobody may read."""
_SHARE = """
    INSERT INTO index_state AS mine (document_id, generation, store, want_seq, seq, settled_at, pending_since, next_at,
        claimed, confirmed, confirmed_hashes, refused, attempts, error)
    SELECT document_id, %(new)s, store, want_seq, seq, settled_at, pending_since,
        greatest(next_at, clock_timestamp() + make_interval(secs => %(grace)s)),
        claimed, confirmed, confirmed_hashes, refused, attempts, error
    FROM (
        SELECT * FROM index_state WHERE generation = %(old)s AND store = %(store)s AND document_id = ANY(%(ids)s)
        ORDER BY document_id FOR UPDATE
    ) theirs
    ON CONFLICT (document_id, generation, store) DO UPDATE SET
        claimed = ARRAY(SELECT unnest(mine.claimed) UNION SELECT unnest(excluded.claimed)),
        seq = least(mine.seq, mine.want_seq - 1), next_at = excluded.next_at
    WHERE NOT mine.claimed @> excluded.claimed
"""
"""The states in a shared store: copies of the origin's, made under a lock, so that no document is further here than
there. Where detect has already added a state, only the origin's claimed entries are added to it, so that they are
deleted if they are not desired."""


async def _copy_vectors(connection: Connection, build: Build, ids: list[UUID], fresh: list[UUID]) -> None:
    """Copy the origin's rows of desired chunks, and confirm the ``fresh`` documents that then have all their rows.
    fresh: documents whose state this transaction has added, so that no sink has written rows for them."""
    if not await table_exists(connection, build.origin.chunk_table):
        return
    tables = {
        "new": sql.Identifier(build.generation.chunk_table),
        "old": sql.Identifier(build.origin.chunk_table),
        "wanted": sql.SQL(_SEARCHABLE),
    }
    names = {"ids": ids, "fresh": fresh, "generation": build.generation.name}
    cursor = await connection.execute(
        sql.SQL(
            """
            SELECT c.id, d.access_id
            FROM {old} c
            JOIN documents d ON d.id = c.document_id
            JOIN access_sets a ON a.id = d.access_id
            JOIN manifests m ON m.document_id = d.id AND m.generation = %(generation)s
            WHERE c.document_id = ANY(%(ids)s) AND c.id = ANY (m.chunk_ids) AND m.content_hash = d.content_hash
              AND {wanted}
            """
        ).format(**tables),
        names,
    )
    await vectors.copy(connection, build.origin, build.generation, dict(await cursor.fetchall()))
    await connection.execute(
        sql.SQL(
            """
            UPDATE index_state s SET seq = s.want_seq, settled_at = clock_timestamp()
            FROM documents d JOIN manifests m ON m.document_id = d.id AND m.generation = %(generation)s
            WHERE s.document_id = ANY(%(fresh)s) AND s.generation = %(generation)s AND s.store = 'vectors'
              AND d.id = s.document_id AND m.content_hash = d.content_hash AND s.seq < s.want_seq
              AND cardinality(m.chunk_ids) = (SELECT count(*) FROM {new} c WHERE c.document_id = d.id)
            """
        ).format(**tables),
        names,
    )


async def origin_vectors(
    connection: Connection, generation: str, chunks: Collection[UUID]
) -> list[tuple[UUID, str, list[float]]]:
    """(chunk, text, vector) of those of these chunks that the origin's table has, if both generations use the same
    model. So a document that changes before ``fill`` adds it costs only the embeddings of its new chunks."""
    cursor = await connection.execute(
        "SELECT theirs.chunk_table FROM builds b JOIN generations mine ON mine.name = b.generation"
        " JOIN generations theirs ON theirs.name = b.origin"
        " WHERE b.generation = %s AND mine.chunk_table <> theirs.chunk_table"
        " AND (mine.model, mine.revision, mine.dimensions, mine.document_prefix)"
        " = (theirs.model, theirs.revision, theirs.dimensions, theirs.document_prefix)",
        [generation],
    )
    row = await cursor.fetchone()
    if row is None or not await table_exists(connection, row[0]):
        return []
    cursor = await connection.execute(
        sql.SQL("SELECT id, text, embedding::real[] FROM {} WHERE id = ANY(%s)").format(sql.Identifier(row[0])),
        [list(chunks)],
    )
    return await cursor.fetchall()


async def table_exists(connection: Connection, table: str) -> bool:
    cursor = await connection.execute("SELECT to_regclass(quote_ident(%s)) IS NOT NULL", [table])
    row = await cursor.fetchone()
    return bool(row and row[0])
