"""Threads and messages as documents with plain text: mrkdwn, blocks, attachments and files. Pure.

A message without replies is a thread of one, and a document of its own: its id stays the same when the first reply
arrives, an edit or a deletion changes nothing else, and a result links to exactly that message. (If a day's messages
were one document, their numbers would change whenever one of them became a thread.)

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

from connectors.extract import EXTRACTOR
from connectors.source import Document, Gone, Listed, Unreadable
from pipeline.core.normalise import MESSAGES_TYPE, RECORD_SEPARATOR
from topics.messages import MAX_CONTENT_BYTES

_TOKEN = re.compile(r"<([^<>\n]{1,4000})>")
_ENTITY = re.compile(r"&(lt|gt|amp);")
_ENTITIES = {"lt": "<", "gt": ">", "amp": "&"}
_SKIN_TONE = re.compile(r"(?<=:):skin-tone-[2-6]:")
_BROADCASTS = frozenset({"here", "channel", "everyone"})
_PERMALINK = re.compile(r"/archives/([A-Z0-9]+)/p\d+")
_BLANK_LINES = re.compile(r"\n{3,}")
MAX_NAME_CHARACTERS = 300
"""The most characters of a person's, bot's or file's name."""
_MAX_DEPTH = 8
"""The deepest nesting of blocks and attachments that is read, and the most levels of indentation."""


@dataclass(slots=True)
class Names:
    """Names by id. ``channels`` holds public channels only: a reader of a mention need not be a member of the private
    channel that it names, and Slack hides that name too."""

    users: Mapping[str, str] = field(default_factory=dict)
    channels: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Ids of users who were looked up and are unknown."""

    def user(self, id: str, label: str = "") -> str:
        if id not in self.users:
            self.missing.add(id)
        return self.users.get(id) or label or id

    def channel(self, id: str) -> str:
        return f"#{self.channels.get(id, id)}"

    def group(self, id: str, label: str = "") -> str:
        return f"@{self.groups.get(id) or label.removeprefix('@') or id}"


def body(message: Mapping[str, Any], names: Names, texts: Mapping[str, str] | None = None) -> str:
    """Return a message's text, the text of its attachments and the names of its files; ``""`` if it has none. texts:
    the texts of files, by the file's id, each of which follows the file's name."""
    parts = [blocks(message.get("blocks"), names) or mrkdwn(_text(message.get("text")), names)]
    parts += [attachment(card, names) for card in _objects(message.get("attachments"))]
    for file in _objects(message.get("files")):
        if label := file_name(file):
            parts += [label, (texts or {}).get(_text(file.get("id")), "")]
    return tidy("\n".join(part for part in parts if part.strip()))


def author(message: Mapping[str, Any], names: Names) -> str:
    """Return the name of the person or bot that wrote a message."""
    bot = _object(message.get("bot_profile"))
    user = _text(message.get("user")) or _text(_object(message.get("comment")).get("user"))  # of a file's comment
    if message.get("bot_id") and not (user and user in names.users and not (bot or message.get("username"))):
        return _line(_text(message.get("username")) or _text(bot.get("name")) or _text(message.get("bot_id")))
    profile = _object(message.get("user_profile"))
    label = _text(profile.get("display_name")) or _text(profile.get("real_name"))
    return _line(names.user(user, label) if user else _text(message.get("username")) or "Somebody")


def tidy(text: str) -> str:
    """Clean a text. The separator of messages is removed, so that a text cannot forge a message, and lone surrogates
    are replaced."""
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    text = text.replace("\r\n", "\n").replace(RECORD_SEPARATOR, " ")
    return _BLANK_LINES.sub("\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip()


def _line(text: str) -> str:
    return " ".join(tidy(text[:MAX_NAME_CHARACTERS]).split())


# mrkdwn


def mrkdwn(text: str, names: Names) -> str:
    """Convert mrkdwn to plain text: mentions by name, links as ``text (url)``, entities as characters. Emoji stay words
    between colons."""
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


def blocks(rows: object, names: Names, depth: int = 0) -> str:
    if depth > _MAX_DEPTH:
        return ""
    return "\n".join(part for block in _objects(rows) if (part := _block(block, names, depth)).strip())


def _block(block: Mapping[str, Any], names: Names, depth: int) -> str:
    match block.get("type"):
        case "rich_text":
            return "\n".join(_rich_text(part, names) for part in _objects(block.get("elements")))
        case "section" | "header" | "alert":
            return _lines(block.get("text"), *_objects(block.get("fields")), names=names)
        case "card":
            return _lines(*map(block.get, ("title", "subtitle", "body", "subtext")), names=names)
        case "carousel":
            return blocks(block.get("elements"), names, depth + 1)
        case "input":
            return _lines(block.get("label"), block.get("hint"), names=names)
        case "call":
            return _text(_object(_object(block.get("call")).get("v1")).get("name"))
        case "plan":
            tasks = [_task(task, names, depth) for task in _objects(block.get("tasks"))]
            return "\n".join(filter(None, (_lines(block.get("title"), names=names), *tasks)))
        case "task_card":
            return _task(block, names, depth)
        case "context":
            texts = (
                _text_object(part, names) or _text(part.get("alt_text")) for part in _objects(block.get("elements"))
            )
            return " ".join(part for part in texts if part)
        case "markdown":
            return _text(block.get("text"))
        case "image" | "video":
            title = _text_object(block.get("title"), names) or _text(block.get("alt_text"))
            return _lines(title, block.get("description"), block.get("author_name"), names=names)
        case "table" | "data_table":
            rows = block.get("rows")
            lines = [_row(row, names, depth) for row in rows] if isinstance(rows, list) else []
            return "\n".join(filter(None, (_text(block.get("caption")), *lines)))
        case "data_visualization":
            return "\n".join(filter(None, (_text(block.get("title")), *_chart(_object(block.get("chart"))))))
        case _:
            return ""


def _lines(*parts: object, names: Names) -> str:
    """Return the texts, each a text object or a plain string, one below the other."""
    texts = (part if isinstance(part, str) else _text_object(part, names) for part in parts)
    return "\n".join(text for text in texts if text)


def _task(task: Mapping[str, Any], names: Names, depth: int) -> str:
    """Convert a step of an agent's work, with its results and the addresses that it used."""
    sources = [link(_text(source.get("url")), _text(source.get("text"))) for source in _objects(task.get("sources"))]
    results = (blocks([task.get(name)], names, depth + 1) for name in ("details", "output"))
    return "\n".join(filter(None, (_lines(task.get("title"), names=names), *results, *sources)))


def _chart(chart: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each value of a chart, with its label."""
    for series in (*_objects(chart.get("series")), {"data": chart.get("segments")}):
        if name := _text(series.get("name")):
            yield name
        for point in _objects(series.get("data")):
            yield f"{_text(point.get('label'))}: {point.get('value')}"


def _text_object(text: object, names: Names) -> str:
    """Convert a text object of type ``mrkdwn`` or ``plain_text``, whose entities are escaped as well."""
    composition = _object(text)
    raw = _text(composition.get("text"))
    return mrkdwn(raw, names) if composition.get("type") == "mrkdwn" else unescape(raw)


def _row(row: object, names: Names, depth: int) -> str:
    cells = (blocks([cell], names, depth + 1) or _text(cell.get("text")) for cell in _objects(row))
    return " | ".join(" ".join(cell.split()) for cell in cells)


def _rich_text(element: Mapping[str, Any], names: Names) -> str:
    match element.get("type"):
        case "rich_text_list":
            indent = "  " * min(_number(element.get("indent")), _MAX_DEPTH)
            ordered = element.get("style") == "ordered"
            first = _number(element.get("offset")) + 1
            return "\n".join(
                f"{indent}{f'{n}.' if ordered else '-'} {_inline(item, names)}"
                for n, item in enumerate(_objects(element.get("elements")), first)
            )
        case "rich_text_quote":
            return "\n".join(f"> {line}" for line in _inline(element, names).split("\n"))
        case "rich_text_preformatted":
            return f"```\n{_inline(element, names)}\n```"
        case _:
            return _inline(element, names)


def _inline(element: Mapping[str, Any], names: Names) -> str:
    return "".join(_span(span, names) for span in _objects(element.get("elements")))


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


def attachment(card: Mapping[str, Any], names: Names, depth: int = 0) -> str:
    """Convert an attachment: an app's card, a link's preview or a shared message."""
    if card.get("is_msg_unfurl") or card.get("is_share"):
        return shared_message(card, names)
    title = mrkdwn(_text(card.get("title")), names)
    parts = [
        mrkdwn(_text(card.get("pretext")), names),
        _text(card.get("author_name")),
        link(_text(card.get("title_link")), title) if title and card.get("title_link") else title,
        mrkdwn(_text(card.get("text")), names),
        blocks(card.get("blocks"), names, depth + 1),
    ]
    for field_ in _objects(card.get("fields")):
        parts.append(": ".join(mrkdwn(_text(field_.get(key)), names) for key in ("title", "value") if field_.get(key)))
    parts += [label for file in _objects(card.get("files")) if (label := file_name(file))]
    text = "\n".join(part for part in parts if part.strip())
    return text or mrkdwn(_text(card.get("fallback")), names)


def shared_message(card: Mapping[str, Any], names: Names) -> str:
    """Return a line that refers to a message that was forwarded, or whose address was pasted, without its text. Readers
    of this channel need not be readers of the message's; those who are find it where it was written."""
    url = _text(card.get("from_url"))
    origin = _text(card.get("channel_id")) or (match[1] if (match := _PERMALINK.search(url)) else "")
    label = "shared message"
    if origin in names.channels:
        author_name = _line(_text(card.get("author_name")))
        label += f"{f' of {author_name}' if author_name else ''} in {names.channel(origin)}"
    return link(url, label) if url else label


def file_name(file: Mapping[str, Any]) -> str:
    """Return a line with a file's title and name; ``""`` for a file that was deleted or that the plan hides."""
    if file.get("mode") in ("tombstone", "hidden_by_limit"):
        return ""
    name, title = _line(_text(file.get("name"))), _line(_text(file.get("title")))
    both = f"{title} ({name})" if title and name and title != name else title or name
    return f"File: {both}" if both else ""


# Values of a response may be of any type


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    return (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else iter(())


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 10_000 else 0


Object = Mapping[str, Any]

SYSTEM_SUBTYPES = frozenset(
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
"""Subtypes of messages that Slack writes about an action (docs.slack.dev/reference/events/message). They are no
documents unless people replied to them."""

DELETED_TEXT = "(this message was deleted)"
MAX_TITLE_CHARACTERS = 120
MAX_METADATA_NAMES = 50
"""The most participants, and the most files, that the metadata names."""

_ID = re.compile(r"([CG][A-Z0-9]{1,40}):(\d{1,12}\.\d{1,6})")
_TS = re.compile(r"\d{1,12}\.\d{1,6}")


@dataclass(frozen=True, slots=True)
class ChannelInfo:
    """The properties of a thread's channel that its document contains."""

    id: str
    name: str
    url: str
    """The address of the workspace, such as ``https://acme.slack.com``."""
    reads_files: bool = False
    """Whether the document contains the texts of files."""


def external_id(channel: str, ts: str) -> str:
    return f"{channel}:{ts}"


def split_id(id: str) -> tuple[str, str] | None:
    """Split an external id into ``(channel, ts)``; None: it has another format."""
    match = _ID.fullmatch(id)
    return (match[1], match[2]) if match else None


def tag(channel: str) -> str:
    return f"channel:{channel}"


def thread_ts(message: Object) -> str:
    """Return the ``ts`` of the thread that a message belongs to."""
    parent = message.get("thread_ts")
    return parent if isinstance(parent, str) else str(message["ts"])


def is_document(message: Object, *, min_characters: int) -> bool:
    """Return whether a message begins a thread that is a document. This depends on the parent alone, so that a listing
    and a read agree."""
    if thread_ts(message) != message["ts"]:
        return False
    if message.get("reply_count"):
        return True
    if message.get("subtype") in SYSTEM_SUBTYPES or message.get("hidden") or message.get("subtype") == "tombstone":
        return False
    text = body(message, Names())
    return bool(text) and len(text) >= min_characters


def revision(parent: Object, channel: ChannelInfo) -> str:
    """Return the revision of a thread, computed from the parent as ``conversations.history`` returns it. It contains
    ids instead of names, so that renaming a person changes no thread's revision. An edit of a reply does not change it
    either: only events, ``fetch`` and the overlap of polls detect that."""
    state = [
        channel.name,
        body(parent, Names()),
        parent.get("user") or parent.get("bot_id"),
        _edited(parent),
        parent.get("subtype") == "tombstone",
        parent.get("reply_count") or 0,
        parent.get("latest_reply"),
    ]
    if channel.reads_files and (ids := [file.get("id") for file in _objects(parent.get("files"))]):
        state += [EXTRACTOR, ids]
    return hashlib.sha256(json.dumps(state, ensure_ascii=True).encode()).hexdigest()[:32]


def listed(parent: Object, channel: ChannelInfo) -> Listed:
    return Listed(
        external_id=external_id(channel.id, parent["ts"]),
        acl_tags=(tag(channel.id),),
        revision=revision(parent, channel),
    )


def last_change(message: Object) -> float:
    """Return when a thread changed last according to its parent, in seconds since 1970."""
    return max(_seconds(message.get("ts")), _seconds(message.get("latest_reply")), _seconds(_edited(message)))


def document(
    messages: Sequence[Object],
    ts: str,
    channel: ChannelInfo,
    names: Names,
    *,
    min_characters: int,
    texts: Mapping[str, str] | None = None,
) -> Document | Gone | Unreadable:
    """Convert a thread. ``messages`` holds the parent and its replies, oldest first; ``texts`` the texts of their files
    by the file's id. Returns Gone when it holds no parent, or one that is no document."""
    id = external_id(channel.id, ts)
    parent = next((message for message in messages if message["ts"] == ts), None)
    if parent is None or not is_document(parent, min_characters=min_characters):
        return Gone(id)
    replies = [
        m
        for m in messages
        if m["ts"] != ts and m.get("subtype") != "tombstone" and m.get("subtype") not in SYSTEM_SUBTYPES
    ]
    first = DELETED_TEXT if parent.get("subtype") == "tombstone" else body(parent, names, texts)
    parts = [f"{author(parent, names)}: {first}" if first != DELETED_TEXT else DELETED_TEXT]
    parts += [f"{author(reply, names)}: {text}" for reply in replies if (text := body(reply, names, texts))]
    content = RECORD_SEPARATOR.join(parts)
    if len(content.encode(errors="replace")) > MAX_CONTENT_BYTES:
        return too_large(parent, channel)
    people: dict[str | int | float | bool, None] = dict.fromkeys(
        author(message, names) for message in (parent, *replies) if message["ts"] == ts or body(message, names)
    )
    files = [file["name"] for message in (parent, *replies) for file in _files(message)]
    return Document(
        external_id=id,
        title=title(first, channel.name),
        content=content,
        media_type=MESSAGES_TYPE,
        acl_tags=(tag(channel.id),),
        revision=revision(parent, channel),
        source_url=f"{channel.url}/archives/{channel.id}/p{ts.replace('.', '')}",
        author=None if first == DELETED_TEXT else author(parent, names),
        source_modified_at=_time(max([last_change(parent), *(last_change(reply) for reply in replies)])),
        metadata={
            "channel": channel.name,
            "channel_id": channel.id,
            "messages": len(parts),
            "participants": list(people)[:MAX_METADATA_NAMES],
            **({"files": [*files[:MAX_METADATA_NAMES]]} if files else {}),
        },
    )


def too_large(parent: Object, channel: ChannelInfo) -> Unreadable:
    """Return the entry for a thread that is too large for a document."""
    return Unreadable(
        external_id=external_id(channel.id, parent["ts"]),
        code="too_large",
        acl_tags=(tag(channel.id),),
        revision=revision(parent, channel),
        message="the thread is larger than 4 MiB: begin a new thread",
    )


def title(text: str, channel: str) -> str:
    """Return the parent's first line, cut at a word, and the channel's name."""
    line = next((stripped for part in text.split("\n") if (stripped := part.lstrip(" >`-").rstrip(" `"))), "Message")
    if len(line) > MAX_TITLE_CHARACTERS:
        line = f"{line[: MAX_TITLE_CHARACTERS + 1].rpartition(' ')[0] or line[:MAX_TITLE_CHARACTERS]} …"
    return f"{line} · #{channel}"


def _files(message: Object) -> list[Mapping[str, str]]:
    files = message.get("files")
    return (
        [file for file in files if isinstance(file, dict) and isinstance(file.get("name"), str)]
        if isinstance(files, list)
        else []
    )


def _edited(message: Object) -> str | None:
    edited = message.get("edited")
    ts = edited.get("ts") if isinstance(edited, Mapping) else None
    return ts if isinstance(ts, str) else None


def _seconds(ts: object) -> float:
    return float(ts) if isinstance(ts, str) and _TS.fullmatch(ts) else 0.0


def _time(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds > 0 else None
