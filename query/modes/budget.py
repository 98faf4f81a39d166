"""How many tokens documents and history may fill of a model's window, counted as cl100k for every model."""

from __future__ import annotations

from pipeline.embedding.tokens import byte_pairs
from query.model import CallerClass
from query.settings import ChatSettings, RetrievalSettings

PROMPT_TOKENS = 1_000
"""A reserve for the instructions, the delimiters and the difference between a model's own tokenizer and cl100k."""
PASSAGE_TOKENS = 64
"""A reserve for a passage's number, heading and delimiters (query/answers/context.py)."""
HISTORY_SHARE = 0.2
"""The largest share of the budget for history: a conversation is context, the documents are the evidence."""


def budget_tokens(question: str, caller_class: CallerClass, settings: RetrievalSettings, chat: ChatSettings) -> int:
    """The budget of the caller's class, limited to the window less the answer, the prompt and the question; at least
    0."""
    of_class = settings.extended_tokens if caller_class == "extended" else settings.standard_tokens
    [question_tokens] = byte_pairs().count([question])
    return max(0, min(of_class, chat.window_tokens - chat.answer_tokens - PROMPT_TOKENS - question_tokens))
