"""A question → what an answer is made from: the mode is decided, then read or found. docs/modes.md describes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import UUID

from pipeline.core.errors import PenstockError, Retryable
from pipeline.embedding.tokens import byte_pairs
from pipeline.ledger import generations
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection, Pool, translated
from query.access.callers import Caller, readable, storable
from query.access.filters import Filters
from query.access.filters import check as check_filters
from query.access.tenant_rows import rows_of
from query.embedding.embedders import Embedders
from query.model import AnswerMode, BadQuery, CallerClass, Facts, Mode, Result, SearchResults, check
from query.modes import decide as deciding
from query.modes.budget import HISTORY_SHARE, budget_tokens
from query.modes.decide import Coverage, Decision, Known
from query.modes.documents import Whole, read, read_whole, readable_of
from query.modes.history import History, history, needs_vector, vector_of
from query.modes.material import Material, Question
from query.modes.survey import LOCAL_SETTINGS, MOST_DOCUMENTS, Scope, Survey, coverage, of_sources, survey
from query.retrieval.search import Search
from query.retrieval.steps import Steps
from query.settings import ChatSettings, RerankSettings, RetrievalSettings

BEST, RECENT = 40, 10
"""Passages by meaning and by time, of a personal collection."""
RECENT_TOKENS = 2_000
"""Of a new document that are fetched: its first passages lie there."""
PLAIN_TOP = 10
"""Passages that an answer is given where no reranker has put the best ones first."""
SURVEY_SECONDS = 3.0
LEDGER_SECONDS = 10.0

SEARCHED: dict[AnswerMode, Mode] = {
    "hybrid": "hybrid",
    "keyword": "keyword",
    "vector": "vector",
    "semantic": "vector",
}
"""Modes that search; the others read whole documents."""


class Modes:
    """Safe to share between tasks. Owns nothing that it is given."""

    def __init__(
        self,
        search: Search,
        pool: Pool,
        settings: RetrievalSettings,
        chat: ChatSettings,
        *,
        rerank: RerankSettings | None = None,
        embedders: Embedders | None = None,
    ) -> None:
        """rerank: how many passages the reranker leaves. embedders: for long histories, which are searched by
        meaning; None: by time."""
        self._search = search
        self._pool = pool
        self._settings = settings
        self._chat = chat
        self._embedders = embedders
        reranked = rerank is not None and bool(rerank.url or rerank.onnx_path)
        self._top = rerank.top if rerank is not None and reranked else PLAIN_TOP

    async def gather(self, question: Question, caller: Caller, caller_class: CallerClass) -> Material:
        """Law: mode, passages, steps and notes are as if what this caller may not read did not exist.

        Raises BadQuery; Retryable or Misconfigured where the ledger cannot be asked, or nothing can be searched.
        """
        text = check(question.text, self._top if question.top is None else question.top, "hybrid")
        filters = narrowed(question)
        # In a thread: the first one loads the encoding, which takes a second.
        budget = await asyncio.to_thread(budget_tokens, text, caller_class, self._settings, self._chat)
        return await _Gathering(self, question, text, caller, budget, filters).run()


class _Gathering:
    """One question's."""

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
        self.survey: Survey | None = None

    async def run(self) -> Material:
        scope = await self.steps.timed("scope", self._pin())
        if self.question.member is not None:
            await self._recall(scope, self.question.member)
        decision, known = await self._decide(scope)
        with self.steps.step("mode") as facts:
            facts |= {"mode": decision.mode, "reason": decision.reason}
        match decision.mode:
            case "focused":
                return await self._focused(scope)
            case "long_context":
                return await self._long_context(scope, known)
            case _:
                return await self._found(scope, decision, known)

    # What may be read

    async def _pin(self) -> Scope:
        async with self._connection("the ledger") as connection:
            may = await readable(connection, self.caller)
            return Scope(
                await generations.active(connection),
                self.caller.tenant,
                frozenset({*may.acl_tags, *may.required_tags}),
                await of_sources(connection, may, self.filters.sources),
                self.filters,
            )

    async def _recall(self, scope: Scope, member: str) -> None:
        with self.steps.step("history") as facts:
            async with self._connection("the history") as connection:
                needed = await needs_vector(connection, scope.tenant, member)
            vector, reason = await vector_of(self.text, scope, self.modes._embedders) if needed else (None, None)
            share = int(HISTORY_SHARE * self.budget)
            async with self._connection("the history") as connection:
                recalled = await history(connection, self.caller, member, share, question=vector)
            used = sum(piece.tokens for piece in recalled.pieces)
            facts |= {"served": recalled.served, "pieces": len(recalled.pieces), "tokens": used, "budget_tokens": share}
            if recalled.withheld:
                facts["withheld"] = recalled.withheld
            if reason is not None:
                facts |= {"degraded": True, "reason": reason}
        self.history = recalled
        self.budget -= used
        self.notes += [*([reason] if reason else []), *recalled.notes]

    # What is decided

    async def _decide(self, scope: Scope) -> tuple[Decision, Known]:
        """Facts are gathered as far as the decision asks for them. One that cannot be had is said, and gone without."""
        sources = self.filters.sources
        personal = bool(sources) and self.modes._settings.personal_sources.issuperset(sources)
        known = Known(self.budget, self.question.mode, bool(self.question.documents), personal)
        while isinstance(next_fact := deciding.decide(known), str):
            if next_fact == "size":
                known = replace(known, size=await self._size(scope, deciding.most_tokens(self.budget)))
            else:
                known = replace(known, coverage=await self._coverage(scope))
        return next_fact, known

    async def _size(self, scope: Scope, most_tokens: int | None) -> deciding.Size:
        try:
            return (await self._survey(scope, most_tokens)).size
        except Retryable as error:
            self.notes.append(f"whether everything fits was not found out: {error}")
            return deciding.UNKNOWN_SIZE

    async def _survey(self, scope: Scope, most_tokens: int | None) -> Survey:
        with self.steps.step("long_context") as facts:
            async with self._bounded_connection("counting what may be read") as connection:
                self.survey = await survey(connection, scope, most_tokens=most_tokens)
            size = self.survey.size
            facts |= {"budget_tokens": self.budget, "fits": deciding.fits(size, self.budget, 1.0)}
            # How far beyond the end of counting it came depends on the order in which rows came.
            counted = size.complete and (most_tokens is None or size.tokens <= most_tokens)
            facts |= {"documents": size.documents, "tokens": size.tokens} if counted else {"more": True}
        return self.survey

    async def _coverage(self, scope: Scope) -> Coverage:
        try:
            with self.steps.step("embedded") as facts:
                async with self._bounded_connection("counting what is embedded") as connection:
                    measured = await coverage(connection, scope)
                facts |= {"missing_percent": round(100 * measured.share)}
                # Of a sample its size would tell how large the whole ledger is.
                facts |= (
                    {"sampled": True} if measured.sampled else {"chunks": measured.chunks, "missing": measured.missing}
                )
        except Retryable as error:
            self.notes.append(f"how much is embedded was not found out: {error}")
            return deciding.UNKNOWN_COVERAGE
        return measured

    # What is read

    async def _focused(self, scope: Scope) -> Material:
        named = list(dict.fromkeys(self.question.documents))
        with self.steps.step("read") as facts:
            async with self._connection("reading documents") as connection:
                readable_ids = await readable_of(connection, scope, named)
                whole = await self._read(connection, scope, readable_ids)
            facts |= {"named": len(named), **self._facts(whole)}
        if len(readable_ids) < len(named):
            self.notes.append(unknown_documents(len(named) - len(readable_ids), len(named)))
        if whole.left_out or whole.is_cut:
            self.notes.append(left_out(whole, self.budget))
        return self._whole("focused", whole)

    async def _long_context(self, scope: Scope, known: Known) -> Material:
        seen = self.survey or await self._survey(scope, None)  # not looked at: it was asked for
        if not seen.complete:
            raise BadQuery(
                f"more than {MOST_DOCUMENTS} documents are too many to be read whole: name a collection or documents,"
                " or leave the mode out"
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

    async def _read(self, connection: Connection, scope: Scope, ids: Sequence[UUID]) -> Whole:
        return await read_whole(connection, scope, ids, budget_tokens=self.budget, count=byte_pairs().count)

    def _facts(self, whole: Whole) -> Facts:
        if whole.unprepared:
            self.notes.append(unprepared(whole.unprepared))
        numbers = {"documents": whole.read, "passages": len(whole.results), "tokens": whole.tokens}
        return {**numbers, "budget_tokens": self.budget}

    def _whole(self, mode: AnswerMode, whole: Whole) -> Material:
        return Material(
            mode, whole.results, True, self.steps.done, self.notes, self.history, bool(whole.results), self.budget
        )

    # What is found

    async def _found(self, scope: Scope, decision: Decision, known: Known) -> Material:
        mode = decision.mode
        if known.coverage is not None and known.coverage.share > deciding.MOST_MISSING:
            self.notes.append(f"{not_embedded(known.coverage.share)}: found by keyword alone")
        top = self.question.top or (BEST if mode == "semantic" else self.modes._top)
        try:
            outcome = await self._ask(scope, mode, top)
        except PenstockError as error:
            if known.explicit or mode != "semantic" or isinstance(error, BadQuery):
                raise
            with self.steps.step("semantic") as facts:
                facts |= {"degraded": True, "reason": str(error)}
            self.notes.append(f"found by keyword and not by meaning: {error}")
            mode, outcome = "keyword", await self._ask(scope, "keyword", top)
        self.notes += outcome.degraded
        recent = await self._recent(scope, outcome) if decision.mode == "semantic" else []
        results = interleave(outcome.results, recent)
        steps = [*self.steps.done, *outcome.steps]
        return Material(mode, results, False, steps, self.notes, self.history, outcome.relevant or bool(recent))

    async def _ask(self, scope: Scope, mode: AnswerMode, top: int) -> SearchResults:
        return await self.modes._search.search(
            self.text, self.caller, top=top, mode=SEARCHED[mode], filters=self.filters, generation=scope.generation
        )

    async def _recent(self, scope: Scope, found: SearchResults) -> list[Result]:
        """The newest documents' first passages, without those that were found."""
        try:
            with self.steps.step("recent") as facts:
                async with self._bounded_connection("looking for what is new") as connection:
                    seen = await survey(connection, scope, most_tokens=None)
                    if not seen.complete:
                        reason = f"of more than {MOST_DOCUMENTS} documents the newest are not looked for"
                        facts |= {"degraded": True, "reason": reason}
                        self.notes.append(reason)
                        return []
                    newest = [document.id for document in seen.documents[:RECENT]]
                    documents = await read(connection, scope, newest, budget_tokens=RECENT_TOKENS)
                first = [r for d in documents for r in d.results(d.parts[: self.modes._settings.per_document])]
                known = {chunk_id for result in found.results for chunk_id in result.chunk_ids}
                new = [r for r in first if r.passage.chunk_id not in known][:RECENT]
                facts["passages"] = len(new)
        except Retryable as error:
            self.notes.append(f"what is new was not found out: {error}")
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
        """For what only helps to decide: it may fail, and must not take long."""
        async with self._connection(doing) as connection, connection.transaction():
            await connection.execute(LOCAL_SETTINGS, [str(round(SURVEY_SECONDS * 1000))])
            yield connection


MOST_NAMED = 100
"""Documents that one question may name."""


def narrowed(question: Question) -> Filters:
    """The filters with the collection, and with the documents where they do not stand for the focused mode.

    Raises BadQuery where nothing could be both.
    """
    if question.mode == "focused" and not question.documents:
        raise BadQuery("mode is focused, but no document is named: give documents, or another mode")
    if len(question.documents) > MOST_NAMED:
        raise BadQuery(f"{len(question.documents)} documents are named, at most {MOST_NAMED} are taken")
    filters = question.filters
    check_filters(filters)
    if question.collection is not None:
        if not storable([question.collection]):
            raise BadQuery("the collection's name holds characters that no source's name has")
        if filters.sources and question.collection not in filters.sources:
            raise BadQuery("the collection is not among the sources of the filter: nothing can be both")
        filters = replace(filters, sources=(question.collection,))
    if question.documents and question.mode not in (None, "focused"):
        if filters.documents:
            raise BadQuery("documents are named twice, in the question and in its filters: name them once")
        filters = replace(filters, documents=question.documents)
    return filters


BEST_A_RECENT = 4
"""Passages by meaning for one by time, so that a smaller context still holds some of the newest."""


def interleave(best: Sequence[Result], recent: Sequence[Result]) -> list[Result]:
    """BEST_A_RECENT of the first, one of the second, and so on; the rest of either at the end."""
    mixed: list[Result] = []
    rest = list(recent)
    for n, result in enumerate(best, start=1):
        mixed.append(result)
        if n % BEST_A_RECENT == 0 and rest:
            mixed.append(rest.pop(0))
    return [*mixed, *rest]


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def unknown_documents(missing: int, named: int) -> str:
    """Whether they do not exist or may not be read is not told: to the asker both are the same."""
    what = f"{missing} of the {named} documents named" if named > 1 else "the document named"
    return f"{what} could not be found among what you may read"


def left_out(whole: Whole, budget_tokens: int) -> str:
    named = whole.read + whole.left_out
    return f"{whole.read} of {plural(named, 'document')} {_fit(whole)} the budget of {budget_tokens} tokens"


def trimmed(whole: Whole, budget_tokens: int) -> str:
    return f"the newest {left_out(whole, budget_tokens)}; the older rest was left out"


def unprepared(documents: int) -> str:
    return f"{plural(documents, 'document')} changed a moment ago and cannot be read yet"


def not_embedded(share: float) -> str:
    return f"{round(100 * share)} % of the passages have no embedding yet"


def _fit(whole: Whole) -> str:
    return "fit, the last one without its end," if whole.is_cut else "fit"
