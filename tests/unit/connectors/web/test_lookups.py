"""Names whose name servers do not answer."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from threading import Event
from typing import Any

import pytest

from connectors.web import system_resolver

PATIENCE_SECONDS = 30.0


async def test_a_name_server_that_never_answers_keeps_no_other_source_from_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight requests to one website took all threads for ten seconds each, again and again: other names did not resolve
    in time, and no file was read."""
    release, looked_up = Event(), Counter[str]()

    def getaddrinfo(host: str, port: int, **_more: Any) -> list[Any]:
        looked_up[host] += 1
        if host == "silent.example":
            release.wait(PATIENCE_SECONDS)
            raise socket.gaierror("no answer")
        return [(0, 0, 0, "", ("192.0.2.1", port)), (0, 0, 0, "", ("192.0.2.1", port))]

    async def impatient() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await system_resolver("silent.example", 443)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        for _ in range(3):
            await asyncio.gather(*(impatient() for _ in range(100)))
        waiting = asyncio.create_task(system_resolver("silent.example", 443))
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await system_resolver("good.example", 443) == ["192.0.2.1"]
            assert await asyncio.to_thread(lambda: "read") == "read"
        assert looked_up == {"silent.example": 1, "good.example": 1}
    finally:
        release.set()
    with pytest.raises(OSError, match="no answer"):
        await waiting
    with pytest.raises(OSError, match="no answer"):
        await system_resolver("silent.example", 443)
    assert looked_up["silent.example"] == 2
