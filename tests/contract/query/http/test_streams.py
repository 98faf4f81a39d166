"""Answers as they are written, clients that leave, more work than there are places, and a stop in the middle."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from pipeline.runtime.home import DEVELOPMENT_FILE
from query.service import Service
from query.settings import ChatSettings
from tests.fakes.chat import FakeChat
from tests.support.processes import run_penstock
from tests.support.query.http_kit import as_, bearer, events_of, service_over
from tests.support.query.library import Library, WordEmbedder, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

QUESTION = {"question": "When does the harbour open?", "mode": "hybrid"}
STREAMED = {**QUESTION, "stream": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        await library.put(
            document("harbour.md", "The harbour opens at nine. It closes when the tide is out.", acl_tags=["user:ann"])
        )
        yield library


@pytest_asyncio.fixture(loop_scope="module")
async def chat() -> AsyncIterator[FakeChat]:
    async with FakeChat() as chat:
        yield chat


def model(chat: FakeChat) -> ChatSettings:
    return ChatSettings(base_url=chat.url, model=chat.model, timeout_seconds=30)


def metric_value(service: Service, name: str) -> float:
    return service.metrics.registry.get_sample_value(f"penstock_query_{name}") or 0


async def wait_until(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


async def test_an_answer_is_available_as_an_event_stream_and_as_one_response(library: Library, chat: FakeChat) -> None:
    async with service_over(library, chat=model(chat)) as (client, service):
        async with client.stream("POST", "/v1/answers", json=STREAMED, headers=as_("ann")) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            streamed = [event async for event in events_of(answer)]
        names = [name for name, _ in streamed]
        assert (names[0], names[-1]) == ("sources", "done")
        assert {"delta", "citation"} == set(names[1:-1])
        done = streamed[-1][1]
        assert "".join(data["text"] for name, data in streamed if name == "delta").strip() == done["answer"]
        assert [n["n"] for name, n in streamed if name == "citation"] == [c["n"] for c in done["citations"]]
        assert (done["grounded"], done["model"], done["mode"]) == (True, "copyist", "hybrid")
        plain = (await client.post("/v1/answers", json=QUESTION, headers=as_("ann"))).json()
        assert (plain["answer"], plain["citations"]) == (done["answer"], done["citations"])
        response_by_header = await client.post(
            "/v1/answers", json=QUESTION, headers={**as_("ann"), "Accept": "text/event-stream"}
        )
        assert response_by_header.text.startswith("event: sources\n")
        nothing = (await client.post("/v1/answers", json=QUESTION, headers=as_("eve"))).json()
        assert (nothing["relevant"], nothing["citations"]) == (False, [])
        assert chat.stats.requests == 3, "nothing was readable, so no model was asked"
        assert (metric_value(service, "open_streams"), metric_value(service, "first_token_seconds_count")) == (0, 2)


async def test_an_invalid_question_is_an_error_plain_and_streamed(library: Library) -> None:
    async with service_over(library) as (client, _):
        plain = await client.post("/v1/answers", json={"question": " "}, headers=as_("ann"))
        streamed = await client.post("/v1/answers", json={"question": " ", "stream": True}, headers=as_("ann"))
        assert plain.status_code == 422
        assert streamed.text == f"event: error\ndata: {json.dumps(plain.json())}\n\n"


async def test_a_client_that_leaves_ends_its_work_and_frees_its_slot(library: Library, chat: FakeChat) -> None:
    """The model is not kept writing, no place and no connection is kept."""
    chat.faults.token_seconds = 0.5
    async with service_over(library, chat=model(chat)) as (client, service):
        for body in (STREAMED, QUESTION):
            leaving = asyncio.create_task(client.post("/v1/answers", json=body, headers=as_("ann")))
            await wait_until(lambda: chat.stats.open == 1)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await wait_until(lambda: chat.stats.open == 0 and metric_value(service, "in_work") == 0)
        assert chat.stats.left == 2
        assert metric_value(service, "open_streams") == 0
        statistics = service.pool.get_stats()
        assert statistics["pool_available"] == statistics["pool_size"]
        left = {"route": "/v1/answers", "outcome": "cancelled"}
        assert service.metrics.registry.get_sample_value("penstock_query_requests_total", left) == 2


async def test_requests_beyond_the_slots_are_shed_with_503_and_the_others_answered(
    library: Library, chat: FakeChat
) -> None:
    chat.faults.latency_seconds = 0.5
    few = {"answers_at_once": 2, "waiting": 2, "waiting_seconds": 60, "concurrent_per_caller": 3}
    async with service_over(library, chat=model(chat), serve=few) as (client, service):

        async def ask(n: int) -> httpx.Response:
            return await client.post("/v1/answers", json=QUESTION, headers=as_(f"caller-{n}"))

        answers = await asyncio.gather(*(ask(n) for n in range(12)))
        shed = [answer for answer in answers if answer.status_code == 503]
        assert {answer.status_code for answer in answers} == {200, 503}
        assert all(answer.headers["Retry-After"] == "1" for answer in shed)
        assert all(answer.json()["type"].endswith(":busy") for answer in shed)
        sample = service.metrics.registry.get_sample_value
        assert sample("penstock_query_requests_total", {"route": "none", "outcome": "shed"}) == len(shed)
        assert sample("penstock_query_shed_total", {"reason": "busy"}) == len(shed)
        assert (await ask(0)).status_code == 200
        mine = await asyncio.gather(*(ask(99) for _ in range(6)))
        assert {answer.status_code for answer in mine} == {200, 429}


async def test_stopping_the_query_service_ends_its_open_streams_in_bounded_time(
    library: Library, chat: FakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock up` starts the service as a process; SIGTERM ends it with its streams, in bounded time."""
    library.write_home(tmp_path)
    chat.faults.token_seconds = 5
    stack = Stack(tmp_path)
    assert (stack.query().url, stack.query().ready) == ("", False)
    monkeypatch.delenv("PENSTOCK_SERVE_PORT", raising=False)
    env = {
        "PENSTOCK_SERVE_DEVELOPMENT": "true",
        "PENSTOCK_CHAT_BASE_URL": chat.url,
        "PENSTOCK_CHAT_MODEL": chat.model,
        "PENSTOCK_EMBEDDING_PROVIDER": "openai",
        "PENSTOCK_EMBEDDING_BASE_URL": "http://127.0.0.1:1/v1",
        "PENSTOCK_EMBEDDING_API_KEY": "none",
    }
    try:
        served = await asyncio.to_thread(stack.start_query, env=env)
        assert served.ready
        assert stack.endpoints()["serve"] == {"url": served.url}
        assert (await asyncio.to_thread(stack.start_query, env=env)).pid == served.pid
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            own = as_("ann") | bearer(tmp_path / DEVELOPMENT_FILE)
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.text) == (200, "degraded: model\n")
            request = client.stream("POST", "/v1/answers", json={**STREAMED, "mode": "keyword"}, headers=own)
            async with request as answer:
                stream = events_of(answer)
                assert (await anext(stream))[0] == "sources"
                stopping = asyncio.create_task(asyncio.to_thread(stack.stop_query))
                with suppress(httpx.HTTPError):  # cut in the middle of a piece, or tidily after one
                    async with asyncio.timeout(20):
                        async for name, _ in stream:
                            assert name != "done"
                assert await stopping
        assert served.pid is not None
        assert not psutil.pid_exists(served.pid)
        assert "serve" not in stack.endpoints()
        log = (tmp_path / "logs" / "query.log").read_text()
        assert "development_mode" in log
        assert own["Authorization"].removeprefix("Bearer ") not in log
        assert "Traceback" not in log
        assert '"exception"' not in log
        assert "harbour" not in log
    finally:
        await asyncio.to_thread(stack.stop_query)


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        ([], {}, "no authentication is configured"),
        (["--host", "0.0.0.0"], {"PENSTOCK_SERVE_DEVELOPMENT": "true"}, "loopback only"),
        ([], {"PENSTOCK_AUTH_JWKS_URL": "https://issuer.example/keys"}, "PENSTOCK_AUTH_ISSUER"),
        ([], {"PENSTOCK_AUTH_KEYS_FILE": "/nowhere/keys.toml"}, "/nowhere/keys.toml"),
    ],
)
async def test_a_service_with_missing_or_unsafe_authentication_does_not_start(
    library: Library, tmp_path: Path, arguments: list[str], env: dict[str, str], says: str
) -> None:
    library.write_home(tmp_path)
    env = {**os.environ, **env, "PENSTOCK_HOME": str(tmp_path)}
    done = await asyncio.to_thread(partial(run_penstock, "serve", "--port", "0", *arguments, env=env))
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: ")
    assert says in last
