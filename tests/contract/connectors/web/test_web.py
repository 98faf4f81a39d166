"""The sources' HTTP client against a real server, over real sockets: waiting, credentials, redirects, sizes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import logging
import ssl
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import httpx
import pytest

from connectors.git.playground import certificate
from connectors.web import Denied, Forbidden, Limits, Missing, Rejected, TooLarge, Web, throttled
from connectors.web.client import Gunzip
from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Retryable
from pipeline.runtime.http_server import served

CANARY = "canary-7f3a9c"
QUICK = Limits(patience_seconds=5, backoff_base_seconds=0.01, backoff_cap_seconds=0.05)


@dataclass
class Server:
    """Answers with what was put in ``answers``, in turn, then with ``{"ok": true}``. Keeps what it was asked."""

    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str], float]] = field(default_factory=list)
    """(path with query, headers, time of arrival)"""
    drip: bool = False
    cut: bool = False
    open_now: int = 0
    most_open: int = 0
    answered: list[tuple[int, int]] = field(default_factory=list)
    """(status, how many requests were open then, itself included)"""

    def answer(self, status: int = 200, body: bytes | str = b"{}", **headers: str) -> None:
        named = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        self.answers.append((status, named, body.encode() if isinstance(body, str) else body))

    def redirect(self, target: str, status: int = 302) -> None:
        self.answer(status, location=target)

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.requests]

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        query = scope["query_string"].decode()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["path"] + (f"?{query}" if query else ""), headers, time.monotonic()))
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            await self._answer(send)
        finally:
            self.open_now -= 1

    async def _answer(self, send) -> None:
        default = (200, {"content-type": "application/json"}, b'{"ok": true}')
        status, headers, body = self.answers.pop(0) if self.answers else default
        await asyncio.sleep(0.002)
        self.answered.append((status, self.open_now))
        if self.cut:
            headers = {**headers, "content-length": str(len(body) + 10)}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        if self.drip:
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    await send({"type": "http.response.body", "body": b" ", "more_body": True})
                    await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": body, "more_body": self.cut})
        if self.cut:
            raise ConnectionAbortedError


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    app = Server()
    async with served(app) as url:
        yield app, url


@pytest.fixture
async def other() -> AsyncIterator[tuple[Server, str]]:
    app = Server()
    async with served(app) as url:
        yield app, url


@contextlib.asynccontextmanager
async def web_client(base: str, **options) -> AsyncIterator[Web]:
    web = Web(base, **{"name": "wiki", "limits": QUICK, **options})
    try:
        yield web
    finally:
        await web.close()


def host(url: str) -> str:
    return url.removeprefix("http://")


# Answers


async def test_json_requests_send_query_headers_and_form_data(server) -> None:
    app, url = server
    async with web_client(f"{url}/wiki/", headers={"authorization": "Bearer t"}) as web:
        assert await web.json("GET", "/api/pages?limit=2", params={"cursor": "a b", "none": None}) == {"ok": True}
        assert await web.json("POST", "api/search", data={"q": "x"}, headers={"x-extra": "1"}) == {"ok": True}
        assert await web.json("GET", f"{url}/elsewhere") == {"ok": True}
        app.answer(204, b"")
        assert await web.json("DELETE", "/x", ok=(200, 204)) is None
    assert app.paths == ["/wiki/api/pages?limit=2&cursor=a+b", "/wiki/api/search", "/elsewhere", "/wiki/x"]
    assert {headers["authorization"] for _, headers, _ in app.requests} == {"Bearer t"}
    assert app.requests[1][1]["x-extra"] == "1"
    assert app.requests[1][1]["content-type"] == "application/x-www-form-urlencoded"


async def test_text_is_decoded_with_the_charset_of_its_content_type(server) -> None:
    app, url = server
    app.answer(200, "grün".encode("latin-1"), content_type="text/html; charset=iso-8859-1")
    async with web_client(url) as web:
        assert await web.text("GET", "/") == "grün"


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (404, b"{}", Missing, None),
        (410, b'{"error": {"errors": [{"reason": "gone"}]}}', Missing, "gone"),
        (401, b'{"error": "invalid_auth"}', Denied, "invalid_auth"),
        (403, b'{"errors": [{"code": "FORBIDDEN", "title": "no"}]}', Denied, "FORBIDDEN"),
        (400, b'{"error": {"status": "INVALID_ARGUMENT", "message": "the cursor"}}', Rejected, "INVALID_ARGUMENT"),
        (409, b"<html>the text of a document</html>", Rejected, None),
        (302, b"", Rejected, None),
    ],
)
async def test_an_error_response_raises_with_its_status_and_the_vendors_error_code(
    server, status, body, kind, code
) -> None:
    app, url = server
    app.answer(status, body)
    async with web_client(url) as web:
        with pytest.raises(kind) as caught:
            await web.json("GET", "/x")
    assert (caught.value.status, caught.value.code) == (status, code)
    assert "document" not in str(caught.value)
    assert len(app.requests) == 1


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(b"<html>log in</html>", "text/html"), (b'{"cut": ', "application/json"), (b"[" * 100_000, "application/json")],
)
async def test_a_response_that_is_no_complete_json_is_retryable(server, body, content_type) -> None:
    app, url = server
    for _ in range(100):
        app.answer(200, body, content_type=content_type)
    async with web_client(url, limits=Limits(patience_seconds=0)) as web:
        with pytest.raises(Retryable, match=r"wiki: http://127.0.0.1:\d+ answered with .* JSON") as caught:
            await web.json("GET", "/x")
    assert "\n" not in str(caught.value)


async def test_a_truncated_body_is_requested_again(server) -> None:
    app, url = server
    app.cut = True
    async with web_client(url, limits=Limits(patience_seconds=0)) as web:
        with pytest.raises(Retryable, match="cut off"):
            await web.json("GET", "/x")
    app.cut = False
    async with web_client(url) as web:
        app.answer(200, gzip.compress(b'{"a": 1}' * 100)[:-20], content_encoding="gzip")
        assert await web.json("GET", "/x") == {"ok": True}


async def test_a_refused_connection_is_retryable() -> None:
    async with served(Server()) as url:
        pass
    async with web_client(url, limits=Limits(patience_seconds=0)) as web:
        with pytest.raises(Retryable, match="did not respond"):
            await web.json("GET", "/")


# Waiting


async def test_a_429_is_retried_after_its_retry_after(server) -> None:
    app, url = server
    seconds = []
    app.answer(429, retry_after="1")
    async with web_client(url, on_throttled=lambda name, more: seconds.append((name, more))) as web:
        assert await web.json("GET", "/x") == {"ok": True}
    first, second = (at for _, _, at in app.requests)
    assert second - first >= 1
    assert [name for name, _ in seconds] == ["wiki"]
    assert seconds[0][1] >= 1


async def test_retry_after_may_be_a_date(server) -> None:
    app, url = server
    app.answer(503, retry_after=format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True))
    async with web_client(url) as web:
        with pytest.raises(Retryable) as caught:
            await web.json("GET", "/x")
        assert not isinstance(caught.value, Deferred)
        assert 100 < caught.value.retry_after <= 601
        with pytest.raises(Deferred):
            await web.json("GET", "/y")
    assert app.paths == ["/x"]


async def test_a_wait_longer_than_the_patience_is_deferred_for_all_requests(server) -> None:
    app, url = server
    app.answer(429, b'{"error": "ratelimited"}', retry_after="300")
    async with web_client(url) as web:
        with pytest.raises(Deferred, match=r"429 \(ratelimited\)") as caught:
            await web.json("GET", "/x")
        assert 300 <= caught.value.retry_after < 302
        with pytest.raises(Deferred) as caught:
            await web.text("GET", "/y")
        assert 100 < caught.value.retry_after < 302
    assert app.paths == ["/x"]


async def test_a_very_long_retry_after_is_capped(server) -> None:
    app, url = server
    app.answer(429, retry_after="99999999")
    async with web_client(url, limits=Limits(max_pause_seconds=600)) as web:
        with pytest.raises(Deferred) as caught:
            await web.json("GET", "/x")
    assert caught.value.retry_after <= 601


async def test_each_rate_limit_bucket_waits_separately(server) -> None:
    app, url = server
    app.answer(429, retry_after="300")
    async with web_client(url) as web:
        with pytest.raises(Deferred):
            await web.json("GET", "/history", bucket="history")
        with pytest.raises(Deferred):
            await web.json("GET", "/history", bucket="history")
        assert await web.json("GET", "/users", bucket="users") == {"ok": True}
        assert await web.json("GET", "/") == {"ok": True}
        app.answer(429, retry_after="300")
        with pytest.raises(Deferred):
            await web.json("GET", "/all")
        with pytest.raises(Deferred):
            await web.json("GET", "/users", bucket="users")
    assert app.paths == ["/history", "/users", "/", "/all"]


async def test_a_burst_limit_delays_its_bucket_and_a_quota_every_request(server) -> None:
    app, url = server
    app.answer(429, retry_after="300", ratelimit_reason="confluence-burst-based", x_ratelimit_remaining="0")
    async with web_client(url) as web:
        with pytest.raises(Deferred):
            await web.json("GET", "/members", bucket="members")
        assert await web.json("GET", "/pages", bucket="pages") == {"ok": True}
        app.answer(429, retry_after="300", ratelimit_reason="confluence-quota-global-based")
        with pytest.raises(Deferred):
            await web.json("GET", "/pages", bucket="pages")
        with pytest.raises(Deferred):
            await web.json("GET", "/search", bucket="search")
    assert app.paths == ["/members", "/pages", "/pages"]


async def test_an_announced_quota_delays_every_bucket(server) -> None:
    app, url = server
    app.answer(200, b"[1]", x_ratelimit_remaining="0", x_ratelimit_reset="300")
    async with web_client(url) as web:
        assert await web.json("GET", "/pages", bucket="pages") == [1]
        with pytest.raises(Deferred):
            await web.json("GET", "/search", bucket="search")
    assert app.paths == ["/pages"]


@pytest.mark.parametrize("form", ["iso", "epoch"])
async def test_an_exhausted_rate_limit_defers_requests_before_they_are_sent(server, form) -> None:
    app, url = server
    reset = datetime.now(UTC) + timedelta(seconds=200)
    shown = reset.isoformat() if form == "iso" else str(int(reset.timestamp()))
    app.answer(200, b"[1]", x_ratelimit_limit="350", x_ratelimit_remaining="0", x_ratelimit_reset=shown)
    async with web_client(url) as web:
        assert await web.json("GET", "/x") == [1]
        with pytest.raises(Deferred) as caught:
            await web.json("GET", "/y")
        assert 100 < caught.value.retry_after <= 200
    assert app.paths == ["/x"]


async def test_googles_403_for_too_many_requests_counts_as_a_429(server) -> None:
    app, url = server
    app.answer(403, b'{"error": {"code": 403, "errors": [{"reason": "userRateLimitExceeded"}]}}')
    async with web_client(url) as web:
        assert await web.json("GET", "/x") == {"ok": True}
    assert len(app.requests) == 2


async def test_a_5xx_is_retried_until_the_patience_ends(server) -> None:
    app, url = server
    app.answer(502)
    app.answer(500)
    async with web_client(url) as web:
        assert await web.json("GET", "/x") == {"ok": True}
    assert len(app.requests) == 3
    for _ in range(500):
        app.answer(500)
    async with web_client(url, limits=Limits(patience_seconds=0.2, backoff_base_seconds=0.01)) as web:
        with pytest.raises(Retryable, match="answered 500") as caught:
            await web.json("GET", "/x")
    assert not isinstance(caught.value, Deferred)
    assert caught.value.retry_after is not None
    assert caught.value.service is None
    assert len(app.requests) > 4


async def test_after_a_rate_limit_one_request_at_a_time_probes_before_the_others_resume(server) -> None:
    app, url = server
    closed = asyncio.Event()
    limits = Limits(parallel=4, backoff_base_seconds=0.01)
    async with web_client(url, limits=limits, on_throttled=lambda name, seconds: closed.set()) as web:
        app.answer(429, retry_after="0.3")
        first = asyncio.create_task(web.json("GET", "/first"))
        await closed.wait()
        for _ in range(3):
            app.answer(429, retry_after="0.1")
        answers = await asyncio.gather(first, *(web.json("GET", f"/{n}") for n in range(40)))
    assert answers == [{"ok": True}] * 41
    refused = [company for status, company in app.answered if status == 429]
    assert refused == [1, 1, 1, 1]  # after the first refusal, one at a time asked until one was let in
    assert len(app.requests) == 41 + 4
    assert 1 < app.most_open <= 4


async def test_concurrent_throttled_requests_count_each_second_once_in_the_metric(server) -> None:
    app, url = server
    heard = []
    token = throttled.set(lambda name, seconds: heard.append(seconds))
    try:
        for _ in range(3):
            app.answer(429, retry_after="100")
        async with web_client(url) as web:
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    for n in range(3):
                        group.create_task(web.json("GET", f"/{n}"))
    finally:
        throttled.reset(token)
    assert 100 <= sum(heard) < 105


# Where it may go, and with what


async def test_credentials_stay_with_the_base_host(server, other) -> None:
    app, url = server
    there, there_url = other
    app.redirect(f"{there_url}/file?signed=1")
    async with web_client(url, headers={"authorization": f"Bearer {CANARY}"}, also=[host(there_url)]) as web:
        assert await web.json("GET", "/attachment") == {"ok": True}
        assert await web.json("GET", f"{there_url}/direct", headers={"x-secret": CANARY}) == {"ok": True}
    assert CANARY in app.requests[0][1]["authorization"]
    assert there.paths == ["/file?signed=1", "/direct"]
    assert CANARY not in json.dumps(there.requests)


async def test_an_httpx_auth_stays_with_the_base_host(server, other) -> None:
    app, url = server
    there, there_url = other
    app.redirect(f"{there_url}/file")
    async with web_client(url, auth=httpx.BasicAuth("user", CANARY), also=[host(there_url)]) as web:
        await web.json("GET", "/attachment")
    assert "authorization" in app.requests[0][1]
    assert "authorization" not in there.requests[0][1]


async def test_a_redirect_back_to_the_base_host_carries_no_credentials(server, other) -> None:
    app, url = server
    there, there_url = other
    app.redirect(f"{there_url}/hop")
    there.redirect(f"{url}/secret-page")
    async with web_client(url, headers={"authorization": CANARY}, also=[host(there_url)]) as web:
        await web.json("GET", "/attachment")
    assert app.paths == ["/attachment", "/secret-page"]
    assert "authorization" not in app.requests[1][1]


async def test_no_cookie_is_stored(server) -> None:
    app, url = server
    app.answer(200, set_cookie=f"session={CANARY}; Path=/")
    async with web_client(url) as web:
        await web.json("GET", "/a")
        await web.json("GET", "/b")
    assert "cookie" not in app.requests[1][1]


async def test_redirects_on_the_base_host_are_followed_at_most_five_times(server) -> None:
    app, url = server
    app.redirect("../b?x=1")
    async with web_client(url, headers={"authorization": "t"}) as web:
        assert await web.json("GET", "/a/c") == {"ok": True}
        assert app.paths == ["/a/c", "/b?x=1"]
        assert app.requests[1][1]["authorization"] == "t"
        for _ in range(20):
            app.redirect("/again")
        with pytest.raises(Forbidden, match="more than 5 times"):
            await web.json("GET", "/a")
    assert len(app.requests) == 2 + 6


async def test_a_post_is_not_redirected(server) -> None:
    app, url = server
    app.redirect("/elsewhere", 307)
    async with web_client(url) as web:
        with pytest.raises(Forbidden, match="redirects a POST"):
            await web.json("POST", "/token", data={"secret": CANARY})
    assert len(app.requests) == 1


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:1/",
        "http://localhost/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://10.0.0.1/",
        "//evil.net/x",
        "https://evil.net/",
        "ftp://evil.net/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "http://user:p@evil.net/",
        "http://evil.net\\@127.0.0.1/",
        "http://exa mple/",
        "http://[",
        "http://127.0.0.1:99999999/",
    ],
)
async def test_ssrf_by_a_redirect_is_refused(server, target) -> None:
    app, url = server
    app.redirect(target)
    async with web_client(url) as web:
        with pytest.raises(Forbidden):
            await web.json("GET", "/attachment")
    assert len(app.requests) == 1


async def test_ssrf_by_a_redirect_to_another_port_of_the_same_machine_is_refused(server, other) -> None:
    app, url = server
    there, there_url = other
    app.redirect(f"{there_url}/admin")
    async with web_client(url) as web:
        with pytest.raises(Forbidden, match="neither the configured host"):
            await web.json("GET", "/attachment")
    assert there.requests == []


@pytest.mark.parametrize(
    "link",
    [
        "http://127.0.0.1:1/x",
        "http://169.254.169.254/latest/",
        "https://evil.net/x",
        "http://metadata.google.internal/",
    ],
)
async def test_ssrf_by_a_link_or_an_attachment_url_is_refused(server, tmp_path, link) -> None:
    _, url = server
    async with web_client(url, also=["files.example.net"]) as web:
        for call in (web.json("GET", link), web.text("GET", link), web.download(link, tmp_path / "f", max_bytes=9)):
            with pytest.raises(Forbidden):
                await call
    assert list(tmp_path.iterdir()) == []


async def test_ssrf_by_an_allowed_name_that_resolves_to_a_private_address_is_refused(server, other) -> None:
    app, url = server
    there, there_url = other
    port = int(there_url.rpartition(":")[2])
    requests: list[str] = []

    async def resolver(name: str, number: int) -> Sequence[str]:
        requests.append(name)
        return ["127.0.0.1"] if name in ("127.0.0.1", "files.example.net") else ["8.8.8.8", "10.0.0.7"]

    async with web_client(url, also=["files.example.net", ".cdn.example.net"], resolver=resolver) as web:
        with pytest.raises(Forbidden, match="not public"):
            await web.json("GET", "http://files.example.net/x")
        with pytest.raises(Forbidden, match="not public"):
            await web.json("GET", "http://a.cdn.example.net/x")
        app.redirect("http://files.example.net/x")
        with pytest.raises(Forbidden, match="not public"):
            await web.json("GET", "/attachment")
        with pytest.raises(Forbidden):
            await web.json("GET", f"http://files.example.net:{port}/x")
    assert there.requests == []
    assert requests.count("files.example.net") == 2


async def test_ssrf_by_dns_rebinding_is_refused(server, other) -> None:
    """The name is resolved once a connection, and what was judged is what is connected to."""
    _, url = server
    there, _ = other
    answers = [["203.0.113.1"], ["127.0.0.1"], ["127.0.0.1"]]

    async def resolver(name: str, number: int) -> Sequence[str]:
        return answers.pop(0) if name == "files.example.net" else ["127.0.0.1"]

    async with web_client(url, also=["files.example.net"], resolver=resolver, limits=Limits(patience_seconds=0)) as web:
        for _ in range(3):
            with pytest.raises(Forbidden, match="not public"):
                await web.json("GET", "http://files.example.net/x")
    assert answers == []
    assert there.requests == []


async def test_requests_connect_to_the_resolved_address_with_the_original_host_header(other) -> None:
    there, there_url = other
    port = there_url.rpartition(":")[2]

    async def resolver(name: str, number: int) -> Sequence[str]:
        assert (name, number) == ("wiki.corp.example", int(port))
        return ["127.0.0.1"]

    async with web_client(f"http://wiki.corp.example:{port}", resolver=resolver) as web:
        assert await web.json("GET", "/x") == {"ok": True}
    assert there.requests[0][1]["host"] == f"wiki.corp.example:{port}"


async def test_over_tls_the_pinned_address_must_present_a_certificate_for_the_host_name(tmp_path) -> None:
    certificates = certificate(tmp_path, "wiki.corp.example")

    async def resolver(name: str, number: int) -> Sequence[str]:
        return ["127.0.0.1"]

    app = Server()
    trust = ssl.create_default_context(cafile=str(certificates[0]))
    async with served(app, tls=certificates) as url:
        port = url.rpartition(":")[2]
        for name, proven in (("wiki.corp.example", True), ("other.corp.example", False)):
            given = {"resolver": resolver, "ssl_context": trust, "limits": Limits(patience_seconds=0)}
            async with web_client(f"https://{name}:{port}", **given) as web:
                if proven:
                    assert await web.json("GET", "/x") == {"ok": True}
                else:
                    with pytest.raises(Retryable, match="Hostname mismatch"):
                        await web.json("GET", "/x")
        async with web_client(f"https://wiki.corp.example:{port}", resolver=resolver, also=["127.0.0.1:1"]) as web:
            app.redirect(f"http://127.0.0.1:{port}/plain")
            with pytest.raises(Forbidden, match="only https"):
                await web.json("GET", "http://127.0.0.1:1/")
    assert [headers["host"] for _, headers, _ in app.requests] == [f"wiki.corp.example:{port}"]


async def test_ssrf_by_the_second_request_of_an_auth_is_refused(server, other) -> None:
    app, url = server
    there, there_url = other

    class Refreshing(httpx.Auth):
        def auth_flow(self, request):
            yield httpx.Request("POST", f"{there_url}/token")
            yield request

    async with web_client(url, auth=Refreshing()) as web:
        with pytest.raises(Forbidden):
            await web.json("GET", "/x")
    assert there.requests == app.requests == []


async def test_a_proxy_in_the_environment_is_not_used(server, monkeypatch) -> None:
    _, url = server
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with web_client(url) as web:
        assert await web.json("GET", "/x") == {"ok": True}


@pytest.mark.parametrize(
    "base", ["", "wiki.example.com", "ftp://x/", f"https://u:{CANARY}@x/", f"https://x/?t={CANARY}"]
)
def test_an_invalid_base_url_or_one_with_a_secret_is_refused(base) -> None:
    with pytest.raises(Misconfigured, match="base_url") as caught:
        Web(base, name="wiki")
    assert CANARY not in str(caught.value)


# Sizes


async def test_a_response_beyond_the_size_limit_is_not_read_to_the_end(server, tmp_path) -> None:
    app, url = server
    async with web_client(url, limits=Limits(answer_bytes=1000)) as web:
        app.answer(200, b'"' + b"x" * 5000 + b'"')
        with pytest.raises(TooLarge) as caught:
            await web.json("GET", "/x")
        assert caught.value.limit == 1000
        app.answer(200, b"x" * 5000, content_length="5000")
        with pytest.raises(TooLarge):
            await web.download("/x", tmp_path / "f", max_bytes=4999)
    assert list(tmp_path.iterdir()) == []
    assert len(app.requests) == 2


async def test_a_decompression_bomb_is_stopped_at_the_size_limit(server, tmp_path) -> None:
    app, url = server
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb") as packed:
        for _ in range(200):
            packed.write(bytes(1_000_000))
    bomb = gzip.compress(stream.getvalue())
    assert len(stream.getvalue()) < 400_000
    seen = []
    async with web_client(url) as web:
        app.answer(200, stream.getvalue(), content_encoding="gzip")
        with pytest.raises(TooLarge):
            await web.download("/bomb", tmp_path / "f", max_bytes=10_000_000)
        app.answer(200, stream.getvalue(), content_encoding="gzip", content_type="text/plain")
        with pytest.raises(TooLarge):
            await web.text("GET", "/bomb")
        app.answer(200, bomb, content_encoding="gzip, gzip")
        app.answer(200, bomb, content_encoding="br")
        assert await web.download("/x", tmp_path / "f", max_bytes=100) == "application/json"
        seen.append((tmp_path / "f").read_bytes())
    assert seen == [b'{"ok": true}']
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


async def test_a_body_of_gzip_members_that_hold_nothing_is_stopped_at_the_size_limit(server, tmp_path) -> None:
    """It never reached the limit, and kept the process busy for as long as a download may take."""
    app, url = server
    nothing = gzip.compress(b"")
    async with web_client(url) as web:
        app.answer(200, nothing * 1_000, content_encoding="gzip")
        with pytest.raises(TooLarge):
            await web.download("/endless", tmp_path / "f", max_bytes=10_000)
    assert list(tmp_path.iterdir()) == []


def test_decoding_gzip_members_that_hold_nothing_takes_linear_time() -> None:
    nothing = gzip.compress(b"")

    def seconds(count: int) -> float:
        packed, best = nothing * count, float("inf")
        for _ in range(3):
            began = time.process_time()
            assert list(Gunzip().feed(packed)) == []
            best = min(best, time.process_time() - began)
        return best

    assert seconds(40_000) < 8 * seconds(10_000)


async def test_an_interrupted_download_leaves_no_file(server, tmp_path) -> None:
    app, url = server
    target = tmp_path / "file.pdf"
    data = bytes(range(256)) * 20_000
    app.answer(200, data, content_type="Application/PDF; x=y")
    app.answer(200, gzip.compress(data[:1000]) + gzip.compress(data[1000:]), content_encoding="gzip")
    async with web_client(url) as web:
        assert await web.download("/f", target, max_bytes=10_000_000) == "application/pdf"
        assert target.read_bytes() == data
        target.unlink()
        await web.download("/f", target, max_bytes=10_000_000)
        assert target.read_bytes() == data
    target.unlink()
    app.answer(200, data)
    app.cut = True
    async with web_client(url, limits=Limits(patience_seconds=0)) as web:
        with pytest.raises(Retryable, match="cut off"):
            await web.download("/f", target, max_bytes=10_000_000)
    assert list(tmp_path.iterdir()) == []


async def test_a_response_that_drips_slowly_times_out(server, tmp_path) -> None:
    app, url = server
    app.drip = True
    limits = Limits(patience_seconds=0, request_seconds=0.3, download_seconds=0.3)
    async with web_client(url, limits=limits) as web:
        with pytest.raises(Retryable, match=r"within 0\.3 s"):
            await web.download("/f", tmp_path / "f", max_bytes=10_000)
        with pytest.raises(Retryable, match=r"within 0\.3 s"):
            await web.json("GET", "/f")
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_cannot_be_written_is_retryable(server, tmp_path) -> None:
    _, url = server
    async with web_client(url, limits=Limits(patience_seconds=0)) as web:
        with pytest.raises(Retryable, match="cannot be written"):
            await web.download("/f", tmp_path / "missing" / "f", max_bytes=100)


# Secrets


async def test_no_secret_in_any_error_log_or_repr(server, caplog, tmp_path: Path) -> None:
    app, url = server
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    messages: list[str] = []

    async def provoke(web: Web, call) -> None:
        messages.append(repr(web))
        try:
            await call
        except (PenstockError, httpx.HTTPError, ValueError, OSError) as error:
            messages.extend(traceback.format_exception(error, chain=True))
            while error is not None:
                messages.extend((repr(error), repr(vars(error))))
                error = error.__cause__ or error.__context__

    headers = {"authorization": f"Bearer {CANARY}", "x-key": CANARY}
    async with web_client(url, headers=headers, limits=Limits(patience_seconds=0)) as web:
        answers = [
            (status, f'{{"error": "{CANARY}"}}') for status in (200, 302, 400, 401, 403, 404, 409, 429, 500, 503)
        ]
        for status, answer in [*answers, (200, f'{{"{CANARY}')]:
            app.answer(status, answer, x_secret=CANARY, set_cookie=f"a={CANARY}", location=f"https://evil.net/{CANARY}")
            params = {"token": CANARY}
            await provoke(web, web.json("GET", f"/{CANARY}/{status}", params=params, bucket=str(len(app.requests))))
        for link in (
            f"https://u:{CANARY}@evil.net/",
            f"http://[{CANARY}",
            f"https://evil.net/{CANARY}",
            f"{CANARY}://x",
        ):
            await provoke(web, web.download(link, tmp_path / "f", max_bytes=10))
        await provoke(web, web.json("GET", "/x", headers={"x-bad": f"{CANARY}\n"}))
        app.cut = True
        await provoke(web, web.text("POST", "/x", data={"password": CANARY}))
    for value in (f"{CANARY}\r\n", f"{CANARY}é"):
        with pytest.raises(Misconfigured) as caught:
            Web(url, headers={"authorization": value}, name="wiki")
        messages.extend(traceback.format_exception(caught.value, chain=True))

    class Careless(httpx.Auth):
        def auth_flow(self, request):
            request.headers["authorization"] = f"Bearer {CANARY}\n"
            yield request

    async with web_client(url, auth=Careless(), limits=Limits(patience_seconds=0)) as web:
        await provoke(web, web.json("GET", "/x"))
    assert len(app.requests) == 12
    assert any("Misconfigured" in line for line in messages)
    assert [line for line in messages if CANARY in line] == []
    ours = [record for record in caplog.records if not record.name.startswith(("uvicorn", "asyncio"))]
    assert [record.getMessage() for record in ours if CANARY in record.getMessage()] == []
