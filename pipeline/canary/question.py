"""What canaries are looked for with. No model is loaded for it: the vector of one text stands in the ledger."""

from __future__ import annotations

from typing import cast

import numpy as np

from pipeline.core.errors import Retryable
from pipeline.core.model import Generation
from pipeline.embedding.port import Embedder, Vectors
from pipeline.ledger import generations
from pipeline.ledger.generations import REFERENCE_TEXT
from pipeline.stores.postgres import Pool, translated
from query.embedder import QueryEmbedder

WORDS = REFERENCE_TEXT
"""What every canary says, and what it is asked for by: each generation keeps this text's vector (``check_model``)."""


class Reference(QueryEmbedder):
    """Answers with a generation's own vector of WORDS, whatever it is asked: the active one's, until one is named."""

    def __init__(self, pool: Pool, generation: Generation | None = None) -> None:
        super().__init__(_no_model)
        self._pool = pool
        self._generation = generation

    def of(self, generation: Generation) -> Reference:
        return Reference(self._pool, generation)

    def start(self) -> None:
        """There is nothing to load."""

    async def embed(self, text: str) -> tuple[Embedder, Vectors]:
        """Raises Retryable while no vectors worker has ever begun to fill the generation."""
        with translated("canary"):
            async with self._pool.connection() as connection:
                generation = self._generation or await generations.active(connection)
                vector = await generations.reference(connection, generation)
        if vector is None:
            raise Retryable(f"no vectors worker has started with generation {generation.name} yet", service="embedding")
        # Only what names the model is read of it, to compare it with the generation's, which this is.
        return cast("Embedder", generation), np.asarray(vector, dtype=np.float32)


def _no_model() -> Embedder:
    raise AssertionError("nothing is loaded: the vector is known")
