"""Rate and concurrency limits of callers, and the places for work, shared out by ``query.limits.fair_queue``.

The limits hold in one process: two processes behind a load balancer take twice as much.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import time
from typing import Literal

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from query.auth.identity import Who
from query.limits.fair_queue import Shares, Ticket, Turn
from query.problems import Problem
from query.settings import ServeSettings
from query.telemetry import QueryMetrics

Kind = Literal["read", "search", "answer"]
COSTS: dict[Kind, int] = {"read": 1, "search": 4, "answer": 4}
"""Of a place, in quarters of a search: a read is a statement or two. An answer costs a search until its passages are
found; from then on the model works, elsewhere."""
SEARCH = COSTS["search"]
SEARCHING = frozenset({"/v1/search", "/v1/facets", "/v1/pipeline", "/mcp"})
ANSWERING = "/v1/answers"
LEAST_AT_ONCE, MOST_AT_ONCE = 2, 4
"""Searches of one process, whose Python runs on one processor: with more each takes longer and none comes sooner."""
AWAY_FACTOR = 4
"""So many times as many where a search waits for a server that embeds or reranks, which takes longer than the rest."""


def kind_of(path: str) -> Kind:
    if path == ANSWERING:
        return "answer"
    return "search" if path in SEARCHING else "read"


def searches_at_once(serve: ServeSettings, *, uses_remote_models: bool) -> int:
    """As it is set, or by the processors that this process may use. waits_elsewhere: for a server that embeds or
    reranks."""
    if serve.concurrent is not None:
        return serve.concurrent
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(processors, LEAST_AT_ONCE), MOST_AT_ONCE) * (AWAY_FACTOR if uses_remote_models else 1)


class Place:
    """What one request holds."""

    def __init__(self, work: _Room, ticket: Ticket) -> None:
        self._work = work
        self._ticket = ticket

    def written(self) -> None:
        """From now on a model writes: the place for work is free for others."""
        self._work.leave(self._ticket)


class Limits:
    def __init__(
        self,
        settings: ServeSettings,
        metrics: QueryMetrics,
        *,
        uses_remote_models: bool = False,
        weight: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        """waits_elsewhere: as ``searches_at_once``. weight: of a tenant's share."""
        self._settings = settings
        self._metrics = metrics
        self._rate = RateLimitItemPerMinute(settings.requests_per_minute)
        self._window = MovingWindowRateLimiter(MemoryStorage())
        self._at_once: Counter[tuple[str, ...]] = Counter()
        work = SEARCH * searches_at_once(settings, uses_remote_models=uses_remote_models)
        self._work = _Room(Shares(work, waiting=settings.waiting, largest=SEARCH, weight=weight), metrics)
        self._answers = _Room(Shares(settings.answers_at_once, waiting=settings.waiting, weight=weight), metrics)

    def count(self, who: Who) -> None:
        """One more request of this caller. Raises Problem (429)."""
        if self._window.hit(self._rate, repr(who.id)):
            return
        resets_at, _ = self._window.get_window_stats(self._rate, repr(who.id))
        self._metrics.shed.labels("rate").inc()
        raise Problem(
            "rate-limited",
            f"limit of {self._settings.requests_per_minute} requests per minute exceeded",
            headers={"Retry-After": str(max(1, math.ceil(resets_at - time())))},
        )

    @asynccontextmanager
    async def place(self, who: Who, kind: Kind = "search") -> AsyncIterator[Place]:
        """Wait for a place to work at, and hold it. Raises Problem (429, 503)."""
        if self._at_once[who.id] >= self._settings.concurrent_per_caller:
            self._metrics.shed.labels("caller").inc()
            raise Problem(
                "too-many-at-once",
                f"limit of {self._settings.concurrent_per_caller} concurrent requests per caller exceeded",
                headers={"Retry-After": "1"},
            )
        self._at_once[who.id] += 1
        work, answer = Ticket(who.tenant, who.id, COSTS[kind]), Ticket(who.tenant, who.id)
        try:
            deadline = asyncio.get_running_loop().time() + self._settings.waiting_seconds
            if kind == "answer":
                await self._answers.enter(answer, deadline)
            await self._work.enter(work, deadline)
            self._metrics.in_work.inc()
            try:
                yield Place(self._work, work)
            finally:
                self._metrics.in_work.dec()
        finally:
            self._work.leave(work)
            self._answers.leave(answer)
            self._at_once[who.id] -= 1
            if not self._at_once[who.id]:
                del self._at_once[who.id]


class _Room:
    """The places of one resource and the room before them: who waits is woken, or sent away."""

    def __init__(self, shares: Shares, metrics: QueryMetrics) -> None:
        self._shares = shares
        self._metrics = metrics
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._look: asyncio.TimerHandle | None = None

    async def enter(self, ticket: Ticket, deadline: float) -> None:
        """deadline: of the loop's time. Raises Problem (429, 503). The ticket has to leave in any case."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting[ticket] = turn
        self._apply(self._shares.join(ticket, loop.time()))
        if turn.done():
            del self._waiting[ticket]
            return turn.result()
        self._metrics.waiting.inc()
        try:
            async with asyncio.timeout_at(deadline):
                await turn
        except TimeoutError as error:
            raise self._refused("waited", over=self._shares.is_over(ticket)) from error
        finally:
            del self._waiting[ticket]
            self._metrics.waiting.dec()

    def leave(self, ticket: Ticket) -> None:
        """Harmless for one that has left, or never came."""
        self._apply(self._shares.leave(ticket, asyncio.get_running_loop().time()))

    def _apply(self, turn: Turn) -> None:
        for ticket in turn.started:
            future = self._waiting.get(ticket)
            if future is not None and not future.done():
                future.set_result(None)
        if turn.refused is not None:
            future = self._waiting.get(turn.refused)
            if future is not None and not future.done():
                future.set_exception(self._refused("busy", over=turn.over))
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if (at := self._shares.look_at()) is not None:
            self._look = asyncio.get_running_loop().call_at(at, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._apply(self._shares.look(asyncio.get_running_loop().time()))

    def _refused(self, reason: str, *, over: bool) -> Problem:
        if over:
            self._metrics.shed.labels("share").inc()
            return Problem(
                "over-share",
                "other callers are waiting, and this caller or its tenant exceeds its fair share",
                headers={"Retry-After": "1"},
            )
        self._metrics.shed.labels(reason).inc()
        return Problem("busy", "all workers are busy: retry shortly", headers={"Retry-After": "1"})
