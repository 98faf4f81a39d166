"""What a reranker is to whoever asks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Reranker(Protocol):
    """Reads a question and a passage together, which no index does. Safe to share between tasks."""

    @property
    def model(self) -> str: ...

    async def rerank(self, query: str, texts: Sequence[str], *, tenant: str = "") -> Sequence[float]:
        """How relevant each text is, in their order; larger is better, comparable within one query only.

        tenant: whose question it is. What is remembered of it is remembered for that tenant alone.

        Raises Retryable (Deferred) when it is away or slow, Misconfigured when it refuses, Poison when it cannot read
        this very question (too long, rejected).
        """

    async def aclose(self) -> None: ...
