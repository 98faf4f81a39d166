"""The Web API methods of the fake, each a function of the workspace and the arguments.

Scopes, limits and errors follow each method's page at docs.slack.dev/reference/methods.
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
_NOT_A_MEMBER = "not_in_channel"


class MethodError(Exception):
    """A response with ``"ok": false``, an error code and further fields."""

    def __init__(self, error: str, **fields: str) -> None:
        super().__init__(error)
        self.body: Object = {"ok": False, "error": error, **fields}


@dataclass
class Faults:
    """Faults of the server. ``throttled``, ``failing`` and ``expiring`` count down; the rest stays until changed."""

    throttled: int = 0
    """The number of requests that get 429."""
    retry_after: int = 0
    failing: int = 0
    """The number of requests that get 500."""
    limits: dict[str, int] = field(default_factory=dict)
    """Requests a minute, by method; other methods are not limited."""
    truncated: set[str] = field(default_factory=set)
    """Methods whose first page claims to be the last."""
    expiring: int = 0
    """The number of new cursors that are already unknown when they are used."""
    broken: dict[str, str] = field(default_factory=dict)
    """Method → the error that it returns, such as ``fatal_error``."""
    broken_files: bool = False
    """Whether every download is answered with 500."""
    unjoinable: set[str] = field(default_factory=set)
    """Channels that apps may not join."""


@dataclass
class MethodContext:
    """The data that methods work on: the workspace, the scopes of the caller's token, and the issued cursors."""

    workspace: Workspace
    scopes: set[str]
    faults: Faults
    organization: dict[str, Workspace] | None = None
    """The workspaces by id of an organisation in which the app is installed; None: it is installed in one workspace."""
    cursors: dict[str, Any] = field(default_factory=dict)
    issued_cursors: int = 0

    # Rights

    def require_scope(self, scope: str) -> None:
        if scope not in self.scopes:
            raise MethodError("missing_scope", needed=scope, provided=",".join(sorted(self.scopes)))

    def channel(self, arguments: Arguments, rights: dict[str, str], *, members_only: bool) -> Channel:
        """Return the channel that the arguments name. ``rights`` holds the scope for each kind of channel. A private
        channel does not exist for an app that is no member. Raises MethodError."""
        id = arguments.get("channel", "")
        channel = next((team.channels[id] for team in self.teams() if id in team.channels), None)
        if channel is None:
            raise MethodError("channel_not_found")
        self.require_scope(rights[kind(channel)])
        if BOT_USER not in channel.members:
            if channel.is_private or channel.kind != "channel":
                raise MethodError("channel_not_found")
            if members_only:
                raise MethodError(_NOT_A_MEMBER)
        return channel

    def teams(self) -> Sequence[Workspace]:
        """Return the workspaces in which the app is installed."""
        return [self.workspace] if self.organization is None else [*self.organization.values()]

    def listed(self, arguments: Arguments) -> Workspace:
        """Return the workspace whose channels or people are listed."""
        if self.organization is None:
            return self.workspace
        if (team := arguments.get("team_id")) is None:
            raise MethodError("missing_argument")
        if team not in self.organization:
            raise MethodError("team_access_not_granted")
        return self.organization[team]

    # Pages

    def page(
        self, method: str, rows: Sequence[Any], arguments: Arguments, *, most: int, name: str = "rows"
    ) -> tuple[list[Any], str]:
        """Return the page at the arguments' cursor, and the cursor of the next one, ``""`` after the last."""
        limit = int(arguments.get("limit") or 100)
        if not 1 <= limit <= most:
            raise MethodError("invalid_limit")
        start = 0
        if cursor := arguments.get("cursor"):
            if self.cursors.get(cursor, (None,))[0] != method:
                raise MethodError("invalid_cursor")
            after = self.cursors[cursor][1]
            start = next((n for n, row in enumerate(rows) if position(row) == after), len(rows) - 1) + 1
        page = list(rows[start : start + limit])
        if start + limit >= len(rows) or method in self.faults.truncated:
            return page, ""
        self.issued_cursors += 1
        cursor = f"bmV4dF9{self.issued_cursors:06}="
        if self.faults.expiring > 0:
            self.faults.expiring -= 1
        else:
            self.cursors[cursor] = (method, position(page[-1]))
        return page, cursor


def position(row: Any) -> Any:
    """Return what a cursor contains: the key of a row, so that rows added or removed meanwhile do not matter."""
    return row.get("ts", row.get("id")) if isinstance(row, dict) else row


def kind(channel: Channel) -> str:
    if channel.kind != "channel":
        return channel.kind
    return "private_channel" if channel.is_private else "public_channel"


def auth_test(context: MethodContext, _: Arguments) -> Object:
    workspace = context.workspace
    return {
        "url": f"https://{workspace.domain}.slack.com/",
        "team": workspace.domain.title(),
        "user": "penstock",
        "team_id": workspace.team_id,
        "user_id": BOT_USER,
        "bot_id": BOT_ID,
        "is_enterprise_install": context.organization is not None,
        **({} if context.organization is None else {"enterprise_id": "E0ACME", "team_id": "E0ACME"}),
    }


def auth_teams_list(context: MethodContext, arguments: Arguments) -> Object:
    teams = [{"id": id, "name": team.domain.title()} for id, team in sorted((context.organization or {}).items())]
    page, cursor = context.page("auth.teams.list", teams, arguments, most=1000)
    return {"teams": page, "response_metadata": {"next_cursor": cursor}}


def conversations_list(context: MethodContext, arguments: Arguments) -> Object:
    kinds = [name.strip() for name in arguments.get("types", "public_channel").split(",")]
    if not set(kinds) <= set(_KINDS):
        raise MethodError("invalid_types")
    for name in kinds:
        context.require_scope(_READ[name])
    channels = [
        channel.as_json()
        for _, channel in sorted(context.listed(arguments).channels.items())
        if kind(channel) in kinds
        and (kind(channel) == "public_channel" or BOT_USER in channel.members)
        and not (channel.is_archived and arguments.get("exclude_archived") in ("1", "true"))
    ]
    page, cursor = context.page("conversations.list", channels, arguments, most=1000)
    return {"channels": page, "response_metadata": {"next_cursor": cursor}}


def conversations_info(context: MethodContext, arguments: Arguments) -> Object:
    return {"channel": context.channel(arguments, _READ, members_only=False).as_json()}


def conversations_history(context: MethodContext, arguments: Arguments) -> Object:
    """Return messages, newest first; of replies only those that were also sent to the channel."""
    channel = context.channel(arguments, _HISTORY, members_only=True)
    rows = [
        message
        for ts, message in sorted(channel.messages.items(), reverse=True)
        if message.get("thread_ts", ts) == ts or message.get("subtype") == "thread_broadcast"
    ]
    page, cursor = context.page("conversations.history", list(_between(rows, arguments)), arguments, most=999)
    threads = channel.threads()
    messages = [channel.as_returned(message, threads) for message in page]
    response: Object = {"messages": messages, "has_more": bool(cursor), "pin_count": 0}
    return response | ({"response_metadata": {"next_cursor": cursor}} if cursor else {})


def conversations_replies(context: MethodContext, arguments: Arguments) -> Object:
    """Return a thread, oldest first, with the parent on every page. ``ts`` may also be a reply's."""
    channel = context.channel(arguments, _HISTORY, members_only=True)
    message: Object | None = channel.messages.get(arguments.get("ts", ""))
    if message is None:
        raise MethodError("thread_not_found")
    parent = channel.messages[str(message.get("thread_ts", message["ts"]))]
    threads = channel.threads()
    rows = list(_between(threads.get(parent["ts"], []), arguments))
    page, cursor = context.page("conversations.replies", rows, arguments, most=1000)
    messages = [channel.as_returned(message, threads) for message in (parent, *page)]
    response: Object = {"messages": messages, "has_more": bool(cursor)}
    return response | ({"response_metadata": {"next_cursor": cursor}} if cursor else {})


def _between(rows: Iterable[Object], arguments: Arguments) -> Iterable[Object]:
    oldest, latest = arguments.get("oldest") or "0", arguments.get("latest") or "9999999999"
    inclusive = arguments.get("inclusive") in ("1", "true")
    for row in rows:
        at = float(row["ts"])
        if float(oldest) < at < float(latest) or (inclusive and row["ts"] in (oldest, latest)):
            yield row


def conversations_members(context: MethodContext, arguments: Arguments) -> Object:
    channel = context.channel(arguments, _READ, members_only=False)
    page, cursor = context.page("conversations.members", channel.members, arguments, most=1000)
    return {"members": page, "response_metadata": {"next_cursor": cursor}}


def users_list(context: MethodContext, arguments: Arguments) -> Object:
    """Return the workspace's users, without people of other workspaces."""
    context.require_scope("users:read")
    rows = [
        shown_user(context, user)
        for _, user in sorted(context.listed(arguments).users.items())
        if not user.get("is_stranger")
    ]
    page, cursor = context.page("users.list", rows, arguments, most=1000)
    return {"members": page, "cache_ts": int(context.workspace.clock()), "response_metadata": {"next_cursor": cursor}}


def users_info(context: MethodContext, arguments: Arguments) -> Object:
    context.require_scope("users:read")
    id = arguments.get("user", "")
    if (user := next((team.users[id] for team in context.teams() if id in team.users), None)) is None:
        raise MethodError("user_not_found")
    return {"user": shown_user(context, user)}


def shown_user(context: MethodContext, user: Object) -> Object:
    copied = copy.deepcopy(user)
    if "users:read.email" not in context.scopes:
        copied["profile"].pop("email", None)
    return copied


def usergroups_list(context: MethodContext, arguments: Arguments) -> Object:
    context.require_scope("usergroups:read")
    groups = context.listed(arguments).usergroups
    return {"usergroups": [copy.deepcopy(group) for _, group in sorted(groups.items())]}


def conversations_join(context: MethodContext, arguments: Arguments) -> Object:
    """Make the app a member of a public channel."""
    context.require_scope("channels:join")
    channel = context.channel(arguments, _READ, members_only=False)
    if channel.is_archived:
        raise MethodError("is_archived")
    if kind(channel) != "public_channel":
        raise MethodError("method_not_supported_for_channel_type")
    if channel.id in context.faults.unjoinable:
        raise MethodError("restricted_action")
    was_member = BOT_USER in channel.members
    if not was_member:
        context.workspace.join(channel.id, BOT_USER)
    warning = {"warning": "already_in_channel"} if was_member else {}
    return {"channel": channel.as_json(), **warning}


METHODS: dict[str, Callable[[MethodContext, Arguments], Object]] = {
    "auth.test": auth_test,
    "auth.teams.list": auth_teams_list,
    "conversations.list": conversations_list,
    "conversations.info": conversations_info,
    "conversations.join": conversations_join,
    "conversations.history": conversations_history,
    "conversations.replies": conversations_replies,
    "conversations.members": conversations_members,
    "users.list": users_list,
    "users.info": users_info,
    "usergroups.list": usergroups_list,
}
