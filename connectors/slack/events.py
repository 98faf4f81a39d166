"""The reaction to an event: which documents, channels and memberships to read again. Pure.

An envelope looks the same over HTTP and over a socket: docs.slack.dev/apis/events-api and /reference/events.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

from connectors.slack.content import external_id, split_id, tag, thread_ts
from connectors.source import Reaction

MAX_SEEN_EVENTS = 10_000
"""Event ids that are stored. Slack repeats an unanswered event almost immediately, after one and after five minutes."""

_MEMBERS = frozenset({"member_joined_channel", "member_left_channel"})
_APP_LEFT = frozenset({"channel_left", "group_left"})
_CHANNEL = frozenset(
    {
        "channel_archive",
        "channel_unarchive",
        "channel_rename",
        "channel_deleted",
        "channel_shared",
        "channel_unshared",
        "channel_created",
        "channel_id_changed",
        "group_archive",
        "group_unarchive",
        "group_rename",
        "group_deleted",
    }
)
_FILE = frozenset({"file_change", "file_deleted", "file_unshared"})
_FILE_ID = re.compile(r"F[A-Z0-9]{1,40}")
_USER = frozenset({"user_change", "team_join"})
_REFERRING = frozenset({"message_changed", "message_deleted", "message_replied"})
"""Events about another message: their own ``ts`` is not the message's."""
_CONVERTED = frozenset({"channel_convert_to_private", "channel_convert_to_public"})

Effect = Literal["names", "people"]
"""A further consequence of an event: cached names are outdated, or the user in the event changed."""


class SeenEvents:
    """The ids of the last events. A repeated event is acknowledged and ignored."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and id in self._ids

    def add(self, id: object) -> None:
        """Store the id of an event whose reaction succeeded; Slack repeats an event that failed."""
        if isinstance(id, str) and id:
            self._ids[id] = None
            if len(self._ids) > MAX_SEEN_EVENTS:
                self._ids.popitem(last=False)


def reaction(envelope: Mapping[str, Any]) -> tuple[Reaction, Effect | None]:
    """Return the reaction to an ``event_callback`` or ``app_rate_limited``, and an empty one for every other type."""
    if envelope.get("type") == "app_rate_limited":  # events of that minute are lost
        return Reaction(changes=True, sweep=True), None
    event = envelope.get("event")
    if envelope.get("type") != "event_callback" or not isinstance(event, Mapping):
        return Reaction(), None
    kind = event.get("type")
    if kind == "message":
        return _message(event), None
    channel = _channel(event)
    if kind in _MEMBERS and channel:
        own = event.get("user") in _app_users(envelope)
        return Reaction(groups=(tag(channel),), changes=own, sweep=own), "names" if own else None
    if kind in _APP_LEFT and channel:
        return Reaction(groups=(tag(channel),), sweep=True), "names"
    if kind in _CHANNEL and channel:
        return Reaction(groups=(tag(channel),), sweep=kind != "channel_created"), "names"
    if kind in _USER:
        return Reaction(), "people"
    if isinstance(kind, str) and kind.startswith("subteam_"):  # user groups have names but grant no access
        return Reaction(), "names"
    return Reaction(), None


def file_of(envelope: Mapping[str, Any]) -> str | None:
    """Return the id of the file that was changed, deleted or taken out of a channel, or None."""
    event = envelope.get("event")
    if envelope.get("type") != "event_callback" or not isinstance(event, Mapping) or event.get("type") not in _FILE:
        return None
    file = event.get("file_id")
    return file if isinstance(file, str) and _FILE_ID.fullmatch(file) else None


def channel_of(envelope: Mapping[str, Any]) -> str | None:
    """Return the channel that an event concerns, or None."""
    event = envelope.get("event")
    return _channel(event) if isinstance(event, Mapping) else None


def _message(event: Mapping[str, Any]) -> Reaction:
    if event.get("channel_type") in ("im", "mpim", "app_home"):
        return Reaction()
    channel, subtype = _channel(event), event.get("subtype")
    if not channel:
        return Reaction()
    if subtype in _CONVERTED:
        return Reaction(groups=(tag(channel),), sweep=True)
    referred = (event.get("message"), event.get("previous_message"))
    messages = referred if subtype in _REFERRING else (event,)
    threads = {
        thread_ts(message)
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("ts"), str)
    }
    if not threads and isinstance(deleted := event.get("deleted_ts"), str):
        threads.add(deleted)
    ids = {id for ts in threads if split_id(id := external_id(channel, ts))}
    return Reaction(ids=tuple(sorted(ids)))


def _channel(event: Mapping[str, Any]) -> str | None:
    channel = event.get("channel")
    channel = channel.get("id") if isinstance(channel, Mapping) else channel
    return channel if isinstance(channel, str) and channel.startswith(("C", "G")) else None


def _app_users(envelope: Mapping[str, Any]) -> set[str]:
    """Return the app's own users, from the envelope's list of recipients."""
    rows = envelope.get("authorizations")
    rows = rows if isinstance(rows, list) else []
    return {
        str(row["user_id"]) for row in rows if isinstance(row, Mapping) and row.get("is_bot") and row.get("user_id")
    }
