"""One address that speaks OpenAI's embeddings protocol: a POST, and what came back. aiohttp reads a large answer in a
third of httpx's processor time, and every worker has it loaded already, for Kafka or for Elasticsearch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from pipeline.core.errors import Misconfigured, Retryable

IDLE_SECONDS = 4.0
"""How long an unused connection is kept: uvicorn, which vLLM runs on, hangs up after 5."""
BUFFER_BYTES = 2**20
"""Read before the answer's reader must have caught up; at aiohttp's 64 kB the socket is paused again and again."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    """Their names in any case."""
    body: bytes


class Endpoint:
    """Belongs to the event loop that first posts. Goes through the proxy that the machine names (HTTPS_PROXY,
    NO_PROXY)."""

    def __init__(self, base_url: str, key: str, timeout_seconds: float) -> None:
        """Raises Misconfigured where nothing could be sent with this address or this key."""
        parts = _address(base_url)
        if not (key.isascii() and key.isprintable()):
            raise Misconfigured(
                "PENSTOCK_EMBEDDING_API_KEY contains a character that HTTP headers cannot hold, such as a line break",
                service="embedding",
            )
        self.host = parts.hostname or ""
        self._url = parts._replace(path=f"{parts.path.rstrip('/')}/embeddings").geturl()
        self._headers = {"content-type": "application/json", "user-agent": "penstock"}
        if parts.username is None:  # else the address itself says who asks
            self._headers["authorization"] = f"Bearer {key}"
        # aiohttp's trust_env would look for the proxy, and into ~/.netrc, in a thread for each request.
        self._proxy = _proxy(self._url)
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def post(self, body: bytes, *, most_bytes: int) -> Response:
        """Return the response, whatever its status. Raises Retryable if there is none, or one above ``most_bytes``."""
        try:
            # From a file, piece by piece: one large write would hold up the event loop.
            # A redirect would take the texts to a host that nobody named.
            async with self._open().post(
                self._url, data=BytesIO(body), headers=self._headers, allow_redirects=False
            ) as response:
                return Response(response.status, response.headers, await self._body(response, most_bytes))
        except TimeoutError as error:
            raise Retryable(f"the embedding server {self.host} cannot be reached: timed out") from error
        except aiohttp.ClientError as error:
            raise Retryable(f"the embedding server {self.host} cannot be reached: {type(error).__name__}") from error

    async def _body(self, response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
        pieces, size = [], 0
        while piece := await response.content.readany():
            size += len(piece)
            if size > most_bytes:
                raise Retryable(f"the embedding server {self.host} answers more than {most_bytes >> 20} MiB")
            pieces.append(piece)
        return b"".join(pieces)

    async def aclose(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:  # a request that was waiting to be tried again would leave a connection open
            raise Retryable(f"the client of the embedding server {self.host} is closed")
        # Made here and not before: it belongs to a running event loop.
        if self._session is None:
            # As many connections as are asked for: what is too many, the pace decides.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            proxy, proxy_auth = self._proxy
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                read_bufsize=BUFFER_BYTES,
                proxy=proxy,
                proxy_auth=proxy_auth,
            )
        return self._session


def _address(url: str) -> SplitResult:
    # The address is not shown: some hold a password.
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            parts.hostname.encode("idna")
            return parts
    except ValueError:  # brackets that do not close, a port or a name that is none
        pass
    raise Misconfigured(
        "PENSTOCK_EMBEDDING_BASE_URL is not an http(s) address, such as https://models.example.com/v1",
        service="embedding",
    )


def _proxy(url: str) -> tuple[URL | None, aiohttp.BasicAuth | None]:
    """Raises Misconfigured."""
    target = urlsplit(url)
    proxies = getproxies()
    named = proxies.get(target.scheme) or proxies.get("all")
    if not named or proxy_bypass(target.netloc.rpartition("@")[2]):
        return None, None
    try:
        proxy = URL(named if "://" in named else f"http://{named}")
        if proxy.scheme in ("http", "https") and proxy.host:
            return proxy.with_user(None), aiohttp.BasicAuth.from_url(proxy)
    except ValueError:  # a port that is none
        pass
    raise Misconfigured(
        f"{target.scheme.upper()}_PROXY or ALL_PROXY names no proxy that speaks HTTP, such as http://proxy.example.com:3128",
        service="embedding",
    )
