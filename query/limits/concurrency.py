"""Rate and concurrency limits of callers, and slots for requests, which ``query.limits.fair_queue`` assigns.

The limits hold for one process: two processes behind a load balancer accept twice as much.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import time
from typing import Literal

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from query.auth.identity import Identity
from query.limits.fair_queue import Shares, Ticket, Turn
from query.problems import Problem
from query.settings import ServeSettings
from query.telemetry import QueryMetrics

Kind = Literal["read", "search", "answer"]
COSTS: dict[Kind, int] = {"read": 1, "search": 4, "answer": 4}
"""The cost of a request in quarters of a search: a read is a statement or two. An answer costs as much as a search
until its passages are retrieved; then it waits for the model."""
SEARCH = COSTS["search"]
SEARCHING = frozenset({"/v1/search", "/v1/facets", "/v1/previews", "/v1/pipeline", "/mcp"})
ANSWERING = "/v1/answers"
ASKING_AGAIN = ("/v1/standing/", "/answer")
"""The beginning and the end of the path that asks a standing question again."""
MIN_CONCURRENT_SEARCHES, MAX_CONCURRENT_SEARCHES = 2, 4
"""Bounds of the concurrent searches of one process, whose Python code runs on one processor: more would only make each
of them slower."""
REMOTE_MODEL_FACTOR = 4
"""The factor for searches that wait for a remote server to embed or rerank, which takes longer than the rest."""


def kind_of(path: str) -> Kind:
    if path == ANSWERING or (path.startswith(ASKING_AGAIN[0]) and path.endswith(ASKING_AGAIN[1])):
        return "answer"
    return "search" if path in SEARCHING else "read"


def concurrent_searches(serve: ServeSettings, *, uses_remote_models: bool) -> int:
    """The most concurrent searches: as configured, else by the processors of this process. uses_remote_models: whether
    a search waits for a remote server to embed or rerank."""
    if serve.concurrent is not None:
        return serve.concurrent
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(processors, MIN_CONCURRENT_SEARCHES), MAX_CONCURRENT_SEARCHES) * (
        REMOTE_MODEL_FACTOR if uses_remote_models else 1
    )


class Slot:
    """The slot of a running request."""

    def __init__(self, work: _Queue, ticket: Ticket, waiting_seconds: float) -> None:
        """waiting_seconds: how long the request may wait for a slot."""
        self._work = work
        self._ticket = ticket
        self._waiting_seconds = waiting_seconds

    def release_search(self) -> None:
        """Release the search slot of an answer, whose model now writes."""
        self._work.leave(self._ticket)

    @asynccontextmanager
    async def released(self) -> AsyncIterator[None]:
        """Release the slot while the request waits for something that needs none, and wait for a slot again. Raises
        Problem (429, 503)."""
        self._work.leave(self._ticket)
        yield
        self._ticket = Ticket(self._ticket.tenant, self._ticket.caller, self._ticket.cost)
        await self._work.enter(self._ticket, asyncio.get_running_loop().time() + self._waiting_seconds)


class Limits:
    def __init__(
        self,
        settings: ServeSettings,
        metrics: QueryMetrics,
        *,
        uses_remote_models: bool = False,
        weight: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        """uses_remote_models: as in ``concurrent_searches``. weight: returns the weight of a tenant's share."""
        self._settings = settings
        self._metrics = metrics
        self._rate = RateLimitItemPerMinute(settings.requests_per_minute)
        self._window = MovingWindowRateLimiter(MemoryStorage())
        self._at_once: Counter[tuple[str, ...]] = Counter()
        work = SEARCH * concurrent_searches(settings, uses_remote_models=uses_remote_models)
        self._work = _Queue(Shares(work, waiting=settings.waiting, largest=SEARCH, weight=weight), metrics)
        self._answers = _Queue(Shares(settings.answers_at_once, waiting=settings.waiting, weight=weight), metrics)

    def count(self, identity: Identity) -> None:
        """Count a request of this caller. Raises Problem (429)."""
        if self._window.hit(self._rate, repr(identity.id)):
            return
        resets_at, _ = self._window.get_window_stats(self._rate, repr(identity.id))
        self._metrics.shed.labels("rate").inc()
        raise Problem(
            "rate-limited",
            f"limit of {self._settings.requests_per_minute} requests per minute exceeded",
            headers={"Retry-After": str(max(1, math.ceil(resets_at - time())))},
        )

    @contextmanager
    def place(self, identity: Identity) -> Iterator[None]:
        """Count a request among the concurrent ones of its caller. Raises Problem (429)."""
        if self._at_once[identity.id] >= self._settings.concurrent_per_caller:
            self._metrics.shed.labels("caller").inc()
            raise Problem(
                "too-many-at-once",
                f"limit of {self._settings.concurrent_per_caller} concurrent requests per caller exceeded",
                headers={"Retry-After": "1"},
            )
        self._at_once[identity.id] += 1
        try:
            yield
        finally:
            self._at_once[identity.id] -= 1
            if not self._at_once[identity.id]:
                del self._at_once[identity.id]

    @asynccontextmanager
    async def slot(self, identity: Identity, kind: Kind = "search") -> AsyncIterator[Slot]:
        """Wait for a slot and hold it. Raises Problem (429, 503)."""
        work, answer = Ticket(identity.tenant, identity.id, COSTS[kind]), Ticket(identity.tenant, identity.id)
        slot = Slot(self._work, work, self._settings.waiting_seconds)
        try:
            deadline = asyncio.get_running_loop().time() + self._settings.waiting_seconds
            if kind == "answer":
                await self._answers.enter(answer, deadline)
            await self._work.enter(work, deadline)
            self._metrics.in_work.inc()
            try:
                yield slot
            finally:
                self._metrics.in_work.dec()
        finally:
            slot.release_search()
            self._answers.leave(answer)

    @asynccontextmanager
    async def answering(self, identity: Identity, slot: Slot) -> AsyncIterator[None]:
        """Hold a place among the answers, for a request that was admitted as a search and has a model write. It holds
        no slot of a search while it waits for one. Raises Problem (429, 503)."""
        answer = Ticket(identity.tenant, identity.id)
        try:
            async with slot.released():
                await self._answers.enter(answer, asyncio.get_running_loop().time() + self._settings.waiting_seconds)
            yield
        finally:
            self._answers.leave(answer)


class _Queue:
    """The slots of one resource and the requests that wait for them."""

    def __init__(self, shares: Shares, metrics: QueryMetrics) -> None:
        self._shares = shares
        self._metrics = metrics
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, ticket: Ticket, deadline: float) -> None:
        """Wait until the ticket starts. deadline: in the loop's time. Raises Problem (429, 503). The ticket must leave
        in any case."""
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
            raise self._refused("waited", exceeds_share=self._shares.exceeds_share(ticket)) from error
        finally:
            del self._waiting[ticket]
            self._metrics.waiting.dec()

    def leave(self, ticket: Ticket) -> None:
        """Release the ticket's slot. It has no effect on a ticket that has left or never entered."""
        self._apply(self._shares.leave(ticket, asyncio.get_running_loop().time()))

    def _apply(self, turn: Turn) -> None:
        for ticket in turn.started:
            future = self._waiting.get(ticket)
            if future is not None and not future.done():
                future.set_result(None)
        if turn.refused is not None:
            future = self._waiting.get(turn.refused)
            if future is not None and not future.done():
                future.set_exception(self._refused("busy", exceeds_share=turn.exceeds_share))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._shares.next_advance_at()) is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._apply(self._shares.advance(asyncio.get_running_loop().time()))

    def _refused(self, reason: str, *, exceeds_share: bool) -> Problem:
        if exceeds_share:
            self._metrics.shed.labels("share").inc()
            return Problem(
                "over-share",
                "other callers are waiting, and this caller or its tenant exceeds its fair share",
                headers={"Retry-After": "1"},
            )
        self._metrics.shed.labels(reason).inc()
        return Problem("busy", "all workers are busy: retry shortly", headers={"Retry-After": "1"})
