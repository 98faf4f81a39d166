"""Resources that the gate lets a caller hold before its request is processed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.runtime.http_server import UNCOUNTED_BODY_BYTES
from query.auth.api_keys import KeyFile
from query.auth.authenticator import Authenticator as RealAuthenticator
from query.auth.identity import Identity
from query.http.gate import MAX_TENANT_BODIES_BYTES, Gate
from query.limits.concurrency import Limits
from query.settings import AuthSettings, ServeSettings
from query.telemetry import QueryMetrics
from tests.support.query.http_kit import write_keys

MEGABYTE = 2**20


class Authenticator:
    development = False

    async def authenticate(self, headers: Headers) -> Identity:
        return Identity("token", headers["x-tenant"], headers["x-principal"])


class Meter:
    async def admit(self, *_: object) -> Meter:
        return self

    def charge(self, *_: object) -> None: ...
    def close(self, **_: object) -> None: ...


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class PausedRequest:
    """A request whose body stops in the middle until ``go``."""

    def __init__(self, gate: Gate, tenant: str, principal: str, size: int) -> None:
        self.go = asyncio.Event()
        self.answer: list[Message] = []
        self._size = size
        headers = [(b"x-tenant", tenant.encode()), (b"x-principal", principal.encode())]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/search", "headers": headers}
        self._parts = 0
        self.task = asyncio.create_task(gate(scope, self._receive, self._send))

    @property
    def response(self) -> tuple[int, str]:
        problem = json.loads(self.answer[1]["body"]) if self.answer[1]["body"] else {"type": ""}
        return self.answer[0]["status"], problem["type"].rpartition(":")[2]

    async def _receive(self) -> Message:
        self._parts += 1
        if self._parts == 1:
            return {"type": "http.request", "body": bytes(self._size), "more_body": True}
        await (self.go.wait() if self._parts == 2 else asyncio.Event().wait())
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Message) -> None:
        self.answer.append(message)


def gate_of(app: ASGIApp, settings: ServeSettings, metrics: QueryMetrics) -> Gate:
    return Gate(
        app,
        authenticator=cast(Any, Authenticator()),
        limits=Limits(settings, metrics),
        meter=cast(Any, Meter()),
        metrics=metrics,
        settings=settings,
    )


@pytest.mark.parametrize(
    "path", ["/mcp", "/v1/search", "/v1/answers", f"/v1/standing/{UUID(int=1)}/answer", "/metrics"]
)
async def test_a_path_that_ends_with_a_newline_reaches_no_route(path: str) -> None:
    """A route matches it too: the tools were listed without a token, and answers took no place and no budget."""
    reached: list[str] = []

    async def reach(request: Request) -> Response:
        reached.append(request.scope["path"])
        return Response()

    app = Starlette(routes=[Route(path, reach, methods=["POST"])])
    transport = httpx.ASGITransport(gate_of(app, ServeSettings(), QueryMetrics()))
    who = {"x-tenant": "acme", "x-principal": "ann"}
    async with httpx.AsyncClient(transport=transport, base_url="http://query") as client:
        assert (await client.post(path, headers=who)).status_code == 200
        assert (await client.post(f"{path}%0A", headers=who)).status_code == 404
    assert reached == [path]


@pytest.mark.parametrize("delegated", [False, True])
async def test_a_stream_ends_soon_after_its_api_key_was_removed_or_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delegated: bool
) -> None:
    """An answer whose model writes slowly went on for more than a minute."""
    monkeypatch.setattr("query.http.gate.LOOK_SECONDS", 0.05)
    entries: dict[str, dict[str, Any]] = {"bot": {"key": "one", "tenant": "acme", "tags": ["a"]}}
    path = write_keys(tmp_path / "keys.toml", **entries)
    key_file = KeyFile(path)
    identity = Identity("key", "acme", None, ("a",), key="bot")
    if delegated:
        acts_for = "[bot.acts_for]\nissuer = 'idp'\njwks_url = 'https://idp.example/keys'\nscopes = ['answers']\n"
        path.write_text(path.read_text() + acts_for)
        identity = Identity("delegated", "acme", "ann", key="bot", scopes=("answers",))
    authenticator = RealAuthenticator(AuthSettings(), keys=None, key_file=key_file, development=None)

    async def authenticate(_: Headers) -> Identity:
        return identity

    monkeypatch.setattr(authenticator, "authenticate", authenticate)
    sent: list[Message] = []

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"a word ", "more_body": True})
            await asyncio.sleep(0.01)

    gate = gate_of(stream, ServeSettings(), QueryMetrics())
    gate._authenticator = authenticator
    received = asyncio.Queue[Message]()
    received.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/answers",
        "headers": [(b"x-api-key", b"one")],
    }
    kept = path.read_text()
    looks: list[bool] = []
    is_in_force = authenticator.is_in_force

    def look(headers: Headers, known: Identity) -> bool:
        looks.append(is_in_force(headers, known))
        if len(looks) == 3:
            path.write_text("")
        if len(looks) == 4:
            path.write_text(kept)  # an editor has written it in two steps
        if len(looks) == 6:
            path.write_text(kept.replace('"acme"', '"globex"'))
        return looks[-1]

    monkeypatch.setattr(authenticator, "is_in_force", look)
    async with asyncio.timeout(60):
        await gate(scope, received.get, send)
    assert looks == [True, True, True, False, True, True, False, False]
    count = len(sent)
    await asyncio.sleep(0.1)
    assert len(sent) == count
    assert sent[-1]["more_body"], "a response that was cut off does not look complete"


async def test_unfinished_requests_of_one_tenant_hold_a_bounded_share_of_memory() -> None:
    settings, metrics = ServeSettings(max_body_bytes=2 * MEGABYTE, body_seconds=600), QueryMetrics()
    gate = gate_of(_app, settings, metrics)
    most, size = MAX_TENANT_BODIES_BYTES // MEGABYTE, MEGABYTE + UNCOUNTED_BODY_BYTES
    slow = [PausedRequest(gate, "acme", f"user {n // 8}", size) for n in range(200)]
    await asyncio.sleep(0.1)
    assert sum(not request.answer for request in slow) == most
    assert {request.response for request in slow if request.answer} == {(429, "over-share")}
    other = PausedRequest(gate, "globex", "ann", size)
    other.go.set()
    await other.task
    assert other.response == (204, "")
    many = [PausedRequest(gate, f"tenant {n}", "ann", size) for n in range(100)]
    await asyncio.sleep(0.1)
    assert {request.response for request in many if request.answer} == {(503, "busy")}
    assert sum(not request.answer for request in [*slow, *many]) == 4 * most
    for request in [*slow, *many]:
        request.go.set()
    await asyncio.gather(*(request.task for request in [*slow, *many]))
    assert metrics.registry.get_sample_value("penstock_query_shed_total", {"reason": "memory"})
    again = [PausedRequest(gate, "acme", f"user {n // 8}", size) for n in range(most)]
    await asyncio.sleep(0.1)
    assert not any(request.answer for request in again), "the room was not given back"
    for request in again:
        request.task.cancel()
    await asyncio.gather(*(request.task for request in again))


async def test_bodies_that_one_caller_never_ends_leave_room_for_others() -> None:
    """Twenty of them, each of which had ten seconds, kept everybody else of the tenant out."""
    settings, metrics = ServeSettings(body_seconds=600), QueryMetrics()
    gate = gate_of(_app, settings, metrics)
    slow = [PausedRequest(gate, "acme", "eve", settings.max_body_bytes) for _ in range(100)]
    await asyncio.sleep(0.1)
    assert sum(not request.answer for request in slow) == settings.concurrent_per_caller
    assert {request.response for request in slow if request.answer} == {(429, "too-many-at-once")}
    other = PausedRequest(gate, "acme", "ann", MEGABYTE // 2)
    other.go.set()
    await other.task
    assert other.response == (204, "")
    for request in slow:
        request.go.set()
    await asyncio.gather(*(request.task for request in slow))


async def test_small_requests_have_room_while_large_bodies_take_all_of_it() -> None:
    settings, metrics = ServeSettings(body_seconds=600), QueryMetrics()
    gate = gate_of(_app, settings, metrics)
    slow = [
        PausedRequest(gate, f"tenant {n // 40}", f"user {n // 8}", settings.max_body_bytes - (n % 8) * 100_000)
        for n in range(200)
    ]
    await asyncio.sleep(0.1)
    assert {request.response for request in slow if request.answer} == {(429, "over-share"), (503, "busy")}
    for tenant in ("tenant 0", "globex"):
        small = PausedRequest(gate, tenant, "ann", UNCOUNTED_BODY_BYTES)
        small.go.set()
        await small.task
        assert small.response == (204, "")
    for request in slow:
        request.go.set()
    await asyncio.gather(*(request.task for request in slow))
