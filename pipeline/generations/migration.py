"""Another model, other dimensions or another way of cutting: a generation with both stores of its own, built beside the
active one while searches and live changes go on. See docs/generations.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Generation
from pipeline.embedding import choose
from pipeline.embedding.port import Embedder
from pipeline.generations.building import Builder
from pipeline.generations.estimate import Estimate, estimate
from pipeline.generations.indexes import holds_entries
from pipeline.generations.limits import Feed, Limits
from pipeline.generations.tables import wanted, written
from pipeline.ledger import builds, clearing, generations
from pipeline.ledger.builds import Build
from pipeline.settings import EmbeddingSettings
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.postgres import create_chunk_table, translated

MOST_DIMENSIONS = 4_000
"""That pgvector's graph takes of a halfvec."""


@dataclass(frozen=True, slots=True)
class Change:
    """What shall differ from the active generation; nothing: what is under way goes on.

    model: fields of EmbeddingSettings (never a key) that say which model, and where it is.
    """

    model: dict[str, Any] = field(default_factory=dict)
    chunk_tokens: int | None = None
    price: float | None = None
    """Of a million tokens. None: the settings'."""

    @property
    def asks(self) -> bool:
        return bool(self.model) or self.chunk_tokens is not None


@dataclass(frozen=True, slots=True)
class Plan:
    generation: str
    replaces: str
    model: str
    dimensions: int
    chunk_tokens: int
    estimate: Estimate
    price: float
    resumes: bool


@dataclass(frozen=True, slots=True)
class Result:
    generation: str
    active: str
    ready: bool
    """It may be cut over to."""
    documents: int
    chunks: int
    embedded: int
    tokens: int
    seconds: float


class Migration:
    """Law: searches are answered by the active generation, whatever becomes of this; killed anywhere, it goes on when
    it is run again."""

    def __init__(self, builder: Builder, settings: EmbeddingSettings, models: Path) -> None:
        """models: the folder that converted models are kept in."""
        self._builder = builder
        self._connection = builder.connection
        self._settings = settings
        self._models = models

    async def plan(self, change: Change) -> Plan:
        """Begins nothing. Raises Misconfigured for a change that cannot be, or that changes nothing."""
        with translated("generation"):
            active = await generations.active(self._connection)
            async with self._wanted(active, change) as (new, embedder, resumes):
                price = self._price(new)
                origin = resumes.origin if resumes else active
                found = await estimate(self._connection, origin, new, embedder.count_tokens, price=price)
        return Plan(
            new.name, active.name, new.model, new.dimensions, new.params.target, found, price, resumes is not None
        )

    async def run(self, change: Change, limits: Limits, *, wait: bool) -> Result:
        """wait: until it may be cut over to; else until every document is in the hands of the workers. Raises Paused
        when what may be spent is spent, Retryable (what to do is said; run it again) and Misconfigured."""
        start, builder = monotonic(), self._builder
        with translated("generation"):
            await builder.require_served("vectors", "keywords")
            await builder.clear()  # what an earlier run was killed over: its disk space is needed now
            active = await generations.active(self._connection)
            async with self._wanted(active, change) as (new, embedder, build):
                ratio = 1.0
                if limits.any:
                    origin = build.origin if build else active
                    found = await estimate(self._connection, origin, new, embedder.count_tokens, price=limits.price)
                    ratio = found.ratio
                if build is None:
                    build = await self._begin(new, active)
                    await generations.check_model(self._connection, build.generation, embedder)
                elif new.service is not None and new.service != build.generation.service:
                    await generations.note_service(self._connection, new.name, new.service)
            feed = Feed(limits, ratio=ratio, name=f"generation {new.name}") if limits.any else None
            await builder.fill(build, feed)
            if wait:
                await builder.converge(build)
                await builder.complete(build)
                await builder.converge(build)
                await builds.ready(self._connection, build)
            documents, chunks, _ = await wanted(self._connection, build.generation)
            embedded = await written(self._connection, build.generation, "vectors")
            tokens = await builds.tokens(self._connection, build)
        return Result(new.name, active.name, wait, documents, chunks, embedded, tokens, round(monotonic() - start, 3))

    @asynccontextmanager
    async def _wanted(
        self, active: Generation, change: Change
    ) -> AsyncIterator[tuple[Generation, Embedder, Build | None]]:
        """The generation as it shall be, its model, and its build if it was begun before."""
        build = await self._under_way()
        if build is None and change.asks and active.service is None:
            raise Misconfigured(
                f"where the model of generation {active.name} is, is not known, so there would be no way back to it:"
                " run `penstock migrate` with settings that name it (and no password in its address), which notes it"
            )
        if build is not None and not change.asks:
            target = choose.settings_of(build.generation, self._settings)
        else:
            target = self._target(active, change)
        embedder = await asyncio.to_thread(choose.embedder, target, self._models)
        try:
            if build is None or change.asks:
                new = await self._new(active, change, target, embedder)
                if build is not None and not _alike(build.generation, new):
                    raise Misconfigured(builds.occupied(build))
            if build is not None:
                new = _priced(build.generation, change)
            await _answers(embedder)
            yield new, embedder, build
        finally:
            await embedder.aclose()

    async def _under_way(self) -> Build | None:
        """The build to go on with. One whose table or index is gone is none: its states would be wrong."""
        build = await builds.under_way(self._connection)
        if build is None:
            return None
        if len(build.replaces) < 2:
            raise Misconfigured(builds.occupied(build))
        return build if await self._builder.is_there(build) else None

    def _target(self, active: Generation, change: Change) -> EmbeddingSettings:
        """The active generation's own model with what shall differ. Another model starts from the defaults, not from
        the dimensions, window and prefixes of this one."""
        if not change.asks:
            raise Misconfigured(
                "nothing is being built, and nothing was asked for: say what shall differ, with --model, --dimensions,"
                " --chunk-tokens, … (penstock generation build --help)"
            )
        own = choose.settings_of(active, self._settings)
        base: dict[str, Any] = {"chunk_tokens": active.params.target}
        if "model" in change.model or "provider" in change.model:
            base = {
                "provider": "openai" if "model" in change.model or "base_url" in change.model else own.provider,
                "model": "", "dimensions": None, "input_window": None, "document_prefix": "", "query_prefix": "",
                "chunk_tokens": None,
            }  # fmt: skip
            if own.provider != "openai":
                base |= {"base_url": None, "api_key": None}
        target = own.model_copy(update={**base, **change.model})
        if change.chunk_tokens is not None:
            target = target.model_copy(update={"chunk_tokens": change.chunk_tokens})
        service = choose.service_of(target)
        if service is None:
            raise Misconfigured(
                "the address of the embedding service holds a password or a query, which would be written down with the"
                " generation: give the key in PENSTOCK_EMBEDDING_API_KEYS instead"
            )
        return target.model_copy(update={"api_key": choose.key_of(service, self._settings)})

    async def _new(
        self, active: Generation, change: Change, target: EmbeddingSettings, embedder: Embedder
    ) -> Generation:
        service = choose.service_of(target)
        assert service is not None
        new = replace(
            active, state="building", model=embedder.model, revision=embedder.revision, dimensions=embedder.dimensions,
            input_window=embedder.input_window, params=choose.chunk_params(target, embedder),
            document_prefix=embedder.document_prefix, query_prefix=embedder.query_prefix,
            service=replace(service, price_per_million_tokens=change.price),
        )  # fmt: skip
        if new.dimensions > MOST_DIMENSIONS:
            raise Misconfigured(f"{new.dimensions} dimensions: the graph takes {MOST_DIMENSIONS} at most")
        if _alike(new, active):
            raise Misconfigured(
                f"nothing would change: the active generation {active.name} has {active.model}, {active.dimensions}"
                f" dimensions, chunks of {active.params.target} tokens. (Another model needs another name, and a server"
                " that moved only needs PENSTOCK_EMBEDDING_BASE_URL in the workers' settings)"
            )
        name = await builds.next_name(self._connection)
        prefix = f"{self._builder.settings.index_prefix}chunks-"
        while await holds_entries(self._builder.es, prefix + name):
            name = f"g{int(name[1:]) + 1}"  # not ours to empty: a ledger that was lost may have named it
        return replace(new, name=name, chunk_table=f"chunks_{name}", keyword_index=prefix + name)

    async def _begin(self, new: Generation, active: Generation) -> Build:
        settings = self._builder.settings
        if (broken := await builds.under_way(self._connection)) is not None:
            await builds.give_up(self._connection, broken.generation.name)
        await clearing.drop_table(self._connection, new.chunk_table)  # of a run that was killed before it had a row
        await create_chunk_table(self._connection, new)
        await create_index(self._builder.es, new.keyword_index, shards=settings.shards, refresh_interval="-1")
        return await builds.begin(self._connection, new, active)

    def _price(self, new: Generation) -> float:
        price = new.service.price_per_million_tokens if new.service else None
        return self._settings.price_per_million_tokens if price is None else price


def _priced(generation: Generation, change: Change) -> Generation:
    """A build that goes on, at the price that is said now."""
    if change.price is None or generation.service is None:
        return generation
    return replace(generation, service=replace(generation.service, price_per_million_tokens=change.price))


def _alike(one: Generation, other: Generation) -> bool:
    """Whether they embed and cut alike."""
    return (one.model, one.dimensions, one.document_prefix, one.query_prefix, one.params) == (
        other.model, other.dimensions, other.document_prefix, other.query_prefix, other.params,
    )  # fmt: skip


async def _answers(embedder: Embedder) -> None:
    """That the model can be had, before anything is begun. Raises Misconfigured, Retryable."""
    embedded = await embedder.embed_documents([generations.REFERENCE_TEXT])
    if embedded.refused:
        raise Retryable(f"{embedder.model} refuses a plain sentence ({embedded.refused[0]}): nothing was begun")
