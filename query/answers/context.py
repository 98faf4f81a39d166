"""What of the material a model reads, and in which order: within a budget of tokens. Pure.

Order of found passages: the best first, the second best last, and on towards the middle (1 3 5 … 6 4 2). Models use
what stands at either end of a long context and overlook its middle: Liu et al., "Lost in the Middle: How Language
Models Use Long Contexts", TACL 12 (2024). Whole documents keep their reading order, which means more to a reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from query.answers.model import Numbered
from query.answers.sentences import sentence_ends
from query.answers.visible import disarmed, one_line, quotable, visible
from query.model import Result
from query.modes.budget import PROMPT_TOKENS
from query.modes.material import Material
from query.settings import ChatSettings

CUT = "[… the passage goes on; it was cut here]"
LEAST_TOKENS = 48
"""Of a passage that is cut: less of it says nothing."""

DELIMITER_TOKENS = 36
"""Of the two lines around a passage."""
TITLE_CHARACTERS = 80
"""So that a passage's heading and delimiters stay within ``query.modes.budget.PASSAGE_TOKENS``, on average."""

Count = Callable[[str], int]
"""Tokens of a text."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A passage as it stands in the prompt, without its delimiters."""

    passage: Numbered
    heading: str
    """Title, source and date, a line each."""
    body: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Context:
    shown: Sequence[Shown]
    """In the order of the prompt."""
    tokens: int
    left_out: int
    """Passages that the budget had no room for."""

    @property
    def passages(self) -> list[Numbered]:
        """By their numbers."""
        return sorted((s.passage for s in self.shown), key=lambda p: p.n)

    @property
    def notes(self) -> list[str]:
        """What whoever reads the answer should know of what the model was not shown."""
        notes = []
        if self.left_out:
            noun = "passage" if self.left_out == 1 else "passages"
            notes.append(f"{self.left_out} {noun} did not fit into what the model reads")
        if any(s.passage.cut for s in self.shown):
            notes.append("the last passage was cut to what the model reads")
        return notes


def build(results: Sequence[Result], *, whole: bool, budget_tokens: int, count: Count) -> Context:
    """results: as in ``Material``: the best first or, whole, in reading order. budget_tokens: for everything that is
    shown of them, headings included.

    Found: one that does not fit is left out, a shorter one further down may. Whole: the first that does not fit is cut
    at the end of a sentence, and nothing follows it, for a gap would mislead. A single passage that is longer than the
    budget is cut in either case. Those without visible text are no passages.
    """
    shown: list[Shown] = []
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
            room = left - around - count(f"\n{CUT}") - 1
            fitted = "" if full or (shown and not whole) else beginning(body, room, count)
            full = full or whole
            if not fitted:
                left_out += 1
                continue
            text, cut = fitted, True
            body = f"{fitted}\n{CUT}"
            tokens = around + count(body)
        left -= tokens
        shown.append(Shown(Numbered(len(shown) + 1, result, text, cut), heading, body, tokens))
    ordered = shown if whole else edges_first(shown)
    return Context(ordered, budget_tokens - left, left_out)


def edges_first(best_first: Sequence[Shown]) -> list[Shown]:
    """1 3 5 … 6 4 2."""
    return [*best_first[::2], *reversed(best_first[1::2])]


def beginning(text: str, room_tokens: int, count: Count) -> str:
    """The longest beginning that ends with a sentence and fits; else, of a single long sentence, with a word. Empty
    where less than LEAST_TOKENS would be left."""
    if room_tokens < LEAST_TOKENS:
        return ""
    for ends in (sentence_ends(text), [at for at, c in enumerate(text) if c.isspace()]):
        low, high = 0, len(ends)
        while low < high:  # count grows with the length
            middle = (low + high + 1) // 2
            if count(text[: ends[middle - 1]]) <= room_tokens:
                low = middle
            else:
                high = middle - 1
        if low and (cut := text[: ends[low - 1]].rstrip()):
            return cut
    return ""


def title_of(result: Result) -> str:
    return f"title: {one_line(quotable(result.passage.title or result.passage.external_id), TITLE_CHARACTERS)}"


def heading_of(result: Result) -> str:
    """What a passage is from. Whoever wrote the document wrote this too: it stands inside the delimiters."""
    passage = result.passage
    lines = [title_of(result), f"source: {one_line(quotable(passage.source), TITLE_CHARACTERS)}"]
    if passage.author:
        lines.append(f"author: {one_line(quotable(passage.author), TITLE_CHARACTERS)}")
    if passage.source_modified_at is not None:
        lines.append(f"date: {passage.source_modified_at:%Y-%m-%d}")
    return "\n".join(lines)


WHOLE_SLACK_TOKENS = 256
"""What the headings of whole documents may take beyond their estimate; the prompt's own estimate has room for it."""


def room_for_passages(question: str, material: Material, settings: ChatSettings, count: Count) -> int:
    """Of found passages ``context_tokens``, of whole documents what they were packed for; never above the model's
    window less the answer, the prompt, the question and the history. 0: there is no room."""
    history = sum(piece.tokens for piece in material.history.pieces) if material.history else 0
    taken = settings.answer_tokens + PROMPT_TOKENS - WHOLE_SLACK_TOKENS + count(question) + history
    packed = material.budget_tokens
    budget = settings.context_tokens if packed is None else packed + WHOLE_SLACK_TOKENS
    return max(0, min(budget, settings.window_tokens - taken))
