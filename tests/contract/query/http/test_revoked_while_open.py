"""Nothing of a document is received that is revoked while an answer is written or a preview runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

import httpx
import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from pipeline.core.errors import Retryable
from pipeline.ledger.personal import Scope, erase
from query.answers.answers import REVOKED
from query.evaluation import golden as judgements
from query.evaluation.golden import Golden, Judged
from query.preview.preview import Previews
from query.service import Service
from query.settings import ChatSettings
from tests.fakes.chat import FakeChat
from tests.support.query.http_kit import as_, events_of, problem, service_over
from tests.support.query.library import Library, WordEmbedder, access, deletion, document
from tests.support.waiting import until

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

QUESTION = {"question": "When does the harbour open?", "mode": "hybrid"}
HARBOUR = (
    "The harbour opens at nine, and " + "the pilot and the crew and the tug and the watch and " * 4 + "the zebra wait."
)
PUBLIC = "The harbour opens its museum on Sundays."
SECONDS = 6.0
"""A revocation counts within these, with what a busy machine needs."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        yield library


@pytest_asyncio.fixture(loop_scope="module")
async def chat() -> AsyncIterator[FakeChat]:
    async with FakeChat() as chat:
        yield chat


@pytest_asyncio.fixture(loop_scope="module")
async def serving(library: Library, chat: FakeChat) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    settings = ChatSettings(base_url=chat.url, model=chat.model, timeout_seconds=60)
    async with service_over(library, chat=settings) as (client, service):
        yield client, service


async def revoked(library: Library, tenant: str, made: Any) -> None:
    await library.accept(access(made, ["user:bob"]))


async def left_the_group(library: Library, tenant: str, made: Any) -> None:
    await groups(library, tenant, [])


async def deleted(library: Library, tenant: str, made: Any) -> None:
    await library.accept(deletion(made))


async def forgotten(library: Library, tenant: str, made: Any) -> None:
    [id_] = await library.accept(deletion(made))
    async with library.pool.connection() as connection:
        await erase(connection, "document", Scope(tenant, made.source, ids=[id_], names=[made.external_id]))


LOSSES = [revoked, left_the_group, deleted, forgotten]


async def groups(library: Library, tenant: str, tags: list[str]) -> None:
    await library.execute(
        "INSERT INTO memberships VALUES (%s, 'wiki', 'ann', %s, %s) ON CONFLICT (tenant, principal, source)"
        " DO UPDATE SET groups = excluded.groups, observed_at = excluded.observed_at",
        tenant,
        tags,
        datetime.now(UTC),
    )


async def put(library: Library, tenant: str, *, alone: bool = False) -> Any:
    await groups(library, tenant, ["crew"])
    made = document("secret-harbour.md", HARBOUR, tenant=tenant, acl_tags=["crew"])
    public = document("museum.md", PUBLIC, tenant=tenant, acl_tags=["user:ann"])
    await library.put(made, *([] if alone else [public]))
    return made


async def begun(chat: FakeChat, request: Awaitable[httpx.Response]) -> asyncio.Future[httpx.Response]:
    """Send a request, and return its response to come once a model works on it."""
    response = asyncio.ensure_future(request)
    await until(lambda: chat.stats.open, within_seconds=20, every_seconds=0.005)
    return response


def assert_replaced(answer: dict[str, Any]) -> None:
    """The answer quotes what may still be read, and says why."""
    assert answer["model"] is None, answer
    assert not {"pilot", "zebra"} & set(answer["answer"].split())
    assert [cited["external_id"] for cited in answer["citations"]] == ["museum.md"]
    assert REVOKED in answer["notes"]


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_streamed_answer_ends_soon_after_a_passage_behind_it_may_not_be_read(
    library: Library, serving: tuple[httpx.AsyncClient, Service], chat: FakeChat, tenant: str, loss: Any
) -> None:
    client, _ = serving
    made = await put(library, tenant)
    chat.faults.token_seconds = 0.5
    streamed, since, last = "", None, {}
    async with client.stream(
        "POST", "/v1/answers", json={**QUESTION, "stream": True}, headers=as_("ann", tenant)
    ) as answer:
        async for name, data in events_of(answer):
            if name == "delta":
                streamed += data["text"]
                if since is None and "pilot" in streamed:
                    await loss(library, tenant, made)
                    since = perf_counter()
            last = {"event": name, **data}
    assert since is not None, last
    assert perf_counter() - since < SECONDS
    assert "zebra" not in streamed
    assert last["event"] == "done"
    assert not {"pilot", "zebra"} & set(last["answer"].split())
    assert all(cited["external_id"] != "secret-harbour.md" for cited in last["citations"]), last


@pytest.mark.parametrize("loss", [left_the_group, deleted])
async def test_an_answer_of_one_response_has_nothing_of_a_passage_that_may_not_be_read_at_its_end(
    library: Library, serving: tuple[httpx.AsyncClient, Service], chat: FakeChat, tenant: str, loss: Any
) -> None:
    """The model has written all of it, faster than access is looked at in between."""
    client, _ = serving
    made = await put(library, tenant)
    chat.faults.token_seconds = 0.02
    response = await begun(chat, client.post("/v1/answers", json=QUESTION, headers=as_("ann", tenant)))
    await loss(library, tenant, made)
    assert_replaced((await response).json())


@pytest.mark.parametrize("fault", ["cut", "unfinished"])
async def test_a_model_that_fails_is_replaced_by_no_passage_that_may_not_be_read_then(
    library: Library, serving: tuple[httpx.AsyncClient, Service], chat: FakeChat, tenant: str, fault: str
) -> None:
    client, _ = serving
    made = await put(library, tenant)
    chat.faults.token_seconds = 0.04
    setattr(chat.faults, fault, 1)
    response = await begun(chat, client.post("/v1/answers", json=QUESTION, headers=as_("ann", tenant)))
    await left_the_group(library, tenant, made)
    answer = (await response).json()
    assert answer["degraded"], answer
    assert_replaced(answer)


async def test_the_conversation_repeats_no_answer_that_was_replaced_while_it_was_written(
    library: Library, serving: tuple[httpx.AsyncClient, Service], chat: FakeChat, tenant: str
) -> None:
    """A client may hold the beginning that it has received for the answer, and send it with the next question."""
    client, _ = serving
    made = await put(library, tenant, alone=True)
    chat.faults.token_seconds = 0.5
    streamed, done = "", {}
    async with client.stream(
        "POST", "/v1/answers", json={**QUESTION, "stream": True}, headers=as_("ann", tenant)
    ) as answer:
        async for name, data in events_of(answer):
            streamed += data["text"] if name == "delta" else ""
            if name == "delta" and "pilot" in streamed and not done:
                await revoked(library, tenant, made)
                done = {"answer": "soon"}
            done = data if name == "done" else done
    assert (done["relevant"], done["citations"]) == (False, [])
    await library.put(document("museum.md", PUBLIC, tenant=tenant, acl_tags=["user:ann"]))
    chat.faults.token_seconds = 0.0
    chat.requests.clear()
    turn = {"question": QUESTION["question"], "answer": streamed, "answer_id": done["answer_id"]}
    body = {"question": "And who waits for it?", "turns": [turn]}
    again = (await client.post("/v1/answers", json=body, headers=as_("ann", tenant))).json()
    assert "pilot" not in json.dumps([again, chat.requests])


async def test_an_answer_without_a_ledger_at_its_end_is_an_error(
    library: Library, serving: tuple[httpx.AsyncClient, Service], chat: FakeChat, tenant: str, monkeypatch: Any
) -> None:
    client, service = serving
    await put(library, tenant)
    chat.faults.token_seconds = 0.1

    async def away(*_: Any, **__: Any) -> Any:
        raise Retryable("Postgres is away", service="postgres")

    response = await begun(chat, client.post("/v1/answers", json=QUESTION, headers=as_("ann", tenant)))
    monkeypatch.setattr(type(service.search), "identify", away)
    assert (await response).status_code == 503


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_preview_shows_nothing_of_a_document_that_may_not_be_read_at_its_end(
    library: Library,
    serving: tuple[httpx.AsyncClient, Service],
    tenant: str,
    loss: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds of questions take a minute."""
    client, _ = serving
    made = await put(library, tenant)
    golden = Golden(tenant, QUESTION["question"], (Judged("wiki", made.external_id, "opens at nine"),), ("ann",))
    async with library.pool.connection() as connection:
        await judgements.store(connection, golden)
    edit = {
        "source": "wiki",
        "documents": [{"path": "museum.md", "content": f"{PUBLIC} The harbour opens when it wants."}],
    }
    before = await client.post("/v1/previews", json=edit, headers=as_("ann", tenant))
    assert made.external_id in before.text, before.text
    asking = Previews.preview

    async def late(*arguments: Any, **fields: Any) -> Any:
        report = await asking(*arguments, **fields)
        await loss(library, tenant, made)
        return report

    monkeypatch.setattr(Previews, "preview", late)
    answer = await client.post("/v1/previews", json=edit, headers=as_("ann", tenant))
    assert problem(answer) == (503, "busy")
    assert answer.headers["retry-after"] == "1"
    monkeypatch.undo()
    again = await client.post("/v1/previews", json=edit, headers=as_("ann", tenant))
    assert again.status_code == 200
    assert made.external_id not in again.text
    assert "pilot" not in again.text


async def test_a_question_that_a_model_rewrote_for_seconds_is_searched_with_the_access_of_then(
    library: Library, serving: tuple[httpx.AsyncClient, Service], chat: FakeChat, tenant: str
) -> None:
    client, _ = serving
    made = await put(library, tenant)
    chat.faults.rewrite, chat.faults.token_seconds = QUESTION["question"], 0.3
    body = {"question": "And when does it open?", "turns": [{"question": "Where is the harbour?"}], "stream": True}
    response = await begun(chat, client.post("/v1/answers", json=body, headers=as_("ann", tenant)))
    await left_the_group(library, tenant, made)
    answer = (await response).text
    assert "museum.md" in answer
    assert "secret-harbour.md" not in answer
    assert "pilot" not in answer


async def test_a_tool_keeps_no_answer_from_a_passage_that_may_not_be_read_at_its_end(
    library: Library, serving: tuple[httpx.AsyncClient, Service], chat: FakeChat, tenant: str
) -> None:
    client, _ = serving
    made = await put(library, tenant)
    chat.faults.token_seconds = 0.02
    call = {"name": "standing_keep", "arguments": {"question": QUESTION["question"]}}
    response = await begun(
        chat,
        client.post(
            "/mcp",
            json={"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call},
            headers={**as_("ann", tenant), "Accept": "application/json, text/event-stream"},
        ),
    )
    await left_the_group(library, tenant, made)
    kept = (await response).json()["result"]["structuredContent"]
    assert "museum" in kept["answer"]
    assert "pilot" not in json.dumps(kept)
    stored = await library.execute("SELECT sentences FROM standing_questions WHERE tenant = %s", tenant)
    assert "pilot" not in str(stored)
