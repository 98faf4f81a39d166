"""A git repository through the runner to a real Kafka: what is published, when something happens and when not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from connectors.git.playground import GitPlayground, playing
from connectors.git.source import Git
from connectors.runner.instance import Instance
from connectors.source import Request
from pipeline.core.errors import Retryable
from tests.support.connectors.playground_kit import Played, documents, made, upserted
from tests.support.connectors.runner_kit import Ground, bench_on, kinds
from topics.messages import AnyMessage

pytestmark = pytest.mark.stack

NAMES = tuple(f"d{n}" for n in range(7))
"""Three pages of three, three and one."""
TEXT = "\n\n".join(f"Paragraph {n} of many that stay as they are." for n in range(20))


@dataclass
class Team(Played[GitPlayground]):
    """A team's repository, and a runner's surroundings."""

    async def deliver_events(self, instance: Instance, requests: Sequence[Request] | None = None) -> list[AnyMessage]:
        """Deliver the events of a push, and return what is published: the event alone starts a read of the changes."""
        changes = instance.activities["changes"].status
        before = changes.succeeded_at
        for request in self.play.sent() if requests is None else requests:
            await instance.on_event(request)
        await self.bench.until(lambda: changes.succeeded_at != before, 60)
        await self.bench.until(lambda: self.idle(instance), 60)
        return await self.run_action("changes")  # a second run may be due for what came during the first


@pytest.fixture
async def team(ground: Ground, tmp_path: Path) -> AsyncIterator[Team]:
    async with playing() as play, bench_on(ground, tmp_path, made(Git, play)) as bench:
        for name in NAMES:
            await play.write(name, f"# {name}\n\n{TEXT}")
        yield Team(bench, play)


async def test_first_crawl_publishes_every_document_and_identity(team: Team) -> None:
    async with team.running() as instance:
        await team.settle(instance)
        messages = await team.bench.take()
        assert kinds(documents(messages)) == upserted(*team.play.ids.values())
        assert all((document.acl_tags, document.author) == (["team"], "Ada Author") for document in documents(messages))
        people = {message.principal: message.groups for message in messages if message.kind == "identity.changed.v1"}
        assert people == {team.play.inside: ["team"]}


@pytest.mark.slow
async def test_no_change_poll_publishes_nothing(team: Team) -> None:
    async with team.loaded():
        assert await team.run_action("changes") == []
        assert await team.run_action("sweep") == []
        assert await team.run_action("full") == []


async def test_edit_move_deletion_and_restore_are_published(team: Team) -> None:
    async with team.loaded() as instance:
        id_ = await team.play.write("d1", f"# d1\n\n{TEXT}\n\nAnd more.")
        [edited] = await team.deliver_events(instance)
        assert (edited.external_id, edited.content.endswith("And more.")) == (id_, True)
        await team.play.move("d1")
        [moved] = await team.deliver_events(instance)
        assert (moved.external_id, moved.metadata["path"]) == (id_, f"moved/{id_}")
        await team.play.remove("d1")
        assert kinds(await team.deliver_events(instance)) == [("document.deleted", id_)]
        await team.play.restore("d1")
        assert kinds(await team.deliver_events(instance)) == upserted(id_)
        assert await team.run_action("sweep") == []


async def test_a_tightened_access_rule_is_published_by_the_sweep(team: Team) -> None:
    async with team.loaded():
        await team.play.restrict("d2")
        [changed] = await team.run_action("sweep")
        assert kinds([changed]) == [("document.access-changed", team.play.ids["d2"])]
        assert changed.acl_tags == ["user:nobody-here@example.com"]


async def test_a_member_removed_from_a_group_loses_its_memberships(team: Team) -> None:
    async with team.loaded():
        await team.play.leave()
        [left] = await team.run_action("groups")
        assert (left.principal, left.groups) == (team.play.inside, [])


@pytest.mark.slow
async def test_a_sweep_publishes_changes_whose_webhooks_were_lost(team: Team) -> None:
    async with team.loaded():
        edited = await team.play.write("d3", "Another text.")
        await team.play.remove("d4")
        await team.play.move("d6")
        await team.play.restrict("d5")
        team.play.sent()
        ids = team.play.ids
        assert kinds(await team.run_action("sweep")) == sorted(
            [
                ("document.upserted", edited),
                ("document.deleted", ids["d4"]),
                ("document.upserted", ids["d6"]),
                ("document.access-changed", ids["d5"]),
            ]
        )
        assert await team.run_action("changes") == []


@pytest.mark.slow
async def test_duplicated_and_reordered_webhooks_publish_each_change_once(team: Team) -> None:
    async with team.loaded() as instance:
        first = await team.play.write("d0", "First.")
        requests = list(team.play.sent())
        second = await team.play.write("d1", "Second.")
        requests = [*team.play.sent(), *requests]
        assert kinds(await team.deliver_events(instance, requests * 2)) == upserted(first, second)
        for request in requests[::-1]:
            await instance.on_event(request)  # known by now: nobody looks because of it
        assert await team.run_action("changes") == []


def call_after_first_page(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> list[int]:
    """Calls it before the second page's documents are read, and each time after that."""
    entries, calls = Git._entries, []

    async def counting(self: Git, *given: object) -> object:
        calls.append(1)
        if len(calls) > 1 and (result := happens()) is not None:
            await result
        return await entries(self, *given)

    monkeypatch.setattr(Git, "_entries", counting)
    return calls


async def test_a_history_rewritten_mid_crawl_publishes_every_document_and_deletes_none(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten: list[int] = []

    def rewrite() -> object:
        if rewritten:
            return None
        rewritten.append(1)
        return team.play.trouble(expired=True)

    call_after_first_page(monkeypatch, rewrite)
    async with team.running() as instance:
        await team.settle(instance)
    assert rewritten
    messages = documents(await team.bench.take())
    assert {message.external_id for message in messages} == set(team.play.ids.values())
    assert not [message for message in await team.bench.take() if message.kind == "document.deleted.v1"]


async def test_a_sweep_follows_an_expired_cursor_of_changes(team: Team) -> None:
    async with team.loaded() as instance:
        edited = await team.play.write("d0", "While nobody could know.")
        await team.play.trouble(expired=True)
        await team.bench.ask("changes")
        await team.bench.until(lambda: team.idle(instance), 60)
        assert edited in {message.external_id for message in await team.bench.take()}
        later = await team.play.write("d1", "And again.")
        assert kinds(await team.run_action("changes")) == upserted(later)


@pytest.mark.slow
async def test_a_429_storm_is_waited_out(team: Team) -> None:
    await team.play.trouble(throttled=6)
    async with team.running() as instance:
        await team.settle(instance)
        assert team.play.backend.throttled == 0
        assert kinds(documents(await team.bench.take())) == upserted(*team.play.ids.values())


async def test_crash_mid_crawl_and_resume_publishes_no_page_again(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        raise Retryable("the disk is away")

    with monkeypatch.context() as patched:
        calls = call_after_first_page(patched, breaks)
        async with team.running():
            await team.bench.until(lambda: len(calls) > 1, 60)
    first = [message.external_id for message in documents(await team.bench.take())]
    assert sorted(first) == sorted(team.play.ids.values())[:3]
    async with team.running() as instance:
        await team.settle(instance)
    rest = [message.external_id for message in documents(await team.bench.take())]
    assert sorted(first + rest) == sorted(team.play.ids.values())


async def test_a_missing_branch_deletes_nothing(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.git.client.PATIENCE_SECONDS", 0)
    async with team.loaded() as instance:
        await team.play.trouble(truncated=True)
        instance.activities["sweep"].trigger()
        await team.bench.until(lambda: "no branch any more" in str(instance.activities["sweep"].status), 60)
        assert await team.bench.take() == []
        await team.play.trouble()
        await team.bench.until(lambda: team.idle(instance) and instance.activities["sweep"].status.state == "idle", 60)
        assert await team.bench.take() == []
