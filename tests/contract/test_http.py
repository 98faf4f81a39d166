"""The service over HTTP on real stores: what is answered, to whom, and how it is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from deploy.local.stack import Stack
from query.http.app import described
from query.service import Service
from tests.contract.http_kit import as_, service_over, write_keys
from tests.fakes.issuer import Issuer, bearer, issuing
from tests.leak_paths import Paths
from tests.library import Library, access, document
from topics.messages import IdentityChanged

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class World:
    """One library, and the service over it in development mode."""

    library: Library
    paths: Paths
    client: httpx.AsyncClient
    service: Service

    async def id(self, tenant: str, external_id: str) -> UUID:
        [(found,)] = await self.library.execute(
            "SELECT id FROM documents WHERE tenant = %s AND external_id = %s", tenant, external_id
        )
        return UUID(str(found))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(stack: Stack) -> AsyncIterator[World]:
    async with Paths.open(stack) as paths, service_over(paths.library) as (client, service):
        yield World(paths.library, paths, client, service)


@pytest.fixture
def tenant() -> str:
    return f"t{uuid4().hex[:8]}"


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Status and kind; every error has the shape of RFC 9457."""
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert set(told) <= {"type", "title", "status", "detail", "errors"}
    assert told["status"] == answer.status_code
    return answer.status_code, told["type"].removeprefix("urn:penstock:problem:")


# Reading


async def test_search_answers_in_the_described_shape(world: World, tenant: str) -> None:
    await world.library.put(
        document("dam.md", "# Dams\n\nThe reservoir feeds the turbine hall.", tenant=tenant, author="Ada",
                 acl_tags=["user:ann"], source_url="https://wiki.example/dam"),
        document("tea.md", "Boil water for tea.", tenant=tenant, acl_tags=["user:bob"]),
    )  # fmt: skip
    asked = {"query": "reservoir turbine", "filters": {"sources": ["wiki"], "authors": ["Ada"]}, "top": 3}
    answer = await world.client.post("/v1/search", json=asked, headers=as_("ann", tenant))
    told = answer.json()
    assert answer.status_code == 200
    assert_described("/v1/search", "post", told)
    assert [result["external_id"] for result in told["results"]] == ["dam.md"]
    assert (told["relevant"], told["degraded"]) == (True, [])
    assert answer.headers["cache-control"] == "no-store"
    other = await world.client.post("/v1/search", json={"query": "reservoir turbine"}, headers=as_("eve", tenant))
    assert (other.status_code, other.json()["results"]) == (200, [])


def assert_described(path: str, method: str, told: Any) -> None:
    """What was answered is what /openapi.json says of it."""
    description = described().openapi()
    schema = description["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": description["components"]}).validate(told)


async def test_a_document_and_its_story_are_for_its_readers(world: World, tenant: str) -> None:
    text = "# Plan\n\nMove the crane.\n\n## Later\n\nMove it back."
    shared = document("plan.md", text, tenant=tenant, acl_tags=["user:ann", "crew"], title="The plan")
    await world.library.put(shared)
    await world.library.put(shared.model_copy(update={"version": shared.version + 100, "title": "The new plan"}))
    id_ = await world.id(tenant, "plan.md")
    told = (await world.client.get(f"/v1/documents/{id_}", headers=as_("ann", tenant))).json()
    assert_described("/v1/documents/{document_id}", "get", told)
    assert (told["text"], told["title"], told["document_id"]) == (text, "The new plan", str(id_))
    story = (await world.client.get(f"/v1/documents/{id_}/why", headers=as_("ann", tenant))).json()
    assert_described("/v1/documents/{document_id}/why", "get", story)
    assert (story["searchable"], story["document"]["title"]) == (True, "The new plan")
    assert [event["outcome"] for event in story["events"]] == ["created", "metadata"]
    assert story["access"]["acl_tags"] == ["wiki/user:ann"], "who else may read it is not a reader's to know"
    assert not {"seq", "content_hash"} & set(story["document"])
    # Revoked: gone at the next request, before any store has heard of it.
    await world.library.accept(access(shared, ["crew"]))
    for path in (f"/v1/documents/{id_}", f"/v1/documents/{id_}/why"):
        assert (await world.client.get(path, headers=as_("ann", tenant))).status_code == 404


async def test_an_operator_sees_the_whole_story_in_its_own_tenant(world: World, tmp_path: Path) -> None:
    mine, theirs = document("a.md", "Text.", tenant="opsone"), document("a.md", "Text.", tenant="opstwo")
    await world.library.put(mine, theirs)
    keys = write_keys(
        tmp_path / "keys.toml",
        ops={"key": "ops", "tenant": "opsone", "operator": True},
        bot={"key": "bot", "tenant": "opsone", "tags": ["nothing"]},
    )
    async with service_over(world.library, auth={"keys_file": keys}) as (client, _):
        one, two = await world.id("opsone", "a.md"), await world.id("opstwo", "a.md")
        told = await client.get(f"/v1/documents/{one}/why", headers={"X-Api-Key": "ops"})
        assert told.json()["access"]["acl_tags"] == ["wiki/staff"]
        refused = [
            await client.get(f"/v1/documents/{one}", headers={"X-Api-Key": "ops"}),  # to operate is not to read
            await client.get(f"/v1/documents/{two}/why", headers={"X-Api-Key": "ops"}),
            await client.get(f"/v1/documents/{one}/why", headers={"X-Api-Key": "bot"}),
        ]
        assert [answer.status_code for answer in refused] == [404, 404, 404]
        for path in ("/v1/review", "/v1/pipeline"):
            assert problem(await client.get(path, headers={"X-Api-Key": "bot"})) == (403, "forbidden")
        assert (await client.get("/v1/review", headers={"X-Api-Key": "ops"})).json() == {"waiting": []}


async def test_what_may_not_be_read_is_answered_like_what_does_not_exist(world: World, tenant: str) -> None:
    """Byte for byte, by the same statements."""
    await world.library.put(
        document("secret.md", "The merger.", tenant=tenant, acl_tags=["board"]),
        document("secret.md", "The merger.", tenant=f"{tenant}x", acl_tags=["user:ann"]),
    )
    forbidden = [await world.id(tenant, "secret.md"), await world.id(f"{tenant}x", "secret.md")]
    for path in ("/v1/documents/{}", "/v1/documents/{}/why"):
        seen = set()
        for id_ in (*forbidden, uuid4()):
            with statements() as sent:
                answer = await world.client.get(path.format(id_), headers=as_("ann", tenant))
            names = sorted(name for name in answer.headers if name != "date")
            seen.add((answer.status_code, answer.text, tuple(names), tuple(sent)))
            assert len(sent) > 1
        assert len(seen) == 1, path
    missing, withheld = "zeppelin", "merger"
    told = []
    for query in (missing, withheld):
        with statements() as sent:
            found = (await world.client.post("/v1/search", json={"query": query}, headers=as_("ann", tenant))).json()
        steps = [{k: v for k, v in step.items() if k != "took_ms"} for step in found["steps"]]
        assert found["results"] == []
        told.append((sorted(map(str, steps)), sorted(sent)))
    assert told[0] == told[1]


@contextmanager
def statements() -> Iterator[list[str]]:
    """Every statement that this process sends to Postgres."""
    sent: list[str] = []
    real = psycopg.AsyncConnection.execute

    async def noting(connection: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        sent.append(str(query))
        return await real(connection, query, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.AsyncConnection, "execute", noting)
        yield sent


async def test_facets_are_of_what_is_read(world: World, tenant: str) -> None:
    await world.library.put(
        document("a.md", "One.", tenant=tenant, acl_tags=["user:ann"], author="Ada"),
        document("b.md", "Two.", tenant=tenant, acl_tags=["user:ann"], author="Ada", source="drive"),
        document("c.pdf", "Three.", tenant=tenant, acl_tags=["board"], author="Eve", source="vault",
                 media_type="application/pdf"),
    )  # fmt: skip
    told = (await world.client.get("/v1/facets", headers=as_("ann", tenant))).json()
    assert told == {"sources": ["drive", "wiki"], "authors": ["Ada"], "media_types": ["text/markdown"]}


# Who asks


async def test_groups_count_from_the_next_request_on(world: World, tenant: str) -> None:
    await world.library.put(document("a.md", "The crew's harbour.", tenant=tenant, acl_tags=["crew"]))
    id_ = await world.id(tenant, "a.md")

    async def reads() -> tuple[int, int]:
        found = await world.client.post("/v1/search", json={"query": "harbour"}, headers=as_("ann", tenant))
        return len(found.json()["results"]), (
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


async def test_only_a_proven_caller_is_answered(world: World, issuer: Issuer, tenant: str, tmp_path: Path) -> None:
    await world.library.put(document("a.md", "The harbour.", tenant=tenant, acl_tags=["user:ann"]))
    keys = write_keys(tmp_path / "keys.toml", bot={"key": "k-1", "tenant": tenant, "tags": ["user:ann"]})
    id_ = await world.id(tenant, "a.md")
    async with service_over(world.library, auth=issuer.settings(keys_file=keys)) as (client, _):
        good = bearer(issuer.token(tenant=tenant))
        me = (await client.get("/v1/me", headers=good)).json()
        assert me == {
            "tenant": tenant, "principal": "ann", "key": None, "kind": "token", "class": "standard", "operator": False
        }  # fmt: skip
        assert (await client.get("/v1/me", headers=bearer("k-1"))).json()["key"] == "bot"
        now = int(time.time())
        bad = {
            "none": {},
            "named": as_("ann", tenant),
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
        asked = [
            ("POST", "/v1/search", {"query": "harbour"}), ("POST", "/v1/answers", {"question": "harbour?"}),
            ("GET", f"/v1/documents/{id_}", None), ("GET", f"/v1/documents/{id_}/why", None),
            ("GET", "/v1/facets", None),
            ("POST", "/v1/feedback", {"chunk_id": str(id_), "verdict": "up"}), ("GET", "/v1/review", None),
            ("GET", "/v1/pipeline", None), ("GET", "/v1/me", None), ("GET", "/v1/nothing", None), ("POST", "/mcp", {}),
        ]  # fmt: skip
        for kind, headers in bad.items():
            for method, path, body in asked if kind in ("none", "named") else asked[:1]:
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


async def test_an_issuer_that_is_away_is_no_refusal(world: World, issuer: Issuer) -> None:
    issuer.status = 503
    async with service_over(world.library, auth=issuer.settings()) as (client, _):
        refused = await client.get("/v1/me", headers=bearer(issuer.token()))
        assert problem(refused) == (503, "unavailable")
        assert int(refused.headers["Retry-After"]) > 0


# How a request is refused


async def test_what_cannot_be_asked_says_where_it_is_wrong_and_repeats_nothing(world: World) -> None:
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


async def test_a_body_is_capped_before_it_is_read(world: World) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 65_536

    raw = {**as_("ann"), "Content-Type": "application/json"}
    for content in (b"x" * 1_000_001, endless()):
        assert problem(await world.client.post("/v1/search", content=content, headers=raw)) == (413, "too-large")
    fits = b'{"query": "x"' + b" " * 900_000 + b"}"
    assert (await world.client.post("/v1/search", content=fits, headers=raw)).status_code == 200


async def test_a_body_that_does_not_come_is_not_waited_for(world: World) -> None:
    async with service_over(world.library, serve={"body_seconds": 0.2}) as (client, service):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n{")
        assert await reader.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
        assert b"urn:penstock:problem:slow-request" in await reader.read()
        writer.close()
        assert service.metrics.registry.get_sample_value("penstock_query_in_work") == 0, "it never had a place"


async def test_limits_of_a_caller_are_its_own(world: World) -> None:
    async with service_over(world.library, serve={"requests_per_minute": 2}) as (client, service):
        for _ in range(2):
            assert (await client.get("/v1/me", headers=as_("ann"))).status_code == 200
        refused = await client.get("/v1/me", headers=as_("ann"))
        assert problem(refused) == (429, "rate-limited")
        assert 1 <= int(refused.headers["Retry-After"]) <= 61
        assert (await client.get("/v1/me", headers=as_("bob"))).status_code == 200
        sample = service.metrics.registry.get_sample_value
        assert sample("penstock_query_requests_total", {"route": "none", "outcome": "limited"}) == 1


async def test_development_mode_is_for_this_machine_by_its_own_name(world: World) -> None:
    for headers in ({"Host": "penstock.example.org"}, {"Host": "127.0.0.1.nip.io"}, {"Host": ""}):
        assert problem(await world.client.get("/v1/me", headers=headers)) == (400, "bad-request")
    for host in ("localhost:8080", "127.0.0.1", "[::1]:80"):
        assert (await world.client.get("/v1/me", headers={"Host": host})).status_code == 200
    proxied = await world.client.get("/v1/me", headers={"X-Forwarded-For": "10.0.0.1"})
    assert problem(proxied) == (403, "forbidden")


# For machines


async def test_a_half_is_away_and_the_service_is_ready(world: World) -> None:
    assert (await world.client.get("/livez")).text == "ok\n"
    ready = await world.client.get("/readyz")
    assert (ready.status_code, ready.text) == (200, "ready\n")
    dead = world.library.settings.elasticsearch.model_copy(update={"url": "http://127.0.0.1:1"})
    settings = world.library.settings.model_copy(update={"elasticsearch": dead})
    half = Library(**{**vars(world.library), "settings": settings})
    async with service_over(half) as (client, service):
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.text) == (200, "degraded: keywords\n")
        told = (await client.post("/v1/search", json={"query": "harbour"}, headers=as_("ann"))).json()
        assert len(told["degraded"]) == 1
        assert service.metrics.registry.get_sample_value("penstock_query_degraded_total", {"part": "keywords"}) == 1


async def test_metrics_are_for_this_machine_and_for_operators(world: World, tmp_path: Path) -> None:
    await world.client.post("/v1/search", json={"query": "x", "mode": "keyword"}, headers=as_("ann"))
    text = (await world.client.get("/metrics")).text
    assert 'penstock_query_seconds_count{mode="keyword",route="/v1/search"}' in text
    assert 'le="0.1"' in text
    assert 'le="3.0"' in text
    keys = write_keys(
        tmp_path / "keys.toml",
        ops={"key": "ops", "tenant": "a", "operator": True}, bot={"key": "bot", "tenant": "a", "tags": ["x"]},
    )  # fmt: skip
    async with service_over(world.library, auth={"keys_file": keys}) as (client, _):
        from_elsewhere = {"X-Forwarded-For": "10.0.0.1"}
        for headers, status in (({}, 401), ({"X-Api-Key": "bot"}, 403), ({"X-Api-Key": "ops"}, 200)):
            assert (await client.get("/metrics", headers={**from_elsewhere, **headers})).status_code == status


async def test_headers_keep_browsers_careful(world: World) -> None:
    for path in ("/", "/v1/me", "/v1/nothing", "/nothing"):
        headers = (await world.client.get(path)).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert not {"server", "x-powered-by", "access-control-allow-origin"} & set(headers)
    origin = {"Origin": "https://intranet.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in (await world.client.options("/v1/search", headers=origin)).headers
    async with service_over(world.library, serve={"allowed_origins": ("https://intranet.example",)}) as (client, _):
        allowed = await client.options("/v1/search", headers=origin)
        assert allowed.headers["access-control-allow-origin"] == "https://intranet.example"
        other = await client.options("/v1/search", headers={**origin, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_the_log_names_no_question_and_no_person(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    await world.client.post("/v1/search", json={"query": "swordfish"}, headers=as_("ann@example.org"))
    await world.client.get("/v1/documents/swordfish", headers=as_("ann@example.org"))
    out, err = capfd.readouterr()
    assert "/v1/search" in out + err
    assert not [word for word in ("swordfish", "ann@example.org") if word in out + err]
