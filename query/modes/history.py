"""A member's own history for an answer: whole while it is short, else the chunks nearest to the question.

Read for one member of one tenant, both as they were authenticated: nobody reads another's. Exact: a member's chunks are
few enough to be compared one by one (docs/adr/0018-conversations.md).

An answer shows what stood in the documents that it was made from. It is read along only while the caller may read all
of them, by the ledger, now; an answer of which nobody knows what it was made from is not. The member's own questions
always are (docs/adr/0042-provenance-of-answers.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any, Literal
from uuid import UUID

from pgvector import HalfVector
from psycopg import sql

from pipeline.core.conversations import PAIRS_PER_CHUNK, made_by, render
from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.embedding.tokens import byte_pairs
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection, Pool, translated
from query.access.callers import Caller, storable
from query.access.tenant_rows import rows_of
from query.access.verify import READS_ALL
from query.embedding.embedders import Embedders, require_same
from query.modes.survey import Scope

K = 5
"""Chunks of a history that is too long to be served whole."""
WITHHELD = "(this earlier answer is withheld)"
"""Instead of an answer that the caller may not be shown any more."""

MOST_DOCUMENTS = 2_000
"""That an answer is known to be made from: 32 kB of ids. One made from more is never read along."""
KNOWN_DAYS = 30
"""How long a conversation may name an answer for the first time: Kafka keeps what conversations say for 14."""
EXPIRED_AT_ONCE = 100
"""Rows that one answer removes: more than it adds, so that none are left after a while, and few enough for its time."""
RECORD_SECONDS = 2.0

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
    """Cosine, where it was found by it."""
    documents: frozenset[UUID] = frozenset()
    """What its answers were made from: the caller could read all of these when it was read."""
    withheld: int = 0
    """Answers of it that are not shown."""


@dataclass(frozen=True, slots=True)
class History:
    served: Served
    pieces: Sequence[Piece]
    left_out: int
    """Pairs of a whole history, or chunks among the chosen ones, that the budget had no room for."""
    tokens: int
    """Of the whole history, served or not."""
    without_embedding: int = 0
    """Chunks that no question can find yet."""

    @property
    def withheld(self) -> int:
        """Answers that are not shown, of all pieces."""
        return sum(piece.withheld for piece in self.pieces)

    @property
    def documents(self) -> frozenset[UUID]:
        """What the answers that are shown were made from."""
        return frozenset[UUID]().union(*(piece.documents for piece in self.pieces))

    @property
    def notes(self) -> list[str]:
        """What whoever reads the answer should know of what is missing."""
        notes = []
        if self.left_out:
            what = "oldest pairs" if self.served == "whole" else "chunks"
            notes.append(f"the history's {self.left_out} {what} did not fit the budget")
        elif self.without_embedding:
            notes.append(f"{self.without_embedding} chunks of the history are not embedded yet")
        if self.withheld:
            noun = "answer of the history was" if self.withheld == 1 else "answers of the history were"
            notes.append(f"{self.withheld} {noun} withheld: not everything that they were made from can be read now")
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
    """caller: who asks, with what it holds now. question: the active generation and the question's vector by its model
    (float32, unit length); None: there is none (the model is away). budget_tokens: counted as cl100k. Raises
    psycopg.Error."""
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
    asks = {"tenant": tenant, "tags": sorted(caller.tags), "member": member}
    if not is_chunked:
        return await _whole(connection, asks, budget_tokens)
    served: Served = "nearest"
    pieces = await _nearest(connection, asks, *question) if question else []
    if not pieces:
        served, pieces = "newest", await _chunks(connection, _NEWEST, asks)
    cursor = await connection.execute(
        "SELECT count(*) FROM conversation_chunks WHERE tenant = %(tenant)s AND member = %(member)s"
        " AND (made_by IS NULL OR made_by <> coalesce(%(maker)s, made_by))",
        {"tenant": tenant, "member": member, "maker": made_by(question[0]) if question else None},
    )
    [missing] = await cursor.fetchone() or (0,)
    kept = _fitting(pieces, budget_tokens)
    return History(served, kept, len(pieces) - len(kept), tokens, missing)


@dataclass(frozen=True, slots=True)
class _Pair:
    digest: bytes
    question: str
    answer: str


async def _whole(connection: Connection, asks: dict[str, Any], budget_tokens: int) -> History:
    """From the newest pair back to the first one that does not fit: a gap would mislead."""
    cursor = await connection.execute(
        "SELECT digest, question, answer, asked_at, tokens, sum(tokens) OVER later, count(*) OVER (),"
        " sum(tokens) OVER () FROM conversation_pairs WHERE tenant = %(tenant)s AND member = %(member)s"
        " WINDOW later AS (ORDER BY asked_at DESC, digest DESC ROWS UNBOUNDED PRECEDING)"
        " ORDER BY asked_at DESC, digest DESC",
        asks,
    )
    rows = await cursor.fetchall()
    fitting = [
        (Piece("", asked_at, asked_at, tokens), [_Pair(digest, question, answer)])
        for digest, question, answer, asked_at, tokens, so_far, *_ in rows
        if so_far <= budget_tokens
    ]
    pieces = await _written(connection, asks, fitting)
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
"""Chunks with their pairs, of one snapshot: they are regrouped in the transaction that changes the pairs. A chunk's own
text is what is embedded of it, and never shown: it holds every answer."""


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
    connection: Connection, asks: dict[str, Any], generation: Generation, vector: Vectors
) -> list[Piece]:
    return await _chunks(connection, _NEAREST, {**asks, "maker": made_by(generation), "vector": HalfVector(vector)})


async def _chunks(connection: Connection, statement: sql.Composed, asks: dict[str, Any]) -> list[Piece]:
    cursor = await connection.execute(statement, {**asks, "k": K, "pairs": PAIRS_PER_CHUNK})
    pieces = [
        (Piece("", *about), [_Pair(*row[5:]) for row in rows])
        for (_, *about), rows in groupby(await cursor.fetchall(), key=lambda row: row[:5])
    ]
    return await _written(connection, asks, pieces)


async def _written(
    connection: Connection, asks: dict[str, Any], found: Sequence[tuple[Piece, Sequence[_Pair]]]
) -> list[Piece]:
    """Each piece with the text of its pairs, without the answers that the caller may not be shown."""
    may_show = await _made_from(connection, asks, [pair.digest for _, pairs in found for pair in pairs])
    written = []
    for piece, pairs in found:
        withheld = sum(pair.digest not in may_show for pair in pairs)
        text = "\n\n".join(render(p.question, p.answer if p.digest in may_show else WITHHELD) for p in pairs)
        tokens = (await asyncio.to_thread(byte_pairs().count, [text]))[0] if withheld else piece.tokens
        documents = frozenset[UUID]().union(*(may_show.get(pair.digest, ()) for pair in pairs))
        written.append(replace(piece, text=text, tokens=tokens, documents=documents, withheld=withheld))
    return written


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


async def _made_from(
    connection: Connection, asks: dict[str, Any], digests: Sequence[bytes]
) -> dict[bytes, Sequence[UUID]]:
    """Of these pairs, those whose answers the caller may be shown now, with the documents that they were made from. A
    pair that was recorded as several answers (its texts are the same) may be shown as any one of them."""
    if not digests:
        return {}
    cursor = await connection.execute(_MADE_FROM, {**asks, "digests": list(digests)})
    return dict(await cursor.fetchall())


async def record_made_from(pool: Pool, tenant: str, answer_id: UUID, documents: Collection[UUID]) -> None:
    """documents: where the passages that the model was shown, and the history that was read along, came from. What is
    older than KNOWN_DAYS goes. Raises Retryable, within RECORD_SECONDS."""
    if len(documents) > MOST_DOCUMENTS:
        return
    async with time_limit(RECORD_SECONDS, "Postgres"):
        with translated("what the answer was made from"):
            async with rows_of(pool, tenant) as connection:
                await connection.execute(
                    "INSERT INTO answer_provenance (tenant, answer_id, documents) VALUES (%s, %s, %s)",
                    [tenant, answer_id, list(documents)],
                )
                # With its owner's rights: what quiet tenants left behind goes, too.
                await connection.execute("SELECT expire_provenance(%s, %s)", [KNOWN_DAYS, EXPIRED_AT_ONCE])


def _fitting(pieces: Sequence[Piece], budget_tokens: int) -> list[Piece]:
    """In their order those that still fit; a smaller one further down may."""
    kept, left = [], budget_tokens
    for piece in pieces:
        if piece.tokens <= left:
            kept.append(piece)
            left -= piece.tokens
    return kept


async def needs_vector(connection: Connection, tenant: str, member: str) -> bool:
    """Its stored flag: a history that was never too long is served whole."""
    if len(storable([tenant, member])) < 2:
        return False
    cursor = await connection.execute(
        "SELECT is_chunked FROM conversation_members WHERE tenant = %s AND member = %s", [tenant, member]
    )
    row = await cursor.fetchone()
    return bool(row and row[0])


async def vector_of(
    question: str, scope: Scope, embedders: Embedders | None
) -> tuple[tuple[Generation, Vectors] | None, str | None]:
    """The question's vector by the pinned generation's model; else None and why the history is searched by time."""
    by_time = "the history was searched by time and not by meaning"
    if embedders is None:
        return None, f"{by_time}: no embedding model is set"
    try:
        embedder, vector = await embedders.of(scope.generation).embed(question)
        require_same(embedder, scope.generation)
    except PenstockError as error:
        return None, f"{by_time}: {error}"
    return (scope.generation, vector), None
