"""Where the sentences of a text end, approximately, in prose and Markdown. Pure."""

from __future__ import annotations

import re
from itertools import pairwise

_END = re.compile(
    r"[.!?…][\"'”’»)\]*_]*(?:[ \t]*\[\d+\])*(?=\s|\Z)"  # Latin, Greek, Cyrillic
    r"|[。！？][”’」』）]*(?:[ \t]*\[\d+\])*"
    r"|\n[ \t]*\n|\n(?=[ \t]*(?:[-*+•|]|\d{1,3}[.)])[ \t])|\Z"  # paragraphs, items of a list
)
_ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|etc|vs|cf|approx|nr|fig|sec|vol|inc|ltd|dr|mr|mrs|ms|prof|z\.b|d\.h|bzw|ca|pp)|\b(?-i:[A-Z])"
    r"|(?:^|\n)[ \t]*\d{1,3})\.$",
    re.IGNORECASE,
)


def sentence_ends(text: str) -> list[int]:
    """The position after each sentence with its closing quotes and citations; the last one is the end of the text."""
    ends: list[int] = []
    for end in _END.finditer(text):
        at = end.end()
        if end[0].startswith(".") and _is_abbreviation(text, end.start() + 1) and text[at : at + 40].lstrip():
            continue
        if at and (not ends or at > ends[-1]):
            ends.append(at)
    return ends


def _is_abbreviation(text: str, after: int) -> bool:
    return _ABBREVIATION.search(text[max(0, after - 12) : after]) is not None


def sentences(text: str) -> list[str]:
    """The sentences of a text, without surrounding white space and without empty ones."""
    starts = [0, *sentence_ends(text)]
    return [part for start, end in pairwise(starts) if (part := text[start:end].strip())]
