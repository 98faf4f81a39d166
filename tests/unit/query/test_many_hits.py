"""Searches of very many hits, which keep nobody else waiting, and of queries that are made to take long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any, cast
from uuid import UUID

import pytest

from query.model import Passage
from query.retrieval.arrange import Hit
from query.retrieval.keywords import MAX_IDENTIFIERS, MAX_QUERY_WORDS
from query.retrieval.many import MAX_AT_ONCE, computed
from query.retrieval.ranking import Floors, assess
from query.retrieval.search import Search
from query.retrieval.steps import Steps
from query.retrieval.stores import Query, Scope


class Index:
    """An Elasticsearch that nothing is asked of."""

    def options(self, **_: object) -> Index:
        return self


def hit(n: int, text: str) -> Hit:
    return Hit(Passage(UUID(int=n), UUID(int=n), f"{n}.md", "wiki", "", None, 0), text, 1.0, {})


def search() -> Search:
    return Search(cast(Any, None), cast(Any, Index()), None)


def question(text: str) -> Query:
    return Query(text, 10, "hybrid", rerank=True)


NO_SCOPE = cast(Scope, None)


@contextmanager
def one_busy_thread() -> Iterator[Event]:
    """All threads are taken, until the event is set."""
    free = Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, free.wait)
    try:
        yield free
    finally:
        free.set()
        assert busy is not None


@pytest.mark.asyncio
async def test_an_ordinary_search_waits_for_no_thread() -> None:
    """While answers had taken all threads, feedback ran into its time limit and the ranking was another one."""
    hits = [hit(n, f"Text {n}.") for n in range(MAX_AT_ONCE + 1)]
    with one_busy_thread() as free:
        long = asyncio.create_task(computed(hits, lambda: len(hits)))
        await asyncio.sleep(0)
        async with asyncio.timeout(60):  # it would never end
            assert await computed(hits[1:], lambda: MAX_AT_ONCE) == MAX_AT_ONCE
        assert not long.done()
        free.set()
        assert await long == len(hits)


@pytest.mark.asyncio
async def test_very_many_hits_are_put_into_order_in_a_thread() -> None:
    hits = [hit(n, f"Text {n} of PROJ-{n}.") for n in range(MAX_AT_ONCE + 1)]
    last = f"PROJ-{MAX_AT_ONCE}"
    searching = search()
    with one_busy_thread() as free:
        ordering = asyncio.create_task(searching._ordered(question(last), NO_SCOPE, hits, Steps()))
        sufficing = asyncio.create_task(searching._suffice(question(last), hits))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not ordering.done()
        assert not sufficing.done()
        free.set()
        assert (await ordering)[0] is hits[-1]
        assert await sufficing


@pytest.mark.asyncio
async def test_of_a_query_full_of_identifiers_the_first_count() -> None:
    names = [f"PROJ-{n}" for n in range(100, 100 + MAX_IDENTIFIERS + 1)]
    hits = [hit(1, "Neither."), hit(2, f"See {names[-1]}."), hit(3, f"See {names[-2]}.")]

    ordered = await search()._ordered(question(" ".join(names)), NO_SCOPE, hits, Steps())

    assert [h.passage.external_id for h in ordered] == ["3.md", "1.md", "2.md"]


def test_of_a_long_query_the_words_count_that_are_searched_for() -> None:
    """The others cost time, and no passage has them all."""
    searched = [f"alpha{n}x" for n in range(MAX_QUERY_WORDS)]
    passage = " ".join(searched)
    query = " ".join([*searched, *(f"omega{n}x" for n in range(500))])

    relevant, _ = assess(query, 0.1, [passage], Floors(0.5, 0.75, "test"))

    assert relevant
