"""Reads the messages of a task from Kafka, gives them to it, and commits what it has handled.

A message may cost a task minutes: a long document whose access has changed is compared anew, passage by passage. So a
tenant's messages wait for each other and for nobody else's, and Kafka is polled meanwhile: a consumer that is silent
loses its partitions to another process, which would do the same work again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

from pipeline.analysis.task import Task
from pipeline.core.errors import PenstockError
from pipeline.core.progress import Progress, Token
from pipeline.kafka.batches import POLL_BYTES, begin_poll, size_of
from pipeline.kafka.client import security
from pipeline.kafka.groups import group
from pipeline.kafka.stopping import stop_consumer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings
from pipeline.runtime.tasks import cancel_and_wait
from topics.codec import BadMessage, decode
from topics.messages import Message

log = structlog.get_logger()

AGAIN_SECONDS = 5.0
"""After a failure, until the same messages are tried again."""
POLL_MS = 500
"""How long a poll waits for records. What was handled meanwhile is committed after it."""
MAX_RECORDS = 200
"""The messages that a task gets at once."""
MAX_TENANTS = 4
"""The tenants whose messages a task handles at the same time: each takes a connection now and then, of ten of a
process."""
MAX_HELD_BYTES = 64 * 2**20
"""The size at which no more records are read until some are handled: about 50,000 messages, which are handled again
after a crash if the oldest of them was not done."""
LATE_SECONDS = 300.0
"""A consumer that has not polled for so long leaves its group. Polls never wait for a task."""
COMMIT_SECONDS = 5.0
"""How long the last commit of a partition may take, while the group or the process waits for it."""
OF_ONE_MESSAGE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Errors of Python that come of what a message says, and of nothing that is away for a while."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that is not handled yet."""

    message: Message
    place: TopicPartition
    token: Token
    size: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason for which the messages of a tenant, or all of them, wait."""

    service: str
    """The service that is away, or the task."""
    reason: str
    since: datetime


class Loop:
    """Law: no tenant waits for the messages of another one, unless those of MAX_TENANTS others are being handled or
    MAX_HELD_BYTES of records are before it; a tenant's messages are handled in their order; and an offset is committed
    only when everything before it is handled."""

    def __init__(self, task: Task, kafka: KafkaSettings, metrics: Metrics) -> None:
        self.task = task
        self._kafka = kafka
        self._metrics = metrics
        self._is_following = False
        self._lost: Failure | None = None
        """Why no messages are read."""
        self._failures: dict[str, Failure] = {}
        """By tenant."""
        self._queues: dict[str, deque[Waiting]] = {}
        """By tenant; what is being handled is still in it."""
        self._turns = asyncio.Queue[str]()
        """The tenants of the queues, except those whose messages are being handled or have just failed."""
        self._progress = Progress[TopicPartition]()
        self._committed: dict[TopicPartition, int] = {}
        self._held_bytes = 0

    def report(self) -> dict[str, Any]:
        """The task's state, in the form of a stage's report (`Consumption.report`)."""
        failures = [self._lost] if self._lost else sorted(self._failures.values(), key=lambda failure: failure.since)
        first = failures[0] if failures else None
        return {
            "stage": self.task.name,
            "ready": self._is_following,
            "in_flight": self._progress.in_flight(),
            "waiting_for": first and first.service,
            "reason": first and first.reason,
            "waiting_seconds": first and round((datetime.now(UTC) - first.since).total_seconds(), 1),
        }

    async def run(self) -> None:
        """Run until cancelled. What is away is waited for; an error delays this task and ends nothing."""
        while True:
            try:
                await self._follow()
            except Exception as error:  # noqa: BLE001 # a fault of one task must not end the others
                self._lost = self._failed(error, self._lost)
            await asyncio.sleep(AGAIN_SECONDS)

    def _failed(self, error: Exception, before: Failure | None) -> Failure:
        reason = str(error)[:200] if isinstance(error, PenstockError) else type(error).__name__
        service = getattr(error, "service", None) or self.task.name
        self._metrics.analysis_failures.labels(self.task.name).inc()
        log.warning("analysis_delayed", task=self.task.name, reason=reason)
        return Failure(service, reason, before.since if before else datetime.now(UTC))

    async def _follow(self) -> None:
        """Raises whatever ended the reading; what was not committed is read again."""
        prefix = self._kafka.topic_prefix
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._kafka.bootstrap,
            group_id=f"{prefix}{group(self.task.name)}",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_poll_interval_ms=int(LATE_SECONDS * 1_000),
            **security(self._kafka),
        )
        consumer.subscribe([f"{prefix}{topic.name}" for topic in self.task.topics], listener=_Listener(self, consumer))
        serving = [asyncio.create_task(self._serve(), name=self.task.name) for _ in range(MAX_TENANTS)]
        try:
            await consumer.start()
            self._is_following = True
            while not any(task.done() for task in serving):
                begin_poll(min(POLL_BYTES, MAX_HELD_BYTES - self._held_bytes))
                batches = await consumer.getmany(timeout_ms=POLL_MS, max_records=MAX_RECORDS)
                for place, records in batches.items():
                    for record in records:
                        self._read(place, record)
                self._lost = None
                await self.commit(consumer)
                await self._measure(consumer)
            await asyncio.gather(*serving)
        finally:
            self._is_following = False
            await cancel_and_wait(serving)
            await self.revoked(consumer, list(self._committed))
            self._queues, self._turns, self._held_bytes = {}, asyncio.Queue(), 0
            self._failures.clear()
            await stop_consumer(consumer)

    def assigned(self, places: Collection[TopicPartition]) -> None:
        """Begin to track these partitions."""
        self._progress.open(places)
        self._committed.update(dict.fromkeys(places, -1))

    async def revoked(self, consumer: AIOKafkaConsumer, places: Collection[TopicPartition]) -> None:
        """Commit what is handled, and drop what waits of these partitions: their next owner reads it."""
        with suppress(KafkaError, TimeoutError):
            async with asyncio.timeout(COMMIT_SECONDS):
                await self.commit(consumer)
        self._progress.close(places)
        for place in places:
            self._committed.pop(place, None)
        for tenant, queue in self._queues.items():
            self._held_bytes -= sum(waiting.size for waiting in queue if waiting.place in places)
            self._queues[tenant] = deque(waiting for waiting in queue if waiting.place not in places)

    def _read(self, place: TopicPartition, record: ConsumerRecord) -> None:
        """Let a record wait for its turn."""
        token = self._progress.arrived(place, record.offset)
        if token is None:
            return
        try:
            message = decode(record.value, record.headers)
        except BadMessage as error:
            self._passed_over(place, record.offset, error.code)
            self._progress.finished(place, token)
            return
        waiting = Waiting(message, place, token, size_of(record))
        self._held_bytes += waiting.size
        if message.tenant not in self._queues:
            self._queues[message.tenant] = deque()
            self._turns.put_nowait(message.tenant)
        self._queues[message.tenant].append(waiting)

    async def _serve(self) -> None:
        """Give the task some messages of one tenant after the other, for ever. A failure delays its tenant."""
        while True:
            turns = self._turns
            tenant = await turns.get()
            if batch := list(islice(self._queues[tenant], MAX_RECORDS)):
                try:
                    with self._metrics.analysis_seconds.labels(self.task.name).time():
                        await self._analyse(batch)
                except Exception as error:  # noqa: BLE001 # as in run
                    self._failures[tenant] = self._failed(error, self._failures.get(tenant))
                    asyncio.get_running_loop().call_later(AGAIN_SECONDS, turns.put_nowait, tenant)
                    continue
                self._handled(tenant, batch)
            self._failures.pop(tenant, None)
            if self._queues[tenant]:
                turns.put_nowait(tenant)
            else:
                del self._queues[tenant]

    def _handled(self, tenant: str, batch: Sequence[Waiting]) -> None:
        """Forget these messages, except for those whose partition was lost meanwhile, which were dropped."""
        queue = self._queues[tenant]
        for waiting in batch:
            if queue and queue[0] is waiting:
                self._held_bytes -= queue.popleft().size
            self._progress.finished(waiting.place, waiting.token)
        self._metrics.analysis_messages.labels(self.task.name).inc(len(batch))

    async def _analyse(self, batch: Sequence[Waiting]) -> None:
        """Give the task these messages. One for which the task raises OF_ONE_MESSAGE is passed over, because it would
        fail for ever and delay its tenant: somebody may have written a text or a field for that purpose."""
        try:
            await self.task.handle([waiting.message for waiting in batch])
        except OF_ONE_MESSAGE as error:
            if len(batch) == 1:
                self._metrics.analysis_failures.labels(self.task.name).inc()
                self._passed_over(batch[0].place, batch[0].token.offset, type(error).__name__)
                return
            for waiting in batch:
                await self._analyse([waiting])

    def _passed_over(self, place: TopicPartition, offset: int, code: str) -> None:
        log.error("analysis_record_unreadable", code=code, partition=place.partition, offset=offset)

    async def commit(self, consumer: AIOKafkaConsumer) -> None:
        """Commit what was handled since the last time, unless the group divides its partitions anew just now. Raises
        KafkaError."""
        offsets = {
            place: offset
            for place, committed in self._committed.items()
            if (offset := self._progress.committable(place)) is not None and offset > committed
        }
        if offsets:
            with suppress(CommitFailedError, IllegalStateError):
                await consumer.commit(offsets)
                self._committed.update({place: offset for place, offset in offsets.items() if place in self._committed})

    async def _measure(self, consumer: AIOKafkaConsumer) -> None:
        """Count the records of this process's partitions that it has not handled: as of its last fetch, for free."""
        behind = self._progress.in_flight()
        for place in consumer.assignment():
            end = consumer.highwater(place)
            if end is not None:
                behind += max(0, end - await consumer.position(place))
        self._metrics.analysis_backlog.labels(self.task.name).set(behind)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    def __init__(self, loop: Loop, consumer: AIOKafkaConsumer) -> None:
        self._loop = loop
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        await self._loop.revoked(self._consumer, revoked)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self._loop.assigned(assigned)
