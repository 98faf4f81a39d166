"""The audit's reading of both stores: rows and entries in the order of their documents, a page at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import UUID

from elasticsearch import AsyncElasticsearch
from psycopg import sql

from pipeline.audit.compare import NOWHERE, Entry, Print, Row
from pipeline.core.model import Generation
from pipeline.stores.elasticsearch import translated as es_translated
from pipeline.stores.postgres import Pool, translated

KEEP_ALIVE = "5m"
"""How long Elasticsearch keeps a point in time between two pages: a full flush of suspects fits in between."""


@dataclass(frozen=True, slots=True)
class Range:
    """Document ids above ``after`` up to and with ``last``; None: no bound. Law: ids in the order of Postgres' uuid are
    in the order of Elasticsearch's keyword, since canonical text sorts as the bytes do."""

    after: UUID | None = None
    last: UUID | None = None


Scope = Range | tuple[UUID, ...]
"""All documents of a range, heard of or not, or these documents alone."""

Held = TypeVar("Held", bound=Row | Entry)


class Stream(Generic[Held]):
    """Pages as one sequence, taken a document at a time."""

    def __init__(self, pages: AsyncIterator[list[Held]], held: Callable[[int], None]) -> None:
        self._pages = pages
        self._held = held
        """Told how many were taken into memory, or (negative) let go."""
        self._buffer: list[Held] = []
        self._at = 0

    async def document(self) -> UUID | None:
        """Whose the next one is; None at the end."""
        while self._at >= len(self._buffer):
            self._held(-len(self._buffer))
            self._buffer, self._at = [], 0
            page = await anext(self._pages, None)
            if page is None:
                return None
            self._held(len(page))
            self._buffer = page
        return self._buffer[self._at].document

    async def take(self, document: UUID) -> list[Held]:
        """All of one document."""
        taken: list[Held] = []
        while await self.document() == document:
            taken += self._next(document)
        return taken

    async def count(self, document: UUID) -> int:
        """Pass over one document; how many it had."""
        n = 0
        while await self.document() == document:
            n += len(self._next(document))
        return n

    def _next(self, document: UUID) -> list[Held]:
        start = self._at
        while self._at < len(self._buffer) and self._buffer[self._at].document == document:
            self._at += 1
        return self._buffer[start : self._at]


async def rows(pool: Pool, generation: Generation, scope: Scope, page: int) -> AsyncGenerator[list[Row], None]:
    """Rows of the chunk table. Their texts are hashed by the server and do not travel."""
    condition, parameters = _row_scope(scope)
    statement = sql.SQL(
        "SELECT document_id, id, access_id, sha256(convert_to(text, 'UTF8')) FROM {} WHERE {} AND {}"
        " ORDER BY document_id, id LIMIT %(limit)s"
    )
    beyond = sql.SQL("true")
    while True:
        with translated("audit pgvector"):
            async with pool.connection() as connection:
                cursor = await connection.execute(
                    statement.format(sql.Identifier(generation.chunk_table), condition, beyond),
                    {**parameters, "limit": page},
                )
                found = [Row(*row) for row in await cursor.fetchall()]
        if found:
            yield found
        if len(found) < page:
            return
        beyond = sql.SQL("document_id >= %(document)s AND (document_id, id) > (%(document)s, %(id)s)")
        parameters |= {"document": found[-1].document, "id": found[-1].id}


def _row_scope(scope: Scope) -> tuple[sql.SQL, dict[str, Any]]:
    if isinstance(scope, tuple):
        return sql.SQL("document_id = ANY(%(ids)s)"), {"ids": list(scope)}
    bounds = ["true"]
    if scope.after is not None:
        bounds.append("document_id > %(after)s")
    if scope.last is not None:
        bounds.append("document_id <= %(last)s")
    return sql.SQL(" AND ".join(bounds)), {"after": scope.after, "last": scope.last}


async def entries(
    es: AsyncElasticsearch, generation: Generation, scope: Scope, page: int
) -> AsyncGenerator[list[Entry], None]:
    """Entries of the keyword index that a search finds, at one point in time. One request where a page holds them all;
    only what is longer needs a point in time of its own."""
    index = generation.keyword_index
    with es_translated(f"audit {index}"):
        answer = await es.search(
            index=index, query=_entry_scope(scope), version=True, size=page, sort=_BY_DOCUMENT, track_total_hits=False,
            allow_partial_search_results=False,
        )  # fmt: skip
    if len(hits := answer["hits"]["hits"]) < page:
        if hits:
            yield list(_entries(hits))
        return
    async with _point_in_time(es, index) as pit:
        after: list[Any] | None = None
        while True:
            with es_translated(f"audit {index}"):
                answer = await es.search(
                    query=_entry_scope(scope), pit={"id": pit, "keep_alive": KEEP_ALIVE}, version=True, size=page,
                    sort=[*_BY_DOCUMENT, {"_shard_doc": "asc"}], search_after=after, track_total_hits=False,
                    allow_partial_search_results=False,
                )  # fmt: skip
            hits = answer["hits"]["hits"]
            if hits:
                yield list(_entries(hits))
            if len(hits) < page:
                return
            after = hits[-1]["sort"]


_BY_DOCUMENT: Sequence[Mapping[str, Any]] = [{"document_id": {"order": "asc", "missing": "_last"}}]


@asynccontextmanager
async def _point_in_time(es: AsyncElasticsearch, index: str) -> AsyncIterator[str]:
    with es_translated(f"audit {index}"):
        pit: str = (await es.open_point_in_time(index=index, keep_alive=KEEP_ALIVE))["id"]
    try:
        yield pit
    finally:
        with es_translated(f"audit {index}"):
            await es.options(ignore_status=404).close_point_in_time(id=pit)


_CANONICAL = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"


def _entry_scope(scope: Scope) -> dict[str, Any]:
    if isinstance(scope, tuple):
        named: dict[str, Any] = {"terms": {"document_id": [str(i) for i in scope]}}
        if NOWHERE not in scope:
            return named
        return {"bool": {"should": [named, {"bool": {"must_not": {"regexp": {"document_id": _CANONICAL}}}}]}}
    bounds = {"gt": str(scope.after) if scope.after else None, "lte": str(scope.last) if scope.last else None}
    inside = {"range": {"document_id": {name: bound for name, bound in bounds.items() if bound is not None}}}
    if scope.last is not None:
        return inside
    return {"bool": {"should": [inside, {"bool": {"must_not": {"exists": {"field": "document_id"}}}}]}}


def _entries(hits: Sequence[Any]) -> Iterator[Entry]:
    for hit in hits:
        source = hit["_source"]
        yield Entry(_id(source.get("document_id")), _id(hit["_id"]), int(hit["_version"]), Print.of(source))


def _id(text: object) -> UUID:
    """NOWHERE for what is not an id in its canonical form: only that sorts as the ledger does."""
    try:
        id_ = UUID(str(text))
    except ValueError:
        return NOWHERE
    return id_ if str(id_) == text else NOWHERE
