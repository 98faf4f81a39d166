"""The rounds of one canary: publish it, search until both stores return it, and in some rounds withdraw it again."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Literal

import structlog

from canary.question import WORDS
from canary.telemetry import CanaryMetrics
from pipeline.core.canary import PRINCIPAL, Canary, Withdrawal, withdrawal
from pipeline.core.errors import PenstockError
from pipeline.core.identity import qualify
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from pipeline.runtime.settings import CanarySettings
from query.access.callers import Caller
from query.access.filters import Filters
from query.model import Mode
from query.retrieval.search import Search
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted
from topics.registry import DOCUMENTS_LIVE

log = structlog.get_logger()

Store = Literal["vectors", "keywords"]
STORES: dict[Store, Mode] = {"vectors": "vector", "keywords": "keyword"}
"""Each store, and the mode of search that uses only this one."""
Reason = Literal["late", "unavailable", "unpublished"]
FAILURES: list[tuple[str, Reason]] = [
    ("publish", "unpublished"),
    *((of, "late") for of in (*STORES, "access", "delete")),
    *((of, "unavailable") for of in (*STORES, "access", "delete")),
]
MIN_POLL_SECONDS = 0.5
"""Interval between the first searches; a measured time is too long by half of it on average."""
MAX_POLL_SECONDS = 5.0
"""Interval after minutes, when a store is probably down or overloaded."""
MAX_CONCURRENT_SEARCHES = 4
"""Limit for each store over all canaries, so that a store that hangs does not collect hundreds of searches."""
LAST_SEARCH_SECONDS = 10.0
"""Time after the deadline in which a search may still succeed where the last one failed."""
START_JITTER_SECONDS = 30.0
"""The first rounds of all canaries begin within this time, so that they do not stay in step."""
MAX_CLOCK_DIFFERENCE_SECONDS = 60.0
"""A warning is logged beyond this; events that are five minutes in the future are refused."""
REMOVAL_SECONDS = 10.0
"""Time for Kafka to confirm the removals when the process, which has 30 seconds to end, stops."""


class Watch:
    """Safe to share between the tasks of all canaries; closes none of its arguments."""

    def __init__(self, search: Search, producer: Producer, metrics: CanaryMetrics, settings: CanarySettings) -> None:
        self._search = search
        self._producer = producer
        self._metrics = metrics
        self._settings = settings
        self._version = 0
        self._ahead = timedelta()
        self._has_logged_clock = False
        self._searches: dict[Store, asyncio.Semaphore] = {
            store: asyncio.Semaphore(MAX_CONCURRENT_SEARCHES) for store in STORES
        }
        self._seen: dict[tuple[Canary, Store], float] = {}

    def keep_time(self, now: datetime) -> None:
        """Canaries use the database's clock: with that of a fast host their events would become dead letters and stop
        intake."""
        self._ahead = now - datetime.now(UTC)
        seconds = self._ahead.total_seconds()
        if abs(seconds) > MAX_CLOCK_DIFFERENCE_SECONDS and not self._has_logged_clock:
            self._has_logged_clock = True
            log.warning("clock_differs", service="postgres", ahead_seconds=round(-seconds))

    def now(self) -> datetime:
        """The time of the database's clock, as it was last read."""
        return datetime.now(UTC) + self._ahead

    async def follow(self, canary: Canary) -> None:
        """Run rounds until cancelled, one every settings.every_seconds or, when one takes longer, at once."""
        for store in STORES:
            self._note(canary, store)  # its age counts from now on, not since 1970
        for of, reason in FAILURES:  # begin at 0, so that the first failure is an increase
            self._metrics.failures.labels(source=canary.stands_for, of=of, reason=reason)
        await asyncio.sleep(random.uniform(0, min(self._settings.every_seconds, START_JITTER_SECONDS)))  # noqa: S311
        number = 0
        while True:
            began = time.monotonic()
            await self.round(canary, number)
            number += 1
            await asyncio.sleep(max(0.0, self._settings.every_seconds - (time.monotonic() - began)))

    async def round(self, canary: Canary, number: int) -> None:
        """Run one round. A failure is counted and logged in one line; the next round tries again."""
        token = secrets.token_hex(8)
        moment = self.now()
        self._version = max(self._version + 1, int(moment.timestamp() * 1e9))
        if not await self._publish(
            canary,
            canary.published(WORDS, token, moment, self._version),
        ):
            return
        began = time.monotonic()
        is_searchable = await asyncio.gather(*(self._appears(canary, store, token, began) for store in STORES))
        way = withdrawal(number)
        if way is None or not all(is_searchable):
            return
        if await self._publish(canary, canary.withdrawn(way, self.now())):
            await self._vanishes(canary, way, token, time.monotonic())

    def forget(self, canary: Canary) -> None:
        """Stop exporting a canary whose source was removed."""
        for store in STORES:
            self._seen.pop((canary, store), None)
            if self._of_one_name(canary, store):
                self._show(canary, store)
            else:
                self._metrics.success.remove(canary.stands_for, store)

    async def remove(self, canaries: Iterable[Canary]) -> None:
        """Delete the documents, and wait until Kafka has acknowledged it. Raises Retryable."""
        now = self.now()
        deletions = (self._producer.send(DOCUMENTS_LIVE, canary.deleted(now)) for canary in canaries)
        await deliver(deletions, within_seconds=REMOVAL_SECONDS)

    async def _publish(self, canary: Canary, message: DocumentUpserted | AccessChanged | DocumentDeleted) -> bool:
        try:
            await deliver([self._producer.send(DOCUMENTS_LIVE, message)])
        except PenstockError as error:
            self._failed(canary, "publish", "unpublished", str(error))
            return False
        return True

    async def _appears(self, canary: Canary, store: Store, token: str, began: float) -> bool:
        async def is_returned() -> bool:
            return await self._returns(canary, store, token)

        if not await self._until(is_returned, canary, store, began, self._settings.patience_seconds):
            return False
        self._metrics.seconds.labels(source=canary.stands_for, store=store).observe(time.monotonic() - began)
        self._note(canary, store)
        return True

    async def _vanishes(self, canary: Canary, way: Withdrawal, token: str, began: float) -> None:
        async def is_gone() -> bool:
            searches = (self._returns(canary, store, token) for store in STORES)
            results = await asyncio.gather(*searches, return_exceptions=True)
            if True not in results:  # one store that returns it decides, whatever the other did
                for error in results:
                    if isinstance(error, BaseException):
                        raise error
            return True not in results

        if await self._until(is_gone, canary, way, began, self._settings.withdrawal_seconds):
            self._metrics.withdrawn.labels(source=canary.stands_for, way=way).observe(time.monotonic() - began)

    async def _until(
        self, condition: Callable[[], Awaitable[bool]], canary: Canary, of: str, began: float, patience: float
    ) -> bool:
        """Poll until the condition holds; False when patience ends first."""
        failure = await poll(condition, began, patience)
        if failure is not None:
            self._failed(canary, of, *failure)
        return failure is None

    async def _returns(self, canary: Canary, store: Store, token: str) -> bool:
        """Search this store as the canary's reader; True: the last published text is returned. Raises PenstockError."""
        query = WORDS if store == "vectors" else token
        only = Filters(sources=(canary.source,))
        # Named here: to list the sources of a tenant, a login that sees canaries alone would read all documents.
        caller = Caller(canary.tenant, frozenset(qualify(canary.source, [f"user:{PRINCIPAL}"])))
        async with self._searches[store]:
            response = await self._search.search(query, caller, top=1, mode=STORES[store], filters=only, rerank=False)
        return any(token in result.text for result in response.results)

    def _note(self, canary: Canary, store: Store) -> None:
        self._seen[canary, store] = self.now().timestamp()
        self._show(canary, store)

    def _show(self, canary: Canary, store: Store) -> None:
        """Export the worse value where two tenants have a source of one name."""
        self._metrics.success.labels(source=canary.stands_for, store=store).set(min(self._of_one_name(canary, store)))

    def _of_one_name(self, canary: Canary, store: Store) -> list[float]:
        return [
            at for (other, where), at in self._seen.items() if (other.stands_for, where) == (canary.stands_for, store)
        ]

    def _failed(self, canary: Canary, of: str, reason: Reason, why: str) -> None:
        self._metrics.failures.labels(source=canary.stands_for, of=of, reason=reason).inc()
        log.warning(
            "canary_failed", tenant=canary.tenant, source=canary.stands_for, of=of, reason=reason, why=why[:200]
        )


async def poll(condition: Callable[[], Awaitable[bool]], began: float, patience: float) -> tuple[Reason, str] | None:
    """Poll ever less often until the condition holds: None then, and the reason when patience ends first.

    began: of time.monotonic; patience: in seconds. A search that fails decides nothing: after the deadline a search
    that answers decides, if there is one within LAST_SEARCH_SECONDS.
    """
    while True:
        failed = None
        try:
            if await condition():
                return None
        except PenstockError as error:
            failed = str(error)
        elapsed = time.monotonic() - began
        if failed is None and elapsed > patience:
            return "late", f"not so after {patience:g} s"
        if failed is not None and elapsed > patience + LAST_SEARCH_SECONDS:
            return "unavailable", failed
        await asyncio.sleep(pause(elapsed))


def pause(elapsed: float) -> float:
    """Seconds until the next search: from ten seconds on a twentieth of the elapsed time."""
    return min(MAX_POLL_SECONDS, max(MIN_POLL_SECONDS, elapsed / 20))
