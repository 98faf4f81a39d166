"""Settings → the embedder, how its generation cuts text, and how tokens are counted."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from pipeline.core.errors import Misconfigured
from pipeline.core.model import ChunkParams, CountTokens, EmbeddingService, Generation
from pipeline.embedding import convert
from pipeline.embedding.port import Embedder
from pipeline.embedding.tokens import Tokens, byte_pairs, word_pieces
from pipeline.runtime.settings import OPENAI_URL, EmbeddingSettings

OPENAI_HOST = urlsplit(OPENAI_URL).netloc
LARGEST_TARGET = 400
SMALLEST_TARGET = 16


def embedder(settings: EmbeddingSettings, models: Path) -> Embedder:
    """models: the folder that converted models are kept in. Raises Misconfigured, naming the setting or the extra."""
    if settings.provider == "openai":
        # Here, because aiohttp takes 0.15 s to import, and only this provider needs it.
        from pipeline.embedding.openai import OpenAIEmbedder

        return OpenAIEmbedder(settings, _tokens(settings.model, models))
    if settings.model not in ("", convert.MODEL):
        raise Misconfigured(f"PENSTOCK_EMBEDDING_MODEL={settings.model}: the local provider has only {convert.MODEL}")
    if settings.dimensions not in (None, convert.DIMENSIONS):
        raise Misconfigured(f"PENSTOCK_EMBEDDING_DIMENSIONS: must be {convert.DIMENSIONS} for {convert.MODEL}")
    if settings.input_window not in (None, convert.MAX_TOKENS - 2):
        raise Misconfigured(f"PENSTOCK_EMBEDDING_INPUT_WINDOW: {convert.MODEL} reads {convert.MAX_TOKENS - 2} tokens")
    from pipeline.embedding.local import LocalEmbedder  # here: who only counts tokens need not wait for numpy

    return LocalEmbedder(
        convert.prepare(models),
        threads=settings.threads,
        document_prefix=settings.document_prefix,
        query_prefix=settings.query_prefix,
    )


def for_generation(generation: Generation, settings: EmbeddingSettings, models: Path) -> Embedder:
    """The generation's own model. Raises Misconfigured."""
    return embedder(settings_of(generation, settings), models)


def settings_of(generation: Generation, settings: EmbeddingSettings) -> EmbeddingSettings:
    """The settings that make a generation's model: as they are where they name it (its server may have moved since it
    was built), else with what its row says in their place. Raises Misconfigured where that says nothing."""
    service = generation.service
    provider = service.provider if service else settings.provider
    generation_model = (
        provider,
        generation.model,
        generation.dimensions,
        generation.document_prefix,
        generation.query_prefix,
    )
    if (settings.provider, *_named(settings), settings.document_prefix, settings.query_prefix) == generation_model:
        return settings
    if service is None:
        model, dimensions = _named(settings)
        raise Misconfigured(
            f"the settings name {model} ({dimensions} dimensions), but generation {generation.name} was built with"
            f" {generation.model} ({generation.dimensions}), whose address is not known: restore the settings and run"
            " `penstock migrate`, which stores it"
        )
    return settings.model_copy(
        update={
            "provider": provider,
            "model": generation.model,
            "dimensions": generation.dimensions,
            "input_window": generation.input_window,
            "document_prefix": generation.document_prefix,
            "query_prefix": generation.query_prefix,
            "base_url": service.base_url,
            "api_key": key_of(service, settings),
            "send_dimensions": service.send_dimensions,
            "encoding_format": service.encoding_format,
            "chunk_tokens": None,
            "price_per_million_tokens": settings.price_per_million_tokens
            if service.price_per_million_tokens is None
            else service.price_per_million_tokens,
        }
    )


def service_of(settings: EmbeddingSettings) -> EmbeddingService | None:
    """The address of the settings' model as it may be stored, without its key. None: its address holds a secret."""
    parts = urlsplit(settings.base_url or "")
    if parts.username or parts.password or parts.query:
        return None
    return EmbeddingService(
        settings.provider, settings.base_url, settings.send_dimensions, settings.encoding_format, None
    )


def _named(settings: EmbeddingSettings) -> tuple[str, int]:
    """Model and dimensions, the provider's defaults in place of what is not set."""
    if settings.provider == "local":
        return settings.model or convert.MODEL, settings.dimensions or convert.DIMENSIONS
    from pipeline.embedding.openai import DIMENSIONS, MODEL

    return settings.model or MODEL, settings.dimensions or DIMENSIONS


def key_of(service: EmbeddingService, settings: EmbeddingSettings) -> SecretStr | None:
    """A key goes to the host that it was given for, and to no other."""
    host = urlsplit(service.base_url).netloc if service.base_url else OPENAI_HOST
    if (key := settings.api_keys.get(host)) is not None:
        return key
    own = urlsplit(settings.base_url).netloc if settings.base_url else OPENAI_HOST
    return settings.api_key if settings.provider == service.provider and own == host else None


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
    """The tokenizer of a model, for embedding and counting alike. An unknown model is counted as cl100k."""
    if model.rpartition("/")[2] == convert.MODEL:
        return word_pieces(convert.prepare(models) / convert.TOKENIZER)
    return byte_pairs()
