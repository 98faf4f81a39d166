"""Answers on the real stores, the queue that doubtful ones wait in, and feedback."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from pipeline.retention import Retention
from pipeline.settings import RetentionSettings
from query import review
from query.access import Caller
from query.answers.answers import Answers
from query.answers.model import NO_INFORMATION, Answer
from query.answers.openai_chat import OpenAIChat
from query.conversations import History, Piece
from query.material import CallerClass, Material, Question
from query.model import BadQuery
from query.modes import Modes
from query.review import Feedback, Waiting
from query.settings import RetrievalSettings
from tests.answers_kit import settings
from tests.fakes.chat import UNSUPPORTED, FakeChat
from tests.library import Library, access, deletion, document

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


async def asked(library: Library, tenant: str, *tags: str, **faults: object) -> Answer:
    async with FakeChat() as fake, answers(library, fake) as ready:
        for name, value in faults.items():
            setattr(fake.faults, name, value)
        return await ready.whole(Question(QUESTION), await library.caller(tenant, *tags))


async def waiting(library: Library, operator: Caller, **fields: object) -> list[Waiting]:
    async with library.pool.connection() as connection:
        return await review.waiting(connection, operator, **fields)  # type: ignore[arg-type]


# Answers


async def test_an_answer_from_both_stores_cites_what_the_caller_may_read(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await asked(library, tenant, "staff")
    assert [p.result.passage.external_id for p in answer.cited] == ["pumps.md"]
    assert (answer.grounded, answer.review) == (True, False)
    assert "night" not in answer.text
    assert {"context", "chat", "check"} <= {step.name for step in answer.steps}
    both = await asked(library, tenant, "staff", "night")
    assert {p.result.passage.external_id for p in both.cited} == {"pumps.md", "night.md"}


async def test_who_may_read_nothing_is_answered_like_who_finds_nothing(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await asked(library, tenant, "nobody")
    assert (answer.text, answer.cited, answer.relevant) == (NO_INFORMATION, (), False)


async def test_a_named_document_is_read_whole(library: Library, tenant: str) -> None:
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


async def test_a_doubtful_answer_waits_for_somebody_to_look_at_it(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await asked(library, tenant, "staff", hallucinate=True)
    assert answer.review
    operator = await library.caller(tenant, "staff")
    [entry] = await waiting(library, operator)
    assert (entry.answer_id, entry.question, entry.reasons) == (answer.answer_id, QUESTION, ["unsupported"])
    assert entry.answer == answer.text
    assert entry.unsupported == [UNSUPPORTED]
    assert len(entry.chunks) == len(entry.documents) == 1
    assert json.loads(json.dumps(review.waiting_json(entry)))["support"] == pytest.approx(0.5)
    async with library.pool.connection() as connection:
        assert not await review.resolve(connection, f"{tenant}x", answer.answer_id, "wrong")
        assert await review.resolve(connection, tenant, answer.answer_id, "wrong")
        assert not await review.resolve(connection, tenant, answer.answer_id, "right")
    assert await waiting(library, operator) == []


async def test_an_operator_reads_no_answer_made_of_what_it_may_not_read(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await asked(library, tenant, "staff", "night", hallucinate=True)
    for tags in (("staff",), ("night",), ()):
        [entry] = await waiting(library, await library.caller(tenant, *tags))
        assert (entry.answer_id, entry.answer, entry.unsupported) == (answer.answer_id, None, None)
        assert len(entry.documents) == 2
    [entry] = await waiting(library, await library.caller(tenant, "staff", "night"))
    assert entry.answer == answer.text


@pytest.mark.parametrize("change", ["revoked", "deleted"])
async def test_an_answer_goes_with_the_access_to_its_documents(library: Library, tenant: str, change: str) -> None:
    made_of = document("pumps.md", "The reactor is cooled by two pumps.", tenant=tenant)
    await library.put(made_of)
    await asked(library, tenant, "staff", hallucinate=True)
    operator = await library.caller(tenant, "staff")
    assert (await waiting(library, operator))[0].answer is not None
    await library.accept(access(made_of, ["board"]) if change == "revoked" else deletion(made_of))
    assert (await waiting(library, operator))[0].answer is None


async def test_another_tenants_operator_sees_nothing(library: Library, tenant: str) -> None:
    await put(library, tenant)
    await asked(library, tenant, "staff", hallucinate=True)
    other = await library.caller(f"{tenant}x", "staff")
    assert await waiting(library, other) == []
    async with library.pool.connection() as connection:
        assert await review.given(connection, other.tenant) == []


class Remembering:
    """Material with a member's own history in it."""

    def __init__(self, modes: Modes) -> None:
        self.modes = modes

    async def gather(self, question: Question, caller: Caller, klass: CallerClass) -> Material:
        at = datetime.now(UTC)
        history = History("whole", [Piece("I am ill.", at, at, 4)], 0, 4)
        return replace(await self.modes.gather(question, caller, klass), history=history)


async def test_what_was_written_with_somebodys_history_is_not_kept(library: Library, tenant: str) -> None:
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


async def test_a_queue_that_is_away_holds_no_answer_up(library: Library, tenant: str) -> None:
    await put(library, tenant)
    await library.execute("ALTER TABLE answer_reviews RENAME TO answer_reviews_away")
    try:
        answer = await asked(library, tenant, "staff", hallucinate=True)
    finally:
        await library.execute("ALTER TABLE answer_reviews_away RENAME TO answer_reviews")
    assert (answer.review, answer.reasons) == (False, ("unsupported",))
    assert next(step for step in answer.steps if step.name == "review").degraded


async def test_what_is_old_goes(library: Library, tenant: str) -> None:
    await put(library, tenant)
    first = await asked(library, tenant, "staff", hallucinate=True)
    await library.execute(
        "UPDATE answer_reviews SET asked_at = now() - interval '31 days' WHERE answer_id = %s", first.answer_id
    )
    second = await asked(library, tenant, "staff", hallucinate=True)
    await Retention(library.pool, library.metrics, RetentionSettings()).turn()
    assert await library.execute("SELECT answer_id FROM answer_reviews WHERE tenant = %s", tenant) == [
        (second.answer_id,)
    ]


# Feedback


async def test_one_voice_a_person(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await asked(library, tenant, "staff", hallucinate=True)
    async with library.pool.connection() as connection:
        for giver, thumb in (("ann", "up"), ("ann", "down"), ("bob", "down")):
            await review.give(connection, tenant, giver, Feedback(thumb, answer.answer_id, note="hm"))  # type: ignore[arg-type]
        given = await review.given(connection, tenant)
    [(names,)] = await library.execute(
        "SELECT string_agg(f::text, ' ') FROM answer_feedback f WHERE tenant = %s", tenant
    )
    assert [(g.verdict, g.answer_id, g.note) for g in given] == [("down", answer.answer_id, "hm")] * 2
    assert "ann" not in names
    [entry] = await waiting(library, await library.caller(tenant, "staff"))
    assert (entry.up, entry.down) == (0, 2)


@pytest.mark.parametrize(
    "feedback",
    [
        Feedback("up"),
        Feedback("up", uuid4(), uuid4()),
        Feedback("up", uuid4(), note="x" * 2_001),
        Feedback("up", chunk_id=uuid4(), query="a\x00b"),
    ],
)
async def test_feedback_that_cannot_be_stored(library: Library, tenant: str, feedback: Feedback) -> None:
    async with library.pool.connection() as connection:
        with pytest.raises(BadQuery):
            await review.give(connection, tenant, "ann", feedback)


async def test_the_list_is_bounded(library: Library, tenant: str) -> None:
    with pytest.raises(BadQuery):
        await waiting(library, await library.caller(tenant), limit=0)
