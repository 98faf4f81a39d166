"""A company's Confluence (the fake) through the runner, Kafka, the workers and both stores, to what people find."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connectors.confluence import Confluence
from connectors.confluence.playground import ConfluencePlayground, cloud, data_center
from connectors.declared import options as declared_options
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.source import Context
from pipeline.kafka.client import producer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import dist
from pipeline.stores.postgres import open_pool
from query.embedding.embedders import GenerationEmbedders
from query.model import MODES
from query.retrieval.search import Search, open_search
from tests.support.space import Space

pytestmark = pytest.mark.stack

WITHIN_SECONDS = 90.0


@dataclass
class Company:
    space: Space
    play: ConfluencePlayground
    instance: Instance
    search: Search

    async def search_ids(self, who: str, query: str, word: str) -> set[str]:
        """The documents with this word that somebody finds by any ranking (nearness alone finds all that they read)."""
        caller = await self.search.identify("acme", principals=[who])
        shown: set[str] = set()
        for mode in MODES:
            answer = await self.search.search(query, caller, mode=mode, top=50)
            shown |= {result.passage.external_id for result in answer.results if word in result.text}
        return shown

    async def until(self, who: str, query: str, ids: set[str], word: str = "harbour") -> None:
        """Wait until somebody finds these documents and no others."""
        async with asyncio.timeout(WITHIN_SECONDS):
            while await self.search_ids(who, query, word) != ids:
                await asyncio.sleep(0.1)

    async def deliver_events(self) -> None:
        for request in self.play.sent():
            await self.instance.on_event(request)

    async def ask(self, action: str) -> dict[str, Any]:
        [(number,)] = await self.space.query(
            "INSERT INTO connector_asks (tenant, source, action) VALUES ('acme', 'wiki', %s) RETURNING id", action
        )
        async with asyncio.timeout(WITHIN_SECONDS):
            while True:
                [(outcome,)] = await self.space.query("SELECT outcome FROM connector_asks WHERE id = %s", number)
                if outcome is not None:
                    return dict(outcome)
                await asyncio.sleep(0.05)


@pytest.fixture(params=["cloud", pytest.param("data-center", marks=pytest.mark.slow)])
async def company(request: pytest.FixtureRequest, space: Space, tmp_path: Path) -> AsyncIterator[Company]:
    """Three pages about the harbour, read once; nothing more happens by itself."""
    space.start("detect", "vectors", "keywords")
    async with contextlib.AsyncExitStack() as stack:
        play = await stack.enter_async_context((cloud if request.param == "cloud" else data_center)())
        for topic in ("crane", "ferry", "bridge"):
            await play.write(topic, f"The harbour {topic} is looked after by its own crew.")

        def make(context: Context) -> Confluence:
            return Confluence(declared_options(Confluence, play.options, "wiki", play.environment), context)

        plan = Plan(
            name="wiki",
            tenant="acme",
            kind="confluence",
            make=make,
            poll_seconds=3600,
            sweep_seconds=3600,
            groups_seconds=3600,
        )
        services = Services(
            postgres=space.settings.postgres,
            pool=await stack.enter_async_context(open_pool(space.settings.postgres)),
            producer=await stack.enter_async_context(producer(space.settings.kafka)),
            metrics=Metrics(),
            folder=tmp_path / "sources",
            events_url="https://penstock.example.com",
        )
        embedder = GenerationEmbedders.by_settings(space.settings.embedding, dist() / "models")
        search = await stack.enter_async_context(open_search(space.settings, embedder))
        instance = Instance(plan, services)
        play.sent()
        task = asyncio.create_task(instance.run())
        try:
            yield Company(space, play, instance, search)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.mark.slow
async def test_pages_comments_and_attachments_are_searchable_and_follow_their_changes(company: Company) -> None:
    c, play = company, company.play
    crane, ferry, bridge = play.pages.values()
    everything = {crane, ferry, bridge}
    await c.until(play.inside, "harbour", everything)
    assert await c.search_ids(play.outside, "harbour", "harbour") == set()
    for action in ("changes", "sweep"):
        outcome = await c.ask(action)
        assert {key for key in ("upserted", "access", "deleted") if outcome.get(key)} == set(), outcome

    await play.write("crane", "Who repairs the harbour windlass?")
    await c.deliver_events()
    await c.until(play.inside, "windlass", {crane}, "windlass")
    play.state.add_comment(ferry, "<p>The harbour ferry needs new lifebelts.</p>")
    file = play.state.attach(bridge, "tolls.txt", b"The harbour bridge toll is two coins.", "text/plain").id
    await c.deliver_events()
    await c.until(play.inside, "lifebelts", {ferry}, "lifebelts")
    await c.until(play.inside, "bridge toll", {file}, "two coins")
    await play.move("crane")
    await c.deliver_events()
    async with asyncio.timeout(WITHIN_SECONDS):
        while await c.space.query("SELECT title FROM documents WHERE external_id = %s", crane) != [("crane, moved",)]:
            await asyncio.sleep(0.05)
    await play.remove("bridge")
    await c.deliver_events()
    await c.until(play.inside, "harbour", {crane, ferry})  # its file went with it
    await play.restore("bridge")
    await c.deliver_events()
    await c.until(play.inside, "harbour", everything | {file})


@pytest.mark.slow
async def test_access_follows_parent_pages_groups_and_spaces(company: Company) -> None:
    c, play = company, company.play
    crane, ferry, bridge = play.pages.values()
    await c.until(play.inside, "harbour", {crane, ferry, bridge})
    file = play.state.attach(crane, "plan.txt", b"The harbour crane plan.", "text/plain").id
    await c.deliver_events()
    await c.until(play.inside, "harbour", {crane, ferry, bridge, file})
    await play.restrict("crane")
    await c.deliver_events()
    await c.until(play.inside, "harbour", {ferry, bridge})
    above = play.state.items[crane].parent
    assert above is not None
    play.state.restrict(above, users={play.bot.account_id, play.ines.account_id})
    await c.deliver_events()
    await c.until(play.inside, "harbour", {crane, ferry, bridge, file})
    play.state.spaces["ENG"].readers.users = {user.account_id for user in play.state.users.values()}
    await c.ask("groups")
    await c.until(play.outside, "harbour", {ferry, bridge})
    play.state.spaces["ENG"].readers.users = set()
    await play.leave()
    await c.ask("groups")
    await c.until(play.inside, "harbour", set())
    await c.until(play.outside, "harbour", set())


@pytest.mark.slow
async def test_a_sweep_makes_changes_searchable_whose_events_were_lost(company: Company) -> None:
    c, play = company, company.play
    crane, ferry, bridge = play.pages.values()
    await c.until(play.inside, "harbour", {crane, ferry, bridge})
    await play.write("crane", "Who repairs the harbour windlass?")
    await play.remove("ferry")
    await play.restrict("bridge")
    pilot = await play.write("pilot", "The harbour pilot retires.")
    assert play.sent()  # lost
    await c.ask("sweep")
    await c.until(play.inside, "harbour", {crane, pilot})
    await c.until(play.inside, "windlass", {crane}, "windlass")
