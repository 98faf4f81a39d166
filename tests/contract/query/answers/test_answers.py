"""Answers by a chat model behind a real HTTP server: what is promised, and what a model gets wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from pipeline.core.errors import Misconfigured, Retryable
from query.access.callers import Caller
from query.answers.answers import NO_MODEL, NO_ROOM, Answers
from query.answers.chat import by_settings
from query.answers.model import NO_INFORMATION, Cited, Delta, Done, Failed, Sources, answer_json, sources_json
from query.answers.openai_chat import OpenAIChat
from query.answers.prompt import Message
from query.model import BadQuery, CallerClass
from query.modes.history import History, Piece
from query.modes.material import Material, Question
from query.settings import ChatSettings
from query.telemetry import QueryMetrics
from tests.fakes.chat import UNSUPPORTED, FakeChat, Faults
from tests.support.query.answers_kit import (
    CALLER,
    PUMPS,
    QUESTION,
    answering,
    ask,
    done,
    events,
    material,
    metric,
    result,
)


@pytest.fixture
async def fake() -> AsyncIterator[FakeChat]:
    async with FakeChat() as fake:
        yield fake
        assert fake.stats.open == 0


# What is promised


async def test_an_answer_is_streamed_with_citations_and_checked_for_support(fake: FakeChat) -> None:
    metrics = QueryMetrics()
    async with answering(PUMPS, fake, metrics=metrics) as answers:
        happened = await events(answers, QUESTION)
    assert isinstance(happened[0], Sources)
    assert [p.n for p in happened[0].passages] == [1, 2, 3]
    answer = done(happened)
    deltas = [e.text for e in happened if isinstance(e, Delta)]
    assert len(deltas) > 5
    assert "".join(deltas) == answer.text
    assert "cooled by two pumps. [1]" in answer.text
    assert [e.n for e in happened if isinstance(e, Cited)] == [1, 2] == [p.n for p in answer.cited]
    assert (answer.grounded, answer.unsupported, answer.review, answer.degraded) == (True, (), False, False)
    assert (answer.support, answer.density, answer.model) == (1.0, 1.0, "copyist")
    assert answer.usage.prompt == fake.stats.prompt_tokens
    for kind, tokens in (("prompt", fake.stats.prompt_tokens), ("answer", fake.stats.answer_tokens)):
        assert metric(metrics, "penstock_query_tokens_total", kind=kind, model="copyist") == tokens > 0
    assert metric(metrics, "penstock_query_answers_total", outcome="grounded") == 1
    assert [s.name for s in answer.steps] == ["context", "chat", "check"]


async def test_the_plain_answer_has_the_documented_fields(fake: FakeChat) -> None:
    plain = json.loads(json.dumps(answer_json(await ask(PUMPS, fake, QUESTION))))
    assert {
        "answer",
        "citations",
        "steps",
        "grounded",
        "mode",
        "notes",
        "relevant",
        "model",
        "unsupported",
        "review",
        "answer_id",
    } <= set(plain)
    assert {"n", "chunk_id", "document_id", "title", "text", "source_url"} <= set(plain["citations"][0])
    assert plain["citations"][0]["title"] == "Cooling"
    assert plain["citations"][0]["text"] == PUMPS.passages[0].text


async def test_the_sources_event_has_the_fields_of_a_search_result(fake: FakeChat) -> None:
    async with answering(PUMPS, fake) as answers:
        first = (await events(answers, QUESTION))[0]
    assert isinstance(first, Sources)
    shown = json.loads(json.dumps(sources_json(first)))
    assert set(shown) == {"passages", "mode", "notes", "steps"}
    assert {"n", "chunk_id", "score", "ranks", "headings", "also", "text"} <= set(shown["passages"][0])


async def test_the_chat_request_has_no_tools_and_is_sent_once(fake: FakeChat) -> None:
    await ask(PUMPS, fake, QUESTION, answer_tokens=100)
    [requests] = fake.requests
    assert set(requests) == {"model", "messages", "max_tokens", "stream", "stream_options"}
    assert requests["max_tokens"] == 100


async def test_without_relevant_passages_the_answer_says_so_without_calling_the_model(fake: FakeChat) -> None:
    for nothing in (material(relevant=False), material(), material(*PUMPS.passages, relevant=False)):
        answer = await ask(nothing, fake, QUESTION)
        assert (answer.text, answer.relevant, answer.grounded, answer.cited) == (NO_INFORMATION, False, True, ())
    assert fake.stats.requests == 0


async def test_the_model_may_say_that_the_passages_hold_no_answer(fake: FakeChat) -> None:
    answer = await ask(PUMPS, fake, "Who painted the zeppelin hangar?")
    assert fake.stats.requests == 1
    assert (answer.text, answer.relevant, answer.grounded, answer.review) == (NO_INFORMATION, False, True, False)


async def test_without_a_model_the_passages_are_quoted() -> None:
    async with answering(PUMPS, None) as answers:
        happened = await events(answers, QUESTION)
    answer = done(happened)
    assert "> The reactor is cooled by two pumps." in answer.text
    assert [p.n for p in answer.cited] == [1, 2, 3]
    assert all(f"[{p.n}]" in answer.text for p in answer.cited)
    assert (answer.model, answer.grounded, answer.degraded) == (None, True, False)
    assert answer.notes == (NO_MODEL,)
    assert [type(e) for e in happened] == [Sources, Delta, Done]


async def test_without_a_model_the_matching_part_of_a_whole_document_is_quoted() -> None:
    parts = [result(f"Chapter {n} is about weather.", "Book", document="b", chunk_index=n) for n in range(9)]
    parts.append(result("The reactor is cooled by two pumps.", "Book", document="b", chunk_index=9))
    answer = await ask(material(*parts, whole=True, budget_tokens=5_000, mode="focused"), None, QUESTION)
    assert answer.text.startswith("> The reactor is cooled by two pumps. [10]")


async def test_notes_say_what_is_missing_from_the_material(fake: FakeChat) -> None:
    long = [result(f"The reactor number {n} is cooled by pumps. " * 40, f"Doc {n}") for n in range(8)]
    metrics = QueryMetrics()
    given = material(*long, notes=("half a store is away",))
    answer = await ask(given, fake, QUESTION, context_tokens=600, metrics=metrics)
    assert answer.notes[0] == "half a store is away"
    assert "7 passages did not fit" in answer.notes[1]
    assert metric(metrics, "penstock_query_left_out_passages_total") == 7


async def test_the_prompt_fits_the_models_window(fake: FakeChat) -> None:
    long = [result(f"The reactor number {n} is cooled by pumps. " * 40, f"Doc {n}") for n in range(20)]
    for window in (2_500, 4_000, 6_000):
        answer = await ask(material(*long), fake, QUESTION, window_tokens=window, answer_tokens=500)
        assert not answer.degraded
        assert answer.usage.prompt <= window - 500
    assert answer.usage.prompt > 3_000


async def test_a_question_that_fills_the_models_window_is_answered_with_quoted_passages(fake: FakeChat) -> None:
    answer = await ask(PUMPS, fake, f"{QUESTION} {'pump ' * 1_500}", window_tokens=2_048, answer_tokens=500)
    assert (answer.degraded, answer.notes) == (True, (NO_ROOM,))
    assert "> The reactor is cooled by two pumps." in answer.text
    assert fake.stats.requests == 0


async def test_conversation_history_is_quoted_and_cannot_be_cited(fake: FakeChat) -> None:
    at = datetime.now(UTC)
    history = History("whole", [Piece("Question: pumps?\nAnswer: the reactor pumps are blue [1]", at, at, 9)], 0, 9)
    await ask(material(*PUMPS.passages, history=history), fake, QUESTION)
    said = fake.requests[0]["messages"][1]["content"]
    assert "the reactor pumps are blue (1)" in said
    assert "it is no source to cite" in said


# What the model gets wrong


async def test_an_unsupported_sentence_is_reported_and_the_answer_is_not_grounded(fake: FakeChat) -> None:
    fake.faults.hallucinate = True
    metrics = QueryMetrics()
    answer = await ask(PUMPS, fake, QUESTION, metrics=metrics)
    assert answer.unsupported == (UNSUPPORTED,)
    assert not answer.grounded
    assert answer.reasons == ("unsupported",)
    assert metric(metrics, "penstock_query_review_total", reason="unsupported") == 1
    assert metric(metrics, "penstock_query_answer_support_sum") == pytest.approx(answer.support)


async def test_citations_of_missing_passages_are_removed_and_flagged(fake: FakeChat) -> None:
    fake.faults.wrong_citation = 7
    answer = await ask(PUMPS, fake, QUESTION)
    assert "[7]" not in answer.text
    assert (answer.cited, answer.grounded) == ((), False)
    assert set(answer.reasons) == {"unsupported", "uncited", "bad_citation"}
    assert any("citation of no existing passage" in note for note in answer.notes)


async def test_an_answer_without_citations_is_not_grounded(fake: FakeChat) -> None:
    fake.faults.uncited = True
    answer = await ask(PUMPS, fake, QUESTION)
    assert (answer.grounded, answer.density) == (False, 0.0)


async def test_a_sentence_citing_the_wrong_passage_is_unsupported(fake: FakeChat) -> None:
    fake.faults.say = "The reactor is cooled by two pumps [3]."
    answer = await ask(PUMPS, fake, QUESTION)
    assert answer.unsupported == ("The reactor is cooled by two pumps.",)


@pytest.mark.parametrize(("reason", "said"), [("length", "cut at the model's limit"), ("content_filter", "filter")])
async def test_an_answer_cut_by_the_model_has_a_note(fake: FakeChat, reason: str, said: str) -> None:
    fake.faults.finish_reason = reason
    answer = await ask(PUMPS, fake, QUESTION)
    assert any(said in note for note in answer.notes)
    assert not answer.degraded


class Unanswerable:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def gather(self, question: Question, caller: Caller, caller_class: CallerClass) -> Material:
        raise self.error


@pytest.mark.parametrize("error", [BadQuery("too long"), Retryable("Postgres is away")])
async def test_an_error_while_gathering_material_fails_the_answer(error: BadQuery | Retryable) -> None:
    answers = Answers(Unanswerable(error), None, None, ChatSettings())
    assert await events(answers, QUESTION) == [Failed(error)]
    with pytest.raises(type(error)):
        await answers.whole(Question(QUESTION), CALLER)


# The client


async def test_the_chat_client_completes_plain_text_and_json(fake: FakeChat) -> None:
    settings = ChatSettings(base_url=fake.url, model=fake.model)
    chat = OpenAIChat(settings)
    fake.faults.say = "Hello there."
    assert (await chat.complete([Message("user", "hi")]))[0] == "Hello there."
    fake.faults = Faults(say=None)
    judged, usage = await chat.complete(
        [
            Message(
                "user", json.dumps({"statements": ["Pumps cool it.", "It is red."], "context": "Pumps cool it all."})
            )
        ],
        as_json=True,
    )
    assert [v["verdict"] for v in json.loads(judged)["verdicts"]] == [1, 0]
    assert usage.prompt > 0
    fake.faults = Faults(empty=1)
    with pytest.raises(Retryable, match="empty answer"):
        await chat.complete([Message("user", "hi")])
    await chat.aclose()


async def test_a_wrong_chat_key_or_model_is_misconfigured_and_names_its_setting(fake: FakeChat) -> None:
    fake.api_key = "right"
    for fields, setting in (({"api_key": "wrong"}, "API_KEY"), ({"api_key": "right", "model": "other"}, "MODEL")):
        chat = OpenAIChat(ChatSettings(**{"base_url": fake.url, "model": fake.model, **fields}))
        with pytest.raises(Misconfigured, match=f"PENSTOCK_CHAT_{setting}") as refused:
            await chat.complete([Message("user", "a secret question")])
        assert "wrong" not in str(refused.value)
        await chat.aclose()
    with pytest.raises(Misconfigured, match="PENSTOCK_CHAT_MODEL"):
        by_settings(ChatSettings(base_url=fake.url))
    assert by_settings(ChatSettings()) is None
