"""Remembering events: what many at once cost, and what a failure leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from connectors.replay import REMEMBERED, Received
from pipeline.core.errors import Retryable


class SlowMemory:
    """A memory whose writes take a moment, as Postgres' do."""

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.writes = 0
        self.is_away = False
        self.released = asyncio.Event()
        self.released.set()

    async def get(self, name: str) -> Any | None:
        return self.stored

    async def put(self, name: str, value: Any | None) -> None:
        await self.released.wait()
        await asyncio.sleep(0)
        if self.is_away:
            raise Retryable("Postgres is away")
        self.writes += 1
        self.stored = list(value)


async def test_a_thousand_events_at_once_are_remembered_with_two_writes() -> None:
    memory = SlowMemory()
    received = Received(memory)
    bodies = [str(n).encode() for n in range(1_000)]
    await asyncio.gather(*map(received.add, bodies))
    assert memory.writes == 2, "the first event, and all that arrived meanwhile"
    later = Received(memory)
    assert [await later.has(body) for body in bodies] == [True] * 1_000


async def test_only_the_last_events_are_remembered() -> None:
    memory = SlowMemory()
    received = Received(memory)
    for n in range(REMEMBERED + 2):
        await received.add(str(n).encode())
    assert len(memory.stored) == REMEMBERED
    assert [await received.has(str(n).encode()) for n in (0, 1, 2)] == [False, False, True]


async def test_events_that_could_not_be_stored_are_accepted_again() -> None:
    memory = SlowMemory()
    received = Received(memory)
    memory.is_away = True
    results = await asyncio.gather(*(received.add(body) for body in (b"a", b"b", b"c")), return_exceptions=True)
    assert [type(result) for result in results] == [Retryable] * 3
    memory.is_away = False
    await received.add(b"d")
    assert [await received.has(body) for body in (b"a", b"b", b"c", b"d")] == [False, False, False, True]
    assert len(memory.stored) == 1


async def test_an_event_whose_request_ends_while_it_waits_is_accepted_again() -> None:
    memory = SlowMemory()
    received = Received(memory)
    memory.released.clear()
    first, second = (asyncio.create_task(received.add(body)) for body in (b"a", b"b"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    memory.released.set()
    await first
    assert (await received.has(b"a"), await received.has(b"b")) == (True, False)
    with pytest.raises(asyncio.CancelledError):
        second.result()
