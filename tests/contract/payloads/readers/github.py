"""GitHub: events, answers of GraphQL about documents, and answers of REST."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import SecretStr

from connectors.github import GitHubOptions, content, events
from connectors.github.client import Api
from connectors.github.queries import Repository
from connectors.source import Document, Request
from tests.contract.payloads.readers.base import IMPATIENT, Outcome, Reader, Replay
from tests.contract.payloads.sources import Payload

AT = "2020-01-01T00:00:00Z"
SECRET = SecretStr("secret")
PLACE = Repository(
    id=7,
    node="R_7",
    name="acme/widgets",
    visibility="PRIVATE",
    organization="acme",
    organization_id=1,
    has_discussions=True,
    has_wiki=False,
    is_disabled=False,
)


def said(json: Mapping[str, Any]) -> dict[str, Any]:
    """Return a discussion or comment with the fields that its project did not request."""
    defaults = {"isMinimized": False, "isAnswer": False, "createdAt": AT, "lastEditedAt": None}
    rows = {name: {"nodes": [*map(said, nodes(json, name))]} for name in ("comments", "replies")}
    return {**defaults, **json, **rows}


def nodes(json: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return (json.get(name) or {}).get("nodes") or []


def written(json: Any) -> Iterator[str]:
    """Yield what people wrote."""
    if isinstance(json, list):
        for value in json:
            yield from written(value)
    elif isinstance(json, dict):
        if isinstance(json.get("body"), str):
            yield json["body"].replace("\r\n", "\n").strip()
        yield from written([json.get("comments"), json.get("replies"), json.get("nodes")])


@asynccontextmanager
async def readers(server: Replay) -> AsyncIterator[Mapping[str, Reader]]:
    api = Api(GitHubOptions(token=SecretStr("token"), organization="acme", api_url=server.url), "hub", IMPATIENT)

    async def event(payload: Payload) -> Outcome:
        signature = hmac.new(SECRET.get_secret_value().encode(), payload.body, hashlib.sha256).hexdigest()
        request = Request({"x-hub-signature-256": f"sha256={signature}"}, {}, payload.body)
        reaction = events.reaction(payload.group.options["event"], events.verified(request, SECRET), [1, 2])
        facts = {"documents": " ".join(reaction.ids), "groups": " ".join(reaction.groups), "sweep": reaction.sweep}
        return Outcome(facts)

    async def discussion(payload: Payload) -> Outcome:
        server.load(payload)
        data, _ = await api.query("query { any }", {})
        newest = {"totalCount": 0, "nodes": []}
        defaults = {"updatedAt": AT, "isAnswered": False, "closed": False, "newest": newest}
        item = {**defaults, **said(data["node"])}
        entry = content.document("discussions", PLACE, item, ())
        assert isinstance(entry, Document)
        facts = {"title": entry.title, "author": entry.author, "url": entry.source_url, "id": entry.external_id}
        return Outcome(facts, [text for text in written(data["node"]) if text not in entry.content])

    async def query(payload: Payload) -> Outcome:
        server.load(payload)
        data, _ = await api.query("query { any }", {})
        return Outcome({"fields": sorted(data)})

    async def repository(payload: Payload) -> Outcome:
        server.load(payload)
        answer = await api.repository(7)
        return Outcome({"there": answer is not None, **(answer or {})})

    async def collaborators(payload: Payload) -> Outcome:
        server.load(payload)
        logins = await api.collaborators("acme/widgets")
        assert logins is not None
        return Outcome({"people": len(logins)}, {row["login"] for row in payload.value} ^ set(logins))

    try:
        yield {
            "event": event,
            "discussion": discussion,
            "query": query,
            "repository": repository,
            "collaborators": collaborators,
        }
    finally:
        await api.close()
