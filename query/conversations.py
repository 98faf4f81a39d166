"""A member's own history for an answer: whole while it is short, else the chunks nearest to the question.

Read for one member of one tenant, both as they were authenticated: nobody reads another's. Exact: a member's chunks are
few enough to be compared one by one (docs/adr/0018-conversations.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pgvector import HalfVector

from pipeline.core.conversations import made_by, render
from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.stores.postgres import Connection
from query.access import sayable

K = 5
"""Chunks of a history that is too long to be served whole."""

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
    def note(self) -> str | None:
        """What whoever reads the answer should know of what is missing; None: nothing is."""
        if self.left_out:
            what = "oldest pairs" if self.served == "whole" else "chunks"
            return f"the history's {self.left_out} {what} did not fit the budget"
        if self.without_embedding:
            return f"{self.without_embedding} chunks of the history are not embedded yet"
        return None


EMPTY = History("whole", (), 0, 0)


async def history(
    connection: Connection,
    tenant: str,
    member: str,
    budget_tokens: int,
    *,
    question: tuple[Generation, Vectors] | None = None,
) -> History:
    """question: the active generation and the question's vector by its model (float32, unit length); None: there is
    none (the model is away). budget_tokens: counted as cl100k. Raises psycopg.Error."""
    if len(sayable([tenant, member])) < 2:
        return EMPTY
    cursor = await connection.execute(
        "SELECT tokens, is_chunked FROM conversation_members WHERE tenant = %s AND member = %s", [tenant, member]
    )
    row = await cursor.fetchone()
    if row is None:
        return EMPTY
    tokens, is_chunked = row
    if not is_chunked:
        return await _whole(connection, tenant, member, budget_tokens)
    served: Served = "nearest"
    found = await _nearest(connection, tenant, member, *question) if question else []
    if not found:
        served, found = "newest", await _newest(connection, tenant, member)
    cursor = await connection.execute(
        "SELECT count(*) FROM conversation_chunks WHERE tenant = %(tenant)s AND member = %(member)s"
        " AND (made_by IS NULL OR made_by <> coalesce(%(maker)s, made_by))",
        {"tenant": tenant, "member": member, "maker": made_by(question[0]) if question else None},
    )
    [missing] = await cursor.fetchone() or (0,)
    kept = _fitting(found, budget_tokens)
    return History(served, kept, len(found) - len(kept), tokens, missing)


async def _whole(connection: Connection, tenant: str, member: str, budget_tokens: int) -> History:
    """From the newest pair back to the first one that does not fit: a gap would mislead."""
    cursor = await connection.execute(
        "SELECT question, answer, asked_at, tokens, sum(tokens) OVER later, count(*) OVER (), sum(tokens) OVER ()"
        " FROM conversation_pairs WHERE tenant = %s AND member = %s"
        " WINDOW later AS (ORDER BY asked_at DESC, digest DESC ROWS UNBOUNDED PRECEDING)"
        " ORDER BY asked_at DESC, digest DESC",
        [tenant, member],
    )
    rows = await cursor.fetchall()
    pieces = [
        Piece(render(question, answer), asked_at, asked_at, tokens)
        for question, answer, asked_at, tokens, so_far, *_ in rows
        if so_far <= budget_tokens
    ]
    return History("whole", pieces, len(rows) - len(pieces), int(rows[0][-1]) if rows else 0)


async def _nearest(
    connection: Connection, tenant: str, member: str, generation: Generation, vector: Vectors
) -> list[Piece]:
    cursor = await connection.execute(
        "SELECT text, first_at, last_at, tokens, 1 - (embedding <=> %(vector)s) FROM conversation_chunks"
        " WHERE tenant = %(tenant)s AND member = %(member)s AND made_by = %(maker)s AND embedding IS NOT NULL"
        " ORDER BY embedding <=> %(vector)s, position LIMIT %(k)s",
        {
            "tenant": tenant, "member": member, "maker": made_by(generation), "vector": HalfVector(vector), "k": K,
        },
    )  # fmt: skip
    return [Piece(*row) for row in await cursor.fetchall()]


async def _newest(connection: Connection, tenant: str, member: str) -> list[Piece]:
    cursor = await connection.execute(
        "SELECT text, first_at, last_at, tokens FROM conversation_chunks WHERE tenant = %s AND member = %s"
        " ORDER BY position DESC LIMIT %s",
        [tenant, member, K],
    )
    return [Piece(*row) for row in await cursor.fetchall()]


def _fitting(pieces: Sequence[Piece], budget_tokens: int) -> list[Piece]:
    """In their order those that still fit; a smaller one further down may."""
    kept, left = [], budget_tokens
    for piece in pieces:
        if piece.tokens <= left:
            kept.append(piece)
            left -= piece.tokens
    return kept
