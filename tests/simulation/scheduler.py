"""A deterministic event loop with a virtual clock, and the product's clocks, threads and dice under its control.

Nothing waits: when no task can go on, the clock jumps to the next timer. The same seed gives the same order of steps.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import sys
import time
import warnings
from asyncio import base_events, events
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import structlog

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
"""When every history begins."""
PACKAGES = ("pipeline.", "connectors.", "topics.", "query.")


class Stuck(AssertionError):
    """Nothing can ever go on, although somebody waits: a deadlock."""


class _Timer(events.TimerHandle):
    """Without what asyncio's own checks. Once cancelled it is dropped when its time comes."""

    def __init__(self, when: float, callback: Any, args: Any, loop: VirtualLoop, context: Context | None) -> None:
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True


class VirtualLoop(base_events.BaseEventLoop):
    """Runs what is ready in the order in which it became ready, and jumps to the next timer when nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0
        self._timers: list[tuple[float, int, _Timer]] = []
        """(when, in which order it was set, what)"""
        self._order = count()
        self._now = BEGIN
        self._now_at = 0.0
        self.set_exception_handler(lambda _loop, _context: None)  # tasks of killed processes end as they like

    def time(self) -> float:
        return self._virtual

    def now(self) -> datetime:
        """The virtual wall clock."""
        if self._now_at != self._virtual:
            self._now, self._now_at = BEGIN + timedelta(seconds=self._virtual), self._virtual
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> events.TimerHandle:
        """As the base's, without what it checks."""
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> events.TimerHandle:
        return self.call_at(self._virtual + delay, callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> events.Handle:
        handle = _Timer(self._virtual, callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """There are no threads: what would run in one runs now."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  it belongs to the caller
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Stuck("every task waits for another one")
            self._virtual = max(self._virtual, timers[0][0])
        now = self._virtual
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException:  # noqa: BLE001  as in asyncio it ends no loop; tasks keep theirs
                    pass

    def end(self) -> None:
        """Let every task that is left end, whatever it waits for."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with suppress(Exception):  # cleaning up after itself, it finds no running loop
                task.get_coro().close()
        self._ready.clear()  # type: ignore[attr-defined]
        self._timers.clear()
        self.close()

    def _process_events(self, event_list: Any) -> None:
        raise AssertionError("there are no sockets")

    def _write_to_self(self) -> None:
        """Nobody else runs: there is nobody to wake."""


SKEW: ContextVar[timedelta] = ContextVar("skew", default=timedelta(0))
"""How much the wall clock of the machine that this task runs on is ahead."""


class _AnyDatetime(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, datetime)


class _Datetime(datetime, metaclass=_AnyDatetime):
    """The object that the product's modules know as ``datetime``."""

    loop: VirtualLoop

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        now = cls.loop.now() + SKEW.get()
        return now.astimezone(tz) if tz is not UTC else now


class _Time:
    """The object that the product's modules know as ``time``."""

    loop: VirtualLoop

    @classmethod
    def monotonic(cls) -> float:
        return cls.loop.time()

    @classmethod
    def time(cls) -> float:
        return cls.loop.now().timestamp()

    @classmethod
    def time_ns(cls) -> int:
        return round(cls.loop.now().timestamp() * 1e6) * 1_000

    perf_counter = monotonic


class _Silence:
    """The object that the product's modules know as ``log``."""

    def debug(self, *_: object, **__: object) -> None:
        return None

    info = warning = error = exception = critical = debug

    def bind(self, **_: object) -> _Silence:
        return self


_SILENCE = _Silence()


def _monotonic() -> float:
    return _Time.loop.time()


@contextmanager
def controlled() -> Iterator[None]:
    """Inside, the product reads the virtual clock (of the loop given to ``use``), logs nothing and uses no threads."""
    replaced: list[tuple[Any, str, Any]] = []

    def replace(module: Any, name: str, value: Any) -> None:
        replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES):
            if getattr(module, "datetime", None) is datetime:
                replace(module, "datetime", _Datetime)
            if getattr(module, "monotonic", None) is time.monotonic:
                replace(module, "monotonic", _monotonic)
            if getattr(module, "time", None) is time:
                replace(module, "time", _Time)
            if isinstance(getattr(module, "log", None), structlog._config.BoundLoggerLazyProxy):
                replace(module, "log", _SILENCE)  # structlog's own would be made anew for each line
    replace(asyncio, "to_thread", _inline)
    logging_before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    dice = random.getstate()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* was never awaited", category=RuntimeWarning)
            yield
    finally:
        random.setstate(dice)
        structlog.configure(**logging_before)
        for module, name, value in reversed(replaced):
            setattr(module, name, value)


def use(loop: VirtualLoop, seed: int) -> None:
    """Make this loop's clock the product's, and its jitter that of the seed."""
    _Datetime.loop = _Time.loop = loop
    random.seed(seed)


async def _inline(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    await asyncio.sleep(0)
    return func(*args, **kwargs)
