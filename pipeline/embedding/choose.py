"""Settings → the embedder, how its generation cuts text, and how tokens are counted."""

from __future__ import annotations

from pathlib import Path

from pipeline.core.errors import Misconfigured
from pipeline.core.model import ChunkParams, CountTokens, Generation
from pipeline.embedding import convert
from pipeline.embedding.local import LocalEmbedder
from pipeline.embedding.port import Embedder
from pipeline.embedding.tokens import Tokens, byte_pairs, word_pieces
from pipeline.settings import EmbeddingSettings

LARGEST_TARGET = 400
SMALLEST_TARGET = 16


def embedder(settings: EmbeddingSettings, models: Path) -> Embedder:
    """models: the folder that converted models are kept in. Raises Misconfigured, naming the setting or the extra."""
    if settings.provider == "openai":
        # Here, because the client takes 0.7 s and 35 MB to import, and only this provider needs it.
        from pipeline.embedding.openai import OpenAIEmbedder

        return OpenAIEmbedder(settings, _tokens(settings.model, models))
    if settings.model not in ("", convert.MODEL):
        raise Misconfigured(f"PENSTOCK_EMBEDDING_MODEL={settings.model}: the local provider has only {convert.MODEL}")
    if settings.dimensions not in (None, convert.DIMENSIONS):
        raise Misconfigured(f"PENSTOCK_EMBEDDING_DIMENSIONS: {convert.MODEL} has {convert.DIMENSIONS}, nothing else")
    if settings.input_window not in (None, convert.MAX_TOKENS - 2):
        raise Misconfigured(f"PENSTOCK_EMBEDDING_INPUT_WINDOW: {convert.MODEL} reads {convert.MAX_TOKENS - 2} tokens")
    return LocalEmbedder(
        convert.prepare(models),
        threads=settings.threads,
        document_prefix=settings.document_prefix,
        query_prefix=settings.query_prefix,
    )


def chunk_params(settings: EmbeddingSettings, embedder: Embedder) -> ChunkParams:
    """Sizes that fit the model's window with the document prefix in front: 400 of 160–512 tokens (OpenAI), 200 of
    80–254 (MiniLM), or around the set ``chunk_tokens``. Raises Misconfigured when that does not fit."""
    window = embedder.input_window - sum(embedder.count_tokens([embedder.document_prefix]))
    target = settings.chunk_tokens or min(LARGEST_TARGET, window * 4 // 5 // 10 * 10)
    if not SMALLEST_TARGET <= target <= window:
        raise Misconfigured(
            f"PENSTOCK_EMBEDDING_CHUNK_TOKENS: {target} is not between {SMALLEST_TARGET} and the {window} tokens "
            f"that {embedder.model} reads of a passage"
        )
    return ChunkParams(target=target, min_tokens=target * 2 // 5, max_tokens=min(window, target * 32 // 25))


def token_counter(generation: Generation, models: Path) -> CountTokens:
    """Counts as the generation's model does, without loading the model."""
    return _tokens(generation.model, models).count


def _tokens(model: str, models: Path) -> Tokens:
    """One rule for whoever embeds and whoever counts. A model we do not know is counted as cl100k."""
    if model.rpartition("/")[2] == convert.MODEL:
        return word_pieces(convert.prepare(models) / convert.TOKENIZER)
    return byte_pairs()
