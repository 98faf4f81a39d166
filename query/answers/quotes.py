"""An answer without a model: the passages' own sentences, quoted and cited. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from query.answers.model import Numbered
from query.answers.sentences import sentence_ends
from query.answers.visible import disarmed
from query.answers.words import Said, read

_HEADING = re.compile(r"#{1,6}\s")
MOST_PASSAGES = 5
MOST_CHARACTERS = 480
"""Of one quotation."""


def quotations(question: str, passages: Sequence[Numbered], *, ranked: bool) -> tuple[str, list[Numbered]]:
    """The stretch of each passage that has most of the question's words, as Markdown quotations with ``[n]``; and the
    passages that are quoted. ranked: the best come first; else those with most of the words are taken."""
    wanted = read(question)
    quoted = [
        (passage, *excerpt(wanted, passage.text)) for passage in (passages[:MOST_PASSAGES] if ranked else passages)
    ]
    quoted = sorted((q for q in quoted if q[2]), key=lambda q: 0 if ranked else -q[1])[:MOST_PASSAGES]
    return "\n\n".join(f"{_as_quotation(text)} [{p.n}]" for p, _, text in quoted), [p for p, _, _ in quoted]


def excerpt(wanted: Said, text: str) -> tuple[int, str]:
    """How many of the words it has, and whole sentences, as long as there are any that are short enough."""
    text = disarmed(text)
    ends = [0, *sentence_ends(text)]
    best, kept, last = -1, "", 0
    for first in range(len(ends) - 1):
        last = max(last, first + 1)
        while last + 1 < len(ends) and ends[last + 1] - ends[first] <= MOST_CHARACTERS:
            last += 1
        said = read(stretch := text[ends[first] : ends[last]].strip())
        hits = len(wanted.words & said.words) + len(wanted.numbers & said.numbers)
        if hits > best:
            best, kept = hits, stretch
    if len(kept) > MOST_CHARACTERS:
        kept = kept[: kept.rfind(" ", 0, MOST_CHARACTERS)].rstrip() + " …"
    return best, kept


def _as_quotation(text: str) -> str:
    """Headings are left out: the passage's title stands beside it, and in a quotation they shout."""
    lines = [line for line in text.splitlines() if not _HEADING.match(line)] or [text.strip("# ")]
    return "\n".join(f"> {line}" if line.strip() else ">" for line in "\n".join(lines).strip().splitlines())
