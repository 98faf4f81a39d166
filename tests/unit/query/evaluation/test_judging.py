"""The questions that are answered for judging, and the model that judges them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast
from uuid import uuid4

import pytest
from pydantic import SecretStr

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.embedding.port import Vectors
from query.answers.chat import Chat
from query.answers.prompt import Message
from query.evaluation.golden import Golden, Judged
from query.evaluation.judge import grade
from query.evaluation.service import answered, judge_settings
from query.settings import ChatSettings, EvalSettings

CHAT = ChatSettings(base_url="http://writer.test/v1", api_key=SecretStr("writers"), model="writer", window_tokens=4096)


def golden(text: str) -> Golden:
    return Golden("acme", text, (Judged("wiki", "page"),))


def test_the_same_questions_are_answered_in_every_run() -> None:
    questions = [golden(f"question {n}") for n in range(50)]
    chosen = answered(questions, 20)
    assert len(chosen) == 20
    assert answered(questions[::-1], 20) == chosen
    for _ in range(20):
        after = answered([*questions, golden(f"new question {uuid4()}")], 20)
        assert len(set(chosen) - set(after)) <= 1, "a new question takes the place of at most one"
    assert len(answered(questions[:3], 20)) == 3


def test_without_a_judge_of_its_own_the_answering_model_judges() -> None:
    assert judge_settings(CHAT, EvalSettings()) == CHAT


def test_a_judge_on_the_same_server_uses_its_key() -> None:
    judge = judge_settings(CHAT, EvalSettings(judge_model="judge"))
    assert (judge.base_url, judge.api_key, judge.model) == (CHAT.base_url, CHAT.api_key, "judge")
    assert judge.window_tokens == 4096


def test_the_answering_models_key_is_not_sent_to_the_judges_server() -> None:
    elsewhere = EvalSettings(judge_model="judge", judge_base_url="http://judge.test/v1")
    assert judge_settings(CHAT, elsewhere).api_key is None
    keyed = EvalSettings(judge_model="judge", judge_base_url="http://judge.test/v1", judge_api_key=SecretStr("judges"))
    assert judge_settings(CHAT, keyed).api_key == SecretStr("judges")


def test_a_judges_server_without_a_model_is_refused() -> None:
    with pytest.raises(Misconfigured, match="PENSTOCK_EVAL_JUDGE_MODEL"):
        judge_settings(CHAT, EvalSettings(judge_base_url="http://judge.test/v1"))


STATEMENTS = '{"statements": ["One."], "questions": []}'


@pytest.mark.parametrize(
    "written",
    [
        ["1" * 5_000],
        ["[" * 100_000],
        [STATEMENTS, f'{{"verdicts": [{{"verdict": {"1" * 5_000}}}]}}'],
        [STATEMENTS, '{"verdicts": [{"verdict": Infinity}]}'],
    ],
    ids=["number", "nested", "verdict of many digits", "infinite verdict"],
)
async def test_nonsense_of_the_judge_is_an_outage_of_the_judge(written: list[str]) -> None:
    with pytest.raises(Retryable, match="judging model"):
        await grade(cast(Chat, Writing(written)), Embedding(), "Question?", "One.", ["One."])


class Writing:
    """Writes these answers, one after the other."""

    def __init__(self, written: Sequence[str]) -> None:
        self._written = iter(written)

    async def complete(self, messages: Sequence[Message], *, as_json: bool = False) -> tuple[str, None]:
        return next(self._written), None


class Embedding:
    async def embed(self, text: str) -> tuple[None, Vectors]:
        raise AssertionError("nothing is embedded of a judge's nonsense")
