"""The service over HTTP: who is believed, and how a request is refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from query.auth.authenticator import local_user
from tests.fakes.issuer import Issuer, bearer, issuing
from tests.support.query.http_kit import TOKEN_FILE, World, as_, problem, service_over, token, write_keys
from tests.support.query.library import document
from topics.messages import IdentityChanged

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


# Who asks


async def test_a_membership_change_takes_effect_at_the_next_request(world: World, tenant: str) -> None:
    await world.library.put(document("a.md", "The crew's harbour.", tenant=tenant, acl_tags=["crew"]))
    id_ = await world.id(tenant, "a.md")

    async def reads() -> tuple[int, int]:
        response = await world.client.post("/v1/search", json={"query": "harbour"}, headers=as_("ann", tenant))
        return len(response.json()["results"]), (
            await world.client.get(f"/v1/documents/{id_}", headers=as_("ann", tenant))
        ).status_code

    def groups(*names: str) -> IdentityChanged:
        return IdentityChanged(
            tenant=tenant, source="wiki", principal="ann", groups=list(names), observed_at=document("x", "").observed_at
        )

    assert await reads() == (0, 404)
    await world.paths.learn([groups("crew")])
    assert await reads() == (1, 200)
    await world.paths.learn([groups()])
    assert await reads() == (0, 404)


@pytest_asyncio.fixture(loop_scope="module")
async def issuer() -> AsyncIterator[Issuer]:
    async with issuing() as issuer:
        yield issuer


async def test_only_an_authenticated_caller_is_served(
    world: World, issuer: Issuer, tenant: str, tmp_path: Path
) -> None:
    await world.library.put(document("a.md", "The harbour.", tenant=tenant, acl_tags=["user:ann"]))
    keys = write_keys(tmp_path / "keys.toml", bot={"key": "k-1", "tenant": tenant, "tags": ["user:ann"]})
    id_ = await world.id(tenant, "a.md")
    async with service_over(world.library, auth=issuer.settings(keys_file=keys)) as (client, _):
        good = bearer(issuer.token(tenant=tenant))
        me = (await client.get("/v1/me", headers=good)).json()
        assert me == {
            "tenant": tenant,
            "principal": "ann",
            "key": None,
            "kind": "token",
            "class": "standard",
            "operator": False,
        }
        assert (await client.get("/v1/me", headers=bearer("k-1"))).json()["key"] == "bot"
        now = int(time.time())
        bad = {
            "none": {},
            "named": {"X-Penstock-As": "ann", "X-Penstock-Tenant": tenant},
            "forged": bearer(good["Authorization"][7:-6] + "AAAAAA"),
            "expired": bearer(issuer.token(tenant=tenant, exp=now - 60)),
            "too early": bearer(issuer.token(tenant=tenant, nbf=now + 120)),
            "alg=none": bearer(issuer.unsigned(tenant=tenant)),
            "HS256": bearer(issuer.with_the_public_key_as_secret(tenant=tenant)),
            "audience": bearer(issuer.token(tenant=tenant, aud="another")),
            "issuer": bearer(issuer.token(tenant=tenant, iss="https://other.example")),
            "nobody": bearer(issuer.token(tenant=tenant, email=None)),
            "no tenant": bearer(issuer.token(tenant=None)),
            "unknown key": {"X-Api-Key": "k-2"},
            "both": {**good, "X-Api-Key": "k-1"},
            "basic": {"Authorization": "Basic YW5uOg=="},
        }
        requests = [
            ("POST", "/v1/search", {"query": "harbour"}),
            ("POST", "/v1/answers", {"question": "harbour?"}),
            ("GET", f"/v1/documents/{id_}", None),
            ("GET", f"/v1/documents/{id_}/why", None),
            ("GET", "/v1/facets", None),
            ("POST", "/v1/feedback", {"chunk_id": str(id_), "verdict": "up"}),
            ("GET", "/v1/review", None),
            ("GET", "/v1/pipeline", None),
            ("GET", "/v1/me", None),
            ("GET", "/v1/nothing", None),
            ("POST", "/mcp", {}),
        ]
        for kind, headers in bad.items():
            for method, path, body in requests if kind in ("none", "named") else requests[:1]:
                refused = await client.request(method, path, json=body, headers=headers)
                assert problem(refused) == (401, "unauthorized"), (kind, path)
                assert refused.headers["WWW-Authenticate"].startswith("Bearer")
        # What a client says of tags and tenant is not an error only where it could be taken for an answer.
        claims = {"scope": "board", "groups": ["board"], "tags": ["wiki/board"], "acl_tags": ["*"]}
        body = {"query": "harbour"}
        for more in ({"tags": ["wiki/board"]}, {"tenant": "globex"}, {"principal": "bob"}, {"acl_tags": ["*"]}):
            assert problem(await client.post("/v1/search", json={**body, **more}, headers=good)) == (422, "invalid")
        await world.library.put(document("b.md", "The board's harbour.", tenant=tenant, acl_tags=["board"]))
        claimed = await client.post(
            "/v1/search?tenant=globex&tags=wiki/board", json=body, headers=bearer(issuer.token(tenant=tenant, **claims))
        )
        assert [result["external_id"] for result in claimed.json()["results"]] == ["a.md"]


async def test_an_unavailable_token_issuer_leads_to_503_and_not_401(world: World, issuer: Issuer) -> None:
    issuer.status = 503
    async with service_over(world.library, auth=issuer.settings()) as (client, _):
        refused = await client.get("/v1/me", headers=bearer(issuer.token()))
        assert problem(refused) == (503, "unavailable")
        assert int(refused.headers["Retry-After"]) > 0


# How a request is refused


async def test_an_invalid_request_names_the_wrong_field_and_does_not_repeat_its_value(world: World) -> None:
    async def post(body: Any) -> httpx.Response:
        return await world.client.post("/v1/search", json=body, headers=as_("ann"))

    for body, pointer in (
        ({}, "/query"),
        ({"query": ""}, "/query"),
        ({"query": "x" * 8_001}, "/query"),
        ({"query": "x", "top": 0}, "/top"),
        ({"query": "x", "top": 101}, "/top"),
        ({"query": "x", "mode": "hunter2"}, "/mode"),
        ({"query": "x", "filters": {"since": "hunter2"}}, "/filters/since"),
        ({"query": "x", "filters": {"sources": ["hunter2\x00"]}}, "/filters/sources/0"),
        ({"query": "x", "filters": {"documents": ["hunter2"]}}, "/filters/documents/0"),
        ({"query": ["hunter2"]}, "/query"),
        ([], ""),
    ):
        refused = await post(body)
        assert problem(refused) == (422, "invalid")
        assert pointer in [error["pointer"] for error in refused.json()["errors"]]
        assert "hunter2" not in refused.text
    assert problem(await post({"query": " \x00 "})) == (422, "bad-query")
    raw = {**as_("ann"), "Content-Type": "application/json"}
    for content in (b"{", b"\xff", b"[" * 200_000, b'{"query": ' + b"9" * 5_000 + b"}"):
        assert problem(await world.client.post("/v1/search", content=content, headers=raw)) == (400, "bad-request")
    surrogate = await world.client.post("/v1/search", content=b'{"query": "a", "\\ud800": 1}', headers=raw)
    assert problem(surrogate) == (422, "invalid")
    assert problem(await world.client.get("/v1/documents/hunter2", headers=as_("ann"))) == (422, "invalid")
    assert problem(await world.client.put("/v1/search", headers=as_("ann"))) == (405, "method-not-allowed")
    assert problem(await world.client.get("/v1/nothing", headers=as_("ann"))) == (404, "not-found")
    assert problem(await world.client.get("/nothing")) == (404, "not-found")


async def test_a_body_beyond_the_size_limit_is_rejected_with_413(world: World) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 65_536

    raw = {**as_("ann"), "Content-Type": "application/json"}
    for content in (b"x" * 1_000_001, endless()):
        assert problem(await world.client.post("/v1/search", content=content, headers=raw)) == (413, "too-large")
    fits = b'{"query": "x"' + b" " * 900_000 + b"}"
    assert (await world.client.post("/v1/search", content=fits, headers=raw)).status_code == 200


async def test_a_body_that_does_not_arrive_is_answered_with_408(world: World) -> None:
    async with service_over(world.library, serve={"body_seconds": 0.2}) as (client, service):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        proof = f"Authorization: Bearer {token()}\r\n".encode()
        writer.write(b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\n" + proof + b"Content-Length: 20\r\n\r\n{")
        assert await reader.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
        assert b"urn:penstock:problem:slow-request" in await reader.read()
        writer.close()
        assert service.metrics.registry.get_sample_value("penstock_query_in_work") == 0, "it never had a place"


async def test_rate_limits_apply_to_each_caller_separately(world: World) -> None:
    async with service_over(world.library, serve={"requests_per_minute": 2}) as (client, service):
        for _ in range(2):
            assert (await client.get("/v1/me", headers=as_("ann"))).status_code == 200
        refused = await client.get("/v1/me", headers=as_("ann"))
        assert problem(refused) == (429, "rate-limited")
        assert 1 <= int(refused.headers["Retry-After"]) <= 61
        assert (await client.get("/v1/me", headers=as_("bob"))).status_code == 200
        sample = service.metrics.registry.get_sample_value
        assert sample("penstock_query_requests_total", {"route": "none", "outcome": "limited"}) == 1


async def test_another_user_of_the_machine_is_not_authenticated_in_development_mode(world: World) -> None:
    """It reaches the port, may name whomever it likes, and cannot read the token."""
    async with httpx.AsyncClient(base_url=world.client.base_url, timeout=60) as stranger:
        for headers in ({}, {"X-Penstock-As": local_user()}, {"X-Penstock-As": "ann", "X-Penstock-Tenant": "acme"}):
            for path in ("/v1/me", "/v1/facets", "/v1/pipeline", "/v1/review"):
                refused = await stranger.get(path, headers=headers)
                assert problem(refused) == (401, "unauthorized")
                assert "development-token" in refused.json()["detail"]
            for path in ("/v1/search", "/v1/answers", "/v1/feedback", "/mcp"):
                assert problem(await stranger.post(path, headers=headers, json={"query": "x"})) == (401, "unauthorized")
        for guess in ("/?token=x", "/", "/openapi.json", "/metrics"):
            shown = await stranger.get(guess)
            assert token() not in shown.text + str(shown.headers)
            assert "set-cookie" not in shown.headers
    assert TOKEN_FILE.stat().st_mode & 0o777 == 0o600
    if os.geteuid() == 0:
        TOKEN_FILE.parent.chmod(0o755)  # as a state folder is
        read = subprocess.run(["/bin/cat", str(TOKEN_FILE)], user=65534, capture_output=True, check=False)
        assert (read.returncode, read.stdout) == (1, b"")
    assert (await world.client.get("/v1/me")).json()["principal"] == local_user()


async def test_cross_site_browser_requests_are_rejected_in_development_mode(world: World) -> None:
    """A browser sends what a page may send: simple requests without a proof, and it obeys the missing CORS headers."""
    evil = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    async with httpx.AsyncClient(base_url=world.client.base_url, timeout=60) as browser:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            sent = await browser.post("/v1/search", content=b'{"query": "x"}', headers={**evil, "Content-Type": kind})
            assert problem(sent) == (401, "unauthorized")
        preflight = await browser.options(
            "/v1/search",
            headers={
                **evil,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization",
            },
        )
        assert preflight.status_code >= 400
        for answer in (preflight, await browser.get("/v1/me", headers=evil), await browser.get("/", headers=evil)):
            assert not [name for name in answer.headers if name.startswith("access-control-")]
        rebound = {"Host": "evil.example:80", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
        for path in ("/", "/v1/me", "/openapi.json", "/metrics"):
            assert problem(await browser.get(path, headers=rebound)) == (400, "bad-request")
        assert problem(await browser.post("/mcp", headers=rebound, json={})) == (400, "bad-request")


async def test_development_mode_accepts_only_loopback_host_names(world: World) -> None:
    for headers in (
        {"Host": "penstock.example.org"},
        {"Host": "127.0.0.1.nip.io"},
        {"Host": ""},
        {"Host": "[::1].example.org"},
        {"Host": "localhost:80.example.org"},
        {"Host": "localhost@example.org"},
    ):
        assert problem(await world.client.get("/v1/me", headers=headers)) == (400, "bad-request")
    for host in ("localhost:8080", "127.0.0.1", "[::1]:80"):
        assert (await world.client.get("/v1/me", headers={"Host": host})).status_code == 200
    proxied = await world.client.get("/v1/me", headers={"X-Forwarded-For": "10.0.0.1"})
    assert problem(proxied) == (403, "forbidden")
