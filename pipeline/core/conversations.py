"""A member's history: pairs of question and answer in time order, ten to a chunk, and when it is too long to be whole.

Everything here is a function of the *set* of pairs: neither the order in which they came nor how they were batched
leaves a trace. See docs/adr/0018-conversations.md.
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
"""Never a setting: another number would be another chunk for everything that is embedded."""

Place = tuple[datetime, bytes]
"""Where a pair stands among its member's: when it was first asked; at a tie its digest decides."""


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
    """SHA-256 of its pairs' digests. No two chunks of a member share a pair, so none has the digest of another."""
    position: int
    first_at: datetime
    last_at: datetime
    text: str


def pair_digest(question: str, answer: str) -> bytes:
    """SHA-256 (32 bytes): a pair is known by its texts, whatever conversation it was said in."""
    return hashlib.sha256(json.dumps([question, answer], ensure_ascii=False).encode()).digest()


def subject_digest(*names: str) -> bytes:
    """SHA-256 of what was forgotten: a member, or a member, a source and a conversation."""
    return hashlib.sha256(json.dumps(names, ensure_ascii=False).encode()).digest()


def render(question: str, answer: str) -> str:
    """A pair as text. Times are not in it: a chunk is embedded again only when its words change."""
    return f"Question: {question.strip()}\nAnswer: {answer.strip()}"


def group(pairs: Iterable[Pair], *, first_position: int = 0) -> list[Chunk]:
    """All pairs of a member, or all from a chunk's first pair on, as chunks. Every one but the last holds ten."""
    ordered = sorted(pairs, key=lambda pair: pair.place)
    chunks = []
    for position, start in enumerate(range(0, len(ordered), PAIRS_PER_CHUNK), first_position):
        some = ordered[start : start + PAIRS_PER_CHUNK]
        digest = hashlib.sha256(b"".join(pair.digest for pair in some)).digest()
        text = "\n\n".join(pair.text for pair in some)
        chunks.append(Chunk(digest, position, some[0].time, some[-1].time, text))
    return chunks


def first_change(before: Mapping[bytes, datetime], after: Mapping[bytes, datetime]) -> Place | None:
    """The first place that something came to or went from; None: nothing moved. Both map digests to times."""
    moved = [
        (moment, digest)
        for digest in before.keys() | after.keys()
        if before.get(digest) != after.get(digest)
        for moment in (before.get(digest), after.get(digest))
        if moment is not None
    ]
    return min(moved, default=None)


def regroup_from(pairs_before: int) -> tuple[int, int]:
    """(position of the first chunk that may differ, number of the pair that it begins with), when so many pairs stand
    before the first change."""
    position = pairs_before // PAIRS_PER_CHUNK
    return position, position * PAIRS_PER_CHUNK


def is_chunked(*, already: bool, tokens: int, gate_tokens: int) -> bool:
    """One way: below the gate a history is served whole, and once it has reached it never again."""
    return already or tokens >= gate_tokens


def made_by(generation: Generation) -> str:
    """The space that a generation's vectors lie in. Generations that only cut documents otherwise share it."""
    return json.dumps(
        [generation.model, generation.revision, generation.dimensions, generation.document_prefix], ensure_ascii=False
    )


def pieces(text: str, *, window: int, count_tokens: CountTokens) -> list[tuple[str, int]]:
    """The text in parts that fit a model's window (tokens), each with its tokens. Halved where it hurts least: between
    pairs, then lines, then words."""
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
    """Cut near the middle: within its middle half at the best kind of seam there is, else anywhere."""
    middle = len(text) // 2
    for seam in _SEAMS:
        places = [match.start() for match in seam.finditer(text, len(text) // 4, len(text) - len(text) // 4)]
        if places:
            at = min(places, key=lambda place: abs(place - middle))
            if text[:at].strip() and text[at:].strip():
                return text[:at], text[at:].lstrip()
    return text[:middle], text[middle:]
