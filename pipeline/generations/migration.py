"""Another model, other dimensions or another way of cutting: a generation with both stores of its own, built beside the
active one while searches and live changes go on. See docs/generations.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import Any

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.graph import usual_quantisation
from pipeline.core.model import MAX_GRAPH_DIMENSIONS, CountTokens, Generation, Quantisation, VectorIndex
from pipeline.core.titles import embedded_title, title_tokens
from pipeline.embedding import choose
from pipeline.embedding.port import Embedder
from pipeline.generations.building import Builder, holds_entries
from pipeline.generations.calibration import calibrate
from pipeline.generations.limits import Feed, Limits, Paused
from pipeline.ledger import builds, generation_tables, generations
from pipeline.ledger.builds import Build
from pipeline.ledger.generation_tables import desired_counts, written
from pipeline.observability import lineage
from pipeline.runtime.settings import EmbeddingSettings
from pipeline.stages.manifests import build_manifest
from pipeline.stores import datasets
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.postgres import Connection, create_chunk_table, translated


@dataclass(frozen=True, slots=True)
class Change:
    """The differences from the active generation. Without any, the build under way continues. model: the fields of
    EmbeddingSettings that name the model and its server, never a key."""

    model: dict[str, Any] = field(default_factory=dict)
    chunk_tokens: int | None = None
    price: float | None = None
    """The price of a million tokens. None: as in the settings."""
    vectors: VectorIndex | None = None
    quantisation: Quantisation | None = None
    """None for this and for the store: as in the active generation."""

    @property
    def asks(self) -> bool:
        return bool(self.model) or any(
            value is not None for value in (self.chunk_tokens, self.vectors, self.quantisation)
        )


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
    """True if the generation may be cut over to."""
    documents: int
    chunks: int
    embedded: int
    tokens: int
    seconds: float


class Migration:
    """Law: searches are answered by the active generation, whatever happens to the build. If this is killed anywhere,
    it continues when it is run again."""

    def __init__(self, builder: Builder, settings: EmbeddingSettings, models: Path) -> None:
        """models: the folder that converted models are kept in."""
        self._builder = builder
        self._connection = builder.connection
        self._settings = settings
        self._models = models

    async def plan(self, change: Change) -> Plan:
        """Return the extent of the change, without beginning it. Raises Misconfigured for a change that is impossible,
        or that changes nothing."""
        with translated("generation"):
            active = await generations.active(self._connection)
            async with self._desired(active, change) as (new, embedder, resumes):
                price = self._price(new)
                origin = resumes.origin if resumes else active
                estimated = await estimate(self._connection, origin, new, embedder.count_tokens, price=price)
        return Plan(
            new.name, active.name, new.model, new.dimensions, new.params.target, estimated, price, resumes is not None
        )

    async def run(self, change: Change, limits: Limits, *, wait: bool, without_failing: bool = False) -> Result:
        """Build the generation. wait: return when it may be cut over to, otherwise when every document was hinted to
        the workers. without_failing: see ``Builder``. Raises Paused when the budget is spent, Retryable, after which it
        may be run again, and Misconfigured."""
        start, builder = monotonic(), self._builder
        builder.without_failing = without_failing
        with translated("generation"):
            await builder.require_served("vectors", "keywords")
            await builder.clear()  # what an earlier run was killed over: its disk space is needed now
            active = await generations.active(self._connection)
            async with self._desired(active, change) as (new, embedder, build):
                ratio = 1.0
                if limits.any:
                    origin = build.origin if build else active
                    estimated = await estimate(self._connection, origin, new, embedder.count_tokens, price=limits.price)
                    ratio = estimated.ratio
                if build is None:
                    build = await self._begin(new, active)
                elif new.service is not None and new.service != build.generation.service:
                    await generations.note_service(self._connection, new.name, new.service)
                await generations.check_model(self._connection, build.generation, embedder)
            feed = Feed(limits, ratio=ratio, name=f"generation {new.name}") if limits.any else None
            with lineage.job(
                "generation.build",
                "MIGRATION",
                inputs=[datasets.ledger(self._connection), datasets.vectors(self._connection, active)],
                outputs=[
                    datasets.vectors(self._connection, build.generation),
                    datasets.keywords(builder.es, build.generation),
                ],
                aborts=Paused,
            ) as reported:
                await builder.fill(build, feed)
                if wait:
                    await builder.converge(build)
                    await builder.complete(build)
                    await builder.converge(build)
                    await self._calibrate(build.generation)
                    await builds.mark_ready(self._connection, build)
                documents, chunks, _ = await desired_counts(self._connection, build.generation)
                if wait:
                    reported.wrote(chunks, chunks)
            embedded = await written(self._connection, build.generation, "vectors")
            tokens = await builds.tokens(self._connection, build)
        return Result(new.name, active.name, wait, documents, chunks, embedded, tokens, round(monotonic() - start, 3))

    async def _calibrate(self, built: Generation) -> None:
        embedder = await asyncio.to_thread(choose.for_generation, built, self._settings, self._models)
        try:
            await calibrate(self._connection, built, embedder, es=self._builder.es)
        finally:
            await embedder.aclose()

    @asynccontextmanager
    async def _desired(
        self, active: Generation, change: Change
    ) -> AsyncIterator[tuple[Generation, Embedder, Build | None]]:
        """The desired generation, its model, and its build if one was begun before."""
        build = await self._under_way()
        if build is None and change.asks and active.service is None:
            raise Misconfigured(
                f"the address of the model of generation {active.name} is not known, so a rollback would be impossible:"
                " run `penstock migrate` with settings that name it (without a password), which stores it"
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
        """The build to continue; None: there is none, or its table or index is gone, so that its recorded states are
        wrong."""
        build = await builds.under_way(self._connection)
        if build is None:
            return None
        if len(build.replaces) < 2:
            raise Misconfigured(builds.occupied(build))
        return build if await self._builder.is_there(build) else None

    def _target(self, active: Generation, change: Change) -> EmbeddingSettings:
        """The settings of the active generation's model with the differences. Another model starts from its defaults,
        not from the dimensions, window and prefixes of the active one."""
        if not change.asks:
            raise Misconfigured(
                "no generation is being built, and no change is given: say what should differ, with --model,"
                " --dimensions, --chunk-tokens, --vectors, … (penstock generation build --help)"
            )
        own = choose.settings_of(active, self._settings)
        base: dict[str, Any] = {"chunk_tokens": active.params.target}
        if "model" in change.model or "provider" in change.model:
            base = {
                "provider": "openai" if "model" in change.model or "base_url" in change.model else own.provider,
                "model": "",
                "dimensions": None,
                "input_window": None,
                "document_prefix": "",
                "query_prefix": "",
                "chunk_tokens": None,
            }
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
        vectors = change.vectors or active.vectors
        if vectors == "elasticsearch" and change.quantisation is not None:
            raise Misconfigured(
                "--quantisation is for a graph in pgvector: Elasticsearch always holds one bit a dimension"
            )
        new = replace(
            active,
            state="building",
            calibration=None,
            model=embedder.model,
            revision=embedder.revision,
            dimensions=embedder.dimensions,
            input_window=embedder.input_window,
            params=choose.chunk_params(target, embedder),
            document_prefix=embedder.document_prefix,
            query_prefix=embedder.query_prefix,
            service=replace(service, price_per_million_tokens=change.price),
            vectors=vectors,
            quantisation=change.quantisation or default_quantisation(active, embedder.dimensions, vectors),
            sketched=True,
            centred=True,
            centre=None,
        )
        most = MAX_GRAPH_DIMENSIONS[new.quantisation]
        if new.dimensions > most:
            raise Misconfigured(f"{new.dimensions} dimensions: a graph of {new.quantisation} takes {most:,} at most")
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
        await generation_tables.drop_table(
            self._connection, new.chunk_table
        )  # of a run that was killed before it had a row
        await create_chunk_table(self._connection, new)
        await create_index(
            self._builder.es,
            new.keyword_index,
            shards=settings.shards,
            refresh_interval="-1",
            dimensions=new.indexed_dimensions,
        )
        return await builds.begin(self._connection, new, active)

    def _price(self, new: Generation) -> float:
        price = new.service.price_per_million_tokens if new.service else None
        return self._settings.price_per_million_tokens if price is None else price


def default_quantisation(active: Generation, dimensions: int, vectors: VectorIndex) -> Quantisation:
    """Return what the graph of a new generation holds when nobody says it: what the active one's does if somebody chose
    that, otherwise what is usual for the dimensions."""
    usual = usual_quantisation(dimensions, vectors)
    same = (dimensions, vectors) == (active.dimensions, active.vectors)
    chosen = active.quantisation != usual_quantisation(active.dimensions, active.vectors)
    return active.quantisation if vectors == "pgvector" and (same or chosen) else usual


def _priced(generation: Generation, change: Change) -> Generation:
    """The build that continues, with the price that was given now."""
    if change.price is None or generation.service is None:
        return generation
    return replace(generation, service=replace(generation.service, price_per_million_tokens=change.price))


_KIND = attrgetter("model", "dimensions", "document_prefix", "query_prefix", "params", "vectors", "quantisation")


def _alike(one: Generation, other: Generation) -> bool:
    """Whether they embed, cut and search alike."""
    return _KIND(one) == _KIND(other)


async def _answers(embedder: Embedder) -> None:
    """Check that the model answers, before anything is begun. Raises Misconfigured and Retryable."""
    embedded = await embedder.embed_documents([generations.REFERENCE_TEXT])
    if embedded.refused:
        raise Retryable(f"{embedder.model} refuses a plain sentence ({embedded.refused[0]}): nothing was begun")


SAMPLE = 200
"""How many documents are chunked for an estimate. Their ids are hashes, so the first ones are a fair sample. In a
smaller collection the numbers are exact, except for texts that occur twice."""


@dataclass(frozen=True, slots=True)
class Estimate:
    documents: int
    chunks: int
    copied: int
    """The chunks whose vectors the active generation already has, by the same model and of the same text."""
    embedded: int
    tokens: int
    """The tokens of the chunks to embed."""
    money: float
    exact: bool
    ratio: float
    """Tokens to embed for one of the active generation's."""


async def estimate(
    connection: Connection, origin: Generation, new: Generation, count_tokens: CountTokens, *, price: float
) -> Estimate:
    """price: of a million tokens."""
    documents, chunks, tokens = await desired_counts(connection, origin)
    cursor = await connection.execute(
        "SELECT d.id, coalesce(d.title, ''), b.text, coalesce(d.media_type, 'text/plain'), d.content_hash, m.chunk_ids,"
        " (SELECT sum(t) FROM unnest(m.token_counts) t)"
        " FROM documents d JOIN access_sets a ON a.id = d.access_id AND cardinality(a.acl_tags) > 0"
        " JOIN document_bodies b ON b.document_id = d.id"
        " JOIN manifests m ON m.document_id = d.id AND m.generation = %s AND m.content_hash = d.content_hash"
        " WHERE d.deleted_at IS NULL AND d.version IS NOT NULL ORDER BY d.id LIMIT %s",
        [origin.name, SAMPLE],
    )
    sample = await cursor.fetchall()
    lends = generations.same_model(origin, new)
    before_chunks = before_tokens = after_chunks = copied_chunks = embedded_tokens = 0
    for id_, title, text, media_type, digest, old, old_tokens in sample:
        manifest = await asyncio.to_thread(build_manifest, id_, title, text, media_type, digest, new, count_tokens)
        held = set(old) if lends else set()
        before_chunks += len(old)
        before_tokens += int(old_tokens or 0)
        after_chunks += len(manifest.chunk_ids)
        copied_chunks += len(held.intersection(manifest.chunk_ids))
        in_front = title_tokens(embedded_title(title, media_type, len(manifest.chunk_ids), new.params), count_tokens)
        embedded_tokens += sum(
            n + in_front for i, n in zip(manifest.chunk_ids, manifest.token_counts, strict=True) if i not in held
        )
    all_chunks = round(chunks * after_chunks / before_chunks) if before_chunks else 0
    copied = round(chunks * copied_chunks / before_chunks) if before_chunks else 0
    ratio = embedded_tokens / before_tokens if before_tokens else 1.0
    needed = round(tokens * ratio)
    return Estimate(
        documents,
        all_chunks,
        copied,
        all_chunks - copied,
        needed,
        round(needed * price / 1e6, 4),
        exact=len(sample) == documents,
        ratio=ratio,
    )
