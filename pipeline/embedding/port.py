"""The interface of an embedding model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pipeline.core.model import Generation
from pipeline.observability.metrics import EmbeddingOutcome

if TYPE_CHECKING:  # a tenth of a second to import, for processes that only name the type
    import numpy as np
    from numpy.typing import NDArray

Vectors: TypeAlias = "NDArray[np.float32]"


@dataclass(frozen=True, slots=True)
class Embedded:
    """Rows of ``vectors`` (float32, unit length) in input order; a refused input has a row of zeros and a reason."""

    vectors: Vectors
    refused: dict[int, str] = field(default_factory=dict)
    """Index of an input that the model will never take → why (bounded text, no content)."""
    tokens: int = 0
    """Tokens billed, where the server says so."""
    money: float = 0.0
    """Their price."""


class Embedder(Protocol):
    """Law: the same text gives the same vector (within float noise), whatever it is batched with.

    Blank text and text that is not Unicode is refused, never sent. A text above ``input_window`` is embedded by its
    beginning, and counted by ``on_truncated``. Safe to share between the tasks of one event loop.
    """

    model: str
    revision: str
    """Names the weights: a digest for the local model, what the server reports (or "") for a remote one."""
    dimensions: int
    input_window: int
    """Most tokens of one input, special tokens not counted."""
    document_prefix: str
    query_prefix: str
    on_truncated: Callable[[int], None]
    """Called with the number of passages of a call that were longer than the window and lost their end."""
    on_request: Callable[[EmbeddingOutcome, float], None]
    """Called for every request to the model with its outcome and its duration in seconds."""

    on_question: Callable[[int, float], None]
    """Called with the cost of a question: tokens, as the server counts them, and money."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Token counts as this model counts them, special tokens not counted. CPU work: long texts go to a thread."""
        ...

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        """Embed passages (the document prefix is added here). Raises Retryable on 429/5xx/refused, Misconfigured on a
        wrong key, model or dimension; ``tokens`` of either says what was billed all the same. An input that can never
        be embedded does not raise: it is in ``refused``."""
        ...

    async def embed_query(self, text: str) -> Vectors:
        """One query → float32 (dimensions,), unit length. Raises like embed_documents, and Poison("unembeddable_query")
        where a passage would have been refused."""
        ...

    async def aclose(self) -> None: ...


class Models(Protocol):
    """The embedding model of each generation."""

    async def of(self, generation: Generation) -> Embedder:
        """Raises Misconfigured (service "embedding") when it cannot be had, Retryable when it does not answer."""
        ...


class OneModel:
    """A ``Models`` where there is one generation, or one model for all."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def of(self, _generation: Generation) -> Embedder:
        return self._embedder
