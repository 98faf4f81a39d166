"""When something is done: every so often, when asked, again when it failed; and what is shown of that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from traceback import extract_tb
from typing import Any, Literal

import structlog

from connectors.runner.rows import LeaseLost
from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.retry import backoff

log = structlog.get_logger()

RETRY_BASE_SECONDS = 1.0
RETRY_CAP_SECONDS = 60.0

Condition = Literal["idle", "running", "waiting", "needs attention", "paused"]


class Paused(Exception):
    """Somebody paused the instance: stop at the next page, begin again when it goes on."""


@dataclass(slots=True)
class Status:
    """What is shown of an activity; times in RFC 3339."""

    state: Condition = "idle"
    reason: str | None = None
    """Why it waits or needs attention: one line."""
    since: str | None = None
    """Since when it is in that state."""
    succeeded_at: str | None = None
    failures: int = 0
    """In a row."""

    def age_seconds(self) -> float | None:
        """Since it last succeeded."""
        if self.succeeded_at is None:
            return None
        return (datetime.now(UTC) - datetime.fromisoformat(self.succeeded_at)).total_seconds()

    def needs_somebody(self) -> bool:
        return self.state == "needs attention"

    def become(self, state: Condition, reason: str | None = None) -> None:
        if self.state != state:
            self.since = _now()
        self.state, self.reason = state, reason


class Activity:
    """Runs one thing over and over. Law: nothing that it raises ends it but LeaseLost and cancellation.

    ``ask`` has it run once more from now, and says afterwards for whom; what was asked for while it runs is run again.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[frozenset[str]], Awaitable[Mapping[str, Any] | None]],
        *,
        every_seconds: float | None,
        attention_seconds: float,
        on_done: Callable[[list[int], Mapping[str, Any]], Awaitable[None]],
        not_paused: asyncio.Event,
        first_in_seconds: float = 0.0,
        rests: bool = False,
    ) -> None:
        """run: is given what was asked for in words, and returns its outcome. every_seconds None: only when asked.
        attention_seconds: how often it is tried while it needs attention. on_done: the asks that were served.
        rests: events alone have it run half of the time at most."""
        self.name = name
        self.status = Status()
        self._run = run
        self._every = every_seconds
        self._attention_seconds = attention_seconds
        self._on_done = on_done
        self._not_paused = not_paused
        self._due = monotonic() + first_in_seconds if every_seconds is not None else float("inf")
        self._wake = asyncio.Event()
        self._words: set[str] = set()
        self._asked: set[int] = set()
        self._serving: set[int] = set()
        self._rests = rests
        self._rested = 0.0
        """On monotonic()."""

    @property
    def waiting(self) -> int:
        """Words that no run has been given yet."""
        return len(self._words)

    def ask(self, *words: str, ask: int | None = None) -> None:
        """Run now. words: what the run is told. ask: the number of who is to be answered, once however often given."""
        if ask is not None:
            if ask in self._asked or ask in self._serving:
                return
            self._asked.add(ask)
        self._words.update(words)
        self._wake.set()

    async def loop(self) -> None:
        """Raises LeaseLost."""
        while not is_cancelled():
            await self._until_due()
            await self._once()
        raise asyncio.CancelledError

    async def _until_due(self) -> None:
        while not self._wake.is_set():
            left = self._due - monotonic()
            if left <= 0:
                break
            try:
                async with asyncio.timeout(None if left == float("inf") else left):
                    await self._wake.wait()
            except TimeoutError:
                break
        if self._wake.is_set() and not self._asked:
            await asyncio.sleep(max(0.0, min(self._rested, self._due) - monotonic()))
        if not self._not_paused.is_set():
            self.status.become("paused")
            await self._not_paused.wait()

    async def _once(self) -> None:
        self._wake.clear()
        words, self._words = frozenset(self._words), set()
        self._serving, self._asked = self._asked, set()
        if self.status.state != "waiting":
            self.status.become("running")
        began = monotonic()
        try:
            # A task of its own: a TaskGroup of Python 3.11 that ends by an error leaves its task looking cancelled.
            outcome = await asyncio.create_task(self._run_with(words), name=self.name)
            await self._answered(outcome or {})
        except LeaseLost:
            raise
        except Paused:
            self._again(words)
            self._due = 0.0
        except Exception as error:  # noqa: BLE001 # a source is somebody else's code: it may raise anything
            await self._failed(error, words)
        else:
            self._rested = 2 * monotonic() - began if self._rests else 0.0
            self.status.failures = 0
            self.status.succeeded_at = _now()
            self.status.become("idle")
            self._due = monotonic() + self._every if self._every is not None else float("inf")

    async def _run_with(self, words: frozenset[str]) -> Mapping[str, Any] | None:
        """``run`` is called here, in its task: one that is cancelled before it starts would never await a coroutine
        that was made outside."""
        return await self._run(words)

    async def _answered(self, outcome: Mapping[str, Any]) -> None:
        if self._serving:
            await self._on_done(sorted(self._serving), outcome)
            self._serving = set()

    async def _failed(self, error: Exception, words: frozenset[str]) -> None:
        failures, self.status.failures = self.status.failures, self.status.failures + 1
        if isinstance(error, Retryable):
            wait = backoff(
                failures,
                base=RETRY_BASE_SECONDS,
                cap=RETRY_CAP_SECONDS,
                retry_after=error.retry_after,
                random=random.random(),  # noqa: S311
            )
            self.status.become("waiting", explained(error))
        else:
            wait = self._attention_seconds
            self.status.become("needs attention", explained(error))
            log.warning("connector_needs_attention", activity=self.name, error=explained(error))
            try:
                await self._answered({"error": explained(error)})
            except Retryable as away:
                log.warning("connector_answer_postponed", activity=self.name, error=str(away))
        self._due = monotonic() + wait
        if isinstance(error, Retryable):
            self._again(words)
            await asyncio.sleep(wait)  # whoever asks meanwhile waits like everybody

    def _again(self, words: frozenset[str]) -> None:
        self._words |= words
        self._asked |= self._serving
        self._serving = set()

    def shown(self) -> dict[str, Any]:
        return asdict(self.status)


def is_cancelled() -> bool:
    """Whether this task was cancelled: ``asyncio.wait_for`` of Python 3.11, also in our libraries, swallows a
    cancellation that comes together with the result, so whoever loops has to look."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def explained(error: BaseException) -> str:
    """One line for people. Of an error that is not ours only its kind and place: its text may quote content."""
    if isinstance(error, PenstockError):
        return " ".join(str(error).split())[:500]
    frames = extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}: a fault in the connector's code"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def left_seconds(before: Mapping[str, Any] | None, every_seconds: float) -> float:
    """Until an activity is due again, by when it last succeeded (its status, as it was shown): a restart does not put
    it off. Where it never has, it waits for its first turn."""
    age = Status(succeeded_at=(before or {}).get("succeeded_at")).age_seconds()
    return every_seconds if age is None else min(every_seconds, max(0.0, every_seconds - age))
