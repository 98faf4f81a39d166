"""A repository that is taken away or refuses the credential, limits, and failures of GitHub."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.conform.memory_runner import MemoryRunner
from connectors.fakes.github import Place
from connectors.set_aside import SetAside
from connectors.source import Document, Gone, Listed, Unlisted, Unreadable
from connectors.web import Limits
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from tests.support.connectors.github_kit import Desk, desk_in, members
from tests.support.connectors.reading import changed, everything, listing, one


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        for name in ("bad", "good"):
            place = desk.fake.repository(f"acme/{name}", "ines")
            desk.fake.add(place, "Issue", "One", "Text.")
        yield desk


def places(desk: Desk) -> tuple[Place, Place]:
    bad, good = (desk.fake.places[id_] for id_ in sorted(desk.fake.places))
    return bad, good


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("gone", ["deleted", "taken down"])
async def test_a_repository_that_is_taken_away_is_gone_and_the_others_go_on(desk: Desk, named: bool, gone: str) -> None:
    bad, good = places(desk)
    source = desk.github(**({"repositories": ["acme/bad", "acme/good"]} if named else {"organization": "acme"}))
    cursor = await source.start()
    if gone == "deleted":
        del desk.fake.places[bad.id]
    else:
        desk.fake.faults.taken_down.add(bad.id)
    assert await one(source, f"{bad.id}/1") == Gone(f"{bad.id}/1")
    expected = {f"{good.id}/1"}
    assert (await listing(source)).keys() == expected
    assert (await everything(source)).keys() == expected
    assert (await changed(source, cursor))[0].keys() == expected
    assert (await members(source)).keys() == {f"repository:{good.id}"}
    assert await one(source, f"{bad.id}/1") == Gone(f"{bad.id}/1")


async def test_a_repository_that_refuses_the_credential_is_set_aside_and_nothing_of_it_is_gone(desk: Desk) -> None:
    bad, good = places(desk)
    desk.fake.faults.refused.add(bad.id)
    source = desk.github()
    entries = [entry async for page in source.slim() for entry in page]
    assert [entry.external_id for entry in entries if isinstance(entry, Listed)] == [f"{good.id}/1"]
    [unlisted] = [entry for entry in entries if isinstance(entry, Unlisted)]
    assert (unlisted.part, unlisted.tag) == ("repository acme/bad", f"repository:{bad.id}")
    assert "grant it access, or name it in exclude" in unlisted.reason
    assert (await everything(source)).keys() == {f"{good.id}/1"}
    assert (await changed(source, await source.start()))[0].keys() == {f"{good.id}/1"}
    refused = await one(source, f"{bad.id}/1")
    assert isinstance(refused, Unreadable)
    assert (refused.code, set(refused.acl_tags)) == ("denied", {f"repository:{bad.id}"})
    desk.fake.faults.refused.add(good.id)
    with pytest.raises(Misconfigured, match="acme/bad, acme/good refuse the credential"):
        await listing(source)
    desk.fake.faults.refused.clear()
    assert len(await listing(source)) == 2


async def test_a_repository_that_refuses_the_credential_stops_no_deletion_in_another(desk: Desk) -> None:
    bad, good = places(desk)
    desk.fake.add(good, "Issue", "Two", "Text.")
    runner = MemoryRunner(desk.github(), SetAside())
    assert await runner.full()
    assert runner.published.keys() == {f"{bad.id}/1", f"{good.id}/1", f"{good.id}/2"}
    desk.fake.faults.refused.add(bad.id)
    desk.fake.delete(good, 2)
    assert await runner.sweep(), runner.status
    assert runner.deleted == [f"{good.id}/2"]
    assert f"{bad.id}/1" in runner.published


async def test_a_listing_that_lacks_repositories_deletes_nothing_that_is_still_there(desk: Desk) -> None:
    for number in range(4):
        place = desk.fake.repository(f"acme/more-{number}", "ines")
        desk.fake.add(place, "Issue", "One", "Text.")
    desk.fake.faults.truncated = True
    source = desk.github()
    assert len(await listing(source)) == 3
    assert isinstance(await one(source, f"{place.id}/1"), Document)


async def test_no_selected_repository_at_all_needs_attention_and_deletes_nothing(desk: Desk) -> None:
    with pytest.raises(Misconfigured, match="no repository"):
        await listing(desk.github(repositories=["acme/lost"]))


@pytest.mark.parametrize("fault", ["throttled", "failing", "secondary", "spent"])
async def test_limits_and_failures_that_pass_are_waited_for(
    desk: Desk, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.web.client.SECONDARY_SECONDS", 0.05)
    setattr(desk.fake.faults, fault, 2)
    assert len(await listing(desk.github(limits=Limits(patience_seconds=20, backoff_base_seconds=0.01)))) == 2
    assert getattr(desk.fake.faults, fault) == 0


async def test_a_secondary_limit_without_a_time_is_a_wait_of_a_minute_and_no_refusal(desk: Desk) -> None:
    desk.fake.faults.secondary = 1
    with pytest.raises(Deferred) as raised:
        await listing(desk.github())
    assert raised.value.retry_after is not None
    assert raised.value.retry_after > 50


async def test_a_failure_that_github_reports_with_status_200_is_retried(desk: Desk) -> None:
    desk.fake.faults.broken_query = "IssueListed"
    with pytest.raises(Retryable):
        await listing(desk.github())


async def test_a_token_that_is_refused_deletes_nothing(desk: Desk) -> None:
    source = desk.github(token="revoked")
    for read in (listing(source), members(source), one(source, "1/1")):
        with pytest.raises(Misconfigured):
            await read
