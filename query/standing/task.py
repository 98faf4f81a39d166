"""The task of the analysis worker that notices which standing questions a change invalidates, and announces it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import structlog
from psycopg import sql
from pydantic import ValidationError

from pipeline.analysis.memberships import Memberships, latest
from pipeline.analysis.task import Services
from pipeline.analysis.tasks import TOPICS
from pipeline.core.model import Generation
from pipeline.kafka.client import deliver
from pipeline.ledger import generations
from pipeline.stores.postgres import Connection, translated
from query.access.callers import identify
from query.access.verify import verify
from query.embedding.embedders import Embedders
from query.modes.filters import effective_filters
from query.settings import RetrievalSettings
from query.standing import table
from query.standing.model import KINDS, Kind, Source, affected, by_kind, question_of
from query.standing.probe import ENTERS
from query.standing.renewal import Renewal
from query.standing.word_index import WordIndex, WordIndexes, best
from query.standing.words import of_passage
from topics.messages import AnswerInvalidated, DocumentIndexed, IdentityChanged, Message
from topics.registry import ANSWERS_INVALIDATED

log = structlog.get_logger()

SOURCE = "standing"
"""The ``source`` of the events."""
NEW_HOURS = 24
"""A chunk counts as new if it was embedded so long before its document was announced, at most: each announcement names
a document, and not which of its chunks are new. Embedding may lag behind by hours."""
NEAREST = 100
"""The most questions that one new chunk invalidates: those that it answers best."""
MOST_NEW = 100
"""The most documents with new passages that are announced of an answer in NEW_MINUTES, and the most that are recorded,
the newest. Of a question about everything it would be every document, and all of them are read whenever its asker lists
the questions."""
NEW_MINUTES = 60
CHUNKS_AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Question:
    """A standing question, as far as the task needs it."""

    tenant: str
    id: UUID
    principal: str
    behind: Sequence[Sequence[int]]
    """The passages behind each sentence."""
    asked_at: datetime
    text: str
    request: Any


class StandingTask:
    """Law: what invalidates a standing question is announced at least once, and recorded in ``standing_changes`` after
    that. A question is found by the documents of its passages, by its asker, or by its probe: the cost of a change
    depends on the questions that it concerns, and not on their number."""

    name = "standing"
    topics = TOPICS[name]

    def __init__(self, services: Services, *, embedders: Embedders | None = None) -> None:
        """embedders: replace those of the settings."""
        self._pool = services.pool
        self._memberships = Memberships(services.pool, services.settings.kafka)
        self._renewal = Renewal(services.pool, services.settings.embedding, RetrievalSettings(), embedders=embedders)
        self._words = WordIndexes()
        self._producer = services.producer
        self._metrics = services.metrics

    async def handle(self, messages: Sequence[Message]) -> None:
        """Raises Retryable."""
        until = latest()
        changed = [message for message in messages if isinstance(message, DocumentIndexed)]
        people = [message for message in messages if isinstance(message, IdentityChanged)]
        for tenant in dict.fromkeys(message.tenant for message in (*changed, *people)):
            with translated("standing questions"):
                async with self._pool.connection() as connection:
                    if not await _has_any(connection, tenant):
                        continue
            of_tenant = [message for message in changed if message.tenant == tenant]
            await self._passages(tenant, {UUID(message.document_id) for message in of_tenant})
            await self._people(tenant, [message for message in people if message.tenant == tenant], until)
            searchable = {
                UUID(message.document_id): message.observed_at
                for message in of_tenant
                if message.state in ("searchable", "partial")
            }
            await self._entered(tenant, searchable)

    async def _passages(self, tenant: str, documents: Collection[UUID]) -> None:
        """Questions with a passage of these documents."""
        if not documents:
            return
        with translated("standing questions"):
            async with self._pool.connection() as connection:
                questions = await _questions(connection, _BY_DOCUMENT, {"tenant": tenant, "ids": list(documents)})
        await self._compare(questions)

    async def _people(self, tenant: str, changes: Sequence[IdentityChanged], until: datetime) -> None:
        """Questions of people whose groups have changed, once the ledger has the change, but not after ``until``: what
        a record says of its time is its producer's, and the ledger may refuse it."""
        for principal in dict.fromkeys(change.principal for change in changes):
            with translated("standing questions"):
                async with self._pool.connection() as connection:
                    questions = await _questions(connection, _BY_ASKER, {"tenant": tenant, "principal": principal})
            if not questions:
                continue
            of_principal = [change for change in changes if change.principal == principal]
            await self._memberships.until_applied(of_principal, until)
            await self._compare(questions)

    async def _compare(self, questions: Sequence[Question]) -> None:
        """Announce and record what became of the passages of these questions since the last look."""
        for question in questions:
            with translated("standing questions"):
                async with self._pool.connection() as connection:
                    caller = await identify(connection, question.tenant, principals=[question.principal])
                    sources = (await table.sources(connection, caller, [question.id])).get(question.id, [])
                    known = await _known(connection, question)
            now = {(source.change, source.chunk_id): source for source in sources if source.change is not None}
            fresh = [source for key, source in now.items() if key not in known]
            over = [key for key in known if key not in now and key[0] != "new"]
            await self._announce(question, fresh)
            await self._record(question, fresh, over)

    async def _entered(self, tenant: str, documents: dict[UUID, datetime]) -> None:
        """Questions whose context a new chunk of these documents would enter: of a long document, the first that
        does."""
        if not documents:
            return
        with translated("standing questions"):
            async with self._pool.connection() as connection:
                generation = await generations.active(connection)
        await self._renewal.of_tenant(tenant, generation)
        with translated("standing questions"):
            async with self._pool.connection() as connection:
                since = min(documents.values()) - timedelta(hours=NEW_HOURS)
                chunks = await _new_chunks(connection, generation, list(documents), since)
        decided = set[tuple[UUID, UUID]]()
        for n in range(0, len(chunks), CHUNKS_AT_ONCE):
            with translated("standing questions"):
                async with self._pool.connection() as connection:
                    some = chunks[n : n + CHUNKS_AT_ONCE]
                    pairs = await _nearest(connection, generation, tenant, some)
                    indexes = await self._words.of(connection, tenant)
                    ids = [chunk for chunk, _ in some]
                    pairs += await _with_its_words(connection, generation, tenant, ids, indexes)
            for question, source in pairs:
                key = question.id, source.document_id
                if key in decided:
                    continue
                decided.add(key)
                if await self._would_read(question, source, generation):
                    await self._announce(question, [source])
                    await self._record(question, [source], [])

    async def _would_read(self, question: Question, source: Source, generation: Generation) -> bool:
        """Whether the asker may read the chunk, and the question's filters let it in."""
        try:
            filters = effective_filters(question_of(question.text, question.request))
        except (ValidationError, KeyError, TypeError, ValueError):  # a row that is not ours must not stop the others
            log.warning("standing_question_unreadable", question=str(question.id))
            return False
        with translated("standing questions"):
            async with self._pool.connection() as connection:
                caller = await identify(connection, question.tenant, principals=[question.principal])
                return bool(await verify(connection, generation.name, caller, [source], filters))

    async def _announce(self, question: Question, sources: Iterable[Source]) -> None:
        changed = by_kind(sources)
        everything = list(range(1, len(question.behind) + 1))
        events = [
            AnswerInvalidated(
                tenant=question.tenant,
                source=SOURCE,
                observed_at=datetime.now(UTC),
                question_id=question.id,
                change=kind,
                sentences=everything if kind == "new" else affected(question.behind, changed[kind]),
                asked_at=question.asked_at,
            )
            for kind in KINDS
            if kind in changed
        ]
        await deliver(self._producer.send(ANSWERS_INVALIDATED, event) for event in events)
        for event in events:
            self._metrics.answers_invalidated.labels(event.change).inc()

    async def _record(self, question: Question, fresh: Sequence[Source], over: Sequence[tuple[Kind, UUID]]) -> None:
        if not fresh and not over:
            return
        with translated("standing questions"):
            async with self._pool.connection() as connection:
                await connection.execute(
                    _RECORD,
                    {
                        "tenant": question.tenant,
                        "question": question.id,
                        "asked_at": question.asked_at,
                        "kinds": [source.change for source in fresh],
                        "chunks": [source.chunk_id for source in fresh],
                        "documents": [source.document_id for source in fresh],
                    },
                )
                await connection.execute(
                    "DELETE FROM standing_changes WHERE tenant = %s AND question_id = %s AND (asked_at < %s"
                    " OR (kind, chunk_id) IN (SELECT * FROM unnest(%s::text[], %s::uuid[])))",
                    [question.tenant, question.id, question.asked_at, [k for k, _ in over], [c for _, c in over]],
                )
                if any(source.change == "new" for source in fresh):
                    values = {"tenant": question.tenant, "question": question.id, "most_new": MOST_NEW}
                    await connection.execute(_KEEP_NEWEST, values)


async def _has_any(connection: Connection, tenant: str) -> bool:
    cursor = await connection.execute("SELECT FROM standing_questions WHERE tenant = %s LIMIT 1", [tenant])
    return await cursor.fetchone() is not None


_QUESTION = """
    q.tenant, q.id, q.principal, jsonb_path_query_array(q.sentences, '$[*].cites'), q.asked_at, q.question, q.request
"""
_BY_DOCUMENT = f"""
    SELECT {_QUESTION} FROM standing_questions q WHERE (q.tenant, q.id) IN (
        SELECT p.tenant, p.question_id FROM standing_passages p
        WHERE p.document_id = ANY(%(ids)s::uuid[]) AND p.tenant = %(tenant)s
    ) ORDER BY q.id
"""  # noqa: S608 — constants of this module
_BY_ASKER = f"""
    SELECT {_QUESTION} FROM standing_questions q WHERE q.tenant = %(tenant)s AND q.principal = %(principal)s
    ORDER BY q.id
"""  # noqa: S608 — constants of this module


async def _questions(connection: Connection, statement: str, values: dict[str, Any]) -> list[Question]:
    cursor = await connection.execute(statement.encode(), values)
    return [Question(*row) for row in await cursor.fetchall()]


async def _known(connection: Connection, question: Question) -> set[tuple[Kind, UUID]]:
    """The changes of this answer that were announced before."""
    cursor = await connection.execute(
        "SELECT kind, chunk_id FROM standing_changes WHERE tenant = %s AND question_id = %s AND asked_at = %s",
        [question.tenant, question.id, question.asked_at],
    )
    return set(await cursor.fetchall())


_RECORD = """
    INSERT INTO standing_changes AS c (tenant, question_id, kind, chunk_id, document_id, asked_at)
    SELECT q.tenant, q.id, n.kind, n.chunk_id, n.document_id, %(asked_at)s
    FROM unnest(%(kinds)s::text[], %(chunks)s::uuid[], %(documents)s::uuid[]) AS n (kind, chunk_id, document_id)
    JOIN standing_questions q ON q.tenant = %(tenant)s AND q.id = %(question)s
    ON CONFLICT (tenant, question_id, kind, chunk_id) DO UPDATE
        SET asked_at = excluded.asked_at, document_id = excluded.document_id, noticed_at = clock_timestamp()
        WHERE c.asked_at < excluded.asked_at
"""
"""A question that was removed meanwhile leaves nothing."""


_KEEP_NEWEST = """
    DELETE FROM standing_changes c USING (
        SELECT c.chunk_id FROM standing_changes c LEFT JOIN documents d ON d.id = c.document_id AND d.tenant = c.tenant
        WHERE c.tenant = %(tenant)s AND c.question_id = %(question)s AND c.kind = 'new'
        ORDER BY d.deleted_at IS NULL AND d.id IS NOT NULL DESC, c.noticed_at DESC OFFSET %(most_new)s
    ) others
    WHERE c.tenant = %(tenant)s AND c.question_id = %(question)s AND c.kind = 'new' AND c.chunk_id = others.chunk_id
"""
"""Those of documents that do not exist any more go first."""


def _bounds() -> dict[str, int]:
    return {"most_new": MOST_NEW, "minutes": NEW_MINUTES}


async def _new_chunks(
    connection: Connection, generation: Generation, documents: Sequence[UUID], since: datetime
) -> list[tuple[UUID, UUID]]:
    """(chunk, document) of what was embedded since then, and is still in its document."""
    cursor = await connection.execute(
        sql.SQL(
            "SELECT c.id, c.document_id FROM manifests m CROSS JOIN unnest(m.chunk_ids) of (id)"
            " JOIN {} c ON c.id = of.id"
            " WHERE m.document_id = ANY(%s::uuid[]) AND m.generation = %s AND c.created_at >= %s ORDER BY c.created_at"
        ).format(sql.Identifier(generation.chunk_table)),
        [list(documents), generation.name, since],
    )
    return list(await cursor.fetchall())


_UNKNOWN = """
    NOT EXISTS (
        SELECT FROM standing_passages p
        WHERE p.tenant = q.tenant AND p.question_id = q.id AND p.chunk_id = %(chunk)s
    ) AND NOT EXISTS (
        SELECT FROM standing_changes c WHERE c.tenant = q.tenant AND c.question_id = q.id
          AND c.kind = 'new' AND c.document_id = %(document)s AND c.asked_at >= q.asked_at
    ) AND (
        SELECT count(*) FROM (
            SELECT FROM standing_changes c JOIN documents d ON d.id = c.document_id AND d.tenant = c.tenant
            WHERE c.tenant = q.tenant AND c.question_id = q.id AND c.kind = 'new' AND c.asked_at >= q.asked_at
              AND c.noticed_at > clock_timestamp() - make_interval(mins => %(minutes)s) AND d.deleted_at IS NULL
            LIMIT %(most_new)s
        ) announced
    ) < %(most_new)s
"""
"""The question does not know the chunk: it is none of its passages, and none of its document was announced before; nor
were MOST_NEW documents that still exist in the last NEW_MINUTES."""


async def _nearest(
    connection: Connection, generation: Generation, tenant: str, chunks: Sequence[tuple[UUID, UUID]]
) -> list[tuple[Question, Source]]:
    """The questions whose probe a chunk passes, the best first, without those that know it: it is one of their
    passages, is older than their answer, or another chunk of its document was announced before."""
    dimensions = generation.dimensions + 1
    async with connection.transaction():
        await connection.execute("SET LOCAL hnsw.iterative_scan = 'strict_order'")
        await connection.execute(sql.SQL("SET LOCAL hnsw.ef_search = {}").format(sql.Literal(NEAREST)))
        rows = []
        for chunk, document in chunks:
            cursor = await connection.execute(
                sql.SQL("""
                    WITH one AS MATERIALIZED (
                        SELECT (c.embedding::real[] || 0::real)::halfvec({dimensions}) AS vector, c.created_at
                        FROM {table} c WHERE c.id = %(chunk)s
                    ), nearest AS MATERIALIZED (
                        SELECT q.tenant, q.id, q.probe::halfvec({dimensions}) <-> (SELECT vector FROM one) AS distance
                        FROM standing_questions q
                        WHERE q.probe_generation = {generation} AND q.tenant = %(tenant)s
                        ORDER BY q.probe::halfvec({dimensions}) <-> (SELECT vector FROM one) LIMIT %(most)s
                    )
                    SELECT {question} FROM nearest n JOIN standing_questions q ON q.tenant = n.tenant AND q.id = n.id
                    WHERE n.distance < {enters} AND q.asked_at <= (SELECT created_at FROM one) AND {unknown}
                    ORDER BY n.distance
                """).format(
                    dimensions=sql.Literal(dimensions),
                    enters=sql.Literal(ENTERS),
                    table=sql.Identifier(generation.chunk_table),
                    generation=sql.Literal(generation.name),
                    question=sql.SQL(_QUESTION),
                    unknown=sql.SQL(_UNKNOWN),
                ),
                {"chunk": chunk, "document": document, "tenant": tenant, "most": NEAREST, **_bounds()},
                prepare=False,
            )
            rows += [(Question(*row), Source(0, chunk, document, "new")) for row in await cursor.fetchall()]
    return rows


async def _with_its_words(
    connection: Connection,
    generation: Generation,
    tenant: str,
    chunks: Sequence[UUID],
    indexes: tuple[WordIndex, WordIndex],
) -> list[tuple[Question, Source]]:
    """The questions that a chunk has enough words of, the best first, without those that know it. indexes: those of
    the tenant."""
    cursor = await connection.execute(
        sql.SQL(
            "SELECT c.id, c.document_id, coalesce(d.title, '') || E'\\n' || c.text, c.created_at FROM {} c"
            " JOIN documents d ON d.id = c.document_id WHERE c.id = ANY(%s::uuid[])"
        ).format(sql.Identifier(generation.chunk_table)),
        [list(chunks)],
    )
    rows = []
    for chunk, document, text, created_at in await cursor.fetchall():
        ids = await asyncio.to_thread(_by_words, tenant, text, indexes)
        values = {"tenant": tenant, "chunk": chunk, "document": document, "created_at": created_at, **_bounds()}
        unknowing: list[Question] = []
        while ids and len(unknowing) < NEAREST:  # nearly always the best do not know it
            most = NEAREST - len(unknowing)
            cursor = await connection.execute(_UNKNOWING, values | {"ids": ids[:NEAREST], "most": most})
            unknowing += [Question(*row) for row in await cursor.fetchall()]
            ids = ids[NEAREST:]
        rows += [(question, Source(0, chunk, document, "new")) for question in unknowing]
    return rows


LOOKED_AT = 2 * NEAREST
"""The most questions with a chunk's words that are looked up: some know the chunk already."""


def _by_words(tenant: str, text: str, indexes: tuple[WordIndex, WordIndex]) -> list[UUID]:
    return best(indexes, of_passage(tenant, text), LOOKED_AT)


_UNKNOWING = f"""
    SELECT {_QUESTION} FROM unnest(%(ids)s::uuid[]) WITH ORDINALITY s (id, place)
    JOIN standing_questions q ON q.tenant = %(tenant)s AND q.id = s.id
    WHERE q.asked_at <= %(created_at)s AND {_UNKNOWN}
    ORDER BY s.place LIMIT %(most)s
""".encode()  # noqa: S608 — constants of this module
