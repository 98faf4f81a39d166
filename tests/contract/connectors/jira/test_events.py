"""Webhooks of Jira, their signatures, and what they make the connector read."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from connectors.fakes.jira import signed
from connectors.source import Reaction, Refused, Request
from tests.support.connectors.jira_kit import Office
from tests.support.connectors.reading import everything


def body(name: str, *, at: datetime | None = None, **fields: Any) -> dict[str, Any]:
    moment = at or datetime.now(UTC)
    return {"timestamp": int(moment.timestamp() * 1000), "webhookEvent": name, **fields}


ISSUE = {"issue": {"id": "10100", "key": "ENG-1"}}


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("jira:issue_created", ISSUE, Reaction(ids=("10100",), changes=True)),
        ("jira:issue_updated", ISSUE, Reaction(ids=("10100",), changes=True)),
        ("jira:issue_deleted", ISSUE, Reaction(ids=["10100"], sweep=True)),
        ("comment_created", ISSUE, Reaction(ids=("10100",), changes=True)),
        ("comment_updated", ISSUE, Reaction(ids=("10100",), changes=True)),
        ("comment_deleted", ISSUE, Reaction(ids=["10100"], changes=True)),
        ("comment_deleted", {}, Reaction(changes=True, sweep=True)),
        ("attachment_created", {"attachment": {"id": "1"}}, Reaction(changes=True)),
        ("attachment_deleted", {"attachment": {"id": "1"}}, Reaction(changes=True)),
        ("project_updated", {"project": {"id": 1}}, Reaction(sweep=True)),
        ("project_deleted", {"project": {"id": 1}}, Reaction(sweep=True)),
        ("jira:issue_updated", {"issue": {"id": "10100/../1"}}, Reaction(changes=True)),
        ("jira:issue_updated", {"issue": "10100"}, Reaction(changes=True)),
        ("sprint_started", {}, Reaction()),
        ("", {}, Reaction()),
    ],
)
async def test_an_event_names_what_to_read(
    office: Office, name: str, fields: dict[str, Any], expected: Reaction
) -> None:
    assert await office.jira().on_event(signed(body(name, **fields), office.fake.webhook_secret)) == expected


async def test_an_event_without_a_valid_signature_is_refused(office: Office) -> None:
    source, event = office.jira(), body("jira:issue_updated", **ISSUE)
    request = signed(event, office.fake.webhook_secret)
    other = signed({**event, "issue": {"id": "1"}}, office.fake.webhook_secret)
    for forged in (
        signed(event, "another secret"),
        Request({}, {}, request.body),
        Request(request.headers, {}, other.body),
        Request({"x-hub-signature": "sha256="}, {}, request.body),
        Request({"x-penstock-token": "another secret"}, {}, request.body),
        signed(event, ""),
    ):
        with pytest.raises(Refused):
            await source.on_event(forged)
    with pytest.raises(Refused, match="webhook_secret is not set"):
        await office.jira(webhook_secret=None).on_event(request)


async def test_an_automation_rule_sends_the_secret_itself(office: Office) -> None:
    raw = json.dumps({"event": "jira:issue_updated", **ISSUE}).encode()
    request = Request({"x-penstock-token": office.fake.webhook_secret}, {}, raw)
    for _ in range(2):
        assert await office.jira().on_event(request) == Reaction(ids=("10100",), changes=True)


async def test_a_replayed_event_is_ignored_and_refused_after_five_minutes(office: Office) -> None:
    source = office.jira()
    request = signed(body("jira:issue_updated", **ISSUE), office.fake.webhook_secret)
    assert (await source.on_event(request)).ids
    assert await source.on_event(request) == Reaction()
    old = body("jira:issue_updated", at=datetime.now(UTC) - timedelta(minutes=6), **ISSUE)
    with pytest.raises(Refused, match="360 s old"):
        await source.on_event(signed(old, office.fake.webhook_secret))


@pytest.mark.parametrize("raw", [b"", b"no json", b"[]", b'"text"'])
async def test_what_is_no_event_is_refused(office: Office, raw: bytes) -> None:
    request = Request({"x-penstock-token": office.fake.webhook_secret}, {}, raw)
    with pytest.raises(Refused):
        await office.jira().on_event(request)


async def test_a_deleted_issue_is_read_again_with_all_its_documents(office: Office) -> None:
    state = office.state
    issue = state.add_issue(office.eng, "One", "Text.")
    comment = state.comment(issue, "A secret.", visibility=("group", "staff"))
    state.attach(issue, "a.txt", b"About a.")
    source = office.jira()
    documents = await everything(source)
    assert len(documents) == 3
    office.fake.sent()
    state.delete_comment(issue, comment)
    [deleted_comment] = office.fake.sent()
    reaction = await source.on_event(deleted_comment)
    assert set(reaction.ids) == {id for id in documents if "/attachment/" not in id}
    state.delete(issue)
    [deleted_issue] = office.fake.sent()
    reaction = await source.on_event(deleted_issue)
    assert (set(reaction.ids), reaction.sweep) == (documents.keys(), True)
