"""The models of Postgres and Elasticsearch against the real servers, statement by statement and bulk by bulk."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, cast

import pytest
from psycopg import AsyncConnection

import connectors.runner.state as lease
from connectors.clock import Clock
from connectors.runner.crawl import Crawl
from connectors.runner.identities import Identities as Memberships
from connectors.runner.publish import Publisher
from connectors.runner.reconcile import Reconcile
from connectors.runner.rows import Holder, LeaseLost, Rows
from connectors.runner.state import State
from connectors.runner.sweep import Sweep
from connectors.set_aside import SetAside
from deploy.local.stack import Stack
from pipeline.core.errors import Retryable
from pipeline.core.identity import document_id
from pipeline.core.kafka_log import Mark, Witness
from pipeline.embedding.port import OneModel
from pipeline.ledger import generations, kafka_marks
from pipeline.maintenance.recover import republish
from pipeline.observability.metrics import Metrics
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.detect import Detect
from pipeline.stages.hints import Sweeper
from pipeline.stages.identities import Identities
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Incoming
from pipeline.stages.vectors import VectorSink
from pipeline.stores.keywords import Keywords
from query.access.callers import identify
from query.access.verify import verify
from tests.faults.story import KINDS, NEEDED, TAGS
from tests.faults.worker_harness import Outbox
from tests.simulation.changes import NAMES, PERSONS, SOURCE_KINDS, ShortStory, cut
from tests.simulation.connectors import Service, VirtualSource
from tests.simulation.database import Database, Nobody
from tests.simulation.keyword_store import Index
from tests.simulation.oracle import Candidate
from tests.simulation.twin import STORY_BEGINS, TwinElasticsearch, TwinPool, TwinSession
from tests.simulation.world import SOURCE, TENANT, WordsEmbedder
from tests.support.query.library import Library
from topics.codec import encode
from topics.messages import AnyMessage, IdentityChanged

ROUNDS = 300
CONNECTED_ROUNDS = 150


class Twins:
    """The product's stages over both, and a source of random events for them."""

    def __init__(self, library: Library, rng: Random) -> None:
        self.rng = rng
        self.model, self.index = Database(lambda: datetime.now(UTC)), Index()
        self.pool: Any = TwinPool(library.pool, self.model, self._maybe_accept)
        self.es = TwinElasticsearch(library.es, self.index, asyncio.get_running_loop().time)
        self.generation = library.generation
        metrics, outbox = Metrics(), Outbox()
        announcer = Announcer(self.pool, outbox, metrics)
        dead = DeadLetters(self.pool, outbox, metrics)
        chunker = Chunker(self._counter)
        self.detect = Detect(
            self.pool, outbox, dead, announcer, self._counter, metrics, batch_size=8, grace_seconds=0.0
        )
        self.identities = Identities(self.pool, dead)
        self.vectors = VectorSink(
            self.pool,
            OneModel(WordsEmbedder()),
            self._generations,
            chunker,
            announcer,
            outbox,
            dead,
            metrics,
            batch_size=8,
        )
        self.keywords = KeywordSink(
            self.pool, Keywords(self.es), self._generations, chunker, announcer, dead, metrics, batch_size=8
        )
        self.announcer = announcer
        self.sweeper = Sweeper(self.pool, outbox, announcer, metrics, interval_seconds=1.0, again_in_seconds=0.0)
        self.story = ShortStory(TENANT, list(NAMES), STORY_BEGINS, source=SOURCE)
        self._past: list[Incoming] = []
        self._accepting = False

    async def prepare(self) -> None:
        """The model begins with the real generation."""
        columns = await self._row(f"SELECT {generations._READ} FROM generations")
        self.model.tables["generations"][self.generation.name,] = {"columns": columns}

    async def _row(self, statement: str) -> tuple[Any, ...]:
        async with self.pool._real.connection() as connection:
            row = await (await connection.execute(statement)).fetchone()
            assert row is not None
            return tuple(row)

    async def _generations(self) -> dict[str, Any]:
        return {self.generation.name: self.generation}

    @staticmethod
    def _counter(_generation: Any) -> Any:
        return lambda texts: [1 for _ in texts]

    async def _maybe_accept(self) -> None:
        """Now and then something newer is accepted in the middle of what a sink does."""
        if not self._accepting and self.rng.random() < 0.15:
            await self.accept()

    async def accept(self) -> None:
        """One to four new records, or old ones once more."""
        self._accepting = True
        try:
            for _ in range(self.rng.randint(1, 3)):
                kind, name = self.rng.choice(sorted(KINDS)), self.rng.choice(NAMES)
                self._past += [self._record(e) for _, e in self.story.change(kind, name, self.rng)]
            replayed = self.rng.random() < 0.15
            batch = self.rng.sample(self._past, min(3, len(self._past))) if replayed else self._past[-4:]
            if batch:
                await self.detect.handle(batch)
        finally:
            self._accepting = False

    async def member(self) -> None:
        """Change a membership, sometimes as of an earlier time or of the same one."""
        at = self.story._now if self.rng.random() < 0.7 else STORY_BEGINS
        groups = self.rng.sample(TAGS, self.rng.randint(0, 2))
        event = IdentityChanged(tenant=TENANT, source=SOURCE, principal="ann", groups=groups, observed_at=at)
        await self.identities.handle([self._record(event)])

    async def converge(self, sink: Any) -> None:
        ids = [document_id(TENANT, SOURCE, n) for n in self.rng.sample(NAMES, self.rng.randint(1, len(NAMES)))]
        await sink.converge(self.generation, ids)

    async def sweep(self) -> None:
        """The sweeper's turn, with everything pending either long due or not due for an hour: what the product wrote
        itself depends on the server's clock in the middle of a statement, which the model cannot know."""
        rows = self.model.tables["index_state"]
        async with self.pool._real.connection() as connection:
            for key, row in rows.items():
                hours = self.rng.choice((-1, -1, 1))
                rows[key] = {**row, "next_at": self.model.now() + timedelta(hours=hours)}
                await connection.execute(
                    "UPDATE index_state SET next_at = now() + make_interval(hours => %s)"
                    " WHERE (document_id, generation, store) = (%s, %s, %s)",
                    [hours, *key],
                )
        await self.sweeper.sweep()

    async def ask(self) -> None:
        """Everything that may be asked for, as somebody with random tags."""
        async with self.pool.connection() as connection:
            tags = self.rng.sample((*TAGS, *NEEDED), 3)
            caller = await identify(connection, TENANT, principals=["ann"], tags=tags)
            chunks = [
                Candidate(chunk, key[0])
                for key, manifest in self.model.tables["manifests"].items()
                for chunk in manifest["chunk_ids"]
            ]
            await verify(connection, self.generation.name, caller, chunks)

    @staticmethod
    def _record(event: AnyMessage) -> Incoming:
        record = encode(event)
        return Incoming("documents", 0, 0, record.key, record.value, record.headers, "live")


class _StoryClock(Clock):
    """Stamps of the story's time, which are compared."""

    def __init__(self, story: ShortStory, last: datetime | None) -> None:
        super().__init__(last)
        self._story = story

    def stamp(self) -> datetime:
        self._story.wait_until(self.last + timedelta(milliseconds=1))
        self.last = self._story._now
        return self.last


class ConnectedTwins:
    """Runners of one source, each with a lease of its own, and the ledger that they publish into."""

    def __init__(self, library: Library, rng: Random) -> None:
        self.rng = rng
        self.model = Database(lambda: datetime.now(UTC))
        self.pool: Any = TwinPool(library.pool, self.model, self._nothing)
        self.story = ShortStory(TENANT, list(NAMES), STORY_BEGINS, source=SOURCE)
        self.service = Service(self.story, rng)
        self.outbox = Outbox()
        metrics, sent = Metrics(), Outbox()
        self._library = library
        self._detect = Detect(
            self.pool,
            sent,
            DeadLetters(self.pool, sent, metrics),
            Announcer(self.pool, sent, metrics),
            Twins._counter,
            metrics,
            batch_size=8,
            grace_seconds=0.0,
        )
        self._identities = Identities(self.pool, DeadLetters(self.pool, sent, metrics))
        self.runners: list[_Runner] = []
        self.leases: list[TwinSession] = []

    async def _nothing(self) -> None:
        return None

    async def take_over(self) -> None:
        """A new runner takes the lease while another one has it, and once that one's session has ended."""
        dsn = self._library.settings.postgres.dsn.get_secret_value()
        session = TwinSession(await AsyncConnection.connect(dsn, autocommit=True), self.pool)
        place = TENANT, SOURCE, "virtual", None, 600.0
        if self.leases:
            assert await lease._acquire(cast(Any, session), *place) is None
            await self.leases.pop().close()
            async with self._library.pool.connection() as connection:  # the server notices a little later
                held = (
                    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 7300008 AND objsubid = 2"
                )
                while await (await connection.execute(held)).fetchone() != (0,):
                    await asyncio.sleep(0.01)
        epoch = await lease._acquire(cast(Any, session), *place)
        assert epoch is not None
        self.leases.append(session)
        runner = _Runner(self, Holder(TENANT, SOURCE, epoch))
        await runner.prepare()
        self.runners.append(runner)

    def change(self) -> None:
        if self.rng.random() < 0.8:
            self.service.change(self.rng.choice(SOURCE_KINDS), self.rng.choice(NAMES), self.rng)
            return
        members = set(self.rng.sample(PERSONS, self.rng.randint(0, 2)))
        self.service.groups[self.rng.choice(TAGS)] = members, set(self.rng.sample(TAGS, self.rng.choice((0, 1))))

    async def deliver(self) -> None:
        """Most of what was sent comes to be accepted."""
        sent, self.outbox.sent = self.outbox.sent, []
        for event in sent:
            if self.rng.random() < 0.8:
                stage = self._identities if isinstance(event, IdentityChanged) else self._detect
                await stage.handle([Twins._record(event)])

    async def handled(self) -> None:
        """All that was sent until now has been handled."""
        until = datetime.now(UTC)
        for stage in ("detect", "identities"):
            self.model.tables["handled"][stage,] = {"until": until}
            async with self._library.pool.connection() as connection:
                await connection.execute(
                    "INSERT INTO handled VALUES (%s, %s) ON CONFLICT (stage) DO UPDATE SET until = EXCLUDED.until",
                    [stage, until],
                )

    async def step(self) -> None:
        for _ in range(self.rng.choice((0, 1, 1, 3))):
            self.change()
        self.outbox.kafka = "fine" if self.rng.random() < 0.8 else "unsure"
        runner = self.runners[-1] if self.rng.random() < 0.85 else self.rng.choice(self.runners)
        names = frozenset(self.rng.sample(NAMES, self.rng.randint(1, len(NAMES))))
        with suppress(Retryable, LeaseLost):
            match self.rng.choice(
                ("look", "look", "sweep", "groups", "tags", "compare", "full", "beat", "again", "take")
            ):
                case "look":
                    await runner.crawl.changes(frozenset())
                    await runner.crawl.fetch(names)
                case "sweep":
                    await runner.sweep.run(frozenset())
                case "groups":
                    await runner.groups.read_all(frozenset())
                case "tags":
                    await runner.groups.read_some(frozenset(self.rng.sample(TAGS, 2)))
                case "compare":
                    await self.handled()
                    await runner.reconcile.run(frozenset())
                case "full":
                    await runner.crawl.full(frozenset({"again"}))
                case "beat":
                    await runner.state.heartbeat({"sweep": {}}, {}, [])
                    await runner.rows.problems()
                    await runner.rows.in_doubt(10)
                    await runner.state.mark_stopped()
                case "again":
                    await republish(self.pool)
                case _:
                    await self.take_over()
        if self.rng.random() < 0.7:
            await self.deliver()


class _Runner:
    """The parts of a connector's instance, without the activities that it runs."""

    def __init__(self, twins: ConnectedTwins, holder: Holder) -> None:
        self._twins = twins
        self.rows, self.state = Rows(twins.pool, holder), State(twins.pool, holder)

    async def prepare(self) -> None:
        def nothing(*_: object) -> None:
            return None

        twins, producer = self._twins, cast(Any, self._twins.outbox)
        clock = _StoryClock(twins.story, await self.rows.last_stamp())
        source: Any = VirtualSource(twins.service, cast(Any, Nobody()))
        publisher = Publisher(producer, self.rows)
        crawling: Any = source, self.state, publisher, clock
        sweep: Any = nothing  # the service has a log of changes
        self.crawl = Crawl(
            *crawling, between_pages=nothing, on_loaded=nothing, on_gap=nothing, on_fetched=nothing, sweep=sweep
        )
        self.sweep = Sweep(
            *crawling, set_aside=SetAside(), between_pages=nothing, on_no_revisions=nothing, on_done=nothing
        )
        self.groups = Memberships(source, producer, twins.pool, self.rows.holder, clock, between_pages=nothing)
        self.reconcile = Reconcile(
            twins.pool, self.state, publisher, self.groups, clock, between_pages=nothing, read_again=nothing
        )


@pytest.mark.asyncio(loop_scope="function")
async def test_the_models_match_the_real_servers_for_connector_statements(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.chunking.chunk", cut)
    async with Library.create(stack, WordsEmbedder()) as library:
        twins = ConnectedTwins(library, Random(42))
        columns = await Twins._row(cast(Any, twins), f"SELECT {generations._READ} FROM generations")
        twins.model.tables["generations"][library.generation.name,] = {"columns": columns}
        await twins.take_over()
        for _ in range(CONNECTED_ROUNDS):
            await twins.step()
        for session in twins.leases:
            await session.close()
        assert sum(twins.pool.compared.values()) > 1_000
        assert len(twins.pool.compared) > 40


@pytest.mark.asyncio(loop_scope="function")
async def test_the_model_matches_postgres_for_kafka_log_marks(stack: Stack) -> None:
    rng, places = Random(43), [("documents.live.v1", 0), ("documents.live.v1", 1)]
    async with Library.create(stack, WordsEmbedder()) as library:
        twins = Twins(library, rng)
        await twins.prepare()
        for n in range(40):
            some = rng.sample(places, rng.randint(1, 2))
            mark = Mark(f"log {n}", (Witness(n, 1_000 + n, -n), Witness(n + 1, 2_000 + n, n)))
            async with twins.pool.connection() as connection:
                if rng.random() < 0.4:
                    await kafka_marks.claim(connection, "detect", some)
                else:
                    owner = rng.randint(1, 5)
                    await kafka_marks.save(connection, "detect", dict.fromkeys(some, (owner, mark)))
                await connection.commit()
        assert sum(twins.pool.compared.values()) >= 40


@pytest.mark.asyncio(loop_scope="function")
async def test_the_models_match_the_real_servers_for_random_work(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.core.chunking.chunk", cut)
    rng = Random(41)
    async with Library.create(stack, WordsEmbedder()) as library:
        twins = Twins(library, rng)
        await twins.prepare()
        for _ in range(ROUNDS):
            match rng.choice(("accept", "accept", "vectors", "keywords", "member", "sweep", "missed", "ask")):
                case "accept":
                    await twins.accept()
                case "vectors":
                    await twins.converge(twins.vectors)
                case "keywords":
                    await twins.converge(twins.keywords)
                case "member":
                    await twins.member()
                case "sweep":
                    await twins.sweep()
                case "missed":
                    await twins.announcer.announce_missed(0)
                case _:
                    await twins.ask()
        assert sum(twins.pool.compared.values()) > 1_000
        assert twins.es.operations > 100
        standing = twins.index.standing()
        hits = (await library.es.search(index=library.generation.keyword_index, size=10_000))["hits"]["hits"]
        assert {hit["_id"]: hit["_source"] for hit in hits} == standing
