"""The models of Postgres and Elasticsearch against the real servers, statement by statement and bulk by bulk."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from pipeline.embedding.port import OneModel
from pipeline.ledger import generations
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.detect import Detect
from pipeline.stages.identities import Identities
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Incoming
from pipeline.stages.sweep import Sweeper
from pipeline.stages.vectors import VectorSink
from pipeline.stores.keywords import Keywords
from pipeline.telemetry import Metrics
from query.access import identify
from query.verify import verify
from tests.faults.puppet import Outbox
from tests.faults.story import KINDS, NEEDED, TAGS
from tests.library import Library
from tests.simulation.changes import NAMES, ShortStory, cut
from tests.simulation.database import Database
from tests.simulation.keyword_store import Index
from tests.simulation.oracle import Candidate
from tests.simulation.twin import STORY_BEGINS, TwinElasticsearch, TwinPool
from tests.simulation.world import SOURCE, TENANT, WordsEmbedder
from topics.codec import encode
from topics.messages import AnyMessage, IdentityChanged

ROUNDS = 300


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
            self.pool, OneModel(WordsEmbedder()), self._generations, chunker, announcer, dead, metrics, batch_size=8
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
        columns = await self._row(f"SELECT {generations._COLUMNS} FROM generations")
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
        """Who is in which group, now and then as of an earlier moment or of the same one."""
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


@pytest.mark.asyncio(loop_scope="function")
async def test_the_models_do_what_the_servers_do(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
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
