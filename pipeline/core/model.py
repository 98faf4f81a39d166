"""The nouns that every part shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

Store = Literal["vectors", "keywords"]
STORES: tuple[Store, Store] = ("vectors", "keywords")
Lane = Literal["live", "backfill"]
EmbeddingProvider = Literal["local", "openai"]

Span = tuple[int, int]
"""Half-open range of characters (code points) in a document's normalised text."""

CountTokens = Callable[[Sequence[str]], list[int]]
"""Texts → their token counts as the generation's model counts them (without special tokens)."""


@dataclass(frozen=True, slots=True)
class ChunkParams:
    """How a generation cuts text. All sizes in tokens of the generation's model.

    target: what a chunk aims at; min_tokens: no boundary is sought below it; max_tokens: never more (the input window);
    overlap: share of the target that running text repeats from the chunk before (0.15–0.20).
    """

    target: int = 400
    min_tokens: int = 160
    max_tokens: int = 512
    overlap: float = 0.175
    version: int = 1
    """Raised whenever the chunker would cut the same text differently, so that the new way is another generation. The
    chunker cuts in the old way for generations that have a lower version."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One passage. Law: ``text == "".join(normalised[a:b] for a, b in spans)``.

    More than one span where context is repeated in front: a table's header, a long function's signature.
    """

    text: str
    spans: tuple[Span, ...]
    token_count: int
    headings: tuple[str, ...] = ()
    """The heading path it stands under, outermost first. Searched by keyword, never embedded."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The desired chunks of one document in one generation, in reading order."""

    content_hash: bytes
    chunk_ids: tuple[UUID, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()
    token_counts: tuple[int, ...] = ()
    headings: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingService:
    """Where a generation's model is, as far as it may be written down: never with its key."""

    provider: EmbeddingProvider
    base_url: str | None = None
    send_dimensions: bool = True
    encoding_format: Literal["float", "base64"] = "base64"
    price_per_million_tokens: float | None = None
    """None: the price in the settings."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One embedding model with one way of cutting, and the tables and indexes that hold the result."""

    name: str
    state: Literal["building", "active", "previous", "retired"]
    model: str
    revision: str
    dimensions: int
    input_window: int
    """Most tokens the model reads, special tokens not counted."""
    params: ChunkParams
    document_prefix: str
    query_prefix: str
    chunk_table: str
    keyword_index: str
    vector_type: Literal["halfvec", "vector"] = "halfvec"
    service: EmbeddingService | None = None
    """None: the settings alone say where the model is."""
