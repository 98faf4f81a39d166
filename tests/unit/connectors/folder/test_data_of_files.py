"""One file's data never stop the reading of its folder."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from connectors.conform.memory_runner import InMemory, MemoryRunner
from connectors.extract import extract
from connectors.folder.content import revision_of
from connectors.folder.source import Folder, FolderSettings
from connectors.paths import path_metadata
from connectors.set_aside import UNEXPECTED, SetAside
from connectors.source import Context


@pytest.fixture
def runner(tmp_path: Path) -> MemoryRunner:
    (tmp_path / "files").mkdir()
    (tmp_path / "state").mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / "files" / name).write_text(f"This is {name}.")
    context = Context(name="s", tenant="t", memory=InMemory(), folder=tmp_path / "state", set_aside=SetAside())
    folder = Folder(FolderSettings(paths=[tmp_path / "files"], acl_tags=("staff",)), context)
    return MemoryRunner(folder, context.set_aside)


async def test_a_file_that_our_code_fails_on_stops_no_other(
    runner: MemoryRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(relative: str, size: int) -> Any:
        return {}["quotes the file"] if relative == "b.txt" else path_metadata(relative, size)

    monkeypatch.setattr("connectors.folder.content.path_metadata", failing)
    assert await runner.full()
    assert await runner.sweep()
    assert sorted(document.title for document in runner.published.values()) == ["a.txt", "c.txt"]
    [row] = [row for row in runner.rows.values() if row.problem_code is not None]
    assert (row.problem_code, row.acl_tags) == (UNEXPECTED, ("staff",))
    assert "quotes" not in runner.status
    monkeypatch.undo()
    assert await runner.full()
    assert len(runner.published) == 3


async def test_a_listed_file_that_our_code_fails_on_stops_no_other_and_is_not_deleted(
    runner: MemoryRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(candidate: Any) -> str:
        return {}["quotes the file"] if candidate.path.endswith("b.txt") else revision_of(candidate)

    assert await runner.full()
    monkeypatch.setattr("connectors.folder.source.revision_of", failing)
    (tmp_path / "files" / "c.txt").write_text("It was edited.")
    assert await runner.sweep()
    assert not runner.deleted
    assert sorted(document.content for document in runner.published.values())[0] == "It was edited."
    assert len(runner.published) == 3
    assert "b.txt is set aside" in runner.status


async def test_files_that_take_long_keep_nothing_else_of_the_process_waiting(
    runner: MemoryRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each activity of each folder kept one of the few threads that all connectors share, while it read fifty files."""
    reading, may_end = threading.Event(), threading.Event()

    def slow(data: bytes, name: str) -> Any:
        reading.set()
        may_end.wait(60)
        return extract(data, name)

    monkeypatch.setattr("connectors.folder.content.extract", slow)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    full = asyncio.create_task(runner.full())
    try:
        async with asyncio.timeout(20):
            while not reading.is_set():
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(lambda: "another connector") == "another connector"
    finally:
        may_end.set()
    assert await full
    assert len(runner.published) == 3
