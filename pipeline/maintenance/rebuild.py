"""rebuild: one store of the active generation from nothing, beside the old one, then swapped. See docs/adr/0011."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from time import monotonic

from pipeline.core.errors import Misconfigured
from pipeline.core.model import Generation, Store
from pipeline.generations.building import Builder, OnProgress, holds_entries, open_builder, patiently
from pipeline.ledger import builds, generation_tables, generations
from pipeline.ledger.builds import Build
from pipeline.ledger.generation_tables import desired_counts, rows, written
from pipeline.observability import lineage
from pipeline.runtime.settings import Settings
from pipeline.stores import datasets
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.postgres import Connection, create_chunk_table, translated


@dataclass(frozen=True, slots=True)
class Plan:
    """The extent of a rebuild. Chunks and tokens are estimates where only a part of the old rows is there."""

    store: Store
    generation: str
    documents: int
    chunks: int
    copied: int
    """Chunks whose vectors are copied from the old table."""
    embedded: int
    tokens: int
    """The tokens of the chunks to embed."""
    resumes: str | None
    """The build of an earlier run that continues; None: a new one begins."""


@dataclass(frozen=True, slots=True)
class Result:
    store: Store
    generation: str
    replaced: str
    documents: int
    written: int
    """Chunks embedded (vectors) or entries written (keywords)."""
    seconds: float


class Rebuild:
    """Law: whatever becomes of it, searches are answered by a complete store: the old one until the swap, the new one
    after it. Killed anywhere it goes on when it is run again."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._connection = builder.connection

    async def plan(self, store: Store) -> Plan:
        """Raises Misconfigured when another kind of build is under way."""
        with translated("rebuild"):
            build = await _same_kind(self._connection, store)
            active = await generations.active(self._connection)
            _require_own_graph(store, active)
            documents, chunks, tokens = await desired_counts(self._connection, active)
            present = min(chunks, await rows(self._connection, active.chunk_table))
        missing = chunks - present
        resumes = build.generation.name if build else None
        if store == "keywords":
            return Plan(store, active.name, documents, chunks, 0, 0, 0, resumes)
        missing_tokens = round(tokens * missing / chunks) if chunks else 0
        return Plan(store, active.name, documents, chunks, present, missing, missing_tokens, resumes)

    async def run(self, store: Store) -> Result:
        """Build the store, and replace the old one. Raises Retryable, after which it may be run again, and
        Misconfigured."""
        start, builder = monotonic(), self._builder
        with translated("rebuild"):
            await builder.require_served(store)
            await builder.clear()  # what an earlier run was killed over: its disk space is needed now
            build = await self._under_way(store) or await self._begin(store)
            new = (
                datasets.vectors(self._connection, build.generation)
                if store == "vectors"
                else datasets.keywords(builder.es, build.generation)
            )
            with lineage.job(
                f"rebuild.{store}", "MIGRATION", inputs=[datasets.ledger(self._connection)], outputs=[new]
            ) as reported:
                await builder.fill(build)
                await builder.converge(build)
                await builder.complete(build)
                await self._swap(build)
                documents, chunks, _ = await desired_counts(self._connection, build.generation)
                reported.wrote(chunks)
            made = await written(self._connection, build.generation, store)
            await builder.clear(after_queries=True)
        return Result(store, build.generation.name, build.origin.name, documents, made, round(monotonic() - start, 3))

    async def _under_way(self, store: Store) -> Build | None:
        """The build to continue. One whose new table or index is gone is abandoned, because its recorded states are
        wrong."""
        build = await _same_kind(self._connection, store)
        if build is None:
            return None
        if await self._builder.is_there(build) and await self._builder.active_name() == build.origin.name:
            return build
        await builds.give_up(self._connection, build.generation.name)
        return None

    async def _begin(self, store: Store) -> Build:
        """Create a new, empty table or index, then the generation that uses it."""
        builder = self._builder
        origin = await generations.active(self._connection)
        _require_own_graph(store, origin)
        name = await builds.next_name(self._connection)
        prefix = f"{builder.settings.index_prefix}chunks-"
        while store == "keywords" and await holds_entries(builder.es, prefix + name):
            name = f"g{int(name[1:]) + 1}"  # not ours to empty: a ledger that was lost may have named it
        new = replace(origin, name=name, state="building")
        if store == "vectors":
            new = replace(new, chunk_table=f"chunks_{name}", sketched=True)
            await generation_tables.drop_table(
                self._connection, new.chunk_table
            )  # of a run that was killed before it had a row
            await create_chunk_table(self._connection, new)
        else:
            new = replace(new, keyword_index=prefix + name)
            await create_index(
                builder.es,
                new.keyword_index,
                shards=builder.settings.shards,
                refresh_interval="-1",
                dimensions=new.indexed_dimensions,
            )
        return await builds.begin(self._connection, new, origin)

    async def _swap(self, build: Build) -> None:
        """Cut over. It waits for all documents that are pending when it begins, also for the newest."""
        self._builder.progress("swapping", 0, 1)
        before = await builds.moment(self._connection)
        while await patiently(self._connection, lambda: builds.cut_over(self._connection, build, before=before)):
            await self._builder.converge(build, before=before)
        self._builder.progress("swapping", 1, 1)


def _require_own_graph(store: Store, active: Generation) -> None:
    """Raises Misconfigured for a chunk table whose vectors are also in the keyword index: entries of both would be
    written from rows that are not all there yet."""
    if store == "vectors" and active.vectors != "pgvector":
        raise Misconfigured(
            f"the vectors of generation {active.name} are searched in Elasticsearch: `penstock rebuild keywords` makes"
            " their graph anew, and `penstock audit --repair` missing rows"
        )


async def _same_kind(connection: Connection, store: Store) -> Build | None:
    build = await builds.under_way(connection)
    if build is not None and build.replaces != {store}:
        raise Misconfigured(builds.occupied(build))
    return build


@asynccontextmanager
async def open_rebuild(
    settings: Settings, on_progress: OnProgress, on_note: Callable[[str], None]
) -> AsyncIterator[Rebuild]:
    """A Rebuild on connections of its own. Raises Retryable when a service is away."""
    async with open_builder(settings, on_progress, on_note) as builder:
        yield Rebuild(builder)
