"""Wikis: pages, names, access, deletions, and what happens where one cannot be read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from connectors.github import GitHub, GitHubOptions
from connectors.github.playground import WikisPlayground, playing_wikis
from connectors.source import Context, Document, Gone, Listed, Unlisted, Unreadable
from pipeline.core.errors import Retryable
from tests.support.connectors.github_kit import IMPATIENT
from tests.support.connectors.reading import changed, everything, listing, one, read
from tests.support.connectors.slack_kit import Notes

pytestmark = pytest.mark.usefixtures("quick_git")


@pytest.fixture
def quick_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.git.client.PATIENCE_SECONDS", 0.0)


@dataclass
class Desk:
    play: WikisPlayground
    folder: Path
    memory: Notes = field(default_factory=Notes)
    sources: list[GitHub] = field(default_factory=list)

    def github(self, **options: Any) -> GitHub:
        fields = {**self.play.options, "token": self.play.fake.token, "webhook_secret": "fake-webhook-secret"}
        context = Context(name="hub", tenant="default", memory=self.memory, folder=self.folder)
        self.sources.append(GitHub(GitHubOptions(**{**fields, **options}), context, limits=IMPATIENT))
        return self.sources[-1]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with playing_wikis() as play:
        desk = Desk(play, tmp_path)
        try:
            yield desk
        finally:
            for source in desk.sources:
                await source.close()


async def test_a_page_has_its_name_its_address_and_the_access_of_its_repository(desk: Desk) -> None:
    id = await desk.play.write("travel", "Book early.\n")
    wiki = desk.play.wikis["travel"]
    wiki.clone.write("guides/First-Steps.asciidoc", "= Steps\n\nOne.\n")
    wiki.clone.write("_Sidebar.md", "[[About-travel]]\n")
    wiki.clone.write("prices.csv", "city,price\nRome,3\n")
    wiki.clone.push()
    source = desk.github()
    entries, listed = await everything(source), await listing(source)
    number = wiki.place.id
    assert (
        entries.keys()
        == listed.keys()
        == {id, f"{number}/wiki/guides/First-Steps.asciidoc", f"{number}/wiki/prices.csv"}
    )
    page, steps, prices = (
        entries[id],
        entries[f"{number}/wiki/guides/First-Steps.asciidoc"],
        entries[f"{number}/wiki/prices.csv"],
    )
    assert isinstance(page, Document)
    assert isinstance(steps, Document)
    assert isinstance(prices, Document)
    site = f"{desk.play.options['web_url']}/acme/about-travel/wiki"
    assert (page.title, page.source_url) == ("About travel · acme/about-travel wiki", f"{site}/About-travel")
    assert (page.content.strip(), page.author) == ("Book early.", "Ada Author")
    assert page.metadata == {"kind": "wiki page", "repository": "acme/about-travel"}
    assert (steps.title, steps.source_url) == ("First Steps · acme/about-travel wiki", f"{site}/First-Steps")
    assert (prices.title, prices.source_url) == ("prices.csv · acme/about-travel wiki", f"{site}/prices.csv")
    for name, entry in entries.items():
        assert isinstance(entry, Document)
        assert [*entry.acl_tags] == [*listed[name].acl_tags] == [f"repository:{number}"]
        assert entry.revision == listed[name].revision


async def test_a_public_repository_opens_its_wiki_to_the_same_readers_as_its_issues(desk: Desk) -> None:
    id = await desk.play.write("travel", "Book early.\n")
    source = desk.github(public_acl_tags=["staff"], members={"staff": ["ann@acme.example"]})
    place = desk.play.wikis["travel"].place
    place.visibility = "PUBLIC"
    assert [*(await read(source, id)).acl_tags] == [f"repository:{place.id}", "staff"]
    place.visibility = "PRIVATE"  # between two listings of the repositories
    assert [*(await read(source, id)).acl_tags] == [f"repository:{place.id}"]


async def test_a_renamed_repository_and_a_renamed_page_stay_the_same_document(desk: Desk) -> None:
    id = await desk.play.write("travel", "Book early.\n")
    source = desk.github()
    before, cursor = await read(source, id), await source.start()
    await desk.play.move("travel")
    changes, _ = await changed(source, cursor)
    assert changes.keys() == {id}
    wiki = desk.play.wikis["travel"]
    desk.play.fake.rename(wiki.place, "acme/trips")
    (desk.play.backend.root / "acme/about-travel.wiki.git").rename(desk.play.backend.root / "acme/trips.wiki.git")
    after = await read(source, id)
    assert after.title == "Renamed About travel · acme/trips wiki"
    assert after.revision != before.revision


async def test_a_poll_reads_what_was_pushed_and_a_sweep_finds_a_new_wiki(desk: Desk) -> None:
    id = await desk.play.write("travel", "Book early.\n")
    source = desk.github()
    cursor = await source.start()
    assert (await changed(source, cursor))[0] == {}
    await desk.play.write("travel", "Book late.\n")
    changes, cursor = await changed(source, cursor)
    assert changes.keys() == {id}
    await desk.play.remove("travel")
    changes, cursor = await changed(source, cursor)
    assert changes == {id: Gone(id)}
    new = await desk.play.write("sport", "Run.\n")
    assert (await changed(source, cursor))[0] == {}, "no poll tries repositories without a wiki"
    assert (await listing(source)).keys() == {new}
    changes, cursor = await changed(source, cursor)
    assert changes.keys() == {new}
    desk.play.sent()
    event = await desk.play.write("food", "Eat.\n")
    [request] = desk.play.sent()
    assert (await source.on_event(request)).changes
    assert (await changed(source, cursor))[0].keys() == {event}


async def test_a_repository_whose_wiki_is_empty_or_off_has_no_pages(desk: Desk) -> None:
    desk.play.fake.repository("acme/empty", "ines")
    id = await desk.play.write("travel", "Book early.\n")
    source = desk.github()
    assert (await everything(source)).keys() == (await listing(source)).keys() == {id}
    mirror = desk.folder / "wikis" / id.partition("/")[0]
    assert mirror.is_dir()
    desk.play.wikis["travel"].place.has_wiki = False
    assert await one(source, id) == Gone(id)
    assert await listing(source) == {}
    assert not mirror.exists(), "what nobody may read is not stored"


async def test_a_wiki_that_is_refused_or_vanishes_is_set_aside_and_nothing_of_it_is_deleted(desk: Desk) -> None:
    lost, other = await desk.play.write("travel", "Book early.\n"), await desk.play.write("sport", "Run.\n")
    source = desk.github()
    cursor = await source.start()
    assert (await everything(source)).keys() == {lost, other}
    hidden = desk.play.backend.root / "acme/about-travel.wiki.git"
    hidden.rename(hidden.with_name("hidden"))
    listed = [entry async for page in source.slim() for entry in page]
    [unlisted] = [entry for entry in listed if isinstance(entry, Unlisted)]
    assert (unlisted.part, unlisted.id_prefix) == ("wiki of acme/about-travel", lost.removesuffix("About-travel.md"))
    assert "not found" in unlisted.reason
    assert [entry.external_id for entry in listed if entry is not unlisted] == [other]
    await desk.play.write("sport", "Swim.\n")
    assert (await changed(source, cursor))[0].keys() == {other}
    entry = await one(source, lost)
    assert isinstance(entry, Unreadable)
    assert [*entry.acl_tags] == [f"repository:{lost.partition('/')[0]}"]
    assert (await everything(source)).keys() == {other}


async def test_a_credential_that_may_read_no_wiki_is_a_problem_of_the_check(desk: Desk) -> None:
    desk.play.fake.repository("acme/empty", "ines", "sam")
    assert [problem.message for problem in await desk.github().check()] == [
        "none of 1 wikis can be read: grant the credential Contents: read, if they have pages"
    ]
    await desk.play.write("travel", "Book early.\n")
    assert await desk.github().check() == []


async def test_wikis_are_read_only_where_the_settings_name_them(desk: Desk) -> None:
    id = await desk.play.write("travel", "Book early.\n")
    source = desk.github(kinds=["issues"])
    assert await everything(source) == await listing(source) == {}
    assert await one(source, id) == Gone(id)
    assert desk.play.backend.requests == []


async def test_the_wiki_of_a_repository_that_gets_the_name_of_another_is_not_shown_to_that_ones_readers(
    desk: Desk,
) -> None:
    """A first load lists the repositories once, hours before it reads the last of their wikis by name."""
    await desk.play.write("travel", "Book early.\n")
    await desk.play.write("sport", "Run.\n")
    source = desk.github()
    pages = source.full(None)
    texts = [entry.content for entry in (await anext(pages)).entries if isinstance(entry, Document)]
    assert texts == ["Book early.\n"]
    former = desk.play.wikis.pop("sport")
    root = desk.play.backend.root / "acme"
    desk.play.fake.rename(former.place, "acme/sports")
    (root / "about-sport.wiki.git").rename(root / "sports.wiki.git")
    secret = desk.play.fake.repository("acme/about-sport", "otto")
    clone = type(former.clone)(desk.folder / "secret", root / "about-sport.wiki.git")
    clone.write("Plan.md", "We sell the company.\n")
    await asyncio.to_thread(clone.push)
    with pytest.raises(Retryable, match="was renamed while its wiki was read"):
        [page async for page in pages]
    entries = await everything(source)
    of_secret = [entry for entry in entries.values() if isinstance(entry, Document) and "sell" in entry.content]
    assert [[*entry.acl_tags] for entry in of_secret] == [[f"repository:{secret.id}"]]
    assert [id for id in entries if id.startswith(f"{former.place.id}/")] == [f"{former.place.id}/wiki/About-sport.md"]


async def test_a_wiki_that_would_fill_the_memory_or_the_disk_of_all_connectors_is_set_aside(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its editors push what they like, and trees that contain one another hold any number of files."""
    small, large = await desk.play.write("sport", "Run.\n"), await desk.play.write("travel", "Book early.\n")
    clone = desk.play.wikis["travel"].clone
    monkeypatch.setattr("connectors.github.wikis.MAX_FILES", 3)
    for n in range(3):
        clone.write(f"{n}.md", "More.\n")
    await asyncio.to_thread(clone.push)
    listed = [entry async for page in desk.github().slim() for entry in page]
    assert [entry.external_id for entry in listed if isinstance(entry, Listed)] == [small]
    [unlisted] = [entry for entry in listed if isinstance(entry, Unlisted)]
    assert "more than 3 files" in unlisted.reason
    monkeypatch.setattr("connectors.github.wikis.MAX_FILES", 100)
    clone.write("noise.md", os.urandom(300_000).hex())
    await asyncio.to_thread(clone.push)
    listed = [entry async for page in desk.github(max_wikis_bytes=200_000).slim() for entry in page]
    assert [entry.external_id for entry in listed if isinstance(entry, Listed)] == [small]
    [unlisted] = [entry for entry in listed if isinstance(entry, Unlisted)]
    assert "max_wikis_bytes leaves to it" in unlisted.reason
    assert {large, small} <= (await listing(desk.github(max_wikis_bytes=2_000_000))).keys()


async def test_the_paths_of_wikis_that_were_read_long_ago_are_not_held_in_memory(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.github.wikis.MAX_HELD", 1)
    for name in ("travel", "sport", "food"):
        await desk.play.write(name, f"{name}.\n")
    source = desk.github()
    cursor = await source.start()
    assert len(await everything(source)) == len(await listing(source)) == 3
    assert sum(git.held for _, git in source._wikis._sources.values()) == 1
    id = await desk.play.write("travel", "Book late.\n")
    changes, _ = await changed(source, cursor)
    assert changes.keys() == {id}
    assert isinstance(page := changes[id], Document)
    assert page.author == "Ada Author"
