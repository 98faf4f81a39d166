"""Embeddings from OpenAI or any server that speaks its protocol (vLLM, TEI, Ollama, …)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

import numpy as np
import openai

from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.core.retry import classify_http, retry_after_seconds
from pipeline.embedding.answers import Answer, read
from pipeline.embedding.pace import Pace, Throttled
from pipeline.embedding.port import Embedded, Vectors
from pipeline.embedding.tokens import Tokens
from pipeline.embedding.vectors import NOT_FINITE, REJECTED, only_row, triage, unit, usable
from pipeline.settings import EmbeddingSettings
from pipeline.telemetry import EmbeddingOutcome
from pipeline.traced.calls import Call, embeddings

MODEL = "text-embedding-3-large"
DIMENSIONS = 1536
INPUT_WINDOW = 8191
"""OpenAI documents 8,192 tokens an input; its own examples have always stayed one below."""
OPENAI_URL = "https://api.openai.com/v1"

PATIENCE_SECONDS = 20.0
"""How long one call tries again before it raises Retryable; its caller waits on in its own lane."""
QUERY_PATIENCE_SECONDS = 2.0
"""A person waits for a query: give up early, keyword search answers without us."""
QUOTA_WAIT_SECONDS = 60.0
"""An empty account heals when somebody pays: ask once a minute."""
PROBE = "penstock"
"""A text that every model takes: what it rejects, it rejects for its parameters."""


class _Rejected(Exception):
    """The server will not take this request's content (400, 413, 422). label: the error's code or type, bounded to
    letters. message: may quote the input, so it is shown only when the input was PROBE."""

    def __init__(self, status: int, label: str, message: str) -> None:
        super().__init__(status, label)
        self.status = status
        self.label = label
        self.message = message


@dataclass(slots=True)
class _Call:
    """One embed call's results so far. What has arrived stays, whatever fails afterwards."""

    texts: list[str]
    deadline: float
    vectors: Vectors
    refused: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    proven: bool = False
    """The server has embedded something in this call, so what it rejects is that text's own fault."""
    proving: asyncio.Lock = field(default_factory=asyncio.Lock)


class OpenAIEmbedder:
    """A ``port.Embedder``. Safe to share between tasks: they share its parallel requests and its waiting times."""

    def __init__(
        self,
        settings: EmbeddingSettings,
        tokens: Tokens,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        backoff_base_seconds: float = 0.5,
        on_truncated: Callable[[int], None] = lambda count: None,
    ) -> None:
        """tokens: counts and cuts as the model does. on_truncated: told how many passages of a call were longer than
        the window and lost their end. Raises Misconfigured without a key for OpenAI itself."""
        self.model = settings.model or MODEL
        self.revision = ""
        self.dimensions = settings.dimensions or DIMENSIONS
        self.input_window = settings.input_window or INPUT_WINDOW
        self.document_prefix = settings.document_prefix
        self.query_prefix = settings.query_prefix
        self.on_truncated = on_truncated
        self.on_request: Callable[[EmbeddingOutcome, float], None] = lambda outcome, seconds: None
        self.on_question: Callable[[int, float], None] = lambda tokens, money: None
        self._settings = settings
        self._tokens = tokens
        self._patience = patience_seconds
        self._pace = Pace(parallel=settings.parallel_requests, base_seconds=backoff_base_seconds)
        url = settings.base_url or OPENAI_URL
        self._host = urlsplit(url).hostname or url
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=_key(settings), max_retries=0, timeout=settings.timeout_seconds
        )
        # At DEBUG this logger writes whole requests, documents included.
        logging.getLogger("openai").setLevel(logging.INFO)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._tokens.count(texts)

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        keep, refused = triage(texts)
        fitted, sizes, truncated = await asyncio.to_thread(self._fit, [self.document_prefix + texts[i] for i in keep])
        if truncated:
            self.on_truncated(truncated)
        call = self._call(fitted, self._patience)
        await self._all(call, _batches(sizes, self._settings.batch_inputs, self._settings.batch_tokens))
        vectors = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        vectors[keep] = call.vectors
        refused.update({keep[index]: reason for index, reason in call.refused.items()})
        return Embedded(vectors, refused, call.tokens)

    async def embed_query(self, text: str) -> Vectors:
        keep, refused = triage([text])
        if refused:
            return only_row(Embedded(self._zeros(1), refused))
        fitted, _, _ = await asyncio.to_thread(self._fit, [self.query_prefix + text])
        call = self._call(fitted, min(self._patience, QUERY_PATIENCE_SECONDS))
        await self._batch(call, keep)
        self.on_question(call.tokens, call.tokens * self._settings.price_per_million_tokens / 1_000_000)
        return only_row(Embedded(call.vectors, call.refused))

    async def aclose(self) -> None:
        await self._client.close()

    def _call(self, texts: list[str], patience: float) -> _Call:
        return _Call(texts, time.monotonic() + patience, self._zeros(len(texts)))

    def _zeros(self, rows: int) -> Vectors:
        return np.zeros((rows, self.dimensions), dtype=np.float32)

    def _fit(self, texts: list[str]) -> tuple[list[str], list[int], int]:
        """Texts cut to the window, their token counts, and how many were cut."""
        sizes = self._tokens.count(texts)
        too_long = [index for index, size in enumerate(sizes) if size > self.input_window]
        for index in too_long:
            texts[index] = self._tokens.cut(texts[index], self.input_window)
            sizes[index] = self.input_window
        return texts, sizes, len(too_long)

    async def _all(self, call: _Call, batches: list[list[int]]) -> None:
        """Every batch to its own end, so that what succeeds beside a failure is not asked for again; then the worst
        failure. Retryable before Misconfigured would hide that waiting is useless."""
        outcomes = await asyncio.gather(*(self._batch(call, batch) for batch in batches), return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if failures:
            worst = min(failures, key=lambda failure: isinstance(failure, Retryable))
            if isinstance(worst, PenstockError):
                worst.tokens = call.tokens
            raise worst

    async def _batch(self, call: _Call, indexes: list[int]) -> None:
        """Embed these, halving what the server rejects down to the texts that are at fault."""
        try:
            answer = await self._ask([call.texts[index] for index in indexes], call.deadline)
        except _Rejected as rejected:
            await self._prove(call)
            if len(indexes) == 1:
                call.refused[indexes[0]] = f"{REJECTED} ({rejected.status} {rejected.label})"
                return
            middle = len(indexes) // 2
            await self._all(call, [indexes[:middle], indexes[middle:]])
            return
        call.tokens += answer.tokens
        good = usable(answer.rows)
        if good.any():
            call.proven = True
        else:
            await self._prove(call)
        call.vectors[np.array(indexes)[good]] = unit(answer.rows[good])
        call.refused.update({index: NOT_FINITE for index, fine in zip(indexes, good, strict=True) if not fine})

    async def _prove(self, call: _Call) -> None:
        """That the server embeds anything at all, before a text is blamed. Raises Misconfigured when it does not."""
        async with call.proving:
            if call.proven:
                return
            try:
                answer = await self._ask([PROBE], call.deadline)
            except _Rejected as rejected:
                raise Misconfigured(
                    f"the embedding server {self._host} rejects every text ({rejected.status}: {rejected.message}): "
                    "check PENSTOCK_EMBEDDING_MODEL, _DIMENSIONS, _SEND_DIMENSIONS and _ENCODING_FORMAT",
                    service="embedding",
                ) from rejected
            if not usable(answer.rows).all():
                raise Misconfigured(
                    f"the embedding server {self._host} answers vectors of zeros or NaN for every text",
                    service="embedding",
                )
            call.tokens += answer.tokens
            call.proven = True

    async def _ask(self, texts: list[str], deadline: float) -> Answer:
        return await self._pace.run(lambda: self._measured(texts), deadline=deadline)

    async def _measured(self, texts: list[str]) -> Answer:
        began = time.perf_counter()
        try:
            with embeddings(self.model, len(texts), self._host) as measured:
                answer = await self._request(texts, measured)
        except (Retryable, Misconfigured, _Rejected) as error:
            self.on_request(_outcome(error), time.perf_counter() - began)
            raise
        self.on_request("answered", time.perf_counter() - began)
        return answer

    async def _request(self, texts: list[str], measured: Call) -> Answer:
        """One HTTP request. Raises Retryable, Misconfigured or _Rejected."""
        try:
            response = await self._client.embeddings.with_raw_response.create(
                input=texts,
                model=self.model,
                encoding_format=self._settings.encoding_format,
                dimensions=self.dimensions if self._settings.send_dimensions else openai.omit,
            )
        except openai.APIConnectionError as error:
            raise Retryable(f"the embedding server {self._host} cannot be reached: {_why(error)}") from error
        except openai.APIStatusError as error:
            measured.facts["http.response.status_code"] = error.status_code
            raise self._failure(error) from error
        measured.sent = len(response.http_response.request.content)
        measured.received = len(response.http_response.content)
        answer = read(response.http_response.content, inputs=len(texts), dimensions=self.dimensions)
        measured.facts["gen_ai.usage.input_tokens"] = answer.tokens
        return answer

    def _failure(self, error: openai.APIStatusError) -> Retryable | Misconfigured | _Rejected:
        status = error.status_code
        label = _label(error)
        match classify_http(status, error.code or error.type):
            case "retry":
                wait = retry_after_seconds(error.response.headers, now=datetime.now(UTC))
                kind = Throttled if status == 429 else Retryable
                return kind(f"the embedding server {self._host} answers {status} {label}", retry_after=wait)
            case "quota":
                return Throttled(
                    f"the embedding account's quota is used up ({self._host}: {status} {label}): raise its limit",
                    retry_after=QUOTA_WAIT_SECONDS,
                )
            case "poison":
                return _Rejected(status, label, _message(error))
            case "misconfigured":
                return Misconfigured(
                    f"the embedding server {self._host} answers {status} {label}: "
                    f"check PENSTOCK_EMBEDDING_{_SETTING.get(status, 'BASE_URL')}",
                    service="embedding",
                )


_SETTING = {401: "API_KEY", 403: "API_KEY (it may not use this model)", 404: "MODEL and PENSTOCK_EMBEDDING_BASE_URL"}


def _outcome(error: Retryable | Misconfigured | _Rejected) -> EmbeddingOutcome:
    match error:
        case Throttled():
            return "throttled"
        case Retryable():
            return "unavailable"
        case Misconfigured():
            return "misconfigured"
        case _:
            return "rejected"


def _key(settings: EmbeddingSettings) -> str:
    """The key to send. OPENAI_API_KEY is only for OpenAI itself: another server never sees it."""
    if settings.api_key:
        return settings.api_key.get_secret_value()
    if settings.base_url:
        return "none"
    if key := os.environ.get("OPENAI_API_KEY"):
        return key
    raise Misconfigured("no key for OpenAI: set PENSTOCK_EMBEDDING_API_KEY (or PENSTOCK_EMBEDDING_BASE_URL)")


def _why(error: openai.APIConnectionError) -> str:
    cause = error.__cause__
    return "timed out" if isinstance(error, openai.APITimeoutError) else type(cause or error).__name__


def _label(error: openai.APIStatusError) -> str:
    return re.sub(r"[^\w.-]", "", str(error.code or error.type or "error"))[:60]


def _message(error: openai.APIStatusError) -> str:
    """The server's own words, on one line."""
    words = error.body.get("message") if isinstance(error.body, dict) else error.body
    return " ".join(str(words or error.message).split())[:200]


def _batches(sizes: Sequence[int], most_inputs: int, most_tokens: int) -> list[list[int]]:
    """Indexes, in order, in groups within both limits (a text larger than a limit stands alone)."""
    batches: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not batches or len(batches[-1]) >= most_inputs or filled + size > most_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += size
    return batches
