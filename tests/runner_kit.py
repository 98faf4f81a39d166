"""What the runner's tests share: a world, a source that reads it, and a runner on real Kafka and Postgres."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from pydantic import BaseModel, SecretStr

from connectors.protocol import Problem
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Document,
    Entry,
    Gone,
    Group,
    Listed,
    Page,
    Reaction,
    Request,
    Unreadable,
)
from deploy.local.stack import Stack
from pipeline.settings import KafkaSettings, PostgresSettings
from pipeline.stores.postgres import Pool, open_pool
from pipeline.telemetry import Metrics
from tests.folder_kit import own_database
from topics.admin import ensure_topics
from topics.codec import decode
from topics.messages import AnyMessage
from topics.producer import Producer
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES

PAGE = 3


@dataclass
class World:
    """Documents as a service has them, what happened to them in order, and what its next answers are to be."""

    documents: dict[str, Document | Unreadable] = field(default_factory=dict)
    groups: dict[str, tuple[set[str], set[str]]] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    errors: dict[str, list[Exception]] = field(default_factory=lambda: defaultdict(list))
    """method → what it raises next"""
    truncated: int | None = None
    """Listings end after so many documents."""
    expired_before: int = 0
    """Cursors given before so much history are not known any more."""
    full_expires_at: set[int] = field(default_factory=set)
    asked: list[tuple[str, datetime]] = field(default_factory=list)
    """(method, when a page was asked for)"""
    before: Callable[[str, int], Awaitable[None]] | None = None
    """Called with the method and the page's number before each page is read."""
    fetched: Counter[str] = field(default_factory=Counter)
    listening: Callable[[Reaction], Awaitable[None]] | None = None
    closed: int = 0

    def write(self, id_: str, text: str = "text", **fields: Any) -> None:
        given = {"acl_tags": ["staff"], "revision": uuid.uuid4().hex, **fields}
        self.documents[id_] = Document(external_id=id_, title=id_, content=text, **given)
        self.history.append(id_)

    def fill(self, count: int) -> None:
        for n in range(count):
            self.write(f"d{n:03}")

    def silently(self, id_: str, **fields: Any) -> None:
        """A change that no feed tells of."""
        self.documents[id_] = replace(self.documents[id_], **fields)

    def remove(self, id_: str) -> None:
        del self.documents[id_]
        self.history.append(id_)


class WorldSource:
    Options = BaseModel

    def __init__(self, world: World, context: Context) -> None:
        self.world = world
        self.context = context

    async def close(self) -> None:
        self.world.closed += 1

    async def check(self) -> Sequence[Problem]:
        return []

    async def start(self) -> Cursor:
        await self._asked("start", 0)
        return {"at": len(self.world.history)}

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        last, number = (cursor or {}).get("after", ""), 0
        while True:
            await self._asked("full", number)
            if number in self.world.full_expires_at and last:
                self.world.full_expires_at.discard(number)
                raise CursorExpired("the cursor of the full read is not known any more")
            ids = sorted(id_ for id_ in self.world.documents if id_ > last)[:PAGE]
            if not ids:
                return
            last, number = ids[-1], number + 1
            yield Page([self.world.documents[id_] for id_ in ids], {"after": last})

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        at, number = int(cursor["at"]), 0
        if at < self.world.expired_before:
            raise CursorExpired("the cursor of changes is not known any more")
        while at < len(self.world.history):
            await self._asked("changes", number)
            ids = self.world.history[at : at + PAGE]
            at, number = at + len(ids), number + 1
            yield Page([self._entry(id_) for id_ in dict.fromkeys(ids)], {"at": at})

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        ids = sorted(self.world.documents)
        if self.world.truncated is not None:
            ids = ids[: self.world.truncated]
        for number, start in enumerate(range(0, len(ids), PAGE)):
            await self._asked("slim", number)
            yield [
                Listed(
                    external_id=id_, acl_tags=self.world.documents[id_].acl_tags,
                    required_tags=self.world.documents[id_].required_tags, revision=self.world.documents[id_].revision,
                )
                for id_ in ids[start : start + PAGE] if id_ in self.world.documents
            ]  # fmt: skip

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        assert 0 < len(external_ids) <= 50
        await self._asked("fetch", 0)
        self.world.fetched.update(external_ids)
        return [self._entry(id_) for id_ in external_ids]

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        await self._asked("groups", 0)
        for number, (tag, (members, of)) in enumerate(sorted(self.world.groups.items())):
            if tags is None or tag in tags:
                await self._asked("group", number)
                yield Group(tag, set(members), set(of))

    async def on_event(self, request: Request) -> Reaction:
        return Reaction(ids=json.loads(request.body))

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        self.world.listening = react
        await asyncio.Event().wait()

    def _entry(self, id_: str) -> Entry:
        return self.world.documents.get(id_) or Gone(id_)

    async def _asked(self, method: str, number: int) -> None:
        self.world.asked.append((method, datetime.now(UTC)))
        if self.world.errors[method]:
            raise self.world.errors[method].pop(0)
        if self.world.before is not None:
            await self.world.before(method, number)


@dataclass
class Bench:
    """A runner's surroundings. ``take`` returns what was published since the last call."""

    pool: Pool
    kafka: KafkaSettings
    postgres: PostgresSettings
    producer: Producer
    folder: Path
    consumer: AIOKafkaConsumer
    world: World = field(default_factory=World)
    tenant: str = field(default_factory=lambda: uuid.uuid4().hex)
    name: str = "wiki"
    times: dict[str, float] = field(
        default_factory=lambda: {"poll_seconds": 3600.0, "sweep_seconds": 3600.0, "groups_seconds": 3600.0}
    )

    def instance(self, **times: float) -> Instance:
        plan = Plan(
            name=self.name, tenant=self.tenant, kind="world", make=lambda c: WorldSource(self.world, c),
            **{**self.times, **times},
        )  # fmt: skip
        services = Services(
            postgres=self.postgres, pool=self.pool, producer=self.producer, metrics=Metrics(), folder=self.folder
        )
        return Instance(plan, services)

    @asynccontextmanager
    async def running(self, **times: float) -> AsyncIterator[Instance]:
        instance = self.instance(**times)
        task = asyncio.create_task(instance.run())
        try:
            yield instance
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @asynccontextmanager
    async def loaded(self, **times: float) -> AsyncIterator[Instance]:
        """Running, the first load and the sweep after it done, and its messages taken."""
        async with self.running(**times) as instance:
            await self.until(lambda: self.done(instance, "full", "changes", "groups", "sweep"))
            await self.take()
            yield instance

    @staticmethod
    def done(instance: Instance, *names: str) -> bool:
        found = instance.activities
        return all(name in found and found[name].status.succeeded_at is not None for name in names)

    @staticmethod
    async def until(condition: Callable[[], bool], within_seconds: float = 30.0) -> None:
        async with asyncio.timeout(within_seconds):
            while not condition():
                await asyncio.sleep(0.01)

    async def ask(self, action: str, argument: str | None = None) -> dict[str, Any]:
        """Ask the runner and wait for its answer."""
        [(number,)] = await self.query(
            "INSERT INTO connector_asks (tenant, source, action, argument) VALUES (%s, %s, %s, %s) RETURNING id",
            self.tenant, self.name, action, argument,
        )  # fmt: skip
        async with asyncio.timeout(60):
            while True:
                [(outcome,)] = await self.query("SELECT outcome FROM connector_asks WHERE id = %s", number)
                if outcome is not None:
                    return dict(outcome)
                await asyncio.sleep(0.02)

    async def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        async with self.pool.connection() as connection:
            cursor = await connection.execute(statement.encode(), parameters)
            return await cursor.fetchall() if cursor.description else []

    async def mine(self, what: str, table: str, where: str = "true") -> list[tuple[Any, ...]]:
        return await self.query(f"SELECT {what} FROM {table} WHERE tenant = %s AND {where}", self.tenant)

    async def pause(self, paused: bool) -> None:
        await self.query("UPDATE connectors SET paused = %s WHERE tenant = %s", paused, self.tenant)

    async def take(self) -> list[AnyMessage]:
        return [message for _, message in await self.records()]

    async def records(self) -> list[tuple[str, AnyMessage]]:
        """(topic without its prefix, message), since the last call."""
        ends = await self.consumer.end_offsets(self.consumer.assignment())
        found = []
        while any([await self.consumer.position(partition) < end for partition, end in ends.items()]):
            for partition, records in (await self.consumer.getmany(timeout_ms=200)).items():
                topic = partition.topic.removeprefix(self.kafka.topic_prefix)
                found += [(topic, decode(record.value, record.headers)) for record in records]
        return [one for one in found if one[1].tenant == self.tenant]


def kinds(messages: Sequence[AnyMessage]) -> list[tuple[str, str]]:
    """(kind without its version, external id or principal), sorted."""
    return sorted((m.kind.rpartition(".")[0], getattr(m, "external_id", None) or m.principal) for m in messages)


@dataclass(frozen=True)
class Ground:
    """Topics and a database, for as many tests as like: each has a tenant of its own."""

    bootstrap: str
    prefix: str
    dsn: str


@contextlib.contextmanager
def ground_on(stack: Stack) -> Iterator[Ground]:
    bootstrap = next(service.url for service in stack.services() if service.name == "kafka")
    prefix = f"{uuid.uuid4().hex[:8]}."
    asyncio.run(_topics(bootstrap, prefix))
    try:
        with own_database(stack) as dsn:
            yield Ground(bootstrap, prefix, dsn)
    finally:
        asyncio.run(_no_topics(bootstrap, prefix))


async def _topics(bootstrap: str, prefix: str) -> None:
    await ensure_topics(bootstrap, prefix=prefix)


async def _no_topics(bootstrap: str, prefix: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.delete_topics([topic for topic in await admin.list_topics() if topic.startswith(prefix)])
    await admin.close()


@asynccontextmanager
async def bench_on(ground: Ground, folder: Path) -> AsyncIterator[Bench]:
    postgres = PostgresSettings(dsn=SecretStr(ground.dsn))
    kafka = KafkaSettings(bootstrap=ground.bootstrap, topic_prefix=ground.prefix)
    partitions = [
        TopicPartition(f"{ground.prefix}{topic.name}", number)
        for topic in (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, IDENTITIES)
        for number in range(topic.partitions)
    ]
    consumer = AIOKafkaConsumer(bootstrap_servers=ground.bootstrap, max_partition_fetch_bytes=2**25)
    await consumer.start()
    try:
        consumer.assign(partitions)
        for partition, end in (await consumer.end_offsets(partitions)).items():
            consumer.seek(partition, end)
        async with open_pool(postgres) as pool, Producer(ground.bootstrap, ground.prefix) as producer:
            yield Bench(pool, kafka, postgres, producer, folder, consumer)
    finally:
        await consumer.stop()
