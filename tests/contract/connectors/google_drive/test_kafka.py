"""Google Drive through the runner to a real Kafka: what is published, when something happens and when nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connectors.fakes.google_drive_corpus import Grant
from connectors.google_drive import GoogleDrive
from connectors.google_drive.playground import STAFF, GoogleDrivePlayground, playing
from connectors.runner.instance import Instance
from connectors.source import Request
from tests.support.connectors.playground_kit import Played, documents, made, upserted
from tests.support.connectors.runner_kit import Ground, bench_on, kinds
from topics.messages import AnyMessage

pytestmark = pytest.mark.stack

NAMES = tuple(f"d{n}" for n in range(7))
"""Three pages of three, three and one."""
EVENTS = "https://penstock.example.com"


@dataclass
class Office(Played[GoogleDrivePlayground]):
    """A company's Drive, and a runner's surroundings."""

    async def settle(self, instance: Instance) -> None:
        """Its channel is open as well."""
        await self.bench.until(lambda: self.bench.done(instance, "full", "changes", "groups", "sweep"), 60)
        await self.bench.until(lambda: bool(self.play.fake.channels.open), 60)
        for action in ("changes", "sweep", "groups"):  # what the load has asked for besides is done as well then
            await self.bench.ask(action)
        self.play.sent()

    async def deliver_events(
        self, instance: Instance, count: int, requests: Sequence[Request] | None = None
    ) -> list[AnyMessage]:
        """Deliver Google's notifications, and return what is published: ``count`` messages, and what a later poll
        adds."""
        for request in self.play.sent() if requests is None else requests:
            await instance.on_event(request)
        results: list[AnyMessage] = []
        async with asyncio.timeout(60):
            while len(results) < count:
                results += await self.bench.take()
                await asyncio.sleep(0.02)
        return [*results, *await self.run_action("changes")]


@pytest.fixture
async def office(ground: Ground, tmp_path: Path) -> AsyncIterator[Office]:
    async with playing() as play, bench_on(ground, tmp_path, made(GoogleDrive, play), EVENTS) as bench:
        for name in NAMES:
            await play.write(name, f"# {name}\n\nText of {name}.")
        yield Office(bench, play)


async def test_first_crawl_publishes_every_document_and_identity(office: Office) -> None:
    async with office.running() as instance:
        await office.settle(instance)
        messages = await office.bench.take()
        assert kinds(documents(messages)) == upserted(*office.play.files.values())
        assert all(document.acl_tags == [f"drive:{office.play.drive}"] for document in documents(messages))
        people = {message.principal: message.groups for message in messages if message.kind == "identity.changed.v1"}  # type: ignore[union-attr]
        assert people[office.play.inside] == [f"drive:{office.play.drive}", f"group:{STAFF}"]
        assert office.play.outside not in people


@pytest.mark.slow
async def test_no_change_poll_publishes_nothing(office: Office) -> None:
    async with office.loaded():
        office.play.fake.corpus.view(office.play.files["d0"])
        assert await office.run_action("changes") == []
        assert await office.run_action("sweep") == []
        assert await office.run_action("full") == []


async def test_edit_move_deletion_and_restore_are_published(office: Office) -> None:
    async with office.loaded() as instance:
        id_ = await office.play.write("d1", "Another text.")
        [edited] = await office.deliver_events(instance, 1)
        assert (edited.external_id, edited.content) == (id_, "Another text.")  # type: ignore[union-attr]
        await office.play.move("d1")
        [moved] = await office.deliver_events(instance, 1)
        assert (moved.external_id, moved.title) == (id_, "d1, moved")  # type: ignore[union-attr]
        await office.play.remove("d1")
        assert kinds(await office.deliver_events(instance, 1)) == [("document.deleted", id_)]
        await office.play.restore("d1")
        assert kinds(await office.deliver_events(instance, 1)) == upserted(id_)


async def test_a_restriction_of_a_folder_changes_access_of_the_file_below(office: Office) -> None:
    """The log of changes tells of the folder alone; that makes the sweep look below it."""
    async with office.loaded() as instance:
        await office.play.restrict("d2")
        [changed] = await office.deliver_events(instance, 1)
        assert kinds([changed]) == [("document.access-changed", office.play.files["d2"])]
        assert changed.acl_tags == ["user:penstock@penstock-test.iam.gserviceaccount.com"]  # type: ignore[union-attr]


async def test_a_member_removed_from_a_group_loses_its_memberships(office: Office) -> None:
    async with office.loaded():
        await office.play.leave()
        [left] = await office.run_action("groups")
        assert (left.principal, left.groups) == (office.play.inside, [])  # type: ignore[union-attr]


@pytest.mark.slow
async def test_a_sweep_publishes_changes_whose_webhooks_were_lost(office: Office) -> None:
    async with office.loaded():
        edited = await office.play.write("d3", "Another text.")
        removed = office.play.files["d4"]
        await office.play.remove("d4")
        await office.play.restrict("d5")
        office.play.sent()
        messages = await office.run_action("sweep")
        restricted = office.play.files["d5"]
        assert kinds(messages) == sorted(
            [
                ("document.upserted", edited),
                ("document.deleted", removed),
                ("document.access-changed", restricted),
            ]
        )
        assert await office.run_action("changes") == []


@pytest.mark.slow
async def test_duplicated_and_reordered_webhooks_publish_each_change_once(office: Office) -> None:
    async with office.loaded() as instance:
        first = await office.play.write("d0", "First.")
        requests = list(office.play.sent())
        second = await office.play.write("d1", "Second.")
        requests = [*office.play.sent(), *requests]
        assert kinds(await office.deliver_events(instance, 2, requests * 2)) == upserted(first, second)
        assert await office.deliver_events(instance, 0, requests[::-1]) == []


async def test_a_cursor_that_expires_mid_crawl_publishes_every_document_once(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = office.play.fake.pages
    listed, expired = pages.files, []

    def expires_once(messages: Any, query: Any, **more: Any) -> Any:
        if "pageToken" in query and not expired:
            expired.append(query["pageToken"])
            pages.epoch += 1
        return listed(messages, query, **more)

    monkeypatch.setattr(pages, "files", expires_once)
    async with office.running() as instance:
        await office.settle(instance)
    assert expired
    messages = documents(await office.bench.take())
    assert kinds(messages) == upserted(*office.play.files.values()), "what was read twice is published once"


async def test_a_sweep_follows_an_expired_cursor_of_changes(office: Office) -> None:
    async with office.loaded():
        edited = await office.play.write("d0", "While nobody could know.")
        await office.play.trouble(expired=True)
        await office.bench.ask("changes")
        await office.bench.ask("sweep")
        assert kinds(await office.bench.take()) == upserted(edited)
        later = await office.play.write("d1", "And again.")
        assert kinds(await office.run_action("changes")) == upserted(later)


@pytest.mark.slow
async def test_a_429_storm_is_waited_out(office: Office) -> None:
    await office.play.trouble(throttled=40)
    async with office.running() as instance:
        await office.settle(instance)
        assert office.play.fake.faults.throttled == 0
        messages = documents(await office.bench.take())
        assert kinds(messages) == upserted(*office.play.files.values())


async def test_crash_mid_crawl_and_resume_publishes_at_most_one_page_again(office: Office) -> None:
    fake, files = office.play.fake, list(office.play.files.values())
    fake.faults.broken |= set(files[4:])  # the second page cannot be read to its end
    async with office.running():
        async with asyncio.timeout(60):
            while len(await office.published()) < 3 or not fake.faults.broken.intersection(exported(office)):
                await asyncio.sleep(0.02)
    assert sorted(await office.published()) == sorted(files[:3])
    fake.faults.broken.clear()
    before = len(fake.requests)
    async with office.running() as instance:
        await office.settle(instance)
    ids = [message.external_id for message in documents(await office.bench.take())]
    assert sorted(ids) == sorted(files)
    assert not set(files[:3]) & set(exported(office, before)), "it went on after the last page kept"


def exported(office: Office, since: int = 0) -> list[str]:
    paths = [path for _, path in office.play.fake.requests[since:]]
    return [path.split("/")[-2] for path in paths if path.endswith("/export")]


async def test_a_truncated_listing_deletes_nothing(office: Office) -> None:
    async with office.loaded():
        await office.play.trouble(truncated=True)
        assert await office.run_action("sweep") == []
        await office.play.trouble()
        assert await office.run_action("sweep") == []


async def test_a_sweep_withdraws_access_whose_grant_expired(office: Office) -> None:
    corpus = office.play.fake.corpus
    async with office.loaded() as instance:
        ends = corpus.now().replace(microsecond=0)
        until = Grant(type="user", who="guest@elsewhere.org", expires=ends.replace(year=ends.year + 1))
        corpus.share(office.play.files["d0"], until)
        [granted] = await office.deliver_events(instance, 1)
        assert "user:guest@elsewhere.org" in granted.acl_tags  # type: ignore[union-attr]
        corpus.items[office.play.files["d0"]].grants[until.id] = Grant(
            type="user", who="guest@elsewhere.org", expires=corpus.now()
        )
        [withdrawn] = await office.run_action("sweep")
        assert "user:guest@elsewhere.org" not in withdrawn.acl_tags  # type: ignore[union-attr]
