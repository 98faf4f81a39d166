"""A reranker behind HTTP: Cohere, Jina, TEI, vLLM and whoever speaks as they do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

import httpx

from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Poison, Retryable
from pipeline.core.retry import classify_http, retry_after_seconds
from pipeline.traced.calls import Call, rerank
from query.rerank.wire import MOST_TEXTS, body, read
from query.settings import RerankSettings

MOST_ANSWER_BYTES = 16 * 2**20
"""Two hundred passages that a server sends back with their scores stay far below."""
QUOTA_WAIT_SECONDS = 60.0
"""An empty account heals when somebody pays: ask once a minute."""
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
        most = MOST_TEXTS.get(self._settings.flavour, len(texts))
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
        asked = body(self._settings.flavour, self.model, query, texts)
        with rerank(self.model, len(texts), self._url.host) as measured:
            return read(await self._answer(asked, measured), texts=len(texts))

    async def _answer(self, asked: object, measured: Call) -> bytes:
        try:
            async with self._client.stream("POST", self._url, json=asked) as response:
                measured.sent = len(response.request.content)
                measured.facts["http.response.status_code"] = response.status_code
                if response.status_code != 200:
                    raise _failure(response)
                answer = bytearray()
                async for piece in response.aiter_bytes():
                    answer += piece
                    if len(answer) > MOST_ANSWER_BYTES:
                        raise Retryable("the rerank server answers without end", service="rerank")
                measured.received = len(answer)
                return bytes(answer)
        except httpx.TimeoutException as error:
            raise Retryable(
                f"the rerank server did not answer within {self._settings.timeout_seconds:g} s",
                service="rerank",
            ) from error
        except httpx.RequestError as error:
            raise Retryable(
                f"the rerank server cannot be reached ({type(error).__name__})", service="rerank"
            ) from error


def _failure(response: httpx.Response) -> PenstockError:
    """By the status alone: a server's own words may quote the passages, and whoever searches reads ours: no address."""
    status = response.status_code
    said = f"the rerank server answers {status}"
    wait = retry_after_seconds(response.headers, now=datetime.now(UTC))
    if status == 429:
        return Deferred(said, retry_after=wait, service="rerank")
    match classify_http(status):
        case "retry":
            return Retryable(said, retry_after=wait, service="rerank")
        case "quota":
            return Deferred(f"{said}: raise its quota", retry_after=QUOTA_WAIT_SECONDS, service="rerank")
        case "poison":
            return Poison("rejected", f"{said} to this question: check PENSTOCK_RERANK_FLAVOUR if it does so to all")
        case "misconfigured":
            return Misconfigured(f"{said}: check {_SETTING.get(status, 'PENSTOCK_RERANK_URL')}", service="rerank")


def _address(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise Misconfigured(f"PENSTOCK_RERANK_URL is no address: {error}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise Misconfigured("PENSTOCK_RERANK_URL must begin with http:// or https:// and name a host")
    return address


def _headers(settings: RerankSettings) -> dict[str, str]:
    if settings.api_key is None:
        return {}
    key = settings.api_key.get_secret_value()
    if not key.isascii() or not key.isprintable():
        raise Misconfigured("PENSTOCK_RERANK_API_KEY holds characters that no header takes")
    return {"Authorization": f"Bearer {key}"}
