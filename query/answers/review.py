"""The review queue, and feedback on answers and passages.

Operators read the queue and may not be allowed to read the documents. An entry therefore shows ids, scores and the
question; the model's text, which is made from documents, is included only for operators who may read all of them now.
docs/adr/0020-review-queue.md gives the reasons.
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
from query.answers.model import Answer, NumberedPassage
from query.limits.charging import UUID_BYTES, bytes_of, charge
from query.model import BadQuery

MAX_NOTE_CHARACTERS = 2_000
MAX_FEEDBACK_QUERY_CHARACTERS = 8_000
MAX_LISTED_ANSWERS = 200
MAX_FEEDBACK_PER_CALLER = 1_000
"""The most ratings of one caller that are stored, the latest."""

Thumb = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class ReviewEntry:
    answer_id: UUID
    created_at: datetime
    question: str
    mode: str
    model: str
    support: float
    density: float
    reasons: Sequence[str]
    documents: Sequence[UUID]
    chunks: Sequence[UUID]
    """The passages: ``[n]`` refers to the n-th of them."""
    answer: str | None
    """None: this operator may not read every document that the answer was made from, or the answer used a member's
    history and nobody may read it."""
    unsupported: Sequence[str] | None
    up: int
    down: int
    """The numbers of ratings."""


_RECORD = """
    INSERT INTO answer_reviews (answer_id, tenant, question, mode, model, support, density, reasons, documents, chunks,
        answer, unsupported)
    SELECT %(id)s, %(tenant)s, %(question)s, %(mode)s, %(model)s, %(support)s, %(density)s, %(reasons)s, %(documents)s,
        %(chunks)s, %(answer)s, %(unsupported)s
    WHERE NOT EXISTS (SELECT FROM documents d WHERE d.id = ANY(%(documents)s::uuid[]) AND d.deleted_at IS NOT NULL)
    ON CONFLICT (answer_id) DO NOTHING
"""


async def record(
    connection: Connection,
    tenant: str,
    question: str,
    answer: Answer,
    shown: Sequence[NumberedPassage],
    *,
    private: bool,
) -> bool:
    """Put an answer into the queue. shown: every passage that the model read, cited or not. private: the answer used a
    member's own history, so its text is not stored. False: a document was deleted while the answer was written, and its
    erasure may have passed already. Raises psycopg.Error."""
    ordered = sorted(shown, key=lambda p: p.n)
    values = {
        "id": answer.answer_id,
        "tenant": tenant,
        "question": question,
        "mode": answer.mode,
        "model": answer.model or "",
        "support": answer.support,
        "density": answer.density,
        "reasons": list(answer.reasons),
        "documents": list({p.result.passage.document_id for p in ordered}),
        "chunks": [p.result.passage.chunk_id for p in ordered],
        "answer": None if private else answer.text.replace("\x00", ""),
        "unsupported": None if private else list(answer.unsupported),
    }
    cursor = await connection.execute(_RECORD, values)
    texts = (question,) if private else (question, answer.text, *answer.unsupported)
    charge(stored=2 * UUID_BYTES * len(ordered) + bytes_of(*texts))
    return cursor.rowcount == 1


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


async def list_pending(
    connection: Connection, operator: Caller, *, limit: int = 50, before: datetime | None = None
) -> list[ReviewEntry]:
    """The open entries of the operator's tenant, the newest first. before: the last ``asked_at`` of the previous page.

    The caller of this function checks that this is an operator. Raises BadQuery and psycopg.Error.
    """
    if not 1 <= limit <= MAX_LISTED_ANSWERS:
        raise BadQuery(f"limit is {limit}, must be 1 to {MAX_LISTED_ANSWERS}")
    cursor = await connection.execute(
        _WAITING,
        {"tenant": operator.tenant, "tags": sorted(operator.tags), "before": before, "limit": limit},
    )
    return [ReviewEntry(*row) for row in await cursor.fetchall()]


async def resolve(connection: Connection, tenant: str, answer_id: UUID, verdict: Literal["right", "wrong"]) -> bool:
    """Close an entry after its review. False: this tenant has no such open entry. Raises psycopg.Error."""
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


async def store_feedback(connection: Connection, caller: Caller, authors: Sequence[bytes], feedback: Feedback) -> None:
    """Store a rating; a person's later rating of the same answer or passage replaces it.

    authors: the ``author_digests`` of the authenticated caller. A rating of something that the caller cannot have been
    shown is silently discarded, because an error would reveal whether it exists. A caller was shown an answer if it
    knows the random id and may read everything that the answer was made from; for a passage it must be able to read the
    document. Raises BadQuery and psycopg.Error.
    """
    if (feedback.answer_id is None) == (feedback.chunk_id is None):
        raise BadQuery("feedback rates either an answer or a passage: set answer_id or chunk_id, not both")
    for name, value, most in (
        ("note", feedback.note, MAX_NOTE_CHARACTERS),
        ("query", feedback.query, MAX_FEEDBACK_QUERY_CHARACTERS),
    ):
        if value is not None and (len(value) > most or not storable([value])):
            raise BadQuery(f"{name} is longer than {most} characters or contains an invalid character")
    parameters = {
        "tenant": caller.tenant,
        "tags": sorted(caller.tags),
        "answer": feedback.answer_id,
        "chunk": feedback.chunk_id,
        "giver": authors[0],
        "earlier": list(authors[1:]),
        "subject": _subject(feedback),
        "query": feedback.query,
        "verdict": feedback.verdict,
        "note": feedback.note,
        "most": MAX_FEEDBACK_PER_CALLER,
    }
    table = (await generations.active(connection)).chunk_table
    cursor = await connection.execute(
        _STORE_FEEDBACK.format(chunks=sql.Identifier(table), reads_all=_READS_SHOWN), parameters
    )
    if cursor.rowcount:
        charge(stored=bytes_of(feedback.query, feedback.note))
        await connection.execute(_DELETE_OLDER, parameters)


_SHOWN = """
    SELECT FROM (
        SELECT documents FROM answer_provenance WHERE tenant = %(tenant)s AND answer_id = %(answer)s
        UNION ALL SELECT ARRAY[document_id] FROM {chunks} WHERE id = %(chunk)s
    ) shown WHERE {reads_all}
"""
_READS_SHOWN = READS_ALL.format(documents=sql.SQL("shown.documents"))
_STORE_FEEDBACK = sql.SQL(
    "INSERT INTO answer_feedback (tenant, giver, subject, answer_id, chunk_id, query, verdict, note)"
    " SELECT %(tenant)s, %(giver)s, %(subject)s, %(answer)s::uuid, %(chunk)s::uuid, %(query)s, %(verdict)s, %(note)s"
    f" WHERE EXISTS ({_SHOWN})"
    " ON CONFLICT (tenant, giver, subject)"
    " DO UPDATE SET verdict = excluded.verdict, note = excluded.note, query = excluded.query, given_at = now()"
)
_DELETE_OLDER = """
    DELETE FROM answer_feedback f WHERE f.tenant = %(tenant)s AND (
        f.giver = ANY(%(earlier)s::bytea[]) AND f.subject = %(subject)s
        OR f.giver = %(giver)s AND f.subject IN (
            SELECT subject FROM answer_feedback WHERE tenant = %(tenant)s AND giver = %(giver)s
            ORDER BY given_at DESC, subject OFFSET %(most)s
        )
    )
"""
"""Deletes ratings of the same subject under older keys, and the caller's ratings beyond the newest
MAX_FEEDBACK_PER_CALLER."""


def entry_json(entry: ReviewEntry) -> dict[str, Any]:
    return {
        "answer_id": str(entry.answer_id),
        "asked_at": entry.created_at.isoformat(),
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


def author_digests(keys: Sequence[bytes], tenant: str, *, principal: str | None, key: str | None) -> list[bytes]:
    """The digests under which feedback of a caller is stored: the first is the current one, the others are those of
    older keys of the installation. A person has the same digests with any token or API key; a service is identified by
    the name of its API key. Without the keys, the author of a row cannot be found by guessing names."""
    kind, name = ("key", key or "") if principal is None else ("person", principal)
    text = "\0".join((tenant, kind, name)).encode("utf-8", "surrogatepass")
    return [hmac.digest(secret, text, "sha256") for secret in keys]


def author_digests_of_person(keys: Sequence[bytes], tenant: str, person: str) -> list[bytes]:
    """All digests under which feedback of a person may be stored, including those from before there were keys."""
    plain = [
        hashlib.sha256(f"{tenant}|{kind}\0{tenant}\0\0{person}".encode("utf-8", "replace")).digest()
        for kind in ("token", "development")
    ]
    return author_digests(keys, tenant, principal=person, key=None) + plain


RECORD_SECONDS = 2.0


async def enqueue(
    pool: Pool, tenant: str, question: str, answer: Answer, shown: Sequence[NumberedPassage], *, private: bool
) -> bool:
    """``record`` on a connection of its own. Raises PenstockError within RECORD_SECONDS."""
    async with time_limit(RECORD_SECONDS, "Postgres"):
        with translated("the review queue"):
            async with rows_of(pool, tenant) as connection:
                return await record(connection, tenant, question, answer, shown, private=private)
