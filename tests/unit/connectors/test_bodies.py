"""Bodies that are read before it is known whose they are, on real sockets: events, and what services post."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from structlog.testing import capture_logs

import connectors.http
from connectors.http import MAX_EVENT_BYTES, PORT, Parts, app
from connectors.source import Reaction, Refused, Request
from pipeline.observability.metrics import Metrics
from pipeline.runtime.http_server import UNCOUNTED_BODY_BYTES, served
from pipeline.runtime.settings import PortSettings

LONG = 60.0


class Wiki:
    """An instance that believes who sends ``X-Signed``."""

    plan = SimpleNamespace(name="wiki")

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.read: list[int] = []

    async def on_event(self, request: Request) -> Reaction:
        self.read.append(len(request.body))
        await self.go.wait()
        if "x-signed" not in request.headers:
            raise Refused("no signature")
        return Reaction()


@asynccontextmanager
async def port(**bounds: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Wiki, Metrics]]:
    wiki, metrics = Wiki(), Metrics()
    http = app(Parts(cast(Any, {"wiki": wiki}), {}, cast(Any, None), metrics))
    settings = PortSettings(**bounds)
    async with (
        served(http, bounds=settings, metrics=metrics.ports, name=PORT) as url,
        httpx.AsyncClient(base_url=url, timeout=LONG) as client,
    ):
        yield client, wiki, metrics


def refused(metrics: Metrics, reason: str) -> float:
    labels = {"port": PORT, "reason": reason}
    return metrics.registry.get_sample_value("penstock_http_refused_total", labels) or 0


async def half_sent(client: httpx.AsyncClient, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"POST /v1/events/wiki HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * sent)
    return reader, writer


async def test_event_bodies_in_transfer_hold_a_bounded_amount_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body is held as long as its client may take, whatever size it declared; a larger one is refused."""
    monkeypatch.setattr(connectors.http, "EVENT_BYTES_PER_ADDRESS", 250_000)
    async with port() as (client, wiki, metrics):
        slow = [await half_sent(client, 100_000) for _ in range(4)]
        async with asyncio.timeout(LONG):
            answered = await next(asyncio.as_completed([reader.read() for reader, _ in slow]))
        assert answered.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in answered.lower()
        assert refused(metrics, "memory") == 1
        small = await client.post("/v1/events/wiki", content=bytes(UNCOUNTED_BODY_BYTES), headers={"X-Signed": "yes"})
        assert small.status_code == 200, "a small event needs no room"
        for _, writer in slow:
            writer.transport.abort()
        async with asyncio.timeout(LONG):
            while (await client.post("/v1/events/wiki", content=b"x" * 250_000)).status_code != 401:
                await asyncio.sleep(0.01)
        assert wiki.read == [UNCOUNTED_BODY_BYTES, 250_000]


async def test_an_event_body_that_arrives_too_slowly_is_answered_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors.http, "EVENT_BODY_SECONDS", 0.3)
    async with port() as (client, wiki, _):
        reader, writer = await half_sent(client, 900_000)
        async with asyncio.timeout(LONG):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        assert wiki.read == []


async def test_an_event_that_is_too_large_is_answered_413_without_reading_it() -> None:
    async with port() as (client, wiki, _):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/events/wiki HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (MAX_EVENT_BYTES + 1))
        async with asyncio.timeout(LONG):
            assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        writer.close()

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 100_000

        assert (await client.post("/v1/events/wiki", content=endless())).status_code == 413
        assert wiki.read == []


async def test_memory_of_an_event_body_is_released_when_its_sender_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors.http, "EVENT_BYTES", 500_000)
    async with port() as (client, _, _):
        for _ in range(5):
            _, writer = await half_sent(client, 400_000)
            await asyncio.sleep(0.05)
            writer.transport.abort()
        async with asyncio.timeout(LONG):
            while (await client.post("/v1/events/wiki", content=b"x" * 500_000)).status_code != 401:
                await asyncio.sleep(0.01)


async def test_an_event_for_an_unknown_connector_is_answered_404_before_its_body_arrives() -> None:
    async with port() as (client, _, _):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/events/nobody HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        async with asyncio.timeout(LONG):
            assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
        writer.close()


async def test_a_flood_of_events_without_a_signature_leaves_a_line_in_the_log() -> None:
    """Anybody may send them: a line for each would fill the disk of the log."""
    async with port() as (client, _, metrics):
        with capture_logs() as logs:
            for _ in range(20):
                assert (await client.post("/v1/events/wiki", content=b"x")).status_code == 401
            assert [line["event"] for line in logs] == ["event_refused"]
        assert logs[0]["count"] == 1
        labels = {"source": "wiki", "outcome": "refused"}
        assert metrics.registry.get_sample_value("penstock_connector_events_total", labels) == 20, (
            "counted, each of them"
        )


async def test_the_log_says_of_how_many_refused_events_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(connectors.http, "monotonic", lambda: now)
    async with port() as (client, _, _):
        with capture_logs() as logs:
            for _ in range(3):
                await client.post("/v1/events/wiki", content=b"x")
            now = connectors.http.EVENT_LOG_SECONDS
            for _ in range(3):
                await client.post("/v1/events/wiki", content=b"x")
        assert [line["count"] for line in logs] == [1, 3]
