"""The answer without a language model: Markdown quotations of the passages. Pure.

A quotation shows code and tables as what they are, although it is only a part of a passage: one that begins within a
block of code or a table repeats the line that opens the block or the header of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.core.sentences import sentence_ends
from query.answers.model import NumberedPassage
from query.answers.sentences import Terms, terms_of
from query.answers.visible import disarmed

MAX_QUOTED_PASSAGES = 5
MAX_QUOTATION_CHARACTERS = 480
"""The longest quotation, without the lines that it repeats."""
_HEADING = re.compile(r" {0,3}#{1,6}\s")
_FENCE = re.compile(r"[ \t]*(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)$")
_ROW = re.compile(r"[ \t]*\|")
_DELIMITER_ROW = re.compile(r"[ \t]*\|[ \t:|-]*-[ \t:|-]*$")
_TICKS = re.compile("`{3,}")
_PROSE = frozenset(("text/plain", "text/markdown", "text/html", "text/x-rst"))
_LAID_OUT = frozenset(("application/json", "application/sql", "application/x-ndjson", "application/x-sh"))


def quotations(
    question: str, passages: Sequence[NumberedPassage], *, ranked: bool
) -> tuple[str, list[NumberedPassage]]:
    """Markdown quotations with ``[n]`` of the excerpt of each passage that contains most of the question's words, and
    the quoted passages. ranked: the passages are ordered by relevance; else those with most of the words are quoted."""
    question_words = terms_of(question)
    quoted = [
        (passage, *excerpt(question_words, _as_markdown(passage)))
        for passage in (passages[:MAX_QUOTED_PASSAGES] if ranked else passages)
    ]
    quoted = sorted((q for q in quoted if q[2]), key=lambda q: 0 if ranked else -q[1])[:MAX_QUOTED_PASSAGES]
    return "\n\n".join(_as_quotation(text, p.n) for p, _, text in quoted), [p for p, _, _ in quoted]


def excerpt(question: Terms, text: str) -> tuple[int, str]:
    """The excerpt with most of the question's words, and how many it has. It consists of whole sentences, blocks of
    code and rows of tables, if any are short enough."""
    text = disarmed(text)
    blocks = list(_blocks(text))
    ends = [0, *_unit_ends(text, blocks)]
    # Each sentence is analysed once: hundreds of short ones fit into an excerpt.
    common = [_common(question, text[start:end]) for start, end in pairwise(ends)]
    best, start, end, last = -1, 0, 0, 0
    for first in range(len(ends) - 1):
        last = max(last, first + 1)
        while last + 1 < len(ends) and ends[last + 1] - ends[first] <= MAX_QUOTATION_CHARACTERS:
            last += 1
        hits = len(_NOTHING.union(*common[first:last]))
        if hits > best:
            best, start, end = hits, ends[first], ends[last]
    while start < end and text[start] == "\n":
        start += 1
    end = start + len(text[start:end].rstrip())
    more = ""
    if end - start > MAX_QUOTATION_CHARACTERS:
        cut = text.rfind(" ", start + 1, start + MAX_QUOTATION_CHARACTERS)
        end, more = (cut if cut > 0 else start + MAX_QUOTATION_CHARACTERS), " …"
    before = next((block.repeated for block in blocks if block.start < start < block.end), "")
    after = next((block.closing for block in blocks if block.start < end < block.end), "")
    quoted = text[start:end].rstrip() + more + after
    return best, f"{before}{quoted}" if before else quoted.strip()


_NOTHING: frozenset[tuple[bool, str]] = frozenset()


def _common(question: Terms, sentence: str) -> frozenset[tuple[bool, str]]:
    """The question's words and numbers that a sentence has, each with whether it is a number."""
    said = terms_of(sentence)
    numbers = ((True, number) for number in question.numbers & said.numbers)
    return frozenset(numbers).union((False, word) for word in question.words & said.words)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of code or a table, from its first character to that after its last line."""

    start: int
    end: int
    is_code: bool
    repeated: str
    """The lines before a part that does not begin with the block."""
    closing: str
    """The lines after a part that does not end with the block."""


def _blocks(text: str) -> Iterator[_Block]:
    lines = text.splitlines(keepends=True)
    at = n = 0
    while n < len(lines):
        line, first = lines[n].rstrip("\n"), n
        if opening := _FENCE.match(line):
            n += 1
            while n < len(lines) and not _closes(lines[n], opening["ticks"]):
                n += 1
            n = min(n + 1, len(lines))
            repeated, closing = f"{line}\n", f"\n{opening['ticks']}"
        elif _ROW.match(line):
            while n < len(lines) and _ROW.match(lines[n]):
                n += 1
            has_header = n - first > 1 and _DELIMITER_ROW.match(lines[first + 1].rstrip("\n"))
            repeated, closing = "".join(lines[first : first + 2]) if has_header else "", ""
        else:
            at += len(lines[n])
            n += 1
            continue
        end = at + sum(map(len, lines[first:n]))
        yield _Block(at, end, opening is not None, repeated, closing)
        at = end


def _closes(line: str, ticks: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(ticks) and not stripped.strip(ticks[0])


def _unit_ends(text: str, blocks: Sequence[_Block]) -> list[int]:
    """Where an excerpt may end: after a sentence, a block of code that is short enough or else one of its lines, and a
    row of a table."""
    inside = [False] * (len(text) + 1)
    ends: set[int] = set()
    for block in blocks:
        inside[block.start : block.end] = [True] * (block.end - block.start)
        ends |= {block.start, block.end}
        if not block.is_code or block.end - block.start > MAX_QUOTATION_CHARACTERS:
            ends |= {at + 1 for at in range(block.start, block.end) if text[at] == "\n"}
    ends |= {end for end in sentence_ends(text) if not inside[end]}
    return sorted(ends - {0})


def _as_markdown(passage: NumberedPassage) -> str:
    """The passage's text; that of a type in which the layout has a meaning becomes a block of code."""
    media_type = (passage.result.passage.media_type or "").partition(";")[0].strip().lower()
    if media_type in _PROSE or not (media_type.startswith("text/") or media_type in _LAID_OUT):
        return passage.text
    ticks = max(("``", *_TICKS.findall(passage.text)), key=len) + "`"
    text = passage.text.strip("\n")
    return f"{ticks}\n{text}\n{ticks}"


def _as_quotation(text: str, n: int) -> str:
    """A Markdown quotation with its citation, and without headings, which would be too prominent."""
    blocks = list(_blocks(text))
    lines = []
    at = 0
    for line in text.splitlines(keepends=True):
        if not _HEADING.match(line) or any(block.start <= at < block.end for block in blocks):
            lines.append(line)
        at += len(line)
    shown = "".join(lines).strip("\n").rstrip() or text.strip("# \n")
    # A citation in the last line of a block would belong to the code or the table.
    cited = f"{shown}\n\n[{n}]" if any(block.end == len(text) for block in blocks) else f"{shown} [{n}]"
    return "\n".join(f"> {line}" if line.strip() else ">" for line in cited.splitlines())
