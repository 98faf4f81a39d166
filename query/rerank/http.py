"""A reranker behind HTTP: Cohere, Jina, TEI, vLLM and whoever speaks as they do."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
from pydantic import AliasChoices, BaseModel, Field, TypeAdapter, ValidationError

from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Poison, Retryable
from pipeline.core.retry import QUOTA_WAIT_SECONDS, classify_http, retry_after_seconds
from pipeline.observability.tracing import Call, trace_rerank
from query.settings import Flavour, RerankSettings

MAX_RESPONSE_BYTES = 16 * 2**20
"""Two hundred passages that a server sends back with their scores stay far below."""
_SETTING = {
    401: "PENSTOCK_RERANK_API_KEY",
    403: "PENSTOCK_RERANK_API_KEY (it may not use this model)",
    404: "PENSTOCK_RERANK_URL (the path belongs to it) and PENSTOCK_RERANK_MODEL",
}


class HttpReranker:
    """A ``port.Reranker``. One request a query, or as many as the server's batch size asks for, at once. Nothing is
    tried again here: whoever waits for a search has no time for it."""

    def __init__(self, settings: RerankSettings) -> None:
        """Raises Misconfigured for an address or a key that cannot be sent."""
        self.model = settings.model
        self._settings = settings
        self._url = _address(settings.url or "")
        self._client = httpx.AsyncClient(timeout=settings.timeout_seconds, headers=_headers(settings))

    async def rerank(self, query: str, texts: Sequence[str], *, tenant: str = "") -> Sequence[float]:
        most = MAX_TEXTS.get(self._settings.flavour, len(texts))
        parts = [texts[n : n + most] for n in range(0, len(texts), most or 1)]
        requests = [asyncio.ensure_future(self._ask(query, part)) for part in parts]
        try:
            answers = await asyncio.gather(*requests)
        finally:
            for request in requests:
                request.cancel()  # one part has failed: nobody reads the others
        return [score for answer in answers for score in answer]

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _ask(self, query: str, texts: Sequence[str]) -> list[float]:
        request = body(self._settings.flavour, self.model, query, texts)
        with trace_rerank(self.model, len(texts), self._url.host) as measured:
            return read(await self._answer(request, measured), texts=len(texts))

    async def _answer(self, request: object, measured: Call) -> bytes:
        try:
            async with self._client.stream("POST", self._url, json=request) as response:
                measured.sent = len(response.request.content)
                measured.facts["http.response.status_code"] = response.status_code
                if response.status_code != 200:
                    raise _failure(response)
                answer = bytearray()
                async for piece in response.aiter_bytes():
                    answer += piece
                    if len(answer) > MAX_RESPONSE_BYTES:
                        raise Retryable("the rerank server's response is too large", service="rerank")
                measured.received = len(answer)
                return bytes(answer)
        except httpx.TimeoutException as error:
            raise Retryable(
                f"the rerank server did not answer within {self._settings.timeout_seconds:g} s",
                service="rerank",
            ) from error
        except (httpx.RequestError, ssl.SSLError) as error:
            raise Retryable(
                f"the rerank server cannot be reached ({type(error).__name__})", service="rerank"
            ) from error


def _failure(response: httpx.Response) -> PenstockError:
    """The error for a response, from its status alone: the server's message may quote the passages. It names no
    address, because people who search read it."""
    status = response.status_code
    said = f"the rerank server responded with {status}"
    wait = retry_after_seconds(response.headers, now=datetime.now(UTC))
    if status == 429:
        return Deferred(said, retry_after=wait, service="rerank")
    match classify_http(status):
        case "retry":
            return Retryable(said, retry_after=wait, service="rerank")
        case "quota":
            return Deferred(f"{said}: raise its quota", retry_after=QUOTA_WAIT_SECONDS, service="rerank")
        case "poison":
            return Poison("rejected", f"{said} to this query: check PENSTOCK_RERANK_FLAVOUR if all queries fail")
        case "misconfigured":
            return Misconfigured(f"{said}: check {_SETTING.get(status, 'PENSTOCK_RERANK_URL')}", service="rerank")


def _address(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise Misconfigured(f"PENSTOCK_RERANK_URL is not a valid URL: {error}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise Misconfigured("PENSTOCK_RERANK_URL must begin with http:// or https:// and name a host")
    return address


def _headers(settings: RerankSettings) -> dict[str, str]:
    if settings.api_key is None:
        return {}
    key = settings.api_key.get_secret_value()
    if not key.isascii() or not key.isprintable():
        raise Misconfigured("PENSTOCK_RERANK_API_KEY contains characters that HTTP headers cannot hold")
    return {"Authorization": f"Bearer {key}"}


MAX_TEXTS: Mapping[Flavour, int] = {"tei": 32}
"""Texts a request, where there are fewer than a pool may have: TEI's --max-client-batch-size is 32 unless set."""


def body(flavour: Flavour, model: str, query: str, texts: Sequence[str]) -> dict[str, Any]:
    """The JSON of one request for the scores of all texts. A passage that is too long loses its end at the server."""
    if flavour == "tei":
        return {"query": query, "texts": list(texts), "truncate": True}
    request: dict[str, Any] = {"query": query, "documents": list(texts), "top_n": len(texts)}
    if model:
        request["model"] = model
    if flavour == "jina":
        request["return_documents"] = False  # else each passage comes back
    if flavour == "vllm":
        request["truncate_prompt_tokens"] = -1  # the model's window; without it a passage that is too long is refused
    return request


class _Rank(BaseModel):
    index: int
    score: float = Field(validation_alias=AliasChoices("relevance_score", "score"))


class _Ranks(BaseModel):
    results: list[_Rank]


_ANSWER = TypeAdapter[_Ranks | list[_Rank]](_Ranks | list[_Rank])


def read(answer: bytes, *, texts: int) -> list[float]:
    """The scores in the order of the texts, from either shape. Raises Retryable unless every text has one, once, and it
    is finite."""
    try:
        parsed = _ANSWER.validate_json(answer)
    except ValidationError as error:
        # The cause would quote the body: name it by its kind only.
        raise Retryable(f"the rerank server's response is invalid ({type(error).__name__})", service="rerank") from None
    ranks = parsed if isinstance(parsed, list) else parsed.results
    if sorted(rank.index for rank in ranks) != list(range(texts)):
        raise Retryable(
            f"the rerank server returned {len(ranks)} scores for {texts} passages, or numbered them wrongly",
            service="rerank",
        )
    if not all(math.isfinite(rank.score) for rank in ranks):
        raise Retryable("the rerank server returned a score that is not a number", service="rerank")
    return [rank.score for rank in sorted(ranks, key=lambda rank: rank.index)]
