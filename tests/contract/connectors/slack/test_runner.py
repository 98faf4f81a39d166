"""The Slack source under the runner, on real Kafka and Postgres: what is published when things go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from connectors.fakes.slack import FakeSlack
from connectors.fakes.slack_methods import METHODS, MethodContext
from connectors.runner.instance import Instance
from connectors.slack import Slack
from connectors.slack.playground import SlackPlayground, playing
from tests.support.connectors.playground_kit import Played, documents, made
from tests.support.connectors.runner_kit import Ground, bench_on, kinds
from topics.messages import IdentityChanged

pytestmark = pytest.mark.stack

PAGE = 3
"""Threads in a page of the playground."""


@dataclass
class Office(Played[SlackPlayground]):
    """One channel and its threads, and a runner that does nothing by itself after the first load."""

    channel: str = ""
    ann: str = ""

    @property
    def fake(self) -> FakeSlack:
        return self.play.fake

    def fill(self, count: int) -> list[str]:
        w = self.fake.workspace
        stamps = [w.post(self.channel, self.ann, f"question {n}") for n in range(count)]
        for ts in stamps:
            w.post(self.channel, self.ann, "answer", thread=ts)
        return [f"{self.channel}:{ts}" for ts in stamps]

    async def read(self, instance: Instance) -> list[str]:
        """After the first load and the sweep behind it: ids of the upserts, in order."""
        await self.bench.until(lambda: self.bench.done(instance, "full", "changes", "groups", "sweep"))
        return await self.upserted()

    async def upserted(self) -> list[str]:
        return [message.external_id for message in documents(await self.bench.take())]


@pytest.fixture
async def office(ground: Ground, tmp_path: Path) -> AsyncIterator[Office]:
    async with playing() as play, bench_on(ground, tmp_path, made(Slack, play)) as bench:
        ann = play.workspace.user("Ann Lee")
        yield Office(bench, play, play.workspace.channel("ops", ann), ann)


async def test_a_first_crawl_publishes_each_thread_once_and_unchanged_polls_nothing(office: Office) -> None:
    ids = office.fill(10)
    async with office.running() as instance:
        assert sorted(await office.read(instance)) == sorted(ids)
        for action in ("changes", "sweep", "groups"):
            await office.bench.ask(action)
        assert await office.bench.take() == []


async def test_duplicated_and_reordered_events_end_in_slacks_current_state(office: Office) -> None:
    first, second, third = office.fill(3)
    w = office.fake.workspace
    async with office.running() as instance:
        await office.read(instance)
        office.fake.drop_events()
        w.edit(office.channel, first.partition(":")[2], "one")
        w.edit(office.channel, first.partition(":")[2], "two")
        for message in w.channels[office.channel].replies(second.partition(":")[2]):
            w.delete(office.channel, message["ts"])
        w.delete(office.channel, second.partition(":")[2])
        w.post(office.channel, office.ann, "more", thread=third.partition(":")[2])
        for request in office.fake.sent_twice_shuffled(seed=3):
            await instance.on_event(request)
        await office.bench.until(lambda: instance.activities["events"].pending == 0)
        await office.bench.ask("changes")
        newest = {m.external_id: m for m in await office.bench.take()}
        assert kinds(list(newest.values())) == sorted(
            [("document.upserted", first), ("document.deleted", second), ("document.upserted", third)]
        )
        assert newest[first].content.startswith("Ann Lee: two")
        assert newest[third].content.endswith("Ann Lee: more")


async def test_cursors_that_expire_mid_crawl_lose_no_document(office: Office) -> None:
    ids = office.fill(10)
    w = office.fake.workspace
    for n in range(5):
        w.channel(f"c{n}", w.user(f"P{n} X"))
    office.fake.faults.expiring = 2
    async with office.running() as instance:
        assert sorted(await office.read(instance)) == sorted(ids)


async def test_a_429_storm_delays_but_loses_no_document(office: Office) -> None:
    ids = office.fill(7)
    office.fake.faults.throttled, office.fake.faults.failing = 12, 2
    async with office.running() as instance:
        assert sorted(await office.read(instance)) == sorted(ids)
    assert office.fake.faults.throttled == 0


async def test_a_crashed_crawl_resumes_and_publishes_at_most_one_page_again(office: Office) -> None:
    ids = office.fill(12)
    office.fake.faults.limits["conversations.replies"] = 7  # the crawl stands still in its third page
    async with office.running():
        await office.bench.until(lambda: office.fake.requests["conversations.replies"] == 7)
        async with asyncio.timeout(30):
            while (await office.bench.mine("count(*)", "connector_items"))[0][0] < 2 * PAGE:
                await asyncio.sleep(0.05)
    before = await office.upserted()
    assert before
    office.fake.faults.limits.clear()
    async with office.running() as instance:
        after = await office.read(instance)
    assert set(before) | set(after) == set(ids)
    assert len(before) + len(after) <= len(ids) + PAGE


async def test_a_truncated_listing_deletes_nothing_and_a_mass_deletion_waits_for_approval(office: Office) -> None:
    ids = office.fill(30)
    w = office.fake.workspace
    async with office.running() as instance:
        await office.read(instance)
        office.fake.faults.truncated.add("conversations.history")
        await office.bench.ask("sweep")
        assert [problem.code for problem in instance.problems()] == ["mass_delete"]
        assert await office.bench.take() == []
        office.fake.faults.truncated.clear()
        await office.bench.ask("sweep")
        assert instance.problems() == []

        gone = sorted(ids)[:25]
        for id in gone:
            for message in [*w.channels[office.channel].replies(id.partition(":")[2])]:
                w.delete(office.channel, message["ts"])
            w.delete(office.channel, id.partition(":")[2])
        office.fake.drop_events()
        await office.bench.ask("sweep")
        assert [problem.code for problem in instance.problems()] == ["mass_delete"]
        assert await office.bench.take() == []
        await office.bench.ask("allow_mass_delete")
        assert kinds(await office.bench.take()) == [("document.deleted", id) for id in gone]
        assert instance.problems() == []


async def test_a_member_who_leaves_a_channel_loses_its_tag_and_nothing_else_is_published(office: Office) -> None:
    w = office.fake.workspace
    secret = w.channel("secret", office.ann, is_private=True)
    w.post(secret, office.ann, "the plan")
    async with office.running() as instance:
        await office.read(instance)
        office.fake.drop_events()
        w.leave(secret, office.ann)
        for request in office.fake.sent():
            await instance.on_event(request)
        results = []
        async with asyncio.timeout(30):
            while not results:
                results = await office.bench.take()
        [message] = results
        assert (message.kind, message.principal) == ("identity.changed.v1", "ann@acme.example")
        assert message.groups == [f"channel:{office.channel}", f"workspace:{w.team_id}"]


async def test_memberships_read_while_a_channel_becomes_private_are_stamped_before_that(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stamp of a set of groups is older than any part of it: a set that still has the channel is older than the
    moment at which the channel was closed, so whatever was read after that moment outranks it."""
    w = office.fake.workspace
    ben = w.user("Ben Roy")  # reads the channel because the whole workspace does
    closed_at: list[datetime] = []
    members = METHODS["conversations.members"]

    def close(desk: MethodContext, arguments: Mapping[str, str]) -> dict[str, Any]:
        if not closed_at:
            w.convert_to_private(office.channel)
            office.fake.drop_events()
            closed_at.append(datetime.now(UTC))
        return members(desk, arguments)

    async with office.running() as instance:
        await office.read(instance)
        w.channel("news", ben)
        office.fake.drop_events()
        await office.bench.take()
        monkeypatch.setitem(METHODS, "conversations.members", close)
        await office.bench.ask("groups")
        during = [message for message in await office.bench.take() if isinstance(message, IdentityChanged)]
        await office.bench.ask("groups")
        after = [message for message in await office.bench.take() if isinstance(message, IdentityChanged)]
    tag = f"channel:{office.channel}"
    assert all(message.observed_at < closed_at[0] for message in during)
    assert [tag in message.groups for message in during if message.principal == "ben@acme.example"] == [True]
    assert [tag in message.groups for message in after if message.principal == "ben@acme.example"] == [False]
    assert all(message.observed_at > closed_at[0] for message in after)
