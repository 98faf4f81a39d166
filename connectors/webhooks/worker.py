"""The task of the connectors worker that copies events from Kafka to each endpoint's list, and sends them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import perf_counter
from uuid import UUID

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord

from connectors.webhooks.send import GONE, PARALLEL, Answer, Receiver
from pipeline.core import webhooks as core
from pipeline.core.errors import PenstockError
from pipeline.kafka.batches import POLL_BYTES, begin_poll
from pipeline.kafka.client import security
from pipeline.kafka.groups import group
from pipeline.kafka.stopping import stop_consumer
from pipeline.ledger import webhooks as ledger
from pipeline.ledger.webhooks import Delivery, Endpoint, Event, Failure
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings, WebhookSettings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.leader import leading
from pipeline.stores.postgres import WEBHOOKS_LOCK, Connection, Pool, translated
from topics.codec import CE_TYPE_PREFIX, BadMessage, ce_source, decode, header_map
from topics.messages import AnswerInvalidated, ConflictChanged, DocumentIndexed
from topics.registry import ANSWERS_INVALIDATED, CONFLICTS, DOCUMENTS_INDEXED

log = structlog.get_logger()

STAGE = "webhooks"
LOOK_SECONDS = 1.0
"""Between two looks for what is due, and whether this process is still the leader."""
COUNT_SECONDS = 15.0
"""Between two counts of what waits."""
EXPIRED_AT_ONCE = 5_000
"""Events that are deleted at once because nobody has taken them for too long."""
AGAIN_SECONDS = 5.0
"""After a failure of ours, or where another process is the leader."""
MAX_RECORDS = 500
"""Records that are copied at once."""
WRONG_KEY = "PENSTOCK_WEBHOOKS_KEY is not set, or is not the key that the secret of this webhook was made with"


class Webhooks:
    """Delivers at least once, a document's events in order. One process at a time sends, so that their order holds; the
    others stand by.

    Law: an offset is committed after the record's events are stored; an event is deleted after its receiver has
    answered with success. A receiver that is slow or away delays no other one, and loses nothing until it is removed or
    ``keep_seconds`` are over.
    """

    def __init__(self, pool: Pool, kafka: KafkaSettings, settings: WebhookSettings, metrics: Metrics) -> None:
        self._pool = pool
        self._kafka = kafka
        self._settings = settings
        self._metrics = metrics
        self._receivers: dict[tuple[str, bool], Receiver] = {}
        self._wake = asyncio.Event()
        """Set when events were stored."""

    async def run(self) -> None:
        """Run until cancelled. What is away is waited for."""
        while True:
            try:
                with translated("webhooks"):
                    async with self._pool.connection() as connection:
                        await self._lead(connection)
            except Exception as error:  # noqa: BLE001 # a fault here must not end the connectors
                reason = str(error)[:200] if isinstance(error, PenstockError) else type(error).__name__
                log.warning("webhooks_delayed", reason=reason)
            finally:
                self._forget()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _lead(self, connection: Connection) -> None:
        """Copy and send while this process is the leader. Raises whatever ends one of the two, and Retryable when the
        connection that holds the lock is lost."""
        async with leading(connection, WEBHOOKS_LOCK) as is_leader:
            if not is_leader:
                return
            tasks: list[asyncio.Task[None]] = [asyncio.create_task(self._send_all(), name="send webhooks")]
            try:
                while True:
                    async with connection.transaction():
                        has_endpoints = bool(await ledger.endpoints(connection))
                    if has_endpoints and len(tasks) == 1:
                        tasks.append(asyncio.create_task(self._copy_all(), name="copy webhooks"))
                    done, _ = await asyncio.wait(tasks, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
            finally:
                await cancel_and_wait(tasks)
                receivers, self._receivers = self._receivers, {}
                await asyncio.gather(*(receiver.close() for receiver in receivers.values()))

    # From Kafka to the lists

    async def _copy_all(self) -> None:
        """Raises KafkaError, Retryable."""
        consumer = AIOKafkaConsumer(
            *(
                f"{self._kafka.topic_prefix}{topic.name}"
                for topic in (DOCUMENTS_INDEXED, CONFLICTS, ANSWERS_INVALIDATED)
            ),
            bootstrap_servers=self._kafka.bootstrap,
            group_id=f"{self._kafka.topic_prefix}{group(STAGE)}",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            **security(self._kafka),
        )
        try:
            await consumer.start()
            while True:
                begin_poll(POLL_BYTES)
                batches = await consumer.getmany(timeout_ms=1_000, max_records=MAX_RECORDS)
                records = [record for batch in batches.values() for record in batch]
                if not records:
                    continue
                with translated("webhooks"):
                    async with self._pool.connection() as connection, connection.transaction():
                        endpoints = await ledger.endpoints(connection)
                        await ledger.enqueue(connection, _events(records, endpoints))
                await consumer.commit()
                self._wake.set()
        finally:
            await stop_consumer(consumer)

    # From the lists to the receivers

    async def _send_all(self) -> None:
        """Raises whatever ended the work for an endpoint."""
        serving: dict[str, asyncio.Task[None]] = {}
        counted = float("-inf")
        try:
            while True:
                self._wake.clear()
                with translated("webhooks"):
                    async with self._pool.connection() as connection:
                        endpoints = await ledger.endpoints(connection)
                        if perf_counter() - counted >= COUNT_SECONDS:
                            await ledger.expire(connection, self._settings.keep_seconds, EXPIRED_AT_ONCE)
                            self._count(endpoints, await ledger.waiting(connection))
                            counted = perf_counter()
                for name, task in list(serving.items()):
                    if task.done():
                        task.result()
                        del serving[name]
                for endpoint in endpoints:
                    if endpoint.paused_at is None and endpoint.wait_seconds == 0 and endpoint.name not in serving:
                        serving[endpoint.name] = asyncio.create_task(self._serve(endpoint.name), name=endpoint.name)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._wake.wait()
        finally:
            await cancel_and_wait(serving.values())

    async def _serve(self, name: str) -> None:
        """Send to an endpoint until nothing is due, or the endpoint has to wait."""
        while True:
            with translated("webhooks"):
                async with self._pool.connection() as connection:
                    endpoint = next((e for e in await ledger.endpoints(connection) if e.name == name), None)
                    if endpoint is None or endpoint.paused_at is not None or endpoint.wait_seconds > 0:
                        return
                    limit = PARALLEL if endpoint.failures == 0 else 1  # one that fails is tried with one request
                    deliveries = await ledger.due(connection, name, limit)
            if not deliveries:
                return
            await self._round(endpoint, deliveries)

    async def _round(self, endpoint: Endpoint, deliveries: Sequence[Delivery]) -> None:
        """Send these deliveries at once, and record what became of them."""
        answers = await asyncio.gather(*(self._sent(endpoint, delivery) for delivery in deliveries))
        delivered, failures = list[int](), list[Failure]()
        longest = self._settings.give_up_seconds
        for delivery, answer in zip(deliveries, answers, strict=True):
            if answer.reason is None:
                delivered.append(delivery.id)
                continue
            wait = core.wait_seconds(
                delivery.attempts + 1,
                retry_after=answer.retry_after,
                random=random.random(),  # noqa: S311 — jitter
            )
            failures.append(Failure(delivery.id, answer.reason, wait, parks=delivery.failing_seconds >= longest))
        pause = next((answer.reason for answer in answers if answer.status == GONE), None)
        wait = 0.0
        if not delivered:
            wait = core.wait_seconds(
                endpoint.failures + 1,
                retry_after=max((answer.retry_after or 0.0 for answer in answers), default=0.0),
                random=random.random(),  # noqa: S311
            )
            since = endpoint.failing_since
            if since is not None and (datetime.now(UTC) - since).total_seconds() >= longest:
                pause = pause or f"it has failed for {longest / 3600:g} h: {failures[0].reason}"
            if pause is not None:  # its events wait until it is resumed
                failures = [Failure(f.delivery, f.reason, f.wait_seconds, parks=False) for f in failures]
        with translated("webhooks"):
            async with self._pool.connection() as connection:
                await ledger.record(connection, endpoint.name, delivered, failures, wait_seconds=wait, pause=pause)
        outcomes = self._metrics.webhook_deliveries
        outcomes.labels(endpoint.name, "delivered").inc(len(delivered))
        outcomes.labels(endpoint.name, "parked").inc(sum(failure.parks for failure in failures))
        outcomes.labels(endpoint.name, "failed").inc(sum(not failure.parks for failure in failures))
        if failures and endpoint.failures == 0:
            log.warning("webhook_failed", webhook=endpoint.name, reason=failures[0].reason)
        if pause is not None:
            log.error("webhook_paused", webhook=endpoint.name, reason=pause)

    async def _sent(self, endpoint: Endpoint, delivery: Delivery) -> Answer:
        secrets = signing_secrets(endpoint, self._settings)
        if not secrets:
            return Answer(None, WRONG_KEY)
        address = (endpoint.url, endpoint.private)
        if address not in self._receivers:
            self._receivers[address] = Receiver(endpoint.url, private=endpoint.private)
        body = cloud_event(delivery)
        headers = core.headers(secrets, delivery.event_id, datetime.now(UTC), body)
        began = perf_counter()
        answer = await self._receivers[address].send(headers, body)
        self._metrics.webhook_seconds.labels(endpoint.name).observe(perf_counter() - began)
        return answer

    # Metrics

    def _count(self, endpoints: Sequence[Endpoint], waiting: dict[str, tuple[int, int, float]]) -> None:
        self._forget()
        m = self._metrics
        for endpoint in endpoints:
            waits, parked, oldest = waiting.get(endpoint.name, (0, 0, 0.0))
            m.webhook_waiting.labels(endpoint.name).set(waits)
            m.webhook_parked.labels(endpoint.name).set(parked)
            m.webhook_oldest.labels(endpoint.name).set(oldest)
            m.webhook_paused.labels(endpoint.name).set(endpoint.paused_at is not None)

    def _forget(self) -> None:
        """A process that is not the leader does not know the figures, and has none rather than old ones."""
        m = self._metrics
        for gauge in (m.webhook_waiting, m.webhook_parked, m.webhook_oldest, m.webhook_paused):
            gauge.clear()


def signing_secrets(endpoint: Endpoint, settings: WebhookSettings) -> list[bytes]:
    """The secrets that a request to the endpoint is signed with, the newest first; none where the key is not the one
    that they were made with."""
    if settings.key is None:
        return []
    key = settings.key.get_secret_value()
    newest = endpoint.secret.bytes_of(key)
    old = endpoint.old_secret.bytes_of(key) if endpoint.old_secret else None
    return [secret for secret in (newest, old) if secret is not None] if newest is not None else []


Announced = AnswerInvalidated | ConflictChanged | DocumentIndexed

INVALIDATED = "invalidated"
"""The state of an event about a standing question; its document is the question."""
CONFLICT_STATES = ("open", "ended")
"""The states of an event about a contradiction; its document is the contradiction."""


def cloud_event(delivery: Delivery) -> bytes:
    message: Announced
    if delivery.state == INVALIDATED:
        message = AnswerInvalidated.model_validate_json(delivery.event)
    elif delivery.state in CONFLICT_STATES:
        message = ConflictChanged.model_validate_json(delivery.event)
    else:
        message = DocumentIndexed.model_validate_json(delivery.event)
    return core.cloud_event(
        id_=delivery.event_id,
        type_=f"{CE_TYPE_PREFIX}{message.kind}",
        source=ce_source(message.tenant, message.source),
        time=message.observed_at.isoformat(),
        data=message.model_dump(mode="json"),
    )


def _events(records: Sequence[ConsumerRecord], endpoints: Sequence[Endpoint]) -> list[Event]:
    """The events of these records for these endpoints, in the order of each partition."""
    events = []
    for record in records:
        try:
            message = decode(record.value, record.headers)
            if not isinstance(message, Announced):
                continue
            subject, id_ = _ids(message, record)
        except BadMessage as error:
            log.error("webhook_record_unreadable", code=error.code, partition=record.partition, offset=record.offset)
            continue
        state = INVALIDATED if isinstance(message, AnswerInvalidated) else message.state
        events += [
            Event(endpoint.name, message.tenant, subject, state, id_, message.model_dump_json())
            for endpoint in endpoints
            if _includes(endpoint, message)
        ]
    return events


def _includes(endpoint: Endpoint, message: Announced) -> bool:
    match message:
        case AnswerInvalidated():
            return endpoint.subscription.includes_answers(message.tenant, message.observed_at)
        case ConflictChanged():
            return endpoint.subscription.includes_conflicts(message.tenant, message.observed_at)
        case DocumentIndexed():
            return endpoint.subscription.includes(message.tenant, message.source, message.observed_at)


def _ids(message: Announced, record: ConsumerRecord) -> tuple[UUID, str]:
    """The ids of the document, standing question or contradiction, and of the event. Raises BadMessage if Postgres or a
    header cannot hold one of them."""
    id_ = (header_map(record.headers).get("ce_id") or b"").decode("latin-1")
    try:
        subject = _subject(message)
    except ValueError as error:
        raise BadMessage("invalid", "document_id is no UUID") from error
    if not core.EVENT_ID.fullmatch(id_):
        raise BadMessage("invalid", "header ce_id is empty, too long, or has other than visible ASCII characters")
    return subject, id_


def _subject(message: Announced) -> UUID:
    """Raises ValueError where a document's id is no UUID."""
    match message:
        case AnswerInvalidated():
            return message.question_id
        case ConflictChanged():
            return message.conflict_id
        case DocumentIndexed():
            return UUID(message.document_id)
