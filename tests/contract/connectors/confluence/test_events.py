"""Confluence's events: what they make us do, and that they prove where they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from connectors.fakes.confluence import requests, signed
from connectors.source import Reaction, Refused, Request
from pipeline.core.errors import Retryable
from tests.support.connectors.confluence_kit import SECRET, Wiki


async def test_created_and_edited_pages_are_fetched(site: Wiki) -> None:
    page = site.page("Page")
    site.state.edit(page.id, body="<p>Other</p>")
    post = site.page("News", kind="blogpost")
    assert await site.events() == [Reaction(ids=(page.id,)), Reaction(ids=(page.id,)), Reaction(ids=(post.id,))]


async def test_a_trashed_restored_or_purged_page_is_fetched_and_a_sweep_follows(site: Wiki) -> None:
    """Its attachments go and come with it, and its children inherit from another page."""
    page = site.page("Page")
    await site.events()
    site.state.trash(page.id)
    site.state.restore(page.id)
    site.state.purge(page.id)
    assert await site.events() == [Reaction(ids=(page.id,), sweep=True)] * 3


async def test_a_comment_event_fetches_its_page_and_an_attachment_event_the_attachment(site: Wiki) -> None:
    page = site.page("Page")
    await site.events()
    site.state.add_comment(page.id, "<p>Hm.</p>")
    file = site.state.attach(page.id, "a.txt", b"words", "text/plain")
    assert await site.events() == [Reaction(ids=(page.id,)), Reaction(ids=(file.id,))]


async def test_a_restriction_or_move_fetches_the_page_and_all_its_descendants(site: Wiki) -> None:
    top = site.page("Top")
    below = site.page("Below", parent=top.id)
    file = site.state.attach(below.id, "a.txt", b"words", "text/plain")
    await site.events()
    site.state.restrict(top.id, users={site.bot.account_id})
    site.state.move(top.id, None)
    for reaction in await site.events():
        assert set(reaction.ids) == {top.id, below.id, file.id}
        assert reaction.groups == (f"restriction:{top.id}",)
        assert not reaction.sweep


async def test_a_restriction_with_many_descendants_or_an_unreachable_source_causes_a_sweep(site: Wiki) -> None:
    top = site.page("Top")
    for n in range(45):
        site.page(f"Below {n}", parent=top.id)
    await site.events()
    expected = Reaction(ids=(top.id,), groups=(f"restriction:{top.id}",), sweep=True)
    site.state.restrict(top.id, users={site.bot.account_id})
    assert await site.events() == [expected]
    site.fake.faults.seconds = 5
    site.state.restrict(top.id)
    assert await site.events() == [expected]


async def test_an_event_without_a_valid_signature_is_refused(site: Wiki) -> None:
    site.page("Page")
    (genuine,) = requests(site.state.events, SECRET, cloud=site.fake.cloud)
    (foreign,) = requests(site.state.events, "another secret", cloud=site.fake.cloud)
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
            await site.source.on_event(request)
        assert SECRET not in str(raised.value)
    await site.source.on_event(genuine)
    unset = site.connect(webhook_secret=None)
    with pytest.raises(Refused, match="webhook_secret"):
        await unset.on_event(genuine)


async def test_a_replayed_event_is_ignored_and_refused_after_five_minutes(
    site: Wiki,
) -> None:
    page = site.page("Page")
    (genuine,) = requests(site.state.events, SECRET, cloud=site.fake.cloud)
    assert [await site.source.on_event(genuine) for _ in range(3)] == [Reaction(ids=(page.id,)), Reaction(), Reaction()]
    for away in (-301, 301):
        happened = replace(site.state.events[0], at=datetime.now(UTC) + timedelta(seconds=away))
        with pytest.raises(Refused, match="the two clocks differ"):
            await site.source.on_event(*requests([happened], SECRET, cloud=site.fake.cloud))


async def test_a_recorded_event_that_is_sent_under_another_name_hides_no_event(site: Wiki) -> None:
    """Only the body is signed, and one that does not say what happened has that in a header. A permission that was
    withdrawn was noticed by the next poll alone, if somebody had sent its event as another one before it was delivered
    again."""
    time = int(datetime.now(UTC).timestamp() * 1000)
    event = signed({"space": {"key": "ENG"}, "timestamp": time}, SECRET)
    withdrawn, other = (
        replace(event, headers={**event.headers, "x-event-key": name})
        for name in ("space_permissions_updated", "label_added")
    )
    expected = Reaction(groups=("space:ENG",))
    assert [await site.source.on_event(request) for request in (other, withdrawn, withdrawn)] == [
        Reaction(),
        expected,
        Reaction(),
    ]


async def test_two_equal_events_without_a_timestamp_are_both_handled(site: Wiki) -> None:
    """The second may be the one that withdrew access."""
    event = signed({"event": "space_permissions_updated", "space": {"key": "ENG"}}, SECRET)
    assert [await site.source.on_event(event) for _ in range(2)] == [Reaction(groups=("space:ENG",))] * 2


async def test_an_event_whose_handling_failed_is_handled_when_it_is_sent_again(
    site: Wiki, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = site.page("Page")
    site.state.events.clear()
    site.state.restrict(page.id, users={site.bot.account_id})
    (event,) = requests(site.state.events, SECRET, cloud=site.fake.cloud)

    async def broken(ids: object) -> Reaction:
        raise Retryable("away")

    with monkeypatch.context() as patched:
        patched.setattr(site.source, "_inherited_access", broken)
        with pytest.raises(Retryable):
            await site.source.on_event(event)
    assert (await site.source.on_event(event)).ids


@pytest.mark.parametrize("time", [10**30, -(10**30), "yesterday"])
async def test_an_event_with_an_invalid_timestamp_is_refused(site: Wiki, time: object) -> None:
    with pytest.raises(Refused):
        await site.source.on_event(signed({"event": "page_updated", "id": 65700, "timestamp": time}, SECRET))


async def test_only_cloud_accepts_a_secret_in_a_header_instead_of_a_signature(site: Wiki) -> None:
    """An automation rule cannot sign."""
    rule = Request({"x-penstock-token": SECRET}, {}, b'{"event": "page_updated", "id": 65700}')
    if site.fake.cloud:
        assert await site.source.on_event(rule) == Reaction(ids=("65700",))
    else:
        with pytest.raises(Refused):
            await site.source.on_event(rule)


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
async def test_each_shape_of_event_has_its_reaction(site: Wiki, body: dict[str, object], expected: Reaction) -> None:
    assert await site.source.on_event(signed(body, SECRET)) == expected


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"3", json.dumps("x").encode()])
async def test_a_signed_body_that_is_no_json_object_is_refused(site: Wiki, body: bytes) -> None:
    import hashlib
    import hmac

    digest = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    with pytest.raises(Refused):
        await site.source.on_event(Request({"x-hub-signature": f"sha256={digest}"}, {}, body))
