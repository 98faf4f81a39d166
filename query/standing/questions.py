"""Keeps answers as standing questions, shows them to their asker, and asks them again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from uuid import UUID, uuid4
from weakref import WeakValueDictionary

import structlog

from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.ledger import generations
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection, Pool, translated
from query.access.callers import Caller
from query.access.tenant_rows import rows_of
from query.answers.model import Answer, Sources
from query.limits.charging import charge
from query.model import BadQuery
from query.modes.material import Question
from query.retrieval.search import Search
from query.settings import RetrievalSettings
from query.standing import table
from query.standing.model import Line, Standing, Summary, difference, question_of, request_json, sentences_of
from query.standing.probe import probe
from query.standing.renewal import Outdated, embed_again
from query.standing.words import words_of

log = structlog.get_logger()

MAX_REQUEST_BYTES = 16_384
"""The longest filters of a standing question: of each of them all are read to list a person's questions, to preview an
edit, and when a document or a membership changes. A request may have 40 times as much."""


class Unknown(PenstockError):
    """The caller has no such standing question; the error does not reveal whether another one has."""

    def __init__(self) -> None:
        super().__init__("you have no such standing question: see `penstock standing list` or GET /v1/standing")


def _forgotten() -> BadQuery:
    return BadQuery("what is stored about you was erased while this question was answered: ask it again")


class StandingQuestions:
    """Standing questions belong to a principal of a tenant, and nobody else sees them. Safe to share between tasks.

    Law: a sentence is returned only while its asker may read every passage behind it, by the ledger at that moment. All
    methods raise Retryable when Postgres is away or slow.
    """

    def __init__(
        self, pool: Pool, search: Search, settings: RetrievalSettings, *, most: int, ledger_seconds: float
    ) -> None:
        """most: the most standing questions of one principal."""
        self._pool = pool
        self._search = search
        self._settings = settings
        self._most = most
        self._seconds = ledger_seconds
        self._keeping: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By tenant and principal, where a question is just kept: others of this process are counted after it. Not a
        lock of Postgres: this login may take none, so that one that was taken over delays nobody (1-roles.sql)."""

    async def check_room(self, tenant: str, principal: str, question: Question) -> datetime:
        """Returns this moment, for ``keep``. Raises BadQuery where the principal may keep no further question, or not
        this one."""
        if question.turns or question.member is not None:
            raise BadQuery("a standing question stands alone: it cannot be kept with `turns` or `history`")
        if "\x00" in question.text:
            raise BadQuery("a standing question must not contain U+0000")
        size = len(json.dumps(request_json(question), ensure_ascii=False).encode())
        if size > MAX_REQUEST_BYTES:
            raise BadQuery(
                f"the documents and filters of this question take {size:,} bytes; those of a standing question take at"
                f" most {MAX_REQUEST_BYTES:,}"
            )
        async with self._ledger(tenant) as connection:
            await self._require_room(connection, tenant, principal)
            return await table.moment(connection)

    async def _require_room(self, connection: Connection, tenant: str, principal: str) -> None:
        if await table.count(connection, tenant, principal) >= self._most:
            raise BadQuery(f"you have {self._most} standing questions, which is the most: remove one first")

    async def keep(
        self,
        caller: Caller,
        principal: str,
        question: Question,
        answer: Answer,
        material: Sources,
        *,
        id_: UUID | None = None,
        since: datetime | None = None,
    ) -> UUID:
        """Keep an answer with the passages that the model read. id_: of the question that was asked again. since: when
        a new one was asked. Raises Unknown where the question was removed meanwhile, and BadQuery where there is no
        room for another one, or the principal was forgotten since then."""
        passages = material.passages
        async with self._ledger(caller.tenant) as connection:
            generation = await generations.active(connection)
        chunks = [(p.n, chunk, p.result.passage.document_id) for p in passages for chunk in p.result.chunk_ids]
        by_vector = [
            chunk for p in passages if "vector" in p.result.ranks or not p.result.ranks for chunk in p.result.chunk_ids
        ]
        documents = [document for *_, document in chunks]
        texts = [f"{passage.result.passage.title}\n{passage.result.text}" for passage in passages]
        vector = await self._vector(caller, question.text, generation)
        words = await asyncio.to_thread(
            words_of,
            caller.tenant,
            question.text,
            texts,
            is_full=material.is_full,
            coverage=self._settings.coverage_floor,
        )
        keeping = self._keeping.setdefault((caller.tenant, principal), asyncio.Lock())
        async with time_limit(self._seconds, "Postgres"), keeping, self._ledger(caller.tenant) as connection:
            made = None
            if vector is not None:
                made = await probe(
                    connection, generation, vector, by_vector, documents, self._settings, is_full=material.is_full
                )
            entry = table.NewAnswer(
                id_ or uuid4(),
                principal,
                question.text,
                request_json(question),
                sentences_of(answer, passages),
                answer.model,
                generation.name,
                chunks,
                made,
                material.is_full,
                words,
            )
            if id_ is None:  # again: others may have been kept while this one was answered
                await self._require_room(connection, caller.tenant, principal)
            elif not await table.rows(connection, caller.tenant, principal, id_=id_):
                raise Unknown
            if not await table.store(connection, caller.tenant, entry):
                raise Unknown
            if since is not None and await table.is_forgotten(connection, principal, since):
                raise _forgotten()
        if since is not None:  # again: an erasure that began before the commit has not seen the row
            async with time_limit(self._seconds, "Postgres"), self._ledger(caller.tenant) as connection:
                if forgotten := await table.is_forgotten(connection, principal, since):
                    await table.remove(connection, caller.tenant, principal, entry.id)
            if forgotten:
                raise _forgotten()
        charge(stored=table.stored_bytes(entry))
        return entry.id

    async def every(self, caller: Caller, principal: str) -> list[Summary]:
        async with self._ledger(caller.tenant) as connection:
            return await table.summaries(connection, caller, principal)

    async def show(self, caller: Caller, principal: str, id_: UUID) -> Standing:
        """Raises Unknown."""
        standing, _ = await self._one(caller, principal, id_)
        return standing

    async def question(self, caller: Caller, principal: str, id_: UUID) -> tuple[Standing, Question]:
        """The standing question with what to ask again. Raises Unknown."""
        standing, row = await self._one(caller, principal, id_)
        return standing, question_of(row.question, row.request)

    async def renew(
        self,
        caller: Caller,
        principal: str,
        before: Standing,
        question: Question,
        answer: Answer,
        material: Sources,
    ) -> list[Line]:
        """Store the new answer in the place of the old one, and return the difference. A model may have written for
        minutes since ``before`` was read: of the old answer, it has the sentences that its asker may read now. Raises
        Unknown."""
        now = await self._search.identify(caller.tenant, principals=[principal])
        async with self._ledger(caller.tenant) as connection:
            results = await table.rows(connection, caller.tenant, principal, id_=before.id)
            present = await table.read(connection, now, results)
        readable = [sentence for standing in present for sentence in standing.sentences]
        await self.keep(caller, principal, question, answer, material, id_=before.id)
        return difference(readable, sentences_of(answer, material.passages))

    async def remove(
        self, tenant: str, principal: str, id_: UUID, *, record: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Remove a question with its answer. record: writes the removal to the audit trail before it is committed.
        Raises Unknown, and whatever ``record`` raises."""
        async with self._ledger(tenant) as connection:
            if not await table.remove(connection, tenant, principal, id_):
                raise Unknown
            if record is not None:
                await record()

    async def _one(self, caller: Caller, principal: str, id_: UUID) -> tuple[Standing, table.Row]:
        async with self._ledger(caller.tenant) as connection:
            results = await table.rows(connection, caller.tenant, principal, id_=id_)
            if not results:
                raise Unknown
            [standing] = await table.read(connection, caller, results)
            active = await generations.active(connection)
        if results[0].probe_generation != active.name or not results[0].has_words:
            await self._embed_again(caller, results[0], standing, active)
        return standing, results[0]

    async def _embed_again(self, caller: Caller, row: table.Row, standing: Standing, active: Generation) -> None:
        """Embed a question by the model of a newer generation, or for the first time. A failing model changes nothing:
        the next look tries it again."""
        outdated = Outdated(
            row.id,
            row.question,
            row.is_full,
            [source.chunk_id for source in standing.sources],
            [source.document_id for source in standing.sources],
        )
        vector = await self._vector(caller, row.question, active)
        if vector is not None:
            connect = partial(self._ledger, caller.tenant)
            await embed_again(connect, caller.tenant, active, outdated, vector, self._settings)

    async def _vector(self, caller: Caller, text: str, generation: Generation) -> Vectors | None:
        """The question's vector; None while its model is away."""
        try:
            _, vector = await self._search.embed(text, caller, generation)
        except PenstockError as error:
            log.warning("standing_question_not_embedded", reason=str(error)[:200])
            return None
        return vector

    @asynccontextmanager
    async def _ledger(self, tenant: str) -> AsyncIterator[Connection]:
        async with time_limit(self._seconds, "Postgres"):
            with translated("standing questions"):
                async with rows_of(self._pool, tenant) as connection:
                    yield connection
