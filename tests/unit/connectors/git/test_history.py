"""Last changes of files: what a history that is made for it can cost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from connectors.git.client import Mirror
from connectors.git.history import History


class Log:
    """A mirror with this log of git."""

    def __init__(self, records: Iterable[bytes]) -> None:
        self._records = records
        self.read = 0

    async def read_records(self, consume: Callable[[bytes], bool], *_: str, **__: Any) -> None:
        for record in self._records:
            self.read += 1
            if not consume(record):
                return

    async def is_ancestor(self, old: str, new: str) -> bool:
        return True


def commit(author: str, *paths: str) -> list[bytes]:
    first, *others = paths
    return [b"\x021700000000", author.encode(), b"\n" + first.encode(), *(path.encode() for path in others)]


async def last_changes(history: History, log: Log, head: str, *paths: str) -> dict[str, str | None]:
    await history.advance(cast(Mirror, log), head, paths)
    return {path: change.author for path, change in history.last_changes.items()}


async def test_files_that_a_history_names_and_its_last_commit_lacks_take_no_memory() -> None:
    """Some kilobytes of trees that contain one another name millions of files, in each commit others."""

    def gone() -> Iterable[bytes]:
        return (record for n in range(10) for record in commit("Eve", *(f"{n}/{'x' * 200}/{i}" for i in range(20_000))))

    history, log = History(), Log([*commit("Ann", "b.md"), *commit("Ben", "a.md")])
    assert await last_changes(history, log, "1", "a.md", "b.md") == {"a.md": "Ben", "b.md": "Ann"}
    tracemalloc.start()
    try:
        assert await last_changes(history, Log(gone()), "2", "a.md") == {"a.md": "Ben"}
        assert await last_changes(History(), Log(gone()), "2", "a.md") == {}
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


async def test_a_walk_over_a_history_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.git.history.MAX_WALKED", 10)
    log = Log([*commit("Ann", "b.md"), *(record for _ in range(9) for record in commit("Eve", "gone.md"))])
    history = History()
    assert await last_changes(history, log, "1", "a.md", "b.md") == {"b.md": "Ann"}
    assert log.read == 10


async def test_a_walk_ends_with_the_last_change_of_the_last_file() -> None:
    log = Log([*commit("Ann", "b.md", "a.md"), *commit("Ben", "a.md")])
    assert await last_changes(History(), log, "1", "a.md", "b.md") == {"a.md": "Ann", "b.md": "Ann"}
    assert log.read == 4
    empty = Log(commit("Ann", "b.md"))
    assert (await last_changes(History(), empty, "1"), empty.read) == ({}, 0)
