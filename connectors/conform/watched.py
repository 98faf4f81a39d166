"""Looking over a runner's shoulder: what it asks of a source, and what it gives to Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from connectors.protocol import Problem
from connectors.source import Cursor, Entry, Group, Listed, Page, Reaction, Request, Source
from topics.messages import AnyMessage, DocumentUpserted
from topics.producer import Delivery, Producer
from topics.registry import Topic


@dataclass(frozen=True, slots=True)
class Call:
    """One answer of a source. ``asked_at``: when it was asked for."""

    method: str
    asked_at: datetime
    ids: tuple[str, ...]


@dataclass
class Record:
    """What was asked over all lives of a source. ``before``: called with the method and the page's number."""

    calls: list[Call] = field(default_factory=list)
    before: Callable[[str, int], Awaitable[None]] | None = None

    def pages(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]


class Watched:
    """A source that is asked through us."""

    def __init__(self, source: Source, record: Record) -> None:
        self.source = source
        self.Options = source.Options
        self._record = record

    async def close(self) -> None:
        await self.source.close()

    async def check(self) -> Sequence[Problem]:
        return await self.source.check()

    async def start(self) -> Cursor:
        return await self.source.start()

    def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        return self._pages("full", self.source.full(cursor))

    def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        return self._pages("changes", self.source.changes(cursor))

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        async for asked_at, page in self._asked("slim", self.source.slim()):
            self._record.calls.append(Call("slim", asked_at, tuple(one.external_id for one in page)))
            yield page

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        asked_at = datetime.now(UTC)
        entries = await self.source.fetch(external_ids)
        self._record.calls.append(Call("fetch", asked_at, tuple(one.external_id for one in entries)))
        return entries

    def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        return self.source.groups(tags)

    async def on_event(self, request: Request) -> Reaction:
        return await self.source.on_event(request)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        await self.source.listen(react)

    async def _pages(self, method: str, pages: AsyncIterator[Page]) -> AsyncIterator[Page]:
        async for asked_at, page in self._asked(method, pages):
            self._record.calls.append(Call(method, asked_at, tuple(one.external_id for one in page.entries)))
            yield page

    async def _asked(self, method: str, answers: AsyncIterator[Any]) -> AsyncIterator[tuple[datetime, Any]]:
        number = 0
        async with aclosing(cast("Any", answers)):
            while True:
                if self._record.before is not None:
                    await self._record.before(method, number)
                asked_at = datetime.now(UTC)
                try:
                    answer = await anext(answers)
                except StopAsyncIteration:
                    return
                number += 1
                yield asked_at, answer


class Witness(Producer):
    """A producer that remembers what went through it, and can keep Kafka's word from whoever waits for it."""

    def __init__(self, producer: Producer) -> None:
        self._real = producer
        self.messages: list[AnyMessage] = []
        self.silent_after: int | None = None
        """After so many upserts, what Kafka acknowledges is not passed on: the runner dies before it hears."""

    @property
    def upserts(self) -> int:
        return sum(isinstance(message, DocumentUpserted) for message in self.messages)

    async def send(self, topic: Topic, message: AnyMessage, traceparent: str | None = None) -> Delivery:
        delivery = await self._real.send(topic, message, traceparent)
        self.messages.append(message)
        if self.silent_after is None or self.upserts <= self.silent_after:
            return delivery
        await asyncio.shield(delivery)
        return asyncio.get_running_loop().create_future()
