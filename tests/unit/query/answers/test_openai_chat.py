"""Responses of a chat server, which the client does not check."""

from __future__ import annotations

import pytest
from openai.types.chat import ChatCompletion

from query.answers.model import Usage
from query.answers.openai_chat import _read


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}, Usage(7, 5)),
        ({"prompt_tokens": -1_000_000_000, "completion_tokens": 5, "total_tokens": 0}, Usage(0, 5)),
        ({"prompt_tokens": 7, "completion_tokens": -1_000_000_000, "total_tokens": 0}, Usage(7, 0)),
    ],
)
def test_a_negative_number_of_tokens_returns_nothing_to_the_callers_budget(
    reported: dict[str, int], usage: Usage
) -> None:
    response = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [], "usage": reported}
    assert _read(ChatCompletion.model_validate(response))[2] == usage
