"""A company's Google Drive (the fake) through the runner, Kafka, the workers and both stores, to what people find."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.fakes.google_drive_corpus import Grant
from connectors.google_drive import GoogleDrive
from connectors.google_drive.playground import playing
from tests.support.connectors.company import Company, company_in
from tests.support.connectors.playground_kit import made
from tests.support.space import Space

pytestmark = pytest.mark.stack

EVENTS = "https://penstock.example.com"


class Harbour(Company):
    async def until_shown(self, who: str, query: str, ids: set[str], text: str) -> None:
        """Wait until somebody finds these documents and no others, the best passage of one of them with this text."""
        async with asyncio.timeout(self.within_seconds):
            while True:
                best: dict[str, str] = {}
                for result in await self.results(who, query):
                    best.setdefault(result.passage.external_id, result.text)
                if set(best) == ids and any(text in result for result in best.values()):
                    return
                await asyncio.sleep(0.1)


@pytest.fixture
async def company(space: Space, tmp_path: Path) -> AsyncIterator[Harbour]:
    """Three documents about the harbour, read once; nothing more happens by itself."""
    async with playing() as play:
        for topic in ("crane", "ferry", "bridge"):
            await play.write(topic, f"# Harbour {topic}\n\nThe harbour {topic} is looked after by its own crew.")
        async with company_in(
            space, tmp_path, play, made(GoogleDrive, play), name="drive", events_url=EVENTS
        ) as company:
            async with asyncio.timeout(company.within_seconds):
                while not play.fake.channels.open:
                    await asyncio.sleep(0.02)
            play.sent()
            yield Harbour(**vars(company))


@pytest.mark.slow
async def test_documents_are_searchable_and_follow_their_changes(company: Harbour) -> None:
    c, play = company, company.play
    crane, ferry, bridge = play.files.values()
    everything = {crane, ferry, bridge}
    await c.until(play.inside, "harbour", everything)
    assert await c.search_ids(play.outside, "harbour") == set()
    for action in ("changes", "sweep"):
        outcome = await c.ask(action)
        assert {key for key in ("upserted", "access", "deleted") if outcome.get(key)} == set(), outcome

    await play.write("crane", "# Harbour windlass\n\nWho repairs the harbour windlass?")
    await c.deliver_events()
    await c.until_shown(play.inside, "windlass", everything, "Who repairs the harbour windlass?")
    await play.move("crane")
    await c.deliver_events()
    async with asyncio.timeout(c.within_seconds):
        while await c.space.query("SELECT title FROM documents WHERE external_id = %s", crane) != [("crane, moved",)]:
            await asyncio.sleep(0.05)
    await play.remove("ferry")
    await c.deliver_events()
    await c.until(play.inside, "harbour", {crane, bridge})
    await play.restore("ferry")
    await c.deliver_events()
    await c.until(play.inside, "harbour", everything)


@pytest.mark.slow
async def test_access_follows_folders_groups_and_grants_on_a_file(company: Harbour) -> None:
    c, play = company, company.play
    crane, ferry, bridge = play.files.values()
    await c.until(play.inside, "harbour", {crane, ferry, bridge})
    guest = Grant(type="user", who=play.outside)
    play.fake.corpus.share(ferry, guest)
    await c.deliver_events()
    await c.until(play.outside, "harbour", {ferry})
    play.fake.corpus.unshare(ferry, guest)
    await c.deliver_events()
    await c.until(play.outside, "harbour", set())
    await play.restrict("crane")
    await c.deliver_events()
    await c.until(play.inside, "harbour", {ferry, bridge})
    await play.leave()
    await c.ask("groups")
    await c.until(play.inside, "harbour", set())


@pytest.mark.slow
async def test_a_sweep_makes_changes_searchable_whose_notifications_were_lost(company: Harbour) -> None:
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
    await c.until_shown(play.inside, "windlass", {crane, pilot}, "Who repairs the harbour windlass?")
