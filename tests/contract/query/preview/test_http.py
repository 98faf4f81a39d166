"""Previews over HTTP: who may ask for one, what it stores (nothing), and one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipeline.embedding.port import Embedded
from query.embedding.embedders import QueryEmbedder
from query.evaluation import golden as judgements
from query.evaluation.golden import Golden, Judged
from query.http.schemas import PreviewRequest
from query.limits.charging import charge_to
from tests.support.query.http_kit import World, as_, problem
from tests.support.query.library import WordEmbedder, access, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

QUESTION = "How many days of leave do employees have?"
EDIT = {
    "source": "wiki",
    "documents": [{"path": "leave.md", "content": "Unused leave expires.", "media_type": "text/markdown"}],
}


async def handbook(world: World, tenant: str) -> None:
    text = "Employees have thirty days of leave. Unused leave expires."
    await world.library.put(document("leave.md", text, tenant=tenant, acl_tags=["user:ann"]))
    await judge(world, tenant, QUESTION)


async def judge(world: World, tenant: str, text: str, *, promoted: bool = False) -> None:
    golden = Golden(tenant, text, (Judged("wiki", "leave.md", "thirty days"),), ("ann",))
    async with world.library.pool.connection() as connection:
        await judgements.store(connection, golden)
        if promoted:
            await connection.execute("UPDATE eval_queries SET answers = %s WHERE id = %s", [[golden.id], golden.id])


async def test_a_preview_reports_a_lost_answer_and_stores_nothing(world: World, tenant: str) -> None:
    await handbook(world, tenant)
    state = "SELECT d.seq, b.text, m.chunk_ids FROM documents d JOIN document_bodies b ON b.document_id = d.id"
    state += " JOIN manifests m ON m.document_id = d.id WHERE d.tenant = %s"
    index = world.library.generation.keyword_index
    before = await world.library.execute(state, tenant), (await world.library.es.count(index=index))["count"]
    answer = await world.client.post("/v1/previews", json=EDIT, headers=as_("ann", tenant))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["fails"], body["questions"], body["embedded"]) == (True, 1, 1)
    assert [(finding["kind"], finding["question"]) for finding in body["findings"]] == [("lost", QUESTION)]
    await world.library.es.indices.refresh(index=index)
    after = await world.library.execute(state, tenant), (await world.library.es.count(index=index))["count"]
    assert after == before
    counted = (await world.client.get("/metrics")).text
    assert 'penstock_query_previews_total{outcome="fails"}' in counted


async def test_who_may_not_read_the_document_sees_neither_it_nor_its_questions(world: World, tenant: str) -> None:
    await handbook(world, tenant)
    body = (await world.client.post("/v1/previews", json=EDIT, headers=as_("bob", tenant))).json()
    assert [d["state"] for d in body["documents"]] == ["new"]
    assert (body["questions"], body["findings"], body["fails"]) == (0, [], False)


async def test_a_question_of_a_person_is_shown_to_operators_only(world: World, tenant: str) -> None:
    await handbook(world, tenant)
    await judge(world, tenant, "What did ann want to know of leave?", promoted=True)
    body = (await world.client.post("/v1/previews", json=EDIT, headers=as_("ann", tenant))).json()
    assert body["questions"] == 1
    report = await world.service.previews.preview(
        PreviewRequest.model_validate(EDIT).edit(),
        await world.service.search.identify(tenant, principals=["ann"]),
        operator=True,
    )
    assert report.questions == 2


async def test_a_second_preview_at_once_is_refused(world: World, tenant: str) -> None:
    async with world.service.previewing.of(tenant, 1):
        answer = await world.client.post("/v1/previews", json=EDIT, headers=as_("ann", tenant))
    assert problem(answer) == (503, "busy")
    assert "Retry-After" in answer.headers


async def test_a_preview_waits_for_that_of_another_tenant(world: World, tenant: str) -> None:
    async with world.service.previewing.of("another", 1):
        waiting = asyncio.create_task(world.client.post("/v1/previews", json=EDIT, headers=as_("ann", tenant)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
    assert (await waiting).status_code == 200


class Billed(WordEmbedder):
    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        return replace(await super().embed_documents(texts), tokens=5, money=0.25)


async def test_what_a_remote_model_embeds_for_a_preview_is_charged_to_its_request(world: World, tenant: str) -> None:
    await handbook(world, tenant)
    previews = replace(world.service.previews, embedders=QueryEmbedder(Billed))
    charged: list[tuple[int, float]] = []
    charge_to(lambda tokens, money, stored: charged.append((tokens, money)))
    try:
        edit = PreviewRequest.model_validate(EDIT).edit()
        await previews.preview(edit, await world.service.search.identify(tenant, principals=["ann"]))
    finally:
        charge_to(None)
    assert charged == [(0, 0.25)], "the budget of tokens is of the chat model's"


@pytest.mark.parametrize("documents", [[{"path": ""}], [{"path": "a", "acl_tags": ["staff"]}], [{"path": "a"}] * 201])
async def test_a_wrong_edit_is_refused(world: World, tenant: str, documents: list[dict[str, object]]) -> None:
    body = {"source": "wiki", "documents": documents}
    assert (await world.client.post("/v1/previews", json=body, headers=as_("ann", tenant))).status_code == 422


async def test_a_preview_asks_its_callers_standing_questions_and_nobody_elses(world: World, tenant: str) -> None:
    text = "Employees have thirty days of leave. Unused leave expires."
    made = document("leave.md", text, tenant=tenant, acl_tags=["user:ann", "user:bob", "user:eve"])
    await world.library.put(made)
    ids = {}
    for who in ("ann", "bob"):
        kept = await world.client.post(
            "/v1/answers", json={"question": QUESTION, "keep": True}, headers=as_(who, tenant)
        )
        ids[who] = kept.json()["standing_id"]
    filtered = {"question": QUESTION, "keep": True, "filters": {"sources": ["wiki"]}}
    assert (await world.client.post("/v1/answers", json=filtered, headers=as_("ann", tenant))).status_code == 200
    deletion = EDIT | {"documents": [{"path": "leave.md", "content": None}]}
    for who, expected in (("ann", [ids["ann"]]), ("bob", [ids["bob"]]), ("eve", [])):
        body = (await world.client.post("/v1/previews", json=deletion, headers=as_(who, tenant))).json()
        assert [finding["standing_id"] for finding in body["findings"]] == expected
        assert {finding["kind"] for finding in body["findings"]} <= {"lost"}
        assert (body["questions"], body["fails"]) == (len(expected), bool(expected))
    await world.library.accept(access(made, ["user:bob"]))
    unread = (await world.client.post("/v1/previews", json=EDIT, headers=as_("ann", tenant))).json()
    assert [d["state"] for d in unread["documents"]] == ["new"]
    assert "thirty" not in str(unread["findings"]), "its asker may not read the page any more"
