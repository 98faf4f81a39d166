"""Watching a folder: changes come by themselves, and what was not heard is found by the next scan."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from connectors.clock import Clock
from connectors.folder import sweep
from connectors.folder.access import Policy
from connectors.folder.connector import Comparison, Hints
from connectors.folder.content import FileRead, read
from connectors.folder.walk import Candidate, Walk
from connectors.protocol import Problem, ScanReport
from connectors.runner.guard import MASS_DELETE_DOCUMENTS
from connectors.withdraw import Withdrawal
from pipeline.core.errors import Retryable
from pipeline.core.identity import document_id
from tests.support.connectors.folder_kit import Desk, codes
from tests.support.waiting import until

pytestmark = pytest.mark.stack


@asynccontextmanager
async def watching(desk: Desk, *roots: Path, **options: Any) -> AsyncIterator[list[ScanReport]]:
    stop, reports = asyncio.Event(), list[ScanReport]()
    task = asyncio.create_task(desk.connector(*roots, **options).watch(stop, reports.append))
    try:
        yield reports
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


async def test_changes_are_published_as_they_happen(desk: Desk) -> None:
    desk.write("a.txt", "one")
    desk.write("gone.txt")
    async with watching(desk):
        await until(lambda: len(desk.recorder.sent) == 2)
        desk.recorder.take()
        desk.write("a.txt", "two")
        desk.write("new/deep/b.txt")  # a folder that was not watched when it was made
        (desk.root / "gone.txt").unlink()
        await until(lambda: len(desk.recorder.sent) == 3)
        assert desk.names(desk.recorder.take()) == [
            ("deleted", "gone.txt"),
            ("upserted", "a.txt"),
            ("upserted", "new/deep/b.txt"),
        ]
        (desk.root / "new").rename(desk.root / "newer")
        await until(lambda: len(desk.recorder.sent) == 2)
        assert desk.names(desk.recorder.take()) == [
            ("deleted", "new/deep/b.txt"),
            ("upserted", "newer/deep/b.txt"),
        ]


async def test_files_that_changed_together_do_not_wait_for_a_slow_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [desk.write(f"{n}.txt", "one") for n in range(10)]
    slow, released = str(files[3]), threading.Event()

    def read_slowly(path: str, stat: os.stat_result) -> FileRead:
        if path == slow:
            assert released.wait(30)
        return read(path, stat)

    monkeypatch.setattr(sweep, "read", read_slowly)
    sweeping = asyncio.create_task(desk.connector()._sweep([(str(desk.root), str(file)) for file in files], None))
    try:
        await until(lambda: len(desk.recorder.sent) == len(files) - 1)
        assert ("upserted", "3.txt") not in desk.names(desk.recorder.take())
    finally:
        released.set()
    assert len((await sweeping).published) == len(files)
    assert desk.names(desk.recorder.take()) == [("upserted", "3.txt")]


async def test_folders_that_changed_together_are_guarded_one_by_one(desk: Desk) -> None:
    """Each of three folders loses as many files as need no confirmation."""
    folders = [desk.root / name for name in "abc"]
    for folder in folders:
        for n in range(MASS_DELETE_DOCUMENTS):
            desk.write(f"{folder.name}/{n}.txt")
    await desk.scan()
    desk.write("d.txt")
    for folder in folders:
        shutil.rmtree(folder)
    report = await desk.connector()._sweep([(str(desk.root), str(folder)) for folder in folders], None)
    assert (len(report.deleted), report.problems) == (3 * MASS_DELETE_DOCUMENTS, [])


async def test_many_folders_that_vanish_together_need_confirmation(desk: Desk) -> None:
    """Each holds a quarter of all documents; those that are gone already do not count for the next one."""
    folders = [desk.root / name for name in "abcd"]
    for folder in folders:
        for n in range(MASS_DELETE_DOCUMENTS + 5):
            desk.write(f"{folder.name}/{n}.txt")
    desk.write("e.txt")
    await desk.scan()
    for folder in folders:
        shutil.rmtree(folder)
    report = await desk.connector()._sweep([(str(desk.root), str(folder)) for folder in folders], None)
    assert len(report.deleted) == MASS_DELETE_DOCUMENTS + 5
    assert codes(report.problems) == ["mass_delete"] * 3


@pytest.mark.parametrize("leaves", ["an empty folder", "nothing"])
async def test_nothing_is_deleted_where_the_root_is_unmounted_between_two_changed_paths(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    first, second = desk.write("a.txt"), desk.write("b/c.txt")
    await desk.scan()
    desk.recorder.take()
    list_one = Walk._from_root

    def unmounted(walk: Walk, policy: Policy, target: str) -> Iterator[Candidate | Problem]:
        if target == str(second):
            shutil.rmtree(desk.root)
            if leaves == "an empty folder":
                desk.root.mkdir()
        yield from list_one(walk, policy, target)

    monkeypatch.setattr(Walk, "_from_root", unmounted)
    report = await desk.connector()._sweep([(str(desk.root), str(path)) for path in (first, second)], None)
    assert report.deleted == []
    assert "root_empty" in codes(report.problems)
    assert desk.recorder.take() == []


async def test_new_and_removed_access_rules_are_applied(desk: Desk) -> None:
    desk.write("hr/a.txt")
    desk.write("b.txt")
    async with watching(desk):
        await until(lambda: len(desk.recorder.sent) == 2)
        desk.recorder.take()
        rules = desk.write("hr/.penstock.toml", 'acl = ["hr"]')
        await until(lambda: len(desk.recorder.sent) == 1)
        assert [event.acl_tags for event in desk.recorder.take()] == [["hr"]]
        rules.unlink()
        await until(lambda: len(desk.recorder.sent) == 1)
        assert [event.acl_tags for event in desk.recorder.take()] == [["staff"]]


async def test_a_watched_file_is_followed_when_it_is_replaced(desk: Desk) -> None:
    path = desk.write("a.txt", "one")
    async with watching(desk, path):
        await until(lambda: len(desk.recorder.sent) == 1)
        desk.write("b.txt")
        desk.write("a.tmp", "two").replace(path)  # as editors save
        await until(lambda: len(desk.recorder.sent) == 2)
    assert [event.content for event in desk.recorder.take()] == ["one", "two"]


async def test_a_change_whose_notification_was_missed_is_published_by_the_next_scan(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hints, "_concerns", lambda *_: False)
    desk.write("a.txt", "one")
    async with watching(desk, scan_interval_seconds=0.5):
        await until(lambda: len(desk.recorder.sent) == 1)
        desk.write("a.txt", "three")
        await until(lambda: len(desk.recorder.sent) == 2)


async def test_an_outage_is_reported_once_and_retried(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.folder.connector.RETRY_SECONDS", 0.1)
    desk.write("a.txt")
    desk.recorder.lose_from = 0
    async with watching(desk) as reports:
        await until(lambda: len(reports) == 1)
        await until(lambda: desk.recorder.lost >= 4)
        assert [codes(report.problems) for report in reports] == [["unavailable"]]
        desk.recorder.lose_from = None
        await until(lambda: len(desk.recorder.sent) == 1)
        await until(lambda: len(reports) == 2)
        assert (len(reports[1].published), reports[1].problems) == (1, [])


async def test_a_folder_created_after_the_watch_began_is_published(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.folder.connector.RESTART_SECONDS", 0.2)
    late = desk.root / "late"
    async with watching(desk, late, scan_interval_seconds=1) as reports:
        await until(lambda: bool(reports))
        assert "missing" in codes(reports[0].problems)
        desk.write("late/a.txt")
        await until(lambda: len(desk.recorder.sent) == 1)


async def test_hints_name_the_smallest_part_of_a_root_to_scan(tmp_path: Path) -> None:
    async with Hints(["/r", "/s/f.txt"]) as hints:
        hints._changed = {"/r/a", "/r/a/b", "/r/c/.penstock.toml", "/r/c/d", "/s/f.txt", "/elsewhere"}
        assert await hints.next(asyncio.Event(), 0) == [("/r", "/r/a"), ("/r", "/r/c"), ("/s/f.txt", "/s/f.txt")]
        hints._changed = {"/s/.penstock.toml"}
        assert await hints.next(asyncio.Event(), 0) == [("/s/f.txt", "/s/f.txt")]
        hints._changed = {f"/r/{n}" for n in range(1000)}
        assert await hints.next(asyncio.Event(), 0) is None
        assert await hints.next(asyncio.Event(), 0) is None


async def insert_document_into_ledger(desk: Desk, path: Path, version: int) -> None:
    """The ledger has the document, readable by whom the desk's files are."""
    async with desk.checkpoint.pool.connection() as connection:
        await connection.execute(
            "INSERT INTO access_sets (tenant, digest, acl_tags, required_tags) VALUES (%s, '', '{folder/staff}', '{}')"
            " ON CONFLICT DO NOTHING",
            [desk.tenant],
        )
        await connection.execute(
            "INSERT INTO documents (id, tenant, source, external_id, version, observed_at, access_id)"
            " SELECT %s, %s, 'folder', %s, %s, now(), id FROM access_sets WHERE tenant = %s",
            [document_id(desk.tenant, "folder", str(path)), desk.tenant, str(path), version, desk.tenant],
        )


async def mark_everything_handled(desk: Desk) -> None:
    """As the detect worker notes it: whatever was sent until now has been handled."""
    async with desk.checkpoint.pool.connection() as connection:
        await connection.execute(
            "INSERT INTO handled VALUES ('detect', clock_timestamp())"
            " ON CONFLICT (stage) DO UPDATE SET until = EXCLUDED.until"
        )


async def test_a_document_missing_or_undeleted_in_the_ledger_is_published_or_deleted_again(desk: Desk) -> None:
    """Kafka had acknowledged the one and the deletion of the other; neither has reached the ledger, nor will."""
    desk.write("lost.txt")
    kept, elsewhere = desk.write("kept.txt"), desk.root.parent / "elsewhere.txt"
    async with watching(desk, scan_interval_seconds=1):
        await until(lambda: len(desk.recorder.sent) == 2)
        [version] = [event.version for event in desk.recorder.take() if event.external_id == str(kept)]
        await insert_document_into_ledger(desk, kept, version)
        await insert_document_into_ledger(desk, desk.root / "undead.txt", 7)
        await insert_document_into_ledger(desk, elsewhere, 7)
        async with asyncio.timeout(60):
            while len(desk.recorder.sent) < 2:
                await mark_everything_handled(desk)
                await asyncio.sleep(0.2)
        assert desk.names(desk.recorder.take()) == [("deleted", "undead.txt"), ("upserted", "lost.txt")]


async def test_a_document_not_yet_handled_by_the_pipeline_is_not_published_again(desk: Desk) -> None:
    desk.write("a.txt")
    await mark_everything_handled(desk)  # before it was sent: that proves nothing
    scans = 0
    run = Comparison.run

    async def counted(comparison: Comparison, clock: Clock) -> int:
        nonlocal scans
        results = await run(comparison, clock)
        scans += 1
        return results

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Comparison, "run", counted)
        async with watching(desk, scan_interval_seconds=1):
            await until(lambda: scans >= 4)
    assert desk.names(desk.recorder.take()) == [("upserted", "a.txt")]


async def test_a_withdrawn_file_that_is_still_in_the_ledger_is_deleted_again(desk: Desk) -> None:
    """Its delete was overtaken by a scan that had read the file before."""
    path = desk.write("a.txt")
    async with watching(desk, scan_interval_seconds=1):
        await until(lambda: len(desk.recorder.sent) == 1)
        await Withdrawal(desk.checkpoint.pool, desk.recorder, desk.tenant, "folder").documents([str(path)])
        [upserted, _] = desk.recorder.take()
        await insert_document_into_ledger(desk, path, upserted.version)
        async with asyncio.timeout(60):
            while not desk.recorder.sent:
                await mark_everything_handled(desk)
                await asyncio.sleep(0.2)
        assert desk.names(desk.recorder.take()) == [("deleted", "a.txt")]


async def test_a_scan_is_reported_even_if_the_comparison_with_the_ledger_fails(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> int:
        raise Retryable("no connection became free in time", service="postgres")

    monkeypatch.setattr(Comparison, "run", away)
    desk.write("a.txt")
    async with watching(desk) as reports:
        await until(lambda: bool(reports))
        assert (len(reports[0].published), codes(reports[0].problems)) == (1, ["unavailable"])


async def test_a_file_below_two_nested_roots_belongs_to_the_inner_one(desk: Desk) -> None:
    """One that a listing of the outer one passes over."""
    outer, inner = str(desk.root), f"{desk.root}/.kept"
    comparison = Comparison(desk.checkpoint, [outer, inner], tenant=desk.tenant, source="folder")
    assert [comparison._root(f"{folder}/a.md") for folder in (inner, outer, "/elsewhere")] == [inner, outer, None]
