"""A Slack workspace in memory: people, channels, messages, and the event that each change sends.

Shapes follow docs.slack.dev: reference/objects, reference/events.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]

BOT_USER = "U0PENSTOCK"
BOT_ID = "B0PENSTOCK"
APP_ID = "A0PENSTOCK"
SCOPES = (
    "channels:history",
    "channels:read",
    "files:read",
    "groups:history",
    "groups:read",
    "usergroups:read",
    "users:read",
    "users:read.email",
)


@dataclass
class Channel:
    id: str
    name: str
    created: int
    is_private: bool = False
    is_archived: bool = False
    is_ext_shared: bool = False
    kind: str = "channel"
    """``channel``, ``im`` or ``mpim``."""
    members: list[str] = field(default_factory=list)
    messages: dict[str, Object] = field(default_factory=dict)
    """Messages by ``ts``."""
    previous_names: list[str] = field(default_factory=list)
    teams: list[str] = field(default_factory=list)
    """The workspaces that have it."""

    @property
    def type(self) -> str:
        """The ``channel_type`` of a message event."""
        return self.kind if self.kind != "channel" else "group" if self.is_private else "channel"

    def as_json(self) -> Object:
        return {
            "id": self.id,
            "name": self.name,
            "name_normalized": self.name,
            "created": self.created,
            "is_channel": self.kind == "channel" and not self.is_private,
            "is_group": self.kind == "channel" and self.is_private,
            "is_im": self.kind == "im",
            "is_mpim": self.kind == "mpim",
            "is_private": self.is_private,
            "is_archived": self.is_archived,
            "is_general": False,
            "is_shared": self.is_ext_shared,
            "is_ext_shared": self.is_ext_shared,
            "is_org_shared": False,
            "is_pending_ext_shared": False,
            "is_member": BOT_USER in self.members,
            "previous_names": list(self.previous_names),
            "topic": {"value": "", "creator": "", "last_set": 0},
            "purpose": {"value": "", "creator": "", "last_set": 0},
            "num_members": len(self.members),
            "context_team_id": self.teams[0],
            "shared_team_ids": list(self.teams),
        }

    def replies(self, thread_ts: str) -> list[Object]:
        return [m for ts, m in sorted(self.messages.items()) if m.get("thread_ts") == thread_ts and ts != thread_ts]

    def threads(self) -> dict[str, list[Object]]:
        """Return replies by the ``ts`` of their parent, oldest first."""
        threads: dict[str, list[Object]] = defaultdict(list)
        for ts, message in sorted(self.messages.items()):
            if message.get("thread_ts", ts) != ts:
                threads[message["thread_ts"]].append(message)
        return threads

    def as_returned(self, message: Object, threads: Mapping[str, list[Object]] | None = None) -> Object:
        """Return a message with the fields of its thread, as ``conversations.history`` and ``.replies`` do. ``threads``
        is the result of ``threads()``, if the caller has it already."""
        copied = copy.deepcopy(message)
        replies = self.replies(message["ts"]) if threads is None else threads.get(message["ts"], [])
        if replies:
            users = list(dict.fromkeys(reply.get("user", reply.get("bot_id")) for reply in replies))
            copied |= {
                "thread_ts": message["ts"],
                "reply_count": len(replies),
                "reply_users_count": len(users),
                "latest_reply": replies[-1]["ts"],
                "reply_users": users[:5],
                "is_locked": False,
            }
        if message.get("thread_ts", message["ts"]) != message["ts"]:
            parent = self.messages.get(message["thread_ts"])
            copied["parent_user_id"] = parent.get("user") if parent else None
        return copied


class Workspace:
    """A workspace. ``clock`` returns seconds since 1970; no two messages have the same ``ts``."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        team_id: str = "T0ACME",
        domain: str = "acme",
        first_number: int = 1,
    ) -> None:
        """first_number: of ids; those of the workspaces of an organisation differ."""
        self.clock = clock
        self.team_id = team_id
        self.domain = domain
        self.users: dict[str, Object] = {}
        self.channels: dict[str, Channel] = {}
        self.usergroups: dict[str, Object] = {}
        self.files: dict[str, tuple[bytes, str]] = {}
        """Contents and media types by id."""
        self.files_url = "https://files.slack.com"
        self.listeners: list[Callable[[Object], None]] = []
        self._numbers = itertools.count(first_number)
        self._last_ts = 0.0
        self.user("penstock", id=BOT_USER, is_bot=True, email=None, bot_id=BOT_ID)

    # People

    def user(self, name: str, *, id: str | None = None, email: str | None = "", **fields: Any) -> str:
        """Add a user; returns the id. With ``email=""`` the address is made from the name."""
        id = id or f"U{next(self._numbers):05}"
        address = f"{name.split()[0].lower()}@{self.domain}.example" if email == "" else email
        bot_id = fields.pop("bot_id", None)
        profile: Object = {"real_name": name, "display_name": "", **({"bot_id": bot_id} if bot_id else {})}
        if address:
            profile["email"] = address
        self.users[id] = {
            "id": id,
            "team_id": self.team_id,
            "name": name.split()[0].lower(),
            "real_name": name,
            "deleted": False,
            "is_bot": False,
            "is_restricted": False,
            "is_ultra_restricted": False,
            "is_app_user": False,
            "is_email_confirmed": bool(address),
            "profile": profile,
            "updated": int(self.clock()),
            **fields,
        }
        self._send({"type": "team_join", "user": copy.deepcopy(self.users[id])})
        return id

    def change_user(self, id: str, **fields: Any) -> None:
        """Change fields of a user, such as ``deleted=True``; ``profile=`` is merged."""
        profile = self.users[id]["profile"] | fields.pop("profile", {})
        self.users[id] |= {**fields, "profile": profile, "updated": int(self.clock())}
        self._send({"type": "user_change", "user": copy.deepcopy(self.users[id])})

    def usergroup(self, handle: str) -> str:
        id = f"S{next(self._numbers):05}"
        self.usergroups[id] = {"id": id, "team_id": self.team_id, "name": handle.title(), "handle": handle}
        self._send({"type": "subteam_created", "subteam": copy.deepcopy(self.usergroups[id])})
        return id

    def file(self, name: str, content: str | bytes, media_type: str = "text/plain", **fields: Any) -> Object:
        """Upload a file; returns its object, for ``files=[…]`` of a message. ``mode="snippet"`` makes it a snippet."""
        id = f"F{next(self._numbers):05}"
        data = content.encode() if isinstance(content, str) else content
        self.files[id] = data, media_type
        url = f"{self.files_url}/files-pri/{self.team_id}-{id}"
        return {
            "id": id,
            "name": name,
            "title": name,
            "mimetype": media_type,
            "mode": "hosted",
            "size": len(data),
            "file_access": "visible",
            "is_external": False,
            "url_private": f"{url}/{name}",
            "url_private_download": f"{url}/download/{name}",
            **fields,
        }

    def delete_file(self, id: str) -> None:
        """Delete a file. The messages that share it stay, with a tombstone in its place."""
        del self.files[id]
        for channel in self.channels.values():
            for message in channel.messages.values():
                message["files"] = [
                    {"id": id, "mode": "tombstone"} if file["id"] == id else file for file in message.get("files", ())
                ]
        self._send({"type": "file_deleted", "file_id": id})

    # Channels

    def channel(self, name: str, *members: str, bot: bool = True, **fields: Any) -> str:
        """Add a channel; returns the id. ``bot`` is whether the app is invited."""
        id = f"{'D' if fields.get('kind') == 'im' else 'C'}{next(self._numbers):05}"
        fields = {"teams": [self.team_id], **fields}
        self.channels[id] = Channel(id, name, int(self.clock()), members=list(members), **fields)
        if bot:
            self.join(id, BOT_USER)
        return id

    def join(self, channel: str, user: str) -> None:
        self.channels[channel].members.append(user)
        self._send_to_members(
            channel, {"type": "member_joined_channel", "user": user, "channel": channel, "team": self.team_id}
        )

    def leave(self, channel: str, user: str) -> None:
        changed = self.channels[channel]
        changed.members.remove(user)
        if user == BOT_USER:
            self._send({"type": "group_left" if changed.is_private else "channel_left", "channel": channel})
        else:
            self._send_to_members(channel, {"type": "member_left_channel", "user": user, "channel": channel})

    def rename(self, channel: str, name: str) -> None:
        changed = self.channels[channel]
        changed.previous_names.insert(0, changed.name)
        changed.name = name
        kind = "group_rename" if changed.is_private else "channel_rename"
        self._send_to_members(
            channel, {"type": kind, "channel": {"id": channel, "name": name, "created": changed.created}}
        )

    def archive(self, channel: str) -> None:
        """Archive a channel, which removes the app from it."""
        changed = self.channels[channel]
        kind = "group_archive" if changed.is_private else "channel_archive"
        self._send_to_members(channel, {"type": kind, "channel": channel, "user": "U00001"})
        changed.is_archived = True
        changed.members = [user for user in changed.members if user != BOT_USER]

    def convert_to_private(self, channel: str) -> None:
        self.channels[channel].is_private = True
        self.post(channel, "U00001", "converted this channel to private", subtype="channel_convert_to_private")

    # Messages

    def ts(self) -> str:
        self._last_ts = max(round(self.clock(), 6), round(self._last_ts + 0.000001, 6))
        return f"{self._last_ts:.6f}"

    def post(self, channel: str, user: str, text: str, *, thread: str | None = None, **fields: Any) -> str:
        """Post a message; returns its ``ts``, which ``at`` can set. ``user`` is ``""`` for a bot's message (then pass
        ``bot_id`` or ``username``). ``thread`` is the ``ts`` of the parent."""
        ts = fields.pop("at", None) or self.ts()
        message: Object = {"type": "message", "text": text, "ts": ts, "team": self.team_id, **fields}
        if user:
            message["user"] = user
        if thread:
            message["thread_ts"] = thread
        self.channels[channel].messages[ts] = message
        self._send_message(channel, copy.deepcopy(message), ts)
        return ts

    def edit(self, channel: str, ts: str, text: str, **fields: Any) -> None:
        """Edit a message. The time of an edit is in whole seconds, as in Slack."""
        message = self.channels[channel].messages[ts]
        previous = copy.deepcopy(message)
        message |= {
            "text": text,
            "edited": {"user": message.get("user"), "ts": f"{int(self.clock())}.000000"},
            **fields,
        }
        self._changed(channel, message, previous)

    def delete(self, channel: str, ts: str) -> None:
        """Delete a message. A parent that has replies stays as a tombstone."""
        place = self.channels[channel]
        message = place.messages[ts]
        if place.replies(ts):
            place.messages[ts] = {
                "type": "message",
                "subtype": "tombstone",
                "text": "This message was deleted.",
                "user": "USLACKBOT",
                "hidden": True,
                "ts": ts,
                "thread_ts": ts,
            }
            self._changed(channel, place.messages[ts], message)
            return
        del place.messages[ts]
        parent = message.get("thread_ts", ts)
        if parent != ts and not place.replies(parent) and place.messages[parent].get("subtype") == "tombstone":
            del place.messages[parent]
        self._send_message(
            channel,
            {"subtype": "message_deleted", "hidden": True, "deleted_ts": ts, "previous_message": message},
            self.ts(),
        )

    def restore(self, channel: str, message: Object) -> None:
        """Restore a message as it was (in Slack only the support can do that)."""
        self.channels[channel].messages[message["ts"]] = copy.deepcopy(message)
        self._send_message(channel, copy.deepcopy(message), message["ts"])

    def _changed(self, channel: str, message: Object, previous: Object) -> None:
        current = self.channels[channel].as_returned(message)
        self._send_message(
            channel,
            {"subtype": "message_changed", "hidden": True, "message": current, "previous_message": previous},
            self.ts(),
        )

    # Events

    def _send_message(self, channel: str, fields: Object, ts: str) -> None:
        self._send_to_members(
            channel,
            {
                **fields,
                "type": "message",
                "channel": channel,
                "ts": ts,
                "event_ts": ts,
                "channel_type": self.channels[channel].type,
            },
        )

    def _send_to_members(self, channel: str, event: Object) -> None:
        """Send an event of a channel, if the app is a member."""
        if BOT_USER in self.channels[channel].members:
            self._send(event)

    def _send(self, event: Object) -> None:
        number = next(self._numbers)
        envelope = {
            "token": "unused",
            "team_id": self.team_id,
            "api_app_id": APP_ID,
            "type": "event_callback",
            "event": {"event_ts": f"{self.clock():.6f}", **event},
            "event_id": f"Ev{number:08}",
            "event_time": int(self.clock()),
            "is_ext_shared_channel": False,
            "authorizations": [
                {
                    "enterprise_id": None,
                    "team_id": self.team_id,
                    "user_id": BOT_USER,
                    "is_bot": True,
                    "is_enterprise_install": False,
                }
            ],
        }
        for listener in self.listeners:
            listener(envelope)
