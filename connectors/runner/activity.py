"""Runs the activities of an instance: at intervals, on command, and again after a failure; and keeps their status."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Literal

import structlog

from connectors.faults import place
from connectors.runner.rows import LeaseLost
from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.retry import backoff

log = structlog.get_logger()

RETRY_BASE_SECONDS = 1.0
RETRY_CAP_SECONDS = 60.0

Condition = Literal["idle", "running", "waiting", "needs attention", "paused"]


class Paused(Exception):
    """The instance was paused: the run stops at the next page, and is repeated when the instance resumes."""


@dataclass(slots=True)
class Status:
    """The status of an activity; times in RFC 3339."""

    state: Condition = "idle"
    reason: str | None = None
    """Why it waits or needs attention: one line."""
    since: str | None = None
    """When it entered that state."""
    succeeded_at: str | None = None
    """The end of the last run that set nothing aside, or of the first run if there has been none: access rights are as
    old as that."""
    failures: int = 0
    """The number of failures since the last success."""

    def age_seconds(self) -> float | None:
        """Return the time since the last success, or None."""
        if self.succeeded_at is None:
            return None
        return (datetime.now(UTC) - datetime.fromisoformat(self.succeeded_at)).total_seconds()

    def needs_attention(self) -> bool:
        return self.state == "needs attention"

    def enter(self, state: Condition, reason: str | None = None) -> None:
        if self.state != state:
            self.since = _now()
        self.state, self.reason = state, reason


class Activity:
    """Runs one function again and again. Law: no exception ends it but LeaseLost and cancellation.

    ``trigger`` requests a run now, and names the command that the run completes. What is requested during a run is done
    by the next one.
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
        """run: receives the arguments of all triggers since the last run, and returns its outcome. every_seconds: see
        ``pause_seconds``; None runs it on triggers only. attention_seconds: between attempts while it needs attention.
        on_done: receives the completed commands and the outcome. rests: triggers without a command let it run half of
        the time at most."""
        self.name = name
        self.status = Status()
        self.has_crashed = False
        """Whether the last run ended by an error that no source may raise."""
        self._run = run
        self._every = every_seconds
        self._attention_seconds = attention_seconds
        self._on_done = on_done
        self._not_paused = not_paused
        self._due = monotonic() + first_in_seconds if every_seconds is not None else float("inf")
        self._wake = asyncio.Event()
        self._arguments: set[str] = set()
        self._unfinished: set[str] = set()
        """The arguments of the current run that a failure leaves to the next one."""
        self._commands: set[int] = set()
        self._running_commands: set[int] = set()
        self._rests = rests
        self._rest_until = 0.0
        """When the pause after the last run ends, on monotonic()."""

    @property
    def pending(self) -> int:
        """The number of arguments that no run has received yet."""
        return len(self._arguments)

    @property
    def unfinished(self) -> frozenset[str]:
        """The arguments that no run has done yet, including those of the current run, and of a failed one."""
        return frozenset(self._arguments | self._unfinished)

    def trigger(self, *arguments: str, command: int | None = None) -> None:
        """Run now. arguments: passed to the run. command: the id of a command that the run completes; a repeated id is
        ignored."""
        if command is not None:
            if command in self._commands or command in self._running_commands:
                return
            self._commands.add(command)
        self._arguments.update(arguments)
        self._wake.set()

    def finish(self, arguments: Collection[str]) -> None:
        """Record that the current run has done what these arguments ask for, so that a failure does not repeat it."""
        self._unfinished.difference_update(arguments)

    def count_as_run(self) -> None:
        """Record that another activity has done the work of this one: it is due again after a whole interval."""
        self.status.succeeded_at = _now()
        if self._every is not None:
            self._due = max(self._due, monotonic() + self._every)

    async def loop(self) -> None:
        """Run the activity until cancelled. Raises LeaseLost."""
        while not is_cancelled():
            await self._until_due()
            await self._run_once()
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
        if self._wake.is_set() and not self._commands:
            await asyncio.sleep(max(0.0, min(self._rest_until, self._due) - monotonic()))
        if not self._not_paused.is_set():
            self.status.enter("paused")
            await self._not_paused.wait()

    async def _run_once(self) -> None:
        self._wake.clear()
        arguments, self._arguments = frozenset(self._arguments), set()
        self._unfinished = set(arguments)
        self._running_commands, self._commands = self._commands, set()
        if self.status.state != "waiting":
            self.status.enter("running")
        began = monotonic()
        try:
            # A task of its own: a TaskGroup of Python 3.11 that ends by an error leaves its task looking cancelled.
            outcome = await asyncio.create_task(self._run_with(arguments), name=self.name)
            outcome = outcome or {}
            await self._complete_commands(outcome)
        except LeaseLost:
            raise
        except Paused:
            self._restore()
            self._due = 0.0
        except Exception as error:  # noqa: BLE001 # a source is foreign code: it may raise anything
            await self._handle_failure(error)
        else:
            ended = monotonic()
            self._unfinished = set()
            self._rest_until = 2 * ended - began if self._rests else 0.0
            self.status.failures, self.has_crashed = 0, False
            if self.status.succeeded_at is None or not outcome.get("set_aside"):
                self.status.succeeded_at = _now()
            self.status.enter("idle")
            self._due = float("inf") if self._every is None else ended + pause_seconds(self._every, after=ended - began)

    async def _run_with(self, arguments: frozenset[str]) -> Mapping[str, Any] | None:
        """Call ``run`` inside its own task: a task that is cancelled before it starts would never await a coroutine
        that was made outside."""
        return await self._run(arguments)

    async def _complete_commands(self, outcome: Mapping[str, Any]) -> None:
        if self._running_commands:
            await self._on_done(sorted(self._running_commands), outcome)
            self._running_commands = set()

    async def _handle_failure(self, error: Exception) -> None:
        failures, self.status.failures = self.status.failures, self.status.failures + 1
        self.has_crashed = not isinstance(error, PenstockError)
        if isinstance(error, Retryable):
            wait = backoff(
                failures,
                base=RETRY_BASE_SECONDS,
                cap=RETRY_CAP_SECONDS,
                retry_after=error.retry_after,
                random=random.random(),  # noqa: S311
            )
            self.status.enter("waiting", explained(error))
        else:
            wait = self._attention_seconds
            self.status.enter("needs attention", explained(error))
            log.warning("connector_needs_attention", activity=self.name, error=explained(error))
            try:
                await self._complete_commands({"error": explained(error)})
            except Retryable as unavailable:
                log.warning("connector_answer_postponed", activity=self.name, error=str(unavailable))
        self._due = monotonic() + wait
        if isinstance(error, Retryable):
            self._restore()
            await asyncio.sleep(wait)  # triggers wait, too

    def _restore(self) -> None:
        """Leave the commands of an unfinished run, and the arguments that it has not finished, to the next one."""
        self._arguments |= self._unfinished
        self._commands |= self._running_commands
        self._running_commands = set()


def pause_seconds(every: float, *, after: float) -> float:
    """Return the pause after a run of ``after`` seconds, so that runs begin ``every`` seconds apart. After a run that
    took more than half of that, the pause is half of it.

    What a run reads is therefore read again within ``every`` seconds, or within the run and half of ``every``.
    """
    return max(every - after, every / 2)


def is_cancelled() -> bool:
    """Whether this task was cancelled. Every loop checks it, because ``asyncio.wait_for`` of Python 3.11, which our
    libraries use as well, swallows a cancellation that arrives together with the result."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def explained(error: BaseException) -> str:
    """Return one line for people. An error of foreign code is described by its type and place only: its text may quote
    content."""
    if isinstance(error, PenstockError):
        return " ".join(str(error).split())[:500]
    return f"{place(error)}: a bug in the connector's code, or an error to raise as Retryable or Misconfigured"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def seconds_until_due(before: Mapping[str, Any] | None, every_seconds: float) -> float:
    """Return the time until an activity is due again, from its last success before a restart.

    before: its status as ``json`` returned it. An activity that has never succeeded waits for a whole interval.
    """
    age = Status(succeeded_at=(before or {}).get("succeeded_at")).age_seconds()
    return every_seconds if age is None else min(every_seconds, max(0.0, every_seconds - age))
