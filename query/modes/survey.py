"""What a caller may read, counted from the ledger without reading texts, and no further than a decision needs.

Every statement finds documents by tenant and access, takes at most so many, and looks up the rest by key: what it reads
does not grow with the library (tests/contract/query/modes/test_plans.py). Access sets are immutable and those that the
caller satisfies were looked up in the same breath: a document whose access_id is one of them may be read now.
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

FIRST_LOOK = 256
MOST_DOCUMENTS = 16_384
"""Where looking ends, whatever is asked: the tables of so many documents are read in a tenth of a second."""
COVERED_DOCUMENTS = 1_000
"""Up to so many are all asked what they lack; of more, a sample of as many."""
SAMPLED_ROWS = (8_192, 65_536)
"""Of the ledger that a sample is taken from, readable or not: a document's id is a hash, so that any range of ids is
one. The second, where the first holds fewer than LEAST_SAMPLE that may be read."""
LEAST_SAMPLE = 100

LOCAL_SETTINGS = """
    SELECT set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
        set_config('enable_mergejoin', 'off', true), set_config('enable_bitmapscan', 'off', true),
        set_config('statement_timeout', %s, true)
"""
"""A planner that expects the limit to be met soon may read a whole table until it is: only indexes keep the bound."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What may be read, and what of it was chosen: pinned once for one question."""

    generation: Generation
    tenant: str
    tags: frozenset[str]
    access_ids: tuple[int, ...]
    filters: Filters


@dataclass(frozen=True, slots=True)
class Seen:
    """A document that may be read."""

    id: UUID
    at: datetime
    """When its source changed it, as far as we know."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Survey:
    documents: Sequence[Seen]
    """The newest first."""
    complete: bool

    @property
    def size(self) -> Size:
        return Size(sum(seen.tokens for seen in self.documents), len(self.documents), self.complete)


async def of_sources(connection: Connection, readable: Readable, sources: Sequence[str]) -> tuple[int, ...]:
    """The access sets of these sources (tags begin with their source's name); all of them for none."""
    if not sources:
        return readable.access_ids
    cursor = await connection.execute(
        "SELECT id FROM access_sets WHERE id = ANY(%s) AND split_part(acl_tags[1], '/', 1) = ANY(%s)",
        [list(readable.access_ids), list(sources)],
    )
    return tuple(id_ for (id_,) in await cursor.fetchall())


# The limit comes before what is not in the index: else a narrow filter would be looked for through all of it.
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


async def survey(connection: Connection, scope: Scope, *, most_tokens: int | None) -> Survey:
    """What may be read; complete: all of it. most_tokens: where counting may end early; None: at MOST_DOCUMENTS alone.

    Tokens are those of the manifests (counted as the generation's model counts), without what chunks repeat of each
    other, and with what each passage costs besides its text.
    """
    limit = FIRST_LOOK
    while True:
        cursor = await connection.execute(*build(scope, limit=limit + 1))
        rows = await cursor.fetchall()
        seen = [Seen(id_, at, round(tokens)) for id_, at, tokens in rows if tokens is not None]
        complete = len(rows) <= limit
        over = most_tokens is not None and sum(document.tokens for document in seen) > most_tokens
        if complete or over or limit >= MOST_DOCUMENTS:
            seen.sort(key=lambda document: (document.at, document.id), reverse=True)
            return Survey(seen, complete)
        limit = min(MOST_DOCUMENTS, 4 * limit)


def build(scope: Scope, *, limit: int) -> tuple[sql.Composed, dict[str, Any]]:
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


async def coverage(connection: Connection, scope: Scope) -> Coverage:
    """How many of the readable chunks have no vector: a chunk of the manifest that is not in the table, of a document
    whose vectors are not settled. (What the model refuses for good is settled: nobody waits for it.)"""
    cursor = await connection.execute(
        "SELECT count(*) FROM (SELECT FROM documents WHERE tenant = %(tenant)s"
        " AND access_id = ANY(%(access)s::bigint[]) LIMIT %(limit)s) counted",
        {**_values(scope), "limit": COVERED_DOCUMENTS + 1},
    )
    [rows] = await cursor.fetchone() or (0,)
    if rows <= COVERED_DOCUMENTS:
        return (await _covered(connection, scope, None))[1]
    measured = Coverage(0, 0, True)
    for sampled in SAMPLED_ROWS:
        documents, measured = await _covered(connection, scope, await _below(connection, sampled))
        if documents >= LEAST_SAMPLE:
            break
    return measured


async def _covered(connection: Connection, scope: Scope, below: UUID | None) -> tuple[int, Coverage]:
    cursor = await connection.execute(*build_coverage(scope, below))
    documents, chunks, missing = await cursor.fetchone() or (0, 0, 0)
    return documents, Coverage(int(chunks), int(missing), below is not None)


def build_coverage(scope: Scope, below: UUID | None) -> tuple[sql.Composed, dict[str, Any]]:
    """below: of a sample, the id that its documents' ids are less than; None: all of them."""
    documents = sql.SQL(_ALL if below is None else _SAMPLE).format(chosen=conditions(scope.filters))
    statement = sql.SQL(_MISSING).format(documents=documents, chunks=sql.Identifier(scope.generation.chunk_table))
    return statement, {**_values(scope), "limit": COVERED_DOCUMENTS, "below": below}


async def _below(connection: Connection, sampled: int) -> UUID:
    """So that of all documents' ids one to two times ``sampled`` are less; in powers of two, so that the sample does
    not tell how many there are."""
    cursor = await connection.execute(
        "SELECT greatest(reltuples, 1)::bigint FROM pg_class WHERE oid = to_regclass('documents')"
    )
    [rows] = await cursor.fetchone() or (1,)
    halvings = max(0, (int(rows) // sampled).bit_length() - 1)
    return UUID(int=(1 << (128 - halvings)) - 1)


def _values(scope: Scope) -> dict[str, Any]:
    return {
        **values(scope.filters),
        "tenant": scope.tenant,
        "access": list(scope.access_ids),
        "generation": scope.generation.name,
    }
