"""The tools. They use the same search and the same ledger as HTTP, with the caller's current access at each call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any
from uuid import UUID

from cachetools import TTLCache

from pipeline.core.errors import PenstockError
from pipeline.core.normalise import clean
from pipeline.ledger.conflicts import Listed
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import translated
from query import conflicts as conflicting
from query.access import documents as reading
from query.access.callers import Caller
from query.access.tenant_rows import rows_of
from query.answers.visible import one_line, visible
from query.http.schemas import ConflictBody, SourceFreshness
from query.mcp.shapes import (
    MAX_FETCHED_CHARACTERS,
    ConflictsArguments,
    ConflictsOutput,
    DocumentResult,
    FetchArguments,
    FetchOutput,
    PreviewArguments,
    SearchArguments,
    SearchOutput,
    StandingArguments,
)
from query.model import MAX_TOP, Result, facets_as_json
from query.retrieval.cursor import parse
from query.service import Service

PASSAGES_PER_DOCUMENT = 2
"""How many passages are requested for each document, because passages of one document form one result."""
GAP = "\n\n[…]\n\n"
MAX_TITLE_CHARACTERS = 300
MAX_ID_CHARACTERS = 2_000
_visible_texts: TTLCache[bytes, str] = TTLCache(4, 60.0)
"""The displayed texts of documents whose parts are fetched one after the other, by a digest of the whole: each takes up
to 16 MB."""


class DocumentUnavailable(PenstockError):
    """The document does not exist or the caller may not read it; the error does not reveal which."""


async def search(service: Service, caller: Caller, arguments: SearchArguments) -> SearchOutput:
    """The documents that match, each with its passages. Raises BadQuery, Retryable, Misconfigured and TimeoutError."""
    filters = arguments.filters()
    async with asyncio.timeout(service.budget.total):
        outcome = await service.search.search(
            arguments.query,
            caller,
            top=min(MAX_TOP, PASSAGES_PER_DOCUMENT * arguments.limit),
            filters=filters,
            sort=arguments.sort,
            cursor=arguments.cursor,
            facets=arguments.facets,
        )
    for step in outcome.steps:
        if step.degraded:
            service.metrics.degraded.labels(step.name).inc()
    if arguments.sort == "relevance" and arguments.cursor is None:
        service.shadow.offer(arguments.query, caller, filters=filters)
    of_document: dict[UUID, list[Result]] = {}
    for result in outcome.results:
        of_document.setdefault(result.passage.document_id, []).append(result)
    notes = [f"incomplete: {reason}" for reason in outcome.degraded]
    if not of_document:
        notes.append("no document that you may read matches")
    groups = list(of_document.values())[: arguments.limit]
    following = outcome.cursor
    if len(of_document) > len(groups):  # what is left out comes on the next page
        following = str(parse(outcome.before).after([result for group in groups for result in group]))
    return SearchOutput(
        results=[_result(group) for group in groups],
        notes=notes,
        cursor=following,
        facets={name: _displayed(facet) for name, facet in facets_as_json(outcome.facets).items()},
        freshness=[SourceFreshness(**source.as_json()) for source in outcome.freshness],
    )


def _displayed(facet: dict[str, Any]) -> dict[str, Any]:
    """A facet whose values, which documents state, have no characters that are not displayed. They keep the joiners
    that their script needs, so that a filter by them matches."""
    values = [
        {**counted, "value": clean(counted["value"]) if isinstance(counted["value"], str) else counted["value"]}
        for counted in facet["values"]
    ]
    return {**facet, "values": values}


def shown_documents(output: SearchOutput) -> list[UUID]:
    """The documents of the results, with those that contain the same text."""
    ids = [
        id_
        for result in output.results
        for id_ in (result.id, *(also["id"] for also in result.metadata.get("also", ())))
    ]
    return [UUID(id_) for id_ in dict.fromkeys(ids)]


def requested_object(arguments: object) -> str:
    """The requested document or question for the audit trail; "" if the argument is not an id."""
    if isinstance(arguments, StandingArguments | PreviewArguments):
        return arguments.object
    id_ = _uuid(arguments.id) if isinstance(arguments, FetchArguments) else None
    return f"document:{id_}" if id_ else ""


def _result(group: Sequence[Result]) -> DocumentResult:
    best = group[0].passage
    in_reading_order = sorted(group, key=lambda result: result.passage.chunk_index)
    return DocumentResult(
        id=str(best.document_id),
        title=title_of(best.title, best.external_id),
        url=address_of(best.source_url, best.document_id),
        text=GAP.join(visible(result.text) for result in in_reading_order),
        metadata=_metadata(best.source, best.author, best.media_type, best.source_modified_at) | _also(group),
    )


def _also(group: Sequence[Result]) -> dict[str, Any]:
    """Documents that contain the same text; they are not results of their own."""
    others = {str(passage.document_id): passage for result in group for passage in result.also}
    others_json = [
        {"id": id_, "title": title_of(p.title, p.external_id), "url": address_of(p.source_url, p.document_id)}
        for id_, p in others.items()
    ]
    return {"also": others_json} if others_json else {}


async def conflicts(service: Service, caller: Caller, arguments: ConflictsArguments) -> ConflictsOutput:
    """Passages that contradict or repeat each other, of which the caller may read both. Raises Retryable."""
    async with time_limit(service.budget.ledger, "Postgres"):
        with translated("conflicts"):
            async with rows_of(service.pool, caller.tenant) as connection:
                standing = await conflicting.visible(
                    connection,
                    caller,
                    kinds=arguments.kinds or None,
                    sources=arguments.sources or None,
                    document=arguments.document,
                    cursor=arguments.cursor,
                    limit=arguments.limit,
                )
                quoted = await conflicting.quotes(connection, standing)
    bodies = [_conflict(listed, quoted.get(listed.id)) for listed in standing]
    return ConflictsOutput(conflicts=bodies, cursor=conflicting.cursor_after(standing, arguments.limit))


def _conflict(listed: Listed, quoted: tuple[str, str] | None) -> ConflictBody:
    """A conflict without what is not displayed."""
    body = ConflictBody.model_validate(conflicting.conflict_json(listed, quoted))
    return body.model_copy(
        update={
            "quotes": None if body.quotes is None else [visible(quote) for quote in body.quotes],
            "titles": [title_of(title, id_) for title, id_ in zip(body.titles, body.external_ids, strict=True)],
            "external_ids": [displayed_id(id_) for id_ in body.external_ids],
        }
    )


def conflicting_documents(output: ConflictsOutput) -> list[UUID]:
    return list(dict.fromkeys(id_ for conflict in output.conflicts for id_ in conflict.documents))


async def readable_document(service: Service, caller: Caller, id_: UUID | None) -> reading.Document:
    """A document with its text. The statement that reads checks access again. Raises DocumentUnavailable and
    Retryable."""
    document = None
    if id_ is not None:
        async with time_limit(service.budget.ledger, "Postgres"):
            with translated("fetch"):
                async with rows_of(service.pool, caller.tenant) as connection:
                    document = await reading.read(connection, caller, id_)
    if document is None:
        raise DocumentUnavailable("the document does not exist, or you may not read it: use an id from a search result")
    return document


async def fetch(service: Service, caller: Caller, arguments: FetchArguments) -> FetchOutput:
    """A document's text. Raises DocumentUnavailable and Retryable."""
    document = await readable_document(service, caller, _uuid(arguments.id))
    digest = blake2b(document.text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    text = _visible_texts.get(digest)
    if text is None:
        text = _visible_texts[digest] = await asyncio.to_thread(visible, document.text)  # up to 4 MiB
    end = arguments.offset + MAX_FETCHED_CHARACTERS
    metadata = _metadata(document.source, document.author, document.media_type, document.source_modified_at)
    if end < len(text):
        metadata |= {"next_offset": end, "characters": len(text)}
    return FetchOutput(
        id=str(document.document_id),
        title=title_of(document.title, document.external_id),
        text=text[arguments.offset : end],
        url=address_of(document.source_url, document.document_id),
        metadata=metadata,
    )


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def title_of(title: str, external_id: str) -> str:
    return one_line(title, MAX_TITLE_CHARACTERS) or one_line(external_id, MAX_TITLE_CHARACTERS)


def displayed_id(external_id: str) -> str:
    """An external id as people see it: models read characters that are not displayed, and it may be a file's name."""
    return one_line(external_id, MAX_ID_CHARACTERS)


def address_of(source_url: str | None, document: UUID) -> str:
    """The document's address, or a URN of its id, because clients expect one."""
    return source_url or f"urn:uuid:{document}"


def _metadata(source: str, author: str | None, media_type: str | None, modified: datetime | None) -> dict[str, Any]:
    """The document's properties that are set."""
    known = {
        "source": source,
        "author": author and one_line(author),
        "media_type": media_type and clean(media_type),
        "source_modified_at": modified and modified.isoformat(),
    }
    return {name: value for name, value in known.items() if value}
