"""Two tenants whose rows look the same, and the query side's statements with their tenant conditions taken out."""

from __future__ import annotations

import ast
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from pgvector.psycopg import register_vector_async
from psycopg import sql

from pipeline.stores.postgres import Connection
from tests.support.query.library import Library

ROOT = Path(__file__).parents[3]
CONDITION = re.compile(
    r"(?P<column>\b(?:\w+\.)?tenant)\s*=\s*(?P<value>%\(\w+\)s|%s|\w+\.tenant\b|coalesce\([^)]*\))", re.IGNORECASE
)
AROUND = 60
"""Characters of a statement by which a condition in it is known again."""


@dataclass(frozen=True)
class Site:
    """A tenant condition in a statement's text."""

    file: str
    text: str
    """With what stands around it, white space made one."""


def flat(text: str) -> str:
    return " ".join(text.split())


def sites(*folders: str) -> set[Site]:
    """Return every string in these modules that compares a tenant."""
    results = set()
    for folder in folders:
        path = ROOT / folder
        for module in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(module.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    results |= {Site(str(module.relative_to(ROOT)), text) for text in _conditions(node.value)}
    return results


def _conditions(text: str) -> Iterator[str]:
    """Without what is filled in around it, and what it was written in one with."""
    for piece in re.split(r"\{\w*\}", text):
        for match in CONDITION.finditer(piece):
            yield flat(piece[max(0, match.start() - AROUND) : match.end() + AROUND])


def without_conditions(text: str) -> str:
    return CONDITION.sub(lambda m: "(%s::text IS NOT NULL)" if m["value"] == "%s" else "true", text)


@dataclass
class Mutating:
    """A connection of the query service that asks everything without its tenant conditions, and remembers what came of
    it: there, and for a login that nothing holds back."""

    held: Connection
    free: Connection
    known: Sequence[Site]
    results: list[tuple[str, Any]] = field(default_factory=list)
    covered: set[Site] = field(default_factory=set)
    leaking: set[Site] = field(default_factory=set)
    """Whose statement would have shown another tenant's rows, or changed them."""

    async def execute(self, statement: Any, values: Any = None, **options: Any) -> Any:
        if isinstance(statement, sql.Composable):
            statement = statement.as_string(self.held)
        text = statement.decode() if isinstance(statement, bytes) else statement
        mutant = without_conditions(text)
        if mutant == text:
            return await self.held.execute(text.encode(), values, **options)
        async with self.free.transaction(force_rollback=True):  # first: what the other one writes it would wait for
            would = await _rows(await self.free.execute(mutant.encode(), values, **options))
        shown = await _rows(await self.held.execute(mutant.encode(), values, **options))
        here = {site for site in self.known if site.text in flat(text)}
        self.covered |= here
        if would != shown:
            self.leaking |= here
        self.results.append((flat(text), shown))
        return Fetched(shown)

    def transaction(self, **options: Any) -> Any:
        return self.held.transaction(**options)

    def pipeline(self) -> Any:
        """None: statements are looked at one by one."""
        return _nothing()


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


async def _rows(cursor: Any) -> list[Any]:
    return await cursor.fetchall() if cursor.description else [("changed", cursor.rowcount)]


@dataclass
class Fetched:
    rows: list[Any]

    @property
    def rowcount(self) -> int:
        return int(self.rows[0][1]) if self.rows and self.rows[0][0] == "changed" else len(self.rows)

    async def fetchall(self) -> list[Any]:
        return self.rows

    async def fetchone(self) -> Any:
        return self.rows[0] if self.rows else None


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await register_vector_async(connection)
        yield connection


_TENANT = """
    INSERT INTO access_sets (tenant, digest, acl_tags, required_tags)
        VALUES (%(tenant)s, sha256('staff'), '{wiki/staff}', '{}');
    INSERT INTO documents (id, tenant, source, external_id, seq, version, access_id, content_hash, title, media_type,
            author, source_modified_at, keys)
        SELECT md5(%(tenant)s || n)::uuid, %(tenant)s,
            CASE WHEN %(tenant)s <> 'anna' AND n > 10 THEN 'mail' ELSE 'wiki' END,
            n || '.md', n, 1, a.id, '\\x00',
            'Title of ' || %(tenant)s || n, 'text/plain', 'ann', now() - n * interval '1 hour',
            ARRAY['team=' || %(tenant)s]
        FROM generate_series(1, 12) n, access_sets a WHERE a.tenant = %(tenant)s;
    INSERT INTO document_bodies SELECT id, 'Text of ' || tenant, '{}' FROM documents WHERE tenant = %(tenant)s;
    INSERT INTO document_events (document_id, slot, kind, outcome, lane)
        SELECT id, 0, 'upsert', 'created', 'live' FROM documents WHERE tenant = %(tenant)s;
    INSERT INTO chunks_g1 (id, document_id, tenant, access_id, text, embedding)  -- one row as of an older version
        SELECT md5('chunk' || d.id)::uuid, d.id, CASE WHEN d.seq > 1 THEN tenant END, d.access_id,
            'Text of ' || tenant || d.seq,
            (SELECT array_agg(cos(k * d.seq + length(tenant))) FROM generate_series(1, 64) k)::halfvec
        FROM documents d WHERE tenant = %(tenant)s;
    INSERT INTO manifests
        SELECT document_id, 'g1', '\\x00', ARRAY[c.id], ARRAY[3], '[[[0, 4]]]', '[[]]'
        FROM chunks_g1 c JOIN documents d ON d.id = document_id WHERE d.tenant = %(tenant)s;
    INSERT INTO index_state (document_id, generation, store, want_seq, seq, settled_at)
        SELECT id, 'g1', store, seq, seq, now()
        FROM documents, unnest(ARRAY['vectors', 'keywords']) store WHERE tenant = %(tenant)s;
    INSERT INTO metadata_keys (tenant, name, type) VALUES
        (%(tenant)s, 'team', 'keyword'), (%(tenant)s, 'of-' || %(tenant)s, 'keyword');
    INSERT INTO memberships VALUES (%(tenant)s, 'wiki', 'ann', ARRAY['of-' || %(tenant)s], now());
    INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, document_id, tenant, source,
            external_id, first_failed_at, at, letter_partition, letter_offset)
        SELECT %(tenant)s || seq, 't', 0, seq, 'detect', 'invalid', 'of ' || tenant, id, tenant, source, external_id,
            now(), now(), 0, seq
        FROM documents WHERE tenant = %(tenant)s AND seq <= 3;
    INSERT INTO conversation_members (tenant, member, tokens, is_chunked, chunked_at)
        VALUES (%(tenant)s, 'ann', 60, false, NULL), (%(tenant)s, 'bob', 60, true, now());
    INSERT INTO conversation_pairs
        SELECT %(tenant)s, member, sha256((member || n)::bytea), now() - n * interval '1 s', 20, 'Q' || %(tenant)s || n,
            'A' || %(tenant)s || n
        FROM generate_series(1, 3) n, unnest(ARRAY['ann', 'bob']) member;
    INSERT INTO conversation_mentions (tenant, member, digest, source, conversation, asked_at, observed_at, answer_id)
        SELECT tenant, member, digest, 'chat', 'c', asked_at, asked_at, md5(encode(digest, 'hex'))::uuid
        FROM conversation_pairs WHERE tenant = %(tenant)s;
    INSERT INTO conversation_provenance
        SELECT DISTINCT m.tenant, m.answer_id, ARRAY(
            SELECT md5(%(tenant)s || n)::uuid FROM generate_series(1, CASE %(tenant)s WHEN 'anna' THEN 2 ELSE 1 END) n)
        FROM conversation_mentions m WHERE tenant = %(tenant)s;
    INSERT INTO conversation_chunks (tenant, member, digest, position, first_at, last_at, tokens, text, embedding,
            made_by)
        SELECT %(tenant)s, 'bob', sha256('chunk'), 0, now(), now(), 20, 'Q of ' || %(tenant)s,
            (SELECT array_agg(0.1) FROM generate_series(1, 64))::halfvec, %(maker)s
        UNION ALL
        SELECT %(tenant)s, 'bob', sha256('waits'), 1, now(), now(), 20, 'Q of ' || %(tenant)s, NULL, NULL;
    INSERT INTO connector_freshness (tenant, source, epoch, tracked_since, every_seconds, complete_until)
        VALUES (%(tenant)s, 'wiki', 1, now(), 60, now());
    INSERT INTO answer_provenance VALUES (%(tenant)s, md5('answer' || %(tenant)s)::uuid, '{}');
    INSERT INTO answer_reviews (answer_id, tenant, question, mode, model, support, density, reasons, documents, chunks,
            answer, unsupported)
        VALUES (md5('answer' || %(tenant)s)::uuid, %(tenant)s, 'Q of ' || %(tenant)s, 'hybrid', 'm', 0, 0, '{}',
            ARRAY[md5(%(tenant)s || 1)::uuid], '{}', 'A of ' || %(tenant)s, '{}');
    INSERT INTO answer_reviews (answer_id, tenant, question, mode, model, support, density, reasons, documents, chunks,
            answer, unsupported, resolved_at, resolved_as)
        VALUES (md5('right' || %(tenant)s)::uuid, %(tenant)s, 'Q of ' || %(tenant)s, 'hybrid', 'm', 0, 0, '{}',
            ARRAY[md5(%(tenant)s || 1)::uuid], '{}', 'A of ' || %(tenant)s, '{}', now(), 'right');
    INSERT INTO answer_feedback (tenant, giver, subject, answer_id, verdict, note)
        VALUES (%(tenant)s, sha256('ann'), sha256('s'), md5('answer' || %(tenant)s)::uuid, 'up', 'of ' || %(tenant)s);
    INSERT INTO answer_feedback (tenant, giver, subject, chunk_id, query, verdict)
        VALUES (%(tenant)s, sha256('ann'), sha256('passage'),
            md5('chunk' || md5(%(tenant)s || 1)::uuid)::uuid, 'Q of ' || %(tenant)s, 'up');
    INSERT INTO conflicts (id, tenant, generation, kind, document_a, document_b, chunk_a, chunk_b, places)
        SELECT md5('conflict' || %(tenant)s)::uuid, %(tenant)s, 'g1', 'number', a.document_id, b.document_id, a.id,
            b.id, '[["number", [0, 4], [0, 4]]]'
        FROM chunks_g1 a, chunks_g1 b
        WHERE a.document_id = md5(%(tenant)s || 1)::uuid AND b.document_id = md5(%(tenant)s || 2)::uuid;
    INSERT INTO conflict_decisions (conflict_id, tenant, state)
        VALUES (md5('conflict' || %(tenant)s)::uuid, %(tenant)s, 'accepted');
    INSERT INTO eval_queries (id, tenant, text, principals, tags, reference)
        VALUES (md5('golden' || %(tenant)s)::uuid, %(tenant)s, 'Q', '{ann}', '{}', 'A of ' || %(tenant)s);
    INSERT INTO eval_judgements (query_id, source, external_id, anchor, gain)
        VALUES (md5('golden' || %(tenant)s)::uuid, 'wiki', '1.md', 'Text of ' || %(tenant)s, 1);
    INSERT INTO standing_questions (tenant, id, principal, question, request, sentences, generation)
        SELECT %(tenant)s, md5('standing' || n)::uuid, 'ann', 'Q of ' || %(tenant)s, '{}',
            jsonb_build_array(jsonb_build_object('text', 'A of ' || %(tenant)s, 'cites', jsonb_build_array(1))), 'g1'
        FROM generate_series(1, 3) n;
    INSERT INTO standing_passages (tenant, question_id, n, chunk_id, document_id)
        SELECT %(tenant)s, md5('standing' || q)::uuid, 1000 + n, md5('chunk' || md5(of || n)::uuid)::uuid,
            md5(of || n)::uuid
        FROM generate_series(1, 2) q, generate_series(1, 4) n, unnest(ARRAY['anna', 'berta']) of;
    INSERT INTO standing_changes (tenant, question_id, kind, chunk_id, document_id, asked_at)
        SELECT %(tenant)s, q.id, 'new', md5('new' || of || n)::uuid, md5(of || n)::uuid, q.asked_at
        FROM standing_questions q, generate_series(1, 4) n, unnest(ARRAY['anna', 'berta']) of
        WHERE q.tenant = %(tenant)s AND q.id = md5('standing1')::uuid;
"""


async def fill(library: Library, tenant: str, maker: str) -> None:
    async with library.pool.connection() as connection:
        for statement in _TENANT.split(";\n"):
            if statement.strip():
                await connection.execute(statement.encode(), {"tenant": tenant, "maker": maker})


async def empty(library: Library, tenant: str) -> None:
    """Nothing of it is left."""
    of = "document_id IN (SELECT id FROM documents WHERE tenant = %(tenant)s)"
    async with library.pool.connection() as connection:
        for table in ("chunks_g1", "manifests", "index_state", "document_bodies", "document_events"):
            await connection.execute(f"DELETE FROM {table} WHERE {of}".encode(), {"tenant": tenant})
        for table in (
            "conflict_decisions",
            "conflicts",
            "documents",
            "access_sets",
            "memberships",
            "metadata_keys",
            "dead_letters",
            "conversation_mentions",
            "conversation_pairs",
            "conversation_chunks",
            "conversation_members",
            "conversation_provenance",
            "answer_provenance",
            "answer_reviews",
            "answer_feedback",
            "eval_queries",
            "connector_freshness",
            "standing_questions",
        ):
            await connection.execute(f"DELETE FROM {table} WHERE tenant = %(tenant)s".encode(), {"tenant": tenant})


@dataclass(frozen=True)
class Ids:
    """The ids of both tenants together."""

    documents: list[UUID]
    chunks: Mapping[UUID, UUID]
    """Chunk → its document."""
    access: tuple[int, ...]
    answers: list[UUID]


async def ids_of(library: Library) -> Ids:
    documents = [id_ for (id_,) in await library.execute("SELECT id FROM documents ORDER BY tenant, seq")]
    chunks = dict(await library.execute("SELECT id, document_id FROM chunks_g1 ORDER BY id"))
    access = tuple(id_ for (id_,) in await library.execute("SELECT id FROM access_sets ORDER BY id"))
    answers = [id_ for (id_,) in await library.execute("SELECT answer_id FROM answer_reviews ORDER BY tenant DESC")]
    return Ids(documents, chunks, access, answers)
