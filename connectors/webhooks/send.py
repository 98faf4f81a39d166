"""One request to the receiver of a webhook: to a permitted address, within limits of time and size, and signed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from connectors.errors import Forbidden
from connectors.web.transport import Guarded, Hosts, Resolver, default_ssl_context, origin, system_resolver
from pipeline.core.errors import Misconfigured
from pipeline.core.retry import retry_after_seconds

CONNECT_SECONDS, REQUEST_SECONDS = 5.0, 15.0
ANSWER_BYTES = 16 * 1024
"""As much of a response is read, so that the connection can be used again. Nothing in it is used."""
RESPONSE_BYTES = 4 * ANSWER_BYTES
"""The most that a receiver may send, with all heads: after it, the request has failed."""
PARALLEL = 8
"""Requests to one receiver at once."""
GONE = 410


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a request."""

    status: int | None
    """None: there was no response."""
    reason: str | None = None
    """One line that says why it does not count as delivered; None: it does."""
    retry_after: float | None = None


def checked(url: str, *, private: bool) -> httpx.URL:
    """The address of a receiver. private: it may be one that is not public, and be reached without TLS. Raises
    Misconfigured."""
    try:
        parsed = httpx.URL(url)
        host = parsed.host
    except (httpx.InvalidURL, UnicodeError):  # the latter for a name that is no IDNA
        parsed, host = httpx.URL(""), ""
    schemes = ("https", "http") if private else ("https",)
    if parsed.scheme not in schemes or not host:
        raise Misconfigured(
            "the URL of a webhook has to be http://… or https://…"
            if private
            else "the URL of a webhook has to be https://… (for a receiver inside your network: --allow-private)"
        )
    if parsed.userinfo or parsed.fragment:
        raise Misconfigured("the URL of a webhook may hold no user name, password or fragment")
    return parsed


class Receiver:
    """A client for one receiver. Redirects are not followed, no proxy is used, and no cookie is kept."""

    def __init__(
        self,
        url: str,
        *,
        private: bool,
        resolver: Resolver = system_resolver,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """private: see ``checked``. resolver, ssl_context: for tests. Raises Misconfigured."""
        self._url = checked(url, private=private)
        self._where = str(origin(self._url))
        hosts = Hosts(self._url, (), base_may_be_private=private)
        self._client = httpx.AsyncClient(
            transport=Guarded(
                hosts, resolver, ssl_context or default_ssl_context(), PARALLEL, response_bytes=RESPONSE_BYTES
            ),
            headers={"user-agent": "penstock", "accept": "*/*", "accept-encoding": "identity"},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            timeout=httpx.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS, pool=None),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send a request. Never raises because of the receiver."""
        try:
            async with (
                asyncio.timeout(REQUEST_SECONDS),
                self._client.stream("POST", self._url, headers=dict(headers), content=body) as response,
            ):
                after = retry_after_seconds(response.headers, now=datetime.now(UTC))
                await _drain(response)
                return Answer(response.status_code, self._reason(response.status_code), after)
        except TimeoutError:
            return Answer(None, f"{self._where} did not answer within {REQUEST_SECONDS:g} s")
        except httpx.TransportError as error:
            return Answer(None, f"{self._where} did not respond: {str(error)[:200]}")
        except (Forbidden, Misconfigured) as error:
            return Answer(None, str(error))

    def _reason(self, status: int) -> str | None:
        if 200 <= status < 300:
            return None
        if 300 <= status < 400:
            return f"{self._where} answered {status}: redirects are not followed"
        if status == GONE:
            return f"{self._where} answered {GONE} Gone: it wants no more events"
        return f"{self._where} answered {status}"


async def _drain(response: httpx.Response) -> None:
    read = 0
    async for part in response.aiter_raw():
        read += len(part)
        if read > ANSWER_BYTES:
            return
