"""Text → chunks: pure, deterministic, and stable under edits: an edit changes only the chunks around it.

A parser for the media type says where the text's blocks are and how good a place each boundary is (``units``); one
packer counts tokens, chooses boundaries and emits chunks (``packer``). Nothing here knows a model: sizes are in tokens
of whatever ``count_tokens`` counts.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.core.chunking import code, markdown, records, rst
from pipeline.core.chunking.packer import pack
from pipeline.core.chunking.prose import paragraphs, stretches
from pipeline.core.chunking.units import Block
from pipeline.core.errors import Misconfigured
from pipeline.core.model import Chunk, ChunkParams, CountTokens
from pipeline.core.normalise import MESSAGES_TYPE

Parse = Callable[[str], list[Block]]
ParseCode = Callable[[str, str, int], list[Block]]
"""Parses source code: text, media type and target size in tokens → blocks, as ``code.parse`` does."""

PARSERS: dict[str, Parse] = {
    "text/plain": paragraphs,
    "text/markdown": markdown.parse,
    "text/x-rst": rst.parse,
    "text/csv": records.comma_separated,
    "text/tab-separated-values": records.tab_separated,
    "application/x-ndjson": records.json_lines,
    "application/json": records.json,
    MESSAGES_TYPE: records.messages,
}
"""Media type → parser; those of source code are in ``code.GRAMMARS``. Any other type is cut as plain text."""

MAX_LINES = 250_000
"""A text of more lines is cut where lines end, whatever its type: what parsers hold of each took gigabytes for the two
million lines that 4 MiB can have."""
SMALLEST_WINDOW = 16
"""Tokens. A single code point can have four, and a chunk needs room for context."""


def chunk(
    text: str,
    media_type: str,
    *,
    params: ChunkParams,
    count_tokens: CountTokens,
    parse_code: ParseCode = code.parse,
) -> list[Chunk]:
    """The chunks of a normalised text (``pipeline.core.normalise``), in reading order.

    Every character but white space is in the last span of a chunk; a chunk never has more than ``params.max_tokens``.
    parse_code: a parser for hostile texts runs in a process of its own. Raises Misconfigured when the sizes contradict
    each other.
    """
    check(params)
    kind = media_type.partition(";")[0].strip().lower()
    if text.count("\n") > MAX_LINES:
        blocks = stretches(text)
    elif kind in code.GRAMMARS:
        blocks = parse_code(text, kind, params.target)
    else:
        blocks = PARSERS.get(kind, paragraphs)(text)
    return pack(text, blocks, params, count_tokens)


def check(params: ChunkParams) -> None:
    """Raises Misconfigured unless min ≤ target ≤ max, max is a sensible window, and the overlap a small share."""
    if params.max_tokens < SMALLEST_WINDOW:
        raise Misconfigured(f"chunk size: max_tokens is {params.max_tokens}, must be at least {SMALLEST_WINDOW}")
    if not 1 <= params.min_tokens <= params.target <= params.max_tokens:
        raise Misconfigured(
            "chunk size: must hold 1 <= min_tokens <= target <= max_tokens, "
            f"have {params.min_tokens}, {params.target}, {params.max_tokens}"
        )
    if not 0 <= params.overlap <= 0.5:
        raise Misconfigured(f"chunk overlap: is {params.overlap}, must be a share of the target from 0 to 0.5")
