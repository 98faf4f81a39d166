"""One process runs several workers: each fails alone, all of them stop together, and the end waits for nobody."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.core.errors import Misconfigured
from pipeline.observability.metrics import Metrics
from pipeline.runtime import process


class Fake:
    """A worker that starts, and fails when it is made to."""

    def __init__(self, name: str, *, starts: Sequence[Exception | None] = ()) -> None:
        """starts: what its first starts raise."""
        self.name = name
        self.is_ready = False
        self.started = 0
        self.drained = False
        self.fails = asyncio.Event()
        self._starts = list(starts)
        self.closes = asyncio.Event()
        """Closing what it opened waits for this after a crash."""
        self.closes.set()

    def report(self) -> list[dict[str, Any]]:
        return [{"stage": self.name, "ready": self.is_ready}]

    async def run(self, stop: asyncio.Event, on_crash: Callable[[], None]) -> None:
        if self._starts and (error := self._starts.pop(0)) is not None:
            raise error
        self.started += 1
        self.is_ready = True
        tasks = [asyncio.create_task(event.wait()) for event in (stop, self.fails)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.fails.is_set():
                self.fails.clear()
                on_crash()
                async with asyncio.timeout(5):
                    await self.closes.wait()
                raise RuntimeError("a part of the worker gave up") from ValueError("secret")
            self.drained = True
        finally:
            self.is_ready = False
            for task in tasks:
                task.cancel()


class Running:
    """A process in this one: what it shows on its port, and its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *workers: Fake, collects: bool = False) -> None:
        self.is_ready: Callable[[], bool] = bool
        self.report: Callable[[], Any] = dict
        self.ended: list[str] = []

        @asynccontextmanager
        async def health(_settings: Any, _metrics: Metrics, is_ready: Any, report: Any) -> AsyncIterator[None]:
            self.is_ready, self.report = is_ready, report
            yield

        monkeypatch.setattr(process, "health", health)
        monkeypatch.setattr(process, "AGAIN_SECONDS", 0.01)
        if not collects:  # it takes long in a process of many tests
            monkeypatch.setattr(process, "_collect_garbage", lambda: None)
        monkeypatch.setattr(process, "end_anyway", lambda name, _seconds: self.ended.append(name))
        settings: Any = None
        self.task = asyncio.create_task(process.run("all", settings, lambda _: workers))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    async def stopped(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await self.task


async def test_all_of_them_are_ready_reported_and_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    detect, vectors = Fake("detect"), Fake("vectors")
    running = Running(monkeypatch, detect, vectors)
    await running.until(lambda: running.is_ready())
    assert [stage["stage"] for stage in running.report()["stages"]] == ["detect", "vectors"]
    vectors.is_ready = False
    assert not running.is_ready(), "one that is not ready makes the process not ready"
    await running.stopped()
    assert detect.drained
    assert vectors.drained
    assert running.ended == []


async def test_one_that_crashes_starts_again_while_the_other_works(monkeypatch: pytest.MonkeyPatch) -> None:
    detect = Fake("detect")
    vectors = Fake("vectors", starts=[None, Misconfigured("the key is refused")])
    running = Running(monkeypatch, detect, vectors)
    await running.until(lambda: running.is_ready())
    vectors.fails.set()
    await running.until(lambda: vectors.started == 2 and running.is_ready())
    assert detect.started == 1
    assert not detect.drained
    await running.stopped()
    assert vectors.drained


async def test_one_that_fails_again_and_again_takes_less_and_less_of_the_others_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was started every two seconds: each start took time of the others, and partitions from other processes."""
    refusals = [Misconfigured("the key is refused")] * 3
    vectors = Fake("vectors", starts=[None, *refusals])
    running = Running(monkeypatch, Fake("detect"), vectors)
    await running.until(lambda: running.is_ready())
    with capture_logs() as logs:
        vectors.fails.set()
        await running.until(lambda: vectors.started == 2 and running.is_ready())
        monkeypatch.setattr(process, "LASTING_SECONDS", 0.0)
        vectors.fails.set()
        await running.until(lambda: vectors.started == 3 and running.is_ready())
    pauses = [line["after_seconds"] for line in logs if line["event"] == "worker_restarts"]
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.01]
    await running.stopped()


async def test_what_one_that_failed_has_left_behind_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that were frozen at its start stayed in memory, as did those that were not collected before the next
    one."""

    class Record:
        def __init__(self) -> None:
            self.itself = self

    class Reading(Fake):
        records: list[weakref.ref[Record]] = []  # noqa: RUF012

        async def run(self, stop: asyncio.Event, on_crash: Callable[[], None]) -> None:
            before, after = Record(), Record()
            self.records += [weakref.ref(before)]
            gc.freeze()
            self.records += [weakref.ref(after)]
            await super().run(stop, on_crash)

    worker = Reading("vectors")
    running = Running(monkeypatch, Fake("detect"), worker, collects=True)
    await running.until(lambda: running.is_ready())
    worker.fails.set()
    await running.until(lambda: worker.started == 2 and running.is_ready())
    assert [record() is None for record in worker.records] == [True, True, False, False]
    await running.stopped()
    gc.freeze()  # as tests/conftest.py did


async def test_one_that_ends_without_an_error_does_not_start_again_after_the_pause_of_an_earlier_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ending(Fake):
        async def run(self, stop: asyncio.Event, on_crash: Callable[[], None]) -> None:
            self.started += 1
            if self.started == 1:
                on_crash()
                raise RuntimeError("a part of the worker gave up")

    worker, stop = Ending("vectors"), asyncio.Event()
    monkeypatch.setattr(process, "AGAIN_SECONDS", 3600.0)
    monkeypatch.setattr(process, "backoff", lambda *_, **__: 0.0)
    monkeypatch.setattr(process, "_collect_garbage", lambda: None)
    running = asyncio.create_task(process._run_repeatedly(worker, stop))
    async with asyncio.timeout(5):
        while worker.started < 2:
            await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert worker.started == 2
    stop.set()
    async with asyncio.timeout(5):
        await running


async def test_a_first_start_that_fails_ends_the_process_in_good_order(monkeypatch: pytest.MonkeyPatch) -> None:
    detect, vectors = Fake("detect"), Fake("vectors", starts=[Misconfigured("the key is refused")])
    running = Running(monkeypatch, detect, vectors)
    with pytest.raises(Misconfigured, match="the key is refused"):
        async with asyncio.timeout(5):
            await running.task
    assert detect.drained


async def test_one_that_cannot_be_closed_after_a_crash_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_SECONDS", 0.01)
    detect, vectors = Fake("detect"), Fake("vectors")
    running = Running(monkeypatch, detect, vectors)
    await running.until(lambda: running.is_ready())
    vectors.closes.clear()
    vectors.fails.set()
    await running.until(lambda: running.ended == ["vectors"])
    vectors.closes.set()
    monkeypatch.setattr(process, "STOP_SECONDS", 5)
    await running.stopped()


async def test_a_single_one_that_crashes_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    detect = Fake("detect")
    running = Running(monkeypatch, detect)
    await running.until(lambda: running.is_ready())
    detect.fails.set()
    with pytest.raises(RuntimeError, match="gave up"):
        async with asyncio.timeout(5):
            await running.task
    assert detect.started == 1


async def test_the_process_ends_although_a_single_one_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_SECONDS", 0.01)
    detect = Fake("detect")
    running = Running(monkeypatch, detect)
    await running.until(lambda: running.is_ready())
    detect.closes.clear()
    detect.fails.set()
    await running.until(lambda: running.ended == ["all"])
    detect.closes.set()
    with pytest.raises(RuntimeError):
        await running.task
