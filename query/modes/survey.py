"""The size of what a caller may read, counted from the ledger without reading texts, as far as a decision needs it.

Every statement selects documents by tenant and access with a limit and looks up the rest by key, so that it does not
read more rows in a larger library (tests/contract/query/modes/test_plans.py). Access sets are immutable, and those that
the caller satisfies were read just before: a document with one of these access_ids may be read now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import sql

from pipeline.core.model import Generation
from pipeline.stores.postgres import Connection
from query.access.callers import Readable
from query.access.filters import Filters, conditions, values
from query.modes.budget import PASSAGE_TOKENS
from query.modes.decide import Coverage, Size

FIRST_SURVEY_DOCUMENTS = 256
MAX_SURVEYED_DOCUMENTS = 16_384
"""The most documents of a survey, whose rows are read in a tenth of a second."""
COVERED_DOCUMENTS = 1_000
"""Up to so many documents are all checked for missing vectors; of more, a sample of this size."""
SAMPLED_ROWS = (8_192, 65_536)
"""The sizes of the random part of the ledger that a sample is selected from, readable or not. Ids are hashes, so any
range of ids is random. The second size is used if the first contains fewer than MIN_SAMPLED_DOCUMENTS readable ones."""
MIN_SAMPLED_DOCUMENTS = 100

LOCAL_SETTINGS = """
    SELECT set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
        set_config('enable_mergejoin', 'off', true), set_config('enable_bitmapscan', 'off', true),
        set_config('statement_timeout', %s, true)
"""
"""Only index scans are allowed: a planner that expects to reach the limit early may otherwise read a whole table."""


@dataclass(frozen=True, slots=True)
class ReadScope:
    """The generation, access and filters of one question, read once."""

    generation: Generation
    tenant: str
    tags: frozenset[str]
    access_ids: tuple[int, ...]
    filters: Filters


@dataclass(frozen=True, slots=True)
class SurveyedDocument:
    """A readable document."""

    id: UUID
    at: datetime
    """When the source changed it, or when we first saw the change."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Survey:
    documents: Sequence[SurveyedDocument]
    """The readable documents, the newest first."""
    complete: bool

    @property
    def size(self) -> Size:
        return Size(sum(seen.tokens for seen in self.documents), len(self.documents), self.complete)


async def access_ids_of(connection: Connection, readable: Readable, sources: Sequence[str]) -> tuple[int, ...]:
    """The readable access sets of these sources (tags begin with their source's name); all if there are no sources."""
    if not sources:
        return readable.access_ids
    cursor = await connection.execute(
        "SELECT id FROM access_sets WHERE id = ANY(%s) AND split_part(acl_tags[1], '/', 1) = ANY(%s)",
        [list(readable.access_ids), list(sources)],
    )
    return tuple(id_ for (id_,) in await cursor.fetchall())


# The limit comes before conditions that are not in the index: else a narrow filter would read all of the index.
_SURVEY = """
    WITH mine AS MATERIALIZED (
        SELECT * FROM documents d WHERE tenant = %(tenant)s AND access_id = ANY(%(access)s::bigint[])
        LIMIT %(limit)s
    )
    SELECT d.id, coalesce(d.source_modified_at, d.changed_at, d.received_at),
        (SELECT sum(t) FROM unnest(m.token_counts) t) * (
            SELECT max((s->>1)::int)::float / greatest(sum((s->>1)::int - (s->>0)::int), 1)
            FROM jsonb_array_elements(m.spans) c, jsonb_array_elements(c) s
        ) + %(passage)s * cardinality(m.chunk_ids)
    FROM mine d
    LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = %(generation)s AND cardinality(m.chunk_ids) > 0
        AND d.deleted_at IS NULL AND d.version IS NOT NULL{chosen}
"""


async def survey(connection: Connection, scope: ReadScope, *, max_tokens: int | None) -> Survey:
    """The readable documents of a scope. max_tokens: where counting may end early; None: only the limit ends it.

    Tokens are those of the manifests (counted with the tokenizer of the generation's model), without the overlaps of
    chunks and with PASSAGE_TOKENS for each passage.
    """
    limit = FIRST_SURVEY_DOCUMENTS
    while True:
        cursor = await connection.execute(*build(scope, limit=limit + 1))
        rows = await cursor.fetchall()
        seen = [SurveyedDocument(id_, at, round(tokens)) for id_, at, tokens in rows if tokens is not None]
        complete = len(rows) <= limit
        over = max_tokens is not None and sum(document.tokens for document in seen) > max_tokens
        if complete or over or limit >= MAX_SURVEYED_DOCUMENTS:
            seen.sort(key=lambda document: (document.at, document.id), reverse=True)
            return Survey(seen, complete)
        limit = min(MAX_SURVEYED_DOCUMENTS, 4 * limit)


def build(scope: ReadScope, *, limit: int) -> tuple[sql.Composed, dict[str, Any]]:
    return sql.SQL(_SURVEY).format(chosen=conditions(scope.filters)), {
        **_values(scope),
        "limit": limit,
        "passage": PASSAGE_TOKENS,
    }


_MISSING = """
    SELECT count(*), coalesce(sum(cardinality(m.chunk_ids)), 0), coalesce(sum(lacking.chunks), 0)
    FROM ({documents}) d
    JOIN manifests m ON m.document_id = d.id AND m.generation = %(generation)s
    LEFT JOIN index_state s ON s.document_id = d.id AND s.generation = %(generation)s AND s.store = 'vectors'
    CROSS JOIN LATERAL (
        SELECT count(*) AS chunks FROM unnest(m.chunk_ids) i
        WHERE (s.seq < s.want_seq) IS NOT FALSE AND NOT EXISTS (SELECT FROM {chunks} c WHERE c.id = i)
    ) lacking
"""
_ALL = """
    SELECT * FROM (
        SELECT * FROM documents WHERE tenant = %(tenant)s AND access_id = ANY(%(access)s::bigint[]) LIMIT %(limit)s
    ) d WHERE d.deleted_at IS NULL{chosen}
"""
_SAMPLE = """
    SELECT * FROM documents d WHERE id < %(below)s AND tenant = %(tenant)s AND access_id = ANY(%(access)s::bigint[])
        AND deleted_at IS NULL{chosen} ORDER BY id LIMIT %(limit)s
"""


async def coverage(connection: Connection, scope: ReadScope) -> Coverage:
    """How many readable chunks have no vector yet: chunks of the manifest that are not in the table, of documents whose
    vectors are pending. (Chunks that the model refuses permanently are not pending.)"""
    cursor = await connection.execute(
        "SELECT count(*) FROM (SELECT FROM documents WHERE tenant = %(tenant)s"
        " AND access_id = ANY(%(access)s::bigint[]) LIMIT %(limit)s) counted",
        {**_values(scope), "limit": COVERED_DOCUMENTS + 1},
    )
    [rows] = await cursor.fetchone() or (0,)
    if rows <= COVERED_DOCUMENTS:
        return (await _measure_coverage(connection, scope, None))[1]
    measured = Coverage(0, 0, True)
    for sampled in SAMPLED_ROWS:
        documents, measured = await _measure_coverage(connection, scope, await _sample_bound(connection, sampled))
        if documents >= MIN_SAMPLED_DOCUMENTS:
            break
    return measured


async def _measure_coverage(connection: Connection, scope: ReadScope, below: UUID | None) -> tuple[int, Coverage]:
    cursor = await connection.execute(*build_coverage(scope, below))
    documents, chunks, missing = await cursor.fetchone() or (0, 0, 0)
    return documents, Coverage(int(chunks), int(missing), below is not None)


def build_coverage(scope: ReadScope, below: UUID | None) -> tuple[sql.Composed, dict[str, Any]]:
    """below: the exclusive upper bound of the ids of a sample; None: all documents."""
    documents = sql.SQL(_ALL if below is None else _SAMPLE).format(chosen=conditions(scope.filters))
    statement = sql.SQL(_MISSING).format(documents=documents, chunks=sql.Identifier(scope.generation.chunk_table))
    return statement, {**_values(scope), "limit": COVERED_DOCUMENTS, "below": below}


async def _sample_bound(connection: Connection, sampled: int) -> UUID:
    """An upper bound of ids that selects one to two times ``sampled`` documents. It halves the id space repeatedly, so
    that the sample does not reveal the exact number of documents."""
    cursor = await connection.execute(
        "SELECT greatest(reltuples, 1)::bigint FROM pg_class WHERE oid = to_regclass('documents')"
    )
    [rows] = await cursor.fetchone() or (1,)
    halvings = max(0, (int(rows) // sampled).bit_length() - 1)
    return UUID(int=(1 << (128 - halvings)) - 1)


def _values(scope: ReadScope) -> dict[str, Any]:
    return {
        **values(scope.filters),
        "tenant": scope.tenant,
        "access": list(scope.access_ids),
        "generation": scope.generation.name,
    }
