"""The service over HTTP among clients and servers that misbehave: no 5xx for what a client can send, bounded time for
what a server does not answer, nothing left behind. Tasks, files and connections are counted before and after."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import psycopg
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from deploy.local.stack import Stack
from query.embedding.embedders import QueryEmbedder
from query.http.serve import serving
from query.settings import QuerySettings, ServeSettings
from tests.support.query.hostile_kit import BOUND_SECONDS, QUESTION, World, surrounded, to_the_end
from tests.support.query.http_kit import DEVELOPMENT, as_
from tests.support.query.library import Library, WordEmbedder, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

EXAMPLES = 12
"""The number of well-formed requests of each operation, and of malformed ones."""
AT_ONCE = 6
ANN = "".join(f"{name}: {value}\r\n" for name, value in as_("ann").items())
LONG = "".join(f"Line {n} of a report on pumps that nobody has ever read to its end.\n" for n in range(50_000))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        mine = {"acl_tags": ["user:ann"]}
        await library.put(
            *(document(f"pump-{n}", f"The pump in hall {n} stopped. It feeds tank {n}.", **mine) for n in range(12))
        )
        await library.accept(document("long", LONG, **mine))  # the ledger's text is all that is wanted of it
        yield library


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def around(library: Library) -> AsyncIterator[World]:
    async with surrounded(library.settings) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(around: World) -> AsyncIterator[World]:
    yield around
    around.restore()


# What a client can send


@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_no_generated_request_causes_a_server_error(world: World, mode: GenerationMode) -> None:
    """Every described operation, with what its description allows and with what it does not."""
    async with world.client() as client:
        described = (await client.get("/openapi.json")).json()
    schema = schemathesis.openapi.from_dict(described)
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

    def run(operation: Any) -> int:
        request_count = 0

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Case) -> None:
            nonlocal request_count
            request_count += 1
            answer = case.call(base_url=world.address, headers=as_("ann"), timeout=BOUND_SECONDS)
            streamed = answer.headers.get("content-type", [""])[0].startswith("text/event-stream")
            case.validate_response(answer, checks=checks[:-1] if streamed else checks)  # a stream is a text, by OpenAPI

        ask()
        return request_count

    operations = [result.ok() for result in schema.get_all_operations()]
    can_be_wrong = [o for o in operations if mode is GenerationMode.POSITIVE or o.body or o.path_parameters]
    async with world.unharmed():
        request_count = [await asyncio.to_thread(run, operation) for operation in can_be_wrong]
    assert len(request_count) >= 5
    assert all(request_count)


async def test_malformed_http_gets_a_4xx_or_a_closed_connection(world: World) -> None:
    """Bytes that are no HTTP, nothing at all, half a head, a body that never ends or never comes."""
    head = f"POST /v1/search HTTP/1.1\r\nHost: 127.0.0.1\r\n{ANN}Content-Type: application/json\r\n".encode()
    sent = (
        b"",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /livez HT",
        b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /live",
        b"GET /v1/me HTTP/1.1\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        head + b"Content-Length: 100\r\n\r\n{",
        head + b"Content-Length: -1\r\n\r\n{}",
        head + b"Content-Length: 99999999999\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n{",
        head + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    )
    async with world.unharmed():
        for answered in await asyncio.gather(*(to_the_end(world, message) for message in sent)):
            assert not answered or answered.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200 OK")), answered[:200]


# Clients that are slow or leave


async def test_a_client_that_never_reads_a_long_response_is_disconnected_and_delays_no_one(
    world: World, library: Library
) -> None:
    [(long,)] = await library.execute("SELECT id FROM documents WHERE external_id = 'long'")
    async with world.unharmed():
        stuck = [await connect_without_reading(world, f"/v1/documents/{long}") for _ in range(4)]
        async with world.client() as client:
            assert (await world.search(client, "pump in hall 5"))["results"]
            whole = (await client.get(f"/v1/documents/{long}")).json()
            assert len(whole["text"]) > 3_000_000
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                while open_connections(world):  # the server gives up, although nobody has closed anything here
                    await asyncio.sleep(0.05)
        finally:
            for item in stuck:
                item.close()


def open_connections(world: World) -> int:
    """Connections that the server's end holds open and cannot write to."""
    port = urlsplit(world.address).port
    return sum(
        connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        for connection in psutil.Process().net_connections("tcp")
    )


async def connect_without_reading(world: World, path: str) -> socket.socket:
    """A connection whose answer is asked for and not read."""
    host, port = urlsplit(world.address).hostname, urlsplit(world.address).port
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(one, (host, port))
    await loop.sock_sendall(one, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{ANN}\r\n".encode())
    return one


async def test_a_client_that_reads_one_byte_a_second_occupies_no_slot(world: World) -> None:
    async with world.unharmed(), world.client() as client:
        async with world.stream(client) as slow:
            read = slow.aiter_raw(1)
            for _ in range(3):
                await anext(read)
                await asyncio.sleep(1)
            assert world.service.metrics.in_work._value.get() == 0  # all of it is on its way
            async with world.client() as other:
                assert (await world.search(other, "pump in hall 5"))["results"]
            rest = b"".join([piece async for piece in read])
        assert b"event: done" in rest


async def test_a_client_that_leaves_a_stream_stops_the_chat_model(world: World) -> None:
    world.chat.faults.token_seconds = 0.2
    left = world.chat.stats.left
    async with world.unharmed():
        for _ in range(AT_ONCE):
            async with world.client() as client, world.stream(client) as stream:
                async for line in stream.aiter_lines():
                    if line == "event: delta":
                        break
        async with asyncio.timeout(BOUND_SECONDS):
            while world.chat.stats.left < left + AT_ONCE:
                await asyncio.sleep(0.05)


async def test_a_client_that_resets_the_connection_mid_response_leaves_nothing_behind(world: World) -> None:
    """Not a goodbye: the connection is gone, as when a phone loses its network and comes back with another address."""
    world.chat.faults.token_seconds = 0.2
    host, port = urlsplit(world.address).hostname, urlsplit(world.address).port
    body = json.dumps(QUESTION | {"stream": True})
    async with world.unharmed():
        for _ in range(AT_ONCE):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(
                f"POST /v1/answers HTTP/1.1\r\nHost: {host}\r\n{ANN}Content-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            await reader.readuntil(b"event: delta")
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


async def test_a_client_that_leaves_a_search_stops_it(world: World) -> None:
    async with world.unharmed_after(world.restore):
        world.elastic.silent = True
        async with world.client() as client:
            searches = [asyncio.create_task(world.search(client, f"tank {n}")) for n in range(AT_ONCE)]
            async with asyncio.timeout(BOUND_SECONDS):
                while world.elastic.waiting < AT_ONCE:
                    await asyncio.sleep(0.01)
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)
            async with asyncio.timeout(BOUND_SECONDS):
                while world.elastic.waiting:
                    await asyncio.sleep(0.01)


# Servers that hang


@pytest.mark.parametrize(
    ("silence", "detected_by"),
    [("elastic", ["vector"]), ("model", ["keyword"])],
)
async def test_with_one_silent_dependency_a_degraded_response_arrives_in_time(
    world: World, silence: str, detected_by: list[str]
) -> None:
    async with world.unharmed_after(world.restore):
        getattr(world, silence).silent = True
        async with world.client() as client:
            answers = await asyncio.wait_for(
                asyncio.gather(*(world.search(client, f"pump in hall {n} {silence}") for n in range(AT_ONCE))),
                BOUND_SECONDS,
            )
        for answer in answers:
            assert answer["degraded"]
            assert {tuple(result["stores"]) for result in answer["results"]} == {tuple(detected_by)}


async def test_with_both_retrievers_silent_a_503_or_504_arrives_in_time(world: World) -> None:
    async with world.unharmed_after(world.restore):
        world.elastic.silent = world.model.silent = True
        async with world.client() as client:
            answer = await client.post("/v1/search", json={"query": "pump both silent"})
        assert answer.status_code in (503, 504)
        assert answer.headers["content-type"] == "application/problem+json"


async def test_a_locked_ledger_leads_to_503_or_504(world: World, library: Library) -> None:
    """Somebody's migration holds every table of the ledger: nothing can be verified, so nothing is shown."""
    async with world.unharmed_after(world.restore):
        dsn = library.settings.postgres.dsn.get_secret_value()
        async with await psycopg.AsyncConnection.connect(dsn) as other, world.client() as client:
            await other.execute("LOCK TABLE documents, manifests, access_sets IN ACCESS EXCLUSIVE MODE")
            answers = await asyncio.gather(
                *(client.post("/v1/search", json={"query": f"pump {n} locked"}) for n in range(AT_ONCE))
            )
        assert {answer.status_code for answer in answers} <= {503, 504}


@pytest.mark.parametrize("fault", ["hang", "stall"])
async def test_a_chat_model_that_stops_writing_leads_to_a_bounded_response(world: World, fault: str) -> None:
    async with world.unharmed():
        setattr(world.chat.faults, fault, AT_ONCE)
        async with world.client() as client:
            answers = await asyncio.gather(*(client.post("/v1/answers", json=QUESTION) for _ in range(AT_ONCE)))
        assert {answer.status_code for answer in answers} <= {200, 503, 504}


async def test_while_the_embedding_model_is_loading_search_is_degraded_and_not_ready(library: Library) -> None:
    """A file system that hangs: keywords answer meanwhile, and the service stops when it is told to."""
    go = Event()

    def load() -> WordEmbedder:
        go.wait()
        return WordEmbedder()

    query = QuerySettings(serve=ServeSettings(port=0, search_seconds=2.0, **DEVELOPMENT))
    async with serving(library.settings, query, embedders=QueryEmbedder(load)) as (address, _):
        async with httpx.AsyncClient(base_url=address, timeout=BOUND_SECONDS, headers=as_("ann")) as client:
            answer = await client.post("/v1/search", json={"query": "pump in hall 3"})
            assert (await client.get("/readyz")).status_code == 503
        go.set()
    assert answer.status_code == 200
    assert answer.json()["degraded"]
    assert answer.json()["results"]
