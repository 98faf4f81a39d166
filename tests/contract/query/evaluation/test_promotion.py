"""Golden questions from reviewed answers and from feedback: by whom, of what, and that they are erased with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.main import app
from pipeline.core.identity import document_id
from pipeline.ledger.personal import PLACES, Scope, Subject, erase
from pipeline.maintenance.retention import Retention
from pipeline.runtime.settings import RetentionSettings
from query.answers import review
from query.answers.answers import Answers
from query.answers.model import Answer
from query.answers.openai_chat import OpenAIChat
from query.answers.review import Feedback
from query.evaluation import golden as judgements
from query.evaluation.golden import Golden, Judged
from query.evaluation.promotion import Asker, anchor, candidates, promote
from query.modes.gather import Modes
from query.modes.material import Question
from query.settings import RetrievalSettings
from tests.fakes.chat import FakeChat
from tests.support.query.answers_kit import settings
from tests.support.query.library import Library, access, deletion, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

QUESTION = "How is the reactor cooled by its pumps?"
GIVER = b"digest of a person"


async def put(library: Library, tenant: str) -> None:
    await library.put(
        document("pumps.md", "Some history first. The reactor is cooled by two pumps.", tenant=tenant),
        document("night.md", "The reactor pumps are serviced by night.", tenant=tenant, acl_tags=["night"]),
    )


async def reviewed(library: Library, tenant: str, *tags: str) -> Answer:
    """An answer that a review called right."""
    async with FakeChat() as fake:
        by = settings(fake)
        chat = OpenAIChat(by)
        fake.faults.hallucinate = True
        modes = Modes(library.search, library.pool, RetrievalSettings(), by)
        try:
            answer = await Answers(modes, chat, library.pool, by).whole(
                Question(QUESTION), await library.caller(tenant, *tags)
            )
        finally:
            await chat.aclose()
    assert answer.review
    async with library.pool.connection() as connection:
        assert await review.resolve(connection, tenant, answer.answer_id, "right")
    return answer


async def rate(library: Library, tenant: str, name: str, query: str, *tags: str) -> UUID:
    """Rate the passage of a document up for a query."""
    [(chunk,)] = await library.execute(
        f"SELECT id FROM {library.generation.chunk_table} WHERE document_id = %s", document_id(tenant, "wiki", name)
    )
    async with library.pool.connection() as connection:
        caller = await library.caller(tenant, *tags)
        await review.store_feedback(connection, caller, [GIVER], Feedback("up", chunk_id=chunk, query=query))
    return UUID(str(chunk))


async def promoted(library: Library, tenant: str, subject: UUID, *tags: str) -> list[Golden]:
    async with library.pool.connection() as connection:
        return await promote(connection, Asker(tenant, tags=tags), subject)


async def suggested(library: Library, tenant: str, *tags: str) -> list[str]:
    async with library.pool.connection() as connection:
        return [candidate.question for candidate in await candidates(connection, Asker(tenant, tags=tags))]


async def stored(library: Library, tenant: str) -> list[Golden]:
    async with library.pool.connection() as connection:
        return await judgements.load(connection, tenant)


def passages(golden: Sequence[Golden]) -> set[tuple[str, str]]:
    return {(judged.external_id, judged.anchor) for question in golden for judged in question.judged}


async def test_an_answer_that_a_review_called_right_becomes_a_golden_question(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await reviewed(library, tenant, "staff")
    assert await suggested(library, tenant, "staff") == [QUESTION]
    assert await promoted(library, tenant, answer.answer_id, "staff") == await stored(library, tenant)
    [golden] = await stored(library, tenant)
    assert (golden.text, golden.tags, golden.reference) == (QUESTION, ("staff",), answer.text)
    assert passages([golden]) == {("pumps.md", "The reactor is cooled by two pumps.")}
    async with library.pool.connection() as connection:
        left, lost = await judgements.current(connection, [golden])
    assert (left, lost) == ([golden], 0)


async def test_a_passage_that_was_rated_up_becomes_a_judgement_of_its_query(library: Library, tenant: str) -> None:
    await put(library, tenant)
    chunk = await rate(library, tenant, "pumps.md", "reactor pumps", "staff")
    await promoted(library, tenant, chunk, "staff")
    assert passages(await stored(library, tenant)) == {("pumps.md", "The reactor is cooled by two pumps.")}
    other = await rate(library, tenant, "night.md", "reactor pumps", "night")
    await promoted(library, tenant, other, "night")
    [golden] = await stored(library, tenant)
    assert {judged.external_id for judged in golden.judged} == {"pumps.md", "night.md"}
    assert golden.tags == ("staff",), "the question keeps its asker"
    assert golden.reference is None


async def test_nothing_is_promoted_that_the_asker_may_not_read(library: Library, tenant: str) -> None:
    await put(library, tenant)
    answer = await reviewed(library, tenant, "staff", "night")
    chunk = await rate(library, tenant, "night.md", "reactor pumps", "night")
    for tags in (("staff",), ("nobody",)):
        assert await suggested(library, tenant, *tags) == []
        assert await promoted(library, tenant, answer.answer_id, *tags) == []
        assert await promoted(library, tenant, chunk, *tags) == []
    assert await suggested(library, f"{tenant}x", "staff", "night") == []
    await library.accept(access(document("night.md", "", tenant=tenant), ["board"]))
    assert await suggested(library, tenant, "staff", "night") == [], "revoked meanwhile"
    assert await stored(library, tenant) == []


@pytest.mark.parametrize("change", ["deleted", "rated down", "wrong"])
async def test_nothing_is_suggested_of_deleted_documents_and_bad_answers(
    library: Library, tenant: str, change: str
) -> None:
    await put(library, tenant)
    await rate(library, tenant, "pumps.md", "reactor pumps", "staff")
    await reviewed(library, tenant, "staff")
    assert len(await suggested(library, tenant, "staff")) == 2
    if change == "deleted":
        await library.accept(deletion(document("pumps.md", "", tenant=tenant)))
    else:
        await library.execute("UPDATE answer_feedback SET verdict = 'down' WHERE tenant = %s", tenant)
        await library.execute("UPDATE answer_reviews SET resolved_as = 'wrong' WHERE tenant = %s", tenant)
    assert await suggested(library, tenant, "staff") == []


@pytest.mark.parametrize("by", ["answers", "givers", "ids"])
async def test_a_promoted_question_is_erased_with_what_it_was_made_from(library: Library, tenant: str, by: str) -> None:
    """Also with a document that was only shown to the model, because the reference may contain its text."""
    await put(library, tenant)
    answer = await reviewed(library, tenant, "staff", "night")
    chunk = await rate(library, tenant, "pumps.md", "reactor pumps", "staff")
    await promoted(library, tenant, answer.answer_id, "staff", "night")
    await promoted(library, tenant, chunk, "staff")
    await library.execute("DELETE FROM eval_judgements WHERE external_id = 'night.md'")
    [place] = [place for place in PLACES if place.table == "eval_queries"]
    nothing = {"tenant": tenant, "source": "", "names": [], "ids": [], "answers": [], "givers": [], "person": "no one"}
    erased = {
        "answers": (place.erase["person"], [answer.answer_id], {"reactor pumps"}),
        "givers": (place.erase["person"], [GIVER], {QUESTION}),
        "ids": (place.erase["document"], [document_id(tenant, "wiki", "night.md")], {"reactor pumps"}),
    }
    statement, value, left = erased[by]
    async with library.pool.connection() as connection:
        await connection.execute(statement, nothing)
    assert len(await stored(library, tenant)) == 2
    async with library.pool.connection() as connection:
        await connection.execute(statement, nothing | {by: value})
    assert {golden.text for golden in await stored(library, tenant)} == left


async def test_a_promoted_question_is_erased_after_what_it_was_made_from_was_deleted_at_its_source(
    library: Library, tenant: str
) -> None:
    await put(library, tenant)
    answer = await reviewed(library, tenant, "staff", "night")
    await promoted(library, tenant, answer.answer_id, "staff", "night")
    chunk = await rate(library, tenant, "pumps.md", "reactor pumps", "staff")
    await promoted(library, tenant, chunk, "staff")
    await library.put(deletion(document("night.md", "", tenant=tenant)))
    retention = Retention(library.pool, library.metrics, RetentionSettings())
    await retention.turn()
    assert len(await stored(library, tenant)) == 2, "not before its time"
    await library.execute(
        "UPDATE documents SET deleted_at = now() - interval '31 days' WHERE tenant = %s AND deleted_at IS NOT NULL",
        tenant,
    )
    await Retention(library.pool, library.metrics, RetentionSettings(deleted_days=0)).turn()
    assert len(await stored(library, tenant)) == 2, "0: for ever"
    await retention.turn()
    assert [golden.text for golden in await stored(library, tenant)] == ["reactor pumps"]


@pytest.mark.parametrize("subject", ["document", "person"])
async def test_nothing_is_promoted_that_was_forgotten_meanwhile(
    library: Library, tenant: str, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The erasure does not see questions that are not committed yet, and nobody erased them afterwards."""
    await put(library, tenant)
    answer = await reviewed(library, tenant, "staff")
    scope = Scope(tenant, "wiki", "ann", [document_id(tenant, "wiki", "pumps.md")], answers=[answer.answer_id])
    storing = judgements.store

    async def late(*arguments: Any) -> None:
        if subject == "document":
            await library.accept(deletion(document("pumps.md", "", tenant=tenant)))
        async with library.pool.connection() as connection:
            await erase(connection, subject, scope)
        await storing(*arguments)

    monkeypatch.setattr(judgements, "store", late)
    assert await promoted(library, tenant, answer.answer_id, "staff") == []
    assert await stored(library, tenant) == []


async def test_penstock_golden_suggests_and_promotes(library: Library, tenant: str, tmp_path: Path) -> None:
    await put(library, tenant)
    library.write_home(tmp_path)
    chunk = await rate(library, tenant, "pumps.md", "reactor pumps", "staff")

    async def golden(*arguments: str) -> Result:
        return await asyncio.to_thread(
            CliRunner().invoke,
            app,
            ["golden", *arguments, "--tenant", tenant, "--tag", "staff"],
            env={"PENSTOCK_HOME": str(tmp_path)},
        )

    assert (await golden("suggest")).stdout == f"{chunk}  reactor pumps\n"
    assert (await golden("promote", str(chunk))).stdout == "1 judgements: reactor pumps\n"
    nothing = await golden("promote", str(uuid4()))
    assert (nothing.exit_code, len(nothing.stderr.splitlines())) == (1, 1)
    assert nothing.stderr.startswith("error: nothing to promote")
    assert (
        Judged("wiki", "pumps.md", "The reactor is cooled by two pumps.") in (await stored(library, tenant))[0].judged
    )


async def test_an_anchor_is_the_sentence_that_answers_the_question() -> None:
    passage = "Old pumps were loud.\n\nThe reactor is cooled by two pumps. They run at night."
    assert anchor(QUESTION, passage) == "The reactor is cooled by two pumps."
    assert anchor("Who?", passage) == "Old pumps were loud."
    assert anchor(QUESTION, "word " * 200) == ""
