"""The passages that a model reads, and their order, within a budget of tokens. Pure.

Retrieved passages are ordered with the best first, the second best last, and so on towards the middle (1 3 5 … 6 4 2).
Models use both ends of a long context and overlook its middle: Liu et al., "Lost in the Middle: How Language Models Use
Long Contexts", TACL 12 (2024). Whole documents keep their reading order, which matters more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.core.sentences import sentence_ends
from query.answers.model import NumberedPassage
from query.answers.visible import disarmed, one_line, quotable, visible
from query.model import Result
from query.modes.budget import PROMPT_TOKENS
from query.modes.material import Material
from query.settings import ChatSettings

CUT_NOTICE = "[… the passage goes on; it was cut here]"
MIN_CUT_TOKENS = 48
"""The shortest part of a passage that is worth including after a cut."""

DELIMITER_TOKENS = 36
"""The tokens of the two delimiter lines around a passage."""
MAX_TITLE_CHARACTERS = 80
"""The longest title in a heading: on average, the heading and the delimiters of a passage then stay within
``query.modes.budget.PASSAGE_TOKENS``."""

Count = Callable[[str], int]
"""Counts the tokens of a text."""


@dataclass(frozen=True, slots=True)
class PromptPassage:
    """A passage in the prompt, without its delimiters."""

    passage: NumberedPassage
    heading: str
    """The title, source and date, one line each."""
    body: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Context:
    shown: Sequence[PromptPassage]
    """The passages in the order of the prompt."""
    tokens: int
    left_out: int
    """How many passages did not fit into the budget."""

    @property
    def passages(self) -> list[NumberedPassage]:
        """The passages in the order of their numbers."""
        return sorted((s.passage for s in self.shown), key=lambda p: p.n)

    @property
    def notes(self) -> list[str]:
        """Notes for the reader on what the model did not read."""
        notes = []
        if self.left_out:
            noun = "passage" if self.left_out == 1 else "passages"
            notes.append(f"{self.left_out} {noun} did not fit into the model's context")
        if any(s.passage.cut for s in self.shown):
            notes.append("the last passage was cut to fit into the model's context")
        return notes


def build(results: Sequence[Result], *, whole: bool, budget_tokens: int, count: Count) -> Context:
    """Select the passages that fit into the budget.

    results: as in ``Material``, the best first or, for whole documents, in reading order.
    budget_tokens: the budget for all passages with their headings.

    A retrieved passage that does not fit is left out, and a shorter one further down may follow. Of whole documents,
    the first passage that does not fit is cut at the end of a sentence and nothing follows it, because a gap would
    mislead. A single passage that is longer than the budget is cut in either case. Results without visible text are
    skipped.
    """
    shown: list[PromptPassage] = []
    left, left_out, full = budget_tokens, 0, False
    for result in results:
        text, cut = visible(result.text), False
        body = disarmed(text)
        if not body:
            continue
        continues = whole and shown and shown[-1].passage.result.passage.document_id == result.passage.document_id
        heading = title_of(result) if continues else heading_of(result)
        around = count(heading) + DELIMITER_TOKENS
        tokens = around + count(body)
        if full or tokens > left:
            room = left - around - count(f"\n{CUT_NOTICE}") - 1
            fitted = "" if full or (shown and not whole) else beginning(body, room, count)
            full = full or whole
            if not fitted:
                left_out += 1
                continue
            text, cut = fitted, True
            body = f"{fitted}\n{CUT_NOTICE}"
            tokens = around + count(body)
        left -= tokens
        shown.append(PromptPassage(NumberedPassage(len(shown) + 1, result, text, cut), heading, body, tokens))
    ordered = shown if whole else edges_first(shown)
    return Context(ordered, budget_tokens - left, left_out)


def edges_first(best_first: Sequence[PromptPassage]) -> list[PromptPassage]:
    """Reorder passages from 1 2 3 4 5 6 to 1 3 5 6 4 2."""
    return [*best_first[::2], *reversed(best_first[1::2])]


def beginning(text: str, room_tokens: int, count: Count) -> str:
    """The longest beginning that fits and ends with a sentence, or with a word if the first sentence is too long. Empty
    if fewer than MIN_CUT_TOKENS would be left."""
    if room_tokens < MIN_CUT_TOKENS:
        return ""
    for ends in (sentence_ends(text), [at for at, c in enumerate(text) if c.isspace()]):
        low, high = 0, len(ends)
        while low < high:  # binary search: count grows with the length
            middle = (low + high + 1) // 2
            if count(text[: ends[middle - 1]]) <= room_tokens:
                low = middle
            else:
                high = middle - 1
        if low and (cut := text[: ends[low - 1]].rstrip()):
            return cut
    return ""


def title_of(result: Result) -> str:
    return f"title: {one_line(quotable(result.passage.title or result.passage.external_id), MAX_TITLE_CHARACTERS)}"


def heading_of(result: Result) -> str:
    """The title, source, author and date of a passage. It is inside the delimiters, because authors of documents
    control it."""
    passage = result.passage
    lines = [title_of(result), f"source: {one_line(quotable(passage.source), MAX_TITLE_CHARACTERS)}"]
    if passage.author:
        lines.append(f"author: {one_line(quotable(passage.author), MAX_TITLE_CHARACTERS)}")
    if passage.source_modified_at is not None:
        lines.append(f"date: {passage.source_modified_at:%Y-%m-%d}")
    return "\n".join(lines)


WHOLE_SLACK_TOKENS = 256
"""How many tokens the headings of whole documents may exceed their estimate by; the prompt's estimate has room for
it."""


def room_for_passages(question: str, material: Material, settings: ChatSettings, count: Count) -> int:
    """The budget of passages in tokens: the material's own, or ``context_tokens`` for retrieved ones without one; at
    most the model's window less the answer, the prompt, the question and the history, and at least 0."""
    history = sum(piece.tokens for piece in material.history.pieces) if material.history else 0
    taken = settings.answer_tokens + PROMPT_TOKENS - WHOLE_SLACK_TOKENS + count(question) + history
    packed = material.budget_tokens
    slack = WHOLE_SLACK_TOKENS if material.whole else 0
    budget = settings.context_tokens if packed is None else packed + slack
    return max(0, min(budget, settings.window_tokens - taken))
