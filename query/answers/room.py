"""How many tokens passages may fill. Pure."""

from __future__ import annotations

from query.answers.context import Count
from query.material import Material
from query.modes.budget import PROMPT_TOKENS
from query.settings import ChatSettings

WHOLE_SLACK_TOKENS = 256
"""What the headings of whole documents may take beyond their estimate; the prompt's own estimate has room for it."""


def room_for_passages(question: str, material: Material, settings: ChatSettings, count: Count) -> int:
    """Of found passages ``context_tokens``, of whole documents what they were packed for; never above the model's
    window less the answer, the prompt, the question and the history. 0: there is no room."""
    history = sum(piece.tokens for piece in material.history.pieces) if material.history else 0
    taken = settings.answer_tokens + PROMPT_TOKENS - WHOLE_SLACK_TOKENS + count(question) + history
    packed = material.budget_tokens
    wanted = settings.context_tokens if packed is None else packed + WHOLE_SLACK_TOKENS
    return max(0, min(wanted, settings.window_tokens - taken))
