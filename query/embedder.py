"""The query's vector: from a model that is loaded in the background, once, and only if somebody needs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Protocol, Self

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Generation
from pipeline.embedding.port import Embedder, Vectors

EMBED_SECONDS = 5.0


class Embedders(Protocol):
    """Law: what ``of`` gives embeds as the generation's own model does, or by another one that does not hide it:
    ``require_same`` is asked before any two vectors are compared."""

    def of(self, generation: Generation) -> QueryEmbedder: ...

    async def keep(self, generations: Collection[Generation]) -> None:
        """Models of these are needed; others may be let go."""
        ...

    async def aclose(self) -> None: ...


@asynccontextmanager
async def bounded(seconds: float, what: str) -> AsyncIterator[None]:
    """Raises Retryable when the body takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Retryable(f"{what} did not answer within {seconds:g} s") from error


class QueryEmbedder:
    """Safe to share between tasks. A load that failed is tried again by the next query."""

    def __init__(
        self, load: Callable[[], Embedder], *, load_seconds: float = 60.0, embed_seconds: float = EMBED_SECONDS
    ) -> None:
        """load: blocking; runs in a thread. load_seconds: the very first time on a machine, the local model is
        converted."""
        self._load = load
        self._load_seconds = load_seconds
        self._embed_seconds = embed_seconds
        self._loading: asyncio.Task[Embedder] | None = None

    def of(self, generation: Generation) -> Self:
        """One model, whatever it is asked for: ``Embedders``, where there is no other."""
        return self

    async def keep(self, generations: Collection[Generation]) -> None:
        """It stays."""

    def start(self) -> None:
        """Begin to load, unless that is done or under way. Needs a running event loop."""
        failed = self._loading is not None and self._loading.done() and self._loading.exception() is not None
        if self._loading is None or failed:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load), name="load embedder")

    async def embed(self, text: str) -> tuple[Embedder, Vectors]:
        """The query as a vector, and the model that made it. Raises Retryable or Misconfigured."""
        self.start()
        assert self._loading is not None
        async with bounded(self._load_seconds, "loading the embedding model"):
            embedder = await asyncio.shield(self._loading)  # my cancellation is not the other queries'
        async with bounded(self._embed_seconds, "the embedding model"):
            return embedder, await embedder.embed_query(text)

    async def aclose(self) -> None:
        if self._loading is not None:
            done = (await asyncio.gather(self._loading, return_exceptions=True))[0]
            if not isinstance(done, BaseException):
                await done.aclose()


def is_same(embedder: Embedder, generation: Generation) -> bool:
    """Whether it is the model that filled the generation."""
    mine = (embedder.model, embedder.dimensions, embedder.query_prefix)
    theirs = (generation.model, generation.dimensions, generation.query_prefix)
    # A served model may not name its revision: then the workers' comparison of a reference text has to do.
    revisions = {embedder.revision, generation.revision} - {""}
    return mine == theirs and len(revisions) < 2


def require_same(embedder: Embedder, generation: Generation) -> None:
    """Models never mix: the query's must be the one that filled the generation. Raises Misconfigured."""
    if not is_same(embedder, generation):
        raise Misconfigured(
            f"settings name {embedder.model} ({embedder.dimensions} dimensions, query prefix"
            f" {embedder.query_prefix!r}), but generation {generation.name} was built with {generation.model}"
            f" ({generation.dimensions}, {generation.query_prefix!r}) or other weights of it: put the settings back"
        )
