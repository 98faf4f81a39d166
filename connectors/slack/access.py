"""Access: channels and people as Slack returns them, and the members of each principal.

There are two kinds of principal. ``channel:C…``, the only one that documents carry, has the channel's members and,
where the channel is public, ``workspace:T…``: all full members of the workspace. The directory caches names only;
access is read anew each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import structlog

from connectors.runner.guard import require_readable
from connectors.set_aside import each
from connectors.slack.client import Absent, Api, Object, ScopeMissing
from connectors.slack.content import ChannelInfo, Names, tag
from connectors.slack.options import SlackOptions
from connectors.source import Group
from connectors.strangers import Strangers
from connectors.web import ServerFailed
from pipeline.core.errors import Misconfigured

log = structlog.get_logger()

STRANGERS_IN_AN_HOUR = 1_000
"""Slack answers a hundred requests for a person in a minute."""
AccountKind = Literal["full", "guest", "external", "none"]
"""How much of the workspace an account may see. ``none``: a bot, a deactivated account or an open invitation."""


@dataclass(frozen=True, slots=True)
class User:
    id: str
    name: str
    email: str | None
    """The address in lower case; None where Slack does not return it, or it is not confirmed."""
    kind: AccountKind


@dataclass(frozen=True, slots=True)
class Channel:
    id: str
    name: str
    is_private: bool
    is_archived: bool
    is_member: bool
    """Whether the app is a member."""
    is_direct: bool = False
    """True for direct messages to one person or to a few. These are never read, whatever the settings say."""
    teams: frozenset[str] = frozenset()
    """The workspaces that have the channel, as far as Slack names them."""


@dataclass(frozen=True, slots=True)
class Team:
    id: str
    url: str
    """The address of the workspace, without a slash at the end."""
    enterprise: str | None


def user(row: Mapping[str, Any], team: Team) -> User | None:
    """Parse a user; None: the row is no user. An account that is not certainly a full member of this workspace gets a
    kind with less access."""
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
    kind = _account_kind(row, team)
    email = profile.get("email")
    certain = isinstance(email, str) and "@" in email and row.get("is_email_confirmed") is not False
    return User(id, " ".join(str(name).split()), str(email).strip().lower() if certain else None, kind)


def _account_kind(row: Mapping[str, Any], team: Team) -> AccountKind:
    if row.get("deleted") or row.get("is_bot") or row.get("is_invited_user") or row.get("id") == "USLACKBOT":
        return "none"
    enterprise = row.get("enterprise_user")
    is_colleague = (
        team.enterprise is not None
        and isinstance(enterprise, Mapping)
        and enterprise.get("enterprise_id") == team.enterprise
    )
    if row.get("is_stranger") or (row.get("team_id") != team.id and not is_colleague):
        return "external"
    if row.get("is_restricted") or row.get("is_ultra_restricted"):
        return "guest"
    # A colleague of another workspace of the organisation sees the channels that they are in.
    return "full" if row.get("team_id") == team.id or (is_colleague and team.id in _teams(enterprise)) else "guest"


def _teams(enterprise: object) -> Collection[object]:
    """Return the organisation's workspaces of which a person is a member."""
    teams = enterprise.get("teams") if isinstance(enterprise, Mapping) else None
    return teams if isinstance(teams, list) else ()


def channel(row: Mapping[str, Any]) -> Channel | None:
    """Parse a channel; None: the row is no channel. A channel that is not certainly public is private."""
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
        teams=frozenset(id for id in _team_ids(row) if isinstance(id, str)),
    )


def _team_ids(row: Mapping[str, Any]) -> Iterable[object]:
    yield row.get("context_team_id")
    for name in ("shared_team_ids", "internal_team_ids"):
        ids = row.get(name)
        yield from ids if isinstance(ids, list) else ()


def principal(id: str, users: Mapping[str, User], *, trust_external_emails: bool) -> str | None:
    """Return the principal of a member; None: the account reads nothing. People of other companies are named by their
    Slack id, because their own administrators choose their addresses."""
    user = users.get(id)
    if user is None:  # people whom the workspace does not list belong to another company
        return f"slack:{id}"
    if user.kind == "none":
        return None
    if user.email and (user.kind != "external" or trust_external_emails):
        return user.email
    return f"slack:{id}"


def team_problem(answer: Mapping[str, Any], team: str | None) -> str | None:
    """Return the problem of a token's workspace, as ``auth.test`` shows it, with the setting ``team``."""
    if answer.get("is_enterprise_install") is True:
        return None if team else "the app is installed in a whole organisation: set team to the workspace to read"
    if team is not None and answer.get("team_id") != team:
        return f"the token is one of a single workspace, which is not {team}: remove team, or correct the token"
    return None


def workspace_tag(team: Team) -> str:
    return f"workspace:{team.id}"


def workspace_group(team: Team, users: Mapping[str, User]) -> Group:
    full = (principal(user.id, users, trust_external_emails=False) for user in users.values() if user.kind == "full")
    return Group(workspace_tag(team), sorted({name for name in full if name}))


def channel_group(
    channel: Channel, members: Iterable[str], users: Mapping[str, User], team: Team, *, trust_external_emails: bool
) -> Group:
    named = (principal(id, users, trust_external_emails=trust_external_emails) for id in members)
    return Group(
        tag(channel.id),
        sorted({name for name in named if name}),
        of=() if channel.is_private else (workspace_tag(team),),
    )


NAMES_SECONDS = 600.0
"""Cached names are read again after this time, or after an event that changes them."""
_KINDS = "public_channel,private_channel"


class Directory:
    """The workspace's people, channels and user groups. Every method raises the errors of ``Api``."""

    def __init__(self, api: Api, options: SlackOptions) -> None:
        self._api = api
        self._options = options
        self._lock = asyncio.Lock()
        self._team: Team | None = None
        self._users: dict[str, User] = {}
        self._users_expire_at = 0.0
        self._unlisted_users: dict[str, User] = {}
        """People whom the workspace does not list."""
        self._strangers = Strangers(STRANGERS_IN_AN_HOUR)
        self._groups: dict[str, str] = {}
        self._groups_expire_at = 0.0
        self._channels: dict[str, Channel] = {}
        self._channels_expire_at = 0.0
        self._names = Names()

    async def team(self) -> Team:
        if self._team is None:
            answer = await self._api.call("auth.test")
            if problem := team_problem(answer, self._options.team):
                raise Misconfigured(f"{self._api.name}: {problem}")
            self._team = Team(
                self._options.team or str(answer["team_id"]),
                str(answer.get("url") or "https://slack.com").rstrip("/"),
                answer.get("enterprise_id") or None,
            )
        return self._team

    async def teams(self) -> Mapping[str, str]:
        """Read the names of the workspaces in which an organisation's app is installed, by id."""
        rows = await self._api.all_rows("auth.teams.list", "teams")
        return {str(row["id"]): str(row.get("name") or "") for row in rows if isinstance(row, dict) and row.get("id")}

    # People

    async def users(self) -> Mapping[str, User]:
        """Read all users of the workspace, by id."""
        team = await self.team()
        rows = await self._api.all_rows("users.list", "members")
        # One whose data cannot be read holds nothing.
        accounts, failed = each(rows, lambda row: user(row, team) if isinstance(row, dict) else None, lambda _row: None)
        require_readable("accounts", failed.values(), len(accounts))
        self._users = {account.id: account for account in accounts if account}
        self._users_expire_at = time.monotonic() + NAMES_SECONDS
        self._strangers.forget()
        self._rebuild_names()
        return self._users

    def update_user(self, row: Object) -> bool:
        """Store a user from an event. Returns whether everything that matters for access is unchanged."""
        if self._team is None or (updated := user(row, self._team)) is None:
            return False
        previous = self._users.get(updated.id)
        self._users[updated.id] = updated
        self._rebuild_names()
        return previous is not None and (previous.email, previous.kind) == (updated.email, updated.kind)

    # Channels

    async def channels(self) -> Mapping[str, Channel]:
        """Read all public channels, and the private ones of which the app is a member, by id."""
        await self.team()  # whether the token is one of the workspace
        kinds = _KINDS if self._options.private else "public_channel"
        rows = await self._api.all_rows("conversations.list", "channels", types=kinds, exclude_archived=False)
        of_team = frozenset({self._options.team} if self._options.team else ())
        channels = [listed for row in rows if isinstance(row, dict) and (listed := channel(row))]
        self._channels = {listed.id: replace(listed, teams=listed.teams | of_team) for listed in channels}
        self._channels_expire_at = time.monotonic() + NAMES_SECONDS
        self._rebuild_names()
        return self._channels

    async def join(self) -> None:
        """Join the selected public channels, if the settings say so. One that Slack does not let the app join stays
        unread, like one to which it was not invited."""
        if not self._options.join:
            return
        for _, listed in sorted((await self.channels()).items()):
            if listed.is_member or listed.is_private or listed.is_archived or not self.is_selected(listed):
                continue
            try:
                await self._api.call("conversations.join", channel=listed.id)
            except (Absent, ServerFailed) as error:
                log.info("slack_channel_not_joined", channel=listed.id, error=str(error))

    async def channel(self, id: str) -> Channel | None:
        """Read one channel; None: there is none with this id that the app may see."""
        try:
            answer = await self._api.call("conversations.info", channel=id)
        except Absent:
            return None
        row = answer.get("channel")
        current = channel(row) if isinstance(row, dict) else None
        if current is not None:
            previous = self._channels.get(id)
            if previous is not None and not current.teams:
                current = replace(current, teams=previous.teams)
            self._channels[id] = current
            if current != previous:
                self._rebuild_names()
        return current

    def cached_channels(self) -> Mapping[str, Channel]:
        """The channels as they were last read."""
        return self._channels

    def is_read(self, channel: Channel) -> bool:
        """True when the settings select the channel and the app is a member of it."""
        return channel.is_member and self.is_selected(channel)

    def is_selected(self, channel: Channel) -> bool:
        """True when the settings select the channel."""
        if self._options.team is not None and self._options.team not in channel.teams:
            return False
        if channel.is_direct or (channel.is_archived and self._options.archived == "drop"):
            return False
        return self._options.is_selected(channel.id, channel.name, is_private=channel.is_private)

    async def channel_info(self, channel: Channel) -> ChannelInfo:
        return ChannelInfo(channel.id, channel.name, (await self.team()).url, self._options.files)

    # Names

    def expire_names(self) -> None:
        """Read all names again when they are needed next."""
        self._users_expire_at = self._channels_expire_at = self._groups_expire_at = 0.0

    async def names(self) -> Names:
        """Return the current names, with an empty set of missing ones."""
        async with self._lock:
            now = time.monotonic()
            if now >= self._users_expire_at:
                await self.users()
            if now >= self._groups_expire_at:
                self._groups = await self._usergroups()
                self._groups_expire_at = time.monotonic() + NAMES_SECONDS
                self._rebuild_names()
            if now >= self._channels_expire_at:
                await self.channels()
        return Names(self._names.users, self._names.channels, self._names.groups)

    def _rebuild_names(self) -> None:
        """Rebuild the names after a change, and not for each document: a workspace may have tens of thousands of
        people."""
        unlisted = {id: account.name for id, account in self._unlisted_users.items()}
        self._names = Names(
            users={**unlisted, **{id: account.name for id, account in self._users.items()}},
            channels={id: listed.name for id, listed in self._channels.items() if not listed.is_private},
            groups=self._groups,
        )

    async def load_users(self, ids: set[str]) -> bool:
        """Read users whom the workspace does not list. Returns whether Slack knows any of them, also by an earlier
        request, whose caller may have failed before the names were rebuilt."""
        team = await self.team()
        for id in sorted(ids):
            if id[:1] not in ("U", "W") or id in self._unlisted_users or not self._strangers.may_be_known(id):
                continue
            try:
                row = (await self._api.call("users.info", user=id)).get("user")
            except Absent:
                row = None
            if isinstance(row, dict) and (account := user(row, team)) is not None:
                self._unlisted_users[id] = account
            else:
                self._strangers.add([id])
        if known := ids & self._unlisted_users.keys():
            self._rebuild_names()
        return bool(known)

    async def add_users(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the users of an export, to name people whom Slack does not list."""
        team = await self.team()
        accounts = (user(row, team) for row in rows)
        self._unlisted_users |= {account.id: account for account in accounts if account}
        self._rebuild_names()

    async def _usergroups(self) -> dict[str, str]:
        """Read the handles of user groups. Without the scope there are none, and mentions have the label that Slack put
        into the text."""
        try:
            rows = (await self._api.call("usergroups.list", include_disabled=True)).get("usergroups")
        except ScopeMissing:
            return {}
        rows = rows if isinstance(rows, list) else []
        return {str(row["id"]): str(row["handle"]) for row in rows if isinstance(row, dict) and row.get("handle")}
