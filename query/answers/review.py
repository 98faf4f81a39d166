"""Answers that somebody should look at, and what people thought of answers and passages.

Operators read the queue, and need not be allowed to read the documents. So an entry shows ids, scores and the question;
what the model wrote is made of documents, and is shown only to who may read every one of them now. Why, and what it
costs: docs/adr/0020-review-queue.md.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from psycopg import sql

from pipeline.ledger import generations
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection, Pool, translated
from query.access.callers import Caller, storable
from query.access.tenant_rows import rows_of
from query.access.verify import READS_ALL
from query.answers.model import Answer, Numbered
from query.model import BadQuery

MOST_NOTE_CHARACTERS = 2_000
MOST_QUERY_CHARACTERS = 8_000
MOST_LISTED = 200
MOST_KEPT = 1_000
"""Verdicts of one caller; the latest are kept."""

Thumb = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Waiting:
    answer_id: UUID
    asked_at: datetime
    question: str
    mode: str
    model: str
    support: float
    density: float
    reasons: Sequence[str]
    documents: Sequence[UUID]
    chunks: Sequence[UUID]
    """``[n]`` is the n-th of these."""
    answer: str | None
    """None: this operator may not read every document that it was made from, or nobody may read it (history)."""
    unsupported: Sequence[str] | None
    up: int
    down: int
    """What people thought of it."""


async def record(
    connection: Connection, tenant: str, question: str, answer: Answer, shown: Sequence[Numbered], *, private: bool
) -> None:
    """shown: every passage that the model read, cited or not. private: a member's own history was read along, so the
    text is not kept. Raises psycopg.Error."""
    ordered = sorted(shown, key=lambda p: p.n)
    await connection.execute(
        "INSERT INTO answer_reviews (answer_id, tenant, question, mode, model, support, density, reasons, documents,"
        " chunks, answer, unsupported) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
        " ON CONFLICT (answer_id) DO NOTHING",
        [
            answer.answer_id,
            tenant,
            question,
            answer.mode,
            answer.model or "",
            answer.support,
            answer.density,
            list(answer.reasons),
            list({p.result.passage.document_id for p in ordered}),
            [p.result.passage.chunk_id for p in ordered],
            None if private else answer.text.replace("\x00", ""),
            None if private else list(answer.unsupported),
        ],
    )


_WAITING = sql.SQL("""
    SELECT r.answer_id, r.asked_at, r.question, r.mode, r.model, r.support, r.density, r.reasons, r.documents, r.chunks,
        CASE WHEN p.may_read THEN r.answer END, CASE WHEN p.may_read THEN r.unsupported END,
        count(f.verdict) FILTER (WHERE f.verdict = 'up'), count(f.verdict) FILTER (WHERE f.verdict = 'down')
    FROM answer_reviews r
    CROSS JOIN LATERAL (SELECT {reads_all} AS may_read OFFSET 0) p
    LEFT JOIN answer_feedback f ON f.answer_id = r.answer_id AND f.tenant = r.tenant
    WHERE r.tenant = %(tenant)s AND r.resolved_at IS NULL
      AND (%(before)s::timestamptz IS NULL OR r.asked_at < %(before)s)
    GROUP BY r.answer_id, p.may_read
    ORDER BY r.asked_at DESC, r.answer_id
    LIMIT %(limit)s
""").format(reads_all=READS_ALL.format(documents=sql.SQL("r.documents")))


async def waiting(
    connection: Connection, operator: Caller, *, limit: int = 50, before: datetime | None = None
) -> list[Waiting]:
    """The operator's tenant's open entries, the newest first. before: the last page's last ``asked_at``.

    Whether this caller is an operator is for whoever calls to know. Raises BadQuery, psycopg.Error.
    """
    if not 1 <= limit <= MOST_LISTED:
        raise BadQuery(f"limit is {limit}, must be 1 to {MOST_LISTED}")
    cursor = await connection.execute(
        _WAITING,
        {"tenant": operator.tenant, "tags": sorted(operator.tags), "before": before, "limit": limit},
    )
    return [Waiting(*row) for row in await cursor.fetchall()]


async def resolve(connection: Connection, tenant: str, answer_id: UUID, verdict: Literal["right", "wrong"]) -> bool:
    """Somebody has looked at it. False: this tenant has no such entry open. Raises psycopg.Error."""
    cursor = await connection.execute(
        "UPDATE answer_reviews SET resolved_at = now(), resolved_as = %s"
        " WHERE answer_id = %s AND tenant = %s AND resolved_at IS NULL",
        [verdict, answer_id, tenant],
    )
    return cursor.rowcount == 1


@dataclass(frozen=True, slots=True)
class Feedback:
    verdict: Thumb
    answer_id: UUID | None = None
    chunk_id: UUID | None = None
    query: str | None = None
    note: str | None = None


async def give(connection: Connection, caller: Caller, voice: Sequence[bytes], feedback: Feedback) -> None:
    """One voice a person and answer or passage; a later one replaces it. voice: what ``givers`` says of who was
    authenticated, as ``caller``.

    What the caller cannot have been shown is not kept, and nothing says so: the reply would tell whether there is such
    a thing. Whoever knows the random id of an answer and may read all that it was made from was shown it; a passage
    counts when its document may be read. Raises BadQuery, psycopg.Error.
    """
    if (feedback.answer_id is None) == (feedback.chunk_id is None):
        raise BadQuery("feedback is about an answer or about a passage: give answer_id or chunk_id, and not both")
    for name, value, most in (
        ("note", feedback.note, MOST_NOTE_CHARACTERS),
        ("query", feedback.query, MOST_QUERY_CHARACTERS),
    ):
        if value is not None and (len(value) > most or not storable([value])):
            raise BadQuery(f"{name} is too long (at most {most} characters) or holds what no message can carry")
    asks = {
        "tenant": caller.tenant,
        "tags": sorted(caller.tags),
        "answer": feedback.answer_id,
        "chunk": feedback.chunk_id,
        "giver": voice[0],
        "earlier": list(voice[1:]),
        "subject": _subject(feedback),
        "query": feedback.query,
        "verdict": feedback.verdict,
        "note": feedback.note,
        "most": MOST_KEPT,
    }
    table = (await generations.active(connection)).chunk_table
    cursor = await connection.execute(_GIVE.format(chunks=sql.Identifier(table), reads_all=_READS_SHOWN), asks)
    if cursor.rowcount:
        await connection.execute(_ONLY_THE_LATEST, asks)


_SHOWN = """
    SELECT FROM (
        SELECT documents FROM answer_provenance WHERE tenant = %(tenant)s AND answer_id = %(answer)s
        UNION ALL SELECT ARRAY[document_id] FROM {chunks} WHERE id = %(chunk)s
    ) shown WHERE {reads_all}
"""
_READS_SHOWN = READS_ALL.format(documents=sql.SQL("shown.documents"))
_GIVE = sql.SQL(
    "INSERT INTO answer_feedback (tenant, giver, subject, answer_id, chunk_id, query, verdict, note)"
    " SELECT %(tenant)s, %(giver)s, %(subject)s, %(answer)s::uuid, %(chunk)s::uuid, %(query)s, %(verdict)s, %(note)s"
    f" WHERE EXISTS ({_SHOWN})"
    " ON CONFLICT (tenant, giver, subject)"
    " DO UPDATE SET verdict = excluded.verdict, note = excluded.note, query = excluded.query, given_at = now()"
)
_ONLY_THE_LATEST = """
    DELETE FROM answer_feedback f WHERE f.tenant = %(tenant)s AND (
        f.giver = ANY(%(earlier)s::bytea[]) AND f.subject = %(subject)s
        OR f.giver = %(giver)s AND f.subject IN (
            SELECT subject FROM answer_feedback WHERE tenant = %(tenant)s AND giver = %(giver)s
            ORDER BY given_at DESC, subject OFFSET %(most)s
        )
    )
"""
"""What was given under an older key about the same, and of one giver what is beyond the newest MOST_KEPT."""


@dataclass(frozen=True, slots=True)
class Given:
    verdict: Thumb
    answer_id: UUID | None
    chunk_id: UUID | None
    query: str | None
    note: str | None
    given_at: datetime


async def given(connection: Connection, tenant: str, *, limit: int = 50) -> list[Given]:
    """What was said lately in a tenant, for its operators; the newest first. Raises BadQuery, psycopg.Error."""
    if not 1 <= limit <= MOST_LISTED:
        raise BadQuery(f"limit is {limit}, must be 1 to {MOST_LISTED}")
    cursor = await connection.execute(
        "SELECT verdict, answer_id, chunk_id, query, note, given_at FROM answer_feedback"
        " WHERE tenant = %s ORDER BY given_at DESC LIMIT %s",
        [tenant, limit],
    )
    return [Given(*row) for row in await cursor.fetchall()]


def waiting_json(entry: Waiting) -> dict[str, Any]:
    return {
        "answer_id": str(entry.answer_id),
        "asked_at": entry.asked_at.isoformat(),
        "question": entry.question,
        "mode": entry.mode,
        "model": entry.model,
        "support": round(entry.support, 3),
        "density": round(entry.density, 3),
        "reasons": list(entry.reasons),
        "document_ids": [str(id_) for id_ in entry.documents],
        "chunk_ids": [str(id_) for id_ in entry.chunks],
        "answer": entry.answer,
        "unsupported": None if entry.unsupported is None else list(entry.unsupported),
        "feedback": {"up": entry.up, "down": entry.down},
    }


def _subject(feedback: Feedback) -> bytes:
    about = feedback.answer_id or feedback.chunk_id
    return hashlib.sha256(str(about).encode()).digest()


def givers(keys: Sequence[bytes], tenant: str, *, principal: str | None, key: str | None) -> list[bytes]:
    """Under which feedback of a caller stands: the first is how it is stored now, the others how it was stored under
    older keys of the installation. A person is the same by whatever token or API key; a service is known by the name of
    its API key. Who has the table and not the keys cannot find out whose it is by guessing names."""
    kind, name = ("key", key or "") if principal is None else ("person", principal)
    text = "\0".join((tenant, kind, name)).encode("utf-8", "surrogatepass")
    return [hmac.digest(secret, text, "sha256") for secret in keys]


def givers_of(keys: Sequence[bytes], tenant: str, person: str) -> list[bytes]:
    """Under which all feedback of a person may stand: without a key, too, as it was stored before there were keys."""
    plain = [
        hashlib.sha256(f"{tenant}|{kind}\0{tenant}\0\0{person}".encode("utf-8", "replace")).digest()
        for kind in ("token", "development")
    ]
    return givers(keys, tenant, principal=person, key=None) + plain


RECORD_SECONDS = 2.0


async def enqueue(
    pool: Pool, tenant: str, question: str, answer: Answer, shown: Sequence[Numbered], *, private: bool
) -> None:
    """See ``query.answers.review.record``. Raises PenstockError, within RECORD_SECONDS."""
    async with time_limit(RECORD_SECONDS, "Postgres"):
        with translated("the review queue"):
            async with rows_of(pool, tenant) as connection:
                await record(connection, tenant, question, answer, shown, private=private)
