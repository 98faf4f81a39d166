"""Events: their signature, repetition, and what they make the runner read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from connectors.source import Reaction, Refused, Request
from tests.support.connectors.github_kit import Desk, desk_in
from tests.support.connectors.reading import listing


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


async def test_an_event_of_a_document_names_it_once_even_after_a_restart(desk: Desk) -> None:
    place = desk.fake.repository("acme/handbook", "ines")
    issue, pull = (desk.fake.add(place, kind, "One", "Text.") for kind in ("Issue", "PullRequest"))
    idea = desk.fake.add(place, "Discussion", "One", "Text.")
    desk.fake.comment(place, issue, "ines", "Why?")
    desk.fake.comment(place, idea, "ines", "Why?")
    desk.fake.review(place, pull, "ines", "Why?", "COMMENTED")
    desk.fake.delete(place, issue)
    events = desk.fake.sent()
    numbers = [1, 2, 3, 1, 3, 2, 1]
    source = desk.github()
    assert [await source.on_event(event) for event in events] == [Reaction(ids=(f"{place.id}/{n}",)) for n in numbers]
    assert [await desk.github().on_event(event) for event in events] == [Reaction()] * len(events)


async def test_a_recorded_event_that_is_sent_under_another_name_hides_no_event(desk: Desk) -> None:
    """Only the body is signed. A deleted issue was noticed by the next sweep alone, if somebody had sent its event as
    one of another kind before it was delivered again."""
    place = desk.fake.repository("acme/handbook", "ines")
    issue = desk.fake.add(place, "Issue", "One", "Text.")
    desk.fake.sent()
    desk.fake.delete(place, issue)
    [event] = desk.fake.sent()
    source = desk.github()
    renamed = Request({**event.headers, "x-github-event": "discussion"}, event.query, event.body)
    assert await source.on_event(renamed) == Reaction()
    assert await source.on_event(event) == Reaction(ids=(f"{place.id}/1",))
    assert await source.on_event(event) == Reaction()


PEOPLE = [
    ("member", {"action": "removed"}, True),
    ("team", {"action": "removed_from_repository"}, True),
    ("membership", {"action": "removed", "scope": "team"}, False),
    ("organization", {"action": "member_removed"}, False),
]


@pytest.mark.parametrize(("event", "body", "of_one"), PEOPLE)
async def test_an_event_of_people_reads_the_collaborators_again_however_often_it_comes(
    desk: Desk, event: str, body: dict[str, Any], of_one: bool
) -> None:
    """A member who is removed, added and removed again causes two equal events, and the second withdraws access."""
    first, second = desk.fake.repository("acme/one"), desk.fake.repository("acme/two", visibility="INTERNAL")
    source = desk.github()
    await listing(source)
    named = {**body, "repository": {"id": first.id}} if of_one else body
    tags = {f"repository:{first.id}"} if of_one else {f"repository:{place.id}" for place in (first, second)}
    if event == "organization":
        tags.add(f"organization:{desk.fake.organizations['acme']['id']}")
    for _ in range(2):
        reaction = await source.on_event(desk.fake.signed(event, named))
        assert set(reaction.groups) == tags


async def test_a_repository_that_changes_is_swept_and_other_events_are_ignored(desk: Desk) -> None:
    place = desk.fake.repository("acme/handbook")
    desk.fake.rename(place, "acme/manual")
    [event] = desk.fake.sent()
    source = desk.github()
    assert await source.on_event(event) == Reaction(groups=(f"repository:{place.id}",), sweep=True)
    ignored: list[tuple[str, dict[str, Any]]] = [("ping", {"zen": "?"}), ("issues", {}), ("issues", {"repository": []})]
    for name, body in ignored:
        assert await source.on_event(desk.fake.signed(name, body)) == Reaction()


@pytest.mark.parametrize("secret", ["", " ", None])
async def test_without_a_secret_every_event_is_refused(desk: Desk, secret: str | None) -> None:
    with pytest.raises(Refused):
        await desk.github(webhook_secret=secret).on_event(desk.fake.signed("ping", {}, secret or ""))


async def test_an_event_without_a_valid_signature_is_refused(desk: Desk) -> None:
    event = desk.fake.signed("issues", {"repository": {"id": 1}, "issue": {"number": 1}})
    for headers, body in (
        ({}, event.body),
        ({**event.headers, "x-hub-signature-256": "sha256=ü"}, event.body),
        (event.headers, event.body + b" "),
        (desk.fake.signed("issues", {}, "another secret").headers, b"{}"),
    ):
        with pytest.raises(Refused):
            await desk.github().on_event(Request(headers, {}, body))
