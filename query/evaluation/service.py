"""The golden judgements against the running service, again and again: every 15 minutes, by one process of them all.

Each run is compared with the accepted values of the same questions (query/evaluation/baseline.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol
from uuid import UUID

import numpy as np
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.core.model import Generation
from pipeline.ledger import generations
from pipeline.observability.labels import gauge
from pipeline.stores.leader import leading
from pipeline.stores.postgres import EVAL_LOCK, Connection, Pool, translated
from query.access.callers import Caller, identify
from query.access.tenant_rows import set_tenant
from query.answers import chat as chats
from query.answers.answers import Answers
from query.answers.chat import Chat
from query.answers.model import Done, Sources
from query.embedding.embedders import Embedders
from query.evaluation import baseline as baselines
from query.evaluation import golden as judgements
from query.evaluation.baseline import Change, Value, digest
from query.evaluation.golden import Golden
from query.evaluation.judge import Embeds, Grades, grade
from query.evaluation.measures import measure
from query.model import SearchResults
from query.modes.material import Question
from query.settings import ChatSettings, EvalSettings

if TYPE_CHECKING:
    from query.service import Service

TOP = 50
RETENTION_DAYS = 90
NDCG, RECALL, FAITHFULNESS = "nDCG@5", "recall@50", "faithfulness"

_log = structlog.get_logger(__name__)

Means = dict[tuple[str, str], tuple[float, int]]
"""Slice and measure → mean and the number of questions it is of."""
Changes = Mapping[tuple[str, str], Change]
"""Slice and measure → change from the baseline."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run."""

    started: datetime
    means: Means
    changes: Changes


class Searcher(Protocol):
    async def search(
        self, query: str, caller: Caller, *, top: int = ..., generation: Generation | None = ...
    ) -> SearchResults: ...


@dataclass(slots=True)
class Evaluation:
    """Measures the golden questions. It does not close its arguments. answers, judge and embedders: None measures
    retrieval alone."""

    pool: Pool
    search: Searcher
    settings: EvalSettings
    metrics: EvalMetrics
    answers: Answers | None = None
    judge: Chat | None = None
    embedders: Embedders | None = None
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))

    async def run(self, *, accept: bool = False, store: bool = True) -> Run | None:
        """Ask all golden questions once, store the result and show it in the metrics. None: there are no judgements.
        accept: the values become the baseline. store: False stores nothing, for a version or settings that are only
        tried. Raises PenstockError, also if a search was incomplete: a result without one of the stores says nothing
        about the ranking."""
        started = self.now()
        async with connected(self.pool) as connection:
            left, lost = await judgements.current(connection, await judgements.load(connection))
            generation = await generations.active(connection)
        self.metrics.lost.set(lost)
        if not left:
            return None
        values: dict[UUID, dict[str, Value]] = {}
        for golden in left:
            values[golden.id] = _judged(await self._retrieval(golden, generation), digest(golden))
        if self.answers is not None and self.judge is not None and self.embedders is not None:
            embedder = self.embedders.of(generation)
            for golden in answered(left, self.settings.answers):
                graded = await self._answer(golden, self.answers, self.judge, embedder)
                values[golden.id] |= _judged(graded, digest(golden, self.judge.model))
        slices = {golden.id: _slices(golden) for golden in left}
        async with connected(self.pool) as connection:
            accepted = {} if accept else await baselines.load(connection, left)
        means = _means(slices, values)
        run = Run(started, means, await asyncio.to_thread(baselines.changes, values, accepted, slices))
        if not store:
            return run
        async with connected(self.pool) as connection:
            await baselines.accept(connection, left, baselines.unaccepted(values, accepted))
            await _keep(connection, generation.name, run)
        self.show(run)
        return run

    async def _retrieval(self, golden: Golden, generation: Generation) -> dict[str, float]:
        outcome = await self.search.search(golden.text, await self._caller(golden), top=TOP, generation=generation)
        if outcome.degraded:
            raise Retryable(f"evaluation: a search was incomplete: {outcome.degraded[0]}")
        values = measure({"q": judgements.ranking(golden, outcome)}, {"q": judgements.gains(golden)})
        return {name: float(values[name][0]) for name in (NDCG, RECALL)}

    async def _answer(self, golden: Golden, answers: Answers, judge: Chat, embedder: Embeds) -> dict[str, float]:
        """Answer a question, and grade the answer. Quotations have no grades: no model wrote them."""
        events = answers.answer(Question(golden.text), await self._caller(golden))
        contexts: list[str] = []
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Sources):
                    contexts = [shown.text for shown in event.passages]
                elif isinstance(event, Done) and event.answer.model is not None:
                    return _values(
                        await grade(judge, embedder, golden.text, event.answer.text, contexts, golden.reference)
                    )
        return {}

    async def _caller(self, golden: Golden) -> Caller:
        async with connected(self.pool) as connection:
            await set_tenant(connection, golden.tenant)
            return await identify(connection, golden.tenant, principals=golden.principals, tags=golden.tags)

    def show(self, run: Run) -> None:
        shown = _largest(run.means)
        for metric in (
            self.metrics.ndcg,
            self.metrics.recall,
            self.metrics.faithfulness,
            self.metrics.queries,
            self.metrics.answers,
            self.metrics.change,
            self.metrics.change_p,
            self.metrics.compared,
            self.metrics.accepted,
        ):
            metric.clear()
        for (slice_, name), (value, queries) in run.means.items():
            if slice_ not in shown:
                continue
            if name == NDCG:
                self.metrics.ndcg.labels(slice_).set(value)
                self.metrics.queries.labels(slice_).set(queries)
            elif name == RECALL:
                self.metrics.recall.labels(slice_).set(value)
            elif name == FAITHFULNESS:
                self.metrics.faithfulness.labels(slice_).set(value)
            else:
                self.metrics.answers.labels(name, slice_).set(value)
            if change := run.changes.get((slice_, name)):
                self.metrics.change.labels(name, slice_).set(change.ratio)
                self.metrics.change_p.labels(name, slice_).set(change.p)
                self.metrics.compared.labels(name, slice_).set(change.questions)
                self.metrics.accepted.labels(name, slice_).set(change.accepted)
        self.metrics.ran_at.set(run.started.timestamp())


@asynccontextmanager
async def connected(pool: Pool) -> AsyncIterator[Connection]:
    with translated("evaluation"):
        async with pool.connection() as connection:
            yield connection


async def evaluate_forever(evaluation: Evaluation) -> None:
    """Run the evaluation whenever it is due, until cancelled. A run that fails is counted, and tried again when it is
    next due. Processes that did not run it show the stored result."""
    while True:
        try:
            await run_if_due(evaluation)
        except Misconfigured as error:
            evaluation.metrics.failures.inc()
            _log.error("evaluation_refused", reason=str(error))
        except PenstockError as error:
            evaluation.metrics.failures.inc()
            _log.warning("evaluation_failed", reason=str(error))
        except Exception as error:  # noqa: BLE001  (a mistake of ours: counted; its text may quote a document)
            evaluation.metrics.failures.inc()
            _log.error("evaluation_crashed", kind=type(error).__name__)
        await asyncio.sleep(evaluation.settings.every_seconds / 15)


async def run(service: Service) -> None:
    """``evaluate_forever`` for a running query service, until cancelled."""
    async with _of(service) as evaluation:
        await evaluate_forever(evaluation)


async def once(service: Service, *, accept: bool = False, store: bool = True) -> Run | None:
    """Run the evaluation once, now. Returns and raises as ``Evaluation.run``."""
    async with _of(service) as evaluation:
        return await evaluation.run(accept=accept, store=store)


def judge_settings(chat: ChatSettings, settings: EvalSettings) -> ChatSettings:
    """The settings of the judging model: its own where they are set, otherwise those of the answering model, whose key
    is never sent to another server. Raises Misconfigured for a judge's server without a model."""
    if not settings.judge_model:
        if settings.judge_base_url or settings.judge_api_key:
            raise Misconfigured("a judge is configured without a model: set PENSTOCK_EVAL_JUDGE_MODEL", service="chat")
        return chat
    own: dict[str, object] = {"model": settings.judge_model}
    if settings.judge_base_url:
        own |= {"base_url": settings.judge_base_url, "api_key": settings.judge_api_key}
    elif settings.judge_api_key:
        own["api_key"] = settings.judge_api_key
    return chat.model_copy(update=own)


@asynccontextmanager
async def _of(service: Service) -> AsyncIterator[Evaluation]:
    settings = service.query.evaluation
    judge = chats.by_settings(judge_settings(service.query.chat, settings))
    try:
        yield Evaluation(
            service.pool,
            service.search,
            settings,
            EvalMetrics(service.metrics.registry, settings),
            service.answers.for_evaluation(),
            judge,
            service.embedders,
        )
    finally:
        if judge is not None:
            await judge.aclose()


async def run_if_due(evaluation: Evaluation) -> bool:
    """Run the evaluation if it is due; return whether this process has run it. Raises PenstockError."""
    async with connected(evaluation.pool) as connection, leading(connection, EVAL_LOCK) as is_leader:
        last = await newest(connection)
        late = last is None or evaluation.now() - last.started >= timedelta(seconds=evaluation.settings.every_seconds)
        await connection.commit()
        if is_leader and late:
            return await evaluation.run() is not None
        if last is not None:
            evaluation.show(last)
        return False


async def newest(connection: Connection) -> Run | None:
    """The newest stored run. Raises psycopg.Error."""
    cursor = await connection.execute(
        "SELECT started_at, slice, measure, value, queries, change, p, paired, accepted FROM eval_runs"
        " WHERE started_at = (SELECT max(started_at) FROM eval_runs)"
    )
    rows = await cursor.fetchall()
    if not rows:
        return None
    return Run(
        rows[0][0],
        {(s, m): (value, queries) for _, s, m, value, queries, *_ in rows},
        {(s, m): Change(*change) for _, s, m, _, _, *change in rows if change[0] is not None},
    )


async def _keep(connection: Connection, generation: str, run: Run) -> None:
    async with connection.transaction(), connection.cursor() as cursor:
        await cursor.executemany(
            "INSERT INTO eval_runs"
            " (started_at, generation, slice, measure, value, queries, change, p, paired, accepted)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            [
                (
                    run.started,
                    generation,
                    *key,
                    value,
                    queries,
                    change.ratio,
                    change.p,
                    change.questions,
                    change.accepted,
                )
                for key, (value, queries) in run.means.items()
                for change in (run.changes[key],)
            ],
        )
        oldest = run.started - timedelta(days=RETENTION_DAYS)
        await cursor.execute("DELETE FROM eval_runs WHERE started_at < %s", [oldest])


def answered(golden: Sequence[Golden], count: int) -> list[Golden]:
    """The questions that are also answered, the same ones in every run: those with the lowest ids, which are hashes. A
    new question takes the place of at most one of them."""
    return sorted(golden, key=lambda g: g.id)[:count]


def _slices(golden: Golden) -> set[str]:
    return {ALL, *(j.source for j in golden.judged)}


def _values(grades: Grades) -> dict[str, float]:
    named = {
        FAITHFULNESS: grades.faithfulness,
        "answer_relevancy": grades.answer_relevancy,
        "context_precision": grades.context_precision,
        "context_recall": grades.context_recall,
    }
    return {name: value for name, value in named.items() if value is not None}


def _judged(values: Mapping[str, float], by: str) -> dict[str, Value]:
    return {name: Value(value, by) for name, value in values.items()}


def _means(slices: Mapping[UUID, set[str]], values: Mapping[UUID, Mapping[str, Value]]) -> Means:
    gathered: dict[tuple[str, str], list[float]] = {}
    for id_, names in slices.items():
        for name, judged in values[id_].items():
            for slice_ in names:
                gathered.setdefault((slice_, name), []).append(judged.value)
    return {key: (float(np.mean(all_of)), len(all_of)) for key, all_of in gathered.items()}


def _largest(means: Means) -> Sequence[str]:
    """The slices with most questions, ``*`` first."""
    sizes = {slice_: queries for (slice_, name), (_, queries) in means.items() if name == NDCG}
    return sorted(sizes, key=lambda s: (s != ALL, -sizes[s], s))[: MOST_SLICES + 1]


ALL = "*"
"""The slice of every question."""
MOST_SLICES = 30
"""Sources with a series of their own, those with most questions; the others are in ``*`` only."""


class SliceLabels(NamedTuple):
    slice: str


class MeasureSliceLabels(NamedTuple):
    measure: str
    slice: str


class MeasureLabels(NamedTuple):
    measure: str


class EvalMetrics:
    """The metrics of the evaluation, in the registry of ``query.telemetry.QueryMetrics``."""

    def __init__(self, registry: CollectorRegistry, settings: EvalSettings) -> None:
        r = registry
        self.ndcg = gauge("penstock_eval_ndcg", "nDCG@5 of the golden questions, by source", SliceLabels, registry=r)
        self.recall = gauge(
            "penstock_eval_recall", "recall@50 of the golden questions, by source", SliceLabels, registry=r
        )
        self.faithfulness = gauge(
            "penstock_eval_faithfulness",
            "Share of the answers' statements that their passages support",
            SliceLabels,
            registry=r,
        )
        self.answers = gauge(
            "penstock_eval_answers",
            "answer_relevancy, context_precision and context_recall of the answers",
            MeasureSliceLabels,
            registry=r,
        )
        self.change = gauge(
            "penstock_eval_change_ratio",
            "Change from the accepted values of the same questions: -0.05 is 5 % worse",
            MeasureSliceLabels,
            registry=r,
        )
        self.change_p = gauge(
            "penstock_eval_change_p",
            "p of that change by a paired randomisation test: below 0.05 it is significant",
            MeasureSliceLabels,
            registry=r,
        )
        self.accepted = gauge(
            "penstock_eval_accepted",
            "Mean of the accepted values of all questions, where a new question has its present value",
            MeasureSliceLabels,
            registry=r,
        )
        self.compared = gauge(
            "penstock_eval_compared_queries",
            "Questions that have an accepted value, by which the change is measured",
            MeasureSliceLabels,
            registry=r,
        )
        self.floor = gauge("penstock_eval_floor", "The value below which an alert is raised", MeasureLabels, registry=r)
        self.floor.labels("nDCG@5").set(settings.ndcg_floor)
        self.floor.labels("faithfulness").set(settings.faithfulness_floor)
        self.queries = gauge("penstock_eval_queries", "Golden questions in the last run", SliceLabels, registry=r)
        self.lost = Gauge(
            "penstock_eval_lost_judgements", "Judgements whose document or words no longer exist", registry=r
        )
        self.ran_at = Gauge(
            "penstock_eval_last_run_timestamp_seconds", "Time at which the last complete run began", registry=r
        )
        self.failures = Counter("penstock_eval_failures", "Runs that could not be completed", registry=r)
