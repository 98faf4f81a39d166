"""Threads and messages as documents with plain text: mrkdwn, blocks, attachments and files. Pure.

A message that nobody has answered is a thread of one, and a document of its own: it keeps its id when the first answer
arrives, an edit or a delete touches nothing else, and a result links to exactly that message. (A day's messages as one
document would be renumbered whenever one of them became a thread.)

docs.slack.dev/messaging/formatting-message-text and /reference/block-kit/blocks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from connectors.source import Document, Gone, Listed, Unreadable
from pipeline.core.normalise import MESSAGES_TYPE, RECORD_SEPARATOR
from topics.messages import MAX_CONTENT_BYTES

_TOKEN = re.compile(r"<([^<>\n]{1,4000})>")
_ENTITY = re.compile(r"&(lt|gt|amp);")
_ENTITIES = {"lt": "<", "gt": ">", "amp": "&"}
_SKIN_TONE = re.compile(r"(?<=:):skin-tone-[2-6]:")
_BROADCASTS = frozenset({"here", "channel", "everyone"})
_BLANK_LINES = re.compile(r"\n{3,}")
MAX_NAME = 300
"""Characters of a person's, bot's or file's name."""
_DEEPEST = 8
"""Blocks within blocks within attachments."""


@dataclass(slots=True)
class Names:
    """What ids are called. ``channels`` holds public ones only: whoever reads a mention of a private channel need not
    be a member of it, and Slack does not tell them its name either."""

    users: Mapping[str, str] = field(default_factory=dict)
    channels: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Users that were asked for and are not known."""

    def user(self, id: str, label: str = "") -> str:
        if id not in self.users:
            self.missing.add(id)
        return self.users.get(id) or label or id

    def channel(self, id: str) -> str:
        return f"#{self.channels.get(id, id)}"

    def group(self, id: str, label: str = "") -> str:
        return f"@{self.groups.get(id) or label.removeprefix('@') or id}"


def body(message: Mapping[str, Any], names: Names) -> str:
    """Text, attachments' text and files' names of one message; ``""`` when it has none of them."""
    parts = [blocks(message.get("blocks"), names) or mrkdwn(_text(message.get("text")), names)]
    parts += [attachment(one, names) for one in _objects(message.get("attachments"))]
    parts += [shown for one in _objects(message.get("files")) if (shown := file_name(one))]
    return tidy("\n".join(part for part in parts if part.strip()))


def author(message: Mapping[str, Any], names: Names) -> str:
    """A person by name, a bot by its own."""
    user, bot = _text(message.get("user")), _object(message.get("bot_profile"))
    if message.get("bot_id") and not (user and user in names.users and not (bot or message.get("username"))):
        return _line(_text(message.get("username")) or _text(bot.get("name")) or _text(message.get("bot_id")))
    profile = _object(message.get("user_profile"))
    label = _text(profile.get("display_name")) or _text(profile.get("real_name"))
    return _line(names.user(user, label) if user else _text(message.get("username")) or "Somebody")


def tidy(text: str) -> str:
    """Without the sign that separates messages: nobody may forge one. Half a character (a lone surrogate) is none."""
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    text = text.replace("\r\n", "\n").replace(RECORD_SEPARATOR, " ")
    return _BLANK_LINES.sub("\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip()


def _line(text: str) -> str:
    return " ".join(tidy(text[:MAX_NAME]).split())


# mrkdwn


def mrkdwn(text: str, names: Names) -> str:
    """Mentions by name, links as ``text (url)``, entities as letters; emoji stay words between colons."""
    parts, last = [], 0
    for match in _TOKEN.finditer(text):
        parts += [unescape(text[last : match.start()]), _token(match[1], names)]
        last = match.end()
    return _SKIN_TONE.sub("", "".join((*parts, unescape(text[last:]))))


def unescape(text: str) -> str:
    return _ENTITY.sub(lambda match: _ENTITIES[match[1]], text)


def _token(inner: str, names: Names) -> str:
    target, _, raw = inner.partition("|")
    label = unescape(raw)
    if target.startswith("@"):
        return f"@{names.user(target[1:], label)}"
    if target.startswith("#"):
        return names.channel(target[1:])
    if target.startswith("!subteam^"):
        return names.group(target.removeprefix("!subteam^"), label)
    if target.startswith("!"):
        word = target[1:].partition("^")[0]
        return f"@{word}" if word in _BROADCASTS else label or f"@{word}"
    return link(unescape(target), label)


def link(url: str, label: str = "") -> str:
    bare = url.removeprefix("mailto:").removeprefix("tel:")
    if not label or label in (url, bare) or label == url.partition("://")[2].rstrip("/"):
        return bare
    return f"{label} ({bare})"


# Blocks


def blocks(found: object, names: Names, depth: int = 0) -> str:
    if depth > _DEEPEST:
        return ""
    return "\n".join(part for one in _objects(found) if (part := _block(one, names, depth)).strip())


def _block(block: Mapping[str, Any], names: Names, depth: int) -> str:
    match block.get("type"):
        case "rich_text":
            return "\n".join(_rich(one, names) for one in _objects(block.get("elements")))
        case "section" | "header":
            parts = [_composed(block.get("text"), names)]
            parts += [_composed(one, names) for one in _objects(block.get("fields"))]
            return "\n".join(part for part in parts if part)
        case "context":
            shown = (_composed(one, names) or _text(one.get("alt_text")) for one in _objects(block.get("elements")))
            return " ".join(part for part in shown if part)
        case "markdown":
            return _text(block.get("text"))
        case "image" | "video":
            title = _composed(block.get("title"), names) or _text(block.get("alt_text"))
            return "\n".join(part for part in (title, _composed(block.get("description"), names)) if part)
        case "table":
            rows = block.get("rows")
            return "\n".join(_row(row, names, depth) for row in rows) if isinstance(rows, list) else ""
        case _:
            return ""


def _composed(text: object, names: Names) -> str:
    """A text object, ``mrkdwn`` or ``plain_text`` (whose entities are escaped as well)."""
    found = _object(text)
    raw = _text(found.get("text"))
    return mrkdwn(raw, names) if found.get("type") == "mrkdwn" else unescape(raw)


def _row(row: object, names: Names, depth: int) -> str:
    cells = (blocks([one], names, depth + 1) or _text(one.get("text")) for one in _objects(row))
    return " | ".join(" ".join(cell.split()) for cell in cells)


def _rich(element: Mapping[str, Any], names: Names) -> str:
    match element.get("type"):
        case "rich_text_list":
            indent = "  " * min(_number(element.get("indent")), _DEEPEST)
            ordered = element.get("style") == "ordered"
            first = _number(element.get("offset")) + 1
            return "\n".join(
                f"{indent}{f'{n}.' if ordered else '-'} {_inline(one, names)}"
                for n, one in enumerate(_objects(element.get("elements")), first)
            )
        case "rich_text_quote":
            return "\n".join(f"> {line}" for line in _inline(element, names).split("\n"))
        case "rich_text_preformatted":
            return f"```\n{_inline(element, names)}\n```"
        case _:
            return _inline(element, names)


def _inline(element: Mapping[str, Any], names: Names) -> str:
    return "".join(_span(one, names) for one in _objects(element.get("elements")))


def _span(span: Mapping[str, Any], names: Names) -> str:
    match span.get("type"):
        case "text":
            return _text(span.get("text"))
        case "link":
            return link(_text(span.get("url")), _text(span.get("text")))
        case "user":
            return f"@{names.user(_text(span.get('user_id')))}"
        case "channel":
            return names.channel(_text(span.get("channel_id")))
        case "usergroup":
            return names.group(_text(span.get("usergroup_id")))
        case "broadcast":
            return f"@{_text(span.get('range'))}"
        case "emoji":
            return f":{_text(span.get('name'))}:"
        case "date":
            return _text(span.get("fallback"))
        case "color":
            return _text(span.get("value"))
        case _:
            return ""


# Attachments and files


def attachment(one: Mapping[str, Any], names: Names, depth: int = 0) -> str:
    """Cards of apps, unfurled links, shared messages."""
    title = mrkdwn(_text(one.get("title")), names)
    parts = [
        mrkdwn(_text(one.get("pretext")), names),
        _text(one.get("author_name")),
        link(_text(one.get("title_link")), title) if title and one.get("title_link") else title,
        mrkdwn(_text(one.get("text")), names),
        blocks(one.get("blocks"), names, depth + 1),
    ]
    for field_ in _objects(one.get("fields")):
        parts.append(": ".join(mrkdwn(_text(field_.get(key)), names) for key in ("title", "value") if field_.get(key)))
    parts += [shown for file in _objects(one.get("files")) if (shown := file_name(file))]
    shown = "\n".join(part for part in parts if part.strip())
    return shown or mrkdwn(_text(one.get("fallback")), names)


def file_name(file: Mapping[str, Any]) -> str:
    """``""`` for a file that was deleted or that the plan hides."""
    if file.get("mode") in ("tombstone", "hidden_by_limit"):
        return ""
    name, title = _line(_text(file.get("name"))), _line(_text(file.get("title")))
    both = f"{title} ({name})" if title and name and title != name else title or name
    return f"File: {both}" if both else ""


# What came from outside may be of any type


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    return (one for one in value if isinstance(one, Mapping)) if isinstance(value, list) else iter(())


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 10_000 else 0


Object = Mapping[str, Any]

NOISE = frozenset(
    {
        "channel_join",
        "channel_leave",
        "group_join",
        "group_leave",
        "channel_topic",
        "channel_purpose",
        "channel_name",
        "channel_archive",
        "channel_unarchive",
        "channel_convert_to_private",
        "channel_posting_permissions",
        "group_topic",
        "group_purpose",
        "group_name",
        "group_archive",
        "group_unarchive",
        "bot_add",
        "bot_remove",
        "pinned_item",
        "unpinned_item",
        "reminder_add",
        "ekm_access_denied",
        "sh_room_created",
        "huddle_thread",
        "channel_canvas_updated",
    }
)
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
        place.name,
        body(parent, Names()),
        parent.get("user") or parent.get("bot_id"),
        _edited(parent),
        parent.get("subtype") == "tombstone",
        parent.get("reply_count") or 0,
        parent.get("latest_reply"),
    ]
    return hashlib.sha256(json.dumps(told, ensure_ascii=True).encode()).hexdigest()[:32]


def listed(parent: Object, place: Place) -> Listed:
    return Listed(
        external_id=external_id(place.channel, parent["ts"]),
        acl_tags=(tag(place.channel),),
        revision=revision(parent, place),
    )


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
            external_id=id,
            code="too_large",
            acl_tags=(tag(place.channel),),
            revision=revision(parent, place),
            message=f"a thread of {len(spoken)} messages is larger than 4 MiB: begin a new thread",
        )
    people: dict[str | int | float | bool, None] = dict.fromkeys(
        author(message, names) for message in (parent, *answers) if message["ts"] == ts or body(message, names)
    )
    files = [file["name"] for message in (parent, *answers) for file in _files(message)]
    return Document(
        external_id=id,
        title=title(first, place.name),
        content=content,
        media_type=MESSAGES_TYPE,
        acl_tags=(tag(place.channel),),
        revision=revision(parent, place),
        source_url=f"{place.url}/archives/{place.channel}/p{ts.replace('.', '')}",
        author=None if first == DELETED else author(parent, names),
        source_modified_at=_moment(max([newest(parent), *(newest(answer) for answer in answers)])),
        metadata={
            "channel": place.name,
            "channel_id": place.channel,
            "messages": len(spoken),
            "participants": list(people)[:MAX_NAMES],
            **({"files": [*files[:MAX_NAMES]]} if files else {}),
        },
    )


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
