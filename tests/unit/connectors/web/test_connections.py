"""Responses in very small parts take no more than a share of the event loop of all sources."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from types import SimpleNamespace

import httpcore
import pytest

from connectors.web import Limits, Web, transport

ENDLESS = 40_000
"""Parts that the server sends."""
SHARED_BY = 2_000
"""The most parts that are read in one turn of the event loop: they take 40 to 80 ms."""
PARTS_PER_SECOND = 5_000


class Sender(httpcore.AsyncNetworkStream):
    """A connection whose server sends one thing after another, as much as is read at once."""

    def __init__(self, sent: bytes, record_bytes: int | None = None) -> None:
        """record_bytes: so much is read at once at most, as where each is a record of TLS."""
        self._left = memoryview(sent)
        self._record_bytes = record_bytes
        self.reads = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self.reads += 1
        max_bytes = min(max_bytes, self._record_bytes or max_bytes)
        piece, self._left = self._left[:max_bytes], self._left[max_bytes:]
        return bytes(piece)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        return None

    async def aclose(self) -> None:
        return None

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return self

    def get_extra_info(self, info: str) -> object:
        return None


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * ENDLESS + b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + (b"258\r\n" + b"x" * 600 + b"\r\n") * ENDLESS
        + b"0\r\n\r\n",
        b"HTTP/1.1 100 \r\n\r\n" * ENDLESS + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
    ],
    ids=["chunks of a byte", "chunks of 600 bytes", "informational responses"],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_server_that_sends_very_many_small_parts_leaves_turns_to_other_sources(
    sent: bytes, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, eight connections to one website kept all connectors from their turns for two seconds each."""
    pauses = await pauses_of(Sender(sent), scheme, monkeypatch)
    assert 0.9 < sum(pauses) * PARTS_PER_SECOND / ENDLESS < 1.05
    assert max(pauses) < SHARED_BY / PARTS_PER_SECOND


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n" + b"x" * 4_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"e" * 4_000 + b"\r\nx\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"h" * 4_000 + b"\r\nContent-Length: 1\r\n\r\nx",
    ],
    ids=["body", "extension of a chunk", "header"],
)
async def test_a_server_that_sends_very_many_small_records_leaves_turns_to_other_sources(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 KiB of records of a byte took 50 ms, in which no other source had a turn, on each connection."""
    sender = Sender(sent, record_bytes=1)
    pauses = await pauses_of(sender, "https", monkeypatch)
    assert 0.95 < sum(pauses) * PARTS_PER_SECOND / sender.reads <= 1.05
    assert max(pauses) < SHARED_BY / PARTS_PER_SECOND


async def pauses_of(sender: Sender, scheme: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses that are made while a page of ``x`` is read."""

    async def connect(_backend: object, *_where: object) -> httpcore.AsyncNetworkStream:
        return sender

    async def resolver(_name: str, _port: int) -> Iterable[str]:
        return ["127.0.0.1"]

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    pauses: list[float] = []
    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    web = Web(f"{scheme}://site.example", name="s", limits=Limits(patience_seconds=0), resolver=resolver)  # type: ignore[arg-type]
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: sum(pauses)))  # only pauses take time
    monkeypatch.setattr(transport, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": pause}))
    fetched = await web.fetch("/", max_bytes=30_000_000)
    await web.close()
    assert set(fetched.body) == {ord("x")}
    return pauses
