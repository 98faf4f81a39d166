"""One canary's rounds: publish it, search until both stores return it, and now and then take it away again."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Literal

import structlog

from pipeline.canary.question import WORDS
from pipeline.canary.telemetry import CanaryMetrics
from pipeline.core.canary import PRINCIPAL, Canary, Withdrawal, withdrawal
from pipeline.core.errors import PenstockError
from pipeline.core.identity import qualify
from pipeline.kafka import deliver
from pipeline.settings import CanarySettings
from query.access import Caller
from query.filters import Filters
from query.model import Mode
from query.retrieval import Search
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted
from topics.producer import Producer
from topics.registry import DOCUMENTS_LIVE

log = structlog.get_logger()

Store = Literal["vectors", "keywords"]
STORES: dict[Store, Mode] = {"vectors": "vector", "keywords": "keyword"}
"""Each store, and the mode of search that asks it alone."""
Reason = Literal["late", "unavailable", "unpublished"]
FAILURES: list[tuple[str, Reason]] = [
    ("publish", "unpublished"),
    *((of, "late") for of in (*STORES, "access", "delete")),
    *((of, "unavailable") for of in (*STORES, "access", "delete")),
]
LOOK_EVERY_SECONDS = 0.5
"""At first: what is measured is too long by half of it, on average."""
LOOK_SELDOM_SECONDS = 5.0
"""In the end: whoever waits for minutes is waiting for something that is down, or has much to do."""
LOOKS_AT_ONCE = 4
"""In each store, over all canaries: what hangs is not asked by hundreds, and the other store still answers."""
LAST_LOOKS_SECONDS = 10.0
"""For a look that answers, when patience has ended and the one just then failed."""
SPREAD_SECONDS = 30.0
"""In which the first rounds of all canaries begin, so that they are not all in step for ever after."""
CLOCKS_DIFFER_SECONDS = 60.0
"""Of five minutes, from which on events are refused as of the future."""
REMOVAL_SECONDS = 10.0
"""For Kafka to confirm the last words of a process that has 30 seconds to end."""


class Watch:
    """Safe to share between the tasks of all canaries; owns nothing that it is given."""

    def __init__(self, search: Search, producer: Producer, metrics: CanaryMetrics, settings: CanarySettings) -> None:
        self._search = search
        self._producer = producer
        self._metrics = metrics
        self._settings = settings
        self._version = 0
        self._ahead = timedelta()
        self._told_of_clock = False
        self._looks: dict[Store, asyncio.Semaphore] = {store: asyncio.Semaphore(LOOKS_AT_ONCE) for store in STORES}
        self._callers: dict[Canary, Caller] = {}
        self._seen: dict[tuple[Canary, Store], float] = {}

    def keep_time(self, now: datetime) -> None:
        """The database's clock is the canaries': one host that is fast would fill the dead letters and stop intake."""
        self._ahead = now - datetime.now(UTC)
        seconds = self._ahead.total_seconds()
        if abs(seconds) > CLOCKS_DIFFER_SECONDS and not self._told_of_clock:
            self._told_of_clock = True
            log.warning("clock_differs", service="postgres", ahead_seconds=round(-seconds))

    def now(self) -> datetime:
        """By the database's clock, as it was last told."""
        return datetime.now(UTC) + self._ahead

    async def follow(self, canary: Canary) -> None:
        """Rounds without end, one every settings.every_seconds or, when one takes longer, as soon as it is over."""
        for store in STORES:
            self._note(canary, store)  # it is late from now on, not since 1970
        for of, reason in FAILURES:  # at 0 from the beginning: the first one is an increase, too
            self._metrics.failures.labels(canary.stands_for, of, reason)
        await asyncio.sleep(random.uniform(0, min(self._settings.every_seconds, SPREAD_SECONDS)))  # noqa: S311
        number = 0
        while True:
            began = time.monotonic()
            await self.round(canary, number)
            number += 1
            await asyncio.sleep(max(0.0, self._settings.every_seconds - (time.monotonic() - began)))

    async def round(self, canary: Canary, number: int) -> None:
        """What does not succeed is counted, said in one line, and tried anew by the next round."""
        token = secrets.token_hex(8)
        moment = self.now()
        self._version = max(self._version + 1, int(moment.timestamp() * 1e9))
        self._callers.pop(canary, None)
        if not await self._publish(
            canary,
            canary.published(WORDS, token, moment, self._version),
        ):
            return
        began = time.monotonic()
        found = await asyncio.gather(*(self._appears(canary, store, token, began) for store in STORES))
        way = withdrawal(number)
        if way is None or not all(found):
            return
        if await self._publish(canary, canary.withdrawn(way, self.now())):
            await self._vanishes(canary, way, token, time.monotonic())

    def forget(self, canary: Canary) -> None:
        """It is followed no more: its source is gone from the list."""
        self._callers.pop(canary, None)
        for store in STORES:
            self._seen.pop((canary, store), None)
            if self._of_one_name(canary, store):
                self._show(canary, store)
            else:
                self._metrics.success.remove(canary.stands_for, store)

    async def remove(self, canaries: Iterable[Canary]) -> None:
        """Take the documents away, and wait until Kafka has that. Raises Retryable."""
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
        async def there() -> bool:
            return await self._holds(canary, store, token)

        if not await self._until(there, canary, store, began, self._settings.patience_seconds):
            return False
        self._metrics.seconds.labels(canary.stands_for, store).observe(time.monotonic() - began)
        self._note(canary, store)
        return True

    async def _vanishes(self, canary: Canary, way: Withdrawal, token: str, began: float) -> None:
        async def gone() -> bool:
            looks = (self._holds(canary, store, token) for store in STORES)
            told = await asyncio.gather(*looks, return_exceptions=True)
            if True not in told:  # one store that shows it is enough, whatever became of the other
                for error in told:
                    if isinstance(error, BaseException):
                        raise error
            return True not in told

        if await self._until(gone, canary, way, began, self._settings.withdrawal_seconds):
            self._metrics.withdrawn.labels(canary.stands_for, way).observe(time.monotonic() - began)

    async def _until(
        self, is_so: Callable[[], Awaitable[bool]], canary: Canary, of: str, began: float, patience: float
    ) -> bool:
        """Look until it is so; False when patience ends first."""
        failure = await look(is_so, began, patience)
        if failure is not None:
            self._failed(canary, of, *failure)
        return failure is None

    async def _holds(self, canary: Canary, store: Store, token: str) -> bool:
        """Whether the canary's reader is shown it, from this store, as it was last published. Raises PenstockError."""
        asked = WORDS if store == "vectors" else token
        only = Filters(sources=(canary.source,))
        async with self._looks[store]:
            caller = await self._caller(canary)
            found = await self._search.search(asked, caller, top=1, mode=STORES[store], filters=only, rerank=False)
        return any(token in result.text for result in found.results)

    async def _caller(self, canary: Canary) -> Caller:
        """The canary's reader: asked for once a round, from when the ledger knows its source on."""
        if (known := self._callers.get(canary)) is not None:
            return known
        caller = await self._search.identify(canary.tenant, principals=[PRINCIPAL])
        if caller.tags.issuperset(qualify(canary.source, [f"user:{PRINCIPAL}"])):
            self._callers[canary] = caller
        return caller

    def _note(self, canary: Canary, store: Store) -> None:
        self._seen[canary, store] = self.now().timestamp()
        self._show(canary, store)

    def _show(self, canary: Canary, store: Store) -> None:
        """Of two tenants' sources with one name the worse one."""
        self._metrics.success.labels(canary.stands_for, store).set(min(self._of_one_name(canary, store)))

    def _of_one_name(self, canary: Canary, store: Store) -> list[float]:
        return [at for (one, where), at in self._seen.items() if (one.stands_for, where) == (canary.stands_for, store)]

    def _failed(self, canary: Canary, of: str, reason: Reason, why: str) -> None:
        self._metrics.failures.labels(canary.stands_for, of, reason).inc()
        log.warning(
            "canary_failed", tenant=canary.tenant, source=canary.stands_for, of=of, reason=reason, why=why[:200]
        )


async def look(is_so: Callable[[], Awaitable[bool]], began: float, patience: float) -> tuple[Reason, str] | None:
    """Look until it is so, less and less often: None then, and why not when patience ends first.

    began: of time.monotonic; patience: seconds. A look that fails says nothing either way, so one that answers has the
    last word, if there is one within LAST_LOOKS_SECONDS.
    """
    while True:
        failed = None
        try:
            if await is_so():
                return None
        except PenstockError as error:
            failed = str(error)
        elapsed = time.monotonic() - began
        if failed is None and elapsed > patience:
            return "late", f"not so after {patience:g} s"
        if failed is not None and elapsed > patience + LAST_LOOKS_SECONDS:
            return "unavailable", failed
        await asyncio.sleep(pause(elapsed))


def pause(elapsed: float) -> float:
    """Seconds until the next look, elapsed seconds after the first: from ten seconds on a twentieth of the time."""
    return min(LOOK_SELDOM_SECONDS, max(LOOK_EVERY_SECONDS, elapsed / 20))
