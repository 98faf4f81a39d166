"""Reading for the audit: pages of documents with their desired state from the ledger, and their rows and entries from
the stores, all in the order of document ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import UUID

from elasticsearch import AsyncElasticsearch
from psycopg import sql
from psycopg.rows import dict_row

from pipeline.audit.compare import NOWHERE, Desired, Entry, Print, Row, Standing, State, describe
from pipeline.core.model import STORES, Generation, Store
from pipeline.ledger.generations import keep_unchanged
from pipeline.ledger.work import lock_wants, work_of
from pipeline.stores.elasticsearch import translated as es_translated
from pipeline.stores.postgres import Connection, Pool, translated


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that is in memory at once. A single larger document is read alone."""

    documents: int = 200
    chunks: int = 2_000
    body_bytes: int = 8_000_000
    page: int = 500
    """The number of rows, or entries, in one response of a store."""


_SIZES = """
    SELECT d.id, coalesce(cardinality(m.chunk_ids), 0), coalesce(octet_length(b.text), 0)
    FROM ({page}) d
    LEFT JOIN manifests m ON (m.document_id, m.generation) = (d.id, %(generation)s)
    LEFT JOIN document_bodies b ON b.document_id = d.id
    ORDER BY d.id
"""
"""The page is selected before the join: otherwise each page would read the manifests from the beginning."""


async def next_documents(
    connection: Connection, generation: Generation, after: UUID | None, limits: Limits, *, run: int | None = None
) -> list[UUID]:
    """The next documents in the order of their ids, as many as fit the limits; ``run``: only those of its scope."""
    scope = "JOIN audit_documents s ON s.document_id = d.id AND s.run_id = %(run)s" if run is not None else ""
    cursor = await connection.execute(
        _SIZES.format(
            page=f"SELECT d.id FROM documents d {scope} WHERE d.id > %(after)s ORDER BY d.id LIMIT %(limit)s"  # noqa: S608 — literals of this function
        ).encode(),
        {"generation": generation.name, "after": after or NOWHERE, "limit": limits.documents, "run": run},
    )
    return _fitting(await cursor.fetchall(), limits)


async def fitting(connection: Connection, generation: Generation, ids: Sequence[UUID], limits: Limits) -> list[UUID]:
    """The first of these documents, as many as fit the limits, and at least one. ``ids`` are sorted; the ledger need
    not know them."""
    front = ids[: limits.documents]
    cursor = await connection.execute(
        _SIZES.format(page="SELECT id FROM documents WHERE id = ANY(%(ids)s)").encode(),
        {"generation": generation.name, "ids": list(front)},
    )
    sizes = {id_: (chunks, size) for id_, chunks, size in await cursor.fetchall()}
    return _fitting([(i, *sizes.get(i, (0, 0))) for i in front], limits)


def _fitting(sizes: Sequence[tuple[Any, ...]], limits: Limits) -> list[UUID]:
    taken: list[UUID] = []
    chunks = size = 0
    for id_, its_chunks, its_size in sizes:
        chunks, size = chunks + its_chunks, size + its_size
        if taken and (chunks > limits.chunks or size > limits.body_bytes):
            break
        taken.append(id_)
    return taken


_STATES = """
    v.want_seq AS vectors_want_seq, v.seq AS vectors_seq, v.refused AS vectors_refused, v.attempts AS vectors_attempts,
    v.error AS vectors_error, k.want_seq AS keywords_want_seq, k.seq AS keywords_seq,
    k.attempts AS keywords_attempts, k.error AS keywords_error
"""
_EXPECTED = f"""
    SELECT d.id, d.tenant, d.source, d.external_id, d.seq, d.deleted_at IS NULL AND d.version IS NOT NULL AS alive,
        d.content_hash, d.access_id, a.acl_tags, a.required_tags, d.title, d.source_url, d.author, d.media_type,
        d.source_modified_at, d.keys, d.lane, m.content_hash AS manifest_hash, m.chunk_ids, m.token_counts, m.spans,
        m.headings, b.text, b.metadata, {_STATES}
    FROM documents d
    LEFT JOIN access_sets a ON a.id = d.access_id
    LEFT JOIN manifests m ON (m.document_id, m.generation) = (d.id, %(generation)s)
    LEFT JOIN document_bodies b ON b.document_id = d.id
    LEFT JOIN index_state v ON (v.document_id, v.generation, v.store) = (d.id, %(generation)s, 'vectors')
    LEFT JOIN index_state k ON (k.document_id, k.generation, k.store) = (d.id, %(generation)s, 'keywords')
    WHERE d.id = ANY(%(ids)s)
"""  # noqa: S608 — constants of this module


async def load(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> dict[UUID, Desired]:
    """The desired states of these documents; one that the ledger does not know is absent. One statement reads all of
    them, so that they are consistent. Texts are cut and hashed in a thread."""
    cursor = connection.cursor(row_factory=dict_row)
    await cursor.execute(_EXPECTED, {"generation": generation.name, "ids": list(ids)})
    rows = await cursor.fetchall()
    return await asyncio.to_thread(lambda: {row["id"]: _expected(row, generation) for row in rows})


def _expected(row: Mapping[str, Any], generation: Generation) -> Desired:
    seq, alive = row["seq"], row["alive"]
    work, building = work_of(row, want_seq=seq), generation.state == "building"
    return describe(
        work,
        seq,
        _states(row),
        row["text"],
        row["metadata"],
        generation.params,
        alive=alive,
        building=building,
        vectors_in_entries=generation.vectors == "elasticsearch",
    )


def _states(row: Mapping[str, Any]) -> dict[Store, State]:
    return {
        store: State(
            row[f"{store}_want_seq"],
            row[f"{store}_seq"],
            frozenset(row["vectors_refused"]) if store == "vectors" else frozenset(),
            row[f"{store}_attempts"],
            row[f"{store}_error"],
        )
        for store in STORES
        if row[f"{store}_want_seq"] is not None
    }


_STANDINGS = f"""
    SELECT d.id, d.seq, {_STATES}
    FROM documents d
    LEFT JOIN index_state v ON (v.document_id, v.generation, v.store) = (d.id, %(generation)s, 'vectors')
    LEFT JOIN index_state k ON (k.document_id, k.generation, k.store) = (d.id, %(generation)s, 'keywords')
    WHERE d.id = ANY(%(ids)s)
"""  # noqa: S608 — constants of this module


async def standings(
    connection: Connection, generation: Generation, ids: Sequence[UUID], *, lock: bool = False
) -> dict[UUID, Standing]:
    """The standings of these documents; one that the ledger does not know is absent. ``lock``: lock the documents' rows
    before, so that nothing newer is accepted until the caller's transaction ends."""
    if lock:  # in detect's order
        await keep_unchanged(connection)
        await connection.execute("SELECT 1 FROM documents WHERE id = ANY(%s) ORDER BY id FOR UPDATE", [list(ids)])
        for store in STORES:
            await lock_wants(connection, generation.name, store, ids)
    cursor = connection.cursor(row_factory=dict_row)
    await cursor.execute(_STANDINGS, {"generation": generation.name, "ids": list(ids)})
    return {row["id"]: (row["seq"], _states(row)) for row in await cursor.fetchall()}


KEEP_ALIVE = "5m"
"""How long Elasticsearch retains a point in time between two pages; comparing all suspects again takes less."""


@dataclass(frozen=True, slots=True)
class Range:
    """The document ids above ``after``, up to ``last`` inclusive; None: no bound. Law: Postgres (uuid) and
    Elasticsearch (keyword) sort ids in the same way, because their canonical text sorts like their bytes."""

    after: UUID | None = None
    last: UUID | None = None


Scope = Range | tuple[UUID, ...]
"""All documents of a range, also those that the ledger does not know, or these documents alone."""

Item = TypeVar("Item", bound=Row | Entry)


class Stream(Generic[Item]):
    """Presents pages of rows or entries as one sequence, which is read document by document."""

    def __init__(self, pages: AsyncIterator[list[Item]], held: Callable[[int], None]) -> None:
        self._pages = pages
        self._held = held
        """Called with the number of items that were read into memory, or (negative) released."""
        self._buffer: list[Item] = []
        self._at = 0

    async def document(self) -> UUID | None:
        """The document of the next item; None at the end."""
        while self._at >= len(self._buffer):
            self._held(-len(self._buffer))
            self._buffer, self._at = [], 0
            page = await anext(self._pages, None)
            if page is None:
                return None
            self._held(len(page))
            self._buffer = page
        return self._buffer[self._at].document

    async def take(self, document: UUID) -> list[Item]:
        """Read all items of one document."""
        taken: list[Item] = []
        while await self.document() == document:
            taken += self._next(document)
        return taken

    async def count(self, document: UUID) -> int:
        """Skip the items of one document; returns their number."""
        n = 0
        while await self.document() == document:
            n += len(self._next(document))
        return n

    def _next(self, document: UUID) -> list[Item]:
        start = self._at
        while self._at < len(self._buffer) and self._buffer[self._at].document == document:
            self._at += 1
        return self._buffer[start : self._at]


async def rows(pool: Pool, generation: Generation, scope: Scope, page: int) -> AsyncGenerator[list[Row], None]:
    """Yield pages of the chunk table's rows. Postgres hashes their texts, so that they are not transferred."""
    condition, parameters = _row_scope(scope)
    statement = sql.SQL(
        "SELECT document_id, id, access_id, sha256(convert_to(text, 'UTF8')), tenant FROM {} WHERE {} AND {}"
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
                fetched = [Row(*row) for row in await cursor.fetchall()]
        if fetched:
            yield fetched
        if len(fetched) < page:
            return
        beyond = sql.SQL("document_id >= %(document)s AND (document_id, id) > (%(document)s, %(id)s)")
        parameters |= {"document": fetched[-1].document, "id": fetched[-1].id}


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
    """Yield pages of the keyword index's entries that a search finds, all as of one point in time. If one page holds
    all of them it is a single request; otherwise it opens a point in time."""
    index = generation.keyword_index
    with es_translated(f"audit {index}"):
        answer = await es.search(
            index=index,
            query=_entry_scope(scope),
            version=True,
            size=page,
            sort=_BY_DOCUMENT,
            track_total_hits=False,
            allow_partial_search_results=False,
        )
    if len(hits := answer["hits"]["hits"]) < page:
        if hits:
            yield list(_entries(hits))
        return
    async with _point_in_time(es, index) as pit:
        after: list[Any] | None = None
        while True:
            with es_translated(f"audit {index}"):
                answer = await es.search(
                    query=_entry_scope(scope),
                    pit={"id": pit, "keep_alive": KEEP_ALIVE},
                    version=True,
                    size=page,
                    sort=[*_BY_DOCUMENT, {"_shard_doc": "asc"}],
                    search_after=after,
                    track_total_hits=False,
                    allow_partial_search_results=False,
                )
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
    """The id, or NOWHERE for a text that is no id in canonical form, because only that form sorts as the ledger
    does."""
    try:
        id_ = UUID(str(text))
    except ValueError:
        return NOWHERE
    return id_ if str(id_) == text else NOWHERE
