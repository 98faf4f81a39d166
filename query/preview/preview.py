"""Asks the golden questions against the live index, and against the same index with a proposed edit.

Everything runs with the access of one caller: it sees the questions whose judged documents it may read, and the answers
that it would get. Nothing is written to a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from time import monotonic

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
from query.evaluation.golden import Golden
from query.model import SearchResults, shown_documents
from query.modes.documents import readable_ids
from query.modes.survey import ReadScope
from query.preview.compare import compare
from query.preview.model import KINDS, Edit, Finding, Report
from query.preview.overlaying import LedgerDocument, match, overlay, read
from query.retrieval.overlay import OverlaidStores, Overlay
from query.retrieval.search import Search

TOP = 10
"""How many passages of each question are compared."""
SEARCHED = 30
"""How many are searched for: by those further down, most questions turn out to be unaffected without a second search.
It costs no more: 64 candidates of each store are fused in either case."""
SECONDS = 60.0
"""How long questions are asked. Those that are left over are counted in the report."""
LEDGER_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class _Known:
    """The state of the ledger that a preview begins with."""

    generation: Generation
    questions: Sequence[Golden]
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

    async def preview(self, edit: Edit, caller: Caller, *, operator: bool = False) -> Report:
        """The report of an edit, as this caller. operator: whether questions count that were promoted from what people
        asked, which nobody else is shown. Raises BadQuery, Retryable (also when a search was not whole: half an
        index says nothing about the edit) and Misconfigured."""
        began = monotonic()
        known = await self._known(edit, caller, operator=operator)
        embedder = await self.embedders.of(known.generation).model()
        require_same(embedder, known.generation)
        matched = match(edit, known.documents)
        laid, documents = await overlay(self.es, embedder, known.generation, caller, edit, matched, self.on_embedded)
        answered, affected = 0, 0
        findings: list[Finding] = []
        questions = _edited_first(known.questions, laid) if laid.documents else ()
        live = self.search.over(lambda stores: stores)
        edited = self.search.over(lambda stores: OverlaidStores(stores, laid))
        for golden in questions:
            if monotonic() - began > self.seconds:
                break
            answered += 1
            embedded = await self.search.embed(golden.text, caller, known.generation)
            before = await _ask(live, golden, caller, known.generation, embedded)
            if not await _may_be_affected(live, edited, golden, caller, known.generation, laid, before, embedded):
                continue
            affected += 1
            after = await _ask(edited, golden, caller, known.generation, embedded)
            # In a thread: texts that are made for it take a second, during which nobody else would be served.
            if finding := await asyncio.to_thread(compare, golden, _first(before), _first(after), laid.new.keys()):
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

    async def _known(self, edit: Edit, caller: Caller, *, operator: bool) -> _Known:
        async with self._connection(caller.tenant) as connection:
            generation = await generations.active(connection)
            golden, _ = await judgements.current(connection, await judgements.load(connection, caller.tenant))
            hidden = set() if operator else await judgements.promoted(connection, caller.tenant)
            judged = {
                document_id(caller.tenant, j.source, j.external_id) for question in golden for j in question.judged
            }
            scope = ReadScope(generation, caller.tenant, caller.tags, (), NONE)
            readable = set(await readable_ids(connection, scope, list(judged)))
            documents = await read(connection, caller, generation, edit)
        questions = [
            question
            for question in golden
            if question.id not in hidden
            and all(document_id(caller.tenant, j.source, j.external_id) in readable for j in question.judged)
        ]
        return _Known(generation, questions, documents)

    @asynccontextmanager
    async def _connection(self, tenant: str) -> AsyncIterator[Connection]:
        async with time_limit(LEDGER_SECONDS, "Postgres"):
            with translated("preview"):
                async with rows_of(self.pool, tenant) as connection:
                    yield connection


async def _ask(
    search: Search, golden: Golden, caller: Caller, generation: Generation, embedded: Embedded
) -> SearchResults:
    outcome = await search.search(golden.text, caller, top=SEARCHED, generation=generation, embedded=embedded)
    if outcome.degraded:
        raise Retryable(f"preview: a search was incomplete: {outcome.degraded[0]}")
    return outcome


async def _may_be_affected(
    live: Search,
    edited: Search,
    golden: Golden,
    caller: Caller,
    generation: Generation,
    laid: Overlay,
    before: SearchResults,
    embedded: Embedded,
) -> bool:
    """Whether a passage of the edit is, or may come to be, among the first results of a question. Not, if none of the
    results is of an edited document, and each of its chunks is further away than TOP of them, by cosine and also by
    BM25: then the fusion, which adds both, ranks it below these."""
    if len(before.results) < TOP or not laid.documents.isdisjoint(shown_documents(before.results)):
        return True
    results = [result.passage.chunk_id for result in before.results]
    changed = [entry.chunk_id for entry in laid.entries]
    cosines, bm25 = await live.scores(golden.text, caller, generation, results, embedded)
    of_changed = await edited.scores(golden.text, caller, generation, changed, embedded)
    # A chunk without a word of the question has a BM25 of 0; one that is not embedded yet is as far away as can be.
    places = [(cosines.get(id_, -1.0), bm25.get(id_, 0.0)) for id_ in results]
    return any(
        sum(cosine < above and score <= words for above, words in places) < TOP
        for cosine, score in ((of_changed[0].get(id_, -1.0), of_changed[1].get(id_, 0.0)) for id_ in changed)
    )


def _edited_first(questions: Sequence[Golden], laid: Overlay) -> list[Golden]:
    """The questions that an edited document answers, then the others, because the time may not suffice for all."""

    def is_edited(golden: Golden) -> bool:
        return any(document_id(golden.tenant, j.source, j.external_id) in laid.documents for j in golden.judged)

    return sorted(questions, key=is_edited, reverse=True)


def _first(outcome: SearchResults) -> SearchResults:
    return replace(outcome, results=outcome.results[:TOP])


def _worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: KINDS.index(finding.kind))
