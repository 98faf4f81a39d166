"""The query that canaries are searched with. It loads no model: the ledger has the vector of its text."""

from __future__ import annotations

from typing import cast

import numpy as np

from pipeline.core.errors import Retryable
from pipeline.core.model import Generation
from pipeline.embedding.port import Embedder, Vectors
from pipeline.ledger import generations
from pipeline.ledger.generations import REFERENCE_TEXT
from pipeline.stores.postgres import Pool, translated
from query.embedding.embedders import QueryEmbedder

WORDS = REFERENCE_TEXT
"""Text of every canary, and of the query: each generation stores this text's vector (``check_model``)."""


class Reference(QueryEmbedder):
    """Returns a generation's stored vector of WORDS for any text; the active generation's where none is set."""

    def __init__(self, pool: Pool, generation: Generation | None = None) -> None:
        super().__init__(_no_model)
        self._pool = pool
        self._generation = generation

    def of(self, generation: Generation) -> Reference:
        return Reference(self._pool, generation)

    def start(self) -> None:
        """Does nothing: there is nothing to load."""

    async def embed(self, text: str) -> tuple[Embedder, Vectors]:
        """Raises Retryable until a vectors worker has started with the generation."""
        with translated("canary"):
            async with self._pool.connection() as connection:
                generation = self._generation or await generations.active(connection)
                vector = await generations.reference(connection, generation)
        if vector is None:
            raise Retryable(f"no vectors worker has started with generation {generation.name} yet", service="embedding")
        # Callers read only the attributes that identify the model, and a generation has these.
        return cast("Embedder", generation), np.asarray(vector, dtype=np.float32)


def _no_model() -> Embedder:
    raise AssertionError("nothing is loaded: the vector is known")
