"""The list of generations: reading it, creating the first one, and checking that a model is the one that filled it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pgvector import Vector
from psycopg.types.json import Jsonb

from pipeline.core.centre import CENTRE_TEXTS, centre_of
from pipeline.core.errors import Misconfigured
from pipeline.core.graph import usual_quantisation
from pipeline.core.model import ChunkParams, EmbeddingService, Generation, Quantisation, VectorIndex
from pipeline.core.relevance import Calibration
from pipeline.embedding.port import Embedder, Vectors
from pipeline.stores.graph import create_graph
from pipeline.stores.postgres import GENERATIONS_LOCK, Connection, create_chunk_table, point_readers_at

REFERENCE_TEXT = "The penstock carries water from the reservoir to the turbine."
REFERENCE_COSINE = 0.99
"""The least cosine between two vectors of the reference text by the same model. They need not be equal: quantised
weights round differently on another family of processors (int8 against float32 gave 0.996 at worst)."""

_COLUMNS = (
    "name, state, model, revision, dimensions, input_window, params, document_prefix, query_prefix, chunk_table, "
    "keyword_index, vector_type, service, calibration, vectors, quantisation, sketched, centred"
)
_READ = f"{_COLUMNS}, vector_send(centre) AS centre"


def _generation(row: tuple[Any, ...]) -> Generation:
    """A generation from a row of _READ, which has the names of its fields."""
    fields = dict(zip([*_COLUMNS.split(", "), "centre"], row, strict=True))
    fields["sketched"] |= fields["centred"]
    params, service, calibration = ChunkParams(**fields.pop("params")), fields.pop("service"), fields.pop("calibration")
    return Generation(
        **fields,
        params=params,
        service=EmbeddingService(**service) if service else None,
        calibration=Calibration(**calibration) if calibration else None,
    )


async def writable(connection: Connection) -> list[Generation]:
    """The generations that are not retired: building, active and previous. All follow the ledger, the previous one so
    that a rollback never shows old documents."""
    cursor = await connection.execute(f"SELECT {_READ} FROM generations WHERE state <> 'retired' ORDER BY name")  # noqa: S608 — constants of this module
    return [_generation(row) for row in await cursor.fetchall()]


async def active(connection: Connection) -> Generation:
    """The generation that queries use. Raises Misconfigured when there is none."""
    cursor = await connection.execute(f"SELECT {_READ} FROM generations WHERE state = 'active'")  # noqa: S608 — constants of this module
    row = await cursor.fetchone()
    if row is None:
        raise Misconfigured("no active generation: run `penstock migrate`")
    return _generation(row)


async def keep_unchanged(connection: Connection) -> None:
    """Wait until nobody changes the list of generations, and keep it as it is until the transaction ends. Every writer
    of manifests and of a store's rows does so."""
    await connection.execute("LOCK TABLE generations_lock IN ROW EXCLUSIVE MODE")


async def lock_for_change(connection: Connection) -> None:
    """Wait until no transaction relies on the list of generations, and let none begin until this one ends. Only the
    tables' owner may."""
    await connection.execute("SELECT pg_advisory_xact_lock(%s)", [GENERATIONS_LOCK])  # workers of the version before
    await connection.execute("LOCK TABLE generations_lock IN EXCLUSIVE MODE")


async def ensure_first(
    connection: Connection,
    embedder: Embedder,
    params: ChunkParams,
    *,
    index_prefix: str,
    service: EmbeddingService | None = None,
    vectors: VectorIndex = "pgvector",
    quantisation: Quantisation | None = None,
) -> Generation:
    """The active generation, which is created from the settings when there is none. The caller creates its index.

    service: where the embedder's model is served. It is recorded for every generation of that model that has none.
    """
    async with connection.transaction():
        await lock_for_change(connection)
        cursor = await connection.execute(f"SELECT {_READ} FROM generations WHERE state = 'active'")  # noqa: S608 — constants of this module
        row = await cursor.fetchone()
        if row is not None:
            generation = _generation(row)
            await _create_table(connection, generation)
            if service is not None:
                for other in await writable(connection):
                    if other.service is None and _has_model(other, embedder):
                        await note_service(connection, other.name, service)
            return await active(connection)
        generation = Generation(
            name="g1",
            state="active",
            model=embedder.model,
            revision=embedder.revision,
            dimensions=embedder.dimensions,
            input_window=embedder.input_window,
            params=params,
            document_prefix=embedder.document_prefix,
            query_prefix=embedder.query_prefix,
            chunk_table="chunks_g1",
            keyword_index=f"{index_prefix}chunks-g1",
            service=service,
            vectors=vectors,
            quantisation=quantisation or usual_quantisation(embedder.dimensions, vectors),
            centred=True,
        )
        await add(connection, generation)
        await _create_table(connection, generation)
        await point_readers_at(connection, generation)
        return generation


async def _create_table(connection: Connection, generation: Generation) -> None:
    """Create the chunk table, if there is none, with an empty graph where its vectors are searched in it. (Later the
    vectors workers maintain the graph, but their database role may not be allowed to create one.)"""
    cursor = await connection.execute("SELECT to_regclass(%s) IS NULL", [f'"{generation.chunk_table}"'])
    row = await cursor.fetchone()
    if row is not None and row[0]:
        await create_chunk_table(connection, generation)
        if generation.vectors == "pgvector":
            await create_graph(connection, generation)


async def add(connection: Connection, generation: Generation) -> None:
    """Add a generation to the list. The caller holds the exclusive generations lock."""
    values = {c: getattr(generation, c) for c in _COLUMNS.split(", ")} | {
        "params": Jsonb(asdict(generation.params)),
        "service": Jsonb(asdict(generation.service)) if generation.service else None,
        "calibration": Jsonb(asdict(generation.calibration)) if generation.calibration else None,
        "sketched": generation.sketched and not generation.centred,  # a worker of an older version then makes none
    }
    await connection.execute(
        f"INSERT INTO generations ({_COLUMNS}) VALUES ({', '.join(f'%({c})s' for c in values)})",  # noqa: S608 — columns of this module, and placeholders
        values,
    )


async def note_service(connection: Connection, name: str, service: EmbeddingService) -> None:
    """Record where a generation's model is served, and what it costs."""
    await connection.execute("UPDATE generations SET service = %s WHERE name = %s", [Jsonb(asdict(service)), name])


async def record_calibration(connection: Connection, name: str, calibration: Calibration) -> None:
    """Store the floor of relevance. That of a reranker is kept where this one has none."""
    stored = asdict(calibration)
    if calibration.rerank is None:
        del stored["reranker"], stored["rerank"]
    await connection.execute(
        "UPDATE generations SET calibration = coalesce(calibration, '{}') || %s WHERE name = %s", [Jsonb(stored), name]
    )


async def everyday(connection: Connection, name: str) -> bytes | None:
    """The vectors that ``record_everyday`` stored; None: nothing yet."""
    cursor = await connection.execute("SELECT everyday FROM generations WHERE name = %s", [name])
    row = await cursor.fetchone()
    return row[0] if row else None


async def record_everyday(connection: Connection, name: str, packed: bytes) -> None:
    """Store the vectors of the everyday questions, as ``pipeline.generations.calibration`` packs them."""
    await connection.execute("UPDATE generations SET everyday = %s WHERE name = %s", [packed, name])


async def every(connection: Connection) -> list[Generation]:
    """All generations, retired ones included, the oldest first."""
    cursor = await connection.execute(f"SELECT {_READ} FROM generations ORDER BY created_at, name")  # noqa: S608 — constants of this module
    return [_generation(row) for row in await cursor.fetchall()]


async def reference(connection: Connection, generation: Generation) -> list[float] | None:
    """The vector of REFERENCE_TEXT by the generation's model; None: no worker with that model has started yet."""
    cursor = await connection.execute("SELECT reference FROM generations WHERE name = %s", [generation.name])
    row = await cursor.fetchone()
    return list(row[0]) if row and row[0] else None


def _has_model(generation: Generation, embedder: Embedder) -> bool:
    return (embedder.model, embedder.dimensions) == (generation.model, generation.dimensions)


def same_model(one: Generation, other: Generation) -> bool:
    """Whether a text has the same vector in both generations, so that vectors can be copied. ``builds.origin_vectors``
    has the same condition in SQL."""
    return (one.model, one.revision, one.dimensions, one.document_prefix) == (
        other.model,
        other.revision,
        other.dimensions,
        other.document_prefix,
    )


async def check_model(connection: Connection, generation: Generation, embedder: Embedder) -> None:
    """Check that the embedder has the model that filled the generation, because vectors of two models do not compare.

    The first call stores the vector of the reference text, and the centre of the generation's sketches; later calls
    compare theirs with the former. Raises Misconfigured.
    """
    import numpy as np  # here: importing it takes 0.1 s, which processes that never embed need not spend

    if not _has_model(generation, embedder):
        raise Misconfigured(
            f"settings name {embedder.model} ({embedder.dimensions} dimensions), but generation {generation.name} was"
            f" built with {generation.model} ({generation.dimensions}): build a new generation, or restore the setting"
        )
    lacks_centre = generation.centred and generation.centre is None
    embedded = await embedder.embed_documents([REFERENCE_TEXT, *(CENTRE_TEXTS if lacks_centre else ())])
    mine: Vectors = embedded.vectors[0]
    cursor = await connection.execute(
        "UPDATE generations SET reference = coalesce(reference, %s) WHERE name = %s RETURNING reference",
        [mine.tolist(), generation.name],
    )
    row = await cursor.fetchone()
    stored = np.asarray(row[0] if row else [], dtype=np.float32)
    if stored.shape != mine.shape:
        raise Misconfigured(
            f"{embedder.model} answers with {len(mine)} dimensions, but the reference text of generation"
            f" {generation.name} has {len(stored)}: build a new generation"
        )
    cosine = float(stored @ mine / (np.linalg.norm(stored) * np.linalg.norm(mine)))
    if cosine < REFERENCE_COSINE:
        raise Misconfigured(
            f"{embedder.model} is not the model that filled generation {generation.name} (cosine {cosine:.3f} on the"
            " reference text): build a new generation"
        )
    if lacks_centre:
        refused = np.isin(np.arange(len(embedded.vectors)), [0, *embedded.refused])
        await connection.execute(  # as text: a command's connection does not know the type of vectors
            "UPDATE generations SET centre = %s::text::vector WHERE name = %s AND centre IS NULL",
            [Vector(centre_of(embedded.vectors[~refused])).to_text(), generation.name],
        )
