"""Limits of a client that is not authenticated yet, on real sockets: connections, time, bytes."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from asyncio import selector_events
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pipeline.observability.metrics import PortMetrics
from pipeline.runtime import http_server
from pipeline.runtime.http_server import (
    ACCEPTS_A_TURN,
    MAX_HEAD_BYTES,
    PIECE_BYTES,
    READS_A_TURN,
    RESERVED,
    RESERVED_PER_ADDRESS,
    KeyedLimit,
    address_key,
    served,
)
from pipeline.runtime.settings import PortSettings
from pipeline.runtime.tasks import cancel_and_wait
from tests.support.waiting import until

LONG = 60.0
"""Seconds: nothing that a test waits for takes so long, on a machine however busy."""
SHORT = 0.3
"""Seconds that a client is given, where a test waits for their end."""
HEAD = b"POST /read HTTP/1.1\r\nHost: x\r\n"


@dataclass
class Site:
    """An application on a port, and what became of its requests."""

    host: str
    port: int
    registry: CollectorRegistry
    read: list[bytes] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def refused(self, reason: str) -> float:
        labels = {"port": "site", "reason": reason}
        return self.registry.get_sample_value("penstock_http_refused_total", labels) or 0

    @property
    def open(self) -> float:
        return self.registry.get_sample_value("penstock_http_connections", {"port": "site"}) or 0

    until = staticmethod(until)

    async def connect(
        self, sent: bytes = b"", *, address: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """address: of the client; all of 127.0.0.0/8 are this machine's."""
        reader, writer = await asyncio.open_connection(self.host, self.port, local_addr=(address, 0))
        writer.write(sent)
        return reader, writer

    async def answer(self, sent: bytes) -> bytes:
        """All that comes until the server closes."""
        reader, writer = await self.connect(sent)
        try:
            return await read_to_end(reader)
        finally:
            writer.transport.abort()


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(LONG):
        return await reader.read()


@asynccontextmanager
async def site(**bounds: Any) -> AsyncIterator[Site]:
    async def read(request: Request) -> Response:
        try:
            made.read.append(await request.body())
        except ClientDisconnect:
            made.left.set()
            raise
        return PlainTextResponse("read")

    async def unread(_: Request) -> Response:
        return PlainTextResponse("who are you?", 401)

    async def hold(_: Request) -> Response:
        made.held.release()
        await made.go.wait()
        return PlainTextResponse("held")

    async def large(_: Request) -> Response:
        return PlainTextResponse("x" * 30_000_000)

    async def live(request: Request) -> Response:
        return PlainTextResponse(f"ok {request.client and request.client.host}")

    app = Starlette(
        routes=[
            Route("/read", read, methods=["POST"]),
            Route("/unread", unread, methods=["POST"]),
            Route("/hold", hold),
            Route("/large", large),
            Route("/livez", live),
            Route("/", live),
        ]
    )
    registry = CollectorRegistry()
    settings = PortSettings(**({"head_seconds": LONG, "body_seconds": LONG} | bounds))
    async with served(app, bounds=settings, metrics=PortMetrics(registry), name="site") as url:
        address = httpx.URL(url)
        made = Site(address.host, address.port or 0, registry)
        try:
            yield made
        finally:
            made.go.set()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def problem(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    assert b"connection: close" in head.lower()
    return dict(json.loads(body))


# Time


async def test_a_health_check_and_a_good_client_are_answered_despite_300_slow_clients() -> None:
    """As trials/security/r6_slow.py had it: bodies of a megabyte of which the end never comes."""
    unfinished = HEAD + b"Content-Length: 1000000\r\n\r\n" + b"x" * 5_000
    async with site(connections=64, connections_per_address=48, body_seconds=3.0, bytes_per_second=10**9) as port:
        clients = [await port.connect(unfinished) for _ in range(300)]
        await port.until(lambda: port.open <= 48 + RESERVED_PER_ADDRESS)
        live = await port.answer(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(live) == 200, "a health check is answered while the limit is reached"
        statuses = []
        for reader, _ in clients:
            with suppress(ConnectionResetError):  # it was turned away before the server had read all that it sent
                if answer := await read_to_end(reader):
                    statuses.append(status(answer))
        await port.until(lambda: not port.open)
        assert set(statuses) <= {408, 503}
        assert statuses.count(408) == port.refused("slow_body") >= 48
        assert status(await port.answer(HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nok")) == 200
        assert port.read == [b"ok"]
        assert port.refused("address") + port.refused("slow_body") >= 300
        for _, writer in clients:
            writer.close()


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX-A: 1"])
async def test_an_incomplete_request_head_is_answered_with_408(sent: bytes) -> None:
    async with site(head_seconds=SHORT) as port:
        answer = await port.answer(sent)
        assert status(answer) == problem(answer)["status"] == 408
        assert port.refused("slow_head") == 1


async def test_a_request_head_that_arrives_byte_by_byte_is_answered_with_408() -> None:
    async with site(head_seconds=SHORT) as port:
        reader, writer = await port.connect(b"GET / HTTP/1.1\r\nX: ")

        async def trickle() -> None:
            while not writer.is_closing():
                writer.write(b"a")
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        try:
            assert status(await read_to_end(reader)) == 408
        finally:
            trickling.cancel()
            writer.transport.abort()


async def test_a_connection_without_any_request_is_closed_silently() -> None:
    async with site(head_seconds=SHORT) as port:
        assert await port.answer(b"") == b""
        assert port.refused("slow_head") == 0


async def test_the_second_request_on_a_connection_has_the_same_time_limit() -> None:
    async with site(head_seconds=SHORT) as port:
        reader, writer = await port.connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(await reader.readuntil(b"127.0.0.1")) == 200
        writer.write(b"GET / HT")
        assert status(await read_to_end(reader)) == 408
        writer.close()


async def test_a_body_that_arrives_too_slowly_is_answered_with_408() -> None:
    async with site(body_seconds=SHORT, bytes_per_second=100_000) as port:
        reader, writer = await port.connect(HEAD + b"Content-Length: 1000000\r\n\r\n")

        async def trickle() -> None:
            while not writer.is_closing():
                writer.write(b"a")
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        try:
            answer = await read_to_end(reader)
        finally:
            trickling.cancel()
            writer.transport.abort()
        assert status(answer) == problem(answer)["status"] == 408
        assert port.refused("slow_body") == 1
        await port.left.wait()


async def test_a_large_body_may_take_longer_as_its_bytes_arrive() -> None:
    """Each received byte extends the time limit: here by more than there will be."""
    async with site(body_seconds=SHORT, bytes_per_second=1) as port:
        reader, writer = await port.connect(HEAD + b"Connection: close\r\nContent-Length: 5000\r\n\r\n" + b"x" * 4_000)
        await asyncio.sleep(3 * SHORT)
        writer.write(b"x" * 1_000)
        assert status(await read_to_end(reader)) == 200
        writer.close()


async def test_time_the_application_takes_to_read_does_not_count_against_the_client() -> None:
    async def late(request: Request) -> Response:
        await asyncio.sleep(3 * SHORT)
        return PlainTextResponse(str(len(await request.body())))

    settings = PortSettings(head_seconds=LONG, body_seconds=SHORT, bytes_per_second=10**9)
    app = Starlette(routes=[Route("/", late, methods=["POST"])])
    async with served(app, bounds=settings) as url, httpx.AsyncClient(timeout=LONG) as client:
        assert (await client.post(url, content=b"x" * 1_000_000)).text == "1000000"


async def test_a_client_that_does_not_read_a_large_response_is_disconnected() -> None:
    async with site(body_seconds=SHORT, bytes_per_second=10**9) as port:
        reader, writer = await port.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await port.until(lambda: not port.open)
        writer.transport.abort()


async def test_responses_that_slow_clients_do_not_read_take_a_bounded_amount_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that reads a few bytes now and then has 17 minutes for 4 MB: 128 connections held a gigabyte."""
    monkeypatch.setattr(http_server, "MAX_UNREAD_BYTES_PER_ADDRESS", 40_000_000)  # room for one of 30 MB
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def begin(address: str) -> None:
        asks = b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        reader, writer = await port.connect(asks, address=address)
        opened.append((reader, writer))
        await reader.readexactly(1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]

    async with site() as port:
        for _ in range(4):
            await begin("127.0.0.1")
        await port.until(lambda: port.refused("slow_reader") == 3)
        await begin("127.0.0.2")
        await port.until(lambda: port.open == 2)
        newest, _ = opened[3]
        newest._transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await read_to_end(newest)) > 29_000_000
        for _, writer in opened:
            writer.transport.abort()


async def test_slow_clients_of_many_addresses_share_a_bounded_amount_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only response of an address was never cut off, so that 512 addresses held 2 GB."""
    monkeypatch.setattr(http_server, "MAX_UNREAD_BYTES", 70_000_000)  # room for two of 30 MB
    asks = b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with site() as port:
        opened = []
        for n in range(5):
            reader, writer = await port.connect(asks, address=f"127.0.0.{n + 1}")
            opened.append((reader, writer))
            await reader.readexactly(1)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
        await port.until(lambda: port.open == 2)
        assert port.refused("slow_reader") == 3
        newest, _ = opened[-1]
        newest._transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await read_to_end(newest)) > 29_000_000
        for _, writer in opened:
            writer.transport.abort()


async def test_an_idle_connection_is_closed() -> None:
    async with site() as port:
        reader, writer = await port.connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(await read_to_end(reader)) == 200
        writer.close()


# Numbers


async def test_one_address_gets_at_most_its_share_of_connections() -> None:
    held = b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n"
    async with site(connections=20, connections_per_address=4) as port:
        clients = [await port.connect(held) for _ in range(4)]
        for _ in clients:
            await port.held.acquire()
        answer = await port.answer(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(answer) == problem(answer)["status"] == 503
        assert b"retry-after: 2" in answer
        assert port.refused("address") == 1
        port.go.set()
        for reader, writer in clients:
            assert status(await reader.readuntil(b"held")) == 200
            writer.close()
        await port.until(lambda: not port.open)
        assert status(await port.answer(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")) == 200


async def test_each_client_behind_a_trusted_proxy_has_its_own_share_of_connections() -> None:
    def request(path: str, client: str) -> bytes:
        text = f"GET {path} HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 9.9.9.9, {client}\r\nConnection: close\r\n\r\n"
        return text.encode()

    async with site(connections=20, connections_per_address=4, trusted_proxies=("127.0.0.0/8",)) as port:
        clients = [await port.connect(request("/hold", "192.0.2.1")) for _ in range(4)]
        for _ in clients:
            await port.held.acquire()
        refused = await port.answer(request("/", "192.0.2.1"))
        assert status(refused) == problem(refused)["status"] == 503
        assert (await port.answer(request("/", "192.0.2.2"))).endswith(b"ok 192.0.2.2")
        assert status(await port.answer(request("/livez", "192.0.2.1"))) == 200
        port.go.set()
        for reader, writer in clients:
            assert status(await read_to_end(reader)) == 200
            writer.close()


async def test_x_forwarded_for_is_ignored_without_a_trusted_proxy() -> None:
    async with site() as port:
        sent = b"GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 192.0.2.1\r\nConnection: close\r\n\r\n"
        assert (await port.answer(sent)).endswith(b"ok 127.0.0.1")


async def test_health_checks_are_answered_while_the_connection_limit_is_exceeded() -> None:
    async with site(connections=4, connections_per_address=4) as port:
        clients = [await port.connect() for _ in range(4 + 3 * RESERVED_PER_ADDRESS)]
        await port.until(lambda: port.open <= 4 + RESERVED_PER_ADDRESS)
        assert status(await port.answer(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")) == 200
        assert status(await port.answer(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")) == 503
        for _, writer in clients:
            writer.close()


async def test_health_checks_are_answered_while_other_addresses_keep_opening_connections() -> None:
    """The reserve is full of others, who come faster than their requests are read."""
    async with site(connections=4, connections_per_address=4) as port:
        clients = []
        for n in range(6):
            clients += [await port.connect(address=f"127.0.1.{n}") for _ in range(4 + RESERVED_PER_ADDRESS)]
        reader, writer = await port.connect(address="127.0.2.1")
        clients += [await port.connect(address="127.0.1.5") for _ in range(3 * RESERVED_PER_ADDRESS)]
        assert port.open <= 4 + RESERVED + 1
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(await read_to_end(reader)) == 200
        writer.close()
        for _, writer in clients:
            writer.close()


# Bytes


@pytest.mark.parametrize("header", [b"X: " + b"a" * 300_000 + b"\r\n", b"a:b\r\n" * 60_000])
async def test_a_request_head_that_is_too_large_is_answered_with_431(header: bytes) -> None:
    async with site() as port:
        answer = await port.answer(b"GET / HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
        assert status(answer) == problem(answer)["status"] == 431
        assert port.refused("large_head") == 1


async def test_malformed_requests_are_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Strangers filled the log with a line for each."""
    async with site() as port:
        for _ in range(3):
            assert status(await port.answer(b"\x16\x03\x01\x02\x00\r\n\r\n")) == 400
        assert port.refused("malformed") == 3
        upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
        reader, writer = await port.connect(upgrade)
        assert b"HTTP/1.1 200" in await reader.readuntil(b"ok")
        writer.close()
    assert [
        record for record in caplog.records if record.name.startswith("uvicorn") and record.levelname != "INFO"
    ] == []


async def test_a_request_head_with_the_longest_token_is_accepted() -> None:
    async with site() as port:
        token = b"a" * 16_384
        sent = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer " + token + b"\r\n\r\n"
        assert len(sent) < MAX_HEAD_BYTES
        assert status(await port.answer(sent)) == 200


async def test_the_rest_of_a_rejected_body_is_discarded_and_the_connection_soon_closed() -> None:
    """A stranger's endless body: the answer is out after its head."""
    async with site() as port:
        reader, writer = await port.connect(b"POST /unread HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")

        async def endless() -> None:
            while not writer.is_closing():
                writer.write(b"1000\r\n" + b"x" * 4_096 + b"\r\n")
                await writer.drain()

        sending = asyncio.create_task(endless())
        try:
            async with asyncio.timeout(LONG):
                answer = await reader.readuntil(b"who are you?")
            assert b"connection: close" in answer
            await port.until(lambda: not port.open)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.transport.abort()


async def test_a_client_still_sending_a_rejected_body_receives_the_response() -> None:
    async with site() as port:
        answer = await port.answer(
            b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n" + b"x" * 900_000
        )
        assert status(answer) == 401
        assert answer.endswith(b"who are you?")


async def test_a_body_of_very_many_small_chunks_is_rejected() -> None:
    async with site() as port:
        answer = await port.answer(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n"
        )
        assert status(answer) == problem(answer)["status"] == 400
        assert port.refused("small_chunks") == 1
        assert port.read == []
        body = b"64\r\n" + b"x" * 100 + b"\r\n"
        whole = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + body * 5_000 + b"0\r\n\r\n"
        assert status(await port.answer(whole)) == 200


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"ZZ\r\n", "malformed"), (b"1\r\nx\r\n" * 10_000, "small_chunks")],
    ids=["no chunk", "tiny chunks"],
)
async def test_a_malformed_body_of_a_head_request_gets_a_400_without_body_or_traceback(
    body: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Strangers filled the log with a traceback for each."""
    async with site() as port:
        answer = await port.answer(b"HEAD /hold HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        assert status(answer) == 400
        assert answer.endswith(b"\r\n\r\n"), "an answer to HEAD has no body"
        assert b"connection: close" in answer.lower()
        assert port.refused(reason) == 1
        # The request before was HEAD; what is refused now is no request at all, and reads why.
        reader, writer = await port.connect(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(await reader.readuntil(b"\r\n\r\n")) == 200
        writer.write(b"\x16\x03\x01\r\n\r\n")
        answer = await read_to_end(reader)
        assert status(answer) == problem(answer)["status"] == 400
        writer.close()
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_request_with_both_content_length_and_chunked_encoding_is_rejected() -> None:
    """Behind a proxy that goes by Content-Length the rest would be the next client's request."""
    hidden = b"0\r\n\r\nGET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    lengths = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(hidden)
    async with site() as made:
        answer = await made.answer(HEAD + lengths + hidden)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert made.read == []
        assert made.refused("malformed") == 1


async def test_a_compressed_request_body_is_not_decompressed() -> None:
    async with site() as port:
        bomb = b"\x1f\x8b\x08\x00" + b"\x00" * 100
        head = HEAD + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 104\r\n\r\n"
        assert status(await port.answer(head + bomb)) == 200
        assert port.read == [bomb]


async def test_pipelined_requests_are_all_answered() -> None:
    async with site() as port:
        one = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answers = await port.answer(one * 2_000 + last)
        assert answers.count(b"HTTP/1.1 200 OK") == 2_001


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("proposal", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
async def test_the_second_of_two_pipelined_heads_has_the_same_limit(proposal: bytes, at_once: bool) -> None:
    """It was parsed as it lay in the buffer, however long it was, if it had come while the first was answered."""
    first = b"GET /hold HTTP/1.1\r\nHost: x\r\n" + proposal + b"\r\n"
    second = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 15_000 + b"\r\n"
    async with site() as of:
        reader, writer = await of.connect(first + second if at_once else first)
        await of.held.acquire()
        if not at_once:
            writer.write(second)
        await writer.drain()
        await asyncio.sleep(SHORT)
        of.go.set()
        answer = await read_to_end(reader)
        assert (status(answer), status(answer[answer.index(b"held") + 4 :])) == (200, 431)
        writer.transport.abort()


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
async def test_a_client_that_proposes_another_protocol_is_answered_in_http(protocol: bytes) -> None:
    one = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: " + protocol + b"\r\n\r\n"
    connect = b"CONNECT / HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with site() as of:
        answers = (await of.answer(one + connect + one + last)).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"405", b"200", b"200"]


async def test_a_request_that_still_waits_for_its_turn_in_the_end_is_answered_with_408(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection was closed without a response."""
    monkeypatch.setattr(http_server, "READS_A_TURN", 0)
    async with site(head_seconds=SHORT) as of:
        assert status(await of.answer(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")) == 408


async def test_a_connection_whose_request_waits_for_its_turn_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_SECONDS", SHORT / 10)
    last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    first = (b"GET /hold HTTP/1.1\r\nHost: x\r\na: ").ljust(PIECE_BYTES - 4, b"x") + b"\r\n\r\n"  # parsed alone
    async with site() as of:
        reader, writer = await of.connect(first + last)
        await of.held.acquire()
        monkeypatch.setattr(http_server, "READS_A_TURN", 0)
        of.go.set()
        async with asyncio.timeout(LONG):
            await reader.readuntil(b"held")
        await asyncio.sleep(SHORT)
        monkeypatch.setattr(http_server, "READS_A_TURN", READS_A_TURN)
        assert status(await of.answer(last)) == 200  # a read begins a turn
        assert status(await read_to_end(reader)) == 200
        writer.transport.abort()


async def test_an_error_in_the_turn_of_a_connection_ends_that_one_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stayed open without its bytes, and other addresses lost that turn."""
    take_turn = http_server._Connection.take_turn

    def fail_for_one(connection: http_server._Connection) -> None:
        if connection._held.startswith(b"GET /broken"):
            raise ValueError("broken")
        take_turn(connection)

    monkeypatch.setattr(http_server._Connection, "take_turn", fail_for_one)
    monkeypatch.setattr(http_server, "READS_A_TURN", 0)
    last = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with site(head_seconds=2 * LONG) as of:
        broken, first = await of.connect(b"GET /broken" + last)
        await asyncio.sleep(SHORT)
        whole, second = await of.connect(b"GET /" + last)
        elsewhere, third = await of.connect(b"GET /" + last, address="127.0.0.2")
        await asyncio.sleep(SHORT)
        monkeypatch.setattr(http_server, "READS_A_TURN", READS_A_TURN)
        assert status(await of.answer(b"GET /" + last)) == 200  # a read begins a turn
        assert [status(await read_to_end(reader)) for reader in (whole, elsewhere)] == [200, 200]
        assert await read_to_end(broken) == b""
        for writer in (first, second, third):
            writer.transport.abort()
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["broken"]


async def test_requests_of_one_address_that_come_at_once_leave_turns_of_the_event_loop_to_others() -> None:
    """All of them were begun in one turn: each step of a search, or of a worker, waited for all of them."""
    flood, turns = 60, 0

    async def work(request: Request) -> Response:
        begun[str(request.client and request.client.host)].append(turns)
        return PlainTextResponse("done")

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    begun: dict[str, list[int]] = {"127.0.0.1": [], "127.0.0.2": []}
    async with served(Starlette(routes=[Route("/", work)])) as url:
        port = httpx.URL(url).port
        addresses = ["127.0.0.1"] * flood + ["127.0.0.2"]
        clients = [await asyncio.open_connection("127.0.0.1", port, local_addr=(of, 0)) for of in addresses]
        await asyncio.sleep(SHORT)  # all of them are accepted
        counting = asyncio.create_task(count_turns())
        for _, writer in clients:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = await asyncio.gather(*(read_to_end(reader) for reader, _ in clients))
        await cancel_and_wait([counting])
        for _, writer in clients:
            writer.transport.abort()
    assert [status(answer) for answer in answers] == [200] * len(clients)
    at_once = Counter(begun["127.0.0.1"])
    assert (sum(at_once.values()), max(at_once.values())) == (flood, READS_A_TURN)
    assert begun["127.0.0.2"][0] < max(at_once), "the other address waits for none of them"


async def test_connections_that_come_at_once_leave_turns_of_the_event_loop_to_others() -> None:
    """All that waited were accepted in one turn: an address that opened thousands a second had searches of others given
    up, on connections that were open."""
    flood, open_at = 100, [0.0]
    async with site() as port:
        clients = [socket.create_connection((port.host, port.port), timeout=SHORT) for _ in range(flood)]
        for _ in range(2 * flood):
            await asyncio.sleep(0)
            open_at.append(port.open)
        for client in clients:
            client.close()
    accepted = [after - before for before, after in pairwise(open_at)]
    assert sum(accepted) == flood
    assert max(accepted) in (ACCEPTS_A_TURN, ACCEPTS_A_TURN + 1)  # later versions of asyncio accept one more


async def test_a_client_that_is_gone_when_its_request_is_refused_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal ended with an error that asyncio logs: a stranger could fill the log."""

    def gone(_: asyncio.Transport) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(selector_events._SelectorSocketTransport, "write_eof", gone)  # type: ignore[attr-defined]
    monkeypatch.setattr(http_server, "READS_A_TURN", 0)  # what is read waits for a turn
    async with site() as of:
        reader, writer = await of.connect(b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"x" * 2 * MAX_HEAD_BYTES)
        await asyncio.sleep(SHORT)
        monkeypatch.setattr(http_server, "READS_A_TURN", READS_A_TURN)
        assert status(await of.answer(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")) == 200
        with suppress(ConnectionResetError):
            await read_to_end(reader)
        writer.transport.abort()
        await of.until(lambda: of.open == 0)
        assert of.refused("large_head") == 1
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio" or record.exc_info] == []


async def test_a_client_that_disconnects_mid_body_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with site() as port:
        _, writer = await port.connect(HEAD + b"Content-Length: 1000\r\n\r\nx")
        await port.until(lambda: port.open)
        writer.close()
        async with asyncio.timeout(LONG):
            await port.left.wait()
        await port.until(lambda: not port.open)
    assert [record for record in caplog.records if record.exc_info] == []


# The pure parts


def test_connection_shares_are_released_completely() -> None:
    shares = KeyedLimit(10, 4)
    shares.take("a", 4)
    assert shares.lacks("a") == "address"
    assert shares.lacks("b", 4) is None
    shares.take(None, 6)
    assert shares.lacks("b") == "connections"
    shares.give("a", 4)
    shares.give(None, 6)
    assert shares.lacks("a", 4) is None
    assert shares.taken == 0


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8:0:0:ffff::2", "2001:db8::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_addresses_of_one_ipv6_network_share_a_limit(host: str, key: str) -> None:
    assert address_key(host) == key
