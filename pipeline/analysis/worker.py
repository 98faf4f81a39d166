"""The process ``penstock worker analysis``: runs its tasks, each with its own consumer."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord

from pipeline.analysis.task import Services, Task
from pipeline.core.errors import PenstockError
from pipeline.kafka.batches import POLL_BYTES, begin_poll
from pipeline.kafka.client import producer, security
from pipeline.kafka.groups import group
from pipeline.kafka.stopping import stop_consumer
from pipeline.observability import lineage, tracing
from pipeline.observability.metrics import Metrics
from pipeline.runtime.health import health
from pipeline.runtime.settings import KafkaSettings, Settings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.postgres import open_pool
from topics.codec import BadMessage, decode
from topics.messages import Message

log = structlog.get_logger()

AGAIN_SECONDS = 5.0
"""After a failure, until the same messages are tried again."""
POLL_MS = 1_000
MAX_RECORDS = 200
"""The messages that a task gets at once. A batch is repeated as a whole after a crash."""
LATE_SECONDS = 300.0
"""A task's poll interval: a batch that takes longer costs the consumer its place in its group."""
OF_ONE_MESSAGE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Errors of Python that come of what a message says, and of nothing that is away for a while."""


async def run(settings: Settings, tasks: Sequence[Callable[[Services], Task]]) -> None:
    """Run these tasks until SIGTERM or SIGINT. Raises Misconfigured when the settings make the work impossible."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = Metrics()
    loops: list[Loop] = []
    ready = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.running("analysis"))
        stack.enter_context(lineage.running(metrics.lineage))
        await stack.enter_async_context(
            health(settings, metrics, ready.is_set, lambda: {"stages": [loop.report() for loop in loops]})
        )
        pool = await stack.enter_async_context(open_pool(settings.postgres, on_fence=metrics.ledger_fenced.set))
        kafka = await stack.enter_async_context(producer(settings.kafka))
        services = Services(settings, pool, kafka, metrics)
        loops += [Loop(make(services), settings.kafka, metrics) for make in tasks]
        running = [asyncio.create_task(loop.run(), name=loop.task.name) for loop in loops]
        gc.freeze()  # the modules are not garbage
        ready.set()
        log.info("worker_started", worker="analysis", tasks=[loop.task.name for loop in loops])
        try:
            await _until_stopped(stop, running)
        finally:
            await cancel_and_wait(running)
    log.info("worker_stopped", worker="analysis")


class Loop:
    """Gives a task its messages, and commits what it has handled."""

    def __init__(self, task: Task, kafka: KafkaSettings, metrics: Metrics) -> None:
        self.task = task
        self._kafka = kafka
        self._metrics = metrics
        self._waiting: tuple[str, str, datetime] | None = None
        """The service or task that delays it, the reason, and since when."""
        self._is_following = False
        self._in_flight = 0

    def report(self) -> dict[str, Any]:
        """In the form of a stage's report (`Consumption.report`)."""
        service, reason, since = self._waiting or (None, None, None)
        seconds = round((datetime.now(UTC) - since).total_seconds(), 1) if since else None
        return {
            "stage": self.task.name,
            "ready": self._is_following,
            "in_flight": self._in_flight,
            "waiting_for": service,
            "reason": reason,
            "waiting_seconds": seconds,
        }

    async def run(self) -> None:
        """Run until cancelled. What is away is waited for; an error delays this task and ends nothing."""
        while True:
            try:
                await self._follow()
            except Exception as error:  # noqa: BLE001 # a fault of one task must not end the others
                reason = str(error)[:200] if isinstance(error, PenstockError) else type(error).__name__
                service = getattr(error, "service", None) or self.task.name
                since = self._waiting[2] if self._waiting else datetime.now(UTC)
                self._waiting = (service, reason, since)
                self._metrics.analysis_failures.labels(self.task.name).inc()
                log.warning("analysis_delayed", task=self.task.name, reason=reason)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _follow(self) -> None:
        """Raises whatever ended the work; what was not committed is read again."""
        prefix = self._kafka.topic_prefix
        consumer = AIOKafkaConsumer(
            *(f"{prefix}{topic.name}" for topic in self.task.topics),
            bootstrap_servers=self._kafka.bootstrap,
            group_id=f"{prefix}{group(self.task.name)}",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_poll_interval_ms=int(LATE_SECONDS * 1_000),
            **security(self._kafka),
        )
        try:
            await consumer.start()
            self._is_following = True
            while True:
                begin_poll(POLL_BYTES)
                batches = await consumer.getmany(timeout_ms=POLL_MS, max_records=MAX_RECORDS)
                for partition, records in batches.items():
                    await self._handle(records)
                    await consumer.commit({partition: records[-1].offset + 1})
                self._waiting = None
                await self._measure(consumer)
        finally:
            self._is_following = False
            await stop_consumer(consumer)

    async def _handle(self, records: list[ConsumerRecord]) -> None:
        readable: list[tuple[ConsumerRecord, Message]] = []
        for record in records:
            try:
                readable.append((record, decode(record.value, record.headers)))
            except BadMessage as error:
                self._passed_over(record, error.code)
        if readable:
            self._in_flight = len(readable)
            try:
                with self._metrics.analysis_seconds.labels(self.task.name).time():
                    await self._analyse(readable)
            finally:
                self._in_flight = 0
        self._metrics.analysis_messages.labels(self.task.name).inc(len(readable))

    async def _analyse(self, readable: Sequence[tuple[ConsumerRecord, Message]]) -> None:
        """Give the task these messages. One that it cannot compute with, now or ever, is found and passed over: a
        field of its record, or a text, was made for that, and the messages of all tenants are behind it."""
        try:
            await self.task.handle([message for _, message in readable])
        except OF_ONE_MESSAGE as error:
            if len(readable) == 1:
                self._metrics.analysis_failures.labels(self.task.name).inc()
                self._passed_over(readable[0][0], type(error).__name__)
                return
            for single in readable:
                await self._analyse([single])

    def _passed_over(self, record: ConsumerRecord, code: str) -> None:
        log.error("analysis_record_unreadable", code=code, partition=record.partition, offset=record.offset)

    async def _measure(self, consumer: AIOKafkaConsumer) -> None:
        """Count the records of this process's partitions that it has not handled: as of its last fetch, for free."""
        behind = 0
        for partition in consumer.assignment():
            end = consumer.highwater(partition)
            if end is not None:
                behind += max(0, end - await consumer.position(partition))
        self._metrics.analysis_backlog.labels(self.task.name).set(behind)


async def _until_stopped(stop: asyncio.Event, running: list[asyncio.Task[None]]) -> None:
    """Wait for the signal. Raises when a task ends before it, which never should happen."""
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for task in done - {stopping}:
        raise RuntimeError(f"the task {task.get_name()} of the analysis worker has ended") from task.exception()
