"""Comparison of candidate settings of ranking with the current ones, on the same questions and documents: whether they
may take their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import Misconfigured
from pipeline.ledger import generations
from pipeline.runtime.settings import Settings, dist
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Pool
from query.embedding.embedders import GenerationEmbedders
from query.evaluation import measures
from query.evaluation.baseline import SIGNIFICANT, WORST_RATIO
from query.evaluation.measures import Interval
from query.evaluation.questions import (
    PATIENT,
    TIMEOUT_SECONDS,
    NothingJudged,
    Question,
    both_values,
    of_collection,
    of_golden,
)
from query.evaluation.rankings import open_rankings
from query.evaluation.service import NDCG, RECALL, TOP, connected
from query.evaluation.shadow import Shadowed, ranking_name, shadowed
from query.model import SearchResults
from query.rerank.guarded import open_reranker
from query.settings import QuerySettings

DECIDE = (NDCG, RECALL)
"""The measures that decide, as for a run of the golden questions."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One measure by both settings, over the same questions."""

    current: float
    candidate: float
    ratio: float
    """The relative change: -0.05 is 5 % worse. 0 if the current one is 0."""
    difference: Interval
    """The absolute difference of the means with its 95 % interval over the questions."""
    p: float
    """By a paired, two-sided randomisation test."""
    better: int
    """How many questions have a higher value by the candidate settings."""
    worse: int

    @property
    def is_decline(self) -> bool:
        """Large and significant enough to refuse the candidate settings."""
        return self.ratio < WORST_RATIO and self.p < SIGNIFICANT


@dataclass(frozen=True, slots=True)
class Gate:
    """The result of a comparison."""

    generation: str
    settings: Sequence[str]
    """The settings that differ."""
    questions: int
    """0: none is judged, and only ``shadow`` is known."""
    measures: Mapping[str, Difference]
    shadow: Shadowed
    """The agreement of both on shadow queries."""

    def failures(self, bounds: Mapping[str, float]) -> list[str]:
        """Why the candidate settings are not good enough, one line for each reason. bounds: the least value of
        measures."""
        declines = [
            f"{name} is {-measured.ratio:.2%} lower by the candidate settings, p = {measured.p:.4f}"
            for name, measured in self.measures.items()
            if name in DECIDE and measured.is_decline
        ]
        low = [
            f"{name} by the candidate settings is {measured.candidate:.4f}, below {bounds[name]:g}"
            for name, measured in self.measures.items()
            if name in bounds and measured.candidate < bounds[name]
        ]
        return declines + low


def candidate_of(query: QuerySettings) -> QuerySettings:
    """The settings with the candidate ones in their place. Raises Misconfigured if there are none."""
    candidate = query.candidate()
    if candidate is None:
        raise Misconfigured(
            "no setting of ranking differs: set candidate ones, such as PENSTOCK_SHADOW_QUERY_KEYWORD_WEIGHT or"
            " PENSTOCK_SHADOW_RERANK_URL"
        )
    return candidate


async def judge(
    settings: Settings,
    query: QuerySettings,
    candidate: QuerySettings,
    pool: Pool,
    *,
    dataset: Path | None = None,
    tenant: str = "default",
    principals: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> Gate:
    """Compare both settings by the service's own hybrid search, with the rerankers that they name.

    The questions are all current golden questions, or those of a dataset whose documents are in ``tenant`` under their
    ids; they are asked with these principals and tags. Raises BadDataset, Misconfigured and Retryable (an outage or an
    incomplete search).
    """
    async with AsyncExitStack() as closing:
        es = connect(settings.elasticsearch, reads_only=True)
        closing.push_async_callback(es.close)
        embedders = GenerationEmbedders.by_settings(
            settings.embedding, dist() / "models", embed_seconds=TIMEOUT_SECONDS
        )
        closing.push_async_callback(embedders.aclose)
        reranker = await open_reranker(query.rerank.model_copy(update={"timeout_seconds": TIMEOUT_SECONDS}))
        if reranker is not None:
            closing.push_async_callback(reranker.aclose)
        rankings = await closing.enter_async_context(
            open_rankings(query, candidate, pool, es, embedders, PATIENT, reranker, seconds=TIMEOUT_SECONDS)
        )
        async with connected(pool) as connection:
            active = await generations.active(connection)
            shadow = await shadowed(connection, active.name, ranking_name(active, rankings.differences))
            try:
                if dataset is None:
                    questions, judged = await of_golden(connection)
                else:
                    questions, judged = await of_collection(connection, dataset, tenant, principals, tags)
            except NothingJudged:
                return Gate(active.name, rankings.differences, 0, {}, shadow)

        async def both(question: Question) -> Sequence[SearchResults]:
            return await rankings.both(question.text, question.caller, active, top=TOP)

        names = "by the current settings", "by the candidate settings"
        current, theirs = await both_values(both, questions, judged, names)
    compared = {name: _difference(theirs[name], current[name]) for name in measures.MEASURES}
    return Gate(active.name, rankings.differences, len(questions), compared, shadow)


def _difference(candidate: NDArray[np.float64], current: NDArray[np.float64]) -> Difference:
    tested = measures.compare(candidate, current)
    before, after = float(np.mean(current)), float(np.mean(candidate))
    ratio = after / before - 1.0 if before > 0.0 else 0.0
    return Difference(before, after, ratio, tested.difference, tested.p_randomisation, tested.wins, tested.losses)
