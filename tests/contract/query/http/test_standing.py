"""Standing questions over HTTP on real stores: what invalidates an answer, and what its asker may still see."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

import httpx
import pytest

from pipeline.ledger.personal import Scope, erase, raise_floor, raise_tenant_floor
from pipeline.maintenance.retention import Retention
from pipeline.runtime.settings import RetentionSettings
from pipeline.runtime.tasks import cancel_and_wait
from query.http.answers import whole
from query.standing import table
from query.standing.questions import StandingQuestions
from tests.contract.query.http.test_http import assert_described
from tests.support.query.http_kit import World, as_, problem, service_over
from tests.support.query.library import access, deletion, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

DAM = "The reservoir of the dam feeds four turbines in the hall."
QUESTION = "how many turbines does the reservoir of the dam feed"


async def keep(world: World, tenant: str, who: str = "ann", question: str = QUESTION, **more: Any) -> dict[str, Any]:
    answer = await world.client.post(
        "/v1/answers", json={"question": question, "keep": True, **more}, headers=as_(who, tenant)
    )
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def show(world: World, tenant: str, id_: str, who: str = "ann") -> dict[str, Any]:
    answer = await world.client.get(f"/v1/standing/{id_}", headers=as_(who, tenant))
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert_described("/v1/standing/{question_id}", "get", body)
    return body


def texts(shown: dict[str, Any]) -> list[str | None]:
    return [sentence["text"] for sentence in shown["sentences"]]


async def put(world: World, tenant: str, text: str = DAM, **fields: Any) -> Any:
    made = document("dam.md", text, tenant=tenant, **({"acl_tags": ["user:ann"]} | fields))
    await world.library.put(made)
    return made


async def test_a_stored_answer_is_listed_and_stays_current_while_nothing_changes(world: World, tenant: str) -> None:
    made = await put(world, tenant)
    stored = await keep(world, tenant)
    id_ = stored["standing_id"]
    await world.library.put(made.model_copy(update={"version": made.version + 100, "title": "Another title"}))
    listed = (await world.client.get("/v1/standing", headers=as_("ann", tenant))).json()
    assert_described("/v1/standing", "get", listed)
    [entry] = listed["standing"]
    assert (entry["id"], entry["question"], entry["state"], entry["changes"]) == (id_, QUESTION, "current", [])
    shown = await show(world, tenant, id_)
    assert " ".join(text or "" for text in texts(shown)).split() == stored["answer"].split()
    assert {p["change"] for p in shown["passages"]} == {None}
    assert {p["document_id"] for p in shown["passages"]} == {str(await world.id(tenant, "dam.md"))}


async def test_a_question_that_postgres_would_not_take_is_refused_before_it_is_answered(
    world: World, tenant: str
) -> None:
    """The answer was written, and charged, and then the request failed."""
    await put(world, tenant)
    body = {"question": f"{QUESTION}\x00", "keep": True}
    refused = await world.client.post("/v1/answers", json=body, headers=as_("ann", tenant))
    assert problem(refused) == (422, "bad-query")


async def test_an_edit_of_a_passage_says_which_sentences_it_invalidates(world: World, tenant: str) -> None:
    made = await put(world, tenant)
    other = document("tea.md", "Boil the water for tea before the dam opens.", tenant=tenant, acl_tags=["user:ann"])
    await world.library.put(other)
    id_ = (await keep(world, tenant))["standing_id"]
    before = await show(world, tenant, id_)
    await world.library.put(
        made.model_copy(update={"version": made.version + 100, "content": DAM.replace("four", "five")})
    )
    shown = await show(world, tenant, id_)
    assert shown["state"] == "invalidated"
    of_the_dam = {p["n"] for p in before["passages"] if p["document_id"] == str(await world.id(tenant, "dam.md"))}
    expected = [s["n"] for s in before["sentences"] if of_the_dam & set(s["passages"])]
    assert shown["changes"] == [{"kind": "changed", "sentences": expected}]
    assert texts(shown) == texts(before), "its reader may read the page, and sees what it said"


async def test_an_answer_repeated_replaces_the_old_one_and_shows_the_difference(world: World, tenant: str) -> None:
    made = await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]
    five = DAM.replace("four", "five")
    await world.library.put(made.model_copy(update={"version": made.version + 100, "content": five}))
    answer = await world.client.post(f"/v1/standing/{id_}/answer", headers=as_("ann", tenant))
    body = answer.json()
    assert_described("/v1/standing/{question_id}/answer", "post", body)
    lines = {(line["change"], (line["text"] or "").partition(" [")[0]) for line in body["difference"]}
    assert any(change == "removed" and "four turbines" in text for change, text in lines), lines
    assert any(change == "added" and "five turbines" in text for change, text in lines), lines
    shown = await show(world, tenant, id_)
    assert (shown["state"], "five" in " ".join(map(str, texts(shown)))) == ("current", True)
    again = (await world.client.post(f"/v1/standing/{id_}/answer", headers=as_("ann", tenant))).json()
    assert {line["change"] for line in again["difference"]} == {"same"}


# What its asker may no longer read


async def _revoked(world: World, tenant: str, made: Any) -> None:
    await world.library.accept(access(made, ["user:bob"]))


async def _left_the_group(world: World, tenant: str, made: Any) -> None:
    await groups(world, tenant, "ann", [])


async def _deleted(world: World, tenant: str, made: Any) -> None:
    await world.library.accept(deletion(made))


async def groups(world: World, tenant: str, principal: str, tags: list[str]) -> None:
    await world.library.execute(
        "INSERT INTO memberships VALUES (%s, 'wiki', %s, %s, %s) ON CONFLICT (tenant, principal, source)"
        " DO UPDATE SET groups = excluded.groups, observed_at = excluded.observed_at",
        tenant,
        principal,
        tags,
        datetime.now(UTC),
    )


@pytest.mark.parametrize(
    ("loss", "kind"), [(_revoked, "unreadable"), (_left_the_group, "unreadable"), (_deleted, "deleted")]
)
async def test_sentences_are_withheld_once_their_passage_may_not_be_read(
    world: World, tenant: str, loss: Any, kind: str
) -> None:
    await groups(world, tenant, "ann", ["crew"])
    made = await put(world, tenant, acl_tags=["crew"])
    id_ = (await keep(world, tenant))["standing_id"]
    assert "turbines" in " ".join(map(str, texts(await show(world, tenant, id_))))
    await loss(world, tenant, made)
    shown = await show(world, tenant, id_)
    assert set(texts(shown)) == {None}
    assert [change["kind"] for change in shown["changes"]] == [kind]
    answers = [
        await world.client.get("/v1/standing", headers=as_("ann", tenant)),
        await world.client.post(f"/v1/standing/{id_}/answer", headers=as_("ann", tenant)),
        await world.client.get(f"/v1/standing/{id_}", headers=as_("ann", tenant)),
    ]
    question = QUESTION.split()
    for answer in answers:
        assert answer.status_code == 200
        said = set(answer.text.lower().split()) - set(question)
        assert not {"four", "hall", "hall.", "dam.md"} & {word.strip('",.') for word in said}, answer.text
    assert {line["change"] for line in answers[1].json()["difference"]} == {"withheld", "added"}


@pytest.mark.parametrize("loss", [_revoked, _left_the_group, _deleted])
async def test_the_difference_has_no_sentence_whose_passage_was_withdrawn_while_the_new_answer_was_written(
    world: World, tenant: str, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may write for minutes, and the old answer was read before it began."""
    await groups(world, tenant, "ann", ["crew"])
    made = await put(world, tenant, acl_tags=["crew"])
    tea = document("tea.md", "Boil the water for tea before the dam opens.", tenant=tenant, acl_tags=["user:ann"])
    await world.library.put(tea)
    id_ = (await keep(world, tenant))["standing_id"]
    six = made.model_copy(update={"version": made.version + 100, "content": DAM.replace("four", "six")})
    await world.library.put(six)

    async def written(*arguments: Any) -> Any:
        result = await whole(*arguments)
        await loss(world, tenant, six)
        return result

    monkeypatch.setattr("query.http.standing.whole", written)
    answer = await world.client.post(f"/v1/standing/{id_}/answer", headers=as_("ann", tenant))
    difference = answer.json()["difference"]
    assert not [line for line in difference if line["change"] == "removed" and "four turbines" in line["text"]]
    assert {"withheld", "added"} <= {line["change"] for line in difference}


async def test_a_deleted_document_that_could_not_be_read_any_more_is_not_reported_as_deleted(
    world: World, tenant: str
) -> None:
    made = await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]
    await _revoked(world, tenant, made)
    await _deleted(world, tenant, made)
    assert [change["kind"] for change in (await show(world, tenant, id_))["changes"]] == ["unreadable"]


async def test_an_answer_is_erased_with_a_forgotten_document_and_its_question_can_be_repeated(
    world: World, tenant: str
) -> None:
    made = await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]
    await _deleted(world, tenant, made)
    async with world.library.pool.connection() as connection:
        scope = Scope(tenant, made.source, ids=[await world.id(tenant, "dam.md")], names=["dam.md"])
        assert (await erase(connection, "document", scope))["standing_questions"] == 1
    [(left,)] = await world.library.execute("SELECT sentences FROM standing_questions WHERE tenant = %s", tenant)
    assert left == []
    shown = await show(world, tenant, id_)
    assert (shown["state"], shown["sentences"], shown["question"]) == ("erased", [], QUESTION)
    again = await world.client.post(f"/v1/standing/{id_}/answer", headers=as_("ann", tenant))
    assert {line["change"] for line in again.json()["difference"]} == {"added"}
    assert (await show(world, tenant, id_))["state"] == "current"


async def test_an_answer_that_was_written_while_its_document_was_forgotten_is_not_stored(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model may take a minute, and nobody would erase the answer afterwards."""
    made = await put(world, tenant)
    keeping = StandingQuestions.keep

    async def late(*arguments: Any, **fields: Any) -> Any:
        await _deleted(world, tenant, made)
        async with world.library.pool.connection() as connection:
            await erase(connection, "document", Scope(tenant, made.source, ids=[await world.id(tenant, "dam.md")]))
        return await keeping(*arguments, **fields)

    monkeypatch.setattr(StandingQuestions, "keep", late)
    id_ = (await keep(world, tenant))["standing_id"]
    assert await world.library.execute("SELECT sentences FROM standing_questions WHERE tenant = %s", tenant) == [([],)]
    assert (await show(world, tenant, id_))["state"] == "erased"


@pytest.mark.parametrize("forgotten", ["person", "tenant"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_question_that_was_answered_while_its_asker_was_forgotten_is_not_stored(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch, forgotten: Literal["person", "tenant"], stream: bool
) -> None:
    """The model may take a minute, and nobody would erase the question and the name afterwards."""
    await put(world, tenant)
    keeping = StandingQuestions.keep

    async def late(*arguments: Any, **fields: Any) -> Any:
        async with world.library.pool.connection() as connection:
            if forgotten == "person":
                await raise_floor(connection, tenant, "ann", "person")
            else:
                await raise_tenant_floor(connection, tenant)
        async with world.library.pool.connection() as connection:
            await erase(connection, forgotten, Scope(tenant, person="ann"))
        return await keeping(*arguments, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(StandingQuestions, "keep", late)
        body = {"question": QUESTION, "keep": True, "stream": stream}
        answer = await world.client.post("/v1/answers", json=body, headers=as_("ann", tenant))
    assert "was erased while this question was answered" in answer.text
    assert await world.library.execute("SELECT FROM standing_questions WHERE tenant = %s", tenant) == []
    assert await world.library.execute("SELECT FROM standing_passages WHERE tenant = %s", tenant) == []
    await put(world, tenant)
    assert (await keep(world, tenant))["standing_id"], "what is asked afterwards is kept"


async def test_a_question_that_is_stored_at_the_moment_its_asker_is_forgotten_does_not_stay(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The erasure begins after the look at it and before the commit: it does not see the question."""
    await put(world, tenant)
    looking, looks = table.is_forgotten, 0

    async def before_the_commit(*arguments: Any) -> bool:
        nonlocal looks
        was, looks = await looking(*arguments), looks + 1
        if looks == 1:
            async with world.library.pool.connection() as connection:
                await raise_floor(connection, tenant, "ann", "person")
            async with world.library.pool.connection() as connection:
                await erase(connection, "person", Scope(tenant, person="ann"))
        return was

    monkeypatch.setattr(table, "is_forgotten", before_the_commit)
    body = {"question": QUESTION, "keep": True}
    answer = await world.client.post("/v1/answers", json=body, headers=as_("ann", tenant))
    assert await world.library.execute("SELECT FROM standing_questions WHERE tenant = %s", tenant) == []
    assert await world.library.execute("SELECT FROM standing_passages WHERE tenant = %s", tenant) == []
    assert "was erased while this question was answered" in answer.text


async def test_an_answer_is_erased_when_the_retention_of_its_deleted_document_is_over(
    world: World, tenant: str
) -> None:
    made = await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]
    retention = Retention(world.library.pool, world.library.metrics, RetentionSettings())
    await _deleted(world, tenant, made)
    await retention.turn()
    [(left,)] = await world.library.execute("SELECT sentences FROM standing_questions WHERE tenant = %s", tenant)
    assert left, "not before its time"
    await world.library.execute(
        "UPDATE documents SET deleted_at = now() - interval '31 days', announced_seq = seq WHERE tenant = %s", tenant
    )
    await world.library.execute(
        "UPDATE index_state SET want_seq = seq WHERE document_id IN (SELECT id FROM documents WHERE tenant = %s)",
        tenant,
    )
    await retention.turn()
    assert await world.library.execute(
        "SELECT q.sentences, d.title FROM standing_questions q JOIN documents d USING (tenant) WHERE tenant = %s",
        tenant,
    ) == [([], None)]
    assert (await show(world, tenant, id_))["state"] == "erased"


async def test_an_answer_that_an_earlier_version_left_of_an_erased_document_is_erased(
    world: World, tenant: str
) -> None:
    made = await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]
    await _deleted(world, tenant, made)
    await world.library.execute("UPDATE documents SET erased_at = now() WHERE tenant = %s", tenant)
    await Retention(world.library.pool, world.library.metrics, RetentionSettings()).turn()
    assert await world.library.execute("SELECT sentences FROM standing_questions WHERE tenant = %s", tenant) == [([],)]
    assert (await show(world, tenant, id_))["state"] == "erased"


async def test_a_list_states_the_changes_that_each_question_shows(world: World, tenant: str) -> None:
    made = await put(world, tenant)
    other = document("tea.md", f"{DAM} Boil the water for tea before it opens.", tenant=tenant, acl_tags=["user:ann"])
    await world.library.put(other)
    ids = [(await keep(world, tenant, question=question))["standing_id"] for question in (QUESTION, "tea and the dam")]
    five = DAM.replace("four", "five")
    await world.library.put(made.model_copy(update={"version": made.version + 100, "content": five}))
    await world.library.accept(access(other, ["user:bob"]))
    listed = (await world.client.get("/v1/standing", headers=as_("ann", tenant))).json()["standing"]
    assert [entry["id"] for entry in listed] == ids[::-1], "the newest first"
    for entry in listed:
        shown = await show(world, tenant, entry["id"])
        assert entry == {name: shown[name] for name in entry}
        assert {change["kind"] for change in entry["changes"]} == {"unreadable", "changed"}


async def test_a_list_of_questions_from_very_many_passages_takes_little_memory(world: World, tenant: str) -> None:
    """A hundred questions from two thousand passages each took a second in which nobody else was served, and 100 MB."""
    await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]
    await world.library.execute(
        "INSERT INTO standing_questions (tenant, id, principal, question, request, sentences, generation, asked_at)"
        " SELECT tenant, gen_random_uuid(), principal, question, request, sentences, generation, asked_at"
        " FROM standing_questions, generate_series(1, 19) WHERE id = %s",
        id_,
    )
    await world.library.execute(
        "INSERT INTO standing_passages (tenant, question_id, n, chunk_id, document_id)"
        " SELECT q.tenant, q.id, 1, gen_random_uuid(), d.id FROM standing_questions q, documents d,"
        " generate_series(1, 2000) WHERE q.tenant = %s AND d.tenant = q.tenant",
        tenant,
    )
    caller = await world.service.search.identify(tenant, principals=["ann"])
    tracemalloc.start()
    try:
        listed = await world.service.standing.every(caller, "ann")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [summary.changes for summary in listed] == [{"changed": [1]}] * 20
    assert peak < 2_000_000


async def test_nobody_else_sees_asks_or_removes_a_standing_question(world: World, tenant: str) -> None:
    await put(world, tenant, acl_tags=["user:ann", "user:eve"])
    id_ = (await keep(world, tenant))["standing_id"]
    for who in (as_("eve", tenant), as_("ann", f"{tenant}x")):
        assert (await world.client.get("/v1/standing", headers=who)).json() == {"standing": []}
        refused: list[httpx.Response] = [
            await world.client.get(f"/v1/standing/{id_}", headers=who),
            await world.client.post(f"/v1/standing/{id_}/answer", headers=who),
            await world.client.delete(f"/v1/standing/{id_}", headers=who),
        ]
        assert [problem(answer) for answer in refused] == [(404, "not-found")] * 3
    assert (await world.client.delete(f"/v1/standing/{id_}", headers=as_("ann", tenant))).status_code == 204
    assert problem(await world.client.get(f"/v1/standing/{id_}", headers=as_("ann", tenant))) == (404, "not-found")


async def test_a_removal_is_recorded_as_one(world: World, tenant: str) -> None:
    await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]
    removed = await world.client.delete(f"/v1/standing/{id_}", headers=as_("ann", tenant))
    async with asyncio.timeout(20):
        while not (
            recorded := await world.library.execute(
                "SELECT action, object FROM trail.records WHERE request = %s", removed.headers["request-id"]
            )
        ):
            await asyncio.sleep(0.05)
    assert recorded == [("standing.remove", f"question:{id_}")]


# Limits


async def test_a_principal_keeps_as_many_questions_as_the_setting_says(world: World, tenant: str) -> None:
    await put(world, tenant)
    async with service_over(world.library, serve={"standing_questions": 1}) as (client, _):
        request = {"question": QUESTION, "keep": True}
        first = await client.post("/v1/answers", json=request, headers=as_("ann", tenant))
        assert first.status_code == 200
        second = await client.post("/v1/answers", json=request, headers=as_("ann", tenant))
        assert problem(second) == (422, "bad-query")
        assert "you have 1 standing questions" in second.json()["detail"]
        assert (await client.post("/v1/answers", json=request, headers=as_("bob", tenant))).status_code == 200


async def test_questions_that_are_answered_at_once_have_no_more_room_together(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room was looked for before the answers, which take a minute, and each of them found some."""
    await put(world, tenant)
    async with service_over(world.library, serve={"standing_questions": 1}) as (client, service):
        looked = asyncio.Barrier(2)
        check = service.standing.check_room

        async def both_before_either_is_kept(*arguments: Any) -> datetime:
            since = await check(*arguments)
            await looked.wait()
            return since

        kept = service.standing.keep
        turn = asyncio.Lock()

        async def one_after_the_other(*arguments: Any, **fields: Any) -> Any:
            async with turn:
                return await kept(*arguments, **fields)

        monkeypatch.setattr(service.standing, "check_room", both_before_either_is_kept)
        monkeypatch.setattr(service.standing, "keep", one_after_the_other)
        request = {"question": QUESTION, "keep": True}
        answers = [client.post("/v1/answers", json=request, headers=as_("ann", tenant)) for _ in range(2)]
        assert sorted(answer.status_code for answer in await asyncio.gather(*answers)) == [200, 422]
    listed = (await world.client.get("/v1/standing", headers=as_("ann", tenant))).json()["standing"]
    assert len(listed) == 1


async def test_two_requests_that_keep_a_question_at_the_same_moment_exceed_no_limit(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both counted the questions before either had stored its own."""
    await put(world, tenant)
    await keep(world, tenant)
    count, store = table.count, table.store
    counted, all_counted = 0, asyncio.Event()

    async def count_too(*arguments: Any) -> int:
        nonlocal counted
        number = await count(*arguments)
        counted += 1
        if counted == 4:  # each before its answer, and each before it is stored
            all_counted.set()
        return number

    async def after_both_counted(*arguments: Any) -> bool:
        with suppress(TimeoutError):  # the other one waits
            async with asyncio.timeout(2.0):
                await all_counted.wait()
        return await store(*arguments)

    monkeypatch.setattr(table, "count", count_too)
    monkeypatch.setattr(table, "store", after_both_counted)
    serve = {"standing_questions": 2, "search_seconds": 400.0}
    async with service_over(world.library, serve=serve) as (client, service):
        looked, check = asyncio.Barrier(2), service.standing.check_room

        async def both_before_either_is_kept(*arguments: Any) -> datetime:
            since = await check(*arguments)
            await looked.wait()
            return since

        monkeypatch.setattr(service.standing, "check_room", both_before_either_is_kept)
        request = {"question": QUESTION, "keep": True}
        answers = [client.post("/v1/answers", json=request, headers=as_("ann", tenant)) for _ in range(2)]
        assert sorted(answer.status_code for answer in await asyncio.gather(*answers)) == [200, 422]
    assert counted == 4
    listed = (await world.client.get("/v1/standing", headers=as_("ann", tenant))).json()["standing"]
    assert len(listed) == 2


async def test_requests_that_wait_to_keep_a_question_are_refused_in_time(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waited for all before it, without a limit, and then had the whole time of a request."""
    await put(world, tenant)
    storing, go_on = asyncio.Event(), asyncio.Event()

    async def never(*_: Any) -> bool:
        storing.set()
        await go_on.wait()
        return False

    monkeypatch.setattr(table, "store", never)
    async with service_over(world.library) as (client, service):
        request = {"question": QUESTION, "keep": True}

        async def ask() -> httpx.Response:
            return await client.post("/v1/answers", json=request, headers=as_("ann", tenant))

        monkeypatch.setattr(service.standing, "_seconds", 600.0)
        first = asyncio.create_task(ask())
        try:
            await storing.wait()
            monkeypatch.setattr(service.standing, "_seconds", 2.0)
            async with asyncio.timeout(50):
                assert problem(await ask()) == (503, "unavailable")
        finally:
            go_on.set()
            await cancel_and_wait([first])


async def test_an_answer_within_a_conversation_cannot_be_stored(world: World, tenant: str) -> None:
    await put(world, tenant)
    turns = [{"question": "what is a dam", "answer": "A wall."}]
    for more in ({"turns": turns}, {"history": True}):
        answer = await world.client.post(
            "/v1/answers", json={"question": QUESTION, "keep": True, **more}, headers=as_("ann", tenant)
        )
        assert problem(answer) == (422, "bad-query")


async def test_a_streamed_answer_is_stored_too_and_one_without_keep_is_not(world: World, tenant: str) -> None:
    await put(world, tenant)
    request = {"question": QUESTION, "stream": True}
    answer = await world.client.post("/v1/answers", json=request | {"keep": True}, headers=as_("ann", tenant))
    await world.client.post("/v1/answers", json=request, headers=as_("ann", tenant))
    [entry] = (await world.client.get("/v1/standing", headers=as_("ann", tenant))).json()["standing"]
    assert f'"standing_id": "{entry["id"]}"' in answer.text
