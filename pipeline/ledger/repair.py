"""How the audit requests a repair: it makes documents pending in the ledger, and the sink converges them again.

Every function here must be called in a transaction that has locked the document's row and its states (``standings`` of
``pipeline.audit.reading`` with ``lock``). Then nothing newer is accepted, and no sink confirms anything, between the
audit's reading and the request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

from psycopg import sql

from pipeline.core.model import Generation, Store
from pipeline.ledger import work
from pipeline.stores import graph
from pipeline.stores.postgres import Connection

GRACE_SECONDS = 300.0
"""How long the sweeper leaves a requested repair to its hint."""


async def want_again(connection: Connection, generation: str, store: Store, document: UUID, *, above: int = 0) -> int:
    """Make a document pending in one store, at a new seq greater than ``above``; returns the seq. A missing state is
    added.

    The document becomes pending in every generation that shares the table or index: otherwise one of them would still
    count rows as present that the repair has removed, and a cut-over to it would hide documents.
    """
    seq = await work.raise_want(connection, generation, store, document, above)
    await connection.execute(
        "INSERT INTO index_state AS s (document_id, generation, store, want_seq, next_at)"
        " VALUES (%(document)s, %(generation)s, %(store)s, %(seq)s, clock_timestamp() + %(grace)s * interval '1 s')"
        " ON CONFLICT (document_id, generation, store) DO UPDATE SET want_seq = excluded.want_seq,"
        " next_at = excluded.next_at, pending_since = clock_timestamp(), attempts = 0, error = NULL",
        {"document": document, "generation": generation, "store": store, "seq": seq, "grace": GRACE_SECONDS},
    )
    await connection.execute(
        f"UPDATE index_state SET want_seq = %(seq)s, next_at = clock_timestamp(), attempts = 0, error = NULL,"  # noqa: S608 — constants of this module
        f" pending_since = CASE WHEN seq < want_seq THEN pending_since ELSE clock_timestamp() END"
        f" WHERE document_id = %(document)s AND store = %(store)s AND want_seq < %(seq)s"
        f" AND generation IN ({_SHARING})",
        {"document": document, "generation": generation, "store": store, "seq": seq},
    )
    await _hold_certificates(connection, [document])
    return seq


async def _hold_certificates(connection: Connection, documents: Sequence[UUID]) -> None:
    """Record that a store lacked something of these documents' sources: they do not count as complete until their
    documents are settled again."""
    await connection.execute(
        "UPDATE connector_freshness f SET reopened_at = clock_timestamp() FROM (SELECT DISTINCT tenant, source"
        " FROM documents WHERE id = ANY(%s)) d WHERE f.tenant = d.tenant AND f.source = d.source",
        [list(documents)],
    )


_SHARING = """SELECT g.name FROM generations g JOIN generations mine ON mine.name = %(generation)s
    WHERE g.state <> 'retired' AND CASE WHEN %(store)s = 'vectors'
        THEN g.chunk_table = mine.chunk_table ELSE g.keyword_index = mine.keyword_index END"""


async def reopen_all_keywords(
    connection: Connection, generation: str, documents: Sequence[tuple[UUID, int, Sequence[UUID]]]
) -> None:
    """Discard what the ledger has confirmed of these documents' entries, so that all of them are written again, or
    deleted. documents: (document, highest version of its entries, entries in the index). A missing state is added."""
    ids, above = [id_ for id_, _, _ in documents], [version for _, version, _ in documents]
    await connection.execute(
        "UPDATE documents d SET seq = drawn.seq,"
        " announced_seq = CASE WHEN d.announced_seq = d.seq THEN drawn.seq ELSE d.announced_seq END"
        " FROM (SELECT id, greatest(nextval('ledger_seq'), seq + 1, above + 1) AS seq FROM documents"
        "  JOIN unnest(%s::uuid[], %s::bigint[]) AS reopened (id, above) USING (id)) drawn WHERE d.id = drawn.id",
        [ids, above],
    )
    await connection.execute(
        "INSERT INTO index_state (document_id, generation, store, want_seq)"
        " SELECT id, %s, 'keywords', seq FROM documents WHERE id = ANY(%s) ON CONFLICT DO NOTHING",
        [generation, ids],
    )
    await connection.execute(
        f"UPDATE index_state s SET want_seq = d.seq, next_at = clock_timestamp() + %(grace)s * interval '1 s',"  # noqa: S608 — constants of this module
        f" pending_since = CASE WHEN s.seq < s.want_seq THEN s.pending_since ELSE clock_timestamp() END,"
        f" attempts = 0, error = NULL, claimed = ARRAY(SELECT unnest(s.claimed) UNION SELECT unnest(s.confirmed)),"
        f" confirmed = '{{}}', confirmed_hashes = '{{}}' FROM documents d WHERE d.id = s.document_id"
        f" AND s.document_id = ANY(%(documents)s) AND s.store = %(store)s"
        f" AND (s.generation = %(generation)s OR s.generation IN ({_SHARING}))",
        {"grace": GRACE_SECONDS, "documents": ids, "store": "keywords", "generation": generation},
    )
    await work.reopen_keywords(connection, generation, [(id_, 2**62, held) for id_, _, held in documents if held])
    await _hold_certificates(connection, ids)


async def delete_rows(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> None:
    """Delete rows whose text is wrong, and so perhaps their vector: it may have been made from either text."""
    if ids:
        await connection.execute(
            sql.SQL("DELETE FROM {} WHERE id = ANY(%s)").format(sql.Identifier(generation.chunk_table)), [list(ids)]
        )


async def correct_tenant(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> None:
    """Give rows the tenant of their document: with any other, the policies hide them from everybody. Their access_id is
    left to the sink, which copies that whenever a document changes."""
    if ids:
        await connection.execute(
            sql.SQL(
                "UPDATE {} c SET tenant = d.tenant FROM documents d"
                " WHERE c.id = ANY(%s) AND d.id = c.document_id AND c.tenant <> d.tenant"
            ).format(sql.Identifier(generation.chunk_table)),
            [list(ids)],
        )


async def insert_rows_again(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> int:
    """Delete rows and insert the same ones, so that the vector index has them anew; nothing is embedded. (An UPDATE
    that changes nothing would be a HOT update, which does not touch the index.) Returns the number of rows.

    They wait outside of the graph, where every search reads them: entering it while it is vacuumed, they would be lost
    again (docs/adr/0030)."""
    table = sql.Identifier(generation.chunk_table)
    waits = bool(await graph.writes_outside(connection, generation, {"live"}))
    names = ["id", "document_id", "tenant", "access_id", "created_at", "text", "embedding"]
    names += ["sketch"] * generation.sketched
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    cursor = await connection.execute(
        sql.SQL("DELETE FROM {} WHERE id = ANY(%s) RETURNING {}").format(table, columns), [list(ids)]
    )
    rows = await cursor.fetchall()
    if rows:
        places = sql.SQL(", ").join(sql.Placeholder() * len(names))
        await connection.cursor().executemany(
            sql.SQL("INSERT INTO {} ({}, in_graph) VALUES ({}, {})").format(table, columns, places, not waits), rows
        )
    return len(rows)


async def forget_manifest(connection: Connection, generation: str, document: UUID) -> None:
    """Delete a document's manifest, so that the sinks chunk its text again."""
    await connection.execute("DELETE FROM manifests WHERE document_id = %s AND generation = %s", [document, generation])


async def forget_content(connection: Connection, document: UUID) -> None:
    """Discard the hash of a document whose stored text is damaged, so that the next event with its content counts as a
    change, even the same event as before. (An empty hash is no text's, and is ordered before all others.)"""
    await connection.execute("UPDATE documents SET content_hash = '' WHERE id = %s AND deleted_at IS NULL", [document])


@asynccontextmanager
async def unheard_of(connection: Connection, documents: Sequence[UUID]) -> AsyncIterator[list[UUID]]:
    """Yield those of these documents that the ledger does not know, and lock them: stubs are inserted for them, which
    are removed before the transaction ends. Until then every writer of such a document waits."""
    async with connection.transaction():
        cursor = await connection.execute(
            "INSERT INTO documents (id, tenant, source, external_id) SELECT one, '', '', one::text"
            " FROM unnest(%s::uuid[]) AS one ORDER BY 1 ON CONFLICT (id) DO NOTHING RETURNING id",
            [list(documents)],
        )
        unknown = [id_ for (id_,) in await cursor.fetchall()]
        yield unknown
        await connection.execute("DELETE FROM documents WHERE id = ANY(%s)", [unknown])


async def delete_rows_of(connection: Connection, generation: Generation, document: UUID) -> int:
    """Delete all rows of a document that the ledger does not know; returns their number."""
    cursor = await connection.execute(
        sql.SQL("DELETE FROM {} WHERE document_id = %s").format(sql.Identifier(generation.chunk_table)), [document]
    )
    return cursor.rowcount


async def draw(connection: Connection, at_least: int) -> int:
    """Draw a sequence number, not below ``at_least``, for deleting an entry that belongs to no document."""
    cursor = await connection.execute("SELECT greatest(nextval('ledger_seq'), %s)", [at_least])
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])
