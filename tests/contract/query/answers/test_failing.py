"""A chat model that is down, slow, busy, cut off or talks nonsense: one note and the passages; nothing stays open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from query.answers.model import Delta
from query.limits.charging import charge_to
from query.modes.material import Question
from query.telemetry import QueryMetrics
from tests.fakes.chat import FakeChat, Faults
from tests.support.query.answers_kit import CALLER, PUMPS, QUESTION, answering, ask, done, events, metric


@pytest.fixture
async def fake() -> AsyncIterator[FakeChat]:
    async with FakeChat() as fake:
        yield fake


FAILING: list[tuple[dict[str, Any], str]] = [
    ({"errors": 1}, "responded with 503"),
    ({"errors": 1, "error_status": 500}, "responded with 500"),
    ({"throttle": 1, "throttle_headers": {}}, "responded with 429"),
    ({"quota": True}, "quota is exhausted"),
    ({"disconnect": 1}, "cannot be reached"),
    ({"hang": 1}, "too slow"),
    ({"latency_seconds": 30.0}, "too slow"),
    ({"token_seconds": 0.7}, "too slow"),
    ({"stall": 1}, "too slow"),
    ({"cut": 1}, "chat server"),
    ({"unfinished": 1}, "before it was complete"),
    ({"error_event": 1}, "broke off"),
    ({"empty": 1}, "returned an empty answer"),
    ({"not_json": 1}, "chat server"),
    ({"garbage": 1}, "response is invalid"),
    ({"too_long": True}, "context_length_exceeded"),
]


@pytest.mark.parametrize(("faults", "said"), FAILING, ids=[next(iter(f)) for f, _ in FAILING])
async def test_a_failing_chat_model_leads_to_one_note_and_quoted_passages(
    fake: FakeChat, faults: dict[str, Any], said: str
) -> None:
    fake.faults = Faults(**faults)
    metrics = QueryMetrics()
    async with answering(PUMPS, fake, metrics=metrics, first_token_seconds=1.0, timeout_seconds=2.0) as answers:
        answer = done(await events(answers, QUESTION))
        assert (answer.degraded, answer.model, answer.grounded) == (True, None, True)
        assert answer.text.startswith("> The reactor is cooled by two pumps.")
        [note] = answer.notes
        assert said in note
        assert "reactor" not in note
        assert metric(metrics, "penstock_query_degraded_total", part="chat") == 1
        fake.faults = Faults()
        assert not (await answers.whole(Question(QUESTION), CALLER)).degraded
    assert await no_open_requests(fake)


async def no_open_requests(fake: FakeChat) -> bool:
    """No request is open at the server any more."""
    ends = time.monotonic() + 5
    while fake.stats.open and time.monotonic() < ends:
        await asyncio.sleep(0.01)
    return fake.stats.open == 0


async def test_an_unreachable_chat_server_leads_to_a_degraded_answer() -> None:
    async with FakeChat() as fake:
        pass
    answer = await ask(PUMPS, fake, QUESTION)
    assert answer.degraded
    assert "cannot be reached" in answer.notes[0]


async def test_a_chat_server_that_sent_retry_after_is_not_called_again_before_it() -> None:
    async with FakeChat(faults=Faults(throttle=1, throttle_headers={"retry-after": "30"})) as fake:
        async with answering(PUMPS, fake) as answers:
            assert (await answers.whole(Question(QUESTION), CALLER)).degraded
            second = await answers.whole(Question(QUESTION), CALLER)
        assert fake.stats.requests == 1
        assert "requested a pause" in second.notes[0]


async def test_a_client_that_leaves_cancels_the_request_to_the_chat_model(fake: FakeChat) -> None:
    fake.faults.token_seconds = 0.2
    async with answering(PUMPS, fake) as answers:
        async with aclosing(answers.answer(Question(QUESTION), CALLER)) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
        assert await no_open_requests(fake)
        assert fake.stats.left == 1

        task = asyncio.create_task(answers.whole(Question(QUESTION), CALLER))
        while fake.stats.open == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await no_open_requests(fake)
        assert fake.stats.left == 2


CHARGED: list[tuple[dict[str, Any], bool]] = [
    ({"hang": 1}, True),
    ({"latency_seconds": 30.0}, True),
    ({"token_seconds": 0.7}, True),
    ({"stall": 1}, True),
    ({"errors": 1}, False),
    ({"quota": True}, False),
    ({"disconnect": 1}, False),
]


@pytest.mark.parametrize(("faults", "is_charged"), CHARGED, ids=[next(iter(f)) for f, _ in CHARGED])
async def test_a_question_that_times_out_in_the_model_is_charged_and_a_refused_one_is_not(
    fake: FakeChat, faults: dict[str, Any], is_charged: bool
) -> None:
    """Else whoever asks what takes long to think about has the model read for nothing, without end."""
    fake.faults, tokens = Faults(**faults), 0

    def charge(used: int, money: float, stored: int) -> None:
        nonlocal tokens
        tokens += used

    charge_to(charge)
    async with answering(PUMPS, fake, first_token_seconds=1.0, timeout_seconds=2.0) as answers:
        assert done(await events(answers, QUESTION)).degraded
    assert (tokens > 100) == is_charged
