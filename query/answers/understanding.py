"""Understands a follow-up question by its conversation: checks access to its earlier answers, then completes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.normalise import clean
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Pool, translated
from query.access.callers import Caller
from query.access.tenant_rows import rows_of
from query.answers.chat import Backoff, Chat, TooSlow
from query.answers.follow_up import MAX_REWRITTEN_TOKENS, carry_over, messages, rewritten
from query.answers.model import Usage
from query.answers.prompt import new_key
from query.model import Facts, check
from query.modes.history import from_few_documents, readable_answers
from query.modes.material import Question, Turn
from query.retrieval.steps import Steps

REWRITE_SECONDS = 5.0
"""The time limit of the chat model: after it, words are carried over instead."""
LEDGER_SECONDS = 2.0
CHARACTERS_PER_TOKEN = 4
"""An estimate, for servers that do not report usage."""


@dataclass(frozen=True, slots=True)
class Understood:
    """A question as it is searched."""

    text: str
    documents: frozenset[UUID] = frozenset()
    """The documents that the earlier answers were made from whose words the text may repeat."""
    is_traceable: bool = True
    """False: the text may repeat an earlier answer whose documents are not known."""
    note: str | None = None
    """For the reader, about what was left out of the conversation."""


class Understanding:
    """Safe to share between tasks. It does not close its arguments."""

    def __init__(
        self,
        chat: Chat | None,
        pool: Pool | None,
        *,
        backoff: Backoff,
        on_usage: Callable[[str, Usage], None],
    ) -> None:
        """chat: None means that words are carried over. pool: None means that no answer with an id is used. on_usage:
        called with the model and its usage, as it reports it or, where it does not, estimated."""
        self._chat = chat
        self._pool = pool
        self._backoff = backoff
        self._on_usage = on_usage

    async def of(self, question: Question, caller: Caller, steps: Steps) -> Understood:
        """The question completed by its turns; without turns as it is. The step ``follow_up`` shows the text and how it
        came about. A failing model is not an error. Raises BadQuery; Retryable if the ledger is not available."""
        typed = clean(question.text).strip()
        if not question.turns:
            return Understood(question.text)
        check(typed, 1, "hybrid")
        with steps.step("follow_up") as facts:
            turns, documents, is_traceable = await self._usable(question.turns, caller)
            text, by = await self._rewrite(typed, turns, facts)
            facts |= {"question": text, "by": by, "turns": len(turns)}
        withheld = sum(bool(turn.answer) for turn in question.turns) - sum(bool(turn.answer) for turn in turns)
        noun = "answer" if withheld == 1 else "answers"
        why = "their sources cannot all be read now, or they are too many"
        note = f"{withheld} earlier {noun} of the conversation withheld: {why}"
        if withheld:
            facts["withheld"] = withheld
        if text == typed:  # nothing of the conversation is in it
            documents, is_traceable = frozenset(), True
        return Understood(text, documents, is_traceable, note if withheld else None)

    async def _usable(self, turns: Sequence[Turn], caller: Caller) -> tuple[list[Turn], frozenset[UUID], bool]:
        """The turns without the answers that the caller may not read now, the documents of the others, and whether
        these are known for all of them."""
        named = {turn.answer_id for turn in turns if turn.answer_id is not None and turn.answer}
        latest_first = [turn.answer_id for turn in reversed(turns) if turn.answer_id is not None]
        readable = from_few_documents(latest_first, await self._readable(named, caller) if named else {})
        usable = [
            replace(turn, answer="") if turn.answer_id is not None and turn.answer_id not in readable else turn
            for turn in turns
        ]
        documents = frozenset[UUID]().union(*readable.values())
        return usable, documents, all(turn.answer_id is not None for turn in usable if turn.answer)

    async def _readable(self, answers: set[UUID], caller: Caller) -> dict[UUID, frozenset[UUID]]:
        if self._pool is None:
            return {}
        async with time_limit(LEDGER_SECONDS, "Postgres"):
            with translated("the earlier answers"):
                async with rows_of(self._pool, caller.tenant) as connection:
                    return await readable_answers(connection, caller, answers)

    async def _rewrite(self, typed: str, turns: Sequence[Turn], facts: Facts) -> tuple[str, str]:
        """The completed question, and how it came about."""
        if self._chat is not None:
            try:
                text = await self._by_model(self._chat, typed, turns)
                return text, self._chat.model if text != typed else "unchanged"
            except PenstockError as error:
                self._backoff.begin(error)
                facts |= {"degraded": True, "reason": f"the chat model did not rewrite the question: {error}"}
        text = carry_over(typed, turns)
        return text, "words carried over" if text != typed else "unchanged"

    async def _by_model(self, chat: Chat, typed: str, turns: Sequence[Turn]) -> str:
        self._backoff.require_elapsed()
        prompt = messages(typed, turns, key=new_key())
        estimate = Usage(sum(len(message.content) for message in prompt) // CHARACTERS_PER_TOKEN, 0)
        try:
            async with asyncio.timeout(REWRITE_SECONDS):
                text, usage = await chat.complete(prompt, max_tokens=MAX_REWRITTEN_TOKENS)
        except (TooSlow, TimeoutError, asyncio.CancelledError) as error:  # its work costs money
            self._on_usage(chat.model, estimate)
            if not isinstance(error, TimeoutError):
                raise
            raise TooSlow(f"no response within {REWRITE_SECONDS:g} s", service="chat") from error
        self._on_usage(chat.model, usage if usage.prompt else estimate)
        if (question := rewritten(text)) is None:
            raise Retryable("its response is not one question", service="chat")
        return question
