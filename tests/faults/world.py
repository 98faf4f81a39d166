"""One space with its workers behind wires, and everything in it that a scenario can break and mend."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
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
from pipeline.kafka import deliver, producer
from pipeline.settings import EmbeddingSettings, dist
from pipeline.stores.elasticsearch import connect
from query.embedder import QueryEmbedder
from query.retrieval import Search, open_search
from tests.fakes.openai import FakeOpenAI, Faults
from tests.faults import tally
from tests.faults.elastic import Gate, gated
from tests.faults.story import UNEMBEDDABLE
from tests.faults.wires import Wire, wire_ports, wired
from tests.space import PROJECT, Space
from topics.messages import AnyMessage
from topics.producer import Producer
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, INDEX_BACKFILL, INDEX_LIVE, Topic

WORKERS = ("detect", "vectors", "keywords")
DIMENSIONS = 64
DYING = {"FAULTS_AWAIT": "tests.faults.dies_at_an_await", "FAULTS_SENDS": "tests.faults.dies_after_sending"}
"""The variable that says when, and the program that is killed then."""
LONGEST_COMMAND_SECONDS = 180.0
SESSION_SECONDS = 6.0
"""The least that a broker allows (group.min.session.timeout.ms)."""
READS = {
    "detect": (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL), "vectors": (INDEX_LIVE, INDEX_BACKFILL),
    "keywords": (INDEX_LIVE, INDEX_BACKFILL),
}  # fmt: skip


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
    taken: set[str] = field(default_factory=set)
    """Workers that a fault is at."""
    workers: tuple[str, ...] = WORKERS
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
                "provider": "openai", "base_url": model.url, "dimensions": DIMENSIONS, "chunk_tokens": 80,
                "timeout_seconds": 3.0,
            }  # fmt: skip
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

    @contextmanager
    def taking(self, *names: str) -> Iterator[list[str]]:
        """Those of these workers that run and that no other fault is at; until the end they are the caller's."""
        mine = [name for name in names if name in self.space.processes and name not in self.taken]
        self.taken.update(mine)
        try:
            yield mine
        finally:
            self.taken.difference_update(mine)

    async def start(self, name: str, *, dying: Mapping[str, str] | None = None) -> None:
        """Start a worker, again and again while the world is too broken for it to come up.

        ``dying`` is the environment of one that is meant to die: it may do so before it is ready.
        """
        for _ in range(8):
            with suppress(AssertionError):
                if dying is None:
                    await asyncio.to_thread(self.space.start, name, env=self.environment)
                else:
                    await asyncio.to_thread(
                        self.space.start,
                        name,
                        program=["-m", DYING[next(iter(dying))]],
                        env={**self.environment, **dying},
                    )
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

    async def chunk_table(self) -> str:
        """The active generation's, again until Postgres is there."""
        names: list[str] = []

        async def once() -> None:
            rows = await self.space.query("SELECT chunk_table FROM generations WHERE state = 'active'")
            names.extend(name for (name,) in rows)

        await insist(once)
        return names[-1]

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

    async def operate(self, *arguments: str, kill_after_seconds: float | None = None) -> bool:
        """Run a command of ours through the wires; returns whether it ended well. It may fail, in one clear line: never
        with a traceback."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pipeline.cli.main",
            *arguments,
            env={**self.space.environment, **self.environment},
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
        tally.FAULTS[f"{fate} penstock {arguments[0]}"] += 1
        return process.returncode == 0

    async def finish_rebuild(self) -> None:
        """Whoever killed a rebuild runs it again."""
        rows = await self.space.query(
            "SELECT replaces FROM builds JOIN generations ON name = generation WHERE state = 'building'"
        )
        for (replaces,) in rows:
            assert await self.operate("rebuild", replaces[0], "--yes", "--json"), "a rebuild cannot be finished"

    # Events

    async def publish(self, published: Iterable[tuple[str, AnyMessage]]) -> None:
        """Until Kafka has them, in this order; an event may come twice."""
        for lane, event in published:
            for _ in range(60):
                try:
                    topic = DOCUMENTS_LIVE if lane == "live" else DOCUMENTS_BACKFILL
                    await deliver([self.kafka.send(topic, event)], within_seconds=20)
                    break
                except Retryable:
                    await asyncio.sleep(0.5)
            else:
                raise AssertionError("Kafka does not come back")

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
                ends = await consumer.end_offsets(self._partitions(topics))
                for partition, end in ends.items():
                    at = offsets[partition].offset if partition in offsets else -1
                    if end and at < end:
                        behind.append(f"{stage}: {partition.topic}:{partition.partition} at {at} of {end}")
        finally:
            await consumer.stop()
            await admin.close()
        return behind

    def _partitions(self, topics: Iterable[Topic]) -> list[TopicPartition]:
        prefix = self.space.settings.kafka.topic_prefix
        return [TopicPartition(prefix + topic.name, n) for topic in topics for n in range(topic.partitions)]

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
                left = await self.pending() or await self.committed()
            except (KafkaError, OSError) as error:
                left = [type(error).__name__]

    def signs(self) -> str:
        """What the workers say of themselves, for a failed test."""
        return "\n".join(f"{name}: {self.space.log(name)[-1500:]}" for name in self.space.processes)

    def rescued(self) -> int:
        """Hints that the sweeper has sent again, ever."""
        logs = [path.read_text() for path in self.space.home.glob("detect*.log")]
        lines = (line for log in logs for line in log.splitlines() if '"rescued"' in line)
        return sum(int(json.loads(line)["hints"]) for line in lines)

    def mend(self) -> None:
        """No fault is left but those that a scenario mends itself."""
        for wire in self.wires.values():
            wire.heal()
        self.wires["elasticsearch"].port = urlsplit(self.space.settings.elasticsearch.url).port or 9200
        self.model.faults = mended()


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
