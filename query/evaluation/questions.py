"""Judged questions that are asked in two ways, so that both are compared on the same questions and documents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.postgres import Connection
from query.access.callers import Caller, identify
from query.access.tenant_rows import set_tenant
from query.evaluation import dataset as datasets
from query.evaluation import golden as judgements
from query.evaluation import measures, rank
from query.evaluation.dataset import Judgements
from query.model import MAX_QUERY_CHARACTERS, SearchResults
from query.retrieval.stores import Timeouts

AT_ONCE = 4
TIMEOUT_SECONDS = 60.0
"""The time limit of each store and of the models, long enough that no search leaves a store out."""
PATIENT = Timeouts(TIMEOUT_SECONDS, TIMEOUT_SECONDS, TIMEOUT_SECONDS)
NOTHING_JUDGED = (
    "there are no current golden questions to compare by: add some with `penstock golden add`, or name a --dataset"
)


class NothingJudged(Misconfigured):
    """There is no question by which anything could be compared."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its caller, and the golden question that its results are compared with, if any."""

    text: str
    caller: Caller
    golden: judgements.Golden | None = None

    def ranking(self, results: SearchResults) -> Sequence[str]:
        return rank.documents(results) if self.golden is None else judgements.ranking(self.golden, results)


Questions = Mapping[str, Question]


async def of_golden(connection: Connection) -> tuple[Questions, Judgements]:
    """All current golden questions. Raises NothingJudged if there are none."""
    left, _ = await judgements.current(connection, await judgements.load(connection))
    if not left:
        raise NothingJudged(NOTHING_JUDGED)
    questions = {}
    for golden in left:
        await set_tenant(connection, golden.tenant)
        caller = await identify(connection, golden.tenant, principals=golden.principals, tags=golden.tags)
        questions[str(golden.id)] = Question(golden.text, caller, golden)
    return questions, {str(golden.id): judgements.gains(golden) for golden in left}


async def of_collection(
    connection: Connection, folder: Path, tenant: str, principals: Sequence[str], tags: Sequence[str]
) -> tuple[Questions, Judgements]:
    """Those of a collection (``penstock eval`` describes the layouts) whose documents are in ``tenant`` under their
    ids, asked with these principals and tags. Raises BadDataset."""
    await set_tenant(connection, tenant)
    caller = await identify(connection, tenant, principals=principals, tags=tags)
    collection = await asyncio.to_thread(datasets.read, folder)
    questions = {id_: Question(text[:MAX_QUERY_CHARACTERS], caller) for id_, text in collection.queries.items()}
    return questions, collection.judgements


async def both_values(
    both: Callable[[Question], Awaitable[Sequence[SearchResults]]],
    questions: Questions,
    judged: Judgements,
    names: tuple[str, str],
) -> tuple[measures.Values, measures.Values]:
    """The values of each measure in both ways. both: the two results of one question. names: of a search in either way.
    Raises Retryable if a search was incomplete, because its values say nothing."""
    places = asyncio.Semaphore(AT_ONCE)
    rankings: tuple[dict[str, Sequence[str]], dict[str, Sequence[str]]] = {}, {}

    async def ask(id_: str, question: Question) -> None:
        async with places:
            results = await both(question)
        for name, ranking, response in zip(names, rankings, results, strict=True):
            if response.degraded:
                raise Retryable(f"a search {name} was incomplete: {response.degraded[0]}")
            ranking[id_] = question.ranking(response)

    tasks = [asyncio.create_task(ask(id_, question)) for id_, question in questions.items()]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)
    return measures.measure(rankings[0], judged), measures.measure(rankings[1], judged)
