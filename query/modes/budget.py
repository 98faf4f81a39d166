"""How many tokens documents and history may fill of a model's window. Counted as cl100k, whatever the model counts."""

from __future__ import annotations

from pipeline.embedding.tokens import byte_pairs
from query.model import CallerClass
from query.settings import ChatSettings, RetrievalSettings

PROMPT_TOKENS = 1_000
"""Instructions, delimiters and what a model's own tokenizer counts more than cl100k."""
PASSAGE_TOKENS = 64
"""A passage's number, heading and delimiters (query/answers/context.py), besides its text."""
HISTORY_SHARE = 0.2
"""Of the budget, at most: a conversation is context, the documents are the evidence."""


def budget_tokens(question: str, klass: CallerClass, settings: RetrievalSettings, chat: ChatSettings) -> int:
    """The class's budget, never above the window less the answer, the prompt and the question; 0 where that leaves
    nothing."""
    of_class = settings.extended_tokens if klass == "extended" else settings.standard_tokens
    [asked] = byte_pairs().count([question])
    return max(0, min(of_class, chat.window_tokens - chat.answer_tokens - PROMPT_TOKENS - asked))
