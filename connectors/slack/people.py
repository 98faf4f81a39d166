"""Who reads what: channels and people as Slack shows them, and who holds the tag of each. Pure.

Two kinds of tag: ``channel:C…`` (the only one that documents carry) is held by the channel's members and, where the
channel is public, by whoever holds ``workspace:T…``: all full members of the workspace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from connectors.slack.threads import tag
from connectors.source import Group

Standing = Literal["full", "guest", "external", "none"]
"""none: bots, the deactivated, and who has not joined yet."""


@dataclass(frozen=True, slots=True)
class User:
    id: str
    name: str
    email: str | None
    """In lower case; None where Slack does not tell it, or not for certain."""
    standing: Standing


@dataclass(frozen=True, slots=True)
class Channel:
    id: str
    name: str
    is_private: bool
    is_archived: bool
    is_member: bool
    """Whether the app is."""
    is_direct: bool = False
    """A message to one person or to a few: never read, whatever the settings say."""


@dataclass(frozen=True, slots=True)
class Team:
    id: str
    url: str
    """Without a slash at the end."""
    enterprise: str | None


def user(row: Mapping[str, Any], team: Team) -> User | None:
    """None: no user. Whatever is not plainly a full member of this workspace reads less."""
    id = row.get("id")
    if not isinstance(id, str) or not id:
        return None
    profile = row.get("profile")
    profile = profile if isinstance(profile, Mapping) else {}
    name = next(
        (
            n
            for n in (profile.get("display_name"), profile.get("real_name"), row.get("real_name"), row.get("name"))
            if n
        ),
        id,
    )
    standing = _standing(row, team)
    email = profile.get("email")
    certain = isinstance(email, str) and "@" in email and row.get("is_email_confirmed") is not False
    return User(id, " ".join(str(name).split()), str(email).strip().lower() if certain else None, standing)


def _standing(row: Mapping[str, Any], team: Team) -> Standing:
    if row.get("deleted") or row.get("is_bot") or row.get("is_invited_user") or row.get("id") == "USLACKBOT":
        return "none"
    enterprise = row.get("enterprise_user")
    colleague = (
        team.enterprise is not None
        and isinstance(enterprise, Mapping)
        and enterprise.get("enterprise_id") == team.enterprise
    )
    if row.get("is_stranger") or (row.get("team_id") != team.id and not colleague):
        return "external"
    if row.get("is_restricted") or row.get("is_ultra_restricted"):
        return "guest"
    # A colleague of another workspace of the organisation sees the channels that they are in.
    return "full" if row.get("team_id") == team.id or (colleague and team.id in _teams(enterprise)) else "guest"


def _teams(enterprise: object) -> Collection[object]:
    """Workspaces of the organisation that a person is a member of."""
    teams = enterprise.get("teams") if isinstance(enterprise, Mapping) else None
    return teams if isinstance(teams, list) else ()


def channel(row: Mapping[str, Any]) -> Channel | None:
    """None: no channel at all. What is not known to be public is private."""
    id, name = row.get("id"), row.get("name")
    if not isinstance(id, str) or not isinstance(name, str) or not id.startswith(("C", "G")):
        return None
    return Channel(
        id, name, is_private=row.get("is_private") is not False, is_archived=bool(row.get("is_archived")),
        is_member=row.get("is_member") is True, is_direct=bool(row.get("is_im") or row.get("is_mpim")),
    )  # fmt: skip


def principal(id: str, users: Mapping[str, User], *, trust_external_emails: bool) -> str | None:
    """The name that a member has in the whole company; None: nobody who reads. Other companies' people are known by
    their id in Slack: the address of theirs is what their administrators say it is."""
    found = users.get(id)
    if found is None:  # not in this workspace's list: of another company
        return f"slack:{id}"
    if found.standing == "none":
        return None
    if found.email and (found.standing != "external" or trust_external_emails):
        return found.email
    return f"slack:{id}"


def workspace_tag(team: Team) -> str:
    return f"workspace:{team.id}"


def workspace_group(team: Team, users: Mapping[str, User]) -> Group:
    full = (principal(one.id, users, trust_external_emails=False) for one in users.values() if one.standing == "full")
    return Group(workspace_tag(team), sorted({name for name in full if name}))


def channel_group(
    found: Channel, members: Iterable[str], users: Mapping[str, User], team: Team, *, trust_external_emails: bool
) -> Group:
    named = (principal(id, users, trust_external_emails=trust_external_emails) for id in members)
    return Group(
        tag(found.id), sorted({name for name in named if name}), of=() if found.is_private else (workspace_tag(team),)
    )
