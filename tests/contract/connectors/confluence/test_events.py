"""Confluence's events: what they make us do, and that they prove where they come from."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from connectors.fakes.confluence import Flavour, requests, signed
from connectors.source import Reaction, Refused, Request
from pipeline.core.errors import Retryable
from tests.support.connectors.confluence_kit import FLAVOURS, SECRET, Wiki, wiki


@pytest.fixture(params=FLAVOURS)
async def one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Wiki]:
    flavour: Flavour = request.param
    async with wiki(flavour, tmp_path) as made:
        yield made


async def test_created_and_edited_pages_are_fetched(one: Wiki) -> None:
    page = one.page("Page")
    one.state.edit(page.id, body="<p>Other</p>")
    post = one.page("News", kind="blogpost")
    assert await one.events() == [Reaction(ids=(page.id,)), Reaction(ids=(page.id,)), Reaction(ids=(post.id,))]


async def test_a_trashed_restored_or_purged_page_is_fetched_and_a_sweep_follows(one: Wiki) -> None:
    """Its attachments go and come with it, and its children inherit from another page."""
    page = one.page("Page")
    await one.events()
    one.state.trash(page.id)
    one.state.restore(page.id)
    one.state.purge(page.id)
    assert await one.events() == [Reaction(ids=(page.id,), sweep=True)] * 3


async def test_a_comment_event_fetches_its_page_and_an_attachment_event_the_attachment(one: Wiki) -> None:
    page = one.page("Page")
    await one.events()
    one.state.add_comment(page.id, "<p>Hm.</p>")
    file = one.state.attach(page.id, "a.txt", b"words", "text/plain")
    assert await one.events() == [Reaction(ids=(page.id,)), Reaction(ids=(file.id,))]


async def test_a_restriction_or_move_fetches_the_page_and_all_its_descendants(one: Wiki) -> None:
    top = one.page("Top")
    below = one.page("Below", parent=top.id)
    file = one.state.attach(below.id, "a.txt", b"words", "text/plain")
    await one.events()
    one.state.restrict(top.id, users={one.bot.account_id})
    one.state.move(top.id, None)
    for reaction in await one.events():
        assert set(reaction.ids) == {top.id, below.id, file.id}
        assert reaction.groups == (f"restriction:{top.id}",)
        assert not reaction.sweep


async def test_a_restriction_with_many_descendants_or_an_unreachable_source_causes_a_sweep(one: Wiki) -> None:
    top = one.page("Top")
    for n in range(45):
        one.page(f"Below {n}", parent=top.id)
    await one.events()
    expected = Reaction(ids=(top.id,), groups=(f"restriction:{top.id}",), sweep=True)
    one.state.restrict(top.id, users={one.bot.account_id})
    assert await one.events() == [expected]
    one.fake.faults.seconds = 5
    one.state.restrict(top.id)
    assert await one.events() == [expected]


async def test_an_event_without_a_valid_signature_is_refused(one: Wiki) -> None:
    one.page("Page")
    (genuine,) = requests(one.state.events, SECRET, cloud=one.fake.cloud)
    (foreign,) = requests(one.state.events, "another secret", cloud=one.fake.cloud)
    forged = [
        foreign,
        replace(genuine, headers={}),
        replace(genuine, headers={"x-hub-signature": ""}),
        replace(genuine, headers={"x-hub-signature": "sha256="}),
        replace(genuine, headers={"x-hub-signature": "sha1=" + genuine.headers["x-hub-signature"][7:]}),
        replace(genuine, headers={"x-hub-signature": "sha256=ä"}),
        replace(genuine, headers={"x-penstock-token": "another secret"}),
        replace(genuine, body=genuine.body + b" "),
    ]
    for request in forged:
        with pytest.raises(Refused) as raised:
            await one.source.on_event(request)
        assert SECRET not in str(raised.value)
    await one.source.on_event(genuine)
    unset = one.connect(webhook_secret=None)
    with pytest.raises(Refused, match="webhook_secret"):
        await unset.on_event(genuine)


async def test_a_replayed_event_is_ignored_and_refused_after_five_minutes(
    one: Wiki,
) -> None:
    page = one.page("Page")
    (genuine,) = requests(one.state.events, SECRET, cloud=one.fake.cloud)
    assert [await one.source.on_event(genuine) for _ in range(3)] == [Reaction(ids=(page.id,)), Reaction(), Reaction()]
    for away in (-301, 301):
        happened = replace(one.state.events[0], at=datetime.now(UTC) + timedelta(seconds=away))
        with pytest.raises(Refused, match="the two clocks differ"):
            await one.source.on_event(*requests([happened], SECRET, cloud=one.fake.cloud))


async def test_two_equal_events_without_a_timestamp_are_both_handled(one: Wiki) -> None:
    """The second may be the one that withdrew access."""
    event = signed({"event": "space_permissions_updated", "space": {"key": "ENG"}}, SECRET)
    assert [await one.source.on_event(event) for _ in range(2)] == [Reaction(groups=("space:ENG",))] * 2


async def test_an_event_whose_handling_failed_is_handled_when_it_is_sent_again(
    one: Wiki, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = one.page("Page")
    one.state.events.clear()
    one.state.restrict(page.id, users={one.bot.account_id})
    (event,) = requests(one.state.events, SECRET, cloud=one.fake.cloud)

    async def broken(ids: object) -> Reaction:
        raise Retryable("away")

    with monkeypatch.context() as patched:
        patched.setattr(one.source, "_inherited_access", broken)
        with pytest.raises(Retryable):
            await one.source.on_event(event)
    assert (await one.source.on_event(event)).ids


@pytest.mark.parametrize("time", [10**30, -(10**30), "yesterday"])
async def test_an_event_with_an_invalid_timestamp_is_refused(one: Wiki, time: object) -> None:
    with pytest.raises(Refused):
        await one.source.on_event(signed({"event": "page_updated", "id": 65700, "timestamp": time}, SECRET))


async def test_only_cloud_accepts_a_secret_in_a_header_instead_of_a_signature(one: Wiki) -> None:
    """An automation rule cannot sign."""
    rule = Request({"x-penstock-token": SECRET}, {}, b'{"event": "page_updated", "id": 65700}')
    if one.fake.cloud:
        assert await one.source.on_event(rule) == Reaction(ids=("65700",))
    else:
        with pytest.raises(Refused):
            await one.source.on_event(rule)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"event": "space_permissions_updated", "space": {"key": "ENG"}}, Reaction(groups=("space:ENG",))),
        ({"event": "space_permissions_updated"}, Reaction(sweep=True)),
        ({"event": "space_removed", "space": {"key": "ENG"}}, Reaction(sweep=True)),
        ({"event": "group_removed", "groupName": "staff"}, Reaction(groups=("group:staff",))),
        ({"eventType": "avi:confluence:deleted:space:V2", "space": {"key": "ENG"}}, Reaction(sweep=True)),
        ({"eventType": "avi:confluence:updated:page"}, Reaction(changes=True)),
        ({"eventType": "avi:confluence:liked:page", "content": {"id": "65700"}}, Reaction()),
        ({"eventType": "avi:confluence:"}, Reaction()),
        ({"event": "comment_created", "comment": {"id": 1}}, Reaction(changes=True)),
        ({"event": "page_updated", "page": {"id": "../../admin"}}, Reaction(changes=True)),
        ({"event": "page_updated", "page": [None, 3, {"id": {"id": 4}}]}, Reaction(changes=True)),
        ({"event": ["page_updated"]}, Reaction()),
        ({"event": "attachment_updated", "attachments": [{"id": 4}, {"id": "att5"}]}, Reaction(ids=("att4", "att5"))),
        ({"event": "user_deactivated", "user": {"userKey": "k"}}, Reaction()),
        ({"test": True}, Reaction()),
    ],
)
async def test_each_shape_of_event_has_its_reaction(one: Wiki, body: dict[str, object], expected: Reaction) -> None:
    assert await one.source.on_event(signed(body, SECRET)) == expected


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"3", json.dumps("x").encode()])
async def test_a_signed_body_that_is_no_json_object_is_refused(one: Wiki, body: bytes) -> None:
    import hashlib
    import hmac

    digest = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    with pytest.raises(Refused):
        await one.source.on_event(Request({"x-hub-signature": f"sha256={digest}"}, {}, body))
