"""One space with its workers behind wires, and everything in it that a scenario can break and mend."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import psycopg
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from elasticsearch import ApiError, TransportError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from deploy.local.stack import Stack
from pipeline.core.errors import Retryable
from pipeline.embedding.choose import embedder
from pipeline.kafka.client import deliver, producer
from pipeline.kafka.producer import Producer
from pipeline.runtime.settings import EmbeddingSettings, dist
from pipeline.stores.elasticsearch import connect
from query.embedding.embedders import QueryEmbedder
from query.retrieval.search import Search, open_search
from tests.fakes.openai import FakeOpenAI, Faults
from tests.faults import tally
from tests.faults.elastic import Gate, gated
from tests.faults.model import Event
from tests.faults.story import UNEMBEDDABLE
from tests.faults.wires import Wire, wire_ports, wired
from tests.support.deploy.wheels import copy_tree, next_version
from tests.support.space import PROJECT, Space
from topics.codec import decode
from topics.messages import AnyMessage
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, INDEX_BACKFILL, INDEX_LIVE

WORKERS = ("detect", "vectors", "keywords")
DIMENSIONS = 64
OURS = ("-m", "cli.main")
DYING = {"FAULTS_AWAIT": "tests.faults.dies_at_an_await", "FAULTS_SENDS": "tests.faults.dies_after_sending"}
"""The variable that says when, and the program that is killed then."""
BUILD = ("generation", "build", "--wait", "--yes", "--json")
CUT_OVER = ("generation", "cutover", "--no-evaluation", "--json")
LONGEST_COMMAND_SECONDS = 180.0
SESSION_SECONDS = 6.0
"""The least that a broker allows (group.min.session.timeout.ms)."""
READS = {
    "detect": (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL),
    "vectors": (INDEX_LIVE, INDEX_BACKFILL),
    "keywords": (INDEX_LIVE, INDEX_BACKFILL),
}


@dataclass
class World:
    stack: Stack
    space: Space
    wires: dict[str, Wire]
    gate: Gate
    model: FakeOpenAI
    search: Search
    kafka: Producer
    environment: dict[str, str]
    restarting: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    holding: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """By worker: whoever starts and ends it."""
    workers: tuple[str, ...] = WORKERS
    published: list[tuple[str, AnyMessage]] = field(default_factory=list)
    """What a topic that loses records may have lost: everything since ``settled``, by lane."""
    next_tree: NextTree = field(default_factory=lambda: NextTree())
    connectors_ahead_seconds: float = 0.0
    """How far the connectors' clock was ever set forward: their stamps may be that much later than the moment."""
    _helpers: int = 1
    while_nobody_looks: Callable[[], Awaitable[None]] | None = None
    """What the sources do between the death of whoever publishes them and the next look."""

    @classmethod
    @asynccontextmanager
    async def create(
        cls,
        stack: Stack,
        folder: Path,
        *,
        sweep_after_seconds: float = 10,
        workers: tuple[str, ...] = WORKERS,
        more_environment: Mapping[str, str] | None = None,
    ) -> AsyncIterator[World]:
        async with AsyncExitStack() as resources:
            model = FakeOpenAI(dimensions=DIMENSIONS, faults=mended())
            await model.start()
            resources.push_async_callback(model.stop)
            settings = {
                "provider": "openai",
                "base_url": model.url,
                "dimensions": DIMENSIONS,
                "chunk_tokens": 80,
                "timeout_seconds": 3.0,
            }
            space = await resources.enter_async_context(Space.create(stack, folder, embedding=settings))
            dsn = conninfo_to_dict(space.settings.postgres.dsn.get_secret_value())
            elastic = urlsplit(space.settings.elasticsearch.url)
            wires = {
                "postgres": await resources.enter_async_context(wired("127.0.0.1", int(dsn["port"] or 5432))),
                "elasticsearch": await resources.enter_async_context(wired("127.0.0.1", elastic.port or 9200)),
                "embedding": await resources.enter_async_context(wired("127.0.0.1", urlsplit(model.url).port or 0)),
            }
            gate = await resources.enter_async_context(gated(space.settings.elasticsearch.url))
            chosen = EmbeddingSettings(**settings)  # type: ignore[arg-type]
            asked = QueryEmbedder(lambda: embedder(chosen, dist() / "models"))
            search = await resources.enter_async_context(open_search(space.settings, asked))
            kafka = await resources.enter_async_context(producer(space.settings.kafka))
            through = {**dsn, "host": "127.0.0.1", "port": wires["postgres"].listening}
            environment = {
                "PENSTOCK_POSTGRES_DSN": make_conninfo(**through),  # type: ignore[arg-type]
                "PENSTOCK_ELASTICSEARCH_URL": f"http://127.0.0.1:{wires['elasticsearch'].listening}",
                "PENSTOCK_ELASTICSEARCH_REQUEST_TIMEOUT_SECONDS": "5",
                "PENSTOCK_EMBEDDING_BASE_URL": f"http://127.0.0.1:{wires['embedding'].listening}/v1",
                "PENSTOCK_STREAM_SESSION_TIMEOUT_SECONDS": str(SESSION_SECONDS),
                "PENSTOCK_STREAM_SWEEP_AFTER_SECONDS": str(sweep_after_seconds),
                **(more_environment or {}),
            }
            if (ports := wire_ports(stack)) is not None:
                broker, advertised = ports
                wires["kafka"] = await resources.enter_async_context(wired("127.0.0.1", broker, listening=advertised))
                environment["PENSTOCK_KAFKA_BOOTSTRAP"] = f"127.0.0.1:{advertised}"
            world = cls(stack, space, wires, gate, model, search, kafka, environment, workers=workers)
            await asyncio.gather(*(world.start(name) for name in workers))
            yield world
            for name in tuple(space.processes):
                await world.end(name, signal.SIGKILL)

    # Workers

    @asynccontextmanager
    async def taking(self, *names: str) -> AsyncIterator[list[str]]:
        """Those of these workers that run, once no other fault is at any of them; until the end they are the
        caller's."""
        async with AsyncExitStack() as held:
            for name in sorted(names):
                await held.enter_async_context(self.holding[name])
            yield [name for name in names if name in self.space.processes]

    async def start(
        self,
        name: str,
        *,
        dying: Mapping[str, str] | None = None,
        program: Sequence[str] = OURS,
        more_environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a worker, again and again while the world is too broken for it to come up.

        ``dying`` is the environment of one that is meant to die: it may do so before it is ready.
        """
        if dying is not None:
            program = ["-m", DYING[next(iter(dying))]]
        environment = {**self.environment, **(dying or {}), **(more_environment or {})}
        for _ in range(8):
            with suppress(AssertionError):
                await asyncio.to_thread(self.space.start, name, program=program, env=environment)
                return
            process = self.space.processes.pop(name)
            process.kill()
            process.wait(30)
            if dying is not None:
                tally.FAULTS["kill of a worker that had just started"] += 1
                return
            await asyncio.sleep(1)
        raise AssertionError(f"{name} does not come up:\n{self.space.log(name)[-3000:]}")

    async def end(self, name: str, number: signal.Signals) -> None:
        process = self.space.processes.pop(name, None)
        if process is not None:
            process.send_signal(number)
            try:
                await asyncio.to_thread(process.wait, 45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
                raise

    async def revive(self) -> None:
        """Every worker runs again, once; helpers are told to go."""
        for name, process in tuple(self.space.processes.items()):
            if process.poll() is not None:
                del self.space.processes[name]
                tally.DONE["workers that gave up and were started anew"] += 1
            elif name not in self.workers:
                await self.end(name, signal.SIGTERM)
        await asyncio.gather(*(self.start(name) for name in self.workers if name not in self.space.processes))

    async def execute(self, *statements: str) -> None:
        """Again until Postgres is there: another fault may have taken it away."""

        async def once() -> None:
            dsn = self.space.settings.postgres.dsn.get_secret_value()
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                for statement in statements:
                    await connection.execute(statement.encode())

        await insist(once)

    async def ask(self, statement: str) -> Any:
        """The one value that it returns, again until Postgres is there."""
        values: list[Any] = []

        async def once() -> None:
            [(value,)] = await self.space.query(statement)
            values.append(value)

        await insist(once)
        return values[-1]

    async def chunk_table(self) -> str:
        return str(await self.ask("SELECT chunk_table FROM generations WHERE state = 'active'"))

    async def chunk_tokens(self) -> int:
        return int(await self.ask("SELECT params ->> 'target' FROM generations WHERE state = 'active'"))

    async def database(self) -> str:
        return str(await self.ask("SELECT current_database()"))

    def helper(self, stage: str) -> str:
        """A name for one more worker of a stage."""
        self._helpers += 1
        return f"{stage}#{self._helpers}"

    async def set_index(self, settings: dict[str, object]) -> None:
        """Settings of every index, again until Elasticsearch is there."""
        indexes = f"{self.space.settings.elasticsearch.index_prefix}chunks-*"

        async def once() -> None:
            async with connect(self.space.settings.elasticsearch) as es:
                await es.indices.put_settings(index=indexes, settings=settings)

        await insist(once)

    def server_processes(self, name: str) -> list[psutil.Process]:
        """All processes of a server of the stack, the parents first."""
        parents = self.stack._server_processes(name)
        return [*parents, *(child for parent in parents for child in parent.children(recursive=True))]

    async def operate(self, *arguments: str, kill_after_seconds: float | None = None, tree: Path | None = None) -> bool:
        """Run a command of ours through the wires; returns whether it ended well. It may fail, in one clear line: never
        with a traceback. tree: of another version."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cli.main",
            *arguments,
            env={**self.space.environment, **self.environment, **(of_tree(tree) if tree else {})},
            cwd=PROJECT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        ended = asyncio.create_task(process.communicate())
        await asyncio.wait([ended], timeout=kill_after_seconds or LONGEST_COMMAND_SECONDS)
        killed = process.returncode is None
        if killed:
            process.kill()
        _, errors = await ended
        said = errors.decode()[-3000:]
        assert not killed or kill_after_seconds is not None, f"penstock {arguments[0]} does not end: {said}"
        assert "Traceback" not in said, said
        fate = "kill of" if killed else "ends well:" if process.returncode == 0 else "gives up:"
        tally.FAULTS[f"{fate} penstock {' '.join(takewhile(str.isalpha, arguments))}"] += 1
        return process.returncode == 0

    async def finish_rebuild(self) -> None:
        """Whoever killed a rebuild, or the build of a generation, runs it again."""
        rows = await self.space.query(
            "SELECT replaces, params ->> 'target' FROM builds JOIN generations ON name = generation"
            " WHERE state = 'building'"
        )
        for replaces, target in rows:
            if len(replaces) == 1:
                done = await self.operate("rebuild", replaces[0], "--yes", "--json")
            else:
                done = await self.operate(*BUILD, "--chunk-tokens", target) and await self.operate(*CUT_OVER)
            assert done, "what was being built cannot be finished"

    # Events

    async def publish(self, published: Iterable[tuple[str, AnyMessage]]) -> None:
        """Until Kafka has them, in this order; an event may come twice."""
        for lane, event in published:
            self.published.append((lane, event))
            for _ in range(60):
                try:
                    topic = DOCUMENTS_LIVE if lane == "live" else DOCUMENTS_BACKFILL
                    await deliver([self.kafka.send(topic, event)], within_seconds=20)
                    break
                except Retryable:
                    await asyncio.sleep(0.5)
            else:
                raise AssertionError("Kafka does not come back")

    async def publish_again(self) -> None:
        """As a producer does that is told that Kafka has lost records."""
        again, self.published = self.published, []
        await self.publish(again)

    async def document_events(self) -> dict[str, list[Event]]:
        """Every document's events that Kafka has, by ``source/external_id``, whoever published them."""
        kafka = self.space.settings.kafka
        events: dict[str, list[Event]] = defaultdict(list)
        names = [kafka.topic_prefix + topic.name for topic in (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL)]
        consumer = AIOKafkaConsumer(*names, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest")
        await consumer.start()
        try:
            ends = await consumer.end_offsets(consumer.assignment())
            for partition, end in ends.items():
                while await consumer.position(partition) < end:
                    for records in (await consumer.getmany(timeout_ms=200)).values():
                        for record in records:
                            event = decode(record.value, record.headers)
                            assert isinstance(event, Event)
                            events[f"{event.source}/{event.external_id}"].append(event)
        finally:
            await consumer.stop()
        return events

    async def committed(self) -> list[str]:
        """What is not committed to the end yet: a line for each partition."""
        kafka = self.space.settings.kafka
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap)
        behind = []
        try:
            await admin.start()
            await consumer.start()
            for stage, topics in READS.items():
                group = f"{kafka.topic_prefix}penstock-{stage}"
                offsets = await admin.list_consumer_group_offsets(group)
                names = {kafka.topic_prefix + topic.name for topic in topics}
                partitions = [
                    TopicPartition(topic["topic"], partition["partition"])
                    for topic in await admin.describe_topics(None)
                    if topic["topic"] in names
                    for partition in topic["partitions"]
                ]
                ends = await consumer.end_offsets(partitions)
                for partition, end in ends.items():
                    at = offsets[partition].offset if partition in offsets else -1
                    if end and at != end:  # behind it, or beyond the end of a log that has become shorter
                        behind.append(f"{stage}: {partition.topic}:{partition.partition} at {at} of {end}")
        finally:
            await consumer.stop()
            await admin.close()
        return behind

    async def pending(self) -> list[str]:
        rows = await self.space.query(
            "SELECT d.external_id, s.generation, s.store, s.attempts, s.error FROM index_state s"
            " JOIN documents d ON d.id = s.document_id"
            " JOIN generations g ON g.name = s.generation AND g.state <> 'retired' WHERE s.seq < s.want_seq"
        )
        return [
            f"{name} in {store} of {generation} ({attempts} attempts, {error})"
            for name, generation, store, attempts, error in rows
        ]

    async def settled(self, within_seconds: float) -> None:
        """Offsets committed to the end and nothing pending. Raises AssertionError after the time."""
        deadline = asyncio.get_running_loop().time() + within_seconds
        left = ["nothing could be asked"]
        while left:
            assert asyncio.get_running_loop().time() < deadline, f"did not settle: {left[:5]}\n{self.signs()}"
            await asyncio.sleep(0.3)
            try:
                left = await self.committed() or await self.pending()  # in this order: what is accepted is pending
            except (KafkaError, OSError) as error:
                left = [type(error).__name__]
        self.published.clear()

    def signs(self) -> str:
        """What the workers say of themselves, for a failed test."""
        return "\n".join(f"{name}: {self.space.log(name)[-1500:]}" for name in self.space.processes)

    def rescued(self) -> int:
        """Hints that the sweeper has sent again, ever."""
        return sum(int(event["hints"]) for event in self._logged("hints_rescued", "detect*.log"))

    def partitions_lost(self) -> int:
        """Partitions that workers had to give back, ever. Where no test disturbs them, the machine stalled for longer
        than a consumer's session, and so for as long as the sweeper waits for a hint."""
        return sum(int(event["count"]) for event in self._logged("partitions_revoked", "*.log"))

    def _logged(self, event: str, files: str) -> Iterator[dict[str, Any]]:
        for path in self.space.home.glob(files):
            for line in path.read_text().splitlines():
                if f'"{event}"' in line:
                    yield json.loads(line)

    def mend(self) -> None:
        """No fault is left but those that a scenario mends itself."""
        for wire in self.wires.values():
            wire.heal()
        self.wires["elasticsearch"].port = urlsplit(self.space.settings.elasticsearch.url).port or 9200
        self.model.faults = mended()


class NextTree:
    """The next version of the product, as tests/e2e/test_upgrade.py makes it, beside the present one."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._copied = False
        self._making = asyncio.Lock()

    async def environment(self, world: World) -> dict[str, str]:
        """What a process needs to be of it. The database is migrated first."""
        async with self._making:
            if self._path is None:
                path = world.space.home / "next"
                if not self._copied:
                    await asyncio.to_thread(copy_tree, path, next_version)
                    self._copied = True
                if await world.operate("migrate", tree=path):
                    self._path = path
        return of_tree(self._path) if self._path is not None else {}


def of_tree(tree: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "PENSTOCK_DIST": str(dist())}


async def insist(action: Callable[[], Awaitable[None]]) -> None:
    """Do it, again while the server that it needs is away. Raises what it raised for a minute."""
    for left in reversed(range(120)):
        try:
            await action()
            return
        except (psycopg.OperationalError, TransportError, ApiError):
            if not left:
                raise
            await asyncio.sleep(0.5)


def mended() -> Faults:
    return Faults(poison=UNEMBEDDABLE)
