"""A worker that crashes says so before it stops what it has started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.observability.metrics import Metrics
from pipeline.stream import worker


async def test_a_crash_is_reported_although_stopping_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    has_crashed = asyncio.Event()

    @asynccontextmanager
    async def hangs(*_: Any, **__: Any) -> AsyncIterator[Any]:
        try:
            yield SimpleNamespace()
        finally:
            async with asyncio.timeout(5):
                await has_crashed.wait()

    async def crash() -> BaseException:
        return ValueError("the consumer crashed")

    async def stages() -> list[Any]:
        return []

    async def admitted(*_: Any) -> bool:
        return True

    for name in ("open_pool", "producer"):
        monkeypatch.setattr(worker, name, hangs)
    monkeypatch.setattr(worker, "_admitted", admitted)
    monkeypatch.setattr(worker, "Parts", lambda *_: None)
    monkeypatch.setattr(worker, "_kind", lambda *_: SimpleNamespace(stages=stages, background=lambda _: [crash()]))
    monkeypatch.setattr(worker, "gc", SimpleNamespace(freeze=lambda: None))
    settings: Any = SimpleNamespace(stream=None, postgres=None, kafka=None)
    with pytest.raises(RuntimeError, match="gave up"):
        await worker.StreamWorker("detect", settings, Metrics()).run(asyncio.Event(), has_crashed.set)
