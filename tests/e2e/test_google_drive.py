"""A company's Google Drive (the fake) through the runner, Kafka, the workers and both stores, to what people find."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connectors.declared import options as declared_options
from connectors.fakes.google_drive_corpus import Grant
from connectors.google_drive import GoogleDrive
from connectors.google_drive.playground import GoogleDrivePlayground, playing
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.source import Context
from pipeline.kafka import producer
from pipeline.settings import dist
from pipeline.stores.postgres import open_pool
from pipeline.telemetry import Metrics
from query.embedder import QueryEmbedder
from query.model import MODES
from query.retrieval import Search, open_search
from tests.space import Space

pytestmark = pytest.mark.stack

WITHIN_SECONDS = 90.0
EVENTS = "https://penstock.example.com"


@dataclass
class Company:
    space: Space
    play: GoogleDrivePlayground
    instance: Instance
    search: Search

    async def found(self, who: str, query: str) -> dict[str, str]:
        """What somebody finds by any ranking: external id → the best passage's text."""
        caller = await self.search.identify("acme", principals=[who])
        shown: dict[str, str] = {}
        for mode in MODES:
            answer = await self.search.search(query, caller, mode=mode, top=50)
            for result in answer.results:
                shown.setdefault(result.passage.external_id, result.text)
        return shown

    async def until(self, who: str, query: str, ids: set[str], *, text: str = "") -> None:
        """Wait until somebody finds these documents and no others, one of them with this text."""
        async with asyncio.timeout(WITHIN_SECONDS):
            while True:
                shown = await self.found(who, query)
                if set(shown) == ids and (not text or any(text in one for one in shown.values())):
                    return
                await asyncio.sleep(0.1)

    async def told(self) -> None:
        for request in self.play.sent():
            await self.instance.on_event(request)

    async def ask(self, action: str) -> dict[str, Any]:
        [(number,)] = await self.space.query(
            "INSERT INTO connector_asks (tenant, source, action) VALUES ('acme', 'drive', %s) RETURNING id", action
        )
        async with asyncio.timeout(WITHIN_SECONDS):
            while True:
                [(outcome,)] = await self.space.query("SELECT outcome FROM connector_asks WHERE id = %s", number)
                if outcome is not None:
                    return dict(outcome)
                await asyncio.sleep(0.05)


@pytest.fixture
async def company(space: Space, tmp_path: Path) -> AsyncIterator[Company]:
    """Three documents about the harbour, read once; nothing more happens by itself."""
    space.start("detect", "vectors", "keywords")
    async with contextlib.AsyncExitStack() as stack:
        play = await stack.enter_async_context(playing())
        for topic in ("crane", "ferry", "bridge"):
            await play.write(topic, f"# Harbour {topic}\n\nThe harbour {topic} is looked after by its own crew.")

        def make(context: Context) -> GoogleDrive:
            return GoogleDrive(declared_options(GoogleDrive, play.options, "drive", play.environment), context)

        plan = Plan(
            name="drive", tenant="acme", kind="google-drive", make=make, poll_seconds=3600, sweep_seconds=3600,
            groups_seconds=3600,
        )  # fmt: skip
        services = Services(
            postgres=space.settings.postgres, pool=await stack.enter_async_context(open_pool(space.settings.postgres)),
            producer=await stack.enter_async_context(producer(space.settings.kafka)), metrics=Metrics(),
            folder=tmp_path / "sources", events_url=EVENTS,
        )  # fmt: skip
        embedder = QueryEmbedder.by_settings(space.settings.embedding, dist() / "models")
        search = await stack.enter_async_context(open_search(space.settings, embedder))
        instance = Instance(plan, services)
        task = asyncio.create_task(instance.run())
        try:
            async with asyncio.timeout(WITHIN_SECONDS):
                while not play.fake.channels.open:
                    await asyncio.sleep(0.02)
            play.sent()
            yield Company(space, play, instance, search)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_documents_are_found_and_follow_what_happens_to_them(company: Company) -> None:
    c, play = company, company.play
    crane, ferry, bridge = play.files.values()
    everything = {crane, ferry, bridge}
    await c.until(play.inside, "harbour", everything)
    assert await c.found(play.outside, "harbour") == {}
    for action in ("changes", "sweep"):
        outcome = await c.ask(action)
        assert {key for key in ("upserted", "access", "deleted") if outcome.get(key)} == set(), outcome

    await play.write("crane", "# Harbour windlass\n\nWho repairs the harbour windlass?")
    await c.told()
    await c.until(play.inside, "windlass", everything, text="Who repairs the harbour windlass?")
    await play.move("crane")
    await c.told()
    async with asyncio.timeout(WITHIN_SECONDS):
        while await c.space.query("SELECT title FROM documents WHERE external_id = %s", crane) != [("crane, moved",)]:
            await asyncio.sleep(0.05)
    await play.remove("ferry")
    await c.told()
    await c.until(play.inside, "harbour", {crane, bridge})
    await play.restore("ferry")
    await c.told()
    await c.until(play.inside, "harbour", everything)


async def test_access_follows_the_folder_above_the_group_and_the_grants_on_a_file(company: Company) -> None:
    c, play = company, company.play
    crane, ferry, bridge = play.files.values()
    await c.until(play.inside, "harbour", {crane, ferry, bridge})
    guest = Grant(type="user", who=play.outside)
    play.fake.corpus.share(ferry, guest)
    await c.told()
    await c.until(play.outside, "harbour", {ferry})
    play.fake.corpus.unshare(ferry, guest)
    await c.told()
    await c.until(play.outside, "harbour", set())
    await play.restrict("crane")
    await c.told()
    await c.until(play.inside, "harbour", {ferry, bridge})
    await play.leave()
    await c.ask("groups")
    await c.until(play.inside, "harbour", set())


async def test_a_sweep_closes_the_gap_that_lost_notifications_left(company: Company) -> None:
    c, play = company, company.play
    crane, ferry, bridge = play.files.values()
    await c.until(play.inside, "harbour", {crane, ferry, bridge})
    await play.write("crane", "# Harbour windlass\n\nWho repairs the harbour windlass?")
    await play.remove("ferry")
    await play.restrict("bridge")
    pilot = await play.write("pilot", "The harbour pilot retires.")
    assert len(play.sent()) == 1  # lost; Google told of all four at once
    await c.ask("sweep")
    await c.until(play.inside, "harbour", {crane, pilot})
    await c.until(play.inside, "windlass", {crane, pilot}, text="Who repairs the harbour windlass?")
