"""The settings of a chat model whose tokens and prices are easy to calculate with."""

from __future__ import annotations

from query.settings import ChatSettings


def metered_chat() -> ChatSettings:
    """900 tokens of context and 100 of answer, at one unit of money for a thousand tokens. No server answers."""
    return ChatSettings(
        base_url="http://model/v1",
        model="m",
        context_tokens=900,
        answer_tokens=100,
        price_per_million_prompt_tokens=1_000,
        price_per_million_answer_tokens=1_000,
    )
