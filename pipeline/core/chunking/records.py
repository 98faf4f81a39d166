"""Rows, records and messages: complete in themselves, so nothing overlaps; rows repeat their header."""

from __future__ import annotations

import re
from functools import cache

from pipeline.core.chunking.units import BOUND, DEEPEST, GLUE, HARD, PARAGRAPH, SECTION, Block, heading_path
from pipeline.core.normalise import RECORD_SEPARATOR

_DELIMITERS = ",;\t|"
MAX_SEPARATE_MESSAGES = 10_000
"""The messages of a text that are chunks of their own; those after them are cut as one. A text of 4 MiB can have two
million, which took detect a minute and more memory than it has."""
_SMALLEST_MEMBER = 40
"""Characters of JSON members (numbers, say) that are not worth a boundary each."""
_JSON_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{},]|\n')


def comma_separated(text: str) -> list[Block]:
    """CSV; the delimiter is the commonest of ``, ; | tab`` in the first line."""
    first = text.partition("\n")[0]
    return _rows(text, max(_DELIMITERS, key=first.count))


def tab_separated(text: str) -> list[Block]:
    return _rows(text, "\t")


@cache
def _record(delimiter: str) -> re.Pattern[str]:
    """One record with its line end. As in the csv module a quotation mark counts at the start of a field only, and a
    quoted field may hold line ends; one that is never closed is an ordinary character."""
    d = re.escape(delimiter)
    field = rf'(?:"(?:[^"]++|"")*+"(?=[{d}\n]|\Z)|[^{d}\n]*+)'
    return re.compile(rf"{field}(?:{d}{field})*+(?:\n+|\Z)")


def _rows(text: str, delimiter: str) -> list[Block]:
    """One block a record; the first one is the header and is repeated."""
    blocks: list[Block] = []
    record = _record(delimiter)
    place = len(text) - len(text.lstrip("\n"))
    header = (0, 0)
    while place < len(text):
        match = record.match(text, place)
        end = match.end() if match else len(text)
        if end <= place:
            break
        if not blocks:
            header = (place, end)
            blocks.append(Block(0, SECTION, prose=False))
        else:
            blocks.append(Block(place, GLUE if len(blocks) == 1 else SECTION, False, (), (header,)))
        place = end
    return blocks or _whole(text)


def json_lines(text: str) -> list[Block]:
    """One record a line."""
    starts = [0, *(match.end() for match in re.finditer(r"\n+", text))]
    return [Block(start, SECTION, prose=False) for start in starts if start < len(text)]


def json(text: str) -> list[Block]:
    """JSON at the commas between members, the outer ones first; broken JSON comes out usefully too."""
    if not text:
        return []
    blocks = [Block(0, SECTION, prose=False)]
    depth = 0
    pending: int | None = None
    top = 0
    for match in _JSON_TOKEN.finditer(text):
        mark = match[0]
        if mark in "[{":
            depth += 1
        elif mark in "]}":
            depth = max(0, depth - 1)
        elif mark in ",\n":
            if mark == "," and match.end() < len(text) and text[match.end()] == "\n":
                pending = depth
                continue
            if mark == "\n" and pending is None:
                continue
            level = depth if pending is None else pending
            pending = None
            since = top if level <= 1 else blocks[-1].start
            if match.end() - since >= _SMALLEST_MEMBER and match.end() < len(text):
                rank = SECTION if level <= 1 else min(BOUND + level, DEEPEST)
                blocks.append(Block(match.end(), rank, prose=False))
                top = match.end() if level <= 1 else top
    return blocks


def messages(text: str) -> list[Block]:
    """Messages separated by U+001E, each a chunk of its own (a long one several). The first is the thread's parent: its
    first line is the heading of those that answer it. At most MAX_SEPARATE_MESSAGES are separate."""
    blocks: list[Block] = []
    start = 0
    parent: tuple[str, ...] = ()
    for index, message in enumerate(text.split(RECORD_SEPARATOR, MAX_SEPARATE_MESSAGES)):
        if index == 0:
            parent = heading_path([message.strip().partition("\n")[0]])
            blocks.append(Block(0, HARD))
        else:
            blocks.append(Block(start, HARD, headings=parent))
        start += len(message) + 1
    return [block for block in blocks if block.start < len(text)]


def _whole(text: str) -> list[Block]:
    return [Block(0, PARAGRAPH)] if text else []
