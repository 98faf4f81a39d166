"""What the tools do: ask the same search and the same ledger as HTTP, with the access of whoever calls, each time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from pipeline.core.errors import PenstockError
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import translated
from query.access import documents as reading
from query.access.callers import Caller
from query.access.tenant_rows import rows_of
from query.answers.visible import one_line, visible
from query.mcp.shapes import (
    FETCHED_CHARACTERS,
    FetchArguments,
    FetchGiven,
    SearchArguments,
    SearchGiven,
    SearchResult,
)
from query.model import MAX_TOP, Result
from query.service import Service

PASSAGES_A_RESULT = 2
"""Asked for besides: several passages of a document become one result."""
GAP = "\n\n[…]\n\n"
TITLE_CHARACTERS = 300


class Missing(PenstockError):
    """There is no such document, or the caller may not read it: nothing tells which."""


async def search(service: Service, caller: Caller, asked: SearchArguments) -> SearchGiven:
    """Raises BadQuery, Retryable, Misconfigured; TimeoutError."""
    async with asyncio.timeout(service.budget.total):
        outcome = await service.search.search(
            asked.query, caller, top=min(MAX_TOP, PASSAGES_A_RESULT * asked.limit), filters=asked.filters()
        )
    for step in outcome.steps:
        if step.degraded:
            service.metrics.degraded.labels(step.name).inc()
    service.shadow.offer(asked.query, caller, filters=asked.filters())
    of_document: dict[UUID, list[Result]] = {}
    for result in outcome.results:
        of_document.setdefault(result.passage.document_id, []).append(result)
    notes = [f"incomplete: {reason}" for reason in outcome.degraded]
    if not of_document:
        notes.append("no document that you may read matches")
    return SearchGiven(results=[_result(group) for group in list(of_document.values())[: asked.limit]], notes=notes)


def shown(given: SearchGiven) -> list[UUID]:
    """The documents of what was found, and those that say the same."""
    ids = [
        id_
        for result in given.results
        for id_ in (result.id, *(also["id"] for also in result.metadata.get("also", ())))
    ]
    return [UUID(id_) for id_ in dict.fromkeys(ids)]


def named(asked: object) -> str:
    """The document that was asked for, where it is an id: a caller may have written anything."""
    id_ = _uuid(asked.id) if isinstance(asked, FetchArguments) else None
    return f"document:{id_}" if id_ else ""


def _result(group: Sequence[Result]) -> SearchResult:
    best = group[0].passage
    in_order = sorted(group, key=lambda result: result.passage.chunk_index)
    return SearchResult(
        id=str(best.document_id),
        title=_title(best.title, best.external_id),
        url=_url(best.source_url, best.document_id),
        text=GAP.join(visible(result.text) for result in in_order),
        metadata=_metadata(best.source, best.author, best.media_type, best.source_modified_at) | _also(group),
    )


def _also(group: Sequence[Result]) -> dict[str, Any]:
    """Documents that say the same, where there are any: they are not listed again."""
    others = {str(place.document_id): place for result in group for place in result.also}
    others_json = [
        {"id": id_, "title": _title(p.title, p.external_id), "url": _url(p.source_url, p.document_id)}
        for id_, p in others.items()
    ]
    return {"also": others_json} if others_json else {}


async def fetch(service: Service, caller: Caller, asked: FetchArguments) -> FetchGiven:
    """Access is asked for again, in the statement that reads. Raises Missing, Retryable."""
    document = None
    if (id_ := _uuid(asked.id)) is not None:
        async with time_limit(service.budget.ledger, "Postgres"):
            with translated("fetch"):
                async with rows_of(service.pool, caller.tenant) as connection:
                    document = await reading.read(connection, caller, id_)
    if document is None:
        raise Missing("the document does not exist, or you may not read it: use an id from a search result")
    text = await asyncio.to_thread(visible, document.text)  # up to 4 MiB
    end = asked.offset + FETCHED_CHARACTERS
    metadata = _metadata(document.source, document.author, document.media_type, document.source_modified_at)
    if end < len(text):
        metadata |= {"next_offset": end, "characters": len(text)}
    return FetchGiven(
        id=str(document.document_id),
        title=_title(document.title, document.external_id),
        text=text[asked.offset : end],
        url=_url(document.source_url, document.document_id),
        metadata=metadata,
    )


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _title(title: str, external_id: str) -> str:
    return one_line(title, TITLE_CHARACTERS) or one_line(external_id, TITLE_CHARACTERS)


def _url(source_url: str | None, document: UUID) -> str:
    """Clients expect one: a document without an address is named."""
    return source_url or f"urn:uuid:{document}"


def _metadata(source: str, author: str | None, media_type: str | None, modified: datetime | None) -> dict[str, Any]:
    """What is known of it."""
    known = {
        "source": source,
        "author": author and one_line(author),
        "media_type": media_type,
        "source_modified_at": modified and modified.isoformat(),
    }
    return {name: value for name, value in known.items() if value}
