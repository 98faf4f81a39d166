"""A thread as a document. Pure.

A message that nobody has answered is a thread of one, and a document of its own: it keeps its id when the first answer
comes, an edit or a delete touches nothing else, and a result links to exactly that message. (A day's messages as one
document would re-number themselves whenever one of them became a thread.)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from connectors.slack.text import Names, author, body
from connectors.source import Document, Gone, Listed, Unreadable
from pipeline.core.normalise import MESSAGES_TYPE, RECORD_SEPARATOR
from topics.messages import MAX_CONTENT_BYTES

Object = Mapping[str, Any]

NOISE = frozenset({
    "channel_join", "channel_leave", "group_join", "group_leave", "channel_topic", "channel_purpose", "channel_name",
    "channel_archive", "channel_unarchive", "channel_convert_to_private", "channel_posting_permissions", "group_topic",
    "group_purpose", "group_name", "group_archive", "group_unarchive", "bot_add", "bot_remove", "pinned_item",
    "unpinned_item", "reminder_add", "ekm_access_denied", "sh_room_created", "huddle_thread", "channel_canvas_updated",
})  # fmt: skip
"""Subtypes that say nothing but that something was done; docs.slack.dev/reference/events/message. A thread that people
began under one is read."""

DELETED = "(this message was deleted)"
MAX_TITLE = 120
MAX_NAMES = 50
"""Participants and files named in the metadata."""

_ID = re.compile(r"([CG][A-Z0-9]{1,40}):(\d{1,12}\.\d{1,6})")
_TS = re.compile(r"\d{1,12}\.\d{1,6}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread stands."""

    channel: str
    """Its id."""
    name: str
    url: str
    """Of the workspace, e.g. ``https://acme.slack.com``."""


def external_id(channel: str, ts: str) -> str:
    return f"{channel}:{ts}"


def split_id(id: str) -> tuple[str, str] | None:
    """``(channel, ts)``; None: no id of ours."""
    match = _ID.fullmatch(id)
    return (match[1], match[2]) if match else None


def tag(channel: str) -> str:
    return f"channel:{channel}"


def root(message: Object) -> str:
    """The ts of the thread that a message belongs to."""
    parent = message.get("thread_ts")
    return parent if isinstance(parent, str) else str(message["ts"])


def is_document(message: Object, *, min_characters: int) -> bool:
    """Whether this message of a history begins a thread that is read. Decided from the parent alone, so that a listing
    admits exactly what is read."""
    if root(message) != message["ts"]:
        return False
    if message.get("reply_count"):
        return True
    if message.get("subtype") in NOISE or message.get("hidden") or message.get("subtype") == "tombstone":
        return False
    text = body(message, Names())
    return bool(text) and len(text) >= min_characters


def revision(parent: Object, place: Place) -> str:
    """Of the parent as ``conversations.history`` returns it. Ids stand for names: a person who is renamed does not make
    every thread new. An edit of an answer changes nothing here: only events, ``fetch`` and the poll's overlap tell."""
    told = [
        place.name, body(parent, Names()), parent.get("user") or parent.get("bot_id"), _edited(parent),
        parent.get("subtype") == "tombstone", parent.get("reply_count") or 0, parent.get("latest_reply"),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(told, ensure_ascii=True).encode()).hexdigest()[:32]


def listed(parent: Object, place: Place) -> Listed:
    return Listed(
        external_id=external_id(place.channel, parent["ts"]), acl_tags=(tag(place.channel),),
        revision=revision(parent, place),
    )  # fmt: skip


def newest(message: Object) -> float:
    """When the thread changed last, as its parent knows: seconds since 1970."""
    return max(_seconds(message.get("ts")), _seconds(message.get("latest_reply")), _seconds(_edited(message)))


def document(
    messages: Sequence[Object], ts: str, place: Place, names: Names, *, min_characters: int
) -> Document | Gone | Unreadable:
    """messages: the parent and its answers, oldest first. Gone: there is no such parent among them."""
    id = external_id(place.channel, ts)
    parent = next((message for message in messages if message["ts"] == ts), None)
    if parent is None or not is_document(parent, min_characters=min_characters):
        return Gone(id)
    answers = [
        m for m in messages if m["ts"] != ts and m.get("subtype") != "tombstone" and m.get("subtype") not in NOISE
    ]
    first = DELETED if parent.get("subtype") == "tombstone" else body(parent, names)
    spoken = [f"{author(parent, names)}: {first}" if first != DELETED else DELETED]
    spoken += [f"{author(answer, names)}: {text}" for answer in answers if (text := body(answer, names))]
    content = RECORD_SEPARATOR.join(spoken)
    if len(content.encode(errors="replace")) > MAX_CONTENT_BYTES:
        return Unreadable(
            external_id=id, code="too_large", acl_tags=(tag(place.channel),), revision=revision(parent, place),
            message=f"a thread of {len(spoken)} messages is larger than 4 MiB: begin a new thread",
        )  # fmt: skip
    people: dict[str | int | float | bool, None] = dict.fromkeys(
        author(message, names) for message in (parent, *answers) if message["ts"] == ts or body(message, names)
    )
    files = [file["name"] for message in (parent, *answers) for file in _files(message)]
    return Document(
        external_id=id, title=title(first, place.name), content=content, media_type=MESSAGES_TYPE,
        acl_tags=(tag(place.channel),), revision=revision(parent, place),
        source_url=f"{place.url}/archives/{place.channel}/p{ts.replace('.', '')}",
        author=None if first == DELETED else author(parent, names),
        source_modified_at=_moment(max([newest(parent), *(newest(answer) for answer in answers)])),
        metadata={
            "channel": place.name, "channel_id": place.channel, "messages": len(spoken),
            "participants": list(people)[:MAX_NAMES], **({"files": [*files[:MAX_NAMES]]} if files else {}),
        },
    )  # fmt: skip


def title(text: str, channel: str) -> str:
    """The parent's first line, cut at a word, and where it stands."""
    line = next((shown for part in text.split("\n") if (shown := part.lstrip(" >`-").rstrip(" `"))), "Message")
    if len(line) > MAX_TITLE:
        line = f"{line[: MAX_TITLE + 1].rpartition(' ')[0] or line[:MAX_TITLE]} …"
    return f"{line} · #{channel}"


def _files(message: Object) -> list[Mapping[str, str]]:
    files = message.get("files")
    return (
        [one for one in files if isinstance(one, dict) and isinstance(one.get("name"), str)]
        if isinstance(files, list)
        else []
    )


def _edited(message: Object) -> str | None:
    edited = message.get("edited")
    ts = edited.get("ts") if isinstance(edited, Mapping) else None
    return ts if isinstance(ts, str) else None


def _seconds(ts: object) -> float:
    return float(ts) if isinstance(ts, str) and _TS.fullmatch(ts) else 0.0


def _moment(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds > 0 else None
