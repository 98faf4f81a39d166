"""A process that is stopped while its services are gone ends, and as soon as it can."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from pipeline.runtime import stopping
from pipeline.runtime.stopping import run_until_stopped


async def test_what_waits_for_a_service_is_cancelled_after_the_signal() -> None:
    closed = False

    async def run(stop: asyncio.Event) -> None:
        nonlocal closed
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
            await asyncio.sleep(60)
        finally:
            closed = True

    began = time.monotonic()
    await run_until_stopped("watch", run, finish_seconds=0.05, end_seconds=30)
    assert closed
    assert time.monotonic() - began < 15


async def test_what_ends_by_itself_after_the_signal_is_not_cancelled() -> None:
    finished = False

    async def run(stop: asyncio.Event) -> None:
        nonlocal finished
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        await asyncio.sleep(0.05)
        finished = True

    await run_until_stopped("watch", run, finish_seconds=30, end_seconds=30)
    assert finished


async def test_a_process_ends_although_what_it_closes_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(stopping, "end_anyway", lambda name, _seconds: ended.append(name))

    async def run(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            while not ended:
                await asyncio.sleep(0.01)

    await run_until_stopped("watch", run, finish_seconds=0.01, end_seconds=0.1)
    assert ended == ["watch"]


def test_a_process_ends_although_one_of_its_threads_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that does not answer, or a name that is not resolved: the process waited for the thread, and the limit
    was no longer in force."""
    ended = threading.Event()
    monkeypatch.setattr(stopping, "end_anyway", lambda *_: ended.set())
    went_on: list[bool] = []

    async def run(_: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.to_thread(lambda: went_on.append(ended.wait(20)))

    asyncio.run(run_until_stopped("watch", run, finish_seconds=0.01, end_seconds=0.2))
    assert went_on == [True]


async def test_an_error_is_raised_and_so_is_a_cancellation_without_a_signal() -> None:
    async def fails(_: asyncio.Event) -> None:
        raise ZeroDivisionError

    async def waits(_: asyncio.Event) -> None:
        await asyncio.sleep(60)

    with pytest.raises(ZeroDivisionError):
        await run_until_stopped("watch", fails, finish_seconds=1, end_seconds=1)
    running = asyncio.create_task(run_until_stopped("watch", waits, finish_seconds=1, end_seconds=1))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
