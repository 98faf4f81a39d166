"""Shares the threads in which files are read among the connectors that have files to read.

A file may be made to take its whole time limit, and whoever can write one can write many. In the order of their arrival
they would hold up the files of all connectors, and with these what their sweeps find after them: revocations.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

NEXT_FILE_SECONDS = 1.0
"""How long a thread that has read a file waits for the next one of the same reader, before it begins one of somebody
who has used more. Sources that read one file after the other would have one read for each slow one of others."""

MOST_SAVED_SECONDS = 60.0
"""How far somebody who has a file read at any time may fall behind the others. Without a limit, one file after the
other on one of many threads would save up hours, in which nobody else would then be served."""

MOST_READERS = 1_000
"""How many readers are remembered. Those beyond are addresses that processes had, or that somebody sends from who may
send from many: the ones that have used least count as new again."""

reader: ContextVar[str] = ContextVar("reader", default="")
"""For whom files are read: an instance of a connector; in the extraction service, the address of a process."""


class Turns:
    """Law: of those who have jobs waiting, the next is of whoever has used least time since it last had none."""

    def __init__(self, at_once: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="extraction")
        self._clock = clock
        self._lock = threading.Condition()
        """Notified of each job that waits."""
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._used: dict[str, float] = {}
        """Seconds that the finished jobs of each took. Whoever returns begins with what the last one had used whose
        turn it was, and whoever has a job running with little less: nobody saves much time up."""
        self._began: dict[str, list[float]] = {}
        """When the jobs of each began that are running."""
        self._latest = 0.0

    def close(self) -> None:
        """Wait for the jobs that are running, and begin no other."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job in a thread, when it is the turn of its ``reader``."""
        name, future = reader.get(), Future[T]()
        with self._lock:
            self._used.setdefault(name, 0.0)
            if name not in self._waiting:
                least = self._latest - (MOST_SAVED_SECONDS if self._began.get(name) else 0.0)
                self._used[name] += max(0.0, least - self._seconds(name))
            self._waiting.setdefault(name, deque()).append((future, job))
            self._lock.notify_all()
        self._threads.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            name = min(self._waiting, key=self._seconds)
            future, job = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            self._latest = self._seconds(name)
            if not future.set_running_or_notify_cancel():
                return
            began = self._clock()
            self._began.setdefault(name, []).append(began)
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 - as an executor's thread does
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            with self._lock:
                # This time counts as well, so that nobody keeps a thread by it.
                self._lock.wait_for(lambda: not self._should_wait_for(name), NEXT_FILE_SECONDS)
                self._began[name].remove(began)
                self._used[name] += self._clock() - began
                if len(self._used) > MOST_READERS:
                    self._forget()

    def _should_wait_for(self, name: str) -> bool:
        """Whether a thread is kept for the next job of somebody: only jobs of others wait, who have used more."""
        used = self._seconds(name)
        return bool(self._waiting) and all(other != name and self._seconds(other) > used for other in self._waiting)

    def _forget(self) -> None:
        """Forget half of the readers at most, so that this is rare: of those who have no jobs, the ones that have used
        least. Whoever has used less than was used last begins there anyway."""
        idle = [name for name in self._used if name not in self._waiting and not self._began.get(name)]
        for name in sorted(idle, key=self._used.__getitem__)[: MOST_READERS // 2]:
            del self._used[name]
            self._began.pop(name, None)

    def _seconds(self, name: str) -> float:
        """Return what somebody has used, with the jobs that are running."""
        now = self._clock()
        return self._used[name] + sum(now - began for began in self._began.get(name, ()))
