"""The probe of a standing question: what a new passage has to resemble to be in the answer's context.

It is the question's vector q, followed by the root of 2f, where the floor f is the cosine of the last passage of the
context. The square of its distance to a chunk's vector c, followed by 0, is 2 - 2(q·c - f): a chunk would enter the
context where the distance is below ENTERS. So the nearest probes are those with the largest margin, whatever their
floors. (By inner product with the negated floor they would be too, but a graph finds few of them: its hubs are the
probes with the highest floors.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from uuid import UUID

import numpy as np
from pgvector import HalfVector
from psycopg import sql

from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.stores.postgres import Connection
from pipeline.stores.vectors import value
from query.retrieval.ranking import floors_of
from query.settings import RetrievalSettings

ENTERS = sqrt(2)
UNKNOWN_FLOOR = 0.5
"""The least cosine of a passage that would enter, where the floor of relevance is not known."""


async def probe(
    connection: Connection,
    generation: Generation,
    vector: Vectors,
    chunks: Sequence[UUID],
    documents: Sequence[UUID],
    settings: RetrievalSettings,
    *,
    is_full: bool,
) -> HalfVector:
    """The probe of a question with this vector. chunks: those of its context, which count if it is full. Where the
    generation has none of them, because it is newer than the answer, the nearest chunk of each of the documents counts.
    Raises psycopg.Error."""
    cursor = await connection.execute(
        sql.SQL("""
            WITH of_chunks AS (
                SELECT min(1 - (embedding <=> %(vector)s)) AS least FROM {chunks} WHERE id = ANY(%(ids)s::uuid[])
            )
            SELECT coalesce(
                (SELECT least FROM of_chunks),
                (SELECT min(nearest) FROM (
                    SELECT max(1 - (embedding <=> %(vector)s)) AS nearest FROM {chunks}
                    WHERE document_id = ANY(%(documents)s::uuid[]) GROUP BY document_id
                ) each)
            )
        """).format(chunks=sql.Identifier(generation.chunk_table)),
        {
            "vector": value(generation, vector),
            "ids": list(chunks) if is_full else [],
            "documents": list(documents) if is_full else [],
        },
    )
    [least] = await cursor.fetchone() or (None,)
    relevant = floors_of(generation, settings).cosine
    floor = UNKNOWN_FLOOR if relevant is None else relevant
    return make(vector, max(floor, least if least is not None else floor))


def make(vector: Vectors, floor: float) -> HalfVector:
    """The probe of a question with this vector and floor."""
    return HalfVector(np.append(vector, sqrt(2 * max(0.0, floor))))
