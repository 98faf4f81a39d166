"""What an event of Slack's makes us read again. Pure.

An envelope looks the same over HTTP and over a socket: docs.slack.dev/apis/events-api and /reference/events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

from connectors.slack.content import external_id, root, split_id, tag
from connectors.source import Reaction

REMEMBERED = 10_000
"""Event ids. Slack repeats an event that was not answered after a moment, a minute and five minutes."""

_MEMBERS = frozenset({"member_joined_channel", "member_left_channel"})
_LEFT = frozenset({"channel_left", "group_left"})
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
_USER = frozenset({"user_change", "team_join"})
_ABOUT_ANOTHER = frozenset({"message_changed", "message_deleted", "message_replied"})
"""The ts of such an event is no message's."""
_CONVERTED = frozenset({"channel_convert_to_private", "channel_convert_to_public"})

Effect = Literal["names", "people"]
"""What else changed: names alone, or a user (given in the event)."""


class Seen:
    """The ids of the last events: a repeated one is answered, and nothing is done."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and id in self._ids

    def add(self, id: object) -> None:
        """Only once its reaction is known: what failed shall come again."""
        if isinstance(id, str) and id:
            self._ids[id] = None
            if len(self._ids) > REMEMBERED:
                self._ids.popitem(last=False)


def reaction(envelope: Mapping[str, Any]) -> tuple[Reaction, Effect | None]:
    """Of an ``event_callback`` or ``app_rate_limited``; of anything else: none."""
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
        own = event.get("user") in _own(envelope)
        return Reaction(groups=(tag(channel),), changes=own, sweep=own), "names" if own else None
    if kind in _LEFT and channel:
        return Reaction(groups=(tag(channel),), sweep=True), "names"
    if kind in _CHANNEL and channel:
        return Reaction(groups=(tag(channel),), sweep=kind != "channel_created"), "names"
    if kind in _USER:
        return Reaction(), "people"
    if isinstance(kind, str) and kind.startswith("subteam_"):  # user groups give no access here: their names only
        return Reaction(), "names"
    return Reaction(), None


def _message(event: Mapping[str, Any]) -> Reaction:
    if event.get("channel_type") in ("im", "mpim", "app_home"):
        return Reaction()
    channel, subtype = _channel(event), event.get("subtype")
    if not channel:
        return Reaction()
    if subtype in _CONVERTED:
        return Reaction(groups=(tag(channel),), sweep=True)
    told = (event.get("message"), event.get("previous_message"))
    about = told if subtype in _ABOUT_ANOTHER else (event,)
    found = {root(message) for message in about if isinstance(message, Mapping) and isinstance(message.get("ts"), str)}
    if not found and isinstance(deleted := event.get("deleted_ts"), str):
        found.add(deleted)
    ids = {id for ts in found if split_id(id := external_id(channel, ts))}
    return Reaction(ids=tuple(sorted(ids)))


def _channel(event: Mapping[str, Any]) -> str | None:
    found = event.get("channel")
    found = found.get("id") if isinstance(found, Mapping) else found
    return found if isinstance(found, str) and found.startswith(("C", "G")) else None


def _own(envelope: Mapping[str, Any]) -> set[str]:
    """The app's own users, as the envelope says for whom it was sent."""
    rows = envelope.get("authorizations")
    rows = rows if isinstance(rows, list) else []
    return {
        str(row["user_id"]) for row in rows if isinstance(row, Mapping) and row.get("is_bot") and row.get("user_id")
    }
