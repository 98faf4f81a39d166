"""Generations: which model and chunker are in force, and the first one's creation."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from psycopg.types.json import Jsonb

from pipeline.core.errors import Misconfigured
from pipeline.core.model import ChunkParams, Generation
from pipeline.embedding.port import Embedder, Vectors
from pipeline.stores.postgres import (
    GENERATIONS_LOCK,
    Connection,
    create_chunk_table,
    create_graph,
    point_readers_at,
)

REFERENCE_TEXT = "The penstock carries water from the reservoir to the turbine."
REFERENCE_COSINE = 0.99
"""Below it the model that answers is not the one that filled the index. Never equality: the same weights quantised on
another family of processors may round otherwise (int8 against float32 was 0.996 at worst when measured)."""

_COLUMNS = (
    "name, state, model, revision, dimensions, input_window, params, document_prefix, query_prefix, chunk_table, "
    "keyword_index, vector_type"
)


def _generation(row: tuple[Any, ...]) -> Generation:
    name, state, model, revision, dimensions, window, params, document_prefix, query_prefix, table, index, kind = row
    return Generation(
        name=name, state=state, model=model, revision=revision, dimensions=dimensions, input_window=window,
        params=ChunkParams(**params), document_prefix=document_prefix, query_prefix=query_prefix, chunk_table=table,
        keyword_index=index, vector_type=kind,
    )  # fmt: skip


async def writable(connection: Connection) -> list[Generation]:
    """Every generation that follows the ledger: building, active, previous (so that rollback is never stale)."""
    cursor = await connection.execute(f"SELECT {_COLUMNS} FROM generations WHERE state <> 'retired' ORDER BY name")
    return [_generation(row) for row in await cursor.fetchall()]


async def active(connection: Connection) -> Generation:
    """The generation that queries use. Raises Misconfigured when there is none."""
    cursor = await connection.execute(f"SELECT {_COLUMNS} FROM generations WHERE state = 'active'")
    row = await cursor.fetchone()
    if row is None:
        raise Misconfigured("no active generation: run `penstock migrate`")
    return _generation(row)


async def ensure_first(
    connection: Connection, embedder: Embedder, params: ChunkParams, *, index_prefix: str
) -> Generation:
    """The active generation, created from the settings when there is none yet. The caller creates its index."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", [GENERATIONS_LOCK])
        cursor = await connection.execute(f"SELECT {_COLUMNS} FROM generations WHERE state = 'active'")
        row = await cursor.fetchone()
        if row is not None:
            generation = _generation(row)
            await create_chunk_table(connection, generation)
            await create_graph(connection, generation)
            return generation
        generation = Generation(
            name="g1", state="active", model=embedder.model, revision=embedder.revision,
            dimensions=embedder.dimensions, input_window=embedder.input_window, params=params,
            document_prefix=embedder.document_prefix, query_prefix=embedder.query_prefix, chunk_table="chunks_g1",
            keyword_index=f"{index_prefix}chunks-g1",
        )  # fmt: skip
        await add(connection, generation)
        await create_chunk_table(connection, generation)
        await create_graph(connection, generation)
        await point_readers_at(connection, generation)
        return generation


async def add(connection: Connection, generation: Generation) -> None:
    """A new row. The caller holds the exclusive lock."""
    values = {c: getattr(generation, c) for c in _COLUMNS.split(", ")} | {"params": Jsonb(asdict(generation.params))}
    await connection.execute(
        f"INSERT INTO generations ({_COLUMNS}) VALUES ({', '.join(f'%({c})s' for c in values)})", values
    )


async def every(connection: Connection) -> list[Generation]:
    """All of them, retired ones too, the oldest first."""
    cursor = await connection.execute(f"SELECT {_COLUMNS} FROM generations ORDER BY created_at, name")
    return [_generation(row) for row in await cursor.fetchall()]


async def check_model(connection: Connection, generation: Generation, embedder: Embedder) -> None:
    """Refuse to start with another model than the one that filled the generation: models never mix.

    The first caller stores the reference text's vector; later ones compare theirs. Raises Misconfigured.
    """
    if (embedder.model, embedder.dimensions) != (generation.model, generation.dimensions):
        raise Misconfigured(
            f"settings name {embedder.model} ({embedder.dimensions} dimensions), but generation {generation.name} was"
            f" built with {generation.model} ({generation.dimensions}): build a new generation, or put the setting back"
        )
    embedded = await embedder.embed_documents([REFERENCE_TEXT])
    mine: Vectors = embedded.vectors[0]
    cursor = await connection.execute(
        "UPDATE generations SET reference = coalesce(reference, %s) WHERE name = %s RETURNING reference",
        [mine.tolist(), generation.name],
    )
    row = await cursor.fetchone()
    stored = np.asarray(row[0] if row else [], dtype=np.float32)
    cosine = float(stored @ mine / (np.linalg.norm(stored) * np.linalg.norm(mine)))
    if cosine < REFERENCE_COSINE:
        raise Misconfigured(
            f"{embedder.model} is not the model that filled generation {generation.name} (cosine {cosine:.3f} on the"
            " reference text): build a new generation"
        )
