"""A sweep that finds everything as it was writes nothing; what it does not write is not forgotten either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

import pytest

from connectors.folder.checkpoint import Checkpoint, Unwritten
from connectors.source import Entry, Reaction, Unreadable
from tests.support.connectors.folder_kit import Desk
from tests.support.connectors.runner_kit import Bench, kinds
from tests.support.connectors.runner_world import WorldSource

pytestmark = pytest.mark.stack

ROW_VERSION = "xmin::text, ctid::text"


async def row_versions(bench: Bench) -> dict[str, list[tuple[Any, ...]]]:
    return {
        table: sorted(await bench.mine(f"{name}, {ROW_VERSION}", table))
        for table, name in (
            ("connector_items", "external_id"),
            ("connector_groups", "tag"),
            ("connector_principals", "principal"),
        )
    }


async def test_a_sweep_without_changes_writes_no_row(bench: Bench) -> None:
    bench.world.fill(10)
    bench.world.documents["bad"] = Unreadable(external_id="bad", code="x", message="m", acl_tags=[], revision="1")
    bench.world.groups["staff"] = ({"ann@example.org"}, set())
    async with bench.loaded():
        before = await row_versions(bench)
        assert len(before["connector_items"]) == 11
        assert (await bench.ask("sweep"))["listed"] == 11
        assert await bench.ask("groups") == {"identities": 0, "warnings": []}
        assert await row_versions(bench) == before


async def test_a_folder_scan_without_changes_writes_no_row(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.folder.content.SETTLED_NS", 0)
    for n in range(5):
        desk.write(f"{n}.txt")
    desk.write("damaged.pdf", b"%PDF-1.4 nothing more")
    await desk.scan()
    before = await _rows(desk)
    assert len(before) == 6
    report = await desk.scan()
    assert len(report.unchanged) == 5
    assert await _rows(desk) == before


async def _rows(desk: Desk) -> list[tuple[Any, ...]]:
    async with desk.checkpoint.pool.connection() as connection:
        cursor = await connection.execute(
            f"SELECT external_id, {ROW_VERSION} FROM connector_items WHERE tenant = %s ORDER BY 1".encode(),
            [desk.tenant],
        )
        return await cursor.fetchall()


class SlowSource(WorldSource):
    """``fetch`` reads at once, and answers when it may."""

    has_read: asyncio.Event
    may_answer: asyncio.Event

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        entries = await super().fetch(external_ids)
        self.has_read.set()
        await self.may_answer.wait()
        return entries


async def test_a_late_fetch_does_not_restore_access_that_was_revoked_meanwhile(bench: Bench) -> None:
    """Shared with everyone by mistake; an event had it read, and the answer comes after a sweep saw that it was taken
    back. The sweep found nothing new."""
    SlowSource.has_read, SlowSource.may_answer = asyncio.Event(), asyncio.Event()
    bench.make = lambda context: SlowSource(bench.world, context)
    bench.world.fill(3)
    async with bench.loaded() as instance:
        bench.world.silently("d001", acl_tags=["everyone"])
        await instance.react(Reaction(ids=["d001"]))
        await asyncio.wait_for(SlowSource.has_read.wait(), 30)
        bench.world.silently("d001", acl_tags=["staff"])
        await bench.ask("sweep")
        SlowSource.may_answer.set()
        await bench.until(lambda: bench.done(instance, "events"))
        assert await bench.take() == []
        assert await bench.mine("acl_tags", "connector_items", "external_id = 'd001'") == [(["staff"],)]


async def test_documents_saved_by_the_mass_deletion_guard_are_marked_until_listed_again(bench: Bench) -> None:
    bench.world.fill(40)
    held_back = "external_id, unlisted_since", "connector_items", "unlisted_since IS NOT NULL"
    async with bench.loaded():
        bench.world.truncated = 3
        await bench.ask("sweep")
        marked = await bench.mine(*held_back)
        assert {id_ for id_, _ in marked} == {f"d{n:03}" for n in range(3, 40)}
        await bench.ask("sweep")
        assert sorted(await bench.mine(*held_back)) == sorted(marked), "marked once, not by every sweep"
        bench.world.truncated = 30
        await bench.ask("sweep")
        assert await bench.mine(*held_back) == [], "listed again, or fetched by name"
        assert await bench.take() == []


async def test_unpublished_items_that_are_gone_are_forgotten(bench: Bench) -> None:
    bench.world.fill(1)
    bench.world.documents["bad"] = Unreadable(external_id="bad", code="x", message="m", acl_tags=[])
    async with bench.loaded():
        await bench.ask("document", "nobody-knows-it")
        assert len(await bench.mine("1", "connector_items")) == 3
        del bench.world.documents["bad"]
        await bench.ask("sweep")
        assert await bench.mine("external_id", "connector_items") == [("d000",)]
        assert kinds(await bench.take()) == []


async def test_a_file_missing_only_during_the_listing_is_not_deleted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editor or a script moves a file away and back; another process has found it unchanged meanwhile."""
    desk.write("here.txt")
    kept, gone = desk.write("kept.txt"), desk.write("gone.txt")
    await desk.scan()
    desk.recorder.take()
    away = kept.rename(desk.root.parent / "away.txt")
    gone.unlink()
    unwritten = Checkpoint.unwritten

    async def back_by_then(
        self: Checkpoint, tenant: str, source: str, root: str, since: datetime
    ) -> AsyncIterator[Sequence[Unwritten]]:
        away.rename(kept)
        async for page in unwritten(self, tenant, source, root, since):
            yield page

    monkeypatch.setattr(Checkpoint, "unwritten", back_by_then)
    await desk.scan()
    assert desk.names(desk.recorder.take()) == [("deleted", "gone.txt")]
