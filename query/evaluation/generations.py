"""Two generations over the same documents, by the same questions: whether the candidate may take over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Generation
from pipeline.ledger import generations
from pipeline.runtime.settings import Settings, dist
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Connection, Pool
from query.access.callers import Caller, identify
from query.access.tenant_rows import set_tenant
from query.embedding.embedders import GenerationEmbedders
from query.evaluation import dataset as datasets
from query.evaluation import golden as judgements
from query.evaluation import measures, rank
from query.evaluation.dataset import Judgements
from query.evaluation.measures import Interval
from query.evaluation.service import connected
from query.evaluation.shadow import Shadowed, shadowed
from query.model import MAX_QUERY_CHARACTERS, MAX_TOP, SearchResults
from query.retrieval.search import Search, Timeouts
from query.settings import RetrievalSettings

DECIDES = "nDCG@5"
WORST_CHANGE = -0.02
"""Of it against the active generation, relative: a new one that does worse is not cut over to."""
ROUNDING = 1e-9
"""0.98 / 1.0 - 1 is a little less than -0.02: as much as is allowed is no reason to refuse."""
AT_ONCE = 4
TIMEOUT_SECONDS = 60.0
"""Of each store and of the models: a search that leaves a half out for being in a hurry would spoil the numbers."""


class NothingJudged(Misconfigured):
    """There is no question by which the generations could be compared."""


@dataclass(frozen=True, slots=True)
class Comparison:
    active: str
    candidate: str
    questions: int
    before: Mapping[str, float]
    """By measure (as ``penstock eval`` names them): the active generation's mean."""
    after: Mapping[str, float]
    """The candidate's."""
    change: float
    """Of nDCG@5, relative: -0.02 is 2 % worse. Where the active one finds nothing right: 0, or 1 if the candidate
    does."""
    difference: Interval
    """Of nDCG@5, absolute, with its 95 % interval over the questions."""
    p: float
    """Paired randomisation test, two-sided: how often as large a difference is mere chance."""
    shadow: Shadowed
    """How far both agreed on real questions, where some were shadowed."""

    @property
    def worse(self) -> str | None:
        """In words, with both numbers, where the candidate finds too much less to take over; else None."""
        if self.change >= WORST_CHANGE - ROUNDING:
            return None
        return (
            f"nDCG@5 of generation {self.candidate} is {self.after[DECIDES]:.3f}, {-self.change:.2%} below the"
            f" {self.before[DECIDES]:.3f} of {self.active}"
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """One question, who asks it, and how its answer becomes a ranking of what was judged."""

    text: str
    caller: Caller
    golden: judgements.Golden | None = None

    def ranking(self, found: SearchResults) -> Sequence[str]:
        return rank.documents(found) if self.golden is None else judgements.ranking(self.golden, found)


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
    """Both generations asked by the real search (hybrid, not reranked), in the stores that they are in.

    The questions: every golden judgement that stands; or a dataset's (``penstock eval`` says its layouts), whose
    documents stand in ``tenant`` under their ids already, asked by who has these principals and tags.
    Raises BadDataset, NothingJudged, Misconfigured (no such generation), Retryable (a server is away, a search was not
    whole).
    """
    async with connected(pool) as connection:
        active = await generations.active(connection)
        existing = {generation.name: generation for generation in await generations.writable(connection)}
        if candidate not in existing:
            raise Misconfigured(f"there is no generation {candidate} to compare: `penstock generation list` names them")
        if dataset is None:
            questions, judged = await _golden(connection)
        else:
            await set_tenant(connection, tenant)
            caller = await identify(connection, tenant, principals=principals, tags=tags)
            questions, judged = await asyncio.to_thread(_collection, dataset, caller)
    async with AsyncExitStack() as closing:
        embedders = GenerationEmbedders.by_settings(
            settings.embedding, dist() / "models", embed_seconds=TIMEOUT_SECONDS
        )
        closing.push_async_callback(embedders.aclose)
        es = connect(settings.elasticsearch)
        closing.push_async_callback(es.close)
        patient = Timeouts(TIMEOUT_SECONDS, TIMEOUT_SECONDS, TIMEOUT_SECONDS)
        alone = (retrieval or RetrievalSettings()).model_copy(update={"cached_queries": 0, "feedback_at_once": AT_ONCE})
        search = Search(pool, es, embedders, timeouts=patient, settings=alone)
        before = await _values(search, active, questions, judged)
        after = await _values(search, existing[candidate], questions, judged)
    async with connected(pool) as connection:
        shadow = await shadowed(connection, active.name, candidate)
    tested = measures.compare(after[DECIDES], before[DECIDES])
    means = {name: float(np.mean(of)) for name, of in before.items()}
    theirs = {name: float(np.mean(of)) for name, of in after.items()}
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


async def _golden(connection: Connection) -> tuple[dict[str, _Asked], Judgements]:
    left, _ = await judgements.standing(connection, await judgements.kept(connection))
    if not left:
        raise NothingJudged(
            "no golden judgement stands, so nothing says whether the new generation finds what it should:"
            " `penstock golden add` makes one, or name a dataset"
        )
    questions = {}
    for golden in left:
        await set_tenant(connection, golden.tenant)
        caller = await identify(connection, golden.tenant, principals=golden.principals, tags=golden.tags)
        questions[str(golden.id)] = _Asked(golden.text, caller, golden)
    return questions, {str(golden.id): judgements.gains(golden) for golden in left}


def _collection(folder: Path, caller: Caller) -> tuple[dict[str, _Asked], Judgements]:
    collection = datasets.read(folder)
    questions = {id_: _Asked(text[:MAX_QUERY_CHARACTERS], caller) for id_, text in collection.queries.items()}
    return questions, collection.judgements


async def _values(
    search: Search, generation: Generation, asked: Mapping[str, _Asked], judged: Judgements
) -> measures.Values:
    places = asyncio.Semaphore(AT_ONCE)
    rankings: dict[str, Sequence[str]] = {}

    async def ask(id_: str, one: _Asked) -> None:
        async with places:
            found = await search.search(one.text, one.caller, top=MAX_TOP, rerank=False, generation=generation)
        if found.degraded:
            raise Retryable(f"a search of generation {generation.name} was not whole: {found.degraded[0]}")
        rankings[id_] = one.ranking(found)

    questions = [asyncio.create_task(ask(id_, one)) for id_, one in asked.items()]
    try:
        await asyncio.gather(*questions)
    finally:
        for task in questions:
            task.cancel()
        await asyncio.gather(*questions, return_exceptions=True)
    return measures.measure(rankings, judged)
