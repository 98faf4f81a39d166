"""Ask every query in every mode → rankings of documents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from query.access.callers import Caller
from query.evaluation.dataset import Dataset
from query.evaluation.measures import Rankings
from query.model import MAX_QUERY_CHARACTERS, MAX_TOP, Mode, SearchResults

AT_ONCE = 4


class Searches(Protocol):
    """``query.retrieval.search.Search``, without reranking."""

    async def search(self, query: str, caller: Caller, *, top: int, mode: Mode, rerank: bool) -> SearchResults: ...


async def rank(
    search: Searches,
    caller: Caller,
    dataset: Dataset,
    modes: Sequence[Mode],
    *,
    rerank: bool = False,
    done: Callable[[], None] = lambda: None,
) -> tuple[dict[Mode, Rankings], dict[str, int]]:
    """One ranking of documents for each query and mode: a document stands where its best passage does. And how often
    something was left out, by its reason: numbers of a search that was not whole say nothing.

    done: called after each query and mode. Raises Retryable or Misconfigured when nothing can answer.
    """
    found: dict[Mode, dict[str, Sequence[str]]] = {mode: {} for mode in modes}
    degraded: dict[str, int] = {}
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(query: str, text: str, mode: Mode) -> None:
        async with places:
            answer = await search.search(
                text[:MAX_QUERY_CHARACTERS], caller, top=MAX_TOP, mode=mode, rerank=rerank and mode == "hybrid"
            )
        for reason in answer.degraded:
            degraded[reason] = degraded.get(reason, 0) + 1
        found[mode][query] = documents(answer)
        done()

    async with asyncio.TaskGroup() as group:
        for query, text in dataset.queries.items():
            for mode in modes:
                group.create_task(ask(query, text, mode))
    return dict(found), degraded


def documents(found: SearchResults) -> list[str]:
    """External ids, each where its best passage stands; that of a near-duplicate right behind the one it repeats."""
    ranked: dict[str, None] = {}
    for result in found.results:
        for passage in (result.passage, *result.also):
            ranked.setdefault(passage.external_id)
    return list(ranked)


def by_slice(dataset: Dataset) -> Mapping[str, list[int]]:
    """Kind → positions of its queries."""
    slices: dict[str, list[int]] = {}
    for n, query in enumerate(dataset.queries):
        if query in dataset.slices:
            slices.setdefault(dataset.slices[query], []).append(n)
    return slices
