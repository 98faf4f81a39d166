"""A space with its workers behind proxies, and everything in it that a scenario can break and restore."""

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
from pipeline.kafka.stopping import stop_consumer
from pipeline.runtime.settings import EmbeddingSettings, dist
from pipeline.stores.elasticsearch import connect
from query.embedding.embedders import QueryEmbedder
from query.retrieval.search import Search, open_search
from tests.fakes.openai import FakeOpenAI, Faults
from tests.faults import tally
from tests.faults.elasticsearch_proxy import ElasticsearchProxy, elasticsearch_proxy
from tests.faults.model import Event
from tests.faults.story import UNEMBEDDABLE
from tests.faults.tcp_proxy import TcpProxy, proxy_ports, tcp_proxy
from tests.support.deploy.wheels import copy_tree, next_version
from tests.support.space import PROJECT, Space
from topics.codec import decode
from topics.messages import AnyMessage
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, INDEX_BACKFILL, INDEX_LIVE

WORKERS = ("detect", "vectors", "keywords")
DIMENSIONS = 64
PENSTOCK = ("-m", "cli.main")
KILLED_PROGRAMS = {
    "FAULTS_AWAIT": "tests.faults.killed_at_an_await",
    "FAULTS_SENDS": "tests.faults.killed_after_sending",
}
"""The program that kills itself, by the environment variable that says when."""
BUILD = ("generation", "build", "--wait", "--yes", "--json")
CUT_OVER = ("generation", "cutover", "--no-evaluation", "--json")
LONGEST_COMMAND_SECONDS = 180.0
SESSION_SECONDS = 6.0
"""The shortest session that a broker allows (group.min.session.timeout.ms)."""
READS = {
    "detect": (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL),
    "vectors": (INDEX_LIVE, INDEX_BACKFILL),
    "keywords": (INDEX_LIVE, INDEX_BACKFILL),
}


@dataclass
class World:
    stack: Stack
    space: Space
    proxies: dict[str, TcpProxy]
    es_proxy: ElasticsearchProxy
    model: FakeOpenAI
    search: Search
    kafka: Producer
    environment: dict[str, str]
    server_locks: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    worker_locks: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """By worker: held by the fault that stops and starts it."""
    workers: tuple[str, ...] = WORKERS
    published: list[tuple[str, AnyMessage]] = field(default_factory=list)
    """The events since the last ``wait_until_settled``, with their lanes: what a topic that loses records may have
    lost."""
    next_version: NextVersion = field(default_factory=lambda: NextVersion())
    connectors_ahead_seconds: float = 0.0
    """How far the connectors' clock was ever set forward: their stamps may be that far in the future."""
    _helpers: int = 1
    during_outage: Callable[[], Awaitable[None]] | None = None
    """Called while no process publishes the sources: between the kill of one and the start of the next."""

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
            model = FakeOpenAI(dimensions=DIMENSIONS, faults=no_faults())
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
            proxies = {
                "postgres": await resources.enter_async_context(tcp_proxy("127.0.0.1", int(dsn["port"] or 5432))),
                "elasticsearch": await resources.enter_async_context(tcp_proxy("127.0.0.1", elastic.port or 9200)),
                "embedding": await resources.enter_async_context(tcp_proxy("127.0.0.1", urlsplit(model.url).port or 0)),
            }
            es_proxy = await resources.enter_async_context(elasticsearch_proxy(space.settings.elasticsearch.url))
            chosen = EmbeddingSettings(**settings)  # type: ignore[arg-type]
            query_embedder = QueryEmbedder(lambda: embedder(chosen, dist() / "models"))
            search = await resources.enter_async_context(open_search(space.settings, query_embedder))
            kafka = await resources.enter_async_context(producer(space.settings.kafka))
            through = {**dsn, "host": "127.0.0.1", "port": proxies["postgres"].listening}
            environment = {
                "PENSTOCK_POSTGRES_DSN": make_conninfo(**through),  # type: ignore[arg-type]
                "PENSTOCK_ELASTICSEARCH_URL": f"http://127.0.0.1:{proxies['elasticsearch'].listening}",
                "PENSTOCK_ELASTICSEARCH_REQUEST_TIMEOUT_SECONDS": "5",
                "PENSTOCK_EMBEDDING_BASE_URL": f"http://127.0.0.1:{proxies['embedding'].listening}/v1",
                "PENSTOCK_STREAM_SESSION_TIMEOUT_SECONDS": str(SESSION_SECONDS),
                "PENSTOCK_STREAM_SWEEP_AFTER_SECONDS": str(sweep_after_seconds),
                **(more_environment or {}),
            }
            if (ports := proxy_ports(stack)) is not None:
                broker, advertised = ports
                proxies["kafka"] = await resources.enter_async_context(
                    tcp_proxy("127.0.0.1", broker, listening=advertised)
                )
                environment["PENSTOCK_KAFKA_BOOTSTRAP"] = f"127.0.0.1:{advertised}"
            world = cls(stack, space, proxies, es_proxy, model, search, kafka, environment, workers=workers)
            await asyncio.gather(*(world.start(name) for name in workers))
            yield world
            for name in tuple(space.processes):
                await world.end(name, signal.SIGKILL)

    # Workers

    @asynccontextmanager
    async def reserve_workers(self, *names: str) -> AsyncIterator[list[str]]:
        """Wait until no other fault uses these workers, reserve them for the caller, and yield those that run."""
        async with AsyncExitStack() as held:
            for name in sorted(names):
                await held.enter_async_context(self.worker_locks[name])
            yield [name for name in names if name in self.space.processes]

    async def start(
        self,
        name: str,
        *,
        kill_environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PENSTOCK,
        more_environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a worker; try again while other faults prevent it from starting.

        kill_environment: the environment of a worker that kills itself, which may happen before it is ready.
        """
        if kill_environment is not None:
            program = ["-m", KILLED_PROGRAMS[next(iter(kill_environment))]]
        environment = {**self.environment, **(kill_environment or {}), **(more_environment or {})}
        for _ in range(8):
            with suppress(AssertionError):
                await asyncio.to_thread(self.space.start, name, program=program, env=environment)
                return
            process = self.space.processes.pop(name)
            process.kill()
            process.wait(30)
            if kill_environment is not None:
                tally.FAULTS["kill of a worker that had just started"] += 1
                return
            await asyncio.sleep(1)
        raise AssertionError(f"{name} does not start:\n{self.space.log(name)[-3000:]}")

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

    async def restart_workers(self) -> None:
        """Start every worker that does not run, and stop additional ones."""
        for name, process in tuple(self.space.processes.items()):
            if process.poll() is not None:
                del self.space.processes[name]
                tally.DONE["workers that gave up and were started anew"] += 1
            elif name not in self.workers:
                await self.end(name, signal.SIGTERM)
        await asyncio.gather(*(self.start(name) for name in self.workers if name not in self.space.processes))

    async def execute(self, *statements: str) -> None:
        """Execute statements; try again while another fault makes Postgres unavailable."""

        async def once() -> None:
            dsn = self.space.settings.postgres.dsn.get_secret_value()
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                for statement in statements:
                    await connection.execute(statement.encode())

        await retry_while_unavailable(once)

    async def fetch_value(self, statement: str) -> Any:
        """Return the single value of a query; try again while Postgres is unavailable."""
        values: list[Any] = []

        async def once() -> None:
            [(value,)] = await self.space.query(statement)
            values.append(value)

        await retry_while_unavailable(once)
        return values[-1]

    async def chunk_table(self) -> str:
        return str(await self.fetch_value("SELECT chunk_table FROM generations WHERE state = 'active'"))

    async def chunk_tokens(self) -> int:
        return int(await self.fetch_value("SELECT params ->> 'target' FROM generations WHERE state = 'active'"))

    async def database(self) -> str:
        return str(await self.fetch_value("SELECT current_database()"))

    def helper(self, stage: str) -> str:
        """Return a name for an additional worker of a stage."""
        self._helpers += 1
        return f"{stage}#{self._helpers}"

    async def set_index(self, settings: dict[str, object]) -> None:
        """Change the settings of every index; try again while Elasticsearch is unavailable."""
        indexes = f"{self.space.settings.elasticsearch.index_prefix}chunks-*"

        async def once() -> None:
            async with connect(self.space.settings.elasticsearch) as es:
                await es.indices.put_settings(index=indexes, settings=settings)

        await retry_while_unavailable(once)

    def server_processes(self, name: str) -> list[psutil.Process]:
        """Return all processes of a server of the stack, the parents first."""
        parents = self.stack._server_processes(name)
        return [*parents, *(child for parent in parents for child in parent.children(recursive=True))]

    async def run_command(
        self, *arguments: str, kill_after_seconds: float | None = None, tree: Path | None = None
    ) -> bool:
        """Run a penstock command through the proxies; returns whether it succeeded. It may fail, but never with a
        traceback. tree: the folder of another version."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cli.main",
            *arguments,
            env={**self.space.environment, **self.environment, **(tree_environment(tree) if tree else {})},
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
        """Run rebuilds and builds of a generation again that were killed."""
        rows = await self.space.query(
            "SELECT replaces, params ->> 'target' FROM builds JOIN generations ON name = generation"
            " WHERE state = 'building'"
        )
        for replaces, target in rows:
            if len(replaces) == 1:
                done = await self.run_command("rebuild", replaces[0], "--yes", "--json")
            else:
                done = await self.run_command(*BUILD, "--chunk-tokens", target) and await self.run_command(*CUT_OVER)
            assert done, "the build cannot be finished"

    # Events

    async def publish(self, published: Iterable[tuple[str, AnyMessage]]) -> None:
        """Publish events in this order, each until Kafka acknowledges it; an event may be stored twice."""
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
        """Publish everything again, as a producer does after Kafka has lost records."""
        again, self.published = self.published, []
        await self.publish(again)

    async def document_events(self) -> dict[str, list[Event]]:
        """Return all events that Kafka has, by ``source/external_id`` of their document."""
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
            await stop_consumer(consumer)
        return events

    async def uncommitted_partitions(self) -> list[str]:
        """Return one line for each partition whose committed offset is not its end."""
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
            await stop_consumer(consumer)
            await admin.close()
        return behind

    async def pending_documents(self) -> list[str]:
        rows = await self.space.query(
            "SELECT d.external_id, s.generation, s.store, s.attempts, s.error FROM index_state s"
            " JOIN documents d ON d.id = s.document_id"
            " JOIN generations g ON g.name = s.generation AND g.state <> 'retired' WHERE s.seq < s.want_seq"
        )
        return [
            f"{name} in {store} of {generation} ({attempts} attempts, {error})"
            for name, generation, store, attempts, error in rows
        ]

    async def wait_until_settled(self, within_seconds: float) -> None:
        """Wait until all offsets are committed and no document is pending. Raises AssertionError on timeout."""
        deadline = asyncio.get_running_loop().time() + within_seconds
        left = ["nothing was read yet"]
        while left:
            assert asyncio.get_running_loop().time() < deadline, f"did not settle: {left[:5]}\n{self.worker_logs()}"
            await asyncio.sleep(0.3)
            try:
                left = (
                    await self.uncommitted_partitions() or await self.pending_documents()
                )  # in this order: what is accepted is pending
            except (KafkaError, OSError) as error:
                left = [type(error).__name__]
        self.published.clear()

    def worker_logs(self) -> str:
        """Return the ends of the workers' logs, for a failed test."""
        return "\n".join(f"{name}: {self.space.log(name)[-1500:]}" for name in self.space.processes)

    def rescued_hints(self) -> int:
        """Return how many hints the sweeper has sent again since the start."""
        return sum(int(event["hints"]) for event in self._logged("hints_rescued", "detect*.log"))

    def partitions_lost(self) -> int:
        """Return how many partitions workers had to give back since the start. Where no test disturbs them, the machine
        stalled for longer than a consumer's session, and so for as long as the sweeper waits for a hint."""
        return sum(int(event["count"]) for event in self._logged("partitions_revoked", "*.log"))

    def _logged(self, event: str, files: str) -> Iterator[dict[str, Any]]:
        for path in self.space.home.glob(files):
            for line in path.read_text().splitlines():
                if f'"{event}"' in line:
                    yield json.loads(line)

    def clear_faults(self) -> None:
        """End all faults of the proxies and of the model."""
        for proxy in self.proxies.values():
            proxy.clear_faults()
        self.proxies["elasticsearch"].port = urlsplit(self.space.settings.elasticsearch.url).port or 9200
        self.model.faults = no_faults()


class NextVersion:
    """A copy of the product as its next version, made as in tests/e2e/test_upgrade.py."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._copied = False
        self._making = asyncio.Lock()

    async def environment(self, world: World) -> dict[str, str]:
        """Migrate the database, and return the environment of a process of the next version; empty if the migration
        failed."""
        async with self._making:
            if self._path is None:
                path = world.space.home / "next"
                if not self._copied:
                    await asyncio.to_thread(copy_tree, path, next_version)
                    self._copied = True
                if await world.run_command("migrate", tree=path):
                    self._path = path
        return tree_environment(self._path) if self._path is not None else {}


def tree_environment(tree: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "PENSTOCK_DIST": str(dist())}


async def retry_while_unavailable(action: Callable[[], Awaitable[None]]) -> None:
    """Call ``action``; try again for a minute while the server that it needs is unavailable. Raises its last error."""
    for left in reversed(range(120)):
        try:
            await action()
            return
        except (psycopg.OperationalError, TransportError, ApiError):
            if not left:
                raise
            await asyncio.sleep(0.5)


def no_faults() -> Faults:
    return Faults(poison=UNEMBEDDABLE)
