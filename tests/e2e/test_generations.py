"""Another embedding model taken into use as an operator does it, while documents change, people search and processes
die."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from deploy.local.stack import Stack
from pipeline.runtime.settings import dist
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import open_pool
from query.embedding.embedders import GenerationEmbedders
from query.evaluation.golden import Golden, Judged, store
from query.retrieval.search import Search, Timeouts
from tests.fakes.words import FakeWords
from tests.support.pipeline.oracle import VECTOR_TOLERANCE, assert_equal
from tests.support.space import PROJECT, Space, now
from tests.support.space import document as published
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL

pytestmark = pytest.mark.slow

STEADY = 64
"""Documents that nobody changes: a search must find them at any time."""
SUBJECTS = [
    f"{part}{n}" for n in range(8) for part in ("sluice", "rotor", "gate", "vane", "shaft", "crane", "weir", "dam")
]
PATIENCE = 90.0
"""The time limit of a search with each service: a busy machine is no failure."""
BUILD = ("generation", "build", "--yes", "--wait", "--json")


def document(name: str, subject: str, **fields: object) -> DocumentUpserted:
    words = Random(subject)
    inspection, repair = (" ".join(f"term{words.randrange(500)}" for _ in range(30)) for _ in range(2))
    text = f"# Inspection of {subject}\n\n{subject}: {inspection}.\n\n# Repair of {subject}\n\n{subject}: {repair}."
    return published(name, text, **fields)


@dataclass
class Operator:
    """Runs the real command; one at a time."""

    space: Space
    running: asyncio.subprocess.Process | None = None

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        self.running = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cli.main",
            *arguments,
            env=self.space.environment,
            cwd=PROJECT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return self.running

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        process = await self.start(*arguments)
        out, errors = await asyncio.wait_for(process.communicate(), 400)
        return process.returncode or 0, out.decode(), errors.decode()

    async def answer(self, *arguments: str) -> Any:
        code, out, errors = await self.run(*arguments, "--json")
        assert code == 0, errors
        return json.loads(out)

    async def cutover(self) -> Any:
        """Again, where the machine was too busy for a whole evaluation: the command says so and has changed nothing."""
        for _ in range(3):
            code, out, errors = await self.run("generation", "cutover", "--json")
            if "was incomplete" not in errors:
                break
            assert (await self.space.query("SELECT name FROM generations WHERE state = 'active'")) == [("g1",)]
        assert code == 0, errors
        return json.loads(out)

    async def kill_when(self, statement: str, *arguments: str) -> None:
        """SIGKILL as soon as the ledger says so."""
        process = await self.start(*arguments)
        while process.returncode is None and not (await self.space.query(statement))[0][0]:
            await asyncio.sleep(0.05)
        await self.kill(process)

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.kill()
        out, errors = await process.communicate()
        assert process.returncode == -9, f"it had ended by itself: {out.decode()}{errors.decode()}"


@dataclass
class Life:
    """Changes and searches during a cut-over; no search may fail."""

    space: Space
    documents: dict[str, DocumentUpserted]
    searches: int = 0
    changes: int = 0
    failed: list[str] = field(default_factory=list)
    latest: dict[str, Any] = field(default_factory=dict)

    async def change(self) -> None:
        n = self.changes
        match n % 4:
            case 0:
                event: Any = document(f"new{n}", f"novelty{n}")
                self.documents[event.external_id] = event
            case 1:
                event = document(f"edited{n % 6}", f"edition{n}")
                self.documents[event.external_id] = event
            case 2:
                name = f"new{n - 2}"
                event = AccessChanged(
                    tenant="acme", source="wiki", external_id=name, observed_at=now(), acl_tags=["board"]
                )
                self.documents[name] = self.documents[name].model_copy(update={"acl_tags": ["board"]})
            case _:
                name = f"new{n - 3}"
                event = DocumentDeleted(
                    tenant="acme", source="wiki", external_id=name, observed_at=now(), version=time.time_ns()
                )
                if n % 8 == 3:
                    del self.documents[name]
                else:
                    event = self.documents[name] = document(name, f"again{n}", acl_tags=["board"])
        await self.space.publish(event)
        self.latest[event.external_id] = event
        self.changes += 1

    async def changing(self) -> None:
        while True:
            await self.change()
            await asyncio.sleep(1.0)

    async def searching(self) -> None:
        settings = self.space.settings
        async with AsyncExitStack() as closing:
            embedders = GenerationEmbedders.by_settings(settings.embedding, dist() / "models", embed_seconds=PATIENCE)
            closing.push_async_callback(embedders.aclose)
            es = connect(settings.elasticsearch)
            closing.push_async_callback(es.close)
            pool = await closing.enter_async_context(open_pool(settings.postgres))
            search = Search(pool, es, embedders, timeouts=Timeouts(PATIENCE, PATIENCE, PATIENCE, PATIENCE))
            caller = await search.identify("acme", tags=["wiki/staff"])
            while True:
                n = self.searches % STEADY
                response = await search.search(f"inspection of {SUBJECTS[n]}", caller)
                names = {r.passage.external_id for r in response.results}
                if response.degraded or f"steady{n}" not in names:
                    self.failed.append(f"{SUBJECTS[n]}: {response.degraded} {sorted(names)[:3]}")
                self.searches += 1
                await asyncio.sleep(0.5)

    @asynccontextmanager
    async def going_on(self, *what: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(item()) for item in what]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(ended, asyncio.CancelledError), repr(ended)


async def assert_unmixed(space: Space, models: dict[str, FakeWords]) -> None:
    """Every row of each generation is what its own model gives for its title and text."""
    for table, model in models.items():
        rows = await space.query(
            f"SELECT d.title, c.text, c.embedding::real[] FROM {table} c JOIN documents d ON d.id = c.document_id"
        )
        assert len(rows) >= STEADY
        for title, text, embedding in rows:
            expected = model.vector(f"{title}\n{text}")
            assert len(embedding) == len(expected)
            assert float(np.abs(np.asarray(embedding, dtype=np.float32) - expected).max()) < VECTOR_TOLERANCE


NOTHING_PENDING = (
    "SELECT count(*) = 0 FROM index_state s JOIN generations g ON g.name = s.generation AND g.state <> 'retired'"
    " WHERE s.seq < s.want_seq"
)


@pytest.fixture
async def models() -> AsyncIterator[tuple[FakeWords, FakeWords]]:
    async with AsyncExitStack() as stack:
        small = await stack.enter_async_context(FakeWords(model="words-small", dimensions=192))
        large = await stack.enter_async_context(FakeWords(model="words-large", dimensions=256))
        yield small, large  # type: ignore[misc]


@pytest.mark.timeout(900)  # a dozen commands one after another, each a process of its own
async def test_cut_over_to_another_model_during_changes_searches_and_kills(
    stack: Stack, tmp_path: Path, models: tuple[FakeWords, FakeWords], capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = models
    own = {"provider": "openai", "model": "words-small", "dimensions": 192, "base_url": small.url, "chunk_tokens": 200}
    change = ("--model", "words-large", "--dimensions", "256", "--base-url", large.url, "--chunk-tokens", "200")
    async with Space.create(stack, tmp_path, embedding=own) as space:
        await asyncio.to_thread(space.start, "detect", "vectors", "keywords")
        first = [document(f"steady{n}", SUBJECTS[n]) for n in range(STEADY)]
        await space.publish(*first, topic=DOCUMENTS_BACKFILL)
        await space.settled(first)
        async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
            for n in range(0, STEADY, 8):
                judged = (Judged("wiki", f"steady{n}", "", 1),)
                await store(connection, Golden("acme", f"repair of {SUBJECTS[n]}", judged, tags=("wiki/staff",)))
        operator, life = Operator(space), Life(space, {d.external_id: d for d in first})

        async with life.going_on(life.searching, life.changing):
            planned = await operator.answer("generation", "build", *change, "--price", "0.5", "--dry-run")
            assert (planned["generation"], planned["model"], planned["dimensions"]) == ("g2", "words-large", 256)
            assert planned["estimate"]["embedded"] >= STEADY
            assert planned["estimate"]["money"] == pytest.approx(planned["estimate"]["tokens"] * 0.5e-6, abs=1e-4)
            assert await space.query("SELECT name FROM generations") == [("g1",)]

            # What it may cost is a limit, and the next run goes on from there.
            tokens = planned["estimate"]["tokens"]
            code, _, errors = await operator.run(*BUILD, *change, "--budget", f"{tokens // 3}tokens")
            assert code == 1
            assert "generation g2 is paused" in errors.splitlines()[-1]
            [(spent, filled)] = await space.query("SELECT tokens, filled FROM builds")
            assert 0 < filled < STEADY
            assert spent < tokens, "live changes cost something besides"

            # Killed five times. The limit on tokens a minute leaves time for it.
            slowly = (*BUILD, "--tokens-per-minute", str(tokens))
            await operator.kill_when(f"SELECT filled > {filled} FROM builds", *slowly)
            [(filled,)] = await space.query("SELECT filled FROM builds")
            building = await operator.start(*slowly)
            await space.until(f"SELECT filled > {filled} FROM builds")  # it goes on: it has seen that workers run
            settled = "FROM index_state WHERE generation = 'g2' AND seq = want_seq AND store"
            for worker in ("vectors", "keywords"):
                [(before,)] = await space.query(f"SELECT count(*) {settled} = '{worker}'")
                await space.until(f"SELECT count(*) > {before} {settled} = '{worker}'")
                space.kill(worker)
                await asyncio.to_thread(space.start, worker)
            await operator.kill(building)
            await operator.kill_when("SELECT filled_at IS NOT NULL FROM builds", *BUILD)
            await operator.kill_when("SELECT count(*) > 0 FROM pg_class WHERE relname = 'chunks_g2_hnsw'", *BUILD)
            result = await operator.answer(*BUILD[:-1])
            assert (result["generation"], result["active"], result["ready"]) == ("g2", "g1", True)
            assert [g["state"] for g in await operator.answer("generation", "list")] == ["active", "building"]

            cut = await operator.cutover()
            assert (cut["active"], cut["previous"], cut["retired"]) == ("g2", "g1", [])
            judged_by = cut["evaluation"]
            assert (judged_by["active"], judged_by["candidate"], judged_by["questions"]) == ("g1", "g2", STEADY / 8)
            requests = large.stats.requests
            await asyncio.sleep(2)
            assert large.stats.requests > requests, "questions are embedded by the new model"

        assert life.failed == []
        assert life.searches > 20
        await space.settled(life.latest.values())
        await space.until(NOTHING_PENDING)
        await assert_equal(space, life.documents.values(), vector=large.vector)
        await assert_unmixed(space, {"chunks_g1": small, "chunks_g2": large})

        # Back, after more has changed: the previous generation was written all along. And forth.
        async with life.going_on(life.searching):
            for _ in range(8):
                await life.change()
            await space.settled(life.latest.values())
            await space.until(NOTHING_PENDING)
            back = await operator.answer("generation", "rollback")
            assert (back["active"], back["previous"]) == ("g1", "g2")
            await assert_equal(space, life.documents.values(), vector=small.vector)
            await operator.answer("generation", "rollback")
            await assert_equal(space, life.documents.values(), vector=large.vector)

            code, _, errors = await operator.run("generation", "retire", "g2")
            assert (code, "is active" in errors) == (1, True)
            assert await operator.answer("generation", "retire") == {"retired": "g1", "cleared": True}
        assert life.failed == []
        assert await space.query("SELECT to_regclass('chunks_g1')") == [(None,)]
        for table in ("index_state", "manifests"):
            assert await space.query(f"SELECT DISTINCT generation FROM {table}") == [("g2",)]
        es = connect(space.settings.elasticsearch)
        indexes = list(await es.indices.get(index=f"{space.settings.elasticsearch.index_prefix}*"))
        await es.close()
        assert indexes == [f"{space.settings.elasticsearch.index_prefix}chunks-g2"]
        assert [g["name"] for g in await operator.answer("generation", "list")] == ["g2"]
        await assert_equal(space, life.documents.values(), vector=large.vector)
    with capsys.disabled():
        print(f"\n{life.searches} searches, {life.changes} changes; before {judged_by['before']}, after", end=" ")
        print(judged_by["after"])
