"""The output of a structure parser: the blocks of a text, and between them boundaries of different worth.

A document is a gapless sequence of blocks, and later of smaller *units* (sentences, lines, statements, rows). A chunk
is a run of units. Where a chunk may begin is a matter of the unit's *rank*: the lower, the better a place to begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.core.model import Span

HARD = 0
"""A chunk always begins here: another message."""
HEADING = 1
"""1–6: a heading of that level. A chunk that begins here is about something else and repeats nothing before it."""
SECTION = 7
"""A top-level definition, a table row of a data file, a thematic break."""
PARAGRAPH = 8
LINE = 9
SENTENCE = 10
PIECE = 11
"""Part of a long sentence: a clause, a word, at worst a grapheme cluster."""
FREE = 15
"""Up to here a boundary is used wherever it makes good sizes. Above it only when what it would cut does not fit."""
BOUND = 16
"""16–27: a member of a definition or of a block, by depth."""
DEEPEST = 27
BOUND_LINE = 28
"""A line of a code fence, of a literal block, of a long statement; a row of a table inside a text."""
BOUND_PIECE = 29
GLUE = 30
"""Belongs to what stands before it (the text below a heading): cut only if nothing else is left."""

MAX_HEADINGS = 8
MAX_HEADING_CHARS = 160


class Block(NamedTuple):
    """A part of the text from ``start`` up to the next block's start."""

    start: int
    rank: int
    prose: bool = True
    """Running text: may be cut into sentences, and consecutive chunks of it overlap."""
    headings: tuple[str, ...] = ()
    prefix: tuple[Span, ...] = ()
    """Repeated in front of every chunk that begins here: the table's header, the enclosing signatures."""


@dataclass(slots=True)
class Units:
    """The text cut small, as parallel lists; unit i is ``text[starts[i]:starts[i + 1]]``, the last start is the end."""

    starts: list[int]
    ranks: list[int]
    blocks: list[int]
    """Index of the block that the unit belongs to."""
    tokens: list[int]


def heading_path(parts: Iterable[str]) -> tuple[str, ...]:
    """A heading path of bounded size: the outermost levels are kept, whitespace is folded."""
    cleaned = (" ".join(part[: 4 * MAX_HEADING_CHARS].split())[:MAX_HEADING_CHARS].rstrip() for part in parts)
    return tuple(part for part in cleaned if part)[:MAX_HEADINGS]
