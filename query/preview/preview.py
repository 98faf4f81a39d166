"""Asks questions against the live index, and against the same index with a proposed edit.

Everything runs with the access of one caller: it sees the golden questions whose judged documents it may read, its own
standing questions, and the answers that it would get. Nothing is written to a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import Retryable
from pipeline.core.identity import document_id
from pipeline.core.model import Generation
from pipeline.ledger import generations
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection, Pool, translated
from query.access.callers import Caller
from query.access.filters import NONE
from query.access.tenant_rows import rows_of
from query.embedding.embedders import Embedders, require_same
from query.embedding.shared import Embedded
from query.evaluation import golden as judgements
from query.evaluation.golden import Golden, Judged
from query.model import SearchResults
from query.modes.documents import readable_ids
from query.modes.survey import ReadScope
from query.preview.compare import compare
from query.preview.model import KINDS, Edit, Finding, Report
from query.preview.overlaying import LedgerDocument, match, overlay, read
from query.retrieval.overlay import OverlaidStores, Overlay, Unaffected, WatchedStores
from query.retrieval.search import Search
from query.standing import table
from query.standing.model import LOST, question_of

TOP = 10
"""How many passages of each question are compared."""
SECONDS = 60.0
"""How long questions are asked. Those that are left over are counted in the report."""
LEDGER_SECONDS = 20.0
TRIES = 2
"""How often one question is asked while its search is incomplete. A store that is slow for a moment should not cost the
report, with what the questions before said; one that is slow for longer does."""


@dataclass(frozen=True, slots=True)
class _Question:
    golden: Golden
    standing_id: UUID | None = None
    """That of a standing question, whose judged documents are those that its answer cites."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The state of the ledger that a preview begins with."""

    generation: Generation
    questions: Sequence[_Question]
    documents: Sequence[LedgerDocument]


@dataclass(slots=True)
class Previews:
    """Owns nothing that it is given."""

    search: Search
    pool: Pool
    es: AsyncElasticsearch
    embedders: Embedders
    seconds: float = SECONDS
    on_embedded: Callable[[int, float], None] = lambda tokens, money: None
    """Receives the tokens and the money that embedding the texts of an edit cost."""

    async def preview(
        self, edit: Edit, caller: Caller, *, operator: bool = False, principal: str | None = None
    ) -> Report:
        """The report of an edit, as this caller. operator: whether golden questions count that were promoted from what
        people asked, which nobody else is shown. principal: the person whose standing questions are asked; nobody
        else's are, not even for an operator. Raises BadQuery, Retryable (also when a search was not whole: half an
        index says nothing about the edit) and Misconfigured."""
        began = monotonic()
        known = await self._known(edit, caller, operator=operator, principal=principal)
        embedder = await self.embedders.of(known.generation).model()
        require_same(embedder, known.generation)
        matched = match(edit, known.documents)
        laid, documents = await overlay(self.es, embedder, known.generation, caller, edit, matched, self.on_embedded)
        answered, affected = 0, 0
        findings: list[Finding] = []
        questions = _edited_first(known.questions, laid) if laid.documents else ()
        live = self.search.over(lambda stores: WatchedStores(stores, laid))
        edited = self.search.over(lambda stores: OverlaidStores(stores, laid))
        for question in questions:
            golden = question.golden
            if monotonic() - began > self.seconds:
                break
            answered += 1
            embedded = await self.search.embed(golden.text, caller, known.generation)
            try:
                before = await _ask(live, golden, caller, known.generation, embedded)
            except Unaffected:
                continue
            affected += 1
            after = await _ask(edited, golden, caller, known.generation, embedded)
            # In a thread: texts that are made for it take a second, during which nobody else would be served.
            finding = await asyncio.to_thread(
                compare, golden, before, after, laid.new.keys(), standing_id=question.standing_id
            )
            if finding is not None:
                findings.append(finding)
        return Report(
            documents,
            answered,
            affected,
            len(questions) - answered,
            len(laid.new),
            _worst_first(findings),
            round(1000 * (monotonic() - began), 1),
        )

    async def _known(self, edit: Edit, caller: Caller, *, operator: bool, principal: str | None) -> _Known:
        async with self._connection(caller.tenant) as connection:
            generation = await generations.active(connection)
            stored = await judgements.load(connection, caller.tenant)
            golden, _ = await judgements.current(connection, stored)
            hidden = set() if operator else await judgements.promoted(connection, caller.tenant)
            # An operator is shown what is left of a question when one of its documents was deleted. Nobody else is:
            # the question may be about that document, and who could read it is not known any more.
            judged = {
                question.id: {document_id(caller.tenant, j.source, j.external_id) for j in question.judged}
                for question in (golden if operator else stored)
            }
            scope = ReadScope(generation, caller.tenant, caller.tags, (), NONE)
            readable = set(await readable_ids(connection, scope, list(set[UUID]().union(*judged.values()))))
            documents = await read(connection, caller, generation, edit)
            own = await _standing(connection, caller, principal) if principal is not None else []
        questions = [
            _Question(question) for question in golden if question.id not in hidden and judged[question.id] <= readable
        ]
        return _Known(generation, [*questions, *own], documents)

    @asynccontextmanager
    async def _connection(self, tenant: str) -> AsyncIterator[Connection]:
        async with time_limit(LEDGER_SECONDS, "Postgres"):
            with translated("preview"):
                async with rows_of(self.pool, tenant) as connection:
                    yield connection


async def _ask(
    search: Search, golden: Golden, caller: Caller, generation: Generation, embedded: Embedded
) -> SearchResults:
    for _ in range(TRIES):
        outcome = await search.search(
            golden.text, caller, top=TOP, generation=generation, embedded=embedded, certify=False
        )
        if not outcome.degraded:
            return outcome
    raise Retryable(f"preview: a search was incomplete: {outcome.degraded[0]}")


async def _standing(connection: Connection, caller: Caller, principal: str) -> list[_Question]:
    """The principal's standing questions of everything that it may read: without documents, a collection or filters,
    by which an edit is not searched. Judged are the cited documents that the caller may read now."""
    results = await table.rows(connection, caller.tenant, principal)
    whole = [row for row in results if not (row.request["documents"] or row.request["collection"])]
    whole = [row for row in whole if question_of(row.question, row.request).filters == NONE]
    questions = []
    for row in whole:  # one after the other: all of them may have two hundred thousand passages together
        [standing] = await table.read(connection, caller, [row])
        cited = {n for sentence in standing.sentences if sentence is not None for n in sentence.cites}
        documents = [s.document_id for s in standing.sources if s.n in cited and s.change not in LOST]
        judged = await _names(connection, caller.tenant, documents)
        questions.append(_Question(Golden(caller.tenant, row.question, judged), row.id))
    return questions


async def _names(connection: Connection, tenant: str, documents: Sequence[UUID]) -> tuple[Judged, ...]:
    cursor = await connection.execute(
        "SELECT source, external_id FROM documents WHERE tenant = %s AND id = ANY(%s::uuid[])"
        " ORDER BY source, external_id",
        [tenant, list(documents)],
    )
    return tuple(Judged(source, external_id) for source, external_id in await cursor.fetchall())


def _edited_first(questions: Sequence[_Question], laid: Overlay) -> list[_Question]:
    """The questions that an edited document answers, then the others, because the time may not suffice for all."""

    def is_edited(question: _Question) -> bool:
        golden = question.golden
        return any(document_id(golden.tenant, j.source, j.external_id) in laid.documents for j in golden.judged)

    return sorted(questions, key=is_edited, reverse=True)


def _worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: KINDS.index(finding.kind))
