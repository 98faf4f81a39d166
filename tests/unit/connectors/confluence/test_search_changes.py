"""A search for changes of any size takes the memory of the changes that a cursor holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakSet

import pytest

from connectors.confluence.changes import MAX_CHANGES
from connectors.confluence.client import Api, ChangesMissed, search_changes

API = cast("Api", SimpleNamespace(web=SimpleNamespace(name="wiki")))


class Result(dict[str, Any]):
    """A result of a search, of which the living ones can be counted."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Search:
    """Returns so many results, and counts those that it was asked for and those that are retained."""

    def __init__(self, results: int) -> None:
        self._results = results
        self._alive: WeakSet[Result] = WeakSet()
        self.most_alive = self.returned = 0

    async def __call__(self, cql: str) -> AsyncIterator[Result]:
        for n in range(self._results):
            version = {"number": 1, "when": "2026-11-28T09:00:00Z"}
            result = Result(id=str(n), type="page", version=version, space={"key": "ENG"})
            self._alive.add(result)
            self.returned += 1
            self.most_alive = max(self.most_alive, len(self._alive))
            yield result


async def test_results_of_a_search_are_not_retained() -> None:
    search = Search(1_000)
    changes = await search_changes(API, search, ["ENG"], 10)
    assert [change.id for change in changes] == [str(n) for n in range(1_000)]
    assert search.most_alive <= 2


async def test_after_more_changes_than_a_cursor_holds_everything_is_compared() -> None:
    search = Search(5 * MAX_CHANGES)
    with pytest.raises(ChangesMissed, match="20,000 changes"):
        await search_changes(API, search, ["ENG"], 10)
    assert search.returned == MAX_CHANGES + 1


async def test_changes_of_other_spaces_do_not_count() -> None:
    assert await search_changes(API, Search(MAX_CHANGES + 1), ["OPS"], 10) == []
