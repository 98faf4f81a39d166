"""A worker process that crashes ends, although what it has to stop waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.stream import worker


async def test_a_crash_ends_the_process_although_stopping_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, is_ended = asyncio.get_running_loop(), asyncio.Event()

    @asynccontextmanager
    async def hangs(*_: Any, **__: Any) -> AsyncIterator[Any]:
        try:
            yield SimpleNamespace()
        finally:
            async with asyncio.timeout(5):
                await is_ended.wait()

    async def crash() -> BaseException:
        return ValueError("the consumer crashed")

    async def stages() -> list[Any]:
        return []

    async def admitted(*_: Any) -> bool:
        return True

    for name in ("health", "open_pool", "producer"):
        monkeypatch.setattr(worker, name, hangs)
    monkeypatch.setattr(worker, "_admitted", admitted)
    monkeypatch.setattr(worker, "Parts", lambda *_: None)
    monkeypatch.setattr(worker, "_kind", lambda *_: SimpleNamespace(stages=stages, background=lambda _: [crash()]))
    monkeypatch.setattr(worker, "STOP_SECONDS", 0.01)
    monkeypatch.setattr(worker, "_end_anyway", lambda _: loop.call_soon_threadsafe(is_ended.set))
    monkeypatch.setattr(worker, "gc", SimpleNamespace(freeze=lambda: None))
    settings: Any = SimpleNamespace(stream=None, postgres=None, kafka=None)
    with pytest.raises(RuntimeError, match="gave up"):
        await worker.run("detect", settings)
