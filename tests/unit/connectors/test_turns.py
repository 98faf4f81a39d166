"""Files that take long delay no other connector's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context

import pytest

from connectors.extraction.turns import MOST_READERS, Turns, reader


class Files:
    """Has files read whose time is given, and records the order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []
        self.turns = Turns(1, clock=lambda: self.now)
        self._begin = threading.Event()
        self._futures: list[Future[None]] = []
        self._submit("first", self._begin.wait)

    def read(self, name: str, number: int, seconds: float) -> None:
        def job() -> None:
            self.order.append(name)
            self.now += seconds

        for _ in range(number):
            self._submit(name, job)

    def _submit(self, name: str, job: Callable[[], object]) -> None:
        def submit() -> Future[None]:
            reader.set(name)
            return self.turns.submit(lambda: job() and None)

        self._futures.append(copy_context().run(submit))

    def ordered(self) -> list[str]:
        """Let all files be read, and return whose they were."""
        self._begin.set()
        for future in self._futures:
            future.result(timeout=20)
        return self.order


def test_very_many_slow_files_delay_another_connector_by_a_single_file() -> None:
    """Twenty files of 90 s were read first, and a sweep of the other connector waited, with the revocations behind."""
    files = Files()
    files.read("slow", 20, 90.0)
    files.read("quick", 50, 0.5)
    order = files.ordered()
    assert order[:2].count("slow") == 1
    assert order[:51].count("quick") == 50
    assert order.count("slow") == 20


def test_who_reads_one_file_after_the_other_waits_for_a_single_slow_one() -> None:
    """A slow file was read between any two of them."""
    files = Files()
    files.read("slow", 20, 90.0)
    done = threading.Event()

    def read_next(left: int) -> None:
        if left == 0:
            done.set()
            return
        files.read("quick", 1, 0.5)
        # The next one is fetched first, and the thread could begin another file meanwhile.
        fetched = threading.Timer(0.05, read_next, [left - 1])
        files._futures[-1].add_done_callback(lambda _: fetched.start())

    read_next(10)
    files._begin.set()
    assert done.wait(20)
    assert files.order[:11].count("quick") == 10


def test_who_always_has_a_file_read_saves_no_hours_up() -> None:
    """On one of four threads it used a third of what the other did, and would then have been served alone."""
    now, order = 0.0, list[str]()

    def advance() -> None:
        nonlocal now
        now += 90.0

    turns, together = Turns(4, clock=lambda: now), threading.Barrier(3, advance)
    ends, begins, begun = threading.Event(), threading.Event(), threading.Barrier(4)

    def submit(name: str, job: Callable[[], object]) -> Future[None]:
        def inside() -> Future[None]:
            reader.set(name)
            return turns.submit(lambda: job() and None)

        return copy_context().run(inside)

    def read(name: str) -> None:
        nonlocal now
        while turns._began["busy"] and name == "steady":
            time.sleep(0.001)  # else what is just ending would be charged for this one
        order.append(name)
        now += 1.0

    waiting = [submit("steady", lambda: ends.wait(20))]
    for future in [submit("busy", lambda: together.wait(20)) for _ in range(300)]:
        future.result(timeout=20)
    waiting += [submit("busy", lambda: (begun.wait(20), begins.wait(20))) for _ in range(3)]
    begun.wait(20)
    waiting += [submit("steady", lambda: read("steady")) for _ in range(200)]
    waiting += [submit("busy", lambda: read("busy"))]
    begins.set()
    for future in waiting[1:]:
        future.result(timeout=20)
    ends.set()
    assert order.index("busy") < 100


def test_nobody_saves_time_up() -> None:
    files = Files()
    files.read("busy", 10, 10.0)
    assert files.ordered() == ["busy"] * 10
    files._begin.clear()
    files._submit("busy", files._begin.wait)
    files.order.clear()
    files.read("busy", 3, 10.0)
    files.read("new", 10, 10.0)
    assert files.ordered()[:4].count("busy") >= 1, "one that was away would have been first ten times"


def test_readers_who_do_not_come_back_are_forgotten_and_nobody_who_has_files_waiting() -> None:
    """Each restart of a process of connectors may give it another address, and a host may send from very many."""
    files = Files()
    files.read("busy", 2, 100.0)
    for number in range(1_200):
        files.read(f"address {number}", 1, 1.0)
    assert len(files.ordered()) == 1_202
    assert len(files.turns._used) <= MOST_READERS
    assert set(files.turns._began) <= set(files.turns._used)
    assert "busy" in files.turns._used, "who has used most is remembered longest"


async def test_a_job_that_was_cancelled_while_it_waited_does_not_run() -> None:
    files = Files()
    files.read("a", 1, 1.0)
    waiting = asyncio.wrap_future(files._futures[-1])
    waiting.cancel()
    await asyncio.sleep(0)
    files._begin.set()
    files.read("b", 1, 1.0)
    await asyncio.wrap_future(files._futures[-1])
    assert files.order == ["b"]


def test_an_error_is_that_of_its_job() -> None:
    turns = Turns(1)
    with pytest.raises(ZeroDivisionError):
        turns.submit(lambda: 1 / 0).result(timeout=20)
    assert turns.submit(lambda: 2).result(timeout=20) == 2
