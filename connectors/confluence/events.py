"""What Confluence sends us: whether it is genuine, and what it is about. Pure.

Data Center signs its webhooks (confluence.atlassian.com/doc/managing-webhooks-1021225606.html). Cloud's events
(developer.atlassian.com/platform/forge/events-reference/confluence/) are forwarded by a Forge app, which signs them in
the same way, or by an automation rule, which can only send a secret along.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from connectors.source import Refused, Request

SIGNATURE, TOKEN = "x-hub-signature", "x-penstock-token"
Noun = Literal["page", "comment", "attachment", "space", "group", "user", "other"]

_NOUNS: Mapping[str, Noun] = {
    "page": "page", "blog": "page", "blogpost": "page", "content": "page", "folder": "page",
    "whiteboard": "page", "database": "page", "embed": "page", "comment": "comment",
    "attachment": "attachment", "space": "space", "group": "group", "user": "user",
}  # fmt: skip
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
