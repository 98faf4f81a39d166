"""The material of an answer: decide on the mode, then read documents or search passages (docs/modes.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.languages import language_of_question
from pipeline.embedding.tokens import byte_pairs
from pipeline.ledger import generations
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection, Pool, translated
from query.access.callers import Caller, readable
from query.access.filters import Filters, require_declared
from query.access.tenant_rows import rows_of
from query.embedding.embedders import require_same
from query.embedding.shared import Embedded
from query.model import AnswerMode, BadQuery, CallerClass, Facts, Mode, Result, SearchResults, check
from query.modes import decide as deciding
from query.modes.budget import HISTORY_SHARE, budget_tokens
from query.modes.decide import Coverage, Decision, Known
from query.modes.documents import WholeDocuments, read, read_whole, readable_ids
from query.modes.filters import effective_filters
from query.modes.history import History, history, needs_vector
from query.modes.material import Material, Question
from query.modes.recency import Recency, recency
from query.modes.survey import (
    LOCAL_SETTINGS,
    MAX_SURVEYED_DOCUMENTS,
    ReadScope,
    Survey,
    access_ids_of,
    coverage,
    survey,
)
from query.retrieval.search import Search
from query.retrieval.steps import Steps
from query.retrieval.words import stems
from query.settings import ChatSettings, RerankSettings, RetrievalSettings
from query.telemetry import QueryMetrics

BEST, RECENT = 40, 10
"""The numbers of passages by meaning and by time for a personal collection."""
MIN_TOPIC_STEMS = 2
"""A question for what is new with fewer content words has no topic: its newest documents are those of any topic."""
RECENT_TOKENS = 2_000
"""How many tokens of a new document are fetched, which contain its first passages."""
TOP_WITHOUT_RERANKER = 10
"""How many passages an answer is made from without a reranker, which would put the best ones first."""
SURVEY_SECONDS = 3.0
LEDGER_SECONDS = 10.0

SEARCHED: dict[AnswerMode, Mode] = {
    "hybrid": "hybrid",
    "keyword": "keyword",
    "vector": "vector",
    "semantic": "vector",
}
"""The answer modes that search, with the search mode of each; the others read whole documents."""


class Modes:
    """Gathers the material of answers in every mode. Safe to share between tasks. It does not close its arguments."""

    def __init__(
        self,
        search: Search,
        pool: Pool,
        settings: RetrievalSettings,
        chat: ChatSettings,
        *,
        rerank: RerankSettings | None = None,
        metrics: QueryMetrics | None = None,
    ) -> None:
        """rerank: tells how many passages the reranker returns."""
        self._search = search
        self._pool = pool
        self._settings = settings
        self._chat = chat
        self._metrics = metrics
        reranked = rerank is not None and bool(rerank.url or rerank.onnx_path)
        self._top = rerank.top if rerank is not None and reranked else TOP_WITHOUT_RERANKER

    async def gather(self, question: Question, caller: Caller, caller_class: CallerClass) -> Material:
        """The material of an answer.

        Law: mode, passages, steps and notes are the same as if the documents that this caller may not read did not
        exist. Raises BadQuery; Retryable or Misconfigured if the ledger is not available or no store can be searched.
        """
        text = check(question.text, self._top if question.top is None else question.top, "hybrid")
        filters = effective_filters(question)
        # In a thread, because the first call loads the encoding, which takes a second.
        budget = await asyncio.to_thread(budget_tokens, text, caller_class, self._settings, self._chat)
        return await _Gathering(self, question, text, caller, budget, filters).run()


class _Gathering:
    """The state of one question while its material is gathered."""

    def __init__(
        self, modes: Modes, question: Question, text: str, caller: Caller, budget: int, filters: Filters
    ) -> None:
        self.modes = modes
        self.question = question
        self.text = text
        self.caller = caller
        self.filters = filters
        self.steps = Steps()
        self.notes: list[str] = []
        self.history: History | None = None
        self.budget = budget
        self.recency: Recency | None = None
        self.survey: Survey | None = None
        self.embedded: Embedded | None = None
        """The question's vector, once it was needed."""

    async def run(self) -> Material:
        # In a thread, because the first date loads the library that parses it.
        self.recency = await asyncio.to_thread(recency, self.text, datetime.now(UTC).date())
        scope = await self.steps.timed("scope", self._pin())
        if self.question.member is not None:
            await self._read_history(scope, self.question.member)
        decision, known = await self._decide(scope)
        with self.steps.step("mode") as facts:
            facts |= {"mode": decision.mode, "reason": decision.reason}
        match decision.mode:
            case "focused":
                return await self._focused(scope)
            case "long_context":
                return await self._long_context(scope, known)
            case _:
                return await self._searched(scope, decision, known)

    # Access and history

    async def _pin(self) -> ReadScope:
        async with self._connection("the ledger") as connection:
            access = await readable(connection, self.caller)
            await require_declared(connection, self.caller.tenant, self.filters)
            return ReadScope(
                await generations.active(connection),
                self.caller.tenant,
                frozenset({*access.acl_tags, *access.required_tags}),
                await access_ids_of(connection, access, self.filters.sources),
                self.filters,
            )

    async def _read_history(self, scope: ReadScope, member: str) -> None:
        with self.steps.step("history") as facts:
            async with self._connection("the history") as connection:
                needed = await needs_vector(connection, scope.tenant, member)
            reason = await self._embed(scope) if needed else None
            vector = (scope.generation, self.embedded[1]) if self.embedded else None
            share = int(HISTORY_SHARE * self.budget)
            async with self._connection("the history") as connection:
                recalled = await history(connection, self.caller, member, share, question=vector)
            used = sum(piece.tokens for piece in recalled.pieces)
            facts |= {"served": recalled.served, "pieces": len(recalled.pieces), "tokens": used, "budget_tokens": share}
            if recalled.withheld:
                facts["withheld"] = recalled.withheld
            if reason is not None:
                facts |= {"degraded": True, "reason": reason}
        if (metrics := self.modes._metrics) is not None and recalled.tokens:
            metrics.history.labels(recalled.served).inc()
        self.history = recalled
        self.budget -= used
        self.notes += [*([reason] if reason else []), *recalled.notes]

    async def _embed(self, scope: ReadScope) -> str | None:
        """Embed the question for the history and the search; returns the reason if the history has to do without."""
        try:
            embedded = await self.modes._search.embed(self.text, self.caller, scope.generation)
            require_same(embedded[0], scope.generation)
        except PenstockError as error:
            return f"the history was searched by time only: {error}"
        self.embedded = embedded
        return None

    # The decision

    async def _decide(self, scope: ReadScope) -> tuple[Decision, Known]:
        """Gather facts as far as the decision requests them. A fact that is not available is noted and left out."""
        sources = self.filters.sources
        personal = bool(sources) and self.modes._settings.personal_sources.issuperset(sources)
        known = Known(self.budget, self.question.mode, bool(self.question.documents), personal)
        while isinstance(next_fact := deciding.decide(known), str):
            if next_fact == "size":
                known = replace(known, size=await self._size(scope, deciding.max_tokens(self.budget)))
            else:
                known = replace(known, coverage=await self._coverage(scope))
        return next_fact, known

    async def _size(self, scope: ReadScope, max_tokens: int | None) -> deciding.Size:
        try:
            return (await self._survey(scope, max_tokens)).size
        except Retryable as error:
            self.notes.append(f"it could not be determined whether everything fits the budget: {error}")
            return deciding.UNKNOWN_SIZE

    async def _survey(self, scope: ReadScope, max_tokens: int | None) -> Survey:
        with self.steps.step("long_context") as facts:
            async with self._bounded_connection("counting what may be read") as connection:
                self.survey = await survey(connection, scope, max_tokens=max_tokens)
            size = self.survey.size
            facts |= {"budget_tokens": self.budget, "fits": deciding.fits(size, self.budget, 1.0)}
            # A count beyond max_tokens depends on the order of the rows.
            counted = size.complete and (max_tokens is None or size.tokens <= max_tokens)
            facts |= {"documents": size.documents, "tokens": size.tokens} if counted else {"more": True}
        return self.survey

    async def _coverage(self, scope: ReadScope) -> Coverage:
        try:
            with self.steps.step("embedded") as facts:
                async with self._bounded_connection("counting what is embedded") as connection:
                    measured = await coverage(connection, scope)
                facts |= {"missing_percent": round(100 * measured.share)}
                # The size of a sample would reveal the size of the whole ledger.
                facts |= (
                    {"sampled": True} if measured.sampled else {"chunks": measured.chunks, "missing": measured.missing}
                )
        except Retryable as error:
            self.notes.append(f"it could not be determined how many passages are embedded: {error}")
            return deciding.UNKNOWN_COVERAGE
        return measured

    # Whole documents

    async def _focused(self, scope: ReadScope) -> Material:
        named = list(dict.fromkeys(self.question.documents))
        with self.steps.step("read") as facts:
            async with self._connection("reading documents") as connection:
                readable_documents = await readable_ids(connection, scope, named)
                whole = await self._read(connection, scope, readable_documents)
            facts |= {"named": len(named), **self._facts(whole)}
        if len(readable_documents) < len(named):
            self.notes.append(unknown_documents(len(named) - len(readable_documents), len(named)))
        if whole.left_out or whole.is_cut:
            self.notes.append(left_out(whole, self.budget))
        return self._whole("focused", whole)

    async def _long_context(self, scope: ReadScope, known: Known) -> Material:
        seen = self.survey or await self._survey(scope, None)  # no survey yet if the request chose the mode
        if not seen.complete:
            raise BadQuery(
                f"more than {MAX_SURVEYED_DOCUMENTS} documents are too many to be read whole: name a collection or"
                " documents, or leave the mode out"
            )
        with self.steps.step("read") as facts:
            async with self._connection("reading documents") as connection:
                whole = await self._read(connection, scope, [document.id for document in seen.documents])
            facts |= self._facts(whole)
        if whole.left_out or whole.is_cut:
            self.notes.append(trimmed(whole, self.budget))
        if known.coverage is not None:
            self.notes.append(not_embedded(known.coverage.share))
        return self._whole("long_context", whole)

    async def _read(self, connection: Connection, scope: ReadScope, ids: Sequence[UUID]) -> WholeDocuments:
        return await read_whole(connection, scope, ids, budget_tokens=self.budget, count=byte_pairs().count)

    def _facts(self, whole: WholeDocuments) -> Facts:
        if whole.unprepared:
            self.notes.append(unprepared(whole.unprepared))
        numbers = {"documents": whole.read, "passages": len(whole.results), "tokens": whole.tokens}
        return {**numbers, "budget_tokens": self.budget}

    def _whole(self, mode: AnswerMode, whole: WholeDocuments) -> Material:
        return Material(
            mode, whole.results, True, self.steps.done, self.notes, self.history, bool(whole.results), self.budget
        )

    # Retrieved passages

    async def _searched(self, scope: ReadScope, decision: Decision, known: Known) -> Material:
        mode = decision.mode
        if known.coverage is not None and known.coverage.share > deciding.MAX_MISSING_SHARE:
            self.notes.append(f"{not_embedded(known.coverage.share)}: only keyword search was used")
        top = self.question.top or (BEST if mode == "semantic" else self.modes._top)
        try:
            outcome = await self._search_passages(scope, mode, top)
        except PenstockError as error:
            if known.explicit or mode != "semantic" or isinstance(error, BadQuery):
                raise
            with self.steps.step("semantic") as facts:
                facts |= {"degraded": True, "reason": str(error)}
            self.notes.append(f"keyword search was used instead of vector search: {error}")
            mode, outcome = "keyword", await self._search_passages(scope, "keyword", top)
        self.notes += outcome.degraded
        recent = await self._recent(scope, outcome) if decision.mode == "semantic" or self.recency else []
        results = interleave(outcome.results, recent)
        steps = [*self.steps.done, *outcome.steps]
        relevant = outcome.relevant or bool(recent)
        # A collection is answered from many passages, whichever search returned them; so is what is new.
        budget = self.budget if decision.mode == "semantic" or recent else None
        is_full = len(outcome.results) >= top
        return Material(mode, results, False, steps, self.notes, self.history, relevant, budget, is_full)

    async def _search_passages(self, scope: ReadScope, mode: AnswerMode, top: int) -> SearchResults:
        return await self.modes._search.search(
            self.text,
            self.caller,
            top=top,
            mode=SEARCHED[mode],
            filters=self.filters,
            generation=scope.generation,
            embedded=self.embedded,
            certify=False,
        )

    async def _recent(self, scope: ReadScope, outcome: SearchResults) -> list[Result]:
        """At most RECENT passages without those among the search results: the newest about the topic of a question
        that asks for what is new, else the first ones of the newest documents. Both are of the period that the
        question names."""
        try:
            with self.steps.step("recent") as facts:
                if (asks := self.recency) is not None:
                    facts["asks"] = asks.phrase
                    if asks.since is not None and asks.before is not None:
                        facts |= {"since": asks.since.isoformat(), "before": asks.before.isoformat()}
                    if (filters := _narrowed(scope.filters, asks)) is None:
                        facts["passages"] = 0
                        return []
                    scope = replace(scope, filters=filters)
                    if len(stems(asks.topic, language_of_question(asks.topic))) >= MIN_TOPIC_STEMS:
                        newest_first = await self.modes._search.search(
                            asks.topic,
                            self.caller,
                            top=RECENT,
                            mode="keyword",
                            sort="newest",
                            filters=scope.filters,
                            generation=scope.generation,
                            certify=False,
                        )
                        new = _without(newest_first.results, outcome.results)
                        facts["passages"] = len(new)
                        return new
                async with self._bounded_connection("reading the newest documents") as connection:
                    seen = await survey(connection, scope, max_tokens=None)
                    if not seen.complete:
                        reason = f"the newest of more than {MAX_SURVEYED_DOCUMENTS} documents are not included"
                        facts |= {"degraded": True, "reason": reason}
                        self.notes.append(reason)
                        return []
                    newest = [document.id for document in seen.documents[:RECENT]]
                    documents = await read(connection, scope, newest, budget_tokens=RECENT_TOKENS)
                first = [r for d in documents for r in d.results(d.parts[: self.modes._settings.per_document])]
                new = _without(first, outcome.results)[:RECENT]
                facts["passages"] = len(new)
        except PenstockError as error:
            self.notes.append(f"the newest documents are not included: {error}")
            return []
        return new

    # The ledger

    @asynccontextmanager
    async def _connection(self, doing: str) -> AsyncIterator[Connection]:
        async with time_limit(LEDGER_SECONDS, "Postgres"):
            with translated(doing):
                async with rows_of(self.modes._pool, self.caller.tenant) as connection:
                    yield connection

    @asynccontextmanager
    async def _bounded_connection(self, doing: str) -> AsyncIterator[Connection]:
        """A connection with a short time limit, for facts that are optional."""
        async with self._connection(doing) as connection, connection.transaction():
            await connection.execute(LOCAL_SETTINGS, [str(round(SURVEY_SECONDS * 1000))])
            yield connection


def _narrowed(filters: Filters, asks: Recency) -> Filters | None:
    """The filters, limited to the period of a question; None: it lies outside of theirs."""
    since = max((time for time in (filters.since, asks.since) if time), default=None)
    before = min((time for time in (filters.before, asks.before) if time), default=None)
    if since is not None and before is not None and since >= before:
        return None
    return replace(filters, since=since, before=before)


def _without(results: Sequence[Result], known: Sequence[Result]) -> list[Result]:
    """The results with none of the chunks of ``known``."""
    chunk_ids = {chunk_id for result in known for chunk_id in result.chunk_ids}
    return [result for result in results if chunk_ids.isdisjoint(result.chunk_ids)]


BEST_PER_RECENT = 4
"""How many passages by meaning precede one by time, so that a smaller context still contains some of the newest."""


def interleave(best: Sequence[Result], recent: Sequence[Result]) -> list[Result]:
    """Repeatedly BEST_PER_RECENT of the first list and one of the second; the rest of either at the end."""
    mixed: list[Result] = []
    rest = list(recent)
    for n, result in enumerate(best, start=1):
        mixed.append(result)
        if n % BEST_PER_RECENT == 0 and rest:
            mixed.append(rest.pop(0))
    return [*mixed, *rest]


def _documents(count: int) -> str:
    return f"{count} document" if count == 1 else f"{count} documents"


def unknown_documents(missing: int, named: int) -> str:
    """A note that does not reveal whether the documents do not exist or may not be read."""
    what = f"{missing} of the {named} documents named" if named > 1 else "the document named"
    return f"{what} could not be found among what you may read"


def left_out(whole: WholeDocuments, budget_tokens: int) -> str:
    named = whole.read + whole.left_out
    return f"{whole.read} of {_documents(named)} {_fit(whole)} the budget of {budget_tokens} tokens"


def trimmed(whole: WholeDocuments, budget_tokens: int) -> str:
    return f"the newest {left_out(whole, budget_tokens)}; the older rest was left out"


def unprepared(documents: int) -> str:
    return f"{_documents(documents)} changed a moment ago and cannot be read yet"


def not_embedded(share: float) -> str:
    return f"{round(100 * share)} % of the passages have no embedding yet"


def _fit(whole: WholeDocuments) -> str:
    return "fit, the last one without its end," if whole.is_cut else "fit"
