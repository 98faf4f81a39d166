"""The types that all parts share: stores, lanes, chunks, manifests, generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from pipeline.core.relevance import Calibration

Store = Literal["vectors", "keywords"]
STORES: tuple[Store, Store] = ("vectors", "keywords")
Lane = Literal["live", "backfill"]
EmbeddingProvider = Literal["local", "openai"]
VectorIndex = Literal["pgvector", "elasticsearch"]
"""Where the nearest vectors of a generation are searched: in an HNSW graph over its chunk table, or in its keyword
index, whose entries then carry the vectors."""
Quantisation = Literal["halfvec", "binary"]
MAX_GRAPH_DIMENSIONS: Mapping[Quantisation, int] = {"halfvec": 4_000, "binary": 16_000}
"""The most dimensions that a graph in pgvector takes; a graph of signs would take 64,000, but the row
with its halfvec does not."""
SKETCH_BLOCK = 128
"""A sketch (``pipeline.core.sketch``) has one bit for each dimension, rounded up to whole blocks of so many."""

ConflictKind = Literal["number", "date", "version", "unit", "name", "negation", "duplicate", "outdated"]
Span = tuple[int, int]
"""Half-open range of characters (code points) in a document's normalised text."""

CountTokens = Callable[[Sequence[str]], list[int]]
"""Texts → their token counts as the generation's model counts them (without special tokens)."""


@dataclass(frozen=True, slots=True)
class ChunkParams:
    """How a generation chunks text. All sizes are in tokens of the generation's model.

    target: the size that a chunk should have; min_tokens: a smaller chunk is not ended at a boundary; max_tokens: the
    largest size, which is the model's input window; overlap: the part of ``target`` that running text repeats from the
    chunk before (0.15–0.20).
    """

    target: int = 400
    min_tokens: int = 160
    max_tokens: int = 512
    overlap: float = 0.175
    version: int = 2
    """The version of the chunker. It is raised whenever the same text would be chunked or embedded differently, which
    makes another generation; for generations with a lower version the chunker still works in the old way. Since 2,
    chunks of short documents are embedded with the title (``pipeline.core.titles``)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document's text. Law: ``text == "".join(normalised[a:b] for a, b in spans)``.

    It has more than one span where context is repeated at its beginning, such as a table's header or a long function's
    signature.
    """

    text: str
    spans: tuple[Span, ...]
    token_count: int
    headings: tuple[str, ...] = ()
    """The headings that it is under, the outermost first. Keyword search uses them; they are not embedded."""


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
    """Where a generation's model is served, without the key."""

    provider: EmbeddingProvider
    base_url: str | None = None
    send_dimensions: bool = True
    encoding_format: Literal["float", "base64"] = "base64"
    price_per_million_tokens: float | None = None
    """None: the price in the settings."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One embedding model with one way of chunking, and the table and index that hold the result."""

    name: str
    state: Literal["building", "active", "previous", "retired"]
    model: str
    revision: str
    dimensions: int
    input_window: int
    """The most tokens that the model reads, without special tokens."""
    params: ChunkParams
    document_prefix: str
    query_prefix: str
    chunk_table: str
    keyword_index: str
    vector_type: Literal["halfvec", "vector"] = "halfvec"
    service: EmbeddingService | None = None
    """None: the settings say where the model is served."""
    calibration: Calibration | None = None
    """None: the floor of relevance was not measured yet."""
    vectors: VectorIndex = "pgvector"
    quantisation: Quantisation = "halfvec"
    """A graph in pgvector holds each vector, or with ``binary`` one bit for each dimension (``graph_of_sketches``)."""
    sketched: bool = True
    """Whether rows of its chunk table have sketches (``pipeline.core.sketch``); False: an older version made it."""
    centred: bool = False
    """Whether the sketches are those of the vectors without ``centre``; False: an older version made it."""
    centre: bytes | None = None
    """The part that all vectors of its model share (``pipeline.core.centre``), as pgvector sends it; None: no worker
    with the model has started yet."""

    @property
    def sketch_bits(self) -> int:
        """The number of bits of a sketch."""
        return -(-self.dimensions // SKETCH_BLOCK) * SKETCH_BLOCK

    @property
    def graph_of_sketches(self) -> bool:
        """Whether a binary graph holds the rows' sketches (docs/adr/0122); over a table that has none, it holds the
        signs of the vectors as they are."""
        return self.quantisation == "binary" and self.sketched

    @property
    def indexed_dimensions(self) -> int | None:
        """The number of dimensions of the vectors that its keyword entries carry; None: they carry none."""
        return self.dimensions if self.vectors == "elasticsearch" else None
