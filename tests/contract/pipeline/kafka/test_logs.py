"""A Kafka log that is made anew, loses its tail, grows again or expires: what reaches a worker, and what it says.

On a Kafka of its own, since its data is put back to an older state. The consuming module and the marks are the real
ones; the stage keeps what it is given.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete

from deploy.local.service import Place
from deploy.local.stack import Stack
from pipeline.core.errors import Retryable
from pipeline.core.kafka_log import Mark
from pipeline.core.model import Lane
from pipeline.kafka.client import deliver, producer
from pipeline.kafka.stopping import stop_consumer
from pipeline.ledger import kafka_marks
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings, StreamSettings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stages.stage import FinalStage, Incoming
from pipeline.stores.postgres import Connection, open_pool
from pipeline.stream import consume, logguard
from pipeline.stream.consume import Consumption
from tests.support.servers_state import servers_state
from tests.support.space import Space
from tests.support.waiting import until
from topics.registry import Topic

pytestmark = pytest.mark.stack

PATIENCE_SECONDS = 90


class Keeps(FinalStage):
    name = "keeps"
    batch_size = 4

    def __init__(self, topic: Topic) -> None:
        self.topics: dict[Lane, Topic] = {"live": topic}  # type: ignore[misc]  # of this test alone
        self.handled: list[str] = []

    async def handle(self, batch: Sequence[Incoming]) -> None:
        self.handled += [(r.value or b"").decode() for r in batch]

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        raise AssertionError(f"nothing here is at fault: {record.offset} {error}")


@dataclass
class World:
    stack: Stack
    """The stack, of which only Kafka runs."""
    space: Space
    topic: Topic
    kafka: KafkaSettings
    metrics: Metrics = field(default_factory=Metrics)
    workers: set[asyncio.Task[BaseException]] = field(default_factory=set)
    """Each ends when its worker gives up."""

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Keeps]:
        stage = Keeps(self.topic)
        self.metrics = Metrics()
        async with open_pool(self.space.settings.postgres) as pool:
            consumption = Consumption(
                stage,
                kafka=self.kafka,
                stream=StreamSettings(lanes=2, batch_wait_seconds=0.01),
                metrics=self.metrics,
                pool=pool,
            )
            async with consumption.running():
                crashed = asyncio.create_task(consumption.crashed())
                self.workers.add(crashed)
                try:
                    yield stage
                finally:
                    self.workers.remove(crashed)
                    if crashed.done():
                        raise RuntimeError("the worker gave up") from crashed.result()
                    await cancel_and_wait([crashed])

    async def send(self, name: str, count: int) -> set[str]:
        texts = [f"{name}-{n}" for n in range(count)]
        async with producer(self.kafka) as kafka:
            await deliver(kafka.send_raw(self.topic, b"key", text.encode(), []) for text in texts)
        return set(texts)

    async def committed(self) -> int | None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka.bootstrap)
        await admin.start()
        try:
            offsets = await admin.list_consumer_group_offsets(f"{self.kafka.topic_prefix}penstock-keeps")
        finally:
            await admin.close()
        return next((o.offset for tp, o in offsets.items() if tp.topic == self.full_name), None)

    async def end(self) -> int:
        consumer = AIOKafkaConsumer(bootstrap_servers=self.kafka.bootstrap)
        await consumer.start()
        try:
            ends = await consumer.end_offsets([TopicPartition(self.full_name, 0)])
        finally:
            await stop_consumer(consumer)
        return int(ends[TopicPartition(self.full_name, 0)])

    @property
    def full_name(self) -> str:
        return f"{self.kafka.topic_prefix}{self.topic.name}"

    async def until_committed(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (committed := await self.committed()) != (end := await self.end()):
            assert time.monotonic() < deadline, f"committed {committed} of {end}"
            await asyncio.sleep(0.2)

    async def handle_all(self, name: str, count: int) -> None:
        """A worker comes, handles these, and leaves."""
        async with self.worker() as stage:
            sent = await self.send(name, count)
            await until(lambda: sent <= set(stage.handled))
            await self.until_committed()

    async def make(self) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka.bootstrap)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(self.full_name, 1, 1)])
            while self.full_name not in await admin.list_topics():
                await asyncio.sleep(0.1)
        finally:
            await admin.close()

    async def make_anew(self) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka.bootstrap)
        await admin.start()
        try:
            await admin.delete_topics([self.full_name])
            while self.full_name in await admin.list_topics():
                await asyncio.sleep(0.1)
        finally:
            await admin.close()
        await self.make()

    async def expire(self, before: int) -> None:
        """As retention does: the log begins later."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka.bootstrap)
        await admin.start()
        try:
            await admin.delete_records({TopicPartition(self.full_name, 0): RecordsToDelete(before)})
        finally:
            await admin.close()

    @property
    def data(self) -> Path:
        return Place(self.stack.home, "kafka").data / f"{self.full_name}-0"

    async def keep_a_copy(self) -> Path:
        """Return the topic's data as they are on disk now."""
        copy = self.stack.home / f"copy-{self.full_name}-{uuid4().hex[:8]}"
        shutil.copytree(self.data, copy, ignore=shutil.ignore_patterns("*index"))  # Kafka makes them anew
        return copy

    async def lose_the_tail(self, copy: Path) -> None:
        """Kafka comes back with the topic's data as they were: what it acknowledged since is gone."""
        await asyncio.to_thread(self.stack.stop, "kafka")
        shutil.rmtree(self.data)
        shutil.copytree(copy, self.data)
        await asyncio.to_thread(self.stack.start, "kafka")

    def moved(self) -> dict[str, float]:
        """kind → how often it was counted."""
        return {
            sample.labels["kind"]: sample.value
            for metric in self.metrics.log_moved.collect()
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.value
        }

    def expired(self) -> float:
        return sum(
            sample.value
            for metric in self.metrics.expired_records.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with servers_state(tmp_path_factory.mktemp("kafka")) as folder:
        stack = Stack(folder / "home", die_with_parent=True)
        stack.up(services=("kafka",))
        try:
            yield stack
        finally:
            stack.down()


@pytest.fixture
async def world(own_kafka: Stack, space: Space, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(logguard, "COMPARE_SECONDS", 1.0)
    monkeypatch.setattr(logguard, "SAMPLE_SECONDS", 0.2)
    monkeypatch.setattr(logguard, "CONFIRM_SECONDS", 0.2)
    kafka = KafkaSettings(bootstrap=own_kafka.endpoints()["kafka"]["bootstrap"], topic_prefix=f"t{uuid4().hex[:8]}.")
    world = World(own_kafka, space, Topic("log.v1", (), "of this test", partitions=1), kafka)
    await world.make()
    return world


async def test_a_topic_recreated_while_no_worker_ran_is_reported_once_and_read_from_the_beginning(world: World) -> None:
    await world.handle_all("old", 20)
    await world.make_anew()
    new = await world.send("new", 30)
    async with world.worker() as stage:
        await until(lambda: new <= set(stage.handled))
        await until(lambda: world.moved() == {"recreated": 1})
        await world.until_committed()
    async with world.worker() as stage:
        last = await world.send("last", 1)
        await until(lambda: last <= set(stage.handled))
        assert (world.moved(), set(stage.handled)) == ({}, last), "it is said once, and the new log is accepted"


async def test_a_topic_recreated_under_a_running_worker_loses_no_record(world: World) -> None:
    async with world.worker() as stage:
        old = await world.send("old", 20)
        await until(lambda: old <= set(stage.handled))
        await world.until_committed()
        await world.make_anew()
        new = await world.send("new", 10)
        await until(lambda: new <= set(stage.handled))
        more = await world.send("more", 30)
        await until(lambda: more <= set(stage.handled))
        await until(lambda: world.moved() == {"recreated": 1})
        await world.until_committed()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "kind"), [(5, "truncated"), (40, "regrown")])
async def test_records_sent_after_a_lost_tail_are_read_by_the_next_worker(world: World, count: int, kind: str) -> None:
    await world.handle_all("kept", 20)
    copy = await world.keep_a_copy()
    await world.handle_all("lost", 20)
    await world.lose_the_tail(copy)
    new = await world.send("new", count)
    async with world.worker() as stage:
        await until(lambda: new <= set(stage.handled))
        assert world.moved() == {kind: 1}
        await world.until_committed()
        handled = Counter(stage.handled)
    assert handled["kept-0"] == 0, "only what may be new is read again"
    async with world.worker() as stage:
        last = await world.send("last", 1)
        await until(lambda: last <= set(stage.handled))
        assert (world.moved(), set(stage.handled)) == ({}, last), "it is said once"


async def test_records_sent_after_a_lost_tail_are_read_by_a_running_worker(world: World) -> None:
    async with world.worker() as stage:
        kept = await world.send("kept", 20)
        await until(lambda: kept <= set(stage.handled))
        await world.until_committed()
        copy = await world.keep_a_copy()
        lost = await world.send("lost", 20)
        await until(lambda: lost <= set(stage.handled))
        await world.until_committed()
        await world.lose_the_tail(copy)
        new = await world.send("new", 5)
        await until(lambda: new <= set(stage.handled))
        assert world.moved().keys() == {"truncated"}
        more = await world.send("more", 40)
        await until(lambda: more <= set(stage.handled))
        await world.until_committed()


@pytest.mark.slow
async def test_a_log_that_lost_all_and_regrew_past_the_position_is_read_by_a_running_worker(world: World) -> None:
    grown = replace(world, topic=replace(world.topic, name="grown.v1"))
    await grown.make()
    new = await grown.send("new", 60)
    async with world.worker() as stage:
        old = await world.send("old", 40)
        await until(lambda: old <= set(stage.handled))
        await world.until_committed()
        copy = await grown.keep_a_copy()
        shutil.copy(world.data / "partition.metadata", copy)  # the topic's id
        await world.lose_the_tail(copy)  # all of it, and more was sent before the worker could look again
        await until(lambda: new <= set(stage.handled))
        assert world.moved().keys() == {"regrown"}
        more = await world.send("more", 10)
        await until(lambda: more <= set(stage.handled))
        await world.until_committed()


async def test_a_worker_that_lost_its_partition_does_not_overwrite_the_next_owners_mark(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = kafka_marks.save
    statements: list[Mapping[kafka_marks.Place, tuple[int, Mark]]] = []

    async def noted(
        connection: Connection, group: str, marks: Mapping[kafka_marks.Place, tuple[int, Mark]]
    ) -> set[kafka_marks.Place]:
        statements.append(marks)
        return await save(connection, group, marks)

    monkeypatch.setattr(kafka_marks, "save", noted)
    await world.handle_all("old", 20)
    late = statements[-1]
    await world.handle_all("new", 20)
    rows = "SELECT owner, offsets FROM kafka_marks"
    before = await world.space.query(rows)
    async with open_pool(world.space.settings.postgres) as pool, pool.connection() as connection:
        assert await save(connection, f"{world.kafka.topic_prefix}penstock-keeps", late) == set()
    assert await world.space.query(rows) == before


async def test_a_worker_whose_marks_were_claimed_stores_none_until_its_membership_is_confirmed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_member, requested, answers = Consumption.is_member, asyncio.Event(), asyncio.Event()

    async def slow(consumption: Consumption) -> bool:
        requested.set()
        return await is_member(consumption) if answers.is_set() else False

    group = f"{world.kafka.topic_prefix}penstock-keeps"
    async with world.worker() as stage:
        sent = await world.send("one", 20)
        await until(lambda: sent <= set(stage.handled))
        await world.until_committed()
        monkeypatch.setattr(Consumption, "is_member", slow)
        async with open_pool(world.space.settings.postgres) as pool, pool.connection() as connection:
            await kafka_marks.claim(connection, group, [(world.full_name, 0)])  # as a paused worker may do it
        owner = await world.space.query("SELECT owner FROM kafka_marks")
        more = await world.send("two", 20)
        await until(lambda: more <= set(stage.handled))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await requested.wait()
        assert await world.committed() == 20
        assert await world.space.query("SELECT owner FROM kafka_marks") == owner, "it takes nothing from the other one"
        answers.set()
        await world.until_committed()


async def test_a_worker_that_cannot_seek_to_committed_offsets_ends_and_the_next_one_reads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka goes away while partitions are assigned, and stays away for longer than faust waits."""
    with monkeypatch.context() as away:
        away.setattr(consume, "SEEK_SECONDS", 1.0)
        away.setattr(AIOKafkaConsumer, "seek_to_committed", lambda _consumer: asyncio.sleep(3_600))
        with pytest.raises(RuntimeError, match="the worker gave up"):
            async with world.worker():
                await asyncio.wait(world.workers, timeout=PATIENCE_SECONDS)
    await world.handle_all("two", 1)


async def test_records_that_expired_unread_are_counted_and_the_others_read(world: World) -> None:
    await world.handle_all("old", 20)
    unread = sorted(await world.send("unread", 30), key=lambda text: int(text.partition("-")[2]))
    await world.expire(before=35)
    async with world.worker() as stage:
        await until(lambda: set(unread[15:]) <= set(stage.handled))
        await until(lambda: bool(world.moved()))
        assert (world.moved(), world.expired()) == ({"expired": 1}, 15)
        await world.until_committed()
    await world.expire(before=50)
    async with world.worker() as stage:
        last = await world.send("last", 1)
        await until(lambda: last <= set(stage.handled))
        assert (world.moved(), world.expired()) == ({}, 0), "what was read may expire"


async def test_an_unchanged_log_is_read_once_without_an_alarm(world: World) -> None:
    await world.send("before", 10)
    await world.expire(before=5)
    async with world.worker() as stage:  # without a committed offset, and without a mark
        await until(lambda: {f"before-{n}" for n in range(5, 10)} <= set(stage.handled))
        await world.until_committed()
        assert (world.moved(), world.expired()) == ({}, 0)
    for name in ("one", "two"):
        async with world.worker() as stage:
            sent = await world.send(name, 300)
            await until(lambda stage=stage, sent=sent: sent <= set(stage.handled))  # type: ignore[misc]
            await asyncio.sleep(2 * logguard.COMPARE_SECONDS)
            await world.until_committed()
            assert Counter(stage.handled) == Counter(sent)
            assert (world.moved(), world.expired()) == ({}, 0)


@pytest.mark.slow
async def test_marks_restored_from_a_backup_cause_no_false_alarm_and_hide_no_loss(world: World) -> None:
    await world.handle_all("old", 20)
    rows = "SELECT log_id, offsets, sent_ms, digests FROM kafka_marks WHERE consumer_group = %s"
    group = f"{world.kafka.topic_prefix}penstock-keeps"
    [backup] = await world.space.query(rows, group)
    copy = await world.keep_a_copy()
    await world.handle_all("lost", 20)
    restore = "UPDATE kafka_marks SET log_id = %s, offsets = %s, sent_ms = %s, digests = %s WHERE consumer_group = %s"
    assert await world.space.execute(restore, *backup, group) == 1
    async with world.worker() as stage:
        more = await world.send("more", 10)
        await until(lambda: more <= set(stage.handled))
        assert (world.moved(), set(stage.handled)) == ({}, more)
        await world.until_committed()
    assert await world.space.execute(restore, *backup, group) == 1
    await world.lose_the_tail(copy)
    new = await world.send("new", 5)
    async with world.worker() as stage:
        await until(lambda: new <= set(stage.handled))
        assert world.moved() == {"truncated": 1}


@pytest.mark.slow
async def test_another_cluster_is_read_from_its_beginning(world: World) -> None:
    await world.handle_all("old", 20)
    assert await world.space.execute("UPDATE kafka_marks SET log_id = 'another/' || split_part(log_id, '/', 2)") == 1
    async with world.worker() as stage:
        await until(lambda: {f"old-{n}" for n in range(20)} <= set(stage.handled))
        assert world.moved() == {"recreated": 1}
        await world.until_committed()


async def test_a_worker_retries_storing_its_marks_before_it_commits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.handle_all("kept", 20)
    copy = await world.keep_a_copy()
    await world.handle_all("lost", 20)
    await world.lose_the_tail(copy)
    new = await world.send("new", 40)
    away = 3
    save = kafka_marks.save

    async def fails(*arguments: object) -> set[kafka_marks.Place]:
        nonlocal away
        away -= 1
        if away >= 0:
            raise Retryable("away", service="postgres")
        return await save(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kafka_marks, "save", fails)
    async with world.worker() as stage:
        await until(lambda: away <= 0)
        await until(lambda: new <= set(stage.handled))
        assert world.moved() == {"regrown": 1}
        await world.until_committed()
    assert away <= 0


async def test_an_offset_that_kafka_forgot_is_committed_again_without_a_new_record(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group showed a lag until another record came."""
    monkeypatch.setattr(consume, "RECOMMIT_SECONDS", 1.0)
    forgotten = 0
    commit = AIOKafkaConsumer.commit

    async def forgets(self: AIOKafkaConsumer, offsets: object = None) -> None:
        nonlocal forgotten
        if await world.end() == 20 and not forgotten:
            forgotten += 1
            return
        await commit(self, offsets)

    monkeypatch.setattr(AIOKafkaConsumer, "commit", forgets)
    async with world.worker() as stage:
        sent = await world.send("sent", 20)
        await until(lambda: sent <= set(stage.handled))
        await world.until_committed()
    assert forgotten
