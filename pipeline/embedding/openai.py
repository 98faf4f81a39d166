"""Embeddings from OpenAI or any server that speaks its protocol (vLLM, TEI, Ollama, …)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from pydantic_core import to_json

from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Retryable
from pipeline.embedding.failures import Alone
from pipeline.embedding.http import Endpoint
from pipeline.embedding.pace import Pace, Place, Probe, TooLarge
from pipeline.embedding.port import Embedded, Vectors
from pipeline.embedding.responses import Answer, Rejected, failure, outcome, read
from pipeline.embedding.tokens import Tokens
from pipeline.embedding.vectors import NOT_FINITE, REJECTED, only_row, triage, unit, usable
from pipeline.observability.metrics import EmbeddingOutcome
from pipeline.observability.tracing import Call, trace_embeddings
from pipeline.runtime.settings import OPENAI_URL, EmbeddingSettings

MODEL = "text-embedding-3-large"
DIMENSIONS = 1536
INPUT_WINDOW = 8191
"""OpenAI documents 8,192 tokens an input; its own examples have always stayed one below."""

PATIENCE_SECONDS = 20.0
"""How long one call tries again before it raises Retryable; its caller waits on in its own lane."""
QUERY_PATIENCE_SECONDS = 2.0
"""A person waits for a query: give up early, keyword search answers without us."""
MAX_CACHED_VECTORS = 4_096
"""Most vectors that are cached of calls that failed: 25 MB at 1,536 dimensions. The oldest are dropped first."""
LETTERS_AT_ONCE, BYTES_AT_ONCE = 2**18, 2**20
"""Texts to count and an answer to read that take the event loop about a millisecond; what is larger goes to a thread
(which costs a third of one)."""
BYTES_A_NUMBER, SPARE_BYTES = 64, 2**22
"""The longest answer that is read: numbers in JSON have some 20 characters, and a server may indent them."""
PROBE = "penstock"
"""A text that every model takes: what it rejects, it rejects for its parameters."""


@dataclass(slots=True)
class _Call:
    """One embed call's results so far. What has arrived stays, whatever fails afterwards."""

    texts: list[str]
    sizes: list[int]
    """Tokens."""
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
    ) -> None:
        """tokens: counts and cuts as the model does. Raises Misconfigured without a key for OpenAI itself."""
        self.model = settings.model or MODEL
        self.revision = ""
        self.dimensions = settings.dimensions or DIMENSIONS
        self.input_window = settings.input_window or INPUT_WINDOW
        self.document_prefix = settings.document_prefix
        self.query_prefix = settings.query_prefix
        self.on_truncated: Callable[[int], None] = lambda passages: None
        self.on_request: Callable[[EmbeddingOutcome, float], None] = lambda outcome, seconds: None
        self.on_question: Callable[[int, float], None] = lambda tokens, money: None
        self._settings = settings
        self._tokens = tokens
        self._patience = patience_seconds
        self._cached: dict[str, Vectors] = {}
        """Text → its vector from a call that failed: it is paid for, and will be requested again in a moment."""
        self._pace = Pace(parallel=settings.parallel_requests, base_seconds=backoff_base_seconds)
        self._server = Endpoint(settings.base_url or OPENAI_URL, _key(settings), settings.timeout_seconds)
        self._host = self._server.host
        self._parameters: dict[str, str | int] = {"model": self.model, "encoding_format": settings.encoding_format}
        if settings.send_dimensions:
            self._parameters["dimensions"] = self.dimensions

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._tokens.count(texts)

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        keep, refused = triage(texts)
        fitted, sizes, truncated = await self._fitted([self.document_prefix + texts[i] for i in keep])
        if truncated:
            self.on_truncated(truncated)
        call = self._call(fitted, sizes, self._patience)
        try:
            await self._all(call, self._batches(call, self._take_cached(call)))
        except PenstockError as error:
            self._cache(call)
            if isinstance(error, Alone):
                error.arrived = {keep[index]: call.vectors[index] for index in np.flatnonzero(call.vectors.any(axis=1))}
            raise
        vectors = call.vectors
        if refused:
            vectors = self._zeros(len(texts))
            vectors[keep] = call.vectors
        refused.update({keep[index]: reason for index, reason in call.refused.items()})
        return Embedded(vectors, refused, call.tokens, self._price(call.tokens))

    async def embed_query(self, text: str) -> Vectors:
        keep, refused = triage([text])
        if refused:
            return only_row(Embedded(self._zeros(1), refused))
        fitted, sizes, _ = await self._fitted([self.query_prefix + text])
        call = self._call(fitted, sizes, min(self._patience, QUERY_PATIENCE_SECONDS))
        await self._batch(call, keep)
        self.on_question(call.tokens, self._price(call.tokens))
        return only_row(Embedded(call.vectors, call.refused))

    async def aclose(self) -> None:
        await self._server.aclose()

    def _price(self, tokens: int) -> float:
        return tokens * self._settings.price_per_million_tokens / 1_000_000

    def _call(self, texts: list[str], sizes: list[int], patience: float) -> _Call:
        return _Call(texts, sizes, time.monotonic() + patience, self._zeros(len(texts)))

    def _batches(self, call: _Call, indexes: list[int]) -> list[list[int]]:
        """Divide these among requests within the limits of the settings, and those that the server showed."""
        most_tokens = min(self._settings.batch_tokens, self._pace.most)
        batches = batched([call.sizes[index] for index in indexes], self._settings.batch_inputs, most_tokens)
        return [[indexes[place] for place in batch] for batch in batches]

    def _take_cached(self, call: _Call) -> list[int]:
        """Fill in the vectors that an earlier call has cached; return the indexes that are missing."""
        missing = []
        for index, text in enumerate(call.texts):
            if (row := self._cached.pop(text, None)) is None:
                missing.append(index)
            else:
                call.vectors[index] = row
        return missing

    def _cache(self, call: _Call) -> None:
        """A row that arrived has unit length, the others are zeros."""
        for index in np.flatnonzero(call.vectors.any(axis=1)):
            self._cached[call.texts[index]] = call.vectors[index].copy()
        while len(self._cached) > MAX_CACHED_VECTORS:
            del self._cached[next(iter(self._cached))]

    def _zeros(self, rows: int) -> Vectors:
        return np.zeros((rows, self.dimensions), dtype=np.float32)

    async def _fitted(self, texts: list[str]) -> tuple[list[str], list[int], int]:
        """Run ``_fit``, in a thread if it takes long."""
        return self._fit(texts) if sum(map(len, texts)) < LETTERS_AT_ONCE else await asyncio.to_thread(self._fit, texts)

    def _fit(self, texts: list[str]) -> tuple[list[str], list[int], int]:
        """Texts cut to the window, their token counts, and how many were cut."""
        sizes = self._tokens.count(texts)
        too_long = [index for index, size in enumerate(sizes) if size > self.input_window]
        for index in too_long:
            texts[index] = self._tokens.cut(texts[index], self.input_window)
            sizes[index] = self.input_window
        return texts, sizes, len(too_long)

    async def _all(self, call: _Call, batches: list[list[int]], *, suspect: bool = False) -> None:
        """Run every batch to its end, so that what succeeds is not requested again, then raise the worst failure:
        Misconfigured before Retryable, because waiting would be useless. suspect: they are parts of one that failed
        alone."""
        running = (self._batch(call, batch, suspect=suspect) for batch in batches)
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if failures:
            worst = min(failures, key=lambda failure: isinstance(failure, Retryable))
            if isinstance(worst, PenstockError):
                worst.tokens = call.tokens
            raise worst

    async def _batch(self, call: _Call, indexes: list[int], *, suspect: bool = False) -> None:
        """Embed these, halving what the server rejects, or fails at while it answers others, down to the texts that are
        at fault."""
        try:
            several = len(indexes) > 1
            # A part of several texts is halved at its first failure: three tries at each size would keep the others.
            answer = await self._ask(
                [call.texts[index] for index in indexes],
                sum(call.sizes[index] for index in indexes),
                call.deadline,
                probe=partial(self._probe, call),
                suspect=suspect and several,
                divisible=several,
            )
        except TooLarge:
            await self._all(call, self._batches(call, indexes), suspect=suspect)
            return
        except Rejected as rejected:
            await self._prove(call)
            if len(indexes) == 1:
                call.refused[indexes[0]] = f"{REJECTED} ({rejected.status} {rejected.label})"
                return
            middle = len(indexes) // 2
            await self._all(call, [indexes[:middle], indexes[middle:]])
            return
        except Alone as alone:
            if len(indexes) == 1:
                if not isinstance(alone, Deferred):  # which never counts as a failure of the document
                    await self._require_answers(call)
                raise
            middle = len(indexes) // 2
            await self._all(call, [indexes[:middle], indexes[middle:]], suspect=True)
            return
        call.tokens += answer.tokens
        good = usable(answer.rows)
        if good.any():
            call.proven = True
        else:
            await self._prove(call)
        if good.all():
            call.vectors[indexes] = unit(answer.rows)
            return
        call.vectors[np.array(indexes)[good]] = unit(answer.rows[good])
        call.refused.update({index: NOT_FINITE for index, fine in zip(indexes, good, strict=True) if not fine})

    async def _require_answers(self, call: _Call) -> None:
        """Check that the server answers now: that others were answered may have been before an outage. Raises
        Retryable, never Alone, and Misconfigured if it does not."""
        try:
            await self._prove(call)
        except Alone as alone:
            raise Retryable(str(alone), retry_after=alone.retry_after, service="embedding") from alone

    async def _prove(self, call: _Call) -> None:
        """Check that the server embeds anything at all, before a text is taken for the cause. Raises Misconfigured if
        it does not."""
        async with call.proving:
            if call.proven:
                return
            try:
                answer = await self._ask([PROBE], 1, max(call.deadline, time.monotonic() + QUERY_PATIENCE_SECONDS))
            except Rejected as rejected:
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

    async def _probe(self, call: _Call, place: Place) -> None:
        """Embed a text of ours, once. Raises Retryable, Misconfigured or Rejected."""
        call.tokens += (await self._measured(self._body([PROBE]), 1, place)).tokens

    async def _ask(
        self,
        texts: list[str],
        tokens: int,
        deadline: float,
        *,
        probe: Probe | None = None,
        suspect: bool = False,
        divisible: bool = False,
    ) -> Answer:
        inputs = len(texts)
        body = self._body(texts)  # before there is a place: a megabyte takes a millisecond
        return await self._pace.run(
            lambda place: self._measured(body, inputs, place),
            size=tokens,
            deadline=deadline,
            of=body,
            probe=probe,
            suspect=suspect,
            divisible=divisible,
        )

    def _body(self, texts: list[str]) -> bytes:
        return to_json({"input": texts, **self._parameters})

    async def _measured(self, body: bytes, inputs: int, place: Place) -> Answer:
        began = time.perf_counter()
        try:
            with trace_embeddings(self.model, inputs, self._host) as measured:
                answer = await self._request(body, inputs, place, measured)
        except (Retryable, Misconfigured, Rejected) as error:
            self.on_request(outcome(error), time.perf_counter() - began)
            raise
        self.on_request("answered", time.perf_counter() - began)
        return answer

    async def _request(self, body: bytes, inputs: int, place: Place, measured: Call) -> Answer:
        """One HTTP request. Raises Retryable, Misconfigured or Rejected."""
        measured.sent = len(body)
        response = await self._server.post(body, most_bytes=SPARE_BYTES + inputs * self.dimensions * BYTES_A_NUMBER)
        measured.received = len(response.body)
        if response.status != 200:
            measured.facts["http.response.status_code"] = response.status
            raise failure(response, self._host)
        place.give_back()
        reading = partial(read, response.body, inputs=inputs, dimensions=self.dimensions)
        # In a thread, so that the request that waited for the place is sent before this answer is read.
        answer = reading() if len(response.body) < BYTES_AT_ONCE else await asyncio.to_thread(reading)
        measured.facts["gen_ai.usage.input_tokens"] = answer.tokens
        return answer


def _key(settings: EmbeddingSettings) -> str:
    """The key to send. OPENAI_API_KEY is only for OpenAI itself: another server never sees it."""
    if settings.api_key:
        return settings.api_key.get_secret_value()
    if settings.base_url:
        return "none"
    if key := os.environ.get("OPENAI_API_KEY"):
        return key
    raise Misconfigured(
        "there is no API key for OpenAI: set PENSTOCK_EMBEDDING_API_KEY (or PENSTOCK_EMBEDDING_BASE_URL)"
    )


def batched(sizes: Sequence[int], most_inputs: int, most_tokens: float) -> list[list[int]]:
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
