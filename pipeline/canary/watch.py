"""One canary's rounds: publish it, search until both stores return it, and now and then take it away again."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Literal

import structlog

from pipeline.canary.question import WORDS
from pipeline.canary.telemetry import CanaryMetrics
from pipeline.core.canary import PRINCIPAL, Canary, Withdrawal, withdrawal
from pipeline.core.errors import PenstockError
from pipeline.kafka import deliver
from pipeline.settings import CanarySettings
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
"""What is measured is too long by half of it, on average."""
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
        self._seen: dict[tuple[Canary, Store], float] = {}

    async def follow(self, canary: Canary) -> None:
        """Rounds without end, one every settings.every_seconds or, when one takes longer, as soon as it is over."""
        for store in STORES:
            self._note(canary, store)  # it is late from now on, not since 1970
        for of, reason in FAILURES:  # at 0 from the beginning: the first one is an increase, too
            self._metrics.failures.labels(canary.stands_for, of, reason)
        number = 0
        while True:
            began = time.monotonic()
            await self.round(canary, number)
            number += 1
            await asyncio.sleep(max(0.0, self._settings.every_seconds - (time.monotonic() - began)))

    async def round(self, canary: Canary, number: int) -> None:
        """What does not succeed is counted, said in one line, and tried anew by the next round."""
        token = secrets.token_hex(8)
        self._version = max(self._version + 1, time.time_ns())
        moment = datetime.now(UTC)
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
        if await self._publish(canary, canary.withdrawn(way, datetime.now(UTC))):
            await self._vanishes(canary, way, token, time.monotonic())

    def forget(self, canary: Canary) -> None:
        """It is followed no more: its source is gone from the list."""
        for store in STORES:
            self._seen.pop((canary, store), None)
            if self._of_one_name(canary, store):
                self._show(canary, store)
            else:
                self._metrics.success.remove(canary.stands_for, store)

    async def remove(self, canaries: Iterable[Canary]) -> None:
        """Take the documents away, and wait until Kafka has that. Raises Retryable."""
        now = datetime.now(UTC)
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
            return not any([await self._holds(canary, store, token) for store in STORES])

        if await self._until(gone, canary, way, began, self._settings.withdrawal_seconds):
            self._metrics.withdrawn.labels(canary.stands_for, way).observe(time.monotonic() - began)

    async def _until(
        self, is_so: Callable[[], Awaitable[bool]], canary: Canary, of: str, began: float, patience: float
    ) -> bool:
        """Look until it is so; False when patience ends first. A search that fails says nothing either way."""
        reason: Reason = "late"
        why = ""
        while True:
            try:
                if await is_so():
                    return True
                reason, why = "late", f"not so after {patience:g} s"
            except PenstockError as error:
                reason, why = "unavailable", str(error)
            if time.monotonic() - began > patience:
                self._failed(canary, of, reason, why)
                return False
            await asyncio.sleep(LOOK_EVERY_SECONDS)

    async def _holds(self, canary: Canary, store: Store, token: str) -> bool:
        """Whether the canary's reader is shown it, from this store, as it was last published. Raises PenstockError."""
        caller = await self._search.identify(canary.tenant, principals=[PRINCIPAL])
        asked = WORDS if store == "vectors" else token
        found = await self._search.search(
            asked, caller, top=1, mode=STORES[store], filters=Filters(sources=(canary.source,)), rerank=False
        )
        return any(token in result.text for result in found.results)

    def _note(self, canary: Canary, store: Store) -> None:
        self._seen[canary, store] = time.time()
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
