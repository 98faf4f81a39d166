"""Confluence: storage format, and the answers of both REST APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from connectors.confluence import client, content
from connectors.confluence.markup import markdown
from connectors.confluence.model import Comment, Content
from connectors.source import Document
from connectors.web import Web
from tests.contract.payloads.readers.base import IMPATIENT, Outcome, Reader, Replay
from tests.contract.payloads.sources import Payload
from tests.contract.payloads.visible import lost_words, of_storage

SPACE = "KEY"


def page(page: Content, names: Mapping[str, str]) -> Outcome:
    entry = content.page(replace(page, required_tags=()), names, "https://wiki.example/wiki")
    assert isinstance(entry, Document)
    facts = {
        "id": entry.external_id,
        "title": entry.title,
        "modified": page.modified_at,
        "version": page.version_number,
        "url": entry.source_url,
        "author": page.author,
    }
    return Outcome(facts, lost_words(of_storage(page.body or ""), entry.content))


def comment(comment: Comment) -> Outcome:
    facts = {"id": comment.id, "author": comment.author, "modified": comment.modified_at}
    return Outcome(facts, lost_words(of_storage(comment.body), markdown(comment.body)))


@asynccontextmanager
async def readers(server: Replay) -> AsyncIterator[Mapping[str, Reader]]:
    web = Web(f"{server.url}/wiki", name="wiki", limits=IMPATIENT)
    api = client.Api(web, cloud=True)

    def single(convert: Callable[[Any], Outcome]) -> Reader:
        async def read(payload: Payload) -> Outcome:
            server.load(payload)
            with client.parsing("wiki"):
                return convert(await api.get("rest/any"))

        return read

    def page_v1(json: Any) -> Outcome:
        names = {person.id: person.name for person in client.people_in(json)}
        return page(client.content_v1(json), names)

    async def storage(payload: Payload) -> Outcome:
        shown = markdown(payload.text)
        return Outcome({"shown": bool(shown)}, lost_words(of_storage(payload.text), shown))

    try:
        yield {
            "storage": storage,
            "page v1": single(page_v1),
            "page v2": single(lambda json: page(client.content_v2(json, "page", SPACE), {})),
            "comment v1": single(lambda json: comment(client.comment_v1(json))),
            "comment v2": single(lambda json: comment(client.comment_v2(json, None))),
        }
    finally:
        await web.close()
