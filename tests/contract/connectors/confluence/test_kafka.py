"""Confluence through the runner to a real Kafka: what is published, when something happens and when nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.confluence import Confluence
from connectors.confluence.playground import cloud, data_center
from connectors.fakes.confluence import Flavour
from tests.support.connectors.confluence_runner_kit import EVENTS, Office
from tests.support.connectors.playground_kit import documents, made, upserted
from tests.support.connectors.runner_kit import Ground, bench_on, kinds
from topics.messages import AccessChanged, IdentityChanged

pytestmark = pytest.mark.stack

NAMES = tuple(f"d{n}" for n in range(7))
"""Three pages of three, three and one on Cloud; on Data Center each has a page above it besides."""


@pytest.fixture(params=["cloud", pytest.param("data-center", marks=pytest.mark.slow)])
async def office(request: pytest.FixtureRequest, ground: Ground, tmp_path: Path) -> AsyncIterator[Office]:
    flavour: Flavour = request.param
    async with (
        (cloud if flavour == "cloud" else data_center)() as play,
        bench_on(ground, tmp_path, made(Confluence, play), EVENTS) as bench,
    ):
        for name in NAMES:
            await play.write(name, f"Text of {name}.")
        yield Office(bench, play)


async def test_first_crawl_publishes_every_document_and_identity(office: Office) -> None:
    async with office.running() as instance:
        await office.settle(instance)
        messages = await office.bench.take()
        assert kinds(documents(messages)) == upserted(*office.everything)
        assert all(document.acl_tags == ["space:ENG"] for document in documents(messages))
        people = {message.principal: message.groups for message in messages if isinstance(message, IdentityChanged)}
        assert people[office.play.inside] == sorted(["space:ENG", "group:staff"])
        assert office.play.outside not in people


@pytest.mark.slow
async def test_no_change_poll_publishes_nothing(office: Office) -> None:
    async with office.loaded():
        for action in ("changes", "sweep", "full", "groups"):
            assert await office.run_action(action) == []


async def test_edit_move_deletion_and_restore_are_published(office: Office) -> None:
    async with office.loaded() as instance:
        id_ = await office.play.write("d1", "Another text.")
        [edited] = documents(await office.deliver_events(instance))
        assert (edited.external_id, edited.content) == (id_, "Another text.")
        await office.play.move("d1")
        moved = {document.external_id: document.title for document in documents(await office.deliver_events(instance))}
        assert moved[id_] == "d1, moved"
        await office.play.remove("d1")
        assert kinds(await office.deliver_events(instance)) == [("document.deleted", id_)]
        await office.play.restore("d1")
        assert kinds(await office.deliver_events(instance)) == upserted(id_)


async def test_a_restriction_on_a_parent_changes_access_without_republishing_text(office: Office) -> None:
    async with office.loaded() as instance:
        page = office.play.pages["d2"]
        above = office.play.state.items[page].parent
        await office.play.restrict("d2")
        messages = await office.deliver_events(instance)
        changed = {
            message.external_id: message.required_tags for message in messages if isinstance(message, AccessChanged)
        }
        assert changed[page] == [f"restriction:{above}"]
        assert set(changed) <= {page, above}
        assert documents(messages) == []
        holders = {message.principal for message in messages if isinstance(message, IdentityChanged)}
        assert holders == {"penstock@example.com"}, "only our account holds it, and is told so at once"


async def test_a_sweep_publishes_a_restriction_whose_event_was_lost(office: Office) -> None:
    async with office.loaded():
        page = office.play.pages["d2"]
        await office.play.restrict("d2")
        office.play.sent()
        assert page in {
            message.external_id for message in await office.run_action("sweep") if isinstance(message, AccessChanged)
        }


async def test_a_member_removed_from_a_group_loses_its_memberships(office: Office) -> None:
    async with office.loaded():
        await office.play.leave()
        [left] = await office.run_action("groups")
        assert isinstance(left, IdentityChanged)
        assert (left.principal, left.groups) == (office.play.inside, [])


@pytest.mark.slow
async def test_a_sweep_publishes_changes_whose_webhooks_were_lost(office: Office) -> None:
    async with office.loaded():
        edited = await office.play.write("d3", "Another text.")
        removed = office.play.pages["d4"]
        await office.play.remove("d4")
        await office.play.write("new", "Never told of.")
        office.play.sent()
        messages = kinds(await office.run_action("sweep"))
        assert ("document.deleted", removed) in messages
        assert ("document.upserted", edited) in messages
        assert set(await office.published()) == office.everything
        assert await office.run_action("changes") == []


async def test_the_next_poll_publishes_changes_whose_webhooks_were_lost(office: Office) -> None:
    async with office.loaded():
        edited = await office.play.write("d3", "Another text.")
        removed = office.play.pages["d4"]
        await office.play.remove("d4")
        office.play.sent()
        assert kinds(await office.run_action("changes")) == [
            ("document.deleted", removed),
            ("document.upserted", edited),
        ]
        assert await office.run_action("sweep") == []


@pytest.mark.slow
async def test_duplicated_and_reordered_webhooks_publish_each_change_once(office: Office) -> None:
    async with office.loaded() as instance:
        first = await office.play.write("d0", "First.")
        requests = list(office.play.sent())
        second = await office.play.write("d1", "Second.")
        removed = office.play.pages["d2"]
        await office.play.remove("d2")
        requests = [*office.play.sent(), *requests]
        expected = sorted([*upserted(first, second), ("document.deleted", removed)])
        assert kinds(await office.deliver_events(instance, requests * 2)) == expected
        assert await office.deliver_events(instance, requests[::-1]) == []


async def test_a_cursor_that_expires_mid_crawl_publishes_every_document_once(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Data Center, whose positions are numbers, nothing expires; it reads through all the same."""
    fake, expired = office.play.fake, []
    position = fake.position

    def expires_once(cursor: str) -> dict[str, object]:
        if not expired:
            expired.append(cursor)
            fake.expire_cursors()
        return position(cursor)

    monkeypatch.setattr(fake, "position", expires_once)
    async with office.running() as instance:
        await office.settle(instance)
    assert bool(expired) == fake.cloud
    messages = documents(await office.bench.take())
    assert kinds(messages) == upserted(*office.everything), "what was read twice is published once"


async def test_a_429_storm_is_waited_out(office: Office) -> None:
    office.play.fake.faults.retry_after = "0"
    await office.play.trouble(throttled=25)
    async with office.running() as instance:
        await office.settle(instance)
        assert office.play.fake.faults.throttled == 0
        assert kinds(documents(await office.bench.take())) == upserted(*office.everything)


async def test_crash_mid_crawl_and_resume_publishes_at_most_one_page_again(office: Office) -> None:
    fake = office.play.fake
    # The second page cannot be had, nor what a poll would ask for meanwhile. (A refused page would only be set aside.)
    fake.faults.unanswered = {"cursor=", "start=3", "lastmodified"}
    async with office.running():
        async with asyncio.timeout(60):  # asked for the second page: the first is published and kept
            while not any(
                "storage" in request and ("cursor=" in request or "start=3" in request) for request in fake.requests
            ):
                await asyncio.sleep(0.02)
    kept = await office.published()
    assert 0 < len(kept) <= 3
    fake.faults.unanswered = set()
    fake.requests.clear()
    async with office.running() as instance:
        await office.settle(instance)
    ids = [message.external_id for message in documents(await office.bench.take())]
    assert set(ids) == office.everything
    assert len(ids) - len(set(ids)) <= 3
    # A poll beside it reads pages by their ids; the crawl lists them.
    listed = [
        request
        for request in fake.requests
        if "storage" in request and ("/pages?" in request or "/content?" in request)
    ]
    first = next(entry for entry in listed if "/pages?id=" not in entry)
    assert "cursor=" in first or "start=3" in first, "it went on after the last page kept"


async def test_a_truncated_listing_deletes_nothing(office: Office) -> None:
    async with office.loaded():
        await office.play.trouble(truncated=True)
        assert await office.run_action("sweep") == []
        await office.play.trouble()
        assert await office.run_action("sweep") == []


async def test_a_mass_deletion_waits_for_an_operators_approval(office: Office) -> None:
    """An account that no longer sees the space sees nothing gone either, until somebody says so."""
    for n in range(30):
        await office.play.write(f"more{n}", "Text.")
    async with office.loaded() as instance:
        office.play.state.spaces["ENG"].readers.groups.clear()
        office.play.state.add_space("OPS", groups={"staff"})
        assert await office.run_action("sweep") == []
        assert "mass_delete" in {problem.code for problem in instance.problems()}
        deleted = await office.run_action("allow_mass_delete")
        assert {message.external_id for message in deleted} == {i.id for i in office.play.state.current("page")}  # type: ignore[union-attr]
        assert {message.kind for message in deleted} == {"document.deleted.v1"}


async def test_access_that_cannot_be_read_is_withdrawn_and_restored_without_republishing_text(office: Office) -> None:
    """The text is published once; only access moves."""
    async with office.loaded():
        faults = office.play.fake.faults
        faults.lose_restrictions, faults.denied = True, {"byOperation"}
        messages = await office.run_action("sweep")
        assert {
            message.external_id: message.acl_tags for message in messages if isinstance(message, AccessChanged)
        } == {id_: [] for id_ in office.everything}
        assert documents(messages) == []
        office.play.fake.requests.clear()
        assert await office.run_action("sweep") == []
        assert not [request for request in office.play.fake.requests if "storage" in request], (
            "nothing is read anew meanwhile"
        )
        faults.lose_restrictions, faults.denied = False, set()
        messages = await office.run_action("sweep")
        assert {
            message.external_id: message.acl_tags for message in messages if isinstance(message, AccessChanged)
        } == {id_: ["space:ENG"] for id_ in office.everything}
        assert documents(messages) == []
