"""Comparison of two generations on the same documents and questions: whether the candidate may become active."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.errors import Misconfigured
from pipeline.ledger import generations
from pipeline.runtime.settings import Settings, dist
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Pool
from query.embedding.embedders import GenerationEmbedders
from query.evaluation import measures
from query.evaluation.measures import Interval
from query.evaluation.questions import (
    AT_ONCE,
    PATIENT,
    TIMEOUT_SECONDS,
    Question,
    both_values,
    of_collection,
    of_golden,
)
from query.evaluation.service import connected
from query.evaluation.shadow import Shadowed, shadowed
from query.model import MAX_TOP, SearchResults
from query.retrieval.search import Search
from query.settings import RetrievalSettings

DECIDES = "nDCG@5"
WORST_CHANGE = -0.02
"""The lowest relative change of it against the active generation; below it, a cut-over is refused."""
ROUNDING = 1e-9
"""A tolerance for rounding: 0.98 / 1.0 - 1 is slightly less than -0.02."""


@dataclass(frozen=True, slots=True)
class Comparison:
    active: str
    candidate: str
    questions: int
    before: Mapping[str, float]
    """The active generation's mean of each measure, named as in ``penstock eval``."""
    after: Mapping[str, float]
    """The candidate's mean of each measure."""
    change: float
    """The relative change of nDCG@5: -0.02 is 2 % worse. If the active generation has 0: 0, or 1 if the candidate has
    more."""
    difference: Interval
    """The absolute difference of nDCG@5 with its 95 % interval over the questions."""
    p: float
    """The p-value of the difference by a paired, two-sided randomisation test."""
    shadow: Shadowed
    """The agreement of both generations on shadow queries, if there were any."""

    @property
    def worse(self) -> str | None:
        """The reason, with both numbers, why the candidate may not become active; else None."""
        if self.change >= WORST_CHANGE - ROUNDING:
            return None
        return (
            f"nDCG@5 of generation {self.candidate} is {self.after[DECIDES]:.3f}, {-self.change:.2%} below the"
            f" {self.before[DECIDES]:.3f} of {self.active}"
        )


async def compare(
    settings: Settings,
    pool: Pool,
    candidate: str,
    *,
    dataset: Path | None = None,
    tenant: str = "default",
    principals: Sequence[str] = (),
    tags: Sequence[str] = (),
    retrieval: RetrievalSettings | None = None,
) -> Comparison:
    """Compare both generations by the service's own search (hybrid, without reranking) in their stores.

    The questions are all current golden questions, or those of a dataset (``penstock eval`` describes the layouts)
    whose documents are in ``tenant`` under their ids; they are asked with these principals and tags. Raises BadDataset,
    NothingJudged, Misconfigured (no such generation) and Retryable (an outage or an incomplete search).
    """
    async with connected(pool) as connection:
        active = await generations.active(connection)
        existing = {generation.name: generation for generation in await generations.writable(connection)}
        if candidate not in existing:
            raise Misconfigured(f"there is no generation {candidate} to compare: see `penstock generation list`")
        if dataset is None:
            questions, judged = await of_golden(connection)
        else:
            questions, judged = await of_collection(connection, dataset, tenant, principals, tags)
    async with AsyncExitStack() as closing:
        embedders = GenerationEmbedders.by_settings(
            settings.embedding, dist() / "models", embed_seconds=TIMEOUT_SECONDS
        )
        closing.push_async_callback(embedders.aclose)
        es = connect(settings.elasticsearch)
        closing.push_async_callback(es.close)
        alone = (retrieval or RetrievalSettings()).model_copy(update={"cached_queries": 0, "feedback_at_once": AT_ONCE})
        search = Search(pool, es, embedders, timeouts=PATIENT, settings=alone)

        async def both(question: Question) -> Sequence[SearchResults]:
            """Search with the active generation, then with the candidate."""
            return [
                await search.search(question.text, question.caller, top=MAX_TOP, rerank=False, generation=generation)
                for generation in (active, existing[candidate])
            ]

        names = f"of generation {active.name}", f"of generation {candidate}"
        before, after = await both_values(both, questions, judged, names)
    async with connected(pool) as connection:
        shadow = await shadowed(connection, active.name, candidate)
    tested = measures.compare(after[DECIDES], before[DECIDES])
    means = {name: float(np.mean(scores)) for name, scores in before.items()}
    theirs = {name: float(np.mean(scores)) for name, scores in after.items()}
    return Comparison(
        active.name,
        candidate,
        len(questions),
        means,
        theirs,
        _change(means[DECIDES], theirs[DECIDES]),
        tested.difference,
        tested.p_randomisation,
        shadow,
    )


def _change(before: float, after: float) -> float:
    if before == 0.0:
        return 1.0 if after > 0.0 else 0.0
    return after / before - 1.0
