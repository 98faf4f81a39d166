"""One history: the product's stages as processes around in-memory services, played step by step, then calm."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from datetime import datetime, timedelta
from functools import lru_cache
from random import Random
from typing import Any
from uuid import UUID

import numpy as np
import psycopg

from pipeline.core.errors import Retryable
from pipeline.core.model import ChunkParams, Generation
from pipeline.embedding.port import Embedded, OneModel, Vectors
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.detect import Detect
from pipeline.stages.hints import Sweeper
from pipeline.stages.identities import Identities
from pipeline.stages.keywords import CHECK_SECONDS, KeywordSink, LateBulks
from pipeline.stages.keywords import INTERVAL_SECONDS as LATE_INTERVAL_SECONDS
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Incoming, Stage
from pipeline.stages.vectors import VectorSink
from pipeline.stores.keywords import Keywords
from tests.faults.model import Event, outcome
from tests.faults.story import UNEMBEDDABLE
from tests.simulation.changes import NAMES, STAGES, UNDISTURBING, ShortStory, Step, is_connected
from tests.simulation.connectors import BEAT_SECONDS, Connected
from tests.simulation.database import Database, Pool, Transaction
from tests.simulation.faults import Faults
from tests.simulation.kafka import PARTITIONS, SESSION_SECONDS, Broker, Consumer, Producer
from tests.simulation.keyword_store import Elasticsearch, Index
from tests.simulation.recovery import audited, recovered
from tests.simulation.scheduler import SKEW, VirtualLoop
from tests.simulation.statements import GENERATION, find
from tests.simulation.unmeasured import Unmeasured
from topics.codec import BadMessage, decode, encode
from topics.letters import letter_id
from topics.messages import AnyMessage, DocumentUpserted, IdentityChanged
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES, Topic

TENANT, SOURCE = "acme", "wiki"
SWEEP_SECONDS = 20.0
GRACE_SECONDS = 5.0
AGAIN_SECONDS = 30.0
CALM_SECONDS = 4 * 3600.0
"""Longest time to settle after the last fault: what was set aside often is tried again an hour later."""
LOOK_SECONDS = 5.0
MOST_RECORDS = 200
"""The most records of a partition that are searched for lost ones."""
VITALS_SECONDS = 60.0
SKEWS = (0.0, 0.0, -100.0, 100.0)
"""The difference of the clocks of machines that run connectors, in seconds: less than connectors.clock.TOLERANCE."""
SLOW_SECONDS = 0.05
"""An ordinary answer takes up to so long."""

_METRICS: Any = Unmeasured()
_BATCH: ContextVar[Sequence[Incoming]] = ContextVar("batch", default=())


Vectored = Mapping[tuple[UUID, float], str]
"""Rows of the chunk table: (id, when it was written) → the text that its vector is of."""


class Killed(asyncio.CancelledError):
    """The process is dead: no line of it runs any more that reaches anything."""


class Process:
    """One worker process and its tasks."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused_until = 0.0
        self.consumer: Consumer | None = None
        self.pool = Pool(world.database, self, find)
        self.producer = Producer(world.broker, self)
        self.looked: dict[asyncio.Task[Any] | None, Vectored] = {}
        """Task → the rows whose vectors it could have read when it last looked for texts."""
        self.skew = timedelta(0)
        """How much its machine's clock is ahead."""
        self._tasks: list[asyncio.Task[Any]] = []
        self._rng = Random(world.rng.getrandbits(32))

    def start(self, *coroutines: Any) -> None:
        context = copy_context()
        context.run(SKEW.set, self.skew)
        self._tasks = [asyncio.create_task(coroutine, context=context) for coroutine in coroutines]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """A task that ends while its process lives is a fault of the product (or of the simulation)."""
        if self.alive and not task.cancelled() and (error := task.exception()) is not None:
            self.world.broken = error

    def kill(self) -> None:
        """As SIGKILL does: the server sees the connections close, Kafka misses the heartbeats after a while."""
        self.alive = False
        self.pool.cut()
        for task in self._tasks:
            task.cancel()
        if self.consumer is not None:
            for task in self.consumer.lanes._tasks:
                task.cancel()
            self.leaves_in(SESSION_SECONDS)

    def leaves_in(self, seconds: float) -> None:
        consumer = self.consumer
        if consumer is not None:
            asyncio.get_running_loop().call_later(seconds, lambda: self.silent() and consumer.group.leave(consumer))

    def pause(self, seconds: float) -> None:
        """As SIGSTOP does; Kafka misses the heartbeats."""
        self.paused_until = self.world.loop.time() + seconds
        if seconds > SESSION_SECONDS:
            self.leaves_in(SESSION_SECONDS)

    def silent(self) -> bool:
        return not self.alive or self.paused_until > self.world.loop.time()

    async def alive_and_awake(self) -> None:
        """Go on only while the process lives and is not paused."""
        while self.alive and (wait := self.paused_until - self.world.loop.time()) > 0:
            await asyncio.sleep(wait)
        if not self.alive:
            raise Killed

    async def reach(self, service: str, doing: str) -> None:
        """Take the time of a request to a service; raises its error when it cannot be reached."""
        world = self.world
        faults = world.faults
        if not self.alive:
            raise Killed
        if self._rng.random() < world.busy:
            await asyncio.sleep(self._rng.random() * SLOW_SECONDS)
        if faults.rates and not faults.calm:
            if slow := faults.delay("a slow step"):
                await asyncio.sleep(slow)
            if (point := _point(service, doing)) is not None and (pause := faults.pause(point)):
                self.pause(pause)
            if self.name == "connectors" and (place := _place(service, doing)) is not None:
                self._struck(place)
        if self.paused_until or not self.alive:
            await self.alive_and_awake()
        if doing.startswith("SELECT wanted.n"):
            self.looked[asyncio.current_task()] = world.standing()
        elif doing.startswith("SELECT id, embedding::real[]"):
            seen, now = self.looked[asyncio.current_task()], world.standing()
            lost = {text for row, text in seen.items() if row not in now}
            self.looked[asyncio.current_task()] = {row: text for row, text in seen.items() if text not in lost}
        if world.down.get(service, 0.0) > world.loop.time() or faults.happens(f"{service} refuses"):
            raise _refusal(service)

    def _struck(self, place: str) -> None:
        """A runner is killed just here, or loses its lease and stands still while another one takes over; the source
        may change back meanwhile."""
        world = self.world
        assert world.connected is not None
        if world.faults.happens(f"killed {place}"):
            self.kill()
            seconds = world.faults.rng.uniform(0.1, 20.0)
            world.loop.call_later(seconds, world.launch, self.name)
        elif world.faults.happens(f"taken over {place}"):
            seconds = world.faults.rng.uniform(0.5, 4.0) * BEAT_SECONDS
            self.pool.end_sessions()
            self.pause(seconds)
            if sum(process.alive for process in world.processes[self.name]) < 2:
                world.launch(self.name)
        else:
            return
        world.connected.changes_meanwhile(seconds)

    async def answered(self, _service: str, _doing: str) -> None:
        """Fail a commit after it was done, so that its response is lost."""
        if self.alive and self.world.faults.happens("a commit's answer is lost"):
            raise _refusal("postgres")


_POINTS = (
    ("postgres", "INSERT INTO documents (id", "a pause after the first look"),
    ("postgres", "SELECT content_hash, media_type, title FROM documents", "a pause after cutting"),
    ("kafka", "produce", "a pause before Kafka"),
    ("embedding", "embed", "a pause before embedding"),
    ("postgres", "FOR UPDATE OF s", "a pause before the locks"),
    ("elasticsearch", "bulk", "a pause before the bulk"),
    ("elasticsearch", "refresh", "a pause after the bulk"),
    ("postgres", "SET announced_seq", "a pause after an announcement"),
    ("postgres", "FROM connector_items WHERE tenant = %s AND source = %s AND external_id =", "a pause after asking"),
    (
        "postgres",
        "INSERT INTO connector_items AS mine (tenant, source, scope, external_id, version, f",
        "a pause before saving",
    ),
    ("postgres", "UPDATE connector_principals SET digest = %s", "a pause before saving"),
)
"""Where a process may stand still: (service, part of the request before which, fault)."""


_PLACES = (
    (
        "postgres",
        "INSERT INTO connector_items (tenant, source, scope, external_id, version, in_doubt",
        "before the intent",
    ),
    ("postgres", "INSERT INTO connector_principals", "before the intent"),
    ("kafka", "produce", "before sending"),
    (
        "postgres",
        "INSERT INTO connector_items AS mine (tenant, source, scope, external_id, version, f",
        "before saving",
    ),
    ("postgres", "UPDATE connector_principals SET digest = %s", "before saving"),
)
"""Where a runner may be cut off: (service, part of the request before which, words for it)."""


@lru_cache(1_000)
def _place(service: str, doing: str) -> str | None:
    flat = " ".join(doing.split())
    return next((place for of, part, place in _PLACES if of == service and part in flat), None)


@lru_cache(1_000)
def _point(service: str, doing: str) -> str | None:
    flat = " ".join(doing.split())
    return next((fault for of, part, fault in _POINTS if of == service and part in flat), None)


def _refusal(service: str) -> Exception:
    if service == "postgres":
        return psycopg.OperationalError("the connection is lost")
    if service == "embedding":
        return Retryable("the model is away", service="embedding")
    return ConnectionError(f"{service} is away")


class WordsEmbedder:
    """Vectors that depend on the text alone; refuses one word for ever."""

    model, revision, dimensions, input_window = "words", "1", 4, 512
    document_prefix = query_prefix = ""

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        refused = {n: "refused" for n, text in enumerate(texts) if text.endswith(UNEMBEDDABLE)}
        return Embedded(np.array([vector(text) for text in texts], dtype=np.float32), refused)


class Embedder(WordsEmbedder):
    """A process's model: it may fail, and notes what it was asked needlessly: a text whose vector the task could have
    read from the table, where it still stands.

    Two lanes, or two workers, may embed one text while neither has committed its vector: to prevent that, one would
    have to wait for the other one's model. A text is also embedded again if one of several rows that have it is deleted
    between the statement that chooses one of them and the one that reads its vector: reading those of all rows would
    cost every look more than this rare embedding.
    """

    def __init__(self, process: Process) -> None:
        self._process = process

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        process, world = self._process, self._process.world
        seen = process.looked.get(asyncio.current_task(), world.standing())
        await process.reach("embedding", "embed")
        if world.faults.happens("the model fails"):
            raise _refusal("embedding")
        now = world.standing()
        still = {text for row, text in seen.items() if row in now}
        world.needless += [text for text in texts if text in still]
        world.tally["texts embedded"] += len(texts)
        return await super().embed_documents(texts)


def vector(text: str) -> Vectors:
    """Return the vector of the model for a text."""
    seed = sum(ord(char) * (n + 1) for n, char in enumerate(text))
    return np.array([seed % 7, seed % 11, seed % 13, seed % 17], dtype=np.float32) / 16.0


class _Noted:
    """A stage that says which records are being handled."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    async def handle(self, batch: Sequence[Incoming]) -> None:
        token = _BATCH.set(batch)
        try:
            await self._stage.handle(batch)
        finally:
            _BATCH.reset(token)


class World:
    """Services, processes and what has happened so far. Raises AssertionError when a law is broken."""

    def __init__(self, loop: VirtualLoop, seed: int, without: Collection[str] = ()) -> None:
        from tests.simulation.oracle import Oracle

        self.loop = loop
        self.rng = Random(seed)
        self.faults = Faults.drawn(self.rng, loop.time, without, connected=is_connected(seed))
        self.busy = self.rng.choice((0.1, 0.3, 0.6))
        """The share of requests that take time: between the others nothing else can happen."""
        self.lanes = 3 if seed % 5 < 2 else 1
        """Live lanes of a worker, and as many of backfill. With one its batches are larger, which some defects need."""
        self.metrics = _METRICS
        self.database = Database(loop.now)
        self.broker = Broker(loop.now)
        self.index = Index()
        self.last_late = 0.0
        """When the last of the late bulks lands."""
        self.checked_until = 0.0
        self.again_at = 0.0
        """When what Kafka has lost is published again."""
        self._recovery: asyncio.Task[None] | None = None
        """The recovery of a ledger that lost its tail."""
        self._since: datetime | None = None
        """The end of what was left of it."""
        self._stopped: set[str] = set()
        """Stages that must not run until the offsets are back."""
        self._held: list[str] = []
        """Stages of the processes that start then."""
        self.down: dict[str, float] = {}
        """Service → until when."""
        self.tally: Counter[str] = Counter()
        self.broken: BaseException | None = None
        """A process ended by itself."""
        self.unreadable: list[str] = []
        """Ids of the dead letters that there must be."""
        self.rescued = self.metrics.rescued.count
        """Hints that sweepers sent again, before this history."""
        self.needless: list[str] = []
        """Texts that were embedded although their vector stood in the table before."""
        self.story = ShortStory(TENANT, list(NAMES), loop.now() - timedelta(hours=1), source=SOURCE)
        self._observes_now = Random(f"clock {seed}").random() < 0.5
        """Changes are observed when they happen, and not all an hour ago in steps of a millisecond and ties."""
        self.memberships: list[IdentityChanged] = []
        self.published: list[tuple[Topic, AnyMessage]] = []
        """By whoever publishes without a connector, in their order."""
        self.accepted: list[tuple[int, Event | IdentityChanged]] = []
        """(number of commits before, event): what Postgres has committed."""
        self._loses_records = False
        """Whether Kafka loses some in this history."""
        self.processes: dict[str, list[Process]] = {}
        self.oracle = Oracle(self)
        self.later: list[Any] = []
        """References to what must not be collected while it waits."""
        self.connected = Connected(self, Random(f"source {seed}")) if is_connected(seed) else None
        """None: changes are published as they come."""
        self.generation = Generation(
            name=GENERATION,
            state="active",
            model="words",
            revision="1",
            dimensions=4,
            input_window=512,
            params=ChunkParams(),
            document_prefix="",
            query_prefix="",
            chunk_table="chunks_g1",
            keyword_index="chunks-g1",
        )
        self.database.on_commit.append(self._committed)
        self._prepare()

    def _prepare(self) -> None:
        g = self.generation
        columns = (
            g.name,
            g.state,
            g.model,
            g.revision,
            g.dimensions,
            g.input_window,
            {},
            "",
            "",
            g.chunk_table,
            g.keyword_index,
            g.vector_type,
            None,
            None,
            g.vectors,
            g.quantisation,
            g.sketched,
            g.centred,
            g.centre,
        )
        self.database.tables["generations"][GENERATION,] = {"columns": columns}

    # Processes

    def launch(self, stage: str) -> None:
        if stage in self._stopped:
            self._held.append(stage)
            return
        process = Process(self, stage)
        self.processes.setdefault(stage, []).append(process)
        if self.connected is not None and stage == "connectors":
            process.skew = timedelta(seconds=self.rng.choice(SKEWS))
            process.start(self.connected.runner(process).run())
            return
        made, others = self.stage(stage, process)
        process.consumer = Consumer(self.broker, process, _Noted(made), guarded=self._loses_records)
        if (guard := process.consumer.guard) is not None:
            others = [*others, guard.run()]
        process.start(process.consumer.run(), process.consumer.lanes.failed(), *others)

    def stage(self, name: str, process: Process) -> tuple[Any, list[Any]]:
        """The product's stage as this process runs it, and what else it runs."""
        pool, metrics = process.pool, self.metrics
        announcer = Announcer(pool, process.producer, metrics)
        dead = DeadLetters(pool, process.producer, metrics, per_minute=10_000, clock=self.loop.time)
        chunker = Chunker(self._counter)
        match name:
            case "detect":
                sweeper = Sweeper(
                    pool,
                    process.producer,
                    announcer,
                    metrics,
                    interval_seconds=SWEEP_SECONDS,
                    again_in_seconds=AGAIN_SECONDS,
                )
                detect = Detect(
                    pool,
                    process.producer,
                    dead,
                    announcer,
                    self._counter,
                    metrics,
                    batch_size=8,
                    grace_seconds=GRACE_SECONDS,
                )
                return detect, [sweeper.run()]
            case "vectors":
                models = OneModel(Embedder(process))
                sink = VectorSink(
                    pool, models, self._generations, chunker, announcer, process.producer, dead, metrics, batch_size=8
                )
                return sink, []
            case "keywords":
                keywords = Keywords(Elasticsearch(process))
                late = LateBulks(pool, keywords, metrics)
                sink = KeywordSink(pool, keywords, self._generations, chunker, announcer, dead, metrics, batch_size=8)
                return sink, [late.run()]
            case _:
                return Identities(pool, dead), []

    async def _generations(self) -> Mapping[str, Generation]:
        return {GENERATION: self.generation}

    @staticmethod
    def _counter(_generation: Generation) -> Any:
        return lambda texts: [1 for _ in texts]

    def _committed(self, transaction: Transaction) -> None:
        tables = {table for table, _ in transaction.writes}
        for record in _BATCH.get():
            kind = "memberships" if record.topic == IDENTITIES.name else "document_bodies"
            if record.topic.startswith("documents.") or kind == "memberships":
                if not tables & {"documents", "memberships"}:
                    return
                with suppress(BadMessage):
                    self.accepted.append((len(self.database.commits), decode(record.value, record.headers)))

    # The history

    async def play(self, steps: Sequence[Step]) -> None:
        """The steps with their faults, then calm, then the oracle."""
        self._loses_records = any(step.kind in ("lost records", "topic made anew") for step in steps)
        if self.connected is not None and (self._loses_records or any(step.kind == "lost tail" for step in steps)):
            self.connected.alone = False
        for stage in STAGES if self.connected is None else (*STAGES, "connectors"):
            for _ in range(self.rng.choice((1, 1, 2))):
                self.launch(stage)
        if self.connected is not None:
            self.later.append(asyncio.create_task(self._vitals()))
        for step in steps:
            if (wait := step.at - self.loop.time()) > 0:
                await asyncio.sleep(wait)
            self.tally[step.kind] += 1
            getattr(self, "_" + step.kind.replace(" ", "_"))(*step.args)
        await self._calm()
        undisturbed = not self.faults.rates and all(step.kind in UNDISTURBING for step in steps)
        self.oracle.finally_equal(undisturbed=undisturbed)

    async def _calm(self) -> None:
        self.faults.calm = True
        self.down.clear()
        for processes in self.processes.values():
            for process in processes:
                process.paused_until = 0.0
            if not any(process.alive for process in processes) and processes[0].name not in self._held:
                self.launch(processes[0].name)
        until = self.loop.time() + CALM_SECONDS
        if self.connected is not None:
            self.connected.calm()
        if self.last_late:  # the latest bulk has landed and was looked for once more
            self.checked_until = max(self.loop.time(), self.last_late) + CHECK_SECONDS + 2 * LATE_INTERVAL_SECONDS
        await self._wait(until)
        if self._recovery is not None and self.last_late:  # the ledger has lost its record of a late bulk
            await audited(Process(self, "background audit"))
            await self._wait(until)

    async def _wait(self, until: float) -> None:
        while not self._settled():
            assert self.loop.time() < until, (
                f"STUCK {CALM_SECONDS / 3600:.0f} hours after the last fault: {self._open()}"
            )
            if self.connected is not None:
                self.connected.look()
            await asyncio.sleep(LOOK_SECONDS)
            if self.broken is not None:
                raise self.broken
            fault = self.connected.fault() if self.connected is not None else None
            assert fault is None, f"BROKEN: {fault}"
            overclaim = self.connected.claims.overclaim if self.connected is not None else None
            assert overclaim is None, overclaim

    def _settled(self) -> bool:
        if self.loop.time() < max(self.checked_until, self.again_at) or not self.broker.drained():
            return False
        if self._recovery is not None and not self._recovery.done():
            return False
        if self.connected is not None and not self.connected.settled():
            return False
        tables = self.database.tables
        return all(row["seq"] >= row["want_seq"] for row in tables["index_state"].values()) and all(
            row["announced_seq"] >= row["seq"] for row in tables["documents"].values()
        )

    def _open(self) -> str:
        """Return what is not settled yet."""
        tables = self.database.tables
        pending = {
            (k[2], str(k[0])[:4], r["seq"], r["want_seq"], r["attempts"], r["error"])
            for k, r in tables["index_state"].items()
            if r["seq"] < r["want_seq"]
        }
        silent = {str(k[0])[:4] for k, r in tables["documents"].items() if r["announced_seq"] < r["seq"]}
        behind = {
            (place, name, group.committed.get(place, 0), len(log))
            for name, group in self.broker.groups.items()
            for place, log in self.broker.logs.items()
            if place[0] in group.topics and group.committed.get(place, 0) < len(log)
        }
        recovering = self._recovery is not None and not self._recovery.done()
        source = self.connected.open() if self.connected is not None else ""
        return f"recovering {recovering}, pending {pending}, unannounced {silent}, unread {behind} {source}"

    def expected(self, name: str) -> DocumentUpserted | None:
        """Return the document that must be shown in the end; None if it must not be shown."""
        return outcome(self.story.events[name]) if self.connected is None else self.connected.expected(name)

    async def _vitals(self) -> None:
        """Record up to which moment everything that was sent has been handled, as pipeline.diagnosis.vitals does."""
        while True:
            for stage in ("detect", "identities"):
                group = self.broker.groups[stage]
                waiting = [
                    times[done]
                    for place, times in self.broker.sent(group.topics).items()
                    if (done := group.committed.get(place, 0)) < len(times)
                ]
                self.database.tables["handled"][stage,] = {"until": min(waiting, default=self.loop.now())}
            await asyncio.sleep(VITALS_SECONDS)

    def standing(self) -> Vectored:
        """Return the rows of the chunk table that are committed."""
        embedded = self.oracle.embedded
        return {(id_, row["stood"]): embedded[id_] for (id_,), row in self.database.tables["chunks"].items()}

    # Steps

    def _change(self, kind: str, name: str, n: int) -> None:
        if self._observes_now:
            self.story.wait_until(self.loop.now() - timedelta(seconds=1))
        for lane, event in self.story.change(kind, name, Random(n)):
            self.oracle.published(event)
            self._publish(DOCUMENTS_LIVE if lane == "live" else DOCUMENTS_BACKFILL, event)

    def _publish(self, topic: Topic, message: AnyMessage) -> None:
        record = encode(message)
        if self._loses_records:
            self.published.append((topic, message))
        self.broker.append(topic.name, record.key, record.value, record.headers)

    def _broken(self, name: str) -> None:
        stored = self.broker.append(DOCUMENTS_LIVE.name, f"{TENANT}/{SOURCE}/{name}".encode(), b"{", [])
        self.unreadable.append(letter_id(DOCUMENTS_LIVE.name, stored.partition, stored.offset))

    def _membership(self, person: str, groups: tuple[str, ...]) -> None:
        event = IdentityChanged(
            tenant=TENANT, source=SOURCE, principal=person, groups=list(groups), observed_at=self.loop.now()
        )
        self.memberships.append(event)
        self._publish(IDENTITIES, event)

    def _source(self, kind: str, name: str, n: int) -> None:
        assert self.connected is not None
        if self._observes_now:
            self.story.wait_until(self.loop.now() - timedelta(seconds=1))
        self.connected.change(kind, name, n)

    def _groups(self, tag: str, members: tuple[str, ...], of: tuple[str, ...]) -> None:
        assert self.connected is not None
        self.connected.regroup(tag, members, of)

    def _expired(self) -> None:
        assert self.connected is not None
        self.connected.expire()

    def _lease_lost(self) -> None:
        """The server, or something on the way to it, ends the sessions that hold leases; nobody is told."""
        for process in self.processes["connectors"]:
            process.pool.end_sessions()

    def _query(self, person: str, tag: str) -> None:
        self.oracle.query(person, tag)

    def _kill(self, stage: str, n: int, restart_in: float) -> None:
        alive = [p for p in self.processes[stage] if p.alive]
        if alive:
            alive[n % len(alive)].kill()
            self.loop.call_later(restart_in, self.launch, stage)

    def _pause(self, stage: str, n: int, seconds: float) -> None:
        alive = [p for p in self.processes[stage] if p.alive]
        if alive:
            alive[n % len(alive)].pause(seconds)

    def _outage(self, service: str, seconds: float) -> None:
        self.down[service] = self.loop.time() + seconds

    def _join(self, stage: str) -> None:
        self.launch(stage)

    def _rewind(self, stage: str) -> None:
        """An operator resets the group's offsets: everything is read again."""
        self.broker.groups[stage].rewind()

    def _lost_records(self, topic: str, partition: int, count: int) -> None:
        """A broker comes back without the newest records of a partition, although it had acknowledged them."""
        place = topic, partition
        left, before = self.broker.lose(place, count), self.broker.logs[place]
        assert len(before) == left
        self._not_there(topic, lambda n, offset: n == partition and offset >= left)

    def _topic_made_anew(self, topic: str, forgets_offsets: bool) -> None:
        self.broker.make_anew(topic, forgets_offsets=forgets_offsets)
        self._not_there(topic, lambda _n, _offset: True)

    def _not_there(self, topic: str, lost: Callable[[int, int], bool]) -> None:
        """Let the producers publish everything again, as they do when records are lost. A record that nobody can read
        is lost for good."""
        gone = {letter_id(topic, n, i) for n in range(PARTITIONS) for i in range(MOST_RECORDS) if lost(n, i)}
        self.unreadable = [id_ for id_ in self.unreadable if id_ not in gone]
        again, self.published = self.published, []
        self.again_at = self.loop.time() + AGAIN_SECONDS

        def publish() -> None:
            for of, message in again:
                self._publish(of, message)

        self.loop.call_at(self.again_at, publish)

    def _lost_tail(self, commits: int) -> None:
        """Postgres fails over to a standby that lagged; workers stop, and an operator runs recover."""
        for processes in self.processes.values():
            self._held += [process.name for process in processes if process.alive]
            for process in processes:
                if process.alive:
                    process.kill()
        database = self.database
        database.lose_tail(commits)
        left = len(database.commits)
        self.accepted = [(n, event) for n, event in self.accepted if n <= left]
        since = database.commits[-1][0] if database.commits else self.loop.now()
        self._since = since if self._since is None else min(since, self._since)
        if self._recovery is not None:
            self._recovery.cancel()
        self._stopped = set(self.processes)
        self._recovery = asyncio.create_task(recovered(Process(self, "operator"), self._since, self._stop))

    def _stop(self) -> Callable[[], None]:
        """Stop the workers that write the ledger; returns what starts them, and all that were to start meanwhile."""
        for stage in ("detect", "identities"):
            self._stopped.add(stage)
            for process in self.processes[stage]:
                if process.alive:
                    self._held.append(stage)
                    process.kill()
                    process.leaves_in(0.0)

        def start() -> None:
            self._stopped.clear()
            held, self._held = self._held, []
            for stage in held:
                self.launch(stage)

        return start
