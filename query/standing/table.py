"""The rows of standing questions. The access of their reader is checked in the statement that reads the passages.

Parameters ``tenant`` and ``tags`` are those of the caller (``query.access.callers``). Everything raises psycopg.Error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from pgvector import HalfVector
from psycopg.types.json import Jsonb

from pipeline.core.conversations import WHOLE_TENANT, subject_digest
from pipeline.stores.postgres import Connection
from query.access.callers import Caller
from query.limits.charging import bytes_of
from query.standing.model import (
    LOST,
    Kind,
    Sentence,
    Source,
    Standing,
    Summary,
    changes_of,
    readable,
)
from query.standing.words import NO_WORDS, Words

# OFFSET 0 forces one index probe for each passage and table, as in query.access.verify. A deleted document keeps its
# access set: whoever could not read it does not learn that it is gone.
_BEHIND = """
    SELECT p.question_id, p.n, p.chunk_id, p.document_id,
        CASE WHEN NOT a.may_read THEN 'unreadable'
             WHEN d.deleted_at IS NOT NULL OR d.version IS NULL THEN 'deleted'
             WHEN d.content_hash = p.content_hash THEN NULL
             WHEN EXISTS (
                SELECT FROM manifests m WHERE m.document_id = p.document_id AND m.generation = q.generation
                  AND m.chunk_ids @> ARRAY[p.chunk_id] OFFSET 0
             ) THEN NULL
             ELSE 'changed' END AS change
    FROM standing_passages p
    JOIN standing_questions q ON q.tenant = p.tenant AND q.id = p.question_id
    LEFT JOIN LATERAL (
        SELECT id, access_id, deleted_at, version, content_hash FROM documents d
        WHERE d.id = p.document_id AND d.tenant = p.tenant OFFSET 0
    ) d ON true
    CROSS JOIN LATERAL (
        SELECT EXISTS (
            SELECT FROM access_sets s WHERE s.id = d.access_id AND s.tenant = p.tenant
              AND s.acl_tags && %(tags)s::text[] AND s.required_tags <@ %(tags)s::text[] OFFSET 0
        ) AS may_read OFFSET 0
    ) a
    WHERE p.tenant = %(tenant)s AND p.question_id = ANY(%(ids)s::uuid[])
"""
_SOURCES = f"{_BEHIND} ORDER BY p.question_id, p.n, p.chunk_id"
_CHANGED = f"""
    SELECT question_id, change, array_agg(DISTINCT n) FROM ({_BEHIND} OFFSET 0) behind WHERE change IS NOT NULL
    GROUP BY question_id, change
"""  # noqa: S608 — a constant of this module


_ENTERED = """
    SELECT c.question_id, array_agg(DISTINCT c.document_id)
    FROM standing_changes c
    JOIN standing_questions q ON q.tenant = c.tenant AND q.id = c.question_id AND q.asked_at = c.asked_at
    CROSS JOIN LATERAL (
        SELECT d.access_id FROM documents d
        WHERE d.id = c.document_id AND d.tenant = c.tenant AND d.deleted_at IS NULL AND d.version IS NOT NULL OFFSET 0
    ) d
    CROSS JOIN LATERAL (
        SELECT FROM access_sets s WHERE s.id = d.access_id AND s.acl_tags && %(tags)s::text[]
          AND s.required_tags <@ %(tags)s::text[] OFFSET 0
    ) a
    WHERE c.tenant = %(tenant)s AND c.kind = 'new' AND c.question_id = ANY(%(ids)s::uuid[])
    GROUP BY c.question_id
"""
"""Documents with new passages, which the caller may read now."""


@dataclass(frozen=True, slots=True)
class Row:
    """A standing question as it is stored, for the code that checks the access to it."""

    id: UUID
    principal: str
    question: str
    request: Mapping[str, Any]
    sentences: Sequence[Mapping[str, Any]]
    model: str | None
    generation: str
    stored_at: Any
    asked_at: Any
    probe_generation: str | None
    is_full: bool
    has_words: bool


_COLUMNS = (
    "id, principal, question, request, sentences, model, generation, stored_at, asked_at, probe_generation, is_full,"
    " words IS NOT NULL"
)


async def rows(connection: Connection, tenant: str, principal: str, *, id_: UUID | None = None) -> list[Row]:
    """The principal's standing questions, the newest first; with ``id_`` only that one, if it is the principal's."""
    cursor = await connection.execute(
        f"SELECT {_COLUMNS} FROM standing_questions WHERE tenant = %s AND principal = %s"  # noqa: S608 — constants
        " AND (%s::uuid IS NULL OR id = %s) ORDER BY stored_at DESC, id",
        [tenant, principal, id_, id_],
    )
    return [Row(*row) for row in await cursor.fetchall()]


async def count(connection: Connection, tenant: str, principal: str) -> int:
    cursor = await connection.execute(
        "SELECT count(*) FROM standing_questions WHERE tenant = %s AND principal = %s", [tenant, principal]
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def sources(connection: Connection, caller: Caller, ids: Sequence[UUID]) -> dict[UUID, list[Source]]:
    """The chunks behind each of these answers, with what became of them for this caller."""
    if not ids:
        return {}
    cursor = await connection.execute(
        _SOURCES, {"tenant": caller.tenant, "tags": sorted(caller.tags), "ids": list(ids)}
    )
    results: dict[UUID, list[Source]] = {}
    for question, n, chunk, document, change in await cursor.fetchall():
        results.setdefault(question, []).append(Source(n, chunk, document, cast("Kind | None", change)))
    return results


async def read(connection: Connection, caller: Caller, results: Sequence[Row]) -> list[Standing]:
    """These questions for their asker, without the sentences that it may no longer see."""
    ids = [row.id for row in results]
    behind, entered = await sources(connection, caller, ids), await _entered(connection, caller, ids)
    return [_standing(row, behind.get(row.id, []), entered.get(row.id, [])) for row in results]


async def summaries(connection: Connection, caller: Caller, principal: str) -> list[Summary]:
    """The principal's standing questions with the state of each, the newest first. Passages are put together by
    Postgres, and of the sentences those are read that have changed, one answer after the other: a hundred questions may
    have two hundred thousand passages."""
    cursor = await connection.execute(
        "SELECT id, question, stored_at, asked_at, jsonb_array_length(sentences) FROM standing_questions"
        " WHERE tenant = %s AND principal = %s ORDER BY stored_at DESC, id",
        [caller.tenant, principal],
    )
    results = await cursor.fetchall()
    ids = [row[0] for row in results]
    values = {"tenant": caller.tenant, "tags": sorted(caller.tags), "ids": ids}
    changed: dict[UUID, dict[Kind, set[int]]] = {}
    for question, kind, numbers in await (await connection.execute(_CHANGED.encode(), values)).fetchall():
        changed.setdefault(question, {})[kind] = set(numbers)
    entered = await _entered(connection, caller, ids)
    listed = []
    for id_, question, stored_at, asked_at, sentences in results:
        changes: dict[Kind, list[int]] = {}
        if id_ in changed or id_ in entered:
            cursor = await connection.execute(
                "SELECT jsonb_path_query_array(sentences, '$[*].cites') FROM standing_questions"
                " WHERE tenant = %s AND id = %s",
                [caller.tenant, id_],
            )
            row = await cursor.fetchone()
            changes = changes_of(row[0] if row else [], changed.get(id_, {}), has_entered=id_ in entered)
        listed.append(Summary(id_, question, stored_at, asked_at, not sentences, changes))
    return listed


async def _entered(connection: Connection, caller: Caller, ids: Sequence[UUID]) -> dict[UUID, list[UUID]]:
    if not ids:
        return {}
    cursor = await connection.execute(
        _ENTERED, {"tenant": caller.tenant, "tags": sorted(caller.tags), "ids": list(ids)}
    )
    return dict(await cursor.fetchall())


def _standing(row: Row, behind: Sequence[Source], entered: Sequence[UUID]) -> Standing:
    lost = {source.n for source in behind if source.change in LOST}
    sentences = [Sentence(sentence["text"], tuple(sentence["cites"])) for sentence in row.sentences]
    return Standing(
        row.id,
        row.question,
        row.stored_at,
        row.asked_at,
        row.model,
        [readable(sentence, lost) for sentence in sentences],
        not sentences,
        behind,
        entered,
        behind=[sentence.cites for sentence in sentences],
    )


@dataclass(frozen=True, slots=True)
class NewAnswer:
    """An answer to keep."""

    id: UUID
    principal: str
    question: str
    request: Mapping[str, Any]
    sentences: Sequence[Sentence]
    model: str | None
    generation: str
    chunks: Sequence[tuple[int, UUID, UUID]]
    """(number of the passage, chunk, document)"""
    probe: HalfVector | None
    is_full: bool = True
    """Whether a further passage would take the place of one of these."""
    words: Words = NO_WORDS


PASSAGE_BYTES, CITATION_BYTES = 250, 10
"""About the size of a row of a passage, and of a number in the sentences."""


def stored_bytes(entry: NewAnswer) -> int:
    """About how many bytes it takes in the tables, and in the log of their changes."""
    numbers = sum(len(sentence.cites) for sentence in entry.sentences)
    texts = bytes_of(entry.question, *(sentence.text for sentence in entry.sentences))
    return PASSAGE_BYTES * len(entry.chunks) + CITATION_BYTES * numbers + texts


_STORE = """
    INSERT INTO standing_questions
        (tenant, id, principal, question, request, sentences, model, generation, probe, probe_generation, is_full,
        words, names, words_floor)
    VALUES (%(tenant)s, %(id)s, %(principal)s, %(question)s, %(request)s,
        CASE WHEN EXISTS (SELECT FROM documents d WHERE d.id = ANY(%(documents)s::uuid[]) AND d.deleted_at IS NOT NULL)
            THEN '[]' ELSE %(sentences)s::jsonb END,
        %(model)s, %(generation)s, %(probe)s, CASE WHEN %(probe)s::halfvec IS NOT NULL THEN %(generation)s END,
        %(is_full)s, %(words)s, %(names)s, %(words_floor)s)
    ON CONFLICT (tenant, id) DO UPDATE SET sentences = excluded.sentences, model = excluded.model,
        generation = excluded.generation, probe = excluded.probe, probe_generation = excluded.probe_generation,
        is_full = excluded.is_full, words = excluded.words, names = excluded.names,
        words_floor = excluded.words_floor, asked_at = clock_timestamp()
    WHERE standing_questions.principal = excluded.principal
"""
"""Without the sentences where a document was deleted while the answer was written: erasure may have passed already."""
# The document's hash is stored only while the chunk is in its manifest: a change in between is noticed then.
_STORE_PASSAGES = """
    INSERT INTO standing_passages (tenant, question_id, n, chunk_id, document_id, content_hash)
    SELECT %(tenant)s, %(id)s, p.n, p.chunk_id, p.document_id,
        (SELECT d.content_hash FROM documents d JOIN manifests m ON m.document_id = d.id
         WHERE d.id = p.document_id AND d.tenant = %(tenant)s AND m.generation = %(generation)s
           AND m.chunk_ids @> ARRAY[p.chunk_id] AND m.content_hash = d.content_hash)
    FROM unnest(%(numbers)s::smallint[], %(chunks)s::uuid[], %(documents)s::uuid[]) AS p (n, chunk_id, document_id)
    RETURNING content_hash
"""


async def store(connection: Connection, tenant: str, entry: NewAnswer) -> bool:
    """Store a new standing question, or the new answer of the one with this id. False: it is another principal's."""
    values = {
        "tenant": tenant,
        "id": entry.id,
        "principal": entry.principal,
        "question": entry.question,
        "request": Jsonb(entry.request),
        "sentences": Jsonb([{"text": s.text.replace("\x00", ""), "cites": list(s.cites)} for s in entry.sentences]),
        "model": entry.model,
        "generation": entry.generation,
        "probe": entry.probe,
        "is_full": entry.is_full,
        **_words(entry.words),
        "numbers": [n for n, *_ in entry.chunks],
        "chunks": [chunk for _, chunk, _ in entry.chunks],
        "documents": [document for *_, document in entry.chunks],
    }
    cursor = await connection.execute(_STORE, values)
    if cursor.rowcount != 1:
        return False
    await connection.execute("DELETE FROM standing_passages WHERE tenant = %(tenant)s AND question_id = %(id)s", values)
    await connection.execute(_STORE_PASSAGES, values)
    return True


async def moment(connection: Connection) -> datetime:
    """The present moment by Postgres' clock."""
    [(now,)] = await (await connection.execute("SELECT clock_timestamp()")).fetchall()
    return cast(datetime, now)


async def is_forgotten(connection: Connection, principal: str, since: datetime) -> bool:
    """Whether this principal of the transaction's tenant, or the whole tenant, was forgotten since then."""
    subjects = [subject_digest(principal), WHOLE_TENANT]
    cursor = await connection.execute("SELECT is_forgotten_since(%s::bytea[], %s)", [subjects, since])
    [(was,)] = await cursor.fetchall()
    return cast(bool, was)


async def remove(connection: Connection, tenant: str, principal: str, id_: UUID) -> bool:
    """Remove a standing question. False: the principal has no such question."""
    cursor = await connection.execute(
        "DELETE FROM standing_questions WHERE tenant = %s AND principal = %s AND id = %s", [tenant, principal, id_]
    )
    return cursor.rowcount == 1


async def embed_again(
    connection: Connection, tenant: str, id_: UUID, probe: HalfVector, generation: str, words: Words
) -> None:
    """Store the probe of a question by the model of a newer generation, and its words where it has none, unless that
    was done meanwhile."""
    await connection.execute(
        """
        UPDATE standing_questions SET probe = %(probe)s, probe_generation = %(generation)s,
            words = coalesce(words, %(words)s), names = CASE WHEN words IS NULL THEN %(names)s ELSE names END,
            words_floor = CASE WHEN words IS NULL THEN %(words_floor)s ELSE words_floor END
        WHERE tenant = %(tenant)s AND id = %(id)s
            AND (probe_generation IS DISTINCT FROM %(generation)s OR words IS NULL)
        """,
        {"probe": probe, "generation": generation, "tenant": tenant, "id": id_, **_words(words)},
    )


def _words(words: Words) -> dict[str, Any]:
    return {
        "words": list(words.words),
        "names": list(words.names),
        "words_floor": words.floor,
    }
