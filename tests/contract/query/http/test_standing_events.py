"""The events about standing questions, on real stores: they name the question, its sentences and what happened, and no
content."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

import pytest

from pipeline.analysis import memberships
from pipeline.analysis.task import Services
from pipeline.core.identity import document_id
from pipeline.kafka.producer import Stored
from pipeline.stores.postgres import Connection
from query.embedding.embedders import QueryEmbedder
from query.standing import task, word_index
from query.standing.task import StandingTask
from query.standing.word_index import WordIndexes, best
from query.standing.words import of_passage
from tests.contract.query.http.test_standing import DAM, QUESTION, groups, keep, put, show
from tests.support.pipeline.delivered import delivered
from tests.support.query.generation_query_kit import Site
from tests.support.query.http_kit import World
from tests.support.query.library import access, deletion, document
from topics.messages import AnswerInvalidated, DocumentIndexed, IdentityChanged, Message

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


class Published:
    """A producer that remembers its messages."""

    def __init__(self) -> None:
        self.messages: list[AnswerInvalidated] = []

    async def send(self, _: object, message: AnswerInvalidated) -> asyncio.Future[Stored]:
        self.messages.append(message)
        return delivered()


async def events(world: World | Site, *messages: Message) -> list[AnswerInvalidated]:
    """The events that these messages cause, in one batch."""
    library, published = world.library, Published()
    services = Services(library.settings, library.pool, cast(Any, published), library.metrics)
    standing = StandingTask(services, embedders=QueryEmbedder(lambda: library.embedder))
    await standing.handle(messages)
    return published.messages


def announced(made: Any, state: str = "searchable") -> DocumentIndexed:
    return DocumentIndexed(
        tenant=made.tenant,
        source=made.source,
        external_id=made.external_id,
        observed_at=datetime.now(UTC),
        document_id=str(document_id(made.tenant, made.source, made.external_id)),
        seq=1,
        state=state,  # type: ignore[arg-type]
        generation="g1",
    )


async def test_an_edit_is_announced_once_with_the_numbers_of_its_sentences(world: World, tenant: str) -> None:
    made = await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]
    assert await events(world, announced(made)) == [], "nothing has changed"
    await world.library.put(
        made.model_copy(update={"version": made.version + 100, "content": DAM.replace("four", "five")})
    )
    counter = world.library.metrics.answers_invalidated.labels("changed")._value
    before = counter.get()
    changed = [event for event in await events(world, announced(made)) if event.change == "changed"]
    [event] = changed
    assert (str(event.question_id), event.tenant) == (id_, tenant)
    shown = await show(world, tenant, id_)
    assert {"kind": "changed", "sentences": event.sentences} in shown["changes"]
    fields = {"tenant", "source", "observed_at", "question_id", "change", "sentences", "asked_at"}
    assert set(event.model_dump()) == fields, "no content"
    assert await events(world, announced(made)) == [], "announced before"
    assert counter.get() == before + 1


async def test_a_question_counts_that_was_stored_after_the_words_of_others_were_read(world: World, tenant: str) -> None:
    indexes, passage = WordIndexes(), of_passage(tenant, "Turbines below the spillway of a reservoir.")

    async def matching() -> list[str]:
        async with world.library.pool.connection() as connection:
            return [str(id_) for id_ in best(await indexes.of(connection, tenant), passage, 9)]

    await put(world, tenant, "Boil water for tea.")
    first = (await keep(world, tenant, question="which turbines"))["standing_id"]
    assert await matching() == [first]
    second = (await keep(world, tenant, question="turbines, spillway and reservoir"))["standing_id"]
    await keep(world, tenant, question="tea with milk")
    assert sorted(await matching()) == sorted([first, second])


async def test_many_questions_of_the_last_minutes_are_read_once(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_index, "MOST_RECENT", 3)
    reads: list[str] = []
    read_all = word_index._all

    async def counted(connection: Connection, of: str) -> list[word_index.Entry]:
        reads.append(of)
        return await read_all(connection, of)

    monkeypatch.setattr(word_index, "_all", counted)
    await put(world, tenant, "Boil water for tea.")
    indexes = WordIndexes()
    for look in range(3):
        for n in range(4 if look == 0 else 1):
            await keep(world, tenant, question=f"turbines of kind {look}{n}")
        async with world.library.pool.connection() as connection:
            index, recent = await indexes.of(connection, tenant)
        assert (len(index.ids), len(recent.ids)) == (4, look)
    assert reads == [tenant]


async def test_a_question_about_everything_is_not_announced_for_every_document(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "MOST_NEW", 2)
    await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]
    for n in range(3):
        await world.library.put(document(f"{n}.md", f"{DAM} This is page {n}.", tenant=tenant, acl_tags=["user:ann"]))
    made = [document(f"{n}.md", "", tenant=tenant) for n in range(3)]
    new = [event for page in made for event in await events(world, announced(page)) if event.change == "new"]
    assert len(new) == 2
    assert len((await show(world, tenant, id_))["new_documents"]) == 2


async def test_a_question_goes_on_after_very_many_documents(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fell silent until it was asked again, also if all of the documents had been deleted."""
    monkeypatch.setattr(task, "MOST_NEW", 2)
    await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]

    made: Any = None

    async def publish(name: str) -> int:
        nonlocal made
        made = document(name, f"{DAM} This is page {name}.", tenant=tenant, acl_tags=["user:ann"])
        await world.library.put(made)
        return len([event for event in await events(world, announced(made)) if event.change == "new"])

    async def listed() -> int:
        return len((await show(world, tenant, id_))["new_documents"])

    assert [await publish(f"{n}.md") for n in range(2)] == [1, 1]
    deleted = made
    assert await publish("2.md") == 0
    await world.library.accept(deletion(deleted))
    assert await publish("3.md") == 1, "a deleted document does not count"
    assert await listed() == 2, "the deleted one is not kept in the place of another"
    monkeypatch.setattr(task, "NEW_MINUTES", 0)
    assert await publish("4.md") == 1, "the hour is over"
    assert await listed() == 2
    newest = str(document_id(tenant, made.source, made.external_id))
    assert newest in str((await show(world, tenant, id_))["new_documents"]), "the list goes on with the newest"


@pytest.mark.parametrize(("state", "change"), [("revoked", "unreadable"), ("retired", "deleted")])
async def test_a_revocation_and_a_deletion_are_announced(world: World, tenant: str, state: str, change: str) -> None:
    made = await put(world, tenant)
    await keep(world, tenant)
    await keep(world, tenant, who="bob")
    await world.library.accept(access(made, ["user:bob"]) if state == "revoked" else deletion(made))
    assert [event.change for event in await events(world, announced(made, state))] == [change]


async def test_an_edit_while_the_asker_could_not_read_is_announced_when_it_can_again(world: World, tenant: str) -> None:
    made = await put(world, tenant)
    await keep(world, tenant)
    for tags, change in ((["user:bob"], "unreadable"), (["user:ann"], None), (["user:bob"], "unreadable")):
        await world.library.accept(access(made, tags))
        assert [event.change for event in await events(world, announced(made, "revoked"))] == [
            *([change] if change else [])
        ]


async def test_a_removed_group_is_announced_to_its_members_alone(world: World, tenant: str) -> None:
    for who in ("ann", "bob"):
        await groups(world, tenant, who, ["crew"])
    await put(world, tenant, acl_tags=["crew"])
    id_ = (await keep(world, tenant))["standing_id"]
    await keep(world, tenant, who="bob")
    left = IdentityChanged(tenant=tenant, source="wiki", principal="ann", groups=[], observed_at=datetime.now(UTC))
    handling = asyncio.create_task(events(world, left))
    await asyncio.sleep(0.3)
    assert not handling.done(), "the ledger does not have the change yet"
    await groups(world, tenant, "ann", [])
    assert [(str(event.question_id), event.change) for event in await handling] == [(id_, "unreadable")]


async def test_a_record_of_a_later_year_delays_the_events_of_others_no_longer_than_any_other(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger refuses it, so that its membership never comes."""
    monkeypatch.setattr(memberships, "APPLY_SECONDS", 0.5)
    made = await put(world, tenant)
    id_ = (await keep(world, tenant))["standing_id"]
    later = datetime.now(UTC).replace(year=9998)
    forged = [
        IdentityChanged(tenant=tenant, source=f"s{n}", principal="ann", groups=[], observed_at=later) for n in range(3)
    ]
    await world.library.accept(deletion(made))
    async with asyncio.timeout(60):
        handled = await events(world, *forged, announced(made, "retired"))
    assert [(str(event.question_id), event.change) for event in handled] == [(id_, "deleted")]


# New passages


async def test_a_new_passage_that_the_answer_would_be_made_from_is_announced(world: World, tenant: str) -> None:
    await put(world, tenant, "The reservoir lies in the hills.")
    id_ = (await keep(world, tenant))["standing_id"]
    fits = document("new.md", DAM, tenant=tenant, acl_tags=["user:ann"])
    unlike = document("tea.md", "Boil water for tea.", tenant=tenant, acl_tags=["user:ann"])
    await world.library.put(fits, unlike)
    [event] = await events(world, announced(unlike), announced(fits))
    assert (str(event.question_id), event.change) == (id_, "new")
    shown = await show(world, tenant, id_)
    assert (shown["state"], shown["new_documents"]) == ("invalidated", [str(await world.id(tenant, "new.md"))])
    assert await events(world, announced(fits)) == [], "announced before"
    await world.library.accept(access(fits, ["user:bob"]))
    assert (await show(world, tenant, id_))["new_documents"] == [], "its asker may not read it any more"


async def test_a_long_document_of_passages_that_all_fit_is_announced_once(world: World, tenant: str) -> None:
    """A file of a thousand passages made a thousand events for each question."""
    await put(world, tenant, "The reservoir lies in the hills.")
    id_ = (await keep(world, tenant))["standing_id"]
    paragraphs = [f"The reservoir of the dam feeds {n} turbines in the hall. " * 12 for n in range(3)]
    fits = document("new.md", "\n\n".join(paragraphs), tenant=tenant, acl_tags=["user:bob"])
    await world.library.put(fits)
    chunks = "SELECT count(*) FROM manifests m, unnest(m.chunk_ids) WHERE m.document_id = %s"
    assert (await world.library.execute(chunks, await world.id(tenant, "new.md")))[0][0] > 2
    assert await events(world, announced(fits)) == [], "its asker may not read it"
    await world.library.accept(access(fits, ["user:ann"]))
    [event] = await events(world, announced(fits))
    assert (str(event.question_id), event.change) == (id_, "new")
    await world.library.accept(access(fits, ["user:ann", "user:bob"]))
    assert await events(world, announced(fits)) == [], "announced before"


async def test_a_question_without_an_answer_learns_of_the_first_passage_for_it(world: World, tenant: str) -> None:
    await put(world, tenant, "Boil water for tea.")
    await keep(world, tenant)
    fits = document("new.md", DAM, tenant=tenant, acl_tags=["user:ann"])
    await world.library.put(fits)
    assert [event.change for event in await events(world, announced(fits))] == ["new"]


@pytest.mark.parametrize("why", ["another reader", "another tenant", "another source"])
async def test_a_new_passage_outside_of_a_questions_access_and_filters_is_not_announced(
    world: World, tenant: str, why: str
) -> None:
    await put(world, tenant, "The reservoir lies in the hills.")
    filters = {"filters": {"sources": ["wiki"]}} if why == "another source" else {}
    await keep(world, tenant, question=QUESTION, **filters)
    fits = document(
        "new.md",
        DAM,
        tenant=f"{tenant}x" if why == "another tenant" else tenant,
        source="mail" if why == "another source" else "wiki",
        acl_tags=["user:bob" if why == "another reader" else "user:ann"],
    )
    await world.library.put(fits)
    assert await events(world, announced(fits)) == []


async def test_a_passage_that_only_keyword_search_finds_is_announced(world: World, tenant: str) -> None:
    question = "what has to be done after the failure KB5034441"
    await put(world, tenant, "The failure was reported after lunch.")
    id_ = (await keep(world, tenant, question=question))["standing_id"]
    text = " ".join(f"Step {n} moves valve{n} towards pump{n}." for n in range(9))
    unlike = document("list.md", text, tenant=tenant, acl_tags=["user:ann"])
    named = document("kb.md", f"{text} It mends KB5034441.", tenant=tenant, acl_tags=["user:ann"])
    hidden = document("hidden.md", f"{text} It mends kb5034441.", tenant=tenant, acl_tags=["user:bob"])
    await world.library.put(unlike, named, hidden)
    [event] = await events(world, announced(unlike), announced(named), announced(hidden))
    assert (str(event.question_id), event.change) == (id_, "new")
    assert (await show(world, tenant, id_))["new_documents"] == [str(await world.id(tenant, "kb.md"))]
    assert await events(world, announced(named)) == [], "announced before"


async def test_a_question_of_another_models_vectors_learns_of_a_new_passage(world: World, tenant: str) -> None:
    await put(world, tenant, "Boil water for tea.")
    id_ = (await keep(world, tenant))["standing_id"]
    await world.library.execute(
        "UPDATE standing_questions SET probe = NULL, probe_generation = 'g0', words = NULL WHERE tenant = %s",
        tenant,
    )
    fits = document("new.md", DAM, tenant=tenant, acl_tags=["user:ann"])
    await world.library.put(fits)
    assert [str(event.question_id) for event in await events(world, announced(fits))] == [id_]
    [row] = await world.library.execute(
        "SELECT probe_generation, cardinality(words) > 0 FROM standing_questions WHERE tenant = %s", tenant
    )
    assert row == ("g1", True)


async def test_the_words_of_very_many_questions_take_a_bounded_amount_of_memory(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty thousand long questions of one tenant took 540 MiB of the worker that announces the changes of all."""
    monkeypatch.setattr(word_index, "MOST_TENANT_NUMBERS", 25)
    monkeypatch.setattr(word_index, "MOST_NUMBERS", 45)
    tenants = [tenant, f"{tenant}-b", f"{tenant}-c"]
    newest: dict[str, set[UUID]] = {}
    for owner in tenants:
        rows = await world.library.execute(
            "INSERT INTO standing_questions (tenant, id, principal, question, request, sentences, generation, is_full,"
            " words, names, words_floor, asked_at) SELECT %s, gen_random_uuid(), 'ann', 'q', '{}', '[]', 'g', true,"
            " array(SELECT generate_series(1::bigint, 9)), '{99}', 3, now() - day * interval '1 day'"
            " FROM generate_series(1, 5) day RETURNING asked_at, id",
            owner,
        )
        newest[owner] = {id_ for _, id_ in sorted(rows)[-2:]}
    indexes = word_index.WordIndexes()
    async with world.library.pool.connection() as connection:
        for owner in tenants:
            index, _ = await indexes.of(connection, owner)
            assert set(index.ids) == newest[owner]
            assert indexes._known.currsize <= 45
