"""rebuild: one store of the active generation from nothing, beside the old one, then swapped. See docs/adr/0011."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Literal, Protocol, TypeVar

from elasticsearch import AsyncElasticsearch
from psycopg import AsyncConnection, sql
from psycopg.errors import DiskFull

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Generation, Lane, Store
from pipeline.groups import group, groups, kafka_translated
from pipeline.kafka import producer
from pipeline.ledger import builds, clearing, filling, generations
from pipeline.ledger.builds import Build, Outstanding
from pipeline.ledger.documents import Identity
from pipeline.settings import ElasticsearchSettings, PostgresSettings, Settings
from pipeline.stages.hints import send_hints
from pipeline.stores.elasticsearch import connect as elasticsearch_client
from pipeline.stores.elasticsearch import create_index, drop_index, tune_index
from pipeline.stores.elasticsearch import translated as es_translated
from pipeline.stores.postgres import (
    BUILD_LOCK,
    Connection,
    create_chunk_table,
    create_graph,
    require_migrated,
    translated,
)

PAGE = 200
"""Documents brought in by one transaction, which holds their locks: 5,000 vectors are copied in well under a second."""
MOST_PENDING = 2_000
"""Documents of a build that wait for a sink at any time: hints are sent as they are worked off."""
GRACE_FACTOR = 10
"""The sweeper leaves a build's work to its hints so much longer than live work."""
POLL_SECONDS = 0.2
LOOK_SECONDS = 10.0
"""Between two looks whether a worker is there at all."""
QUERIES_END_SECONDS = 15.0
"""A query that pinned the old generation has ended by then (its own timeouts are 10 s): what it reads may go."""
RETRY_SECONDS, RETRIES = 1.0, 60
GRAPH_BYTES_A_ROW = 500
"""What HNSW (m = 16) takes for a row besides its vector while it is built."""

Phase = Literal["copying", "converging", "graph", "swapping", "clearing"]
T = TypeVar("T")
Hint = Callable[[Sequence[tuple[Identity, str, Lane]]], Awaitable[int]]


class OnProgress(Protocol):
    def __call__(self, phase: Phase, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What a rebuild will do. Chunks and tokens are estimates where only a part of the old rows is there."""

    store: Store
    generation: str
    documents: int
    chunks: int
    copied: int
    """Chunks whose vectors are copied from the old table."""
    embedded: int
    tokens: int
    """Of the chunks to embed."""
    resumes: str | None
    """A build of an earlier run that goes on."""


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

    def __init__(
        self,
        connection: Connection,
        es: AsyncElasticsearch,
        settings: ElasticsearchSettings,
        hint: Hint,
        served: Callable[[Store], Awaitable[bool]],
        *,
        sweep_after_seconds: float,
        on_progress: OnProgress = lambda phase, done, total: None,
        queries_end_seconds: float = QUERIES_END_SECONDS,
    ) -> None:
        """connection: one of ``connect``. hint: sends hints. served: whether a worker of that store runs."""
        self._connection = connection
        self._es = es
        self._settings = settings
        self._hint = hint
        self._served = served
        self._grace = sweep_after_seconds * GRACE_FACTOR
        self._progress = on_progress
        self._queries_end = queries_end_seconds

    async def plan(self, store: Store) -> Plan:
        """Raises Misconfigured when another kind of build is under way."""
        with translated("rebuild"):
            build = _same_kind(await builds.under_way(self._connection), store)
            active = await generations.active(self._connection)
            documents, chunks, tokens = await _wanted(self._connection, active)
            present = min(chunks, await _rows(self._connection, active.chunk_table))
        missing = chunks - present
        resumes = build.generation.name if build else None
        if store == "keywords":
            return Plan(store, active.name, documents, chunks, 0, 0, 0, resumes)
        missing_tokens = round(tokens * missing / chunks) if chunks else 0
        return Plan(store, active.name, documents, chunks, present, missing, missing_tokens, resumes)

    async def run(self, store: Store) -> Result:
        """Raises Retryable (what to do is said; run it again) and Misconfigured."""
        start = monotonic()
        with translated("rebuild"):
            await self._require_served(store)
            await self._clear()  # what an earlier run was killed over: its disk space is needed now
            build = await self._under_way(store) or await self._begin(store)
            await self._hint_again(build)
            await self._fill(build)
            await self._converge(build)
            if "vectors" in build.replaces:
                await self._graph(build.generation)
            if "keywords" in build.replaces:
                await tune_index(
                    self._es, build.generation.keyword_index, replicas=self._settings.replicas, refresh_interval="1s"
                )
            await self._swap(build)
            documents, _, _ = await _wanted(self._connection, build.generation)
            written = await _written(self._connection, build.generation, store)
            self._progress("clearing", 0, 1)
            await asyncio.sleep(self._queries_end)
            await self._clear()
            self._progress("clearing", 1, 1)
        return Result(
            store, build.generation.name, build.origin.name, documents, written, round(monotonic() - start, 3)
        )

    async def _under_way(self, store: Store) -> Build | None:
        """The build to go on with. One whose new table or index is gone is given up: its states would be wrong."""
        build = _same_kind(await builds.under_way(self._connection), store)
        if build is None:
            return None
        there = (
            await filling.table_exists(self._connection, build.generation.chunk_table)
            if store == "vectors"
            else await _index_exists(self._es, build.generation.keyword_index)
        )
        active = await generations.active(self._connection)
        if there and active.name == build.origin.name:
            return build
        await builds.give_up(self._connection, build)
        return None

    async def _begin(self, store: Store) -> Build:
        """A new, empty table or index, then the generation that names it."""
        origin = await generations.active(self._connection)
        name = await builds.next_name(self._connection)
        prefix = f"{self._settings.index_prefix}chunks-"
        while store == "keywords" and await _holds_entries(self._es, prefix + name):
            name = f"g{int(name[1:]) + 1}"  # not ours to empty: a ledger that was lost may have named it
        new = replace(origin, name=name, state="building")
        if store == "vectors":
            new = replace(new, chunk_table=f"chunks_{name}")
            await create_chunk_table(self._connection, new)
        else:
            new = replace(new, keyword_index=prefix + name)
            await create_index(self._es, new.keyword_index, shards=self._settings.shards, refresh_interval="-1")
        return await builds.begin(self._connection, new, origin)

    async def _hint_again(self, build: Build) -> None:
        """Hints of a run that was killed may never have been sent, and what failed then has its next chance now."""
        waiting = await builds.pending(self._connection, build, limit=2 * MOST_PENDING)
        await self._hint([(d, build.generation.name, "backfill") for d in waiting])

    async def _fill(self, build: Build) -> None:
        total = await _documents(self._connection)
        filled = build.filled
        self._progress("copying", filled, total)
        while build.filled_at is None:
            await self._until(build, lambda o: o.pending < MOST_PENDING)
            page = await self._patiently(
                lambda: filling.fill(self._connection, build, limit=PAGE, grace_seconds=self._grace)
            )
            if not page.documents:
                return
            await self._hint([(d, build.generation.name, "backfill") for d in page.pending])
            filled += page.documents
            self._progress("copying", min(filled, total), total)

    async def _converge(self, build: Build) -> None:
        first = (await builds.outstanding(self._connection, build)).holding
        await self._until(
            build,
            lambda o: not o.holding,
            lambda o: self._progress("converging", max(0, first - o.holding), max(first, o.holding)),
        )

    async def _swap(self, build: Build) -> None:
        """What was pending for a moment when the others stood still is waited for."""
        self._progress("swapping", 0, 1)
        while await self._patiently(lambda: builds.cut_over(self._connection, build)):
            await self._converge(build)
        self._progress("swapping", 1, 1)

    async def _until(
        self, build: Build, enough: Callable[[Outstanding], bool], tell: Callable[[Outstanding], None] | None = None
    ) -> None:
        """Wait for the sinks. Raises Retryable when nothing but failures is left, or nobody works."""
        looked = monotonic()
        absent = 0
        while True:
            now = await builds.outstanding(self._connection, build)
            if tell is not None:
                tell(now)
            if enough(now):
                return
            if now.failed and now.failed >= now.holding:
                await self._explain(build, now)
            if monotonic() - looked > LOOK_SECONDS:
                looked = monotonic()
                absent = 0 if await self._all_served(build) else absent + 1
                if absent > 1:  # once may be a restart
                    await self._require_served(*build.replaces)
            await asyncio.sleep(POLL_SECONDS)

    async def _explain(self, build: Build, now: Outstanding) -> None:
        [(document, store, error), *_] = await builds.failures(self._connection, build, limit=1)
        raise Retryable(
            f"{now.failed} documents cannot be brought into the new {store} ({build.generation.name}), so nothing was"
            f" swapped; the first is {document.source}/{document.external_id}: {error}. Mend it (`penstock why"
            f" {document.external_id}`), then run the command again: it goes on from there"
        )

    async def _all_served(self, build: Build) -> bool:
        return all([await self._served(store) for store in build.replaces])

    async def _require_served(self, *stores: Store) -> None:
        for store in stores:
            if not await self._served(store):
                raise Retryable(
                    f"no {store} worker runs, and it does the work: start one (`penstock up`, or `penstock worker"
                    f" {store}`), then run this again: it goes on where it stopped"
                )

    async def _patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """A step that repeats harmlessly, again while the database says that it may heal (a lock, a deadlock)."""
        for _ in range(RETRIES):
            with suppress(Retryable), translated("rebuild"):
                return await step()
            if self._connection.closed:
                break
            await asyncio.sleep(RETRY_SECONDS)
        with translated("rebuild"):
            return await step()

    async def _graph(self, generation: Generation) -> None:
        """Once, over all rows: far faster than row by row. Writers go on meanwhile."""
        self._progress("graph", 0, 1)
        await _allow_memory(self._connection, generation)
        try:
            await create_graph(self._connection, generation, concurrently=True)
        except DiskFull:  # a container's small /dev/shm: parallel builders share the graph there, one alone does not
            await self._connection.execute("SET max_parallel_maintenance_workers = 0")
            await create_graph(self._connection, generation, concurrently=True)
        await self._connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(generation.chunk_table)))
        self._progress("graph", 1, 1)

    async def _clear(self) -> None:
        """Remove what only retired generations name: rows, tables, indexes."""
        retired = await clearing.uncleared(self._connection)
        tables, indexes = await clearing.orphaned(self._connection, retired)
        for index in indexes:
            await drop_index(self._es, index)
        for table in tables:
            await self._patiently(lambda table=table: clearing.drop_table(self._connection, table))  # type: ignore[misc]
        for generation in retired:
            await clearing.clear_rows(self._connection, generation)
            await clearing.cleared(self._connection, generation)


def _same_kind(build: Build | None, store: Store) -> Build | None:
    if build is not None and build.replaces != {store}:
        what = " and ".join(sorted(build.replaces))
        raise Misconfigured(
            f"generation {build.generation.name} is being built (new {what}): finish that first, with"
            f" `penstock rebuild {what}`"
        )
    return build


@asynccontextmanager
async def connect(settings: PostgresSettings) -> AsyncIterator[Connection]:
    """A connection without time limit that holds the build lock. Raises Misconfigured while another command has it."""
    with translated("rebuild"):
        await require_migrated(settings)
        async with await AsyncConnection.connect(
            settings.dsn.get_secret_value(), autocommit=True, connect_timeout=10, application_name="penstock build"
        ) as connection:
            await connection.execute("SET jit = off")
            cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", [BUILD_LOCK])
            row = await cursor.fetchone()
            if not (row and row[0]):
                raise Misconfigured("another rebuild is running: wait for it, or stop it")
            yield connection


@asynccontextmanager
async def open_rebuild(settings: Settings, on_progress: OnProgress) -> AsyncIterator[Rebuild]:
    """A Rebuild on connections of its own. Raises Retryable when a service is away."""
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(connect(settings.postgres))
        es = elasticsearch_client(settings.elasticsearch)
        stack.push_async_callback(es.close)
        sender = await stack.enter_async_context(producer(settings.kafka))
        consumers = await stack.enter_async_context(groups(settings.kafka))

        async def served(store: Store) -> bool:
            with kafka_translated():
                return bool(await consumers.members(group(store)))

        yield Rebuild(
            connection, es, settings.elasticsearch, partial(send_hints, sender), served,
            sweep_after_seconds=settings.stream.sweep_after_seconds, on_progress=on_progress,
        )  # fmt: skip


async def _index_exists(es: AsyncElasticsearch, index: str) -> bool:
    with es_translated(f"look for index {index}"):
        return bool(await es.indices.exists(index=index))


async def _holds_entries(es: AsyncElasticsearch, index: str) -> bool:
    with es_translated(f"look into index {index}"):
        return bool((await es.count(index=index, ignore_unavailable=True, allow_no_indices=True))["count"])


async def _documents(connection: Connection) -> int:
    cursor = await connection.execute("SELECT count(*) FROM documents")
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def _wanted(connection: Connection, generation: Generation) -> tuple[int, int, int]:
    """(documents, chunks, tokens) that shall stand in this generation's stores."""
    cursor = await connection.execute(
        "SELECT count(*), coalesce(sum(cardinality(m.chunk_ids)), 0)::bigint,"
        " coalesce(sum((SELECT sum(t) FROM unnest(m.token_counts) t)), 0)::bigint"
        " FROM documents d JOIN access_sets a ON a.id = d.access_id AND cardinality(a.acl_tags) > 0"
        " LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = %s"
        " WHERE d.deleted_at IS NULL AND d.version IS NOT NULL",
        [generation.name],
    )
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0]), int(row[1]), int(row[2])


async def _rows(connection: Connection, table: str) -> int:
    if not await filling.table_exists(connection, table):
        return 0
    cursor = await connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table)))
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def _written(connection: Connection, generation: Generation, store: Store) -> int:
    cursor = await connection.execute(
        "SELECT coalesce(sum(written), 0)::bigint FROM index_state WHERE generation = %s AND store = %s",
        [generation.name, store],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def _allow_memory(connection: Connection, generation: Generation) -> None:
    """Enough maintenance_work_mem for the graph where the server has it: up to a quarter of what it says it may use
    (effective_cache_size). A graph that does not fit is built too, only slower."""
    rows = await _rows(connection, generation.chunk_table)
    bytes_a_value = 2 if generation.vector_type == "halfvec" else 4
    needed = rows * (generation.dimensions * bytes_a_value + GRAPH_BYTES_A_ROW) // 1024
    await connection.execute(
        "SELECT set_config('maintenance_work_mem', greatest("
        " pg_size_bytes(current_setting('maintenance_work_mem')) / 1024,"
        " least(%s::bigint, pg_size_bytes(current_setting('effective_cache_size')) / 4096))::text || 'kB', false)",
        [needed],
    )
