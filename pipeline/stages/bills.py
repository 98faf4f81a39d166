"""What embedding cost, for the metrics and for the budget of a build."""

from __future__ import annotations

from collections import Counter

from pipeline.core.model import Generation
from pipeline.ledger import builds
from pipeline.stores.postgres import Pool, translated
from pipeline.telemetry import Metrics


class Bills:
    """Law: what was billed reaches the build's row once, whatever fails meanwhile, as long as this process lives."""

    def __init__(self, pool: Pool, metrics: Metrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._owed: Counter[str] = Counter()
        """Generation → tokens that its build has not been told of yet."""

    async def add(self, generation: Generation, billed: int, *, counted: int) -> None:
        """counted: tokens as we count them, where the server does not say. Raises Retryable while the row cannot be
        written; the tokens are not to be added again."""
        self._metrics.embedding_billed(
            billed, generation.service.price_per_million_tokens if generation.service else None
        )
        if generation.state == "building":
            self._owed[generation.name] += billed or counted
            await self.settle(generation)

    async def settle(self, generation: Generation) -> None:
        """Write down what could not be written before. Raises Retryable."""
        tokens = self._owed.pop(generation.name, 0)  # taken away first: two lanes may come at once
        if not tokens:
            return
        try:
            with translated("vectors"):
                async with self._pool.connection() as connection:
                    await builds.spent(connection, generation.name, tokens)
        except BaseException:  # also when it is cancelled
            self._owed[generation.name] += tokens
            raise
