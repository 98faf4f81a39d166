"""Several folders that are swept at the same time need no more memory than one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from connectors.folder import publisher
from connectors.folder.connector import TARGETS_AT_ONCE, FolderConnector
from connectors.folder.options import FolderOptions
from connectors.folder.sweep import READERS, Sweep

FILES, CHARACTERS = 4, 500


class Services:
    """A checkpoint without rows, and a producer whose Kafka acknowledges late."""

    def __init__(self) -> None:
        self.waiting = self.most_waiting = 0

    async def now(self) -> datetime:
        return datetime.now(UTC)

    async def observed_at(self, *_: object) -> None:
        return None

    async def listed(self, *_: object) -> dict[str, object]:
        return {}

    async def unwritten(self, *_: object) -> AsyncIterator[list[object]]:
        yield []

    async def intend(self, *_: object) -> None: ...

    async def save(self, *_: object) -> None: ...

    async def send(self, topic: object, event: Any) -> asyncio.Future[None]:
        size = len(event.content)
        self.waiting += size
        self.most_waiting = max(self.most_waiting, self.waiting)

        async def acknowledged() -> None:
            await asyncio.sleep(0.3)
            self.waiting -= size

        return asyncio.ensure_future(acknowledged())


def prepared(folder: Path, services: Services) -> tuple[FolderConnector, list[tuple[str, str]]]:
    """A connector, and as many changed folders as it sweeps at the same time."""
    folder = folder.resolve()
    folders = [folder / str(n) for n in range(TARGETS_AT_ONCE)]
    for target in folders:
        target.mkdir()
        for n in range(FILES):
            (target / f"{n}.txt").write_text("a" * CHARACTERS)
    connector = FolderConnector(
        [folder],
        options=FolderOptions(acl_tags=("all",)),
        producer=cast(Any, services),
        checkpoint=cast(Any, services),
    )
    return connector, [(str(folder), str(target)) for target in folders]


async def test_the_texts_that_wait_for_kafka_are_limited_over_all_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 2 * CHARACTERS * TARGETS_AT_ONCE
    monkeypatch.setattr(publisher, "MAX_BYTES", most)
    services = Services()
    connector, targets = prepared(tmp_path, services)
    report = await connector._sweep(targets, None)
    assert len(report.published) == FILES * TARGETS_AT_ONCE
    assert 2 * CHARACTERS < services.most_waiting <= most


async def test_what_was_read_is_held_by_few_readers_over_all_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding, most = 0, 0

    async def changed(*_: object) -> None:
        nonlocal holding, most
        holding += 1
        most = max(most, holding)
        await asyncio.sleep(0.05)
        holding -= 1

    monkeypatch.setattr(Sweep, "_changed", changed)
    connector, targets = prepared(tmp_path, Services())
    await connector._sweep(targets, None)
    assert most == READERS
