"""Answers on the real stores, the queue that doubtful ones wait in, and feedback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from pipeline.maintenance.retention import Retention
from pipeline.runtime.settings import RetentionSettings
from query.access.callers import Caller
from query.answers import review
from query.answers.answers import Answers
from query.answers.model import NO_INFORMATION, Answer
from query.answers.openai_chat import OpenAIChat
from query.answers.review import Feedback, ReviewEntry
from query.model import BadQuery, CallerClass
from query.modes.gather import Modes
from query.modes.history import History, Piece
from query.modes.material import Material, Question
from query.settings import RetrievalSettings
from tests.fakes.chat import UNSUPPORTED, FakeChat
from tests.support.query.answers_kit import settings
from tests.support.query.library import Library, access, deletion, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

QUESTION = "How is the reactor cooled by its pumps?"


@asynccontextmanager
async def answers(library: Library, fake: FakeChat) -> AsyncIterator[Answers]:
    by = settings(fake)
    chat = OpenAIChat(by)
    try:
        yield Answers(Modes(library.search, library.pool, RetrievalSettings(), by), chat, library.pool, by)
    finally:
        await chat.aclose()


async def put(library: Library, tenant: str) -> None:
    await library.put(
        document("pumps.md", "The reactor is cooled by two pumps.", tenant=tenant, acl_tags=["staff"]),
        document("night.md", "The reactor pumps are serviced by night.", tenant=tenant, acl_tags=["night"]),
    )


async def answer_question(library: Library, tenant: str, *tags: str, **faults: object) -> Answer:
    async with FakeChat() as fake, answers(library, fake) as ready:
        for name, value in faults.items():
            setattr(fake.faults, name, value)
        return await ready.whole(Question(QUESTION), await library.caller(tenant, *tags))


async def review_queue(library: Library, operator: Caller, **fields: object) -> list[ReviewEntry]:
    async with library.pool.connection() as connection:
        return await review.list_pending(connection, operator, **fields)  # type: ignore[arg-type]


# Answers


async def test_an_answer_from_both_stores_cites_what_the_caller_may_read(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await answer_question(library, tenant, "staff")
    assert [p.result.passage.external_id for p in answer.cited] == ["pumps.md"]
    assert (answer.grounded, answer.review) == (True, False)
    assert "night" not in answer.text
    assert {"context", "chat", "check"} <= {step.name for step in answer.steps}
    both = await answer_question(library, tenant, "staff", "night")
    assert {p.result.passage.external_id for p in both.cited} == {"pumps.md", "night.md"}


async def test_a_caller_without_readable_documents_is_answered_with_no_information(
    library: Library, tenant: str
) -> None:
    await put(library, tenant)
    answer = await answer_question(library, tenant, "nobody")
    assert (answer.text, answer.cited, answer.relevant) == (NO_INFORMATION, (), False)


async def test_a_document_named_in_the_question_is_read_whole(library: Library, tenant: str) -> None:
    await put(library, tenant)
    [(named,)] = await library.execute(
        "SELECT id FROM documents WHERE tenant = %s AND external_id = 'pumps.md'", tenant
    )
    async with FakeChat() as fake, answers(library, fake) as ready:
        caller = await library.caller(tenant, "staff", "night")
        answer = await ready.whole(Question(QUESTION, documents=(named,)), caller)
    assert answer.mode == "focused"
    assert "night.md" not in {p.result.passage.external_id for p in answer.cited}


# The queue


async def test_a_doubtful_answer_is_queued_for_review(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await answer_question(library, tenant, "staff", hallucinate=True)
    assert answer.review
    operator = await library.caller(tenant, "staff")
    [entry] = await review_queue(library, operator)
    assert (entry.answer_id, entry.question, entry.reasons) == (answer.answer_id, QUESTION, ["unsupported"])
    assert entry.answer == answer.text
    assert entry.unsupported == [UNSUPPORTED]
    assert len(entry.chunks) == len(entry.documents) == 1
    assert json.loads(json.dumps(review.entry_json(entry)))["support"] == pytest.approx(0.5)
    async with library.pool.connection() as connection:
        assert not await review.resolve(connection, f"{tenant}x", answer.answer_id, "wrong")
        assert await review.resolve(connection, tenant, answer.answer_id, "wrong")
        assert not await review.resolve(connection, tenant, answer.answer_id, "right")
    assert await review_queue(library, operator) == []


async def test_the_review_queue_hides_answers_made_of_documents_the_operator_may_not_read(
    library: Library, tenant: str
) -> None:
    await put(library, tenant)
    answer = await answer_question(library, tenant, "staff", "night", hallucinate=True)
    for tags in (("staff",), ("night",), ()):
        [entry] = await review_queue(library, await library.caller(tenant, *tags))
        assert (entry.answer_id, entry.answer, entry.unsupported) == (answer.answer_id, None, None)
        assert len(entry.documents) == 2
    [entry] = await review_queue(library, await library.caller(tenant, "staff", "night"))
    assert entry.answer == answer.text


@pytest.mark.parametrize("change", ["revoked", "deleted"])
async def test_a_queued_answer_is_hidden_once_its_document_is_revoked_or_deleted(
    library: Library, tenant: str, change: str
) -> None:
    made_of = document("pumps.md", "The reactor is cooled by two pumps.", tenant=tenant)
    await library.put(made_of)
    await answer_question(library, tenant, "staff", hallucinate=True)
    operator = await library.caller(tenant, "staff")
    assert (await review_queue(library, operator))[0].answer is not None
    await library.accept(access(made_of, ["board"]) if change == "revoked" else deletion(made_of))
    assert (await review_queue(library, operator))[0].answer is None


async def test_an_answer_whose_document_was_deleted_while_it_was_written_is_not_queued(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its erasure may be over by then, and would not come again."""
    made_of = document("pumps.md", "The reactor is cooled by two pumps.", tenant=tenant)
    await library.put(made_of)
    recording = review.record

    async def late(*arguments: Any, **fields: Any) -> bool:
        await library.accept(deletion(made_of))
        return await recording(*arguments, **fields)

    monkeypatch.setattr(review, "record", late)
    assert not (await answer_question(library, tenant, "staff", hallucinate=True)).review
    assert await review_queue(library, await library.caller(tenant, "staff")) == []


async def test_the_review_queue_is_hidden_from_other_tenants(library: Library, tenant: str) -> None:
    await put(library, tenant)
    await answer_question(library, tenant, "staff", hallucinate=True)
    other = await library.caller(f"{tenant}x", "staff")
    assert await review_queue(library, other) == []


class Remembering:
    """Material with a member's own history in it."""

    def __init__(self, modes: Modes) -> None:
        self.modes = modes

    async def gather(self, question: Question, caller: Caller, caller_class: CallerClass) -> Material:
        at = datetime.now(UTC)
        history = History("whole", [Piece("I am ill.", at, at, 4)], 0, 4)
        return replace(await self.modes.gather(question, caller, caller_class), history=history)


async def test_the_text_of_an_answer_that_used_a_members_history_is_not_stored(library: Library, tenant: str) -> None:
    await put(library, tenant)
    async with FakeChat() as fake:
        fake.faults.hallucinate = True
        by = settings(fake)
        chat = OpenAIChat(by)
        ready = Answers(
            Remembering(Modes(library.search, library.pool, RetrievalSettings(), by)), chat, library.pool, by
        )
        answer = await ready.whole(Question(QUESTION), await library.caller(tenant, "staff"))
        await chat.aclose()
    assert answer.review
    assert await library.execute(
        "SELECT answer, unsupported FROM answer_reviews WHERE answer_id = %s", answer.answer_id
    ) == [(None, None)]


async def test_an_unavailable_review_queue_does_not_block_an_answer(library: Library, tenant: str) -> None:
    await put(library, tenant)
    await library.execute("ALTER TABLE answer_reviews RENAME TO answer_reviews_away")
    try:
        answer = await answer_question(library, tenant, "staff", hallucinate=True)
    finally:
        await library.execute("ALTER TABLE answer_reviews_away RENAME TO answer_reviews")
    assert (answer.review, answer.reasons) == (False, ("unsupported",))
    assert next(step for step in answer.steps if step.name == "review").degraded


async def test_old_reviews_are_erased_by_retention(library: Library, tenant: str) -> None:
    await put(library, tenant)
    first = await answer_question(library, tenant, "staff", hallucinate=True)
    await library.execute(
        "UPDATE answer_reviews SET asked_at = now() - interval '31 days' WHERE answer_id = %s", first.answer_id
    )
    second = await answer_question(library, tenant, "staff", hallucinate=True)
    await Retention(library.pool, library.metrics, RetentionSettings()).turn()
    assert await library.execute("SELECT answer_id FROM answer_reviews WHERE tenant = %s", tenant) == [
        (second.answer_id,)
    ]


# Feedback


KEYS = [b"the installation's key, long and random"]


def digests_of_author(tenant: str, name: str, *, keys: list[bytes] = KEYS, api_key: str | None = None) -> list[bytes]:
    return review.author_digests(keys, tenant, principal=name, key=api_key)


async def give_feedback(library: Library, caller: Caller, by: list[bytes], feedback: Feedback) -> None:
    async with library.pool.connection() as connection:
        await review.store_feedback(connection, caller, by, feedback)


async def stored_feedback(library: Library, tenant: str) -> list[tuple[bytes, str, object, object]]:
    return await library.execute(
        "SELECT giver, verdict, answer_id, chunk_id FROM answer_feedback WHERE tenant = %s ORDER BY given_at", tenant
    )


async def passages(library: Library, tenant: str) -> list[UUID]:
    table = library.generation.chunk_table
    rows = await library.execute(
        f"SELECT c.id FROM {table} c JOIN documents d ON d.id = c.document_id WHERE d.tenant = %s ORDER BY 1", tenant
    )
    return [id_ for (id_,) in rows]


async def test_each_person_has_one_verdict_per_answer(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await answer_question(library, tenant, "staff", hallucinate=True)
    staff = await library.caller(tenant, "staff")
    for name, api_key, thumb in (("ann", None, "up"), ("ann", "anns-bot", "down"), ("bob", None, "down")):
        feedback = Feedback(thumb, answer.answer_id, note="hm")  # type: ignore[arg-type]
        await give_feedback(library, staff, digests_of_author(tenant, name, api_key=api_key), feedback)
    given = await library.execute("SELECT verdict, answer_id, note FROM answer_feedback WHERE tenant = %s", tenant)
    [(names,)] = await library.execute(
        "SELECT string_agg(f::text, ' ') FROM answer_feedback f WHERE tenant = %s", tenant
    )
    assert given == [("down", answer.answer_id, "hm")] * 2
    assert "ann" not in names
    [entry] = await review_queue(library, await library.caller(tenant, "staff"))
    assert (entry.up, entry.down) == (0, 2)


async def test_authors_of_feedback_cannot_be_guessed_from_the_stored_digests(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await answer_question(library, tenant, "staff")
    await give_feedback(
        library,
        await library.caller(tenant, "staff"),
        digests_of_author(tenant, "ann"),
        Feedback("up", answer.answer_id),
    )
    [(giver, *_)] = await stored_feedback(library, tenant)
    guesses = [
        text
        for kind in ("person", "token", "development")
        for text in (
            f"{tenant}\0{kind}\0ann",
            f"{tenant}|{kind}\0{tenant}\0\0ann",
            f"{tenant}|ann",
            "ann",
        )
    ]
    assert giver not in {hashlib.sha256(guess.encode()).digest() for guess in guesses}
    assert giver not in review.author_digests_of_person([b"another installation's key, as long"], tenant, "ann")
    assert giver in review.author_digests_of_person(KEYS, tenant, "ann")


async def test_each_person_has_one_verdict_per_answer_after_a_key_rotation(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await answer_question(library, tenant, "staff")
    staff, rotated = await library.caller(tenant, "staff"), [b"the new key, long and random as well", *KEYS]
    await give_feedback(library, staff, digests_of_author(tenant, "ann"), Feedback("up", answer.answer_id))
    await give_feedback(
        library, staff, digests_of_author(tenant, "ann", keys=rotated), Feedback("down", answer.answer_id)
    )
    [(giver, verdict, *_)] = await stored_feedback(library, tenant)
    assert (giver, verdict) == (digests_of_author(tenant, "ann", keys=rotated[:1])[0], "down")


async def test_feedback_about_answers_or_passages_the_caller_may_not_read_is_not_stored(
    library: Library, tenant: str
) -> None:
    await put(library, tenant)
    answer = await answer_question(library, tenant, "staff")
    mine = await passages(library, tenant)
    strangers = [
        await library.caller(tenant, "night"),
        await library.caller(tenant),
        await library.caller("another", "staff"),
    ]
    for caller in strangers:
        await give_feedback(
            library, caller, digests_of_author(caller.tenant, "eve"), Feedback("down", answer.answer_id)
        )
    staff = await library.caller(tenant, "staff")
    for invented in (Feedback("up", uuid4()), Feedback("up", chunk_id=uuid4())):
        await give_feedback(library, staff, digests_of_author(tenant, "ann"), invented)
    assert await stored_feedback(library, tenant) == []
    for passage in mine:
        await give_feedback(
            library, staff, digests_of_author(tenant, "ann"), Feedback("up", chunk_id=passage, query="pumps")
        )
    [(_, _, _, kept)] = await stored_feedback(library, tenant)
    assert await library.execute(
        f"SELECT external_id FROM documents WHERE id = (SELECT document_id FROM {library.generation.chunk_table}"
        " WHERE id = %s)",
        kept,
    ) == [("pumps.md",)]
    pumps = document("pumps.md", "The reactor is cooled by two pumps.", tenant=tenant, acl_tags=["staff"])
    await library.put(access(pumps, ["board"]))
    await give_feedback(library, staff, digests_of_author(tenant, "bob"), Feedback("down", answer.answer_id))
    assert len(await stored_feedback(library, tenant)) == 1


async def test_feedback_is_limited_to_one_row_per_passage_and_the_newest_of_a_caller(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(review, "MAX_FEEDBACK_PER_CALLER", 3)
    await library.put(*(document(f"{n}.md", f"Pump {n} hums.", tenant=tenant, acl_tags=["staff"]) for n in range(5)))
    staff, chunks = await library.caller(tenant, "staff"), await passages(library, tenant)
    assert len(chunks) == 5
    for n in range(20):
        await give_feedback(
            library, staff, digests_of_author(tenant, "ann"), Feedback("up", chunk_id=chunks[0], query=f"query {n}")
        )
    assert len(await stored_feedback(library, tenant)) == 1
    for chunk in chunks:
        await give_feedback(library, staff, digests_of_author(tenant, "ann"), Feedback("down", chunk_id=chunk))
    await give_feedback(library, staff, digests_of_author(tenant, "bob"), Feedback("up", chunk_id=chunks[0]))
    assert [(verdict, chunk) for _, verdict, _, chunk in await stored_feedback(library, tenant)] == [
        *(("down", chunk) for chunk in chunks[2:]),
        ("up", chunks[0]),
    ]


@pytest.mark.parametrize(
    "feedback",
    [
        Feedback("up"),
        Feedback("up", uuid4(), uuid4()),
        Feedback("up", uuid4(), note="x" * 2_001),
        Feedback("up", chunk_id=uuid4(), query="a\x00b"),
    ],
)
async def test_invalid_feedback_is_rejected(library: Library, tenant: str, feedback: Feedback) -> None:
    with pytest.raises(BadQuery):
        await give_feedback(library, await library.caller(tenant), digests_of_author(tenant, "ann"), feedback)


async def test_the_limit_of_the_review_list_is_validated(library: Library, tenant: str) -> None:
    with pytest.raises(BadQuery):
        await review_queue(library, await library.caller(tenant), limit=0)
