"""Who reads what: channels and people as Slack shows them, and the members of each principal.

There are two kinds of principal. ``channel:C…``, the only one that documents carry, has the channel's members and,
where the channel is public, ``workspace:T…``: all full members of the workspace. The directory caches names only;
access is read anew each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from connectors.slack.client import Absent, Api, Object, ScopeMissing
from connectors.slack.content import Names, Place, tag
from connectors.slack.options import SlackOptions
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
        id,
        name,
        is_private=row.get("is_private") is not False,
        is_archived=bool(row.get("is_archived")),
        is_member=row.get("is_member") is True,
        is_direct=bool(row.get("is_im") or row.get("is_mpim")),
    )


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


NAMES_SECONDS = 600.0
"""How old names may be. Events renew them sooner."""
_KINDS = "public_channel,private_channel"


class Directory:
    """Every method raises what ``Api`` raises."""

    def __init__(self, api: Api, options: SlackOptions) -> None:
        self._api = api
        self._options = options
        self._lock = asyncio.Lock()
        self._team: Team | None = None
        self._users: dict[str, User] = {}
        self._users_until = 0.0
        self._strangers: dict[str, User | None] = {}
        """People that the workspace does not list; None: nobody knows them."""
        self._groups: dict[str, str] = {}
        self._groups_until = 0.0
        self._channels: dict[str, Channel] = {}
        self._channels_until = 0.0
        self._names = Names()

    async def team(self) -> Team:
        if self._team is None:
            answer = await self._api.call("auth.test")
            self._team = Team(
                str(answer["team_id"]),
                str(answer.get("url") or "https://slack.com").rstrip("/"),
                answer.get("enterprise_id") or None,
            )
        return self._team

    # People

    async def users(self) -> Mapping[str, User]:
        """As they are now."""
        team = await self.team()
        rows = await self._api.everything("users.list", "members")
        self._users = {found.id: found for row in rows if isinstance(row, dict) and (found := user(row, team))}
        self._users_until = time.monotonic() + NAMES_SECONDS
        self._strangers = {id: found for id, found in self._strangers.items() if found}
        self._rename()
        return self._users

    def is_as_known(self, row: Object) -> bool:
        """Whether an event about a user changes nothing for access; names are brought up to date on the way."""
        if self._team is None or (found := user(row, self._team)) is None:
            return False
        before = self._users.get(found.id)
        self._users[found.id] = found
        self._rename()
        return before is not None and (before.email, before.standing) == (found.email, found.standing)

    # Channels

    async def channels(self) -> Mapping[str, Channel]:
        """As they are now: all public ones, and the private ones that the app is in; by id."""
        kinds = _KINDS if self._options.private else "public_channel"
        rows = await self._api.everything("conversations.list", "channels", types=kinds, exclude_archived=False)
        self._channels = {found.id: found for row in rows if isinstance(row, dict) and (found := channel(row))}
        self._channels_until = time.monotonic() + NAMES_SECONDS
        self._rename()
        return self._channels

    async def channel(self, id: str) -> Channel | None:
        """As it is now; None: there is none that the app may see."""
        try:
            answer = await self._api.call("conversations.info", channel=id)
        except Absent:
            return None
        row = answer.get("channel")
        found = channel(row) if isinstance(row, dict) else None
        if found is not None:
            before = self._channels.get(id)
            self._channels[id] = found
            if found != before:
                self._rename()
        return found

    def known(self) -> Mapping[str, Channel]:
        """As they were when last asked for."""
        return self._channels

    def admits(self, found: Channel) -> bool:
        """Whether the settings want it read, and the app is in it."""
        return found.is_member and self.wants(found)

    def wants(self, found: Channel) -> bool:
        if found.is_direct or (found.is_archived and self._options.archived == "drop"):
            return False
        return self._options.admits(found.id, found.name, is_private=found.is_private)

    async def place(self, found: Channel) -> Place:
        return Place(found.id, found.name, (await self.team()).url)

    # Names

    def forget_names(self) -> None:
        self._users_until = self._channels_until = self._groups_until = 0.0

    async def names(self) -> Names:
        async with self._lock:
            now = time.monotonic()
            if now >= self._users_until:
                await self.users()
            if now >= self._groups_until:
                self._groups = await self._usergroups()
                self._groups_until = time.monotonic() + NAMES_SECONDS
                self._rename()
            if now >= self._channels_until:
                await self.channels()
        return Names(self._names.users, self._names.channels, self._names.groups)

    def _rename(self) -> None:
        """Once a change, not once a document: a workspace may have ten thousands of people."""
        strangers = {id: found.name for id, found in self._strangers.items() if found}
        self._names = Names(
            users={**strangers, **{id: found.name for id, found in self._users.items()}},
            channels={id: found.name for id, found in self._channels.items() if not found.is_private},
            groups=self._groups,
        )

    async def introduce(self, ids: set[str]) -> bool:
        """Ask who these are that the workspace's list lacks. Returns whether any of them is known now that was not."""
        unknown = [id for id in sorted(ids) if id[:1] in ("U", "W") and id not in self._strangers]
        team = await self.team()
        for id in unknown:
            try:
                row = (await self._api.call("users.info", user=id)).get("user")
            except Absent:
                row = None
            self._strangers[id] = user(row, team) if isinstance(row, dict) else None
        self._rename()
        return any(self._strangers[id] for id in unknown)

    async def introduce_from(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Names of an export's people, for those that Slack does not list."""
        team = await self.team()
        found = (user(row, team) for row in rows)
        self._strangers |= {one.id: one for one in found if one}
        self._rename()

    async def _usergroups(self) -> dict[str, str]:
        """Handles; without the scope the text keeps what Slack put beside the mention."""
        try:
            rows = (await self._api.call("usergroups.list", include_disabled=True)).get("usergroups")
        except ScopeMissing:
            return {}
        rows = rows if isinstance(rows, list) else []
        return {str(row["id"]): str(row["handle"]) for row in rows if isinstance(row, dict) and row.get("handle")}
