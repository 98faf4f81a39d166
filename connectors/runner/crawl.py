"""The full read and the changes since: each page is published and stored before the next one is requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from datetime import datetime
from typing import Any, cast

from connectors.clock import Clock
from connectors.portions import in_portions
from connectors.runner.plan import MAX_FETCH_DOCUMENTS
from connectors.runner.publish import Publisher
from connectors.runner.state import ReadProgress, State
from connectors.source import CursorExpired, Page, Source
from pipeline.core.errors import Retryable
from pipeline.observability import tracing

CURSOR_EXPIRED_RETRY_SECONDS = 60.0
"""Between two full reads of a source whose cursors expire faster than a full read takes."""


class Crawl:
    """Law: a cursor is stored in one transaction with the rows that it leads up to, after Kafka has their events. A
    runner that is killed therefore publishes at most one page again. ``changes`` sees what happens during the first
    load, because its cursor is older than the load."""

    def __init__(
        self,
        source: Source,
        state: State,
        publisher: Publisher,
        clock: Clock,
        *,
        between_pages: Callable[[], None],
        on_loaded: Callable[[], None],
        on_gap: Callable[[], None],
        on_fetched: Callable[[Collection[str]], None],
        sweep: Callable[[], Awaitable[Mapping[str, Any]]],
    ) -> None:
        """between_pages: raises Paused while the instance is paused. on_loaded: called after the first load. on_gap:
        called when changes may have been missed. on_fetched: called with the documents of ``fetch`` that are
        published. sweep: sweeps a source that has no log of changes."""
        self._source = source
        self._state = state
        self._publisher = publisher
        self._clock = clock
        self._between_pages = between_pages
        self._on_loaded = on_loaded
        self._on_gap = on_gap
        self._on_fetched = on_fetched
        self._sweep = sweep
        self._expirations = 0
        """Full reads in a row whose cursor has expired."""

    async def full(self, arguments: frozenset[str]) -> Mapping[str, Any] | None:
        """Read everything if the first load is not done, or if arguments holds "again". Returns the entries by outcome,
        or None if there was nothing to do."""
        progress = await self._started()
        if "again" in arguments and progress.full_state == "done":
            await self._state.set_full_state("due")
        elif progress.full_state == "done":
            return None
        if progress.full_state != "running":
            await self._state.set_full_state("running")
        tally = Counter[str]()
        try:
            async with aclosing(self._pages(self._source.full(progress.full_cursor))) as pages:
                async for at, page in pages:
                    tally += await self._publisher.publish(page.entries, at, "backfill", full=page.cursor)
                    self._between_pages()
        except CursorExpired as error:
            await self._state.set_full_state("due")
            self._expirations += 1
            if self._expirations > 1:
                raise Retryable(f"{error}; it starts over", retry_after=CURSOR_EXPIRED_RETRY_SECONDS) from error
            return await self.full(arguments - {"again"})
        self._expirations = 0
        await self._state.set_full_state("done")
        if progress.loaded_at is None:
            self._on_loaded()
        return dict(tally)

    async def changes(self, _arguments: frozenset[str]) -> Mapping[str, Any]:
        """Read the changes since the last call, or sweep a source that has no log of changes. Returns the entries by
        outcome."""
        progress = await self._started()
        if progress.changes_cursor is None:
            return {} if progress.loaded_at is None else await self._sweep()
        tally = Counter[str]()
        try:
            async with aclosing(self._pages(self._source.changes(progress.changes_cursor))) as pages:
                async for at, page in pages:
                    tally += await self._publisher.publish(page.entries, at, "live", changes=page.cursor)
                    self._between_pages()
        except CursorExpired:
            await self._state.set_changes_cursor(await self._source.start())
            self._on_gap()
        return dict(tally)

    async def fetch(self, ids: frozenset[str]) -> Mapping[str, Any]:
        """Read the documents that events or operators have named. Returns the entries by outcome."""
        tally, names = Counter[str](), sorted(ids)
        for start in range(0, len(names), MAX_FETCH_DOCUMENTS):
            at, batch = self._clock.stamp(), names[start : start + MAX_FETCH_DOCUMENTS]
            with self._publisher.track_request(at, batch):
                async with aclosing(in_portions(batch, self._source.fetch)) as portions:
                    async for _, entries in portions:
                        tally += await self._publisher.publish(entries, at, "live")
            self._on_fetched(batch)
            self._between_pages()
        return dict(tally)

    async def _started(self) -> ReadProgress:
        """Return the progress, after the source's ``start`` has returned the first cursor of changes, or None."""
        progress = await self._state.read_progress()
        if progress.changes_cursor is None and (cursor := await self._source.start()) is not None:
            await self._state.set_changes_cursor(cursor)
            progress = await self._state.read_progress()
        return progress

    async def _pages(self, pages: AsyncIterator[Page]) -> AsyncGenerator[tuple[datetime, Page], None]:
        """Yield each page with a stamp from before its request: a generator runs only while its caller waits for it."""
        async with aclosing(cast("Any", pages)):
            while True:
                at = self._clock.stamp()
                with self._publisher.track_request(at):
                    with tracing.begin("read page", parent="", attributes=self._publisher.span_attributes) as span:
                        try:
                            page = await anext(pages)
                        except StopAsyncIteration:
                            return
                        span.note({"penstock.entries": len(page.entries)})
                    yield at, page
