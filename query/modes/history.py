"""A member's own conversation history for an answer: whole if it is short, else the chunks nearest to the question.

It is read for one authenticated member of one tenant, so that nobody reads another member's history. The search is
exact, because a member's chunks are few (docs/adr/0018-conversations.md).

An earlier answer reveals content of the documents that it was made from. It is included only while the caller may read
all of them according to the ledger, and never if its documents are unknown. The member's own questions are always
included (docs/adr/0042-provenance-of-answers.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any, Literal, TypeVar
from uuid import UUID

from pgvector import HalfVector
from psycopg import sql

from pipeline.core.conversations import PAIRS_PER_CHUNK, made_by, render
from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.embedding.tokens import byte_pairs
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection, Pool, translated
from query.access.callers import Caller, storable
from query.access.tenant_rows import rows_of
from query.access.verify import READS_ALL
from query.limits.charging import UUID_BYTES, charge

NEAREST_CHUNKS = 5
"""How many chunks are used of a history that is too long to be used whole."""
WITHHELD = "(this earlier answer is withheld)"
"""The text that replaces an answer that the caller may no longer read."""

MAX_PROVENANCE_DOCUMENTS = 2_000
"""The most documents that are recorded for an answer (32 kB of ids). An answer from more is never in a history, and
earlier answers from more of them together are not read for one question."""
PROVENANCE_DAYS = 30
"""How long a conversation may name an answer for the first time; Kafka retains conversations for 14 days."""
EXPIRED_AT_ONCE = 100
"""How many expired rows each answer deletes: more than it adds, so that none remain, and few enough to be fast."""
RECORD_SECONDS = 2.0

AnswerKey = TypeVar("AnswerKey", bytes, UUID)
Served = Literal["whole", "nearest", "newest"]
"""whole: pair by pair, the newest first; nearest: chunks, the nearest first; newest: chunks, the newest first, because
the question has no vector or no chunk has one yet."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A pair of a whole history, or a chunk of pairs."""

    text: str
    first_at: datetime
    last_at: datetime
    tokens: int
    score: float | None = None
    """The cosine to the question, if it was searched by vector."""
    documents: frozenset[UUID] = frozenset()
    """The documents that its answers were made from, all of which the caller may read."""
    withheld: int = 0
    """How many of its answers are withheld."""


@dataclass(frozen=True, slots=True)
class History:
    served: Served
    pieces: Sequence[Piece]
    left_out: int
    """How many pairs of a whole history, or how many selected chunks, did not fit into the budget."""
    tokens: int
    """The tokens of the whole history, included or not."""
    without_embedding: int = 0
    """How many chunks have no vector yet."""

    @property
    def withheld(self) -> int:
        """How many answers of all pieces are withheld."""
        return sum(piece.withheld for piece in self.pieces)

    @property
    def documents(self) -> frozenset[UUID]:
        """The documents that the included answers were made from."""
        return frozenset[UUID]().union(*(piece.documents for piece in self.pieces))

    @property
    def notes(self) -> list[str]:
        """Notes for the reader on what is missing."""
        notes = []
        if self.left_out:
            what = "oldest pairs" if self.served == "whole" else "chunks"
            notes.append(f"the history's {self.left_out} {what} did not fit the budget")
        elif self.without_embedding:
            notes.append(f"{self.without_embedding} chunks of the history are not embedded yet")
        if self.withheld:
            noun = "answer of the history was" if self.withheld == 1 else "answers of the history were"
            notes.append(
                f"{self.withheld} {noun} withheld: not all of their sources can be read now, or they are too many"
            )
        return notes


EMPTY = History("whole", (), 0, 0)


async def history(
    connection: Connection,
    caller: Caller,
    member: str,
    budget_tokens: int,
    *,
    question: tuple[Generation, Vectors] | None = None,
) -> History:
    """The history of a member, within a budget.

    caller: the member with its current access. question: the active generation and the question's vector by its model
    (float32, unit length); None if the model is not available. budget_tokens: counted as cl100k. Raises psycopg.Error.
    """
    tenant = caller.tenant
    if len(storable([tenant, member])) < 2:
        return EMPTY
    cursor = await connection.execute(
        "SELECT tokens, is_chunked FROM conversation_members WHERE tenant = %s AND member = %s", [tenant, member]
    )
    row = await cursor.fetchone()
    if row is None:
        return EMPTY
    tokens, is_chunked = row
    parameters = {"tenant": tenant, "tags": sorted(caller.tags), "member": member}
    if not is_chunked:
        return await _whole(connection, parameters, budget_tokens)
    served: Served = "nearest"
    pieces = await _nearest(connection, parameters, *question) if question else []
    if not pieces:
        served, pieces = "newest", await _chunks(connection, _NEWEST, parameters)
    cursor = await connection.execute(
        "SELECT count(*) FROM conversation_chunks WHERE tenant = %(tenant)s AND member = %(member)s"
        " AND (made_by IS NULL OR made_by <> coalesce(%(maker)s, made_by))",
        {"tenant": tenant, "member": member, "maker": made_by(question[0]) if question else None},
    )
    [missing] = await cursor.fetchone() or (0,)
    fitting = _fitting(pieces, budget_tokens)
    return History(served, fitting, len(pieces) - len(fitting), tokens, missing)


@dataclass(frozen=True, slots=True)
class _Pair:
    digest: bytes
    question: str
    answer: str


async def _whole(connection: Connection, parameters: dict[str, Any], budget_tokens: int) -> History:
    """The pairs from the newest back to the first that does not fit, without gaps, which would mislead."""
    cursor = await connection.execute(
        "SELECT digest, question, answer, asked_at, tokens, sum(tokens) OVER later, count(*) OVER (),"
        " sum(tokens) OVER () FROM conversation_pairs WHERE tenant = %(tenant)s AND member = %(member)s"
        " WINDOW later AS (ORDER BY asked_at DESC, digest DESC ROWS UNBOUNDED PRECEDING)"
        " ORDER BY asked_at DESC, digest DESC",
        parameters,
    )
    rows = await cursor.fetchall()
    fitting = [
        (Piece("", at, at, tokens), [_Pair(digest, question, answer)])
        for digest, question, answer, at, tokens, so_far, *_ in rows
        if so_far <= budget_tokens
    ]
    pieces = await _with_texts(connection, parameters, fitting)
    return History("whole", pieces, len(rows) - len(pieces), int(rows[0][-1]) if rows else 0)


_CHUNKS = """
    SELECT c.position, c.first_at, c.last_at, c.tokens, c.score, p.digest, p.question, p.answer
    FROM (
        SELECT position, first_at, last_at, tokens, {score} AS score FROM conversation_chunks
        WHERE tenant = %(tenant)s AND member = %(member)s{chosen} ORDER BY {first} LIMIT %(k)s
    ) c
    CROSS JOIN LATERAL (
        SELECT digest, question, answer, asked_at FROM conversation_pairs
        WHERE tenant = %(tenant)s AND member = %(member)s
        ORDER BY asked_at, digest OFFSET c.position * %(pairs)s LIMIT %(pairs)s
    ) p
    ORDER BY {then}, p.asked_at, p.digest
"""
"""Selects chunks with their pairs in one snapshot, because pairs are regrouped into chunks when they change. A chunk's
own text is only embedded and never returned, because it contains every answer."""


_NEAREST = sql.SQL(_CHUNKS).format(
    score=sql.SQL("1 - (embedding <=> %(vector)s)"),
    chosen=sql.SQL(" AND made_by = %(maker)s AND embedding IS NOT NULL"),
    first=sql.SQL("embedding <=> %(vector)s, position"),
    then=sql.SQL("c.score DESC, c.position"),
)
_NEWEST = sql.SQL(_CHUNKS).format(
    score=sql.SQL("NULL::float8"),
    chosen=sql.SQL(""),
    first=sql.SQL("position DESC"),
    then=sql.SQL("c.position DESC"),
)


async def _nearest(
    connection: Connection, parameters: dict[str, Any], generation: Generation, vector: Vectors
) -> list[Piece]:
    return await _chunks(
        connection, _NEAREST, {**parameters, "maker": made_by(generation), "vector": HalfVector(vector)}
    )


async def _chunks(connection: Connection, statement: sql.Composed, parameters: dict[str, Any]) -> list[Piece]:
    cursor = await connection.execute(statement, {**parameters, "k": NEAREST_CHUNKS, "pairs": PAIRS_PER_CHUNK})
    pieces = [
        (Piece("", *about), [_Pair(*row[5:]) for row in rows])
        for (_, *about), rows in groupby(await cursor.fetchall(), key=lambda row: row[:5])
    ]
    return await _with_texts(connection, parameters, pieces)


async def _with_texts(
    connection: Connection, parameters: dict[str, Any], pieces: Sequence[tuple[Piece, Sequence[_Pair]]]
) -> list[Piece]:
    """Each piece with the text of its pairs, without the answers that the caller may not read."""
    digests = [pair.digest for _, pairs in pieces for pair in pairs]
    may_show = from_few_documents(digests, await _readable_provenance(connection, parameters, digests))
    written = []
    for piece, pairs in pieces:
        withheld = sum(pair.digest not in may_show for pair in pairs)
        text = "\n\n".join(render(p.question, p.answer if p.digest in may_show else WITHHELD) for p in pairs)
        tokens = (await asyncio.to_thread(byte_pairs().count, [text]))[0] if withheld else piece.tokens
        documents = frozenset[UUID]().union(*(may_show.get(pair.digest, ()) for pair in pairs))
        written.append(replace(piece, text=text, tokens=tokens, documents=documents, withheld=withheld))
    return written


def from_few_documents(
    ordered: Iterable[AnswerKey], documents: Mapping[AnswerKey, Collection[UUID]]
) -> dict[AnswerKey, Collection[UUID]]:
    """Those of these answers, in their order, that were made from MAX_PROVENANCE_DOCUMENTS at most, all together: the
    audit trail and the new answer record each of them."""
    few: dict[AnswerKey, Collection[UUID]] = {}
    known: set[UUID] = set()
    for answer in ordered:
        if answer in documents and len(known.union(documents[answer])) <= MAX_PROVENANCE_DOCUMENTS:
            few[answer] = documents[answer]
            known.update(documents[answer])
    return few


_MADE_FROM = sql.SQL("""
    SELECT p.digest, a.documents
    FROM unnest(%(digests)s::bytea[]) AS p (digest)
    CROSS JOIN LATERAL (
        SELECT a.documents FROM conversation_mentions m
        CROSS JOIN LATERAL (
            SELECT documents FROM conversation_provenance WHERE tenant = m.tenant AND answer_id = m.answer_id OFFSET 0
        ) a
        WHERE m.tenant = %(tenant)s AND m.member = %(member)s AND m.digest = p.digest AND {reads_all}
        ORDER BY cardinality(a.documents), m.answer_id LIMIT 1
    ) a
""").format(reads_all=READS_ALL.format(documents=sql.SQL("a.documents")))


async def _readable_provenance(
    connection: Connection, parameters: dict[str, Any], digests: Sequence[bytes]
) -> dict[bytes, Sequence[UUID]]:
    """The pairs whose answers the caller may read now, with the documents that these were made from. A pair that was
    recorded as several answers with the same text is readable if any one of them is."""
    if not digests:
        return {}
    cursor = await connection.execute(_MADE_FROM, {**parameters, "digests": list(digests)})
    return dict(await cursor.fetchall())


async def record_provenance(pool: Pool, tenant: str, answer_id: UUID, documents: Collection[UUID]) -> None:
    """Record the documents that an answer was made from: those of its passages and of the included history. Records
    older than PROVENANCE_DAYS are deleted. Raises Retryable within RECORD_SECONDS."""
    if len(documents) > MAX_PROVENANCE_DOCUMENTS:
        return
    async with time_limit(RECORD_SECONDS, "Postgres"):
        with translated("what the answer was made from"):
            async with rows_of(pool, tenant) as connection:
                await connection.execute(
                    "INSERT INTO answer_provenance (tenant, answer_id, documents) VALUES (%s, %s, %s)",
                    [tenant, answer_id, list(documents)],
                )
                charge(stored=UUID_BYTES * len(documents))
                # The function runs with its owner's rights and also deletes rows of inactive tenants.
                await connection.execute("SELECT expire_provenance(%s, %s)", [PROVENANCE_DAYS, EXPIRED_AT_ONCE])


_READABLE_ANSWERS = sql.SQL("""
    SELECT a.answer_id, a.documents
    FROM (
        SELECT answer_id, documents FROM answer_provenance WHERE tenant = %(tenant)s AND answer_id = ANY(%(answers)s)
        UNION
        SELECT answer_id, documents FROM conversation_provenance
        WHERE tenant = %(tenant)s AND answer_id = ANY(%(answers)s)
    ) a
    WHERE {reads_all}
""").format(reads_all=READS_ALL.format(documents=sql.SQL("a.documents")))


async def readable_answers(
    connection: Connection, caller: Caller, answers: Collection[UUID]
) -> dict[UUID, frozenset[UUID]]:
    """The answers whose every document the caller may read now, each with these documents. An answer of another tenant
    or of unknown provenance is not among them. Raises psycopg.Error."""
    parameters = {"tenant": caller.tenant, "tags": sorted(caller.tags), "answers": list(answers)}
    cursor = await connection.execute(_READABLE_ANSWERS, parameters)
    return {answer_id: frozenset(documents) for answer_id, documents in await cursor.fetchall()}


def _fitting(pieces: Sequence[Piece], budget_tokens: int) -> list[Piece]:
    """The pieces that fit, in their order; a smaller piece may follow one that does not fit."""
    fitting, left = [], budget_tokens
    for piece in pieces:
        if piece.tokens <= left:
            fitting.append(piece)
            left -= piece.tokens
    return fitting


async def needs_vector(connection: Connection, tenant: str, member: str) -> bool:
    """Whether the history is divided into chunks, as stored; a history that was never too long is used whole."""
    if len(storable([tenant, member])) < 2:
        return False
    cursor = await connection.execute(
        "SELECT is_chunked FROM conversation_members WHERE tenant = %s AND member = %s", [tenant, member]
    )
    row = await cursor.fetchone()
    return bool(row and row[0])
