"""A rerank server in the shapes of Cohere, Jina, vLLM and TEI, with knobs for what goes wrong.

``async with FakeRerank() as fake: … fake.url("cohere"), fake.faults, fake.stats``. It really ranks: by the words that a
passage shares with the question, the rarer among the passages the heavier, more when they stand side by side as in
the question. No model, but better than what it is given unsorted. Shapes: docs.cohere.com/reference/rerank,
api.jina.ai/docs, docs.vllm.ai (pooling, score), huggingface.github.io/text-embeddings-inference.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from aiohttp import web

PATHS = {"cohere": "/v2/rerank", "jina": "/v1/rerank", "vllm": "/rerank", "tei": "/tei/rerank"}
TEI_BATCH = 32
WINDOW_WORDS = 400


@dataclass
class Faults:
    """What goes wrong. A number of requests counts down as they are spoilt; the rest stays until changed."""

    latency_seconds: float = 0.0
    errors: int = 0
    """Next n requests: error_status."""
    error_status: int = 503
    throttle: int = 0
    """Next n requests: 429 with throttle_headers."""
    throttle_headers: dict[str, str] = field(default_factory=lambda: {"retry-after": "1"})
    hang: int = 0
    """Next n requests: no answer until the client goes away."""
    disconnect: int = 0
    """Next n requests: the connection closes without an answer."""
    drop_row: int = 0
    """Next n answers lack their last row."""
    repeat_row: int = 0
    """Next n answers have the first row twice and the last not at all."""
    nan: int = 0
    """Next n answers have a score that is NaN."""
    not_json: int = 0
    """Next n answers are a proxy's HTML page with status 200."""
    endless: int = 0
    """Next n answers never end."""


@dataclass
class Stats:
    requests: int = 0
    texts: int = 0
    """Scored (answered 200)."""
    largest: int = 0
    """Texts of the largest request."""
    left: int = 0
    """Clients that went away before their answer."""
    bodies: list[dict[str, Any]] = field(default_factory=list)


class _Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeRerank:
    """api_key None: any will do. model: the only one that Cohere's and Jina's paths know."""

    def __init__(self, *, api_key: str | None = None, model: str = "rerank-v3.5") -> None:
        self.api_key = api_key
        self.model = model
        self.faults = Faults()
        self.stats = Stats()
        self._address = ""
        self._runner: web.AppRunner | None = None

    def url(self, flavour: str = "cohere") -> str:
        return self._address + PATHS[flavour]

    async def __aenter__(self) -> FakeRerank:
        app = web.Application(client_max_size=64 * 2**20)
        for flavour, path in PATHS.items():
            app.router.add_post(path, self._tei if flavour == "tei" else self._documents)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port, *_ = self._runner.addresses[0]
        self._address = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _documents(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "documents")

    async def _tei(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "texts")

    async def _answer(self, request: web.Request, key: str) -> web.StreamResponse:
        self.stats.requests += 1
        try:
            self._authorise(request)
            await asyncio.sleep(self.faults.latency_seconds)
            await self._spoil(request)
            body = await request.json()
            self.stats.bodies.append(body)
            texts = self._checked(request.path, body, key)
        except _Refusal as refusal:
            headers = self.faults.throttle_headers if refusal.status == 429 else {}
            return web.json_response({"message": str(refusal)}, status=refusal.status, headers=headers)
        except asyncio.CancelledError:
            self.stats.left += 1
            raise
        self.stats.texts += len(texts)
        self.stats.largest = max(self.stats.largest, len(texts))
        if self._next("endless"):
            return await self._endless(request)
        return self._ranked(body["query"], texts, bare=key == "texts", top_n=body.get("top_n") or len(texts))

    def _authorise(self, request: web.Request) -> None:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise _Refusal(401, "invalid api token")

    def _checked(self, path: str, body: dict[str, Any], key: str) -> list[str]:
        texts = body.get(key)
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise _Refusal(422, f"invalid request: {key} must be a list of texts, here is {str(body)[:200]}")
        if not isinstance(body.get("query"), str) or not body["query"]:
            raise _Refusal(400, "invalid request: query is required")
        if path in (PATHS["cohere"], PATHS["jina"]) and body.get("model") != self.model:
            raise _Refusal(404, f"model {body.get('model')!r} not found")
        if key == "texts" and len(texts) > TEI_BATCH:
            raise _Refusal(422, f"batch size {len(texts)} > maximum allowed batch size {TEI_BATCH}")
        truncates = body.get("truncate") or body.get("truncate_prompt_tokens") == -1
        if path in (PATHS["vllm"], PATHS["tei"]) and not truncates and max(map(_words, texts)) > WINDOW_WORDS:
            raise _Refusal(400, f"the input {texts[0][:100]!r} is longer than the model's window")
        return texts

    async def _spoil(self, request: web.Request) -> None:
        if self._next("throttle"):
            raise _Refusal(429, "too many requests")
        if self._next("errors"):
            raise _Refusal(self.faults.error_status, "the server had an error")
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

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        while True:
            await response.write(b" " * 65_536)

    def _ranked(self, query: str, texts: Sequence[str], *, bare: bool, top_n: int) -> web.Response:
        name = "score" if bare else "relevance_score"
        rows: list[dict[str, Any]] = [{"index": n, name: score} for n, score in enumerate(scores(query, texts))]
        rows = sorted(rows, key=lambda row: -row[name])[:top_n]
        if self._next("drop_row"):
            rows.pop()
        if self._next("repeat_row"):
            rows = [rows[0], *rows[:-1]]
        if self._next("nan"):
            rows[0][name] = math.nan
        if self._next("not_json"):
            return web.Response(text="<html>please sign in</html>", content_type="text/html")
        answer = rows if bare else {"id": "1", "results": rows, "meta": {"billed_units": {"search_units": 1}}}
        return web.Response(text=json.dumps(answer), content_type="application/json")


def scores(query: str, texts: Sequence[str]) -> list[float]:
    """Between 0 and 1: what share of the question's weight a text has."""
    split = [_split(text) for text in texts]
    asked = _split(query)
    wanted = [*dict.fromkeys(asked), *dict.fromkeys(pairwise(asked))]
    held = [{*words, *pairwise(words)} for words in split]
    weight = {part: math.log(1 + len(texts) / (1 + sum(part in one for one in held))) for part in wanted}
    whole = sum(weight.values()) or 1.0
    return [sum(weight[part] for part in wanted if part in one) / whole for one in held]


def _split(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _words(text: str) -> int:
    return len(_split(text))
