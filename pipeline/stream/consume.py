"""Consuming Kafka with faust, which no other module knows.

By default faust may commit records that were not handled. Here it does not: the agents' code never raises, faust
acknowledges nothing by itself (``noack``), it commits only our done prefix (``Progress``), and a revoked partition is
dropped at once. The reasons are in docs/adr/0005-how-we-consume.md.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import faust
import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import NoError, RebalanceInProgressError
from aiokafka.protocol.group import HeartbeatRequest
from faust.tables import TableManager
from faust.tables.recovery import Recovery, ServiceStopped
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread
from faust.transport.drivers.aiokafka import Consumer as FaustConsumer

from pipeline.core.errors import Retryable
from pipeline.core.kafka_log import Witness, witness
from pipeline.core.model import Lane
from pipeline.core.progress import Progress
from pipeline.kafka.batches import POLL_BYTES, begin_poll, size_of
from pipeline.kafka.client import security
from pipeline.ledger.kafka_marks import Place
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings, StreamSettings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stages.stage import Incoming, Stage
from pipeline.stores.postgres import Pool
from pipeline.stream.lanes import Lanes
from pipeline.stream.logguard import LogGuard
from topics.registry import MAX_MESSAGE_BYTES

log = structlog.get_logger()

T = TypeVar("T")

POLL_RECORDS = 20
ASSIGNED_PARTITIONS = 32
"""The most partitions of a topic that a worker can be assigned without live records waiting for backfill (see
``stream_buffer_maxsize``). More than the registry creates, because partitions are added while workers run."""
MAX_IN_FLIGHT_RECORDS = 10_000
"""The most records of one partition from the oldest unfinished one to the newest that was read. Tracking them takes
about a megabyte."""
STOP_READING_RECORDS = MAX_IN_FLIGHT_RECORDS - 5 * POLL_RECORDS * ASSIGNED_PARTITIONS
"""From so many on no more of the partition is read. What faust has read ahead of it still has room: the partitions of a
topic share one loop, and those without an unfinished record would wait with it."""
MAX_HELD_BYTES = 256 * 2**20
"""The size at which no more records of a topic are read until some are done: the largest record for each of the eight
lanes, which may be parked or held there, and one poll. Packed, the largest record may have a kilobyte."""
HELD_PAUSE_SECONDS = 0.1
"""How long to wait then before looking again."""
COMMIT_SECONDS = 5.0
RECOMMIT_SECONDS = 30.0
"""An offset that has not grown for so long is committed again. Kafka forgets a commit that it accepted while the topic
was being deleted and made anew, and the group would show a lag until the next record arrives."""
HEARTBEAT_SECONDS = 1.0
"""A worker that joins waits for all members of the group, and they learn of it only with their next heartbeat."""
CALL_SECONDS = 30.0
"""Time limit for a call of aiokafka's consumer, which runs in a thread of its own."""
SEEK_SECONDS = 240.0
"""How long Kafka may take to answer which offsets of newly assigned partitions are committed."""
METADATA_MS = 30_000
"""How long it takes until a topic that was deleted and created again, or has new partitions, is read (aiokafka's
default: 300 s)."""
SUBSCRIBE_SECONDS = 5.0
"""How long to wait for the topics of all agents before subscribing to those that are known."""
DRAIN_SECONDS = 12.0
"""How long a stopping worker may take to finish its batches. Unfinished records are read again by the partition's next
owner."""


def _options(kafka: KafkaSettings, stream: StreamSettings, stage: Stage) -> dict[str, Any]:
    """faust's settings. docs/adr/0005-how-we-consume.md says why each differs from its default."""
    return {
        "id": f"{kafka.topic_prefix}penstock-{stage.name}",
        "broker": [f"kafka://{host.strip()}" for host in kafka.bootstrap.split(",")],
        "broker_credentials": _credentials(kafka),
        "key_serializer": "raw",
        "value_serializer": "raw",
        # faust pauses a partition when its topic's buffer is four fifths full; until then each partition may add one
        # poll. If those did not fit, faust's only loop would wait for room in backfill, and live records with it.
        "stream_buffer_maxsize": 5 * POLL_RECORDS * ASSIGNED_PARTITIONS,
        "broker_max_poll_records": POLL_RECORDS,
        "datadir": str(Path(tempfile.gettempdir()) / "penstock-faust"),
        "consumer_max_fetch_size": MAX_MESSAGE_BYTES + 2**20,
        "consumer_auto_offset_reset": "earliest",
        "consumer_metadata_max_age_ms": METADATA_MS,
        "broker_commit_every": 200,
        "broker_commit_interval": 1.0,
        "stream_wait_empty": False,
        "broker_session_timeout": stream.session_timeout_seconds,
        "broker_heartbeat_interval": HEARTBEAT_SECONDS,
        "broker_rebalance_timeout": 180,
        "broker_request_timeout": 240,
        "broker_max_poll_interval": 86_400,
        "stream_processing_timeout": 600,
        "broker_commit_livelock_soft_timeout": 600,
        "topic_allow_declare": False,
        "topic_disable_leader": True,
        "producer_acks": -1,
        "producer_request_timeout": 60,
        "web_enabled": False,
        "web_tables_enabled": False,
        "web_router_enabled": False,
        "TableManager": _NoTables,
    }


class _Recovery(Recovery):
    """Starts reading partitions after their assignment.

    faust's own class ends silently, as if it had been stopped, when Kafka does not answer in time which offsets are
    committed. The process would then keep its partitions and read nothing of them, nor of any that it is assigned
    later. This one raises Retryable, which ends the process.
    """

    async def _wait(self, coro: Any, timeout: Any = None) -> None:
        try:
            await super()._wait(coro, None if timeout is None else SEEK_SECONDS)
        except ServiceStopped as error:
            if self.should_stop:
                raise
            reason = (
                f"Kafka did not say within {SEEK_SECONDS:.0f} s which offsets are committed: the worker starts anew"
            )
            raise Retryable(reason, service="kafka") from error  # this crashes the app, which ends the process


class _NoTables(TableManager):
    """Waits for the agents' topics before faust subscribes.

    faust's own class waits one second, for tables to be declared, and a topic that is added later is subscribed to only
    after 45 s. We have no tables.
    """

    @property
    def recovery(self) -> Recovery:
        if self._recovery is None:
            self._recovery = _Recovery(self.app, self, beacon=self.beacon, loop=self.loop)
        return self._recovery

    async def on_start(self) -> None:
        expected = {topic for agent in self.app.agents.values() for topic in agent.channel.topics}
        until = monotonic() + SUBSCRIBE_SECONDS
        while not self.should_stop and monotonic() < until:  # polled, because faust signals no added topic
            if expected <= {topic for channel in self.app.topics for topic in channel.topics}:
                break
            await asyncio.sleep(0.005)
        if not self.should_stop:
            await self._update_channels()
            await self.recovery.start()


def _credentials(kafka: KafkaSettings) -> Any:
    options: dict[str, Any] = security(kafka)
    context = options.get("ssl_context")
    if "sasl_mechanism" in options:
        return faust.SASLCredentials(
            username=options["sasl_plain_username"],
            password=options["sasl_plain_password"],
            mechanism=options["sasl_mechanism"],
            ssl_context=context,
        )
    return faust.SSLCredentials(context) if context else None


class Consumption:
    """One stage's consumption: a faust app that reads, the lanes that handle, and the progress that is committed."""

    def __init__(
        self, stage: Stage, *, kafka: KafkaSettings, stream: StreamSettings, metrics: Metrics, pool: Pool
    ) -> None:
        """pool: connections to the ledger, which holds the marks of the log guard."""
        self._stage = stage
        self._metrics = metrics
        self._progress: Progress[Any] = Progress()
        self._draining = False
        self._has_room = asyncio.Event()
        self._lanes = Lanes(
            stage,
            count=stream.lanes,
            queue_size=stream.lane_queue,
            batch_wait_seconds=stream.batch_wait_seconds,
            backfill_share=stream.backfill_share,
            metrics=metrics,
            on_done=self._done,
        )
        app: Any = faust.App(**_options(kafka, stream, stage))
        self.app = app
        self.app.finalize()
        transport: Any = self.app.transport
        self._commit_lock = asyncio.Lock()
        self._guard = LogGuard(stage.name, self.app.conf.id, self, kafka=kafka, pool=pool, metrics=metrics)
        transport.Consumer = _consumer_class(self._progress, self._guard, self._commit_lock)
        self.app.on_partitions_revoked.connect(self._revoked, weak=False)
        self.app.on_partitions_assigned.connect(self._assigned, weak=False)
        self._guard_task: asyncio.Task[None] | None = None
        self.assigned = asyncio.Event()
        for lane, topic in stage.topics.items():
            channel = self.app.topic(f"{kafka.topic_prefix}{topic.name}")
            self.app.agent(channel, name=f"{stage.name}-{lane}", concurrency=1)(self._agent(lane))
        metrics.in_flight.labels(stage=stage.name).set_function(self._progress.in_flight)

    def _agent(self, lane: Lane) -> Any:
        async def consume(stream: Any) -> None:
            async for event in stream.noack().events():
                message = event.message
                record = Incoming(
                    message.topic,
                    message.partition,
                    message.offset,
                    message.key,
                    message.value,
                    list(message.headers.items() if isinstance(message.headers, dict) else message.headers or []),
                    lane,
                )
                if self._draining:
                    continue
                await self._wait_for_room(message.tp)
                read = witness(message.offset, round(message.timestamp * 1000), message.key, message.value)
                token = self._progress.arrived(message.tp, message.offset, read)
                if token is not None:
                    self._guard.read(message.tp, read)
                    await self._lanes.put(record, (message.tp, token, event))

        return consume

    async def _wait_for_room(self, tp: Any) -> None:
        """Wait while a partition has MAX_IN_FLIGHT_RECORDS, so that memory stays bounded while one record is
        retried."""
        while self._progress.in_flight(tp) >= MAX_IN_FLIGHT_RECORDS and not self._draining:
            self._has_room.clear()
            await self._has_room.wait()

    def _done(self, _record: Incoming, tag: object) -> None:
        assert isinstance(tag, tuple)
        tp, token, event = tag
        if self._progress.finished(tp, token):
            self._has_room.set()
        event.ack()  # lets faust release the event and begin a commit, which commits our done prefix, not this offset

    async def _revoked(self, _app: Any, revoked: Any, **_: Any) -> None:
        gone = set(revoked)
        self._guard.revoked(gone)
        self._drop(gone)
        log.info("partitions_revoked", stage=self._stage.name, count=len(gone))

    def _drop(self, gone: Collection[Any]) -> None:
        """Stop tracking these partitions, and drop their queued records."""
        self._progress.close(gone)
        self._has_room.set()
        self._lanes.forget(lambda tag: isinstance(tag, tuple) and tag[0] in gone)

    async def take_back(self, offsets: Mapping[Place, int]) -> None:
        """Implements ``Rewinds``. Nothing else is committed of these partitions meanwhile, because they are no longer
        tracked."""
        self._drop(offsets.keys())
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._commit_lock.acquire()
        except TimeoutError as error:
            raise Retryable("an earlier commit is still under way", service="kafka") from error
        try:
            await self._commit_again(offsets)
        finally:
            self._commit_lock.release()

    async def _commit_again(self, offsets: Mapping[Place, int]) -> None:
        commits = {TopicPartition(*place): offset for place, offset in offsets.items()}

        async def commit(consumer: AIOKafkaConsumer) -> None:
            await consumer.commit(commits)

        await self._call_consumer(commit, "the offsets to go back to were not committed")

    async def read_again(self) -> None:
        """Implements ``Rewinds``. A new assignment makes faust drop the records that it has read ahead."""

        async def rejoin(consumer: AIOKafkaConsumer) -> None:
            consumer._coordinator.request_rejoin()

        await self._call_consumer(rejoin, "the group was not joined again")

    async def is_member(self) -> bool:
        """Implements ``Rewinds``."""

        async def heartbeat(consumer: AIOKafkaConsumer) -> bool:
            group = consumer._coordinator
            answer = await group._send_req(HeartbeatRequest(group.group_id, group.generation, group.member_id))
            return answer.error_code in (NoError.errno, RebalanceInProgressError.errno)

        return bool(await self._call_consumer(heartbeat, "the group did not say whether this worker is a member"))

    async def _call_consumer(self, function: Callable[[AIOKafkaConsumer], Awaitable[T]], failed: str) -> T:
        """Call a function with aiokafka's consumer, in the thread that it runs in. failed: the error's message when
        that fails. Raises Retryable."""
        thread = self.app.consumer._thread
        try:
            async with asyncio.timeout(CALL_SECONDS):
                result: T = await thread.call_thread(function, thread._ensure_consumer())
                return result
        except Exception as error:  # for example while the consumer restarts: the caller tries again
            raise Retryable(f"{failed}: {type(error).__name__}", service="kafka") from error

    async def _assigned(self, _app: Any, assigned: Any, **_: Any) -> None:
        self.assigned.set()
        log.info("partitions_assigned", stage=self._stage.name, count=len(assigned))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Consume inside the block. At its end, drain and stop."""
        async with AsyncExitStack() as stack:
            # faust's signals belong to its class, and would hold this consumption for as long as the process runs.
            stack.callback(self.app.on_partitions_revoked.disconnect, self._revoked)
            stack.callback(self.app.on_partitions_assigned.disconnect, self._assigned)
            await self._start()
            stack.push_async_callback(self.app.stop)
            self._guard_task = asyncio.create_task(self._guard.run())
            stack.push_async_callback(cancel_and_wait, [self._guard_task])
            stack.push_async_callback(self.drain)
            yield

    async def _start(self) -> None:
        self._lanes.start()
        try:
            await self.app.start()
        except BaseException:
            await self._lanes.stop(within_seconds=0)
            with suppress(TimeoutError):  # it may wait for Kafka, and the reason is the first error
                async with asyncio.timeout(COMMIT_SECONDS):
                    await self.app.stop()
            raise

    async def drain(self) -> None:
        """Finish the batches in progress, start no other, and commit what is done. Repeats are harmless."""
        self._draining = True
        self._has_room.set()
        await self._lanes.stop(within_seconds=DRAIN_SECONDS)
        if self.app.consumer is not None and not self.app.crashed:
            try:
                async with asyncio.timeout(COMMIT_SECONDS):
                    await self.app.consumer.commit()
            except TimeoutError:
                log.warning("commit_timed_out", stage=self._stage.name)  # it will be read again: nothing is lost

    async def crashed(self) -> BaseException:
        """Return the error when faust has stopped (after losing a thread, or a fatal error of the broker), or a lane or
        the guard has ended. The process should then end, and be started again."""
        lanes = asyncio.create_task(self._lanes.failed())
        app = asyncio.create_task(self.app.wait_until_stopped())
        assert self._guard_task is not None
        try:
            await asyncio.wait([lanes, app, self._guard_task], return_when=asyncio.FIRST_COMPLETED)
            if self._guard_task.cancelled():
                return RuntimeError("the comparison of Kafka's logs was cancelled")
            if self._guard_task.done() and (error := self._guard_task.exception()):
                return error
            return (lanes.result() if lanes.done() else self.app.crash_reason) or RuntimeError("the consumer stopped")
        finally:
            lanes.cancel()
            app.cancel()

    def report(self) -> dict[str, Any]:
        """The stage's state, for `penstock status`."""
        trouble = self._lanes.trouble
        return {
            "stage": self._stage.name,
            "ready": self.ready,
            "in_flight": self._progress.in_flight(),
            "waiting_for": None if trouble is None else trouble.service or "unknown",
            "reason": None if trouble is None else trouble.reason,
            "waiting_seconds": None if trouble is None else round(monotonic() - trouble.since, 1),
        }

    @property
    def ready(self) -> bool:
        """Whether partitions were assigned (perhaps none, when there are more workers than partitions)."""
        return self.assigned.is_set() and not self.app.crashed


class _Thread(AIOKafkaConsumerThread):
    """Takes records of POLL_BYTES in one poll."""

    async def _fetch_records(self, *args: Any, **kwargs: Any) -> Any:
        begin_poll(POLL_BYTES)
        return await super()._fetch_records(*args, **kwargs)


def _consumer_class(progress: Progress[Any], guard: LogGuard, commit_lock: asyncio.Lock) -> type:
    class Consumer(FaustConsumer):
        """Commits our done prefix and nothing else. (faust's own rule skips gaps in a new group.)"""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._held: Counter[str] = Counter()
            """Bytes of the records in memory, by topic."""
            self._commit_due: dict[TopicPartition, float] = {}
            """When an offset is committed again although it has not grown, on time.monotonic()."""

        def _new_consumer_thread(self) -> _Thread:
            return _Thread(self, loop=self.loop, beacon=self.beacon)

        async def _getmany(self, active_partitions: Any, timeout: float) -> Any:
            """Read only topics of which few bytes are in memory, and partitions of which few records are in flight."""
            readable = {
                tp
                for tp in active_partitions
                if self._held[tp.topic] < MAX_HELD_BYTES and progress.in_flight(tp) < STOP_READING_RECORDS
            }
            if not readable:  # aiokafka would take none as all
                await asyncio.sleep(HELD_PAUSE_SECONDS)
                return {}
            some = len(readable) < len(active_partitions)
            return await super()._getmany(readable, min(timeout, HELD_PAUSE_SECONDS) if some else timeout)

        def _to_message(self, tp: Any, record: Any) -> Any:
            message = super()._to_message(tp, record)
            size = size_of(record)
            self._held[tp.topic] += size
            weakref.finalize(message, self._held.subtract, {tp.topic: size})  # also where faust drops it unseen
            return message

        async def on_partitions_assigned(self, assigned: Any, generation_id: int = 0) -> None:
            progress.open(assigned)  # first: faust passes records on before it has sent its own signal
            guard.assigned(assigned)
            await super().on_partitions_assigned(assigned, generation_id)

        async def seek_to_committed(self) -> Any:
            """Seek in every assigned partition. aiokafka skips those without a committed offset, but faust may already
            have read records of them, and dropped them."""

            async def seek(consumer: AIOKafkaConsumer) -> dict[TopicPartition, int | None]:
                committed: dict[TopicPartition, int | None] = await consumer.seek_to_committed()
                for tp in consumer.assignment() & committed.keys():
                    if not committed[tp]:
                        consumer.seek(tp, 0)  # if Kafka has deleted that record, auto_offset_reset selects the earliest
                return committed

            committed = await self._thread.call_thread(seek, self._thread._ensure_consumer())
            guard.positioned(committed)
            return committed

        async def _commit_offsets(self, offsets: Any, start_new_transaction: bool = True) -> bool:
            """Commit only the offsets whose marks the guard has stored. The others are tried again with the next
            commit."""
            done = {
                tp: token.stamp
                for tp in offsets
                if (token := progress.last(tp)) is not None and isinstance(token.stamp, Witness)
            }
            marked = await guard.marked(done)
            allowed = {tp: offset for tp, offset in offsets.items() if tp in marked}
            committed = bool(allowed) and await super()._commit_offsets(allowed, start_new_transaction)
            due = monotonic() + (RECOMMIT_SECONDS if committed else 0)
            self._commit_due.update(dict.fromkeys(allowed, due))
            return committed

        def _should_commit(self, tp: TopicPartition, offset: int) -> bool:
            """faust also counts an offset as committed when its commit was refused."""
            return super()._should_commit(tp, offset) or monotonic() >= self._commit_due.get(tp, math.inf)

        async def _commit(self, offsets: Any) -> bool:
            """Commit one call at a time, and only partitions that are still tracked: faust may have begun this commit
            before the guard took an offset back."""
            async with commit_lock:
                ours = {tp: offset for tp, offset in offsets.items() if progress.last(tp) is not None}
                return bool(ours) and await super()._commit(ours)

        def _new_offset(self, tp: Any) -> int | None:
            self._acked[tp].clear()
            self._acked_index[tp].clear()
            return progress.committable(tp)

    return Consumer
