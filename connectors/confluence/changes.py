"""Events that Confluence sends, their signatures, and the cursor over changes. Pure.

Data Center signs its webhooks (confluence.atlassian.com/doc/managing-webhooks-1021225606.html). Cloud's events
(developer.atlassian.com/platform/forge/events-reference/confluence/) are forwarded by a Forge app, which signs them in
the same way, or by an automation rule, which can only send a secret along. Search knows times by the minute and lags
behind, so every poll overlaps the previous one, and the cursor holds the changes that it saw there. Only durations are
used, so the clocks need not agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from connectors.atlassian import progress_of
from connectors.confluence.model import Change
from connectors.source import Cursor, Refused, Request

Noun = Literal["page", "comment", "attachment", "space", "group", "user", "other"]

_NOUNS: Mapping[str, Noun] = {
    "page": "page",
    "blog": "page",
    "blogpost": "page",
    "content": "page",
    "folder": "page",
    "whiteboard": "page",
    "database": "page",
    "embed": "page",
    "comment": "comment",
    "attachment": "attachment",
    "space": "space",
    "group": "group",
    "user": "user",
}
_ID = re.compile(r"(?:att)?[0-9]{1,20}")
_KEY = re.compile(r"~?[A-Za-z0-9_-]{1,255}")


@dataclass(frozen=True, slots=True)
class Event:
    noun: Noun
    verb: str
    """The change, such as ``created``, ``moved``, ``trashed``, ``removed`` or ``permissions_updated``."""
    ids: tuple[str, ...] = ()
    container: str | None = None
    name: str | None = None
    """The key of a space, or the name or id of a group."""
    sent_at: Any = None
    """The event's own time stamp, unparsed; None: it has none."""


def parse(request: Request) -> Event:
    """Parse a verified event. The noun is ``other`` for kinds that concern no document. Raises Refused when the body is
    no JSON object."""
    try:
        body = json.loads(request.body)
    except ValueError as error:
        raise Refused("an event is not valid JSON") from error
    if not isinstance(body, dict):
        raise Refused("an event is not a JSON object")
    noun, verb = _noun_and_verb(body, request.headers)
    sent_at = body.get("timestamp", body.get("eventCreatedDate"))
    if noun == "other":
        return Event("other", verb, sent_at=sent_at)
    subjects = _subjects(body, noun)
    if noun == "space":
        name = next((key for subject in subjects if _KEY.fullmatch(key := str(subject.get("key")))), None)
        return Event(noun, verb, name=name, sent_at=sent_at)
    if noun in ("group", "user"):
        name = next((str(value) for subject in subjects if (value := subject.get("id") or subject.get("name"))), None)
        return Event(noun, verb, name=name, sent_at=sent_at)
    ids = tuple(id_ for subject in subjects if (id_ := _id(subject, noun)))
    container = next((value for subject in subjects if (value := _container(subject))), None) or _id_of(
        body.get("attachedTo")
    )
    return Event(noun, verb, ids=ids, container=container, sent_at=sent_at)


def _noun_and_verb(body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[Noun, str]:
    """Return the parts of ``page_updated`` (Data Center, automation) or ``avi:confluence:updated:page`` (Forge)."""
    for event in (body.get("eventType"), body.get("event"), body.get("webhookEvent"), headers.get("x-event-key")):
        if not isinstance(event, str) or not event:
            continue
        if event.startswith("avi:confluence:"):
            parts = event.split(":")
            return (_NOUNS.get(parts[3], "other"), parts[2]) if len(parts) > 3 else ("other", "")
        noun, _, verb = event.partition("_")
        return _NOUNS.get(noun, "other"), verb
    return "other", ""


def _subjects(body: Mapping[str, Any], noun: Noun) -> list[Mapping[str, Any]]:
    """Return the objects that changed, under any of the keys that senders use."""
    names = [name for name, known in _NOUNS.items() if known == noun]
    subjects: list[Any] = []
    for name in dict.fromkeys([*names, *(f"{name}s" for name in names), "content"]):
        value = body.get(name)
        subjects += value if isinstance(value, list) else [value]
    if noun == "group" and isinstance(body.get("groupName"), str):
        subjects.append({"name": body["groupName"]})
    subjects.append({"id": body["id"]} if "id" in body else None)
    return [subject for subject in subjects if isinstance(subject, Mapping)]


def _id(subject: Mapping[str, Any], noun: Noun) -> str | None:
    id_ = _id_of(subject)
    return f"att{id_}" if id_ and noun == "attachment" and id_.isdigit() else id_


def _id_of(subject: Any) -> str | None:
    if not isinstance(subject, Mapping):
        return None
    id_ = str(subject.get("id") or subject.get("idAsString") or "")
    return id_ if _ID.fullmatch(id_) else None


def _container(subject: Mapping[str, Any]) -> str | None:
    return next((id_ for name in ("container", "parent", "page") if (id_ := _id_of(subject.get(name)))), None)


MAX_CHANGES = 20_000
"""The most changes that one poll reads, all of which its cursor holds. After more of them a sweep replaces the poll."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the changes of a site were read: the content of the cursor."""

    polled_at: datetime
    """When the last complete poll began, by the local clock."""
    seen: Mapping[str, str]
    """Content id → version, for each change in the last complete poll and each that the current one has read."""
    trash: frozenset[str]
    """The ids that were in the trash."""

    @classmethod
    def from_cursor(cls, cursor: Cursor) -> Progress:
        """Raises CursorExpired for a cursor in another format."""
        return progress_of(cursor, lambda at, seen: cls(at, seen, frozenset(map(str, cursor["trash"]))))

    @property
    def cursor(self) -> Cursor:
        return {"at": self.polled_at.isoformat(), "seen": dict(self.seen), "trash": sorted(self.trash)}

    def unread(self, changes: Iterable[Change]) -> list[Change]:
        return [change for change in changes if self.seen.get(change.id) != change.version]

    def with_read(self, changes: Iterable[Change]) -> Progress:
        return Progress(self.polled_at, {**self.seen, **{change.id: change.version for change in changes}}, self.trash)

    def with_trash(self, trash: Collection[str]) -> Progress:
        return Progress(self.polled_at, self.seen, frozenset(trash))

    def completed(self, at: datetime, changes: Iterable[Change]) -> Progress:
        """Return the progress after a poll that began at ``at`` and read everything that its last search returned."""
        return Progress(at, {change.id: change.version for change in changes}, self.trash)


def batches_by_document(changes: Sequence[Change], size: int) -> Iterable[tuple[list[str], list[Change]]]:
    """Yield batches of at most ``size`` document ids, each with all the changes that these documents cover."""
    grouped: dict[str, list[Change]] = {}
    for change in changes:
        grouped.setdefault(change.document, []).append(change)
    ids = list(grouped)
    for start in range(0, len(ids), size):
        batch = ids[start : start + size]
        yield batch, [change for id_ in batch for change in grouped[id_]]
