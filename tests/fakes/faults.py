"""The parts that all fake model servers share: faults, counts, and how a server is run.

In a test: ``async with FakeX() as fake: … fake.faults, fake.stats``. From outside: ``POST /_faults`` with some of the
fields of its ``Faults`` ({} changes nothing), ``GET /_stats``, ``POST /_reset``.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, Self, TypeVar

from aiohttp import web


@dataclass
class Faults:
    """The faults of a server. A number is the number of requests that still fail so; the other faults stay until they
    are changed."""

    latency_seconds: float = 0.0
    """Until the answer begins."""
    throttle: int = 0
    """Next n requests: 429 rate_limit_exceeded."""
    throttle_headers: dict[str, str] = field(default_factory=lambda: {"retry-after": "1"})
    errors: int = 0
    """Next n requests: error_status."""
    error_status: int = 503
    hang: int = 0
    """Next n requests: no answer until the client goes away."""
    disconnect: int = 0
    """Next n requests: the connection closes without an answer."""
    not_json: int = 0
    """Next n answers are a proxy's HTML page with status 200."""
    quota: bool = False
    """429 insufficient_quota."""


@dataclass
class Stats:
    requests: int = 0
    open: int = 0
    """Being answered now."""
    peak_parallel: int = 0
    left: int = 0
    """Connections that ended before their answer did."""
    statuses: dict[str, int] = field(default_factory=dict)


class Refusal(Exception):
    """An answer that is an error; kind and code are OpenAI's."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code


F = TypeVar("F", bound=Faults)
S = TypeVar("S", bound=Stats)


class Fake(Generic[F, S]):
    """A server on 127.0.0.1. A fake says what it ``answer``s, and may ``spoil`` more. api_key None: any will do."""

    def __init__(self, paths: Iterable[str], faults: F, stats: S, *, api_key: str | None = None) -> None:
        """paths: where it is asked, by POST."""
        self.paths = tuple(paths)
        self.faults = faults
        self.stats = stats
        self.api_key = api_key
        self.address = ""
        """Scheme, host and port."""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        """port 0 finds one."""
        app = web.Application(client_max_size=64 * 2**20)
        for path in self.paths:
            app.router.add_post(path, self._serve)
        app.router.add_get("/_stats", self._show)
        app.router.add_post("/_faults", self._set_faults)
        app.router.add_post("/_reset", self._reset)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        host, bound, *_ = self._runner.addresses[0]
        self.address = f"http://{host}:{bound}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def run(self, *, port: int, path: str) -> None:
        """As a process, until SIGINT or SIGTERM. The first line on stdout is ``{"url": …}``, which ends in path."""
        asyncio.run(self._run(port, path))

    async def _run(self, port: int, path: str) -> None:
        await self.start(port)
        print(json.dumps({"url": self.address + path}), flush=True)
        stopped = asyncio.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, stopped.set)
        await stopped.wait()
        await self.stop()

    # One request

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request without faults. Raises Refusal."""
        raise NotImplementedError

    async def spoil(self, request: web.Request) -> None:
        """Raises Refusal or ConnectionResetError, or never returns; returns when the request is to be answered."""
        if self.faults.quota:
            raise Refusal(429, "You exceeded your quota", kind="insufficient_quota", code="insufficient_quota")
        if self.next("throttle"):
            raise Refusal(429, "Rate limit reached", kind="requests", code="rate_limit_exceeded")
        if self.next("errors"):
            raise Refusal(self.faults.error_status, "The server had an error", kind="server_error")
        if self.next("hang"):
            await asyncio.Event().wait()
        if self.next("disconnect"):
            self.close(request)

    def next(self, knob: str) -> bool:
        """Return whether this request fails so, and count it down."""
        left = getattr(self.faults, knob)
        setattr(self.faults, knob, max(0, left - 1))
        return bool(left)

    @staticmethod
    def close(request: web.Request) -> None:
        """The connection, now. Raises ConnectionResetError."""
        assert request.transport is not None
        request.transport.close()
        raise ConnectionResetError

    @staticmethod
    def page() -> web.Response:
        """A proxy's, in place of JSON."""
        return web.Response(text="<html>please sign in</html>", content_type="text/html")

    @staticmethod
    def refused(refusal: Refusal) -> dict[str, Any]:
        """The body of an error: OpenAI's."""
        error = {"message": str(refusal), "type": refusal.kind, "param": None, "code": refusal.code}
        return {"error": error}

    def _authorise(self, request: web.Request) -> None:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise Refusal(401, "Incorrect API key provided", code="invalid_api_key")

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        stats = self.stats  # which a reset in the meantime replaces
        stats.requests += 1
        stats.open += 1
        stats.peak_parallel = max(stats.peak_parallel, stats.open)
        response: web.StreamResponse
        try:
            self._authorise(request)
            await asyncio.sleep(self.faults.latency_seconds)
            await self.spoil(request)
            response = await self.answer(request)
        except Refusal as refusal:
            headers = self.faults.throttle_headers if refusal.code == "rate_limit_exceeded" else {}
            response = web.json_response(self.refused(refusal), status=refusal.status, headers=headers)
        except (asyncio.CancelledError, ConnectionResetError):
            stats.left += 1
            raise
        finally:
            stats.open -= 1
        status = str(response.status)
        stats.statuses[status] = stats.statuses.get(status, 0) + 1
        return response

    # Knobs over HTTP

    def reset(self) -> None:
        """Nothing goes wrong, nothing is counted yet."""
        self.faults, self.stats = type(self.faults)(), type(self.stats)()

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(asdict(self.stats))

    async def _set_faults(self, request: web.Request) -> web.Response:
        changes = await request.json()
        if unknown := changes.keys() - {knob.name for knob in fields(self.faults)}:
            return web.json_response({"error": f"no such fault: {sorted(unknown)}"}, status=400)
        self.faults = replace(self.faults, **changes)
        return web.json_response(asdict(self.faults))

    async def _reset(self, request: web.Request) -> web.Response:
        self.reset()
        return web.json_response({})
