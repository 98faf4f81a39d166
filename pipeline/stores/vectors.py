"""A generation's chunk table in pgvector, as the sink uses it. Row locks and transactions are the caller's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple
from uuid import UUID

import numpy as np
from numpy.typing import NDArray
from pgvector import Bit, HalfVector, Vector
from psycopg import sql

from pipeline.core.identity import chunk_ids
from pipeline.core.model import Generation
from pipeline.core.sketch import sketches
from pipeline.core.titles import EmbeddedChunk
from pipeline.observability.tracing import trace_statement
from pipeline.stores.postgres import Connection


def value(generation: Generation, vector: NDArray[np.float32]) -> HalfVector | Vector:
    """A vector as the generation's column takes it."""
    return HalfVector(vector) if generation.vector_type == "halfvec" else Vector(np.asarray(vector))


def sketches_of(generation: Generation, vectors: Collection[NDArray[np.float32]]) -> Sequence[Bit | None]:
    """The sketches of vectors, one at least, as the generation's column takes them; None where they cannot be made,
    because nobody knows the centre yet."""
    if generation.centred and generation.centre is None:
        return [None] * len(vectors)
    centre = Vector.from_binary(generation.centre).to_numpy() if generation.centre else None
    return [Bit(bits) for bits in sketches(np.stack([*vectors]), generation.sketch_bits, centre)]


async def _sketch_column(
    connection: Connection, generation: Generation, vectors: Collection[NDArray[np.float32]]
) -> tuple[sql.SQL, sql.SQL, list[Sequence[Bit | None]]]:
    """Return what a statement that inserts rows names, takes as an array, and has as its last value: the sketches of
    their vectors, or nothing where the generation has none."""
    if not generation.sketched:
        return sql.SQL(""), sql.SQL(""), []
    generation = await with_centre(connection, generation)
    return sql.SQL(", sketch"), sql.SQL(", %b::varbit[]"), [sketches_of(generation, vectors)]


async def with_centre(connection: Connection, generation: Generation) -> Generation:
    """The generation with its centre, which may have been recorded since it was read."""
    if not generation.centred or generation.centre is not None:
        return generation
    cursor = await connection.execute("SELECT vector_send(centre) FROM generations WHERE name = %s", [generation.name])
    row = await cursor.fetchone()
    return replace(generation, centre=row[0] if row else None)


MOST_EQUAL_TEXTS = 8
"""The most rows of one text whose title is compared. Where more documents have it under other titles, it may be
embedded although the table has its vector."""


async def of_equal_chunks(
    connection: Connection, generation: Generation, chunks: Sequence[EmbeddedChunk]
) -> dict[EmbeddedChunk, NDArray[np.float32]]:
    """The stored vectors of these chunks, whichever document they belong to: a moved document or a copy of another one
    costs no embedding. A chunk without a row is absent. float32 (dimensions,) each.

    A row's id says with which title its text was embedded.
    """
    table = sql.Identifier(generation.chunk_table)
    cursor = await connection.execute(
        sql.SQL(
            "SELECT wanted.n, same.id, same.document_id FROM unnest(%b::text[]) WITH ORDINALITY AS wanted (text, n)"
            " CROSS JOIN LATERAL (SELECT c.id, c.document_id FROM {} c"
            "  WHERE hashtextextended(c.text, 0) = hashtextextended(wanted.text, 0) AND c.text = wanted.text LIMIT %s"
            ") same"
        ).format(table),
        [[chunk.text for chunk in chunks], MOST_EQUAL_TEXTS],
    )
    equal: dict[EmbeddedChunk, UUID] = {}
    for n, id_, document in await cursor.fetchall():
        chunk = chunks[n - 1]
        if chunk not in equal and id_ in chunk_ids(document, [chunk.text] * MOST_EQUAL_TEXTS, chunk.title):
            equal[chunk] = id_
    if not equal:
        return {}
    cursor = await connection.execute(
        sql.SQL("SELECT id, embedding::real[] FROM {} WHERE id = ANY(%s)").format(table), [list(equal.values())]
    )
    embeddings = {id_: np.asarray(vector, dtype=np.float32) for id_, vector in await cursor.fetchall()}
    return {chunk: embeddings[id_] for chunk, id_ in equal.items() if id_ in embeddings}


async def of_ids(
    connection: Connection, generation: Generation, ids: Sequence[UUID]
) -> dict[UUID, NDArray[np.float32]]:
    """The stored vectors of these chunks (float32, unit length); a chunk that has none is absent. Raises
    psycopg.Error."""
    cursor = await connection.execute(
        sql.SQL("SELECT id, embedding FROM {chunks} WHERE id = ANY(%b::uuid[])").format(
            chunks=sql.Identifier(generation.chunk_table)
        ),
        [list(ids)],
        binary=True,  # in text form, 1,536 numbers would be parsed one by one
    )
    return {
        id_: np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value, dtype=np.float32)
        for id_, value in await cursor.fetchall()
    }


class Row(NamedTuple):
    """A row of the chunk table."""

    id: UUID
    document_id: UUID
    tenant: str
    """The document's."""
    access_id: int | None
    text: str
    vector: NDArray[np.float32]
    """Shape (dimensions,), unit length."""
    in_graph: bool


async def insert(connection: Connection, generation: Generation, rows: Sequence[Row]) -> None:
    """Insert rows, except those that are there."""
    if not rows:
        return
    column, array, made = await _sketch_column(connection, generation, [row.vector for row in rows])
    values: list[Sequence[object]] = [
        [row.id for row in rows],
        [row.document_id for row in rows],
        [row.tenant for row in rows],
        [row.access_id for row in rows],
        [row.text for row in rows],
        [value(generation, row.vector) for row in rows],
        [row.in_graph for row in rows],
        *made,
    ]
    with trace_statement("INSERT", generation.chunk_table, len(rows)):
        await connection.execute(
            sql.SQL(
                "INSERT INTO {} (id, document_id, tenant, access_id, text, embedding, in_graph{}) SELECT * FROM"
                " unnest(%b::uuid[], %b::uuid[], %b::text[], %b::bigint[], %b::text[], %b::{}[], %b::boolean[]{})"
                " ON CONFLICT (id) DO NOTHING"
            ).format(sql.Identifier(generation.chunk_table), column, sql.SQL(generation.vector_type), array),
            values,
        )


COPIED_AT_ONCE = 1_000
"""The number of rows whose vectors ``copy`` holds in memory: 6 MB with 1,536 dimensions."""


async def copy(
    connection: Connection, origin: Generation, generation: Generation, access: Mapping[UUID, int | None]
) -> None:
    """Copy rows of the origin's table, by chunk id, each with this access_id, except those that are there. The model of
    both generations is the same.

    Sketches are made anew, because the origin's table, or some of its rows, may have none.
    """
    required = list(access)
    for start in range(0, len(required), COPIED_AT_ONCE):
        ids, stored = required[start : start + COPIED_AT_ONCE], list[NDArray[np.float32]]()
        if generation.sketched:
            vectors = await of_ids(connection, origin, ids)
            ids, stored = list(vectors), list(vectors.values())
            if not ids:
                continue
        column, array, made = await _sketch_column(connection, generation, stored)
        await connection.execute(
            sql.SQL(
                "INSERT INTO {new} (document_id, tenant, created_at, text, embedding, id, access_id{column})"
                " SELECT c.document_id, (SELECT d.tenant FROM documents d WHERE d.id = c.document_id), c.created_at,"
                " c.text, c.embedding, copied.*"
                " FROM unnest(%b::uuid[], %b::bigint[]{array}) AS copied (id, access_id{column})"
                " JOIN {old} c USING (id) ON CONFLICT (id) DO NOTHING"
            ).format(
                new=sql.Identifier(generation.chunk_table),
                old=sql.Identifier(origin.chunk_table),
                column=column,
                array=array,
            ),
            [ids, [access[id_] for id_ in ids], *made],
        )


async def add_sketches(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> None:
    """Give these rows sketches: a worker of an older version writes rows without."""
    if not (stored := await of_ids(connection, generation, ids)):
        return
    await connection.execute(
        sql.SQL(
            "UPDATE {} c SET sketch = made.sketch FROM unnest(%b::uuid[], %b::varbit[]) AS made (id, sketch)"
            " WHERE c.id = made.id"
        ).format(sql.Identifier(generation.chunk_table)),
        [list(stored), sketches_of(await with_centre(connection, generation), stored.values())],
    )


async def delete(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> None:
    if ids:
        with trace_statement("DELETE", generation.chunk_table, len(ids)):
            await connection.execute(
                sql.SQL("DELETE FROM {} WHERE id = ANY(%s)").format(sql.Identifier(generation.chunk_table)), [list(ids)]
            )


async def restamp_access(
    connection: Connection, generation: Generation, access: Mapping[UUID, int | None], *, limit: int
) -> bool:
    """Copy each document's access_id to its rows, where it is a hint for filtering, at most ``limit`` rows at a time.
    Returns whether rows may be left. Rows that have it already are not touched."""
    if not access:
        return False
    table = sql.Identifier(generation.chunk_table)
    cursor = await connection.execute(
        sql.SQL(
            "UPDATE {table} c SET access_id = stale.access_id FROM ("
            " SELECT c.id, w.access_id FROM {table} c"
            " JOIN unnest(%s::uuid[], %s::bigint[]) AS w (document_id, access_id) USING (document_id)"
            " WHERE c.access_id <> w.access_id LIMIT %s"
            ") stale WHERE c.id = stale.id"
        ).format(table=table),
        [list(access), list(access.values()), limit],
    )
    return cursor.rowcount == limit
