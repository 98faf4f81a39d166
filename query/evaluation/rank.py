"""Rankings of documents for every query of a dataset in every mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from query.access.callers import Caller
from query.evaluation.dataset import Dataset
from query.evaluation.measures import Rankings
from query.model import MAX_QUERY_CHARACTERS, MAX_TOP, Mode, SearchResults

AT_ONCE = 4
RERANKED = "reranked"
"""The run of hybrid search whose order the reranker decides."""


class Searcher(Protocol):
    """The search to evaluate, such as ``query.retrieval.search.Search``."""

    async def search(self, query: str, caller: Caller, *, top: int, mode: Mode, rerank: bool) -> SearchResults: ...


async def rank(
    search: Searcher,
    caller: Caller,
    dataset: Dataset,
    modes: Sequence[Mode],
    *,
    rerank: bool = False,
    done: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Rankings], dict[str, int]]:
    """A ranking of documents for each query and mode, by their best passages, and the number of incomplete searches by
    their reasons, because measures of incomplete searches are meaningless.

    rerank: whether there is also a run RERANKED; the runs of the modes are not reranked. done: called after each query
    and run. Raises Retryable or Misconfigured when no store answers.
    """
    runs: dict[str, tuple[Mode, bool]] = {mode: (mode, False) for mode in modes}
    if rerank:
        runs[RERANKED] = "hybrid", True
    rankings: dict[str, dict[str, Sequence[str]]] = {run: {} for run in runs}
    degraded: dict[str, int] = {}
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(query: str, text: str, run: str, mode: Mode, reranked: bool) -> None:
        async with places:
            answer = await search.search(text[:MAX_QUERY_CHARACTERS], caller, top=MAX_TOP, mode=mode, rerank=reranked)
        for reason in answer.degraded:
            degraded[reason] = degraded.get(reason, 0) + 1
        rankings[run][query] = documents(answer)
        done()

    async with asyncio.TaskGroup() as group:
        for query, text in dataset.queries.items():
            for run, (mode, reranked) in runs.items():
                group.create_task(ask(query, text, run, mode, reranked))
    return dict(rankings), degraded


def documents(rankings: SearchResults) -> list[str]:
    """External ids, ranked by their best passages; a duplicate follows directly after the document that it repeats."""
    ranked: dict[str, None] = {}
    for result in rankings.results:
        for passage in (result.passage, *result.also):
            ranked.setdefault(passage.external_id)
    return list(ranked)


def by_slice(dataset: Dataset) -> Mapping[str, list[int]]:
    """The positions of the queries of each kind."""
    slices: dict[str, list[int]] = {}
    for n, query in enumerate(dataset.queries):
        if query in dataset.slices:
            slices.setdefault(dataset.slices[query], []).append(n)
    return slices
