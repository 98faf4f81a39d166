"""The vectors that keyword entries carry, in a generation whose vectors are searched in Elasticsearch.

The vectors sink writes rows, and the keywords sink copies their vectors into the entries. It normally waits for the
rows, so that an entry is written once. While the embedding model is away it writes entries without vectors, because
words can be searched without; the vectors sink reopens such documents when it has written their rows. So a document
that both stores hold has its vectors in the index.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.ledger import work
from pipeline.ledger.work import Work
from pipeline.stores import chunk_rows, dense
from pipeline.stores.elasticsearch import HAS_VECTOR, VECTOR
from pipeline.stores.postgres import Connection

WAIT_SECONDS = 10.0
"""How long the keywords sink leaves a document to the vectors sink, from when its vectors became pending. A model
answers within seconds, and the sweeper hints again for what was left."""


async def ready(connection: Connection, generation: Generation, works: Sequence[Work]) -> list[Work]:
    """The documents whose entries can be written now: all but those whose vectors are about to be written."""
    if generation.vectors != "elasticsearch":
        return list(works)
    carrying = [w.identity.id for w in works if w.chunk_ids]
    awaited = await work.vectors_expected(connection, generation.name, carrying, within_seconds=WAIT_SECONDS)
    return [w for w in works if w.identity.id not in awaited]


async def held(connection: Connection, generation: Generation, documents: Sequence[UUID]) -> Mapping[UUID, set[UUID]]:
    """The chunks of these documents whose entries shall carry vectors, by document: those that have a row."""
    if generation.vectors != "elasticsearch":
        return {}
    return await chunk_rows.present(connection, generation, documents)


async def of_chunks(connection: Connection, generation: Generation, chunks: Sequence[UUID]) -> Mapping[UUID, Vectors]:
    """The vectors of these chunks. A chunk whose row was deleted meanwhile is absent."""
    if not chunks:
        return {}
    from pipeline.stores import vectors  # here: it imports numpy, which other generations need not

    return await vectors.of_ids(connection, generation, chunks)


def fields(vector: Vectors) -> dict[str, object]:
    """The fields that an entry with a vector has besides the others."""
    return {HAS_VECTOR: True, VECTOR: dense.encoded(vector)}


async def gained(connection: Connection, generation: Generation, without: Mapping[UUID, Collection[UUID]]) -> set[UUID]:
    """Those of these documents of which a chunk has a row by now although its entry was written without a vector.
    without: such chunks, by document. The caller has locked the documents' keyword states, so that the vectors sink
    reopens a document whose row is not seen here yet."""
    if generation.vectors != "elasticsearch" or not without:
        return set()
    present = await chunk_rows.present(connection, generation, list(without))
    return {document for document, chunks in without.items() if not present.get(document, set()).isdisjoint(chunks)}
