"""Filling a generation that is being built, and waiting for the sinks: the part that a rebuild and another model share.

The documents are brought in page by page and hinted on the backfill lane; the workers do the work. Killed anywhere, it
goes on when it is run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Literal, Protocol, TypeVar

from elasticsearch import AsyncElasticsearch
from pgvector.psycopg import register_vector_async

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Lane, Store
from pipeline.generations.limits import Feed
from pipeline.kafka.client import producer
from pipeline.kafka.groups import group, groups, translate_offset_errors
from pipeline.ledger import builds, generation_tables, generations
from pipeline.ledger.builds import Build, Outstanding
from pipeline.ledger.documents import Identity
from pipeline.ledger.generation_tables import build_graph
from pipeline.runtime.settings import ElasticsearchSettings, PostgresSettings, Settings
from pipeline.stages.hints import send_hints
from pipeline.stores import fence
from pipeline.stores.elasticsearch import REFRESH_INTERVAL, drop_index, tune_index
from pipeline.stores.elasticsearch import connect as elasticsearch_client
from pipeline.stores.elasticsearch import translated as es_translated
from pipeline.stores.leader import lead_session
from pipeline.stores.postgres import BUILD_LOCK, Connection, connect_alone, require_migrated, translated

PAGE = 200
"""The documents that one transaction adds to a build. It holds their locks meanwhile: 5,000 vectors are copied in well
under a second."""
MOST_PENDING = 2_000
"""The most documents of a build that wait for a sink at any time. Further hints are sent as these are done."""
GRACE_FACTOR = 10
"""How many times longer than live work the sweeper leaves a build's work to its hints."""
POLL_SECONDS = 0.2
LOOK_SECONDS, ABSENT_LOOKS = 10.0, 6
"""The pause between two checks whether a worker runs, and the number of checks in a row after which none is expected
any more (a restart that pulls an image takes a minute)."""
STALL_SECONDS, LONGEST_STALL_SECONDS = 15.0, 120.0
"""The time without progress after which hints are sent again: one may have been skipped while its generation was paused
or its store was away. It doubles each time, up to the second number."""
PUT_OFF_SECONDS = 600.0
"""How long documents whose text alone the model defers (429) are tried again once nothing else holds a build: a limit
on tokens a minute passes, one for a single request does not."""
QUERIES_END_SECONDS = 15.0
"""Queries that pinned the old generation have ended after this time (their own limits are 10 s), so that its rows may
be removed."""
RETRY_SECONDS, RETRIES = 1.0, 60

Phase = Literal["copying", "converging", "graph", "swapping", "clearing"]
T = TypeVar("T")
Hint = Callable[[Sequence[tuple[Identity, str, Lane]]], Awaitable[int]]


class OnProgress(Protocol):
    def __call__(self, phase: Phase, done: int, total: int) -> None: ...


class Builder:
    """Law: whatever becomes of it, the active generation is not touched."""

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
        on_note: Callable[[str], None] = lambda line: None,
        queries_end_seconds: float = QUERIES_END_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        put_off_seconds: float = PUT_OFF_SECONDS,
    ) -> None:
        """connection: one of ``opening.connect``. hint: sends hints. served: whether a worker of that store runs.
        on_note: told in one line what is being waited for."""
        self.connection = connection
        self.es = es
        self.settings = settings
        self._hint = hint
        self._served = served
        self._grace = sweep_after_seconds * GRACE_FACTOR
        self.progress = on_progress
        self._note = on_note
        self._queries_end = queries_end_seconds
        self._stall = stall_seconds
        self._put_off = put_off_seconds
        self.without_failing = False
        """Whether documents that fail in the vectors come without their failing passages, instead of ending the run."""

    async def is_there(self, build: Build) -> bool:
        """Whether the build's new table and index exist."""
        table = "vectors" not in build.replaces or await builds.table_exists(
            self.connection, build.generation.chunk_table
        )
        return table and (
            "keywords" not in build.replaces or await index_exists(self.es, build.generation.keyword_index)
        )

    async def fill(self, build: Build, feed: Feed | None = None) -> None:
        """Add every document to the build. Raises ``limits.Paused`` when the budget is spent."""
        if self.without_failing:
            await self._leave_out(build)
        await self._hint_again(build)
        if feed is not None:  # an earlier run's work must be paid for before the budget is compared
            await self._worked_off(build)
        cursor = await self.connection.execute("SELECT count(*) FROM documents")
        row = await cursor.fetchone()
        total = int(row[0]) if row else 0
        filled = build.filled
        self.progress("copying", filled, total)
        while build.filled_at is None:
            await self._until(build, lambda o: o.pending < MOST_PENDING)
            limit = PAGE if feed is None else await self._afforded(build, feed)
            page = await patiently(
                self.connection,
                lambda limit=limit: builds.fill(self.connection, build, limit=limit, grace_seconds=self._grace),  # type: ignore[misc]
            )
            if not page.documents:
                return
            await self._hint([(d, build.generation.name, "backfill") for d in page.pending])
            filled += page.documents
            self.progress("copying", min(filled, total), total)

    async def _afforded(self, build: Build, feed: Feed) -> int:
        """The number of documents that the next page may have, after a wait for the rate limit."""
        ahead = await builds.next_token_counts(self.connection, build, limit=PAGE)
        if not ahead:
            return PAGE
        if not feed.fits(ahead[0], await builds.tokens(self.connection, build)):
            await self._worked_off(build)
            feed.all_spent()
        page = feed.page(ahead, await builds.tokens(self.connection, build))
        await asyncio.sleep(feed.wait(monotonic()))
        return page

    async def _worked_off(self, build: Build) -> None:
        """Wait until the work that is pending now is done. Under live traffic some work is always pending."""
        before = await builds.moment(self.connection)
        await self._until(build, lambda o: not o.early, before=before)

    async def _hint_again(self, build: Build) -> None:
        """Send the hints of an earlier run again: it may have been killed before they were sent. Work that failed then
        is tried again."""
        await builds.retry_failures(self.connection, build)
        await self._hint_pending(build)

    async def _hint_pending(self, build: Build) -> None:
        waiting = await builds.pending(self.connection, build, limit=2 * MOST_PENDING)
        await self._hint([(d, build.generation.name, "backfill") for d in waiting])

    async def converge(self, build: Build, *, before: datetime | None = None) -> None:
        """Wait until nothing delays a cut-over any more. before: see ``builds.cut_over``. Raises Retryable."""
        first = (await builds.outstanding(self.connection, build, before=before)).holding
        await self._until(
            build,
            lambda o: not o.holding,
            lambda o: self.progress("converging", max(0, first - o.holding), max(first, o.holding)),
            before=before,
        )

    async def complete(self, build: Build) -> None:
        """Build the graph over all rows at once, which is far faster than row by row, while writers continue; and give
        the index the settings for searches."""
        if "vectors" in build.replaces and build.generation.vectors == "pgvector":
            self.progress("graph", 0, 1)
            await build_graph(self.connection, build.generation)
            self.progress("graph", 1, 1)
        if "keywords" in build.replaces:
            await tune_index(
                self.es,
                build.generation.keyword_index,
                replicas=self.settings.replicas,
                refresh_interval=REFRESH_INTERVAL,
            )

    async def _until(
        self,
        build: Build,
        enough: Callable[[Outstanding], bool],
        on_progress: Callable[[Outstanding], None] | None = None,
        *,
        before: datetime | None = None,
    ) -> None:
        """Wait for the sinks until it is enough. Raises Retryable if only documents are left that failed, or were put
        off for PUT_OFF_SECONDS, or no worker runs."""
        looked = moved = alone = monotonic()
        absent, stall, last = 0, self._stall, -1
        while True:
            now = await builds.outstanding(self.connection, build, before=before)
            if on_progress is not None:
                on_progress(now)
            if enough(now):
                return
            if not now.failed + now.put_off or now.failed + now.put_off < now.holding:
                alone = monotonic()
            elif not now.put_off or monotonic() - alone > self._put_off:
                if not (self.without_failing and await self._leave_out(build)):
                    await self._explain(build)
                await self._hint_pending(build)
            if now.pending != last:
                moved, stall, last = monotonic(), self._stall, now.pending
            elif monotonic() - moved > stall:
                self._note(
                    f"no progress for {stall:.0f} s; {now.pending} documents are pending, and hints were sent again"
                    f" ({await self._reason(build, now)})"
                )
                await self._hint_pending(build)
                moved, stall = monotonic(), min(2 * stall, LONGEST_STALL_SECONDS)
            if monotonic() - looked > LOOK_SECONDS:
                looked = monotonic()
                absent = 0 if all([await self._served(store) for store in build.replaces]) else absent + 1
                if absent >= ABSENT_LOOKS:
                    await self.require_served(*build.replaces)
            await asyncio.sleep(POLL_SECONDS)

    async def _explain(self, build: Build) -> None:
        may_leave_out = len(build.replaces) > 1 and not self.without_failing
        way_out = ", or run it with --without-failing" if may_leave_out else ""
        raise Retryable(
            f"{await stuck(self.connection, build)}, so nothing was changed. Correct that and run the command again,"
            f" which continues from there{way_out}"
        )

    async def _reason(self, build: Build, now: Outstanding) -> str:
        """Why nothing moves."""
        if now.failed or now.put_off:
            return await stuck(self.connection, build)
        return "`penstock status` says what the workers wait for"

    async def _leave_out(self, build: Build) -> int:
        """Have the documents that failed in the build's vectors written without the passages that fail; returns their
        number."""
        left = await patiently(self.connection, lambda: builds.leave_out(self.connection, build))
        if left:
            self._note(f"{left} documents are brought in without the passages that the model does not embed")
        return left

    async def require_served(self, *stores: Store) -> None:
        """Raises Retryable if no worker of the store runs."""
        for store in stores:
            if not await self._served(store):
                raise Retryable(
                    f"no {store} worker runs: start one (`penstock up`, or `penstock worker {store}`), then run this"
                    " command again, which continues where it stopped"
                )

    async def clear(self, *, after_queries: bool = False) -> None:
        """Remove the rows, tables and indexes that only retired generations use. after_queries: wait first for queries
        that may have pinned one of these generations."""
        self.progress("clearing", 0, 1)
        if after_queries:
            await asyncio.sleep(self._queries_end)
        retired = await generation_tables.uncleared(self.connection)
        tables, indexes = await generation_tables.orphaned(self.connection, retired)
        for index in indexes:
            await drop_index(self.es, index)
        for table in tables:
            await patiently(self.connection, lambda table=table: generation_tables.drop_table(self.connection, table))  # type: ignore[misc]
        for generation in retired:
            await generation_tables.clear_rows(self.connection, generation)
            await generation_tables.mark_cleared(self.connection, generation)
        self.progress("clearing", 1, 1)

    async def active_name(self) -> str:
        return (await generations.active(self.connection)).name


NAMED = 3
"""The most documents that a message names."""


async def stuck(connection: Connection, build: Build) -> str:
    """Name documents that failed or were put off in a build, with the reason; empty if none did."""
    total, known = await builds.failures(connection, build, limit=NAMED)
    if not known:
        return ""
    document, first, _ = known[0]
    named = "; ".join(f"{d.source}/{d.external_id}: {error.rstrip('.')}" for d, _, error in known)
    return (
        f"{total} documents cannot be brought into the new {first} ({build.generation.name}), the first of which"
        f" {'is' if len(known) == 1 else 'are'} {named} (`penstock why {document.external_id}` shows more)"
    )


async def patiently(connection: Connection, step: Callable[[], Awaitable[T]]) -> T:
    """Run a step that may be repeated, and repeat it after errors of the database that may pass, such as a lock or a
    deadlock."""
    for _ in range(RETRIES):
        try:
            with translated("build"):
                return await step()
        except Retryable as error:
            if error.service != "postgres" or connection.closed:
                raise
        await asyncio.sleep(RETRY_SECONDS)
    with translated("build"):
        return await step()


async def index_exists(es: AsyncElasticsearch, index: str) -> bool:
    with es_translated(f"look for index {index}"):
        return bool(await es.indices.exists(index=index))


async def holds_entries(es: AsyncElasticsearch, index: str) -> bool:
    with es_translated(f"look into index {index}"):
        return bool((await es.count(index=index, ignore_unavailable=True, allow_no_indices=True))["count"])


@asynccontextmanager
async def connect(settings: PostgresSettings, *, lock: bool = True) -> AsyncIterator[Connection]:
    """A connection without time limit that holds the build lock. Raises Misconfigured while another command has it."""
    with translated("generations"):
        await require_migrated(settings)
        async with await connect_alone(settings, "build") as connection:
            await fence.require(connection, "stores")
            await register_vector_async(connection)
            if lock and not await lead_session(connection, BUILD_LOCK):
                raise Misconfigured("another rebuild or build is running: wait for it, or stop it")
            yield connection


@asynccontextmanager
async def open_builder(
    settings: Settings,
    on_progress: OnProgress = lambda phase, done, total: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Builder]:
    """A Builder on connections of its own. Raises Retryable when a service is away."""
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(connect(settings.postgres))
        es = elasticsearch_client(settings.elasticsearch)
        stack.push_async_callback(es.close)
        sender = await stack.enter_async_context(producer(settings.kafka))
        consumers = await stack.enter_async_context(groups(settings.kafka))

        async def served(store: Store) -> bool:
            with translate_offset_errors():
                return bool(await consumers.members(group(store)))

        yield Builder(
            connection,
            es,
            settings.elasticsearch,
            partial(send_hints, sender),
            served,
            sweep_after_seconds=settings.stream.sweep_after_seconds,
            on_progress=on_progress,
            on_note=on_note,
        )
