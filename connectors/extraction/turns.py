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

reader: ContextVar[str] = ContextVar("reader", default="")
"""For whom files are read: an instance of a connector."""


class Turns:
    """Law: of those who have jobs waiting, the next is of whoever has used least time since it last had none."""

    def __init__(self, at_once: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="extraction")
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._used: dict[str, float] = {}
        """Seconds that the jobs of each took. Whoever returns begins with what the last one had used whose turn it was:
        nobody saves time up."""
        self._latest = 0.0

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job in a thread, when it is the turn of its ``reader``."""
        name, future = reader.get(), Future[T]()
        with self._lock:
            if name not in self._waiting:
                self._waiting[name] = deque()
                self._used[name] = max(self._used.get(name, 0.0), self._latest)
            self._waiting[name].append((future, job))
        self._threads.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            name = min(self._waiting, key=self._used.__getitem__)
            future, job = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            self._latest = self._used[name]
        if not future.set_running_or_notify_cancel():
            return
        began = self._clock()
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 - as an executor's thread does
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            with self._lock:
                self._used[name] += self._clock() - began
