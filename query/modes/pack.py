"""Whole documents → the passages that fit a budget, in reading order. Pure.

Chunks repeat context (a table's header, the end of the passage before), so that each can be found by itself. Read one
after another they shall not: each passage is the part of its chunk that has not been read yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from uuid import UUID

from pipeline.core.model import CountTokens, Span
from query.modes.budget import PASSAGE_TOKENS

COUNTED_AT_ONCE = 64
"""Passages: of a document that is far too long, little more than what fits is counted."""


@dataclass(frozen=True, slots=True)
class Part:
    """One chunk's own text."""

    chunk_id: UUID
    chunk_index: int
    """From 0, in reading order, as in the manifest."""
    text: str
    headings: tuple[str, ...]


def parts(
    text: str, chunk_ids: Sequence[UUID], spans: Sequence[Sequence[Span]], headings: Sequence[Sequence[str]]
) -> Iterator[Part]:
    """A document's chunks without what an earlier one had already; those of nothing else but that are left out."""
    read = 0
    for n, (chunk_id, of_chunk) in enumerate(zip(chunk_ids, spans, strict=True)):
        own = "".join(text[max(start, read) : end] for start, end in of_chunk if end > read)
        read = max(read, *(end for _, end in of_chunk))
        if own.strip():
            yield Part(chunk_id, n, own, tuple(headings[n]))


class Packer:
    """Takes documents in the order of their worth: each as far as it fits, and none after the first that does not.

    A gap would mislead more than an end does: no smaller document further down is taken instead.
    """

    def __init__(self, budget_tokens: int, count: CountTokens) -> None:
        self._left = self._budget = budget_tokens
        self._count = count
        self.taken: list[list[Part]] = []
        """Of each document that was added, the parts that fit; the last one may lack its end, or be empty."""
        self.is_full = False
        """Something did not fit."""

    @property
    def tokens(self) -> int:
        return self._budget - self._left

    @property
    def is_cut(self) -> bool:
        """The last document's beginning is there and its end is not."""
        return self.is_full and bool(self.taken[-1])

    def add(self, document: Iterable[Part]) -> None:
        """Not after it is full."""
        fitting: list[Part] = []
        self.taken.append(fitting)
        remaining = iter(document)
        while some := list(islice(remaining, COUNTED_AT_ONCE)):
            for part, tokens in zip(some, self._count([part.text for part in some]), strict=True):
                if tokens + PASSAGE_TOKENS > self._left:
                    self.is_full = True
                    return
                self._left -= tokens + PASSAGE_TOKENS
                fitting.append(part)
