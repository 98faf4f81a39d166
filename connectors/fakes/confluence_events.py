"""What Confluence sends when something happens.

Data Center: webhooks (developer.atlassian.com/server/confluence/webhooks/). Cloud: Forge's product events
(developer.atlassian.com/platform/forge/events-reference/confluence/), forwarded and signed by an app of one's own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any

from connectors.fakes.confluence_state import Happening, Item
from connectors.source import Request

FORGE = {"blog": "blogpost", "page": "page", "comment": "comment", "attachment": "attachment"}
VERBS = {"removed": "deleted"}


def requests(happened: Sequence[Happening], secret: str, *, cloud: bool) -> list[Request]:
    shape = _forge if cloud else _webhook
    return [signed(shape(one), secret) for one in happened]


def signed(body: dict[str, Any], secret: str) -> Request:
    raw = json.dumps(body).encode()
    digest = hmac.new(secret.encode(), raw, hashlib.sha256).hexdigest()
    headers = {"content-type": "application/json", "x-hub-signature": f"sha256={digest}"}
    return Request(headers, {}, raw)


def _webhook(happening: Happening) -> dict[str, Any]:
    item, name = happening.item, happening.name
    what = "content" if name.startswith("content_") else name.partition("_")[0]
    subject: dict[str, Any] = {
        "id": int(item.id.removeprefix("att")), "idAsString": item.id, "title": item.title, "spaceKey": item.space,
        "contentType": item.kind, "version": item.number, "creationDate": _millis(item.versions[0]),
        "modificationDate": _millis(item.versions[-1]), "self": f"/pages/viewpage.action?pageId={item.id}",
    }  # fmt: skip
    if item.container:
        subject["parent"] = {"id": int(item.container), "contentType": "page"}
    return {"timestamp": _millis(happening.at), "event": name, "userKey": item.author, what: subject}


def _forge(happening: Happening) -> dict[str, Any]:
    item, name = happening.item, happening.name
    noun, _, verb = name.partition("_")
    noun = FORGE.get(noun, item.kind)
    subject: dict[str, Any] = {
        "id": item.id, "type": item.kind, "status": item.status, "title": item.title,
        "space": {"key": item.space, "status": "current"},
    }  # fmt: skip
    if item.container:
        subject["container"] = {"id": item.container, "type": "page"}
    return {
        "eventType": f"avi:confluence:{VERBS.get(verb, verb)}:{noun}", "atlassianId": item.author,
        "eventCreatedDate": happening.at.isoformat(), ("attachment" if _is_file(item) else "content"): subject,
    }  # fmt: skip


def _is_file(item: Item) -> bool:
    return item.kind == "attachment"


def _millis(at: Any) -> int:
    return int(at.timestamp() * 1000)
