"""Whole documents from the ledger, in reading order, including those that no store has yet.

The statement that reads their text also decides whether the caller may read them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from uuid import UUID

from pipeline.core.model import CountTokens, Span
from pipeline.stores.postgres import Connection
from query.access.callers import Caller
from query.model import Passage, Result
from query.modes.budget import PASSAGE_TOKENS
from query.modes.survey import ReadScope

DOCUMENTS_PER_STATEMENT = 16
"""A limit on memory: a text has up to 4 MiB."""
CHUNKS_PER_STATEMENT = 2_000
"""Nobody else is served while a statement's rows are read: 320,000 chunks took almost two seconds."""
MAX_CHARACTERS_PER_TOKEN = 20
"""Any meaningful text has fewer characters per token. Text beyond the budget at this ratio is not fetched."""

_MAY_READ = """
    WITH d AS MATERIALIZED (
        SELECT d.* FROM documents d CROSS JOIN LATERAL (
            SELECT FROM access_sets a
            WHERE a.id = d.access_id AND a.tenant = d.tenant AND a.acl_tags && %(tags)s::text[]
              AND a.required_tags <@ %(tags)s::text[]
            OFFSET 0
        ) a
        WHERE d.id = ANY(%(ids)s::uuid[]) AND d.tenant = %(tenant)s AND d.deleted_at IS NULL
          AND d.version IS NOT NULL
    )
"""
"""Documents first, then their access sets one by one: the planner's estimates for tags are poor, and it would begin
with every set that the caller satisfies (in a test, 20,000 rows for 100 ids)."""
_READ = """
    SELECT d.id, d.external_id, d.source, coalesce(d.title, ''), d.source_url, d.author, d.media_type,
        d.source_modified_at, left(b.text, least(%(characters)s, (first.spans->-1->-1->>1)::int)),
        m.chunk_ids[1:%(most)s::int], first.spans, first.headings, cardinality(m.chunk_ids)
    FROM d
    JOIN document_bodies b ON b.document_id = d.id
    LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = %(generation)s AND m.content_hash = d.content_hash
    CROSS JOIN jsonb_build_object('last', %(most)s::int - 1) AS until
    CROSS JOIN LATERAL (
        SELECT jsonb_path_query_array(m.spans, '$[0 to $last]', until) AS spans,
            jsonb_path_query_array(m.headings, '$[0 to $last]', until) AS headings
    ) first
"""
"""Reads as many chunks of a document as the budget may hold, and its text up to their end."""


@dataclass(frozen=True, slots=True)
class ChunkedDocument:
    passage: Passage
    """The document's properties; its chunk_id is NO_CHUNK."""
    parts: Sequence[Part]
    prepared: bool
    """False: its new text is not chunked yet, which takes a moment."""
    is_cut: bool
    """Whether its end was not fetched, because it is longer than any budget."""

    def results(self, taken: Sequence[Part]) -> list[Result]:
        passage = self.passage
        return [
            Result(
                Passage(
                    part.chunk_id,
                    passage.document_id,
                    passage.external_id,
                    passage.source,
                    passage.title,
                    passage.source_url,
                    part.chunk_index,
                    passage.author,
                    passage.media_type,
                    passage.source_modified_at,
                ),
                part.text,
                0.0,
                {},
                headings=part.headings,
            )
            for part in taken
        ]


async def read(
    connection: Connection, scope: ReadScope, ids: Sequence[UUID], *, budget_tokens: int
) -> list[ChunkedDocument]:
    """The documents among these that the caller may read, in this order. Raises psycopg.Error."""
    cursor = await connection.execute(
        _MAY_READ + _READ,
        {
            "ids": list(ids),
            "characters": MAX_CHARACTERS_PER_TOKEN * budget_tokens,
            "most": _most_chunks(budget_tokens),
            "generation": scope.generation.name,
            "tenant": scope.tenant,
            "tags": sorted(scope.tags),
        },
    )
    by_id = {}
    for row in await cursor.fetchall():
        id_, external_id, source, title, url, author, media_type, at, text, chunk_ids, spans, headings, count = row
        passage = Passage(NO_CHUNK, id_, external_id, source, title, url, 0, author, media_type, at)
        if chunk_ids is None:
            by_id[id_] = ChunkedDocument(passage, [], False, False)
            continue
        is_cut = bool(spans) and (len(chunk_ids) < count or spans[-1][-1][1] > len(text))
        by_id[id_] = ChunkedDocument(passage, list(parts(text, chunk_ids, spans, headings)), True, is_cut)
    return [by_id[id_] for id_ in ids if id_ in by_id]


NO_CHUNK = UUID(int=0)


@dataclass(frozen=True, slots=True)
class WholeDocuments:
    results: Sequence[Result]
    tokens: int
    read: int
    """How many documents contributed passages."""
    left_out: int
    """How many documents did not fit, not even their beginning."""
    is_cut: bool
    """Whether the last document lacks its end."""
    unprepared: int


async def readable_ids(connection: Connection, scope: ReadScope | Caller, ids: Sequence[UUID]) -> list[UUID]:
    """The ids among these that exist and that the caller may read, in this order. Raises psycopg.Error."""
    cursor = await connection.execute(
        _MAY_READ + "SELECT id FROM d",  # noqa: S608 — constants of this module
        {"ids": list(ids), "tenant": scope.tenant, "tags": sorted(scope.tags)},
    )
    readable = {id_ for (id_,) in await cursor.fetchall()}
    return [id_ for id_ in ids if id_ in readable]


async def read_whole(
    connection: Connection, scope: ReadScope, ids: Sequence[UUID], *, budget_tokens: int, count: CountTokens
) -> WholeDocuments:
    """These documents, in this order, as far as they fit. Documents that were deleted meanwhile are skipped. count:
    counts tokens as the budget does (cl100k)."""
    packer = Packer(budget_tokens, count)
    results: list[Result] = []
    read_ = unprepared = 0
    rest = ids
    while rest:
        some = await _portion(connection, scope, rest[:DOCUMENTS_PER_STATEMENT], _most_chunks(budget_tokens))
        rest = rest[len(some) :]
        documents = await read(connection, scope, some, budget_tokens=budget_tokens)
        for n, document in enumerate(documents, start=1):
            if not document.prepared:
                unprepared += 1
                continue
            await asyncio.to_thread(packer.add, document.parts)  # counting 150k tokens takes 0.2 s
            taken = packer.taken[-1]
            results += document.results(taken)
            read_ += bool(taken)
            if packer.is_full or document.is_cut:
                behind = len(documents) - n + len(rest)
                return WholeDocuments(results, packer.tokens, read_, behind + (not taken), bool(taken), unprepared)
    return WholeDocuments(results, packer.tokens, read_, 0, False, unprepared)


def _most_chunks(budget_tokens: int) -> int:
    """More chunks than have room in the budget."""
    return budget_tokens // PASSAGE_TOKENS + 1


async def _portion(connection: Connection, scope: ReadScope, ids: Sequence[UUID], most: int) -> Sequence[UUID]:
    """The first of these documents, which have CHUNKS_PER_STATEMENT together, or the first one. most: how many chunks
    of a document are read."""
    cursor = await connection.execute(
        "SELECT document_id, least(cardinality(chunk_ids), %s) FROM manifests"
        " WHERE document_id = ANY(%s::uuid[]) AND generation = %s",
        [most, list(ids), scope.generation.name],
    )
    chunks: dict[UUID, int] = dict(await cursor.fetchall())
    together = list(accumulate(chunks.get(id_, 0) for id_ in ids))
    return ids[: max(1, bisect_right(together, CHUNKS_PER_STATEMENT))]


PASSAGES_PER_COUNT = 64
"""Tokens are counted in batches, so that little more than what fits is counted of a very long document."""


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk's text without its overlap with earlier chunks."""

    chunk_id: UUID
    chunk_index: int
    """The position in the manifest, from 0, in reading order."""
    text: str
    headings: tuple[str, ...]


def parts(
    text: str, chunk_ids: Sequence[UUID], spans: Sequence[Sequence[Span]], headings: Sequence[Sequence[str]]
) -> Iterator[Part]:
    """A document's chunks without their overlaps; chunks that consist only of overlap are left out."""
    read = 0
    for n, (chunk_id, of_chunk) in enumerate(zip(chunk_ids, spans, strict=True)):
        own = "".join(text[max(start, read) : end] for start, end in of_chunk if end > read)
        read = max(read, *(end for _, end in of_chunk))
        if own.strip():
            yield Part(chunk_id, n, own, tuple(headings[n]))


class Packer:
    """Packs documents into a budget in the given order, up to the first that does not fit completely.

    A smaller document further down is not used instead, because a gap would mislead more than an early end.
    """

    def __init__(self, budget_tokens: int, count: CountTokens) -> None:
        self._left = self._budget = budget_tokens
        self._count = count
        self.taken: list[list[Part]] = []
        """The parts of each added document that fit; those of the last document may lack its end or be empty."""
        self.is_full = False
        """Whether something did not fit."""

    @property
    def tokens(self) -> int:
        return self._budget - self._left

    @property
    def is_cut(self) -> bool:
        """Whether the last document is included without its end."""
        return self.is_full and bool(self.taken[-1])

    def add(self, document: Iterable[Part]) -> None:
        """Add a document. It must not be called when ``is_full``."""
        fitting: list[Part] = []
        self.taken.append(fitting)
        remaining = iter(document)
        while batch := list(islice(remaining, PASSAGES_PER_COUNT)):
            for part, tokens in zip(batch, self._count([part.text for part in batch]), strict=True):
                if tokens + PASSAGE_TOKENS > self._left:
                    self.is_full = True
                    return
                self._left -= tokens + PASSAGE_TOKENS
                fitting.append(part)
