"""Events that Confluence sends, their signatures, and the cursor over changes. Pure.

Data Center signs its webhooks (confluence.atlassian.com/doc/managing-webhooks-1021225606.html). Cloud's events
(developer.atlassian.com/platform/forge/events-reference/confluence/) are forwarded by a Forge app, which signs them in
the same way, or by an automation rule, which can only send a secret along. Search knows times by the minute and lags
behind, so every poll looks back over the previous one, and the cursor holds what it saw there. Only durations are used:
whose clock is right does not matter.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from connectors.confluence.model import Changed
from connectors.source import Cursor, CursorExpired, Refused, Request

SIGNATURE, TOKEN = "x-hub-signature", "x-penstock-token"
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
    """``created``, ``updated``, ``moved``, ``trashed``, ``removed``, ``restored``, ``permissions_updated`` …"""
    ids: tuple[str, ...] = ()
    container: str | None = None
    name: str | None = None
    """A space's key, a group's name or id."""
    sent: Any = None
    """When, if it says so."""


def verify(request: Request, secret: str | None, *, token_allowed: bool) -> bool:
    """Whether it is signed; if not, the secret itself came along. Raises Refused. The signature is over the bytes as
    they came; all comparisons take the same time."""
    if not secret:
        raise Refused("an event came, but webhook_secret is not set: set it on both sides")
    key = secret.encode()
    given = request.headers.get(SIGNATURE, "")
    expected = "sha256=" + hmac.new(key, request.body, hashlib.sha256).hexdigest()
    if given and hmac.compare_digest(given.strip().lower().encode(), expected.encode()):
        return True
    token = request.headers.get(TOKEN, "")
    if token_allowed and token and hmac.compare_digest(token.encode(), key):
        return False
    raise Refused("an event is not signed with webhook_secret: is the secret the same on both sides?")


def parse(request: Request) -> Event:
    """What a genuine event is about; ``other`` for what tells nothing. Raises Refused for what is no event."""
    try:
        body = json.loads(request.body)
    except ValueError as error:
        raise Refused("an event is no JSON") from error
    if not isinstance(body, dict):
        raise Refused("an event is no JSON object")
    noun, verb = _name(body, request.headers)
    sent = body.get("timestamp", body.get("eventCreatedDate"))
    if noun == "other":
        return Event("other", verb, sent=sent)
    subjects = _subjects(body, noun)
    if noun == "space":
        name = next((key for one in subjects if _KEY.fullmatch(key := str(one.get("key")))), None)
        return Event(noun, verb, name=name, sent=sent)
    if noun in ("group", "user"):
        name = next((str(found) for one in subjects if (found := one.get("id") or one.get("name"))), None)
        return Event(noun, verb, name=name, sent=sent)
    ids = tuple(id_ for one in subjects if (id_ := _id(one, noun)))
    above = next((found for one in subjects if (found := _container(one))), None) or _id_of(body.get("attachedTo"))
    return Event(noun, verb, ids=ids, container=above, sent=sent)


def _name(body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[Noun, str]:
    """``page_updated`` (Data Center, automation) or ``avi:confluence:updated:page`` (Forge)."""
    for found in (body.get("eventType"), body.get("event"), body.get("webhookEvent"), headers.get("x-event-key")):
        if not isinstance(found, str) or not found:
            continue
        if found.startswith("avi:confluence:"):
            parts = found.split(":")
            return (_NOUNS.get(parts[3], "other"), parts[2]) if len(parts) > 3 else ("other", "")
        noun, _, verb = found.partition("_")
        return _NOUNS.get(noun, "other"), verb
    return "other", ""


def _subjects(body: Mapping[str, Any], noun: Noun) -> list[Mapping[str, Any]]:
    """The objects that an event is about, wherever its sender puts them."""
    names = [name for name, known in _NOUNS.items() if known == noun]
    found: list[Any] = []
    for name in dict.fromkeys([*names, *(f"{name}s" for name in names), "content"]):
        value = body.get(name)
        found += value if isinstance(value, list) else [value]
    if noun == "group" and isinstance(body.get("groupName"), str):
        found.append({"name": body["groupName"]})
    found.append({"id": body["id"]} if "id" in body else None)
    return [one for one in found if isinstance(one, Mapping)]


def _id(subject: Mapping[str, Any], noun: Noun) -> str | None:
    found = _id_of(subject)
    return f"att{found}" if found and noun == "attachment" and found.isdigit() else found


def _id_of(subject: Any) -> str | None:
    if not isinstance(subject, Mapping):
        return None
    found = str(subject.get("id") or subject.get("idAsString") or "")
    return found if _ID.fullmatch(found) else None


def _container(subject: Mapping[str, Any]) -> str | None:
    return next((id_ for name in ("container", "parent", "page") if (id_ := _id_of(subject.get(name)))), None)


MAX_SEEN = 20_000
"""More than this is no longer kept: some is read again, and found to be unchanged."""
LONGEST_MINUTES = 30 * 24 * 60
"""Who was away for longer sweeps instead."""


@dataclass(frozen=True, slots=True)
class Progress:
    at: datetime
    """When the last complete poll began, by our clock."""
    seen: Mapping[str, str]
    """Content id → mark of its version, of what that poll saw and what this one has read."""
    trash: frozenset[str]

    @classmethod
    def of(cls, cursor: Cursor) -> Progress:
        """Raises CursorExpired for what we never wrote."""
        try:
            at = datetime.fromisoformat(cursor["at"])
            seen = {str(key): str(value) for key, value in cursor["seen"].items()}
            return cls(at if at.tzinfo else at.replace(tzinfo=UTC), seen, frozenset(map(str, cursor["trash"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorExpired("the cursor of changes is none of ours: everything is looked at again") from error

    @property
    def cursor(self) -> Cursor:
        return {"at": self.at.isoformat(), "seen": dict(self.seen), "trash": sorted(self.trash)}

    def minutes(self, now: datetime, overlap: int) -> int:
        """How far back to search. Raises CursorExpired."""
        found = math.ceil(max(0.0, (now - self.at).total_seconds()) / 60) + overlap
        if found > LONGEST_MINUTES:
            raise CursorExpired("changes were not read for a month: everything is looked at again")
        return found

    def new(self, changed: Iterable[Changed]) -> list[Changed]:
        return [one for one in changed if self.seen.get(one.id) != one.mark]

    def read(self, some: Iterable[Changed]) -> Progress:
        return Progress(self.at, {**self.seen, **{one.id: one.mark for one in some}}, self.trash)

    def thrown_away(self, trash: Collection[str]) -> Progress:
        return Progress(self.at, self.seen, frozenset(trash))

    def done(self, at: datetime, found: Sequence[Changed]) -> Progress:
        """After a poll that began at ``at`` and whose last search gave ``found``, all of which is read."""
        return Progress(at, {one.id: one.mark for one in found[-MAX_SEEN:]}, self.trash)


def by_document(changed: Sequence[Changed], size: int) -> Iterable[tuple[list[str], list[Changed]]]:
    """Some document ids at a time, with all the changes that reading these documents settles."""
    grouped: dict[str, list[Changed]] = {}
    for one in changed:
        grouped.setdefault(one.document, []).append(one)
    ids = list(grouped)
    for start in range(0, len(ids), size):
        some = ids[start : start + size]
        yield some, [one for id_ in some for one in grouped[id_]]
