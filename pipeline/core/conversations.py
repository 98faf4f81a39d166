"""A member's conversation history: pairs of question and answer in time order, which are grouped into chunks. Pure.

Everything here is a function of the *set* of pairs: the result does not depend on the order in which they arrived, nor
on their batches. The reasons are in docs/adr/0018-conversations.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pipeline.core.model import CountTokens, Generation

PAIRS_PER_CHUNK = 10
"""It is not a setting, because another number would change all chunks, and all of them would be embedded again."""

Place = tuple[datetime, bytes]
"""The position of a pair among those of its member: when it was first asked, then its digest."""


@dataclass(frozen=True, slots=True)
class Pair:
    question: str
    answer: str
    time: datetime
    """When it was first asked."""
    digest: bytes

    @property
    def place(self) -> Place:
        return self.time, self.digest

    @property
    def text(self) -> str:
        return render(self.question, self.answer)


@dataclass(frozen=True, slots=True)
class Chunk:
    digest: bytes
    """SHA-256 of its pairs' digests. No two chunks of a member share a pair, so their digests differ."""
    position: int
    first_at: datetime
    last_at: datetime
    text: str


def pair_digest(question: str, answer: str) -> bytes:
    """SHA-256 of a pair's texts (32 bytes), which identifies it in whatever conversation it occurs."""
    return hashlib.sha256(json.dumps([question, answer], ensure_ascii=False).encode()).digest()


def subject_digest(*names: str) -> bytes:
    """SHA-256 of the names of what was forgotten: a member, or a member, a source and a conversation."""
    return hashlib.sha256(json.dumps(names, ensure_ascii=False).encode()).digest()


WHOLE_TENANT = subject_digest()
"""Stands for everybody of a tenant that was forgotten."""


def render(question: str, answer: str) -> str:
    """A pair as text. It contains no times, so that a chunk is embedded again only when its words change."""
    return f"Question: {question.strip()}\nAnswer: {answer.strip()}"


def group(pairs: Iterable[Pair], *, first_position: int = 0) -> list[Chunk]:
    """Group all pairs of a member into chunks of PAIRS_PER_CHUNK; only the last one may have fewer. With
    ``first_position``: all pairs from the first one of the chunk at this position on."""
    ordered = sorted(pairs, key=lambda pair: pair.place)
    chunks = []
    for position, start in enumerate(range(0, len(ordered), PAIRS_PER_CHUNK), first_position):
        of_chunk = ordered[start : start + PAIRS_PER_CHUNK]
        digest = hashlib.sha256(b"".join(pair.digest for pair in of_chunk)).digest()
        text = "\n\n".join(pair.text for pair in of_chunk)
        chunks.append(Chunk(digest, position, of_chunk[0].time, of_chunk[-1].time, text))
    return chunks


def first_change(before: Mapping[bytes, datetime], after: Mapping[bytes, datetime]) -> Place | None:
    """The first place at which a pair was added or removed; None: there is no difference. before, after: the times of
    pairs by their digests."""
    moved = [
        (moment, digest)
        for digest in before.keys() | after.keys()
        if before.get(digest) != after.get(digest)
        for moment in (before.get(digest), after.get(digest))
        if moment is not None
    ]
    return min(moved, default=None)


def regroup_from(pairs_before: int) -> tuple[int, int]:
    """(position of the first chunk that may have changed, number of its first pair). pairs_before: the number of pairs
    before the first change."""
    position = pairs_before // PAIRS_PER_CHUNK
    return position, position * PAIRS_PER_CHUNK


def is_chunked(*, already: bool, tokens: int, gate_tokens: int) -> bool:
    """Whether a history is served by its chunks instead of as a whole: once it has reached gate_tokens, and from then
    on for good."""
    return already or tokens >= gate_tokens


def made_by(generation: Generation) -> str:
    """Identifies the vector space of a generation. Generations that differ only in how they chunk documents share
    it."""
    return json.dumps(
        [generation.model, generation.revision, generation.dimensions, generation.document_prefix], ensure_ascii=False
    )


def pieces(text: str, *, window: int, count_tokens: CountTokens) -> list[tuple[str, int]]:
    """Split a text into pieces that fit a model's window (in tokens); returns (piece, its tokens). A piece that is too
    large is halved between pairs if possible, otherwise between lines, then between words."""
    done: list[tuple[str, int]] = []
    todo = [text]
    while todo:
        part = todo.pop()
        [tokens] = count_tokens([part])
        if tokens <= window or len(part) < 2:
            done.append((part, tokens))
        else:
            todo += reversed(_halves(part))
    return done


_SEAMS = (re.compile(r"\n\n(?=Question: )"), re.compile(r"\n+"), re.compile(r"\s+"))


def _halves(text: str) -> Sequence[str]:
    """Split a text in two: in its middle half at the best kind of seam that there is, otherwise exactly in the
    middle."""
    middle = len(text) // 2
    for seam in _SEAMS:
        places = [match.start() for match in seam.finditer(text, len(text) // 4, len(text) - len(text) // 4)]
        if places:
            at = min(places, key=lambda place: abs(place - middle))
            if text[:at].strip() and text[at:].strip():
                return text[:at], text[at:].lstrip()
    return text[:middle], text[middle:]
