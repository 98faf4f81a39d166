"""Read your writes: a search with the token of a publication shows its changes, or reports that it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from typing import Any
from uuid import uuid4

import pytest

from penstock.wire import publication_token
from pipeline.core.publication import MAX_PUBLICATIONS, Publication, content, publications_of
from pipeline.stores.postgres import Connection
from query.access import published
from query.access.callers import Caller
from query.model import AtLeast
from tests.support.query.http_kit import World, as_, service_over
from tests.support.query.library import Event, Library, access, deletion, document
from topics.messages import IdentityChanged

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


async def seen(library: Library, events: Sequence[Event], who: str = "ann", seconds: float = 0.0) -> AtLeast:
    tenant = events[0].tenant
    outcome = await library.search.wait_for(
        publications_of(publication_token(events)), tenant, principals=[who], seconds=seconds
    )
    assert outcome is not None
    return outcome


async def test_a_change_is_seen_only_when_both_stores_have_it(library: Library, tenant: str) -> None:
    plan = document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"])
    assert not (await seen(library, [plan])).applied, "published, and not accepted yet"
    [id_] = await library.accept(plan)
    assert not (await seen(library, [plan])).applied
    await library.keywords.converge(library.generation, [id_])
    assert not (await seen(library, [plan])).applied
    await library.vectors.converge(library.generation, [id_])
    assert (await seen(library, [plan])).applied
    edited = plan.model_copy(update={"version": plan.version + 1, "content": "Leave the crane."})
    assert (await seen(library, [plan, edited])).pending == 1, "a token names the newest version of a document"
    await library.accept(edited)
    await library.vectors.converge(library.generation, [id_])
    assert not (await seen(library, [edited])).applied
    await library.keywords.converge(library.generation, [id_])
    assert (await seen(library, [plan, edited])).applied


async def test_a_wait_ends_when_the_change_is_there(library: Library, tenant: str) -> None:
    plan = document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"])
    waiting = asyncio.create_task(seen(library, [plan], seconds=60))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await library.put(plan)
    async with asyncio.timeout(30):
        assert (await waiting).applied


async def test_a_change_of_access_is_seen_when_both_stores_follow(library: Library, tenant: str) -> None:
    plan = document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:bob"])
    await library.put(plan)
    granted = access(plan, ["user:ann", "user:bob"])
    assert not (await seen(library, [granted])).applied
    [id_] = await library.accept(granted)
    assert not (await seen(library, [granted])).applied
    await library.converge(id_)
    assert (await seen(library, [granted])).applied


async def test_a_deletion_is_seen_as_soon_as_it_is_accepted(library: Library, tenant: str) -> None:
    plan = document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"])
    await library.put(plan)
    gone = deletion(plan)
    assert not (await seen(library, [gone])).applied
    await library.accept(gone)
    assert (await seen(library, [gone])).applied


async def test_a_token_reveals_nothing_about_what_may_not_be_read(library: Library, tenant: str) -> None:
    """For somebody who may not read a document, each answer is that for a document that does not exist."""
    secret = document("secret.md", "Move the crane.", tenant=tenant, acl_tags=["user:bob"])
    busy = document("busy.md", "The crane moves.", tenant=tenant, acl_tags=["user:bob"])
    await library.put(secret)
    await library.accept(busy)
    absent = document("absent.md", "Nothing.", tenant=tenant)
    for of in (secret, busy, absent):
        answers = [(await seen(library, [change], "eve")).applied for change in (of, access(of, ["x"]), deletion(of))]
        assert answers == [False, False, True], of.external_id
    assert (await seen(library, [secret], "bob")).applied


async def test_a_token_of_another_tenant_is_never_seen(library: Library, tenant: str) -> None:
    plan = document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"])
    await library.put(plan)
    other = await library.search.wait_for(
        publications_of(publication_token([plan])), f"{tenant}-2", principals=["ann"], seconds=0
    )
    assert other is not None
    assert not other.applied


async def test_the_largest_token_is_looked_at_whole_only_in_the_beginning_and_at_the_end(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting requests with 10,000 changes each kept the process from serving others."""
    looks = []
    pending = published.pending

    async def counted(connection: Connection, caller: Caller, changes: Collection[Publication]) -> Any:
        looks.append(len(changes))
        return await pending(connection, caller, changes)

    monkeypatch.setattr(published, "pending", counted)
    made_up = [content(uuid4(), 1) for _ in range(MAX_PUBLICATIONS)]
    outcome = await library.search.wait_for(made_up, tenant, principals=["ann"], seconds=5)
    assert outcome is not None
    assert outcome.pending == MAX_PUBLICATIONS
    first, *between, last_part, last_rest = looks
    assert (first, last_part + last_rest) == (MAX_PUBLICATIONS, MAX_PUBLICATIONS)
    assert between
    assert set(between) == {published.PART}


async def test_changes_beyond_the_first_part_are_waited_for(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "PART", 1)
    plans = [document(f"{n}.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"]) for n in range(3)]
    waiting = asyncio.create_task(seen(library, plans, seconds=60))
    for plan in plans:
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await library.put(plan)
    async with asyncio.timeout(30):
        assert (await waiting).applied
    missing = document("missing.md", "Nothing.", tenant=tenant)
    assert (await seen(library, [missing, *plans], seconds=0.3)).pending == 1


# Over HTTP


def groups(tenant: str, *names: str) -> IdentityChanged:
    at = document("x", "").observed_at
    return IdentityChanged(tenant=tenant, source="wiki", principal="ann", groups=list(names), observed_at=at)


async def test_a_search_waits_for_the_token_in_its_body_or_header(world: World, tenant: str) -> None:
    plan = document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"])
    token = publication_token([plan])
    ann, request = as_("ann", tenant), {"query": "crane", "wait_seconds": 0}
    for body, headers in ((request | {"at_least": token}, ann), (request, ann | {"X-Penstock-At-Least": token})):
        early = (await world.client.post("/v1/search", json=body, headers=headers)).json()
        assert (early["results"], early["at_least"]["applied"], early["at_least"]["pending"]) == ([], False, 1)
        assert "1 of 1 published changes cannot be seen" in early["degraded"][0]
    patient = {"query": "crane", "at_least": token, "wait_seconds": 30}
    waiting = asyncio.create_task(world.client.post("/v1/search", json=patient, headers=ann))
    await asyncio.sleep(0.2)
    await world.library.put(plan)
    late = (await waiting).json()
    assert [result["external_id"] for result in late["results"]] == ["plan.md"]
    assert (late["at_least"]["applied"], late["degraded"]) == (True, [])
    without = (await world.client.post("/v1/search", json={"query": "crane"}, headers=ann)).json()
    assert without["at_least"] is None


async def test_an_answer_waits_whole_and_streamed(world: World, tenant: str) -> None:
    plan = document("plan.md", "The crane stands in Oslo.", tenant=tenant, acl_tags=["user:ann"])
    await world.library.put(plan)
    missing = document("other.md", "Elsewhere.", tenant=tenant, acl_tags=["user:ann"])
    request = {"question": "Where does the crane stand?", "wait_seconds": 0}
    for events, applied in (([plan], True), ([plan, missing], False)):
        body = request | {"at_least": publication_token(events)}
        answer = (await world.client.post("/v1/answers", json=body, headers=as_("ann", tenant))).json()
        assert answer["at_least"]["applied"] is applied
        assert any("cannot be seen" in note for note in answer["notes"]) is not applied
        streamed = await world.client.post("/v1/answers", json=body | {"stream": True}, headers=as_("ann", tenant))
        last = streamed.text.split("event: done\n", 1)[1].partition("data: ")[2].splitlines()[0]
        assert json.loads(last)["at_least"]["applied"] is applied


async def test_what_is_no_token_is_refused(world: World, tenant: str) -> None:
    ann = as_("ann", tenant)
    body = await world.client.post("/v1/search", json={"query": "crane", "at_least": "1.x"}, headers=ann)
    header = await world.client.post(
        "/v1/search", json={"query": "crane"}, headers=ann | {"X-Penstock-At-Least": "yesterday"}
    )
    assert (body.status_code, header.status_code) == (422, 422)
    assert body.json()["errors"][0]["pointer"] == "/at_least"
    assert "X-Penstock-At-Least is no token of a publication" in header.json()["detail"]


async def test_other_searches_run_while_many_wait_for_changes(world: World, tenant: str) -> None:
    """More requests wait than there are slots for searches."""
    missing = document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"])
    body = {"query": "crane", "at_least": publication_token([missing]), "wait_seconds": 30}
    waiting = [
        asyncio.create_task(world.client.post("/v1/search", json=body, headers=as_(f"person{n}", tenant)))
        for n in range(12)
    ]
    try:
        await asyncio.sleep(0.5)
        async with asyncio.timeout(20):
            other = await world.client.post("/v1/search", json={"query": "crane"}, headers=as_("bob", tenant))
        assert other.status_code == 200
        assert not any(task.done() for task in waiting)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_access_that_is_lost_during_the_wait_counts(world: World, tenant: str) -> None:
    """The access of the caller is read after the wait, not before it."""
    shared = document("shared.md", "The crane.", tenant=tenant, acl_tags=["crew"])
    await world.library.put(shared)
    await world.paths.learn([groups(tenant, "crew")])
    missing = document("plan.md", "Move it.", tenant=tenant, acl_tags=["user:ann"])
    body = {"query": "crane", "at_least": publication_token([missing]), "wait_seconds": 3}
    waiting = asyncio.create_task(world.client.post("/v1/search", json=body, headers=as_("ann", tenant)))
    await asyncio.sleep(0.5)
    await world.paths.learn([groups(tenant)])
    assert (await waiting).json()["results"] == []


async def test_looks_of_waiting_requests_take_turns_in_the_slots_of_searches(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, most = 0, 0
    pending = published.pending

    async def slow(connection: Connection, caller: Caller, changes: Collection[Publication]) -> Any:
        nonlocal looking, most
        looking += 1
        most = max(most, looking)
        try:
            await asyncio.sleep(0.05)
            return await pending(connection, caller, changes)
        finally:
            looking -= 1

    monkeypatch.setattr(published, "pending", slow)
    missing = document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"])
    body = {"query": "crane", "at_least": publication_token([missing]), "wait_seconds": 1}
    async with service_over(library, serve={"concurrent": 1, "waiting_seconds": 60}) as (client, _):
        responses = await asyncio.gather(
            *(client.post("/v1/search", json=body, headers=as_("ann", tenant)) for _ in range(4))
        )
    assert [response.status_code for response in responses] == [200] * 4
    assert most == 1
