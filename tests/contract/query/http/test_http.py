"""The service over HTTP on real stores: what is answered, to whom, and what machines are told."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from query.http.app import describe_app
from query.settings import FeedbackSettings
from tests.support.processes import run_penstock
from tests.support.query.http_kit import FEEDBACK_KEY, World, as_, problem, service_over, write_keys
from tests.support.query.library import Library, access, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


# Reading


async def test_a_search_response_matches_the_openapi_description(world: World, tenant: str) -> None:
    await world.library.put(
        document(
            "dam.md",
            "# Dams\n\nThe reservoir feeds the turbine hall.",
            tenant=tenant,
            author="Ada",
            acl_tags=["user:ann"],
            source_url="https://wiki.example/dam",
        ),
        document("tea.md", "Boil water for tea.", tenant=tenant, acl_tags=["user:bob"]),
    )
    request = {"query": "reservoir turbine", "filters": {"sources": ["wiki"], "authors": ["Ada"]}, "top": 3}
    answer = await world.client.post("/v1/search", json=request, headers=as_("ann", tenant))
    body = answer.json()
    assert answer.status_code == 200
    assert_described("/v1/search", "post", body)
    assert [result["external_id"] for result in body["results"]] == ["dam.md"]
    assert (body["relevant"], body["degraded"]) == (True, [])
    assert answer.headers["cache-control"] == "no-store"
    other = await world.client.post("/v1/search", json={"query": "reservoir turbine"}, headers=as_("eve", tenant))
    assert (other.status_code, other.json()["results"]) == (200, [])


def assert_described(path: str, method: str, response: Any) -> None:
    """Check that a response conforms to /openapi.json."""
    from jsonschema import Draft202012Validator  # here, because its import takes a second

    description = describe_app().openapi()
    schema = description["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": description["components"]}).validate(response)


async def test_a_document_and_its_why_are_readable_only_with_access(world: World, tenant: str) -> None:
    text = "# Plan\n\nMove the crane.\n\n## Later\n\nMove it back."
    shared = document("plan.md", text, tenant=tenant, acl_tags=["user:ann", "crew"], title="The plan")
    await world.library.put(shared)
    await world.library.put(shared.model_copy(update={"version": shared.version + 100, "title": "The new plan"}))
    id_ = await world.id(tenant, "plan.md")
    body = (await world.client.get(f"/v1/documents/{id_}", headers=as_("ann", tenant))).json()
    assert_described("/v1/documents/{document_id}", "get", body)
    assert (body["text"], body["title"], body["document_id"]) == (text, "The new plan", str(id_))
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


async def test_an_operator_sees_the_full_why_only_in_its_own_tenant(world: World, tmp_path: Path) -> None:
    mine, theirs = document("a.md", "Text.", tenant="opsone"), document("a.md", "Text.", tenant="opstwo")
    await world.library.put(mine, theirs)
    keys = write_keys(
        tmp_path / "keys.toml",
        ops={"key": "ops", "tenant": "opsone", "operator": True},
        bot={"key": "bot", "tenant": "opsone", "tags": ["nothing"]},
    )
    async with service_over(world.library, auth={"keys_file": keys}) as (client, _):
        one, two = await world.id("opsone", "a.md"), await world.id("opstwo", "a.md")
        response = await client.get(f"/v1/documents/{one}/why", headers={"X-Api-Key": "ops"})
        assert response.json()["access"]["acl_tags"] == ["wiki/staff"]
        refused = [
            await client.get(f"/v1/documents/{one}", headers={"X-Api-Key": "ops"}),  # to operate is not to read
            await client.get(f"/v1/documents/{two}/why", headers={"X-Api-Key": "ops"}),
            await client.get(f"/v1/documents/{one}/why", headers={"X-Api-Key": "bot"}),
        ]
        assert [answer.status_code for answer in refused] == [404, 404, 404]
        for path in ("/v1/review", "/v1/pipeline"):
            assert problem(await client.get(path, headers={"X-Api-Key": "bot"})) == (403, "forbidden")
        assert (await client.get("/v1/review", headers={"X-Api-Key": "ops"})).json() == {"waiting": []}


async def test_an_unreadable_document_gets_the_same_response_as_a_missing_one(world: World, tenant: str) -> None:
    """Byte for byte, by the same statements."""
    await world.library.put(
        document("secret.md", "The merger.", tenant=tenant, acl_tags=["board"]),
        document("secret.md", "The merger.", tenant=f"{tenant}x", acl_tags=["user:ann"]),
    )
    forbidden = [await world.id(tenant, "secret.md"), await world.id(f"{tenant}x", "secret.md")]
    for path in ("/v1/documents/{}", "/v1/documents/{}/why"):
        seen, sets = set(), set()
        for id_ in (*forbidden, uuid4()):
            attempts = []
            for _ in range(3):  # what this process refreshes from time to time is not in all of them
                with statements() as sent:
                    answer = await world.client.get(path.format(id_), headers=as_("ann", tenant))
                attempts.append(sent)
                names = sorted(name for name in answer.headers if name != "date")
                seen.add((answer.status_code, answer.text, tuple(names)))
            fewest = min(attempts, key=len)
            assert len(fewest) > 1
            sets.add(tuple(fewest))
        assert len(seen) == len(sets) == 1, path
    missing, withheld = "zeppelin", "merger"
    messages = []
    for query in ("anything", missing, withheld):  # the first finds out for five seconds how neighbours are looked for
        attempts = []
        for n in range(3):  # the check of recall repeats a search from time to time
            request = {"query": f"{query} {n}"}
            with statements() as sent:
                response = (await world.client.post("/v1/search", json=request, headers=as_("ann", tenant))).json()
            steps = [{k: v for k, v in step.items() if k != "took_ms"} for step in response["steps"]]
            assert response["results"] == []
            attempts.append((sorted(map(str, steps)), sorted(sent)))
        messages.append(min(attempts, key=lambda attempt: len(attempt[1])))
    assert messages[1] == messages[2]


@contextmanager
def statements() -> Iterator[list[str]]:
    """Every statement that this process sends to Postgres; without the look at the fence, which depends on the age of a
    connection and not on what is asked, and without the audit trail's, which are sent later."""
    sent: list[str] = []
    real = psycopg.AsyncConnection.execute

    async def noting(connection: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        if connection.info.parameter_status("application_name") != "penstock trail" and (
            "pg_control_system" not in str(query)
        ):
            sent.append(str(query))
        return await real(connection, query, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.AsyncConnection, "execute", noting)
        yield sent


async def test_facets_are_computed_only_from_readable_documents(world: World, tenant: str) -> None:
    await world.library.put(
        document("a.md", "One.", tenant=tenant, acl_tags=["user:ann"], author="Ada"),
        document("b.md", "Two.", tenant=tenant, acl_tags=["user:ann"], author="Ada", source="drive"),
        document(
            "c.pdf",
            "Three.",
            tenant=tenant,
            acl_tags=["board"],
            author="Eve",
            source="vault",
            media_type="application/pdf",
        ),
    )
    body = (await world.client.get("/v1/facets", headers=as_("ann", tenant))).json()
    assert body == {"sources": ["drive", "wiki"], "authors": ["Ada"], "media_types": ["text/markdown"], "metadata": {}}


# For machines


async def test_the_service_is_ready_but_degraded_without_elasticsearch(world: World) -> None:
    assert (await world.client.get("/livez")).text == "ok\n"
    ready = await world.client.get("/readyz")
    assert (ready.status_code, ready.text) == (200, "ready\n")
    dead = world.library.settings.elasticsearch.model_copy(update={"url": "http://127.0.0.1:1"})
    settings = world.library.settings.model_copy(update={"elasticsearch": dead})
    half = Library(**{**vars(world.library), "settings": settings})
    async with service_over(half) as (client, service):
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.text) == (200, "degraded: keywords\n")
        body = (await client.post("/v1/search", json={"query": "harbour"}, headers=as_("ann"))).json()
        assert len(body["degraded"]) == 1
        assert service.metrics.registry.get_sample_value("penstock_query_degraded_total", {"part": "keywords"}) == 1


async def test_metrics_are_served_only_to_this_machine_and_to_operators(world: World, tmp_path: Path) -> None:
    await world.client.post("/v1/search", json={"query": "x", "mode": "keyword"}, headers=as_("ann"))
    text = (await world.client.get("/metrics")).text
    assert 'penstock_query_seconds_count{mode="keyword",route="/v1/search"}' in text
    assert 'le="0.1"' in text
    assert 'le="3.0"' in text
    keys = write_keys(
        tmp_path / "keys.toml",
        ops={"key": "ops", "tenant": "a", "operator": True},
        bot={"key": "bot", "tenant": "a", "tags": ["x"]},
    )
    async with service_over(world.library, auth={"keys_file": keys}) as (client, _):
        from_elsewhere = {"X-Forwarded-For": "10.0.0.1"}
        for headers, status in (({}, 401), ({"X-Api-Key": "bot"}, 403), ({"X-Api-Key": "ops"}, 200)):
            assert (await client.get("/metrics", headers={**from_elsewhere, **headers})).status_code == status
        for name, status in (("rebound.example", 401), ("localhost.rebound.example", 401), ("localhost:9", 200)):
            assert (await client.get("/metrics", headers={"Host": name})).status_code == status


async def test_feedback_sent_with_an_api_key_is_included_in_the_persons_export(
    world: World, tenant: str, tmp_path: Path
) -> None:
    await world.library.put(document("a.md", "The harbour opens at six.", tenant=tenant, acl_tags=["user:ann"]))
    keys = write_keys(tmp_path / "keys.toml", bot={"key": "bot", "tenant": tenant, "principal": "ann"})
    async with service_over(world.library, auth={"keys_file": keys}) as (client, _):
        headers = {"X-Api-Key": "bot"}
        [response] = (await client.post("/v1/search", json={"query": "harbour"}, headers=headers)).json()["results"]
        judged = {
            "chunk_id": response["chunk_ids"][0],
            "query": "harbour",
            "verdict": "down",
            "note": "too early for me",
        }
        for body in (judged, {**judged, "chunk_id": str(uuid4())}):
            assert (await client.post("/v1/feedback", json=body, headers=headers)).status_code == 204
    world.library.write_home(tmp_path)
    env = {**os.environ, "PENSTOCK_HOME": str(tmp_path), "PENSTOCK_FEEDBACK_KEYS": FEEDBACK_KEY}
    done = await asyncio.to_thread(partial(run_penstock, "export", "ann", "--tenant", tenant, env=env))
    [row] = json.loads(done.stdout)["postgres"]["answer_feedback"]
    assert (row["note"], row["verdict"]) == ("too early for me", "down")


async def test_without_feedback_keys_feedback_is_rejected(
    world: World, tenant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    keys = write_keys(tmp_path / "keys.toml", bot={"key": "bot", "tenant": tenant, "principal": "ann"})
    async with service_over(world.library, auth={"keys_file": keys}, feedback=FeedbackSettings()) as (client, _):
        body = {"answer_id": str(uuid4()), "verdict": "up"}
        refused = await client.post("/v1/feedback", json=body, headers={"X-Api-Key": "bot"})
        assert problem(refused) == (403, "forbidden")
        assert "PENSTOCK_FEEDBACK_KEYS" in refused.json()["detail"]


async def test_responses_have_security_headers_and_cors_is_limited_to_configured_origins(world: World) -> None:
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


async def test_the_log_contains_no_question_and_no_principal(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    await world.client.post("/v1/search", json={"query": "swordfish"}, headers=as_("ann@example.org"))
    await world.client.get("/v1/documents/swordfish", headers=as_("ann@example.org"))
    out, err = capfd.readouterr()
    assert "/v1/search" in out + err
    assert not [word for word in ("swordfish", "ann@example.org") if word in out + err]
