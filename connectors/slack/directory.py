"""People, channels and user groups of the workspace, asked for and remembered for a while.

Only names are remembered. Access is always asked for anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

from connectors.slack.api import Absent, Api, Object, ScopeMissing
from connectors.slack.options import SlackOptions
from connectors.slack.people import Channel, Team, User, channel, user
from connectors.slack.text import Names
from connectors.slack.threads import Place

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
                str(answer["team_id"]), str(answer.get("url") or "https://slack.com").rstrip("/"),
                answer.get("enterprise_id") or None,
            )  # fmt: skip
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
        )  # fmt: skip

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
