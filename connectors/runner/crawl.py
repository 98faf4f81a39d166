"""The full read, and the changes since: page by page, each kept before the next is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from datetime import datetime
from typing import Any, cast

from connectors.clock import Clock
from connectors.runner.plan import FETCH
from connectors.runner.publish import Publisher
from connectors.runner.state import Reading, State
from connectors.source import Cursor, CursorExpired, Page, Source
from pipeline.core.errors import Retryable
from pipeline.observability import tracing

EXPIRED_AGAIN_SECONDS = 60.0
"""A source whose cursors expire faster than a full read takes is asked again only so often."""


class Crawl:
    """Law: a cursor is kept in one transaction with the rows that it leads up to, after Kafka has their events; so a
    runner that is killed publishes at most one page again. What happens during the first load is seen by ``changes``,
    whose cursor is older than the load."""

    def __init__(
        self,
        source: Source,
        state: State,
        publisher: Publisher,
        clock: Clock,
        *,
        between_pages: Callable[[], None],
        loaded: Callable[[], None],
        gap: Callable[[], None],
    ) -> None:
        """between_pages: raises Paused. loaded: the first load has ended. gap: changes may have been missed."""
        self._source = source
        self._state = state
        self._publisher = publisher
        self._clock = clock
        self._between_pages = between_pages
        self._loaded = loaded
        self._gap = gap
        self._expired = 0
        self.entries = 0
        """Met by the full read that is under way, or was last."""

    async def full(self, words: frozenset[str]) -> Mapping[str, Any] | None:
        """The first load, or again when asked ("again"). Nothing if neither is due."""
        reading = await self._begun()
        if "again" in words and reading.full_state == "done":
            await self._state.full("due")
        elif reading.full_state == "done":
            return None
        if reading.full_state != "running":
            self.entries = 0
            await self._state.full("running")
        tally = Counter[str]()
        try:
            async with aclosing(self._pages(self._source.full(reading.full_cursor))) as pages:
                async for at, page in pages:
                    tally += await self._publisher.publish(page.entries, at, "backfill", full=page.cursor)
                    self.entries += len(page.entries)
                    self._between_pages()
        except CursorExpired as error:
            await self._state.full("due")
            self._expired += 1
            if self._expired > 1:
                raise Retryable(f"{error}; it starts over", retry_after=EXPIRED_AGAIN_SECONDS) from error
            return await self.full(words - {"again"})
        self._expired = 0
        await self._state.full("done")
        if reading.loaded_at is None:
            self._loaded()
        return dict(tally)

    async def changes(self, _words: frozenset[str]) -> Mapping[str, Any]:
        reading = await self._begun()
        assert reading.changes_cursor is not None
        tally = Counter[str]()
        try:
            async with aclosing(self._pages(self._source.changes(reading.changes_cursor))) as pages:
                async for at, page in pages:
                    tally += await self._publisher.publish(page.entries, at, "live", changes=page.cursor)
                    self._between_pages()
        except CursorExpired:
            await self._state.started(await self._source.start())
            self._gap()
        return dict(tally)

    async def fetch(self, ids: frozenset[str]) -> Mapping[str, Any]:
        """These documents, now: events or people named them."""
        tally, wanted = Counter[str](), sorted(ids)
        for start in range(0, len(wanted), FETCH):
            at, batch = self._clock.stamp(), wanted[start : start + FETCH]
            with self._publisher.asking(at, batch):
                entries = await self._source.fetch(batch)
                tally += await self._publisher.publish(entries, at, "live")
        return dict(tally)

    async def _begun(self) -> Reading:
        """``start`` before anything is read."""
        reading = await self._state.reading()
        if reading.changes_cursor is None:
            cursor: Cursor = await self._source.start()
            await self._state.started(cursor)
            reading = await self._state.reading()
        return reading

    async def _pages(self, pages: AsyncIterator[Page]) -> AsyncGenerator[tuple[datetime, Page], None]:
        """Each page with the stamp given before it was asked for: a generator works only while it is waited for."""
        async with aclosing(cast("Any", pages)):
            while True:
                at = self._clock.stamp()
                with self._publisher.asking(at):
                    with tracing.begin("read page", parent="", attributes=self._publisher.about) as span:
                        try:
                            page = await anext(pages)
                        except StopAsyncIteration:
                            return
                        span.note({"penstock.entries": len(page.entries)})
                    yield at, page
