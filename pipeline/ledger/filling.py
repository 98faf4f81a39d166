"""Bringing the ledger's documents into a build, page by page: manifests and vectors are copied where they are alike."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from psycopg import sql

from pipeline.core.model import STORES
from pipeline.ledger.builds import Build
from pipeline.ledger.documents import Identity
from pipeline.stores.postgres import GENERATIONS_LOCK, Connection


@dataclass(frozen=True, slots=True)
class Page:
    """What one call of ``fill`` did."""

    documents: int
    """0: nothing is left to fill in."""
    pending: tuple[Identity, ...] = ()
    """Those that a sink has to see to."""


async def ahead(connection: Connection, build: Build, *, limit: int) -> list[int]:
    """Tokens, in the origin, of the documents that ``fill`` would bring in next, in its order."""
    cursor = await connection.execute(
        "SELECT coalesce((SELECT sum(t) FROM unnest(m.token_counts) t), 0)::bigint FROM documents d"
        " LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = %s"
        " WHERE d.id > (SELECT position FROM builds WHERE generation = %s) ORDER BY d.id LIMIT %s",
        [build.origin.name, build.generation.name, limit],
    )
    return [tokens for (tokens,) in await cursor.fetchall()]


async def fill(connection: Connection, build: Build, *, limit: int, grace_seconds: float) -> Page:
    """Bring the next ``limit`` documents into the build, in one transaction; the position is kept with it, so whoever
    is killed goes on by calling again. grace_seconds: how long the sweeper leaves them to the hints.

    Under the documents' locks nothing newer is accepted for them, and a row that detect wrote meanwhile stands.
    """
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock_shared(%s)", [GENERATIONS_LOCK])
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
            "ids": ids, "new": build.generation.name, "old": build.origin.name, "grace": grace_seconds,
            "count": len(ids), "last": ids[-1],
        }  # fmt: skip
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
_WANTED = "d.deleted_at IS NULL AND d.version IS NOT NULL AND coalesce(cardinality(a.acl_tags), 0) > 0"
_WANT = f"""
    INSERT INTO index_state (document_id, generation, store, want_seq, seq, settled_at, pending_since, next_at)
    SELECT d.id, %(new)s, %(store)s, d.seq, CASE WHEN {_WANTED} THEN 0 ELSE d.seq END,
        CASE WHEN {_WANTED} THEN NULL ELSE clock_timestamp() END, clock_timestamp(),
        clock_timestamp() + make_interval(secs => %(grace)s)
    FROM documents d LEFT JOIN access_sets a ON a.id = d.access_id
    WHERE d.id = ANY(%(ids)s) AND d.seq > 0
    ORDER BY d.id
    ON CONFLICT DO NOTHING RETURNING document_id
"""  # noqa: S608 — constants of this module
"""Of a store that is made anew: everything is wanted. A document that nobody may read has nothing in an empty store."""
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
"""Of a store that is shared: the origin's state holds, locked so that it is never more settled here than there. Where
detect was faster, only what may stand in the index besides is taken over, to be deleted if nobody wants it."""


async def _copy_vectors(connection: Connection, build: Build, ids: list[UUID], fresh: list[UUID]) -> None:
    """Copy the rows of wanted chunks with equal ids, and settle those of ``fresh`` documents that have all of theirs:
    nobody else has written rows for them yet."""
    if not await table_exists(connection, build.origin.chunk_table):
        return
    tables = {
        "new": sql.Identifier(build.generation.chunk_table), "old": sql.Identifier(build.origin.chunk_table),
        "wanted": sql.SQL(_WANTED),
    }  # fmt: skip
    names = {"ids": ids, "fresh": fresh, "generation": build.generation.name}
    await connection.execute(
        sql.SQL(
            """
            INSERT INTO {new} (id, document_id, access_id, created_at, text, embedding)
            SELECT c.id, c.document_id, d.access_id, c.created_at, c.text, c.embedding
            FROM {old} c
            JOIN documents d ON d.id = c.document_id
            JOIN access_sets a ON a.id = d.access_id
            JOIN manifests m ON m.document_id = d.id AND m.generation = %(generation)s
            WHERE c.document_id = ANY(%(ids)s) AND c.id = ANY (m.chunk_ids) AND m.content_hash = d.content_hash
              AND {wanted}
            ON CONFLICT DO NOTHING
            """
        ).format(**tables),
        names,
    )
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


async def lend(
    connection: Connection, generation: str, chunks: Collection[UUID]
) -> list[tuple[UUID, str, list[float]]]:
    """(chunk, text, vector) of those of these chunks that the origin of a build has, where one model made both: a
    document that changed before it was filled in costs no more embeddings than its change."""
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
