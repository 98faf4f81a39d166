"""Folders on a mount whose server does not answer."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.folder import follow
from connectors.folder.connector import PROGRAM, Hints
from connectors.folder.source import Folder, FolderSettings
from connectors.source import Context
from connectors.uploads.drop import Drop
from connectors.uploads.options import UploadsOptions
from tests.support.connectors.slack_kit import Notes
from tests.support.waiting import until

SILENT = "import time; time.sleep(600)"
"""A program that follows nothing, as where it waits for a mount."""


@pytest.fixture
def unanswered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder, every request for whose path waits."""
    folder, end, real = tmp_path / "unanswered", threading.Event(), os.path.realpath

    def waiting(path: Any, **options: Any) -> str:
        if Path(path) == folder:
            end.wait(60)
        return str(real(path, **options))

    monkeypatch.setattr(os.path, "realpath", waiting)
    yield folder
    end.set()


async def documents(path: Path, own: Path) -> list[str]:
    own.mkdir()
    context = Context(name="docs", tenant="default", folder=own, memory=Notes())
    made = Folder(FolderSettings(paths=[path], acl_tags=("all",)), context)
    try:
        async with aclosing(made.full(None)) as pages:  # type: ignore[type-var]
            return [entry.content async for page in pages for entry in page.entries]  # type: ignore[union-attr]
    finally:
        await made.close()


async def test_a_mount_that_does_not_answer_stops_no_other_folder(unanswered: Path, tmp_path: Path) -> None:
    """The folder was looked for in the event loop of all connectors, when its connector started."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("It is found.")
    async with asyncio.timeout(20):
        waiting = [asyncio.create_task(documents(unanswered, tmp_path / str(n))) for n in range(3)]
        await asyncio.sleep(0.1)
        assert await documents(tmp_path / "docs", tmp_path / "own") == ["It is found."]
    for task in waiting:
        task.cancel()


async def test_a_drop_folder_that_does_not_answer_stops_nothing_else(unanswered: Path, tmp_path: Path) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    drop = Drop(UploadsOptions(folder=unanswered, done=tmp_path / "done"), Any)  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        scan = asyncio.create_task(drop.scan())
        await asyncio.sleep(0.1)
        assert await asyncio.to_thread(lambda: "another connector") == "another connector"
    scan.cancel()
    drop.close()


async def test_a_folder_that_is_looked_through_without_end_delays_only_its_first_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that follows folders holds the lock of the interpreter meanwhile: nothing else ran in the worker."""
    monkeypatch.setattr("connectors.folder.connector.PROGRAM", (sys.executable, "-c", SILENT))
    monkeypatch.setattr("connectors.folder.connector.START_SECONDS", 0.2)
    async with asyncio.timeout(20), Hints([str(tmp_path)]) as hints:
        assert await hints.next(asyncio.Event(), 0.1) is None


async def test_the_program_that_follows_folders_is_started_again_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.folder.connector.RESTART_SECONDS", 0.1)
    monkeypatch.setattr("connectors.folder.connector.PROGRAM", (sys.executable, "-c", ""))
    async with asyncio.timeout(30), Hints([str(tmp_path)]) as hints:
        await until(lambda: [problem.code for problem in hints.problems()] == ["not_watched"])
        monkeypatch.setattr("connectors.folder.connector.PROGRAM", PROGRAM)
        await until(lambda: not hints.problems() and not hints._not_yet)
        assert await hints.next(asyncio.Event(), 0) is None
        (tmp_path / "a.md").write_text("new")
        while (targets := await hints.next(asyncio.Event(), 10)) is None:
            pass
        assert targets == [(str(tmp_path), str(tmp_path / "a.md"))]


@pytest.mark.parametrize("program", [("/nonexistent",), (sys.executable, "-c", "print('{', end='')")])
async def test_folders_are_followed_again_after_a_program_that_could_not_be_started_or_ended_within_a_line(
    program: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were followed no more, and no problem said so."""
    monkeypatch.setattr("connectors.folder.connector.RESTART_SECONDS", 0.1)
    monkeypatch.setattr("connectors.folder.connector.PROGRAM", program)
    async with asyncio.timeout(30), Hints([str(tmp_path)]) as hints:
        await until(lambda: [problem.code for problem in hints.problems()] == ["not_watched"])
        monkeypatch.setattr("connectors.folder.connector.PROGRAM", PROGRAM)
        await until(lambda: not hints.problems())


async def test_everything_is_scanned_once_a_folder_is_followed_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changed after the first scan had listed it was missed until the next one."""
    monkeypatch.setattr("connectors.folder.connector.START_SECONDS", 0)
    async with asyncio.timeout(30), Hints([str(tmp_path)]) as hints:
        assert await hints.next(asyncio.Event(), 3600) is None


def test_a_folder_that_was_followed_for_long_is_soon_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure doubled the pause for all later ones, such as those by names that are not UTF-8."""
    now, pauses = 0.0, list[float]()

    def watching(*_: object, **__: object) -> Iterator[set[object]]:
        nonlocal now
        yield set()
        now += 1 if len(pauses) < 3 else 3600
        yield set()
        raise RuntimeError("a name")

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(follow, "watch", watching)
    monkeypatch.setattr(follow, "_write", lambda _: None)
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with pytest.raises(KeyboardInterrupt):
        follow._follow(os.curdir, True, 5.0)
    assert pauses == [5, 10, 20, 5]


async def test_a_folder_that_vanishes_is_followed_again_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as followed, but changes in it were not noticed any more."""
    monkeypatch.setattr("connectors.folder.connector.RESTART_SECONDS", 0.1)
    folder = tmp_path / "docs"
    async with asyncio.timeout(60), Hints([str(folder)]) as hints:
        for _ in range(2):
            await until(lambda: [problem.code for problem in hints.problems()] == ["not_watched"])
            folder.mkdir()
            await until(lambda: not hints.problems())
            assert await hints.next(asyncio.Event(), 0) is None
            (folder / "a.md").write_text("new")
            assert await hints.next(asyncio.Event(), 3600) == [(str(folder), str(folder / "a.md"))]
            shutil.rmtree(folder)
