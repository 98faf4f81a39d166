"""A chat model behind any server that speaks OpenAI's chat completions (OpenAI, vLLM, Ollama, llama.cpp, TGI …)."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, cast

import httpx
import openai
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.core.retry import classify_http, retry_after_seconds
from pipeline.observability.tracing import Call, trace_chat
from pipeline.runtime.settings import OPENAI_URL
from query.answers.chat import End, TooSlow
from query.answers.model import Usage
from query.answers.prompt import Message
from query.settings import ChatSettings

CONNECT_SECONDS = 5.0
T = TypeVar("T")


class OpenAIChat:
    """A ``query.answers.chat.Chat``."""

    def __init__(self, settings: ChatSettings) -> None:
        """Raises Misconfigured when no model is configured."""
        if not settings.model:
            raise Misconfigured("a chat server is configured without a model: set PENSTOCK_CHAT_MODEL", service="chat")
        self.model = settings.model
        self._settings = settings
        self._client = openai.AsyncOpenAI(
            base_url=settings.base_url or OPENAI_URL,
            api_key=settings.api_key.get_secret_value() if settings.api_key else "none",
            max_retries=0,
            timeout=openai.Timeout(settings.timeout_seconds, connect=CONNECT_SECONDS),
        )
        # At DEBUG this logger writes whole requests, documents included.
        logging.getLogger("openai").setLevel(logging.INFO)

    async def stream(self, messages: Sequence[Message]) -> AsyncGenerator[str | End, None]:
        with trace_chat(self.model, self._client.base_url.host) as measured:
            measured.sent = sum(len(m.content.encode("utf-8", "replace")) for m in messages)
            async with aclosing(self._pieces(messages)) as pieces:
                async for piece in pieces:
                    _measure(measured, piece)
                    yield piece

    async def _pieces(self, messages: Sequence[Message]) -> AsyncGenerator[str | End, None]:
        began = time.monotonic()
        ends, first = began + self._settings.timeout_seconds, began + self._settings.first_token_seconds
        opened = await self._within(
            min(first, ends),
            self._client.chat.completions.create(
                **self._request(messages), stream=True, stream_options={"include_usage": True}
            ),
        )
        reason, usage, written = None, Usage(), False
        async with aclosing(opened):
            chunks = aiter(opened)
            while True:
                try:
                    chunk = await self._within(ends if written else min(first, ends), anext(chunks))
                except StopAsyncIteration:
                    break
                except Retryable:
                    if reason is None:
                        raise
                    break  # the answer was complete already
                text, stopped, counted = _read(chunk)
                reason, usage = stopped or reason, counted or usage
                if text:
                    written = True
                    yield text
        if reason is None:
            raise Retryable("the chat server ended the answer before it was complete", service="chat")
        yield End(reason, usage)

    async def complete(
        self, messages: Sequence[Message], *, max_tokens: int | None = None, as_json: bool = False
    ) -> tuple[str, Usage]:
        request = self._request(messages, max_tokens)
        if as_json:
            request["response_format"] = {"type": "json_object"}
        ends = time.monotonic() + self._settings.timeout_seconds
        with trace_chat(self.model, self._client.base_url.host) as measured:
            measured.sent = sum(len(m.content.encode("utf-8", "replace")) for m in messages)
            answer = await self._within(ends, self._client.chat.completions.create(**request))
            text, _, usage = _read(answer)
            if not text:
                raise Retryable("the chat server sent an empty answer", service="chat")
            _measure(measured, text)
            _measure(measured, End("stop", usage or Usage()))
        return text, usage or Usage()

    async def aclose(self) -> None:
        await self._client.close()

    def _request(self, messages: Sequence[Message], max_tokens: int | None = None) -> dict[str, Any]:
        # OpenAI's newer models refuse max_tokens; other servers know only that one.
        limit = "max_tokens" if self._settings.base_url else "max_completion_tokens"
        request: dict[str, Any] = {
            "model": self.model,
            "messages": cast(
                list[ChatCompletionMessageParam], [{"role": m.role, "content": m.content} for m in messages]
            ),
            limit: max_tokens or self._settings.answer_tokens,
        }
        if self._settings.temperature is not None:
            request["temperature"] = self._settings.temperature
        return request

    async def _within(self, deadline: float, work: Awaitable[T]) -> T:
        """Raises Retryable at the deadline (of ``time.monotonic``), and translates every error of the client."""
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await work
        except (TimeoutError, openai.APITimeoutError) as error:
            is_unreachable = isinstance(error.__cause__, httpx.ConnectTimeout | httpx.PoolTimeout)
            raise (Retryable if is_unreachable else TooSlow)("the chat server is too slow", service="chat") from error
        except openai.APIStatusError as error:
            raise self._refusal(error) from None  # its text may quote the request
        except openai.APIConnectionError as error:
            why = type(error.__cause__ or error).__name__
            raise Retryable(f"the chat server cannot be reached: {why}", service="chat") from error
        except openai.APIError as error:  # an error that came in the stream
            raise Retryable(f"the chat server broke off ({_label(error)})", service="chat") from None
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError, ValueError) as error:
            # The cause would quote the response: name only its type.
            raise Retryable(f"the chat server's response is invalid ({type(error).__name__})", service="chat") from None

    def _refusal(self, error: openai.APIStatusError) -> Retryable | Misconfigured:
        status, label = error.status_code, _label(error)
        said = f"the chat server responded with {status} {label}".rstrip()
        match classify_http(status, error.code or error.type):
            case "retry":
                wait = retry_after_seconds(error.response.headers, now=datetime.now(UTC))
                kind = Deferred if status == 429 else Retryable
                return kind(said, retry_after=wait, service="chat")
            case "quota":
                return Deferred(f"{said}: the account's quota is exhausted, raise its limit", service="chat")
            case "poison":
                return Misconfigured(
                    f"{said}: check PENSTOCK_CHAT_MODEL, _WINDOW_TOKENS, _ANSWER_TOKENS and _TEMPERATURE",
                    service="chat",
                )
            case "misconfigured":
                setting = {401: "API_KEY", 403: "API_KEY (it may not use this model)", 404: "MODEL and _BASE_URL"}
                return Misconfigured(f"{said}: check PENSTOCK_CHAT_{setting.get(status, 'BASE_URL')}", service="chat")


_STOPPED: dict[str, Literal["stop", "length", "filtered"]] = {"length": "length", "content_filter": "filtered"}


def _read(answer: Any) -> tuple[str, Literal["stop", "length", "filtered"] | None, Usage | None]:
    """The text, the reason for stopping and the usage of a chunk or a whole answer, which the client does not check."""
    text, stopped, usage = "", None, None
    if not isinstance(answer, openai.BaseModel):
        raise TypeError("no completion")
    if choices := getattr(answer, "choices", None):
        [choice, *_] = choices
        said = choice.delta if isinstance(answer, ChatCompletionChunk) else choice.message
        text = (getattr(said, "content", None) or getattr(said, "refusal", None) or "") if said else ""
        if not isinstance(text, str):
            raise TypeError("no text")
        if choice.finish_reason is not None:
            stopped = _STOPPED.get(choice.finish_reason, "stop")
    if counted := getattr(answer, "usage", None):
        # A server that miscounts must not return anything to the caller's budget.
        usage = Usage(max(0, int(counted.prompt_tokens or 0)), max(0, int(counted.completion_tokens or 0)))
    return text, stopped, usage


def _measure(measured: Call, piece: str | End) -> None:
    if isinstance(piece, End):
        measured.facts["gen_ai.usage.input_tokens"] = piece.usage.prompt
        measured.facts["gen_ai.usage.output_tokens"] = piece.usage.answer
        measured.facts["penstock.stopped"] = piece.reason
    else:
        measured.received = (measured.received or 0) + len(piece.encode("utf-8", "replace"))


def _label(error: openai.APIError) -> str:
    """The error's code or type, bounded to letters."""
    return re.sub(r"[^\w.-]", "", str(error.code or error.type or ""))[:60]
