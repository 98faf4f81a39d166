"""When comparisons wait for documents that are pending, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.analysis import conflicts
from pipeline.analysis.conflicts import Conflicts
from pipeline.core.graph import BUSY_AT_MOST_SECONDS, BUSY_DOCUMENTS
from pipeline.ledger import work
from pipeline.runtime.settings import KafkaSettings
from pipeline.stores import graph

HOUR = 3_600.0


class Pool:
    @asynccontextmanager
    async def connection(self) -> AsyncIterator[None]:
        yield


async def test_a_tenant_whose_documents_come_again_and_again_stops_no_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its documents were pending for two minutes less a second, and so anew: all tenants' comparisons waited."""
    clock = 0.0

    async def pending(*_: object, **__: object) -> int:
        return BUSY_DOCUMENTS + 1 if clock % BUSY_AT_MOST_SECONDS < BUSY_AT_MOST_SECONDS - 2 else 0

    async def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(conflicts, "monotonic", lambda: clock)

    async def is_missed(*_: object) -> bool:
        return False

    monkeypatch.setattr(work, "pending", pending)
    monkeypatch.setattr(graph, "is_missed", is_missed)
    monkeypatch.setattr(conflicts, "asyncio", SimpleNamespace(sleep=sleep))
    services: Any = SimpleNamespace(
        pool=Pool(), settings=SimpleNamespace(kafka=KafkaSettings()), metrics=None, producer=None
    )
    task, waited = Conflicts(services), 0.0
    while clock < HOUR:
        began = clock
        await task._let_documents_go_first(cast("Any", SimpleNamespace(name="g1", vectors="pgvector")))
        waited += clock - began
        clock += 1  # a comparison
    assert BUSY_AT_MOST_SECONDS * 0.9 < waited < HOUR / 2 + BUSY_AT_MOST_SECONDS


async def test_comparisons_wait_for_a_graph_no_longer_than_until_somebody_is_alerted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 0.0

    async def nothing(*_: object, **__: object) -> int:
        return 0

    async def rows(*_: object, most: int) -> int:
        return most

    async def graphs(*_: object) -> dict[str, object]:
        return {}

    async def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(conflicts, "monotonic", lambda: clock)
    monkeypatch.setattr(work, "pending", nothing)
    monkeypatch.setattr(graph, "rows", rows)
    monkeypatch.setattr(graph, "graphs", graphs)
    monkeypatch.setattr(conflicts, "asyncio", SimpleNamespace(sleep=sleep))
    services: Any = SimpleNamespace(
        pool=Pool(), settings=SimpleNamespace(kafka=KafkaSettings()), metrics=None, producer=None
    )
    task = Conflicts(services)
    await task._let_documents_go_first(cast("Any", SimpleNamespace(name="g1", vectors="elasticsearch")))
    assert clock == 0, "its graph is elsewhere"
    clock += 60
    await task._let_documents_go_first(cast("Any", SimpleNamespace(name="g1", vectors="pgvector")))
    assert 0.9 * conflicts.GRAPH_AT_MOST_SECONDS < clock - 60 <= 1.1 * conflicts.GRAPH_AT_MOST_SECONDS
