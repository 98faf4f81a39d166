"""The reaction to an event: which documents, collaborators and repositories to read again. Pure.

docs.github.com/webhooks/webhook-events-and-payloads; the signature: docs.github.com/webhooks/using-webhooks.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import SecretStr

from connectors.github.content import external_id, tag
from connectors.source import Reaction, Refused, Request

_DOCUMENTS: Mapping[str, str] = {
    "issues": "issue",
    "issue_comment": "issue",
    "pull_request": "pull_request",
    "pull_request_review": "pull_request",
    "pull_request_review_comment": "pull_request",
    "discussion": "discussion",
    "discussion_comment": "discussion",
}
"""The events of documents, and the field of the body that holds the document."""
_WIKI = "gollum"
_PEOPLE = frozenset({"member", "membership", "team", "team_add", "organization"})
"""Events that change who may read; their bodies have no time, so that two equal ones may both be genuine."""


def verified(request: Request, secret: SecretStr | None) -> Mapping[str, Any]:
    """Return the body of an event that GitHub signed. Raises Refused."""
    key = "" if secret is None else secret.get_secret_value().strip()
    if not key:  # an empty variable is no secret
        raise Refused("events are not accepted: webhook_secret is not set")
    ours = "sha256=" + hmac.new(key.encode(), request.body, hashlib.sha256).hexdigest()
    theirs = request.headers.get("x-hub-signature-256", "")
    if not hmac.compare_digest(ours.encode(), theirs.encode("utf-8", "surrogateescape")):
        raise Refused("the event's signature is not ours: set the same webhook_secret on both sides")
    try:
        body = json.loads(request.body)
    except ValueError as error:
        raise Refused("an event is not JSON: set its content type to application/json") from error
    if not isinstance(body, dict):
        raise Refused("an event is not a JSON object")
    return body


def is_recognisable(event: str) -> bool:
    """Whether two events of this kind with the same body are one event that arrived twice."""
    return event in _DOCUMENTS or event == _WIKI


def wiki(event: str, body: Mapping[str, Any]) -> int | None:
    """Return the number of the repository whose wiki an event concerns, or None."""
    return _number(body.get("repository"), "id") if event == _WIKI else None


def reaction(event: str, body: Mapping[str, Any], repositories: Collection[int]) -> Reaction:
    """Return the reaction to an event. ``repositories`` are the numbers of all that are read: a change of a team or of
    an organisation's members may concern any of them."""
    id = _number(body.get("repository"), "id")
    if event in _DOCUMENTS:
        number = _number(body.get(_DOCUMENTS[event]), "number")
        return Reaction(ids=(external_id(id, number),)) if id is not None and number is not None else Reaction()
    if event == "repository" and id is not None:
        return Reaction(groups=(tag(id),), sweep=True)
    if event == _WIKI:
        return Reaction(changes=True)
    if event in _PEOPLE:
        concerned = repositories if id is None else [id]
        return Reaction(groups=tuple(tag(number) for number in sorted(concerned)))
    return Reaction()


def _number(json: object, name: str) -> int | None:
    value = json.get(name) if isinstance(json, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
