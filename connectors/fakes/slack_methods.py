"""The Web API methods that the fake answers, each a function of the workspace and the arguments.

Scopes, limits and errors as on each method's page at docs.slack.dev/reference/methods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors.fakes.slack_workspace import BOT_ID, BOT_USER, Channel, Object, Workspace

Arguments = dict[str, str]
_KINDS = ("public_channel", "private_channel", "im", "mpim")
_READ = {"public_channel": "channels:read", "private_channel": "groups:read", "im": "im:read", "mpim": "mpim:read"}
_HISTORY = {
    "public_channel": "channels:history",
    "private_channel": "groups:history",
    "im": "im:history",
    "mpim": "mpim:history",
}
_EJECTED_FROM_ARCHIVED = "not_in_channel"


class Failed(Exception):
    """``{"ok": false, "error": …}`` with further fields."""

    def __init__(self, error: str, **fields: str) -> None:
        super().__init__(error)
        self.answer: Object = {"ok": False, "error": error, **fields}


@dataclass
class Faults:
    throttled: int = 0
    """Next n requests: 429."""
    retry_after: int = 0
    failing: int = 0
    """Next n requests: 500."""
    limits: dict[str, int] = field(default_factory=dict)
    """Requests a minute, by method; what is not named is not limited."""
    truncated: set[str] = field(default_factory=set)
    """Methods whose first page says that it was all."""
    expiring: int = 0
    """The next n cursors given out are not known when they are used."""
    broken: dict[str, str] = field(default_factory=dict)
    """By method: the error that it answers, ``fatal_error`` say."""


@dataclass
class Desk:
    """Who answers: the workspace, what the caller's token may do, and the cursors that were given out."""

    workspace: Workspace
    scopes: set[str]
    faults: Faults
    cursors: dict[str, Any] = field(default_factory=dict)
    given: int = 0

    # Rights

    def need(self, scope: str) -> None:
        if scope not in self.scopes:
            raise Failed("missing_scope", needed=scope, provided=",".join(sorted(self.scopes)))

    def channel(self, arguments: Arguments, rights: dict[str, str], *, inside: bool) -> Channel:
        """inside: for members only. A private channel is not even there for others."""
        found = self.workspace.channels.get(arguments.get("channel", ""))
        if found is None:
            raise Failed("channel_not_found")
        self.need(rights[kind(found)])
        if BOT_USER not in found.members:
            if found.is_private or found.kind != "channel":
                raise Failed("channel_not_found")
            if inside:
                raise Failed(_EJECTED_FROM_ARCHIVED)
        return found

    # Pages

    def page(
        self, method: str, rows: Sequence[Any], arguments: Arguments, *, most: int, name: str = "rows"
    ) -> tuple[list[Any], str]:
        """The page that the cursor (or none) stands for, and the cursor of the next one, ``""`` after the last."""
        limit = int(arguments.get("limit") or 100)
        if not 1 <= limit <= most:
            raise Failed("invalid_limit")
        start = 0
        if cursor := arguments.get("cursor"):
            if self.cursors.get(cursor, (None,))[0] != method:
                raise Failed("invalid_cursor")
            after = self.cursors[cursor][1]
            start = next((n for n, row in enumerate(rows) if key(row) == after), len(rows) - 1) + 1
        page = list(rows[start : start + limit])
        if start + limit >= len(rows) or method in self.faults.truncated:
            return page, ""
        self.given += 1
        cursor = f"bmV4dF9{self.given:06}="
        if self.faults.expiring > 0:
            self.faults.expiring -= 1
        else:
            self.cursors[cursor] = (method, key(page[-1]))
        return page, cursor


def key(row: Any) -> Any:
    """What a cursor remembers: rows that come and go meanwhile move nothing."""
    return row.get("ts", row.get("id")) if isinstance(row, dict) else row


def kind(channel: Channel) -> str:
    if channel.kind != "channel":
        return channel.kind
    return "private_channel" if channel.is_private else "public_channel"


def auth_test(desk: Desk, _: Arguments) -> Object:
    workspace = desk.workspace
    return {
        "url": f"https://{workspace.domain}.slack.com/",
        "team": workspace.domain.title(),
        "user": "penstock",
        "team_id": workspace.team_id,
        "user_id": BOT_USER,
        "bot_id": BOT_ID,
        "is_enterprise_install": False,
    }


def conversations_list(desk: Desk, arguments: Arguments) -> Object:
    kinds = [name.strip() for name in arguments.get("types", "public_channel").split(",")]
    if not set(kinds) <= set(_KINDS):
        raise Failed("invalid_types")
    for name in kinds:
        desk.need(_READ[name])
    shown = [
        channel.shown()
        for _, channel in sorted(desk.workspace.channels.items())
        if kind(channel) in kinds
        and (kind(channel) == "public_channel" or BOT_USER in channel.members)
        and not (channel.is_archived and arguments.get("exclude_archived") in ("1", "true"))
    ]
    page, cursor = desk.page("conversations.list", shown, arguments, most=1000)
    return {"channels": page, "response_metadata": {"next_cursor": cursor}}


def conversations_info(desk: Desk, arguments: Arguments) -> Object:
    return {"channel": desk.channel(arguments, _READ, inside=False).shown()}


def conversations_history(desk: Desk, arguments: Arguments) -> Object:
    """Newest first; answers only where they were also sent to the channel."""
    channel = desk.channel(arguments, _HISTORY, inside=True)
    rows = [
        message
        for ts, message in sorted(channel.messages.items(), reverse=True)
        if message.get("thread_ts", ts) == ts or message.get("subtype") == "thread_broadcast"
    ]
    page, cursor = desk.page("conversations.history", list(_between(rows, arguments)), arguments, most=999)
    threads = channel.threads()
    shown = [channel.as_read(message, threads) for message in page]
    answer: Object = {"messages": shown, "has_more": bool(cursor), "pin_count": 0}
    return answer | ({"response_metadata": {"next_cursor": cursor}} if cursor else {})


def conversations_replies(desk: Desk, arguments: Arguments) -> Object:
    """Oldest first, the parent on every page; ts may also be of one of the answers."""
    channel = desk.channel(arguments, _HISTORY, inside=True)
    message: Object | None = channel.messages.get(arguments.get("ts", ""))
    if message is None:
        raise Failed("thread_not_found")
    parent = channel.messages[str(message.get("thread_ts", message["ts"]))]
    threads = channel.threads()
    rows = list(_between(threads.get(parent["ts"], []), arguments))
    page, cursor = desk.page("conversations.replies", rows, arguments, most=1000)
    shown = [channel.as_read(message, threads) for message in (parent, *page)]
    answer: Object = {"messages": shown, "has_more": bool(cursor)}
    return answer | ({"response_metadata": {"next_cursor": cursor}} if cursor else {})


def _between(rows: Iterable[Object], arguments: Arguments) -> Iterable[Object]:
    oldest, latest = arguments.get("oldest") or "0", arguments.get("latest") or "9999999999"
    inclusive = arguments.get("inclusive") in ("1", "true")
    for row in rows:
        at = float(row["ts"])
        if float(oldest) < at < float(latest) or (inclusive and row["ts"] in (oldest, latest)):
            yield row


def conversations_members(desk: Desk, arguments: Arguments) -> Object:
    channel = desk.channel(arguments, _READ, inside=False)
    page, cursor = desk.page("conversations.members", channel.members, arguments, most=1000)
    return {"members": page, "response_metadata": {"next_cursor": cursor}}


def users_list(desk: Desk, arguments: Arguments) -> Object:
    """People of other workspaces are not in it."""
    desk.need("users:read")
    rows = [shown_user(desk, user) for _, user in sorted(desk.workspace.users.items()) if not user.get("is_stranger")]
    page, cursor = desk.page("users.list", rows, arguments, most=1000)
    return {"members": page, "cache_ts": int(desk.workspace.clock()), "response_metadata": {"next_cursor": cursor}}


def users_info(desk: Desk, arguments: Arguments) -> Object:
    desk.need("users:read")
    if (user := desk.workspace.users.get(arguments.get("user", ""))) is None:
        raise Failed("user_not_found")
    return {"user": shown_user(desk, user)}


def shown_user(desk: Desk, user: Object) -> Object:
    shown = copy.deepcopy(user)
    if "users:read.email" not in desk.scopes:
        shown["profile"].pop("email", None)
    return shown


def usergroups_list(desk: Desk, _: Arguments) -> Object:
    desk.need("usergroups:read")
    return {"usergroups": [copy.deepcopy(group) for _, group in sorted(desk.workspace.usergroups.items())]}


METHODS: dict[str, Callable[[Desk, Arguments], Object]] = {
    "auth.test": auth_test,
    "conversations.list": conversations_list,
    "conversations.info": conversations_info,
    "conversations.history": conversations_history,
    "conversations.replies": conversations_replies,
    "conversations.members": conversations_members,
    "users.list": users_list,
    "users.info": users_info,
    "usergroups.list": usergroups_list,
}
