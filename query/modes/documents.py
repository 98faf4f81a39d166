"""Whole documents from the ledger, in reading order: also those that no store has yet.

Whether the caller may read them is decided in the same statement that reads their text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from uuid import UUID

from pipeline.core.model import CountTokens, Span
from pipeline.stores.postgres import Connection
from query.model import Passage, Result
from query.modes.budget import PASSAGE_TOKENS
from query.modes.survey import Scope

READ_AT_ONCE = 16
"""Documents a statement: a text has up to 4 MiB."""
CHARACTERS_A_TOKEN = 20
"""Of any text that is read for its meaning there are fewer; what a document has beyond that is not fetched."""

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
"""Documents first, then their access, one by one: estimates of what tags match are poor, and the planner would begin
with every set that the caller satisfies (20,000 rows read for 100 ids when tried)."""
_READ = """
    SELECT d.id, d.external_id, d.source, coalesce(d.title, ''), d.source_url, d.author, d.media_type,
        d.source_modified_at, left(b.text, %(characters)s), m.chunk_ids, m.spans, m.headings
    FROM d
    JOIN document_bodies b ON b.document_id = d.id
    LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = %(generation)s AND m.content_hash = d.content_hash
"""


@dataclass(frozen=True, slots=True)
class Document:
    about: Passage
    """Its chunk is none."""
    parts: Sequence[Part]
    prepared: bool
    """False: its new text is being cut; it can be read in a moment."""
    is_cut: bool
    """Longer than any budget: the end of it was not fetched."""

    def results(self, taken: Sequence[Part]) -> list[Result]:
        about = self.about
        return [
            Result(
                Passage(
                    part.chunk_id,
                    about.document_id,
                    about.external_id,
                    about.source,
                    about.title,
                    about.source_url,
                    part.chunk_index,
                    about.author,
                    about.media_type,
                    about.source_modified_at,
                ),
                part.text,
                0.0,
                {},
                headings=part.headings,
            )
            for part in taken
        ]


async def read(connection: Connection, scope: Scope, ids: Sequence[UUID], *, budget_tokens: int) -> list[Document]:
    """Those of these documents that the caller may read, in this order. Raises psycopg.Error."""
    characters = CHARACTERS_A_TOKEN * budget_tokens
    cursor = await connection.execute(
        _MAY_READ + _READ,
        {
            "ids": list(ids),
            "characters": characters,
            "generation": scope.generation.name,
            "tenant": scope.tenant,
            "tags": sorted(scope.tags),
        },
    )
    by_id = {}
    for row in await cursor.fetchall():
        id_, external_id, source, title, url, author, media_type, at, text, chunk_ids, spans, headings = row
        about = Passage(NOBODY, id_, external_id, source, title, url, 0, author, media_type, at)
        if chunk_ids is None:
            by_id[id_] = Document(about, [], False, False)
            continue
        is_cut = bool(spans) and spans[-1][-1][1] > len(text)
        by_id[id_] = Document(about, list(parts(text, chunk_ids, spans, headings)), True, is_cut)
    return [by_id[id_] for id_ in ids if id_ in by_id]


NOBODY = UUID(int=0)


@dataclass(frozen=True, slots=True)
class Whole:
    results: Sequence[Result]
    tokens: int
    read: int
    """Documents that gave something."""
    left_out: int
    """Documents that there was no room for, not even for their beginning."""
    is_cut: bool
    """The last one read lacks its end."""
    unprepared: int


async def readable_of(connection: Connection, scope: Scope, ids: Sequence[UUID]) -> list[UUID]:
    """Those of these that exist and that the caller may read, in this order. Raises psycopg.Error."""
    cursor = await connection.execute(
        _MAY_READ + "SELECT id FROM d",  # noqa: S608 — constants of this module
        {"ids": list(ids), "tenant": scope.tenant, "tags": sorted(scope.tags)},
    )
    readable = {id_ for (id_,) in await cursor.fetchall()}
    return [id_ for id_ in ids if id_ in readable]


async def read_whole(
    connection: Connection, scope: Scope, ids: Sequence[UUID], *, budget_tokens: int, count: CountTokens
) -> Whole:
    """These documents, in this order, as far as they fit; what vanished meanwhile is left out without a word. count: as
    the budget is counted (cl100k)."""
    packer = Packer(budget_tokens, count)
    results: list[Result] = []
    read_ = unprepared = 0
    for start in range(0, len(ids), READ_AT_ONCE):
        documents = await read(connection, scope, ids[start : start + READ_AT_ONCE], budget_tokens=budget_tokens)
        for n, document in enumerate(documents, start=1):
            if not document.prepared:
                unprepared += 1
                continue
            await asyncio.to_thread(packer.add, document.parts)  # counting takes the processor: 0.2 s for 150k tokens
            taken = packer.taken[-1]
            results += document.results(taken)
            read_ += bool(taken)
            if packer.is_full or document.is_cut:
                behind = len(documents) - n + len(ids[start + READ_AT_ONCE :])
                return Whole(results, packer.tokens, read_, behind + (not taken), bool(taken), unprepared)
    return Whole(results, packer.tokens, read_, 0, False, unprepared)


COUNTED_AT_ONCE = 64
"""Passages: of a document that is far too long, little more than what fits is counted."""


@dataclass(frozen=True, slots=True)
class Part:
    """One chunk's own text."""

    chunk_id: UUID
    chunk_index: int
    """From 0, in reading order, as in the manifest."""
    text: str
    headings: tuple[str, ...]


def parts(
    text: str, chunk_ids: Sequence[UUID], spans: Sequence[Sequence[Span]], headings: Sequence[Sequence[str]]
) -> Iterator[Part]:
    """A document's chunks without what an earlier one had already; those of nothing else but that are left out."""
    read = 0
    for n, (chunk_id, of_chunk) in enumerate(zip(chunk_ids, spans, strict=True)):
        own = "".join(text[max(start, read) : end] for start, end in of_chunk if end > read)
        read = max(read, *(end for _, end in of_chunk))
        if own.strip():
            yield Part(chunk_id, n, own, tuple(headings[n]))


class Packer:
    """Takes documents in the order of their worth: each as far as it fits, and none after the first that does not.

    A gap would mislead more than an end does: no smaller document further down is taken instead.
    """

    def __init__(self, budget_tokens: int, count: CountTokens) -> None:
        self._left = self._budget = budget_tokens
        self._count = count
        self.taken: list[list[Part]] = []
        """Of each document that was added, the parts that fit; the last one may lack its end, or be empty."""
        self.is_full = False
        """Something did not fit."""

    @property
    def tokens(self) -> int:
        return self._budget - self._left

    @property
    def is_cut(self) -> bool:
        """The last document's beginning is there and its end is not."""
        return self.is_full and bool(self.taken[-1])

    def add(self, document: Iterable[Part]) -> None:
        """Not after it is full."""
        fitting: list[Part] = []
        self.taken.append(fitting)
        remaining = iter(document)
        while some := list(islice(remaining, COUNTED_AT_ONCE)):
            for part, tokens in zip(some, self._count([part.text for part in some]), strict=True):
                if tokens + PASSAGE_TOKENS > self._left:
                    self.is_full = True
                    return
                self._left -= tokens + PASSAGE_TOKENS
                fitting.append(part)
