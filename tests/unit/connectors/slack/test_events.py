"""The reads that Slack's events cause, and the identities of users."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.slack.access import Team, channel, channel_group, principal, user, workspace_group
from connectors.slack.events import MAX_SEEN_EVENTS, SeenEvents, reaction
from connectors.source import Reaction

TEAM = Team("T1", "https://acme.slack.com", None)


def envelope(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "event_callback",
        "event_id": "Ev1",
        "event": event,
        "authorizations": [{"user_id": "UBOT", "is_bot": True}],
    }


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"channel": "C1", "channel_type": "channel", "ts": "5.000001"}, Reaction(ids=("C1:5.000001",))),
        ({"channel": "C1", "ts": "5.000001", "thread_ts": "2.000001"}, Reaction(ids=("C1:2.000001",))),
        (
            {
                "channel": "C1",
                "subtype": "message_changed",
                "ts": "9.000001",
                "message": {"ts": "5.000001", "thread_ts": "2.000001"},
                "previous_message": {"ts": "5.000001"},
            },
            Reaction(ids=("C1:2.000001", "C1:5.000001")),
        ),
        (
            {
                "channel": "C1",
                "subtype": "message_deleted",
                "ts": "9.000001",
                "deleted_ts": "5.000001",
                "previous_message": {"ts": "5.000001", "thread_ts": "2.000001"},
            },
            Reaction(ids=("C1:2.000001",)),
        ),
        (
            {"channel": "C1", "subtype": "message_deleted", "ts": "9.000001", "deleted_ts": "5.000001"},
            Reaction(ids=("C1:5.000001",)),
        ),
        ({"channel": "D1", "channel_type": "im", "ts": "5.000001"}, Reaction()),
        ({"channel": "G1", "channel_type": "mpim", "ts": "5.000001"}, Reaction()),
        (
            {"channel": "C1", "ts": "5.000001", "subtype": "channel_convert_to_private"},
            Reaction(groups=("channel:C1",), sweep=True),
        ),
        ({"channel": "C1/../x", "ts": "5.000001"}, Reaction()),
        ({"channel": "C1", "ts": 5}, Reaction()),
    ],
)
def test_a_message_event_fetches_its_thread(event: dict[str, Any], expected: Reaction) -> None:
    assert reaction(envelope({"type": "message", **event})) == (expected, None)


@pytest.mark.parametrize(
    ("event", "expected", "effect"),
    [
        ({"type": "member_joined_channel", "user": "U1", "channel": "C1"}, Reaction(groups=("channel:C1",)), None),
        ({"type": "member_left_channel", "user": "U1", "channel": "C1"}, Reaction(groups=("channel:C1",)), None),
        (
            {"type": "member_joined_channel", "user": "UBOT", "channel": "C1"},
            Reaction(groups=("channel:C1",), changes=True, sweep=True),
            "names",
        ),
        ({"type": "group_left", "channel": "C1"}, Reaction(groups=("channel:C1",), sweep=True), "names"),
        (
            {"type": "channel_rename", "channel": {"id": "C1", "name": "new"}},
            Reaction(groups=("channel:C1",), sweep=True),
            "names",
        ),
        ({"type": "channel_archive", "channel": "C1"}, Reaction(groups=("channel:C1",), sweep=True), "names"),
        ({"type": "channel_deleted", "channel": "C1"}, Reaction(groups=("channel:C1",), sweep=True), "names"),
        ({"type": "channel_created", "channel": {"id": "C1"}}, Reaction(groups=("channel:C1",)), "names"),
        ({"type": "subteam_updated", "subteam": {"id": "S1"}}, Reaction(), "names"),
        ({"type": "user_change", "user": {"id": "U1"}}, Reaction(), "people"),
        ({"type": "reaction_added", "item": {"channel": "C1"}}, Reaction(), None),
    ],
)
def test_channel_and_user_events_have_their_reactions(
    event: dict[str, Any], expected: Reaction, effect: str | None
) -> None:
    assert reaction(envelope(event)) == (expected, effect)


def test_a_rate_limit_event_causes_a_read_of_changes_and_a_sweep() -> None:
    assert reaction({"type": "app_rate_limited", "minute_rate_limited": 1}) == (
        Reaction(changes=True, sweep=True),
        None,
    )


@pytest.mark.parametrize(
    "nonsense", [{}, {"type": "event_callback"}, {"type": "event_callback", "event": []}, {"type": "x"}]
)
def test_a_malformed_event_is_ignored(nonsense: dict[str, Any]) -> None:
    assert reaction(nonsense) == (Reaction(), None)


def test_a_limited_number_of_event_ids_is_remembered() -> None:
    seen = SeenEvents()
    for n in range(MAX_SEEN_EVENTS + 1):
        seen.add(f"Ev{n}")
    assert "Ev0" not in seen
    assert "Ev1" in seen
    seen.add(None)
    assert None not in seen


def row(id: str, **fields: Any) -> dict[str, Any]:
    profile = {"real_name": id, "email": f"{id}@Acme.example"} | fields.pop("profile", {})
    return {"id": id, "team_id": "T1", "profile": profile, **fields}


ROWS = [
    row("U1"),
    row("U2", is_restricted=True),
    row("U3", is_ultra_restricted=True),
    row("U4", deleted=True),
    row("U5", is_bot=True),
    row("U6", team_id="T2"),
    row("U7", is_stranger=True),
    row("U8", is_email_confirmed=False),
    row("U9", profile={"email": None}),
    row("USLACKBOT"),
    row("UA", is_invited_user=True),
    row("UB", team_id=None),
]
USERS = {member.id: member for row in ROWS if (member := user(row, TEAM))}


def test_only_full_members_hold_the_workspace_tag() -> None:
    assert workspace_group(TEAM, USERS).members == ["slack:U8", "slack:U9", "u1@acme.example"]


def test_a_user_of_another_workspace_of_the_same_organisation_is_a_guest() -> None:
    team = Team("T1", "https://acme.slack.com", "E1")
    parsed = user(row("U1", team_id="T2", enterprise_user={"enterprise_id": "E1"}), team)
    assert parsed is not None
    assert parsed.kind == "guest"
    ours = user(row("U2", team_id="T2", enterprise_user={"enterprise_id": "E1", "teams": ["T2", "T1"]}), team)
    assert ours is not None
    assert ours.kind == "full"
    assert principal("U1", {"U1": parsed}, trust_external_emails=False) == "u1@acme.example"


def test_channel_members_are_named_by_email_and_external_users_by_slack_id() -> None:
    parsed = channel({"id": "C1", "name": "ops", "is_private": True, "is_member": True})
    assert parsed is not None
    members = [row["id"] for row in ROWS] + ["UX"]
    group = channel_group(parsed, members, USERS, TEAM, trust_external_emails=False)
    assert group.of == ()
    assert set(group.members) == {
        "u1@acme.example",
        "u2@acme.example",
        "u3@acme.example",
        "slack:U6",
        "slack:U7",
        "slack:U8",
        "slack:U9",
        "slack:UB",
        "slack:UX",
    }
    trusted = channel_group(parsed, ["U6"], USERS, TEAM, trust_external_emails=True)
    assert trusted.members == ["u6@acme.example"]


def test_a_channel_not_marked_public_counts_as_private() -> None:
    assert channel({"id": "C1", "name": "ops"}).is_private  # type: ignore[union-attr]
    assert not channel({"id": "C1", "name": "ops", "is_private": False}).is_private  # type: ignore[union-attr]
    assert channel({"id": "D1", "is_im": True}) is None
    assert channel({"id": "G1", "name": "mpdm-a-b", "is_mpim": True}).is_direct  # type: ignore[union-attr]
