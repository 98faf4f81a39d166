"""A ranking of chunks → what is shown: neighbours as one text, the same thing once, not all from one document. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import pairwise
from uuid import UUID

from pipeline.core.identifiers import exact_names
from pipeline.core.model import Span
from query.access.verify import Detail
from query.model import Passage, Ranker, Result

MERGED = 3
"""Chunks that one passage may be made of; a longer run is a document, and is read as one."""
SHINGLE = 3
"""Words. Two texts with the same words in another order are two texts."""
ALIKE = 0.9
"""Share of shingles in common (Jaccard) from which on two passages say the same."""

SKETCH = 8

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Hit:
    """One chunk of the ranking."""

    passage: Passage
    text: str
    score: float
    ranks: Mapping[Ranker, int]
    rerank_score: float | None = None


@dataclass(slots=True)
class Group:
    """What is shown as one: chunks that follow each other, the best first, and where else the same stands."""

    hits: list[Hit]
    also: list[Passage] = field(default_factory=list)

    @property
    def document(self) -> UUID:
        return self.hits[0].passage.document_id

    @property
    def in_order(self) -> list[Hit]:
        return sorted(self.hits, key=lambda hit: hit.passage.chunk_index)

    def takes(self, hit: Hit) -> bool:
        """It stands just before or just behind, and there is room."""
        if hit.passage.document_id != self.document or len(self.hits) >= MERGED:
            return False
        places = [h.passage.chunk_index for h in self.hits]
        return hit.passage.chunk_index in (min(places) - 1, max(places) + 1)


def exact_first(hits: Sequence[Hit], named: Sequence[str]) -> list[Hit]:
    """named: the question's identifiers. Who names one wants the passages that hold it, before all that only hold its
    parts or look alike; the more of them the better. Else the order stays."""
    if not named:
        return list(hits)
    wanted = set(named)

    def count(hit: Hit) -> int:
        text = f"{hit.passage.title}\n{hit.text}"
        looked_at = text.lower().replace("\\", "/")
        return len(wanted & exact_names(text)) if any(name in looked_at for name in wanted) else 0

    return sorted(hits, key=lambda hit: -count(hit))


def arrange(hits: Sequence[Hit], *, top: int, per_document: int) -> list[Group]:
    """The first ``top`` passages of a ranking, best first, with at most ``per_document`` of one document unless nothing
    else is left.

    A chunk next to one that is shown already joins it; one that says the same as a shown one of another document is
    named there. Neither takes a place of its own.
    """
    shown = _Shown()
    spare: list[Hit] = []
    count: dict[UUID, int] = {}
    for hit in hits:
        if shown.joins(hit):
            continue
        if len(shown.groups) == top:
            break
        document = hit.passage.document_id
        count[document] = count.get(document, 0) + 1
        if count[document] <= per_document:
            shown.add(hit)
        else:
            spare.append(hit)
    for hit in spare:
        if not shown.joins(hit) and len(shown.groups) < top:
            shown.add(hit)
    return shown.groups


class _Shown:
    """The groups so far, found by document and by what they say."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._of_document: dict[UUID, list[Group]] = {}
        self._saying: dict[tuple[int, Set[str]], list[tuple[_Said, Group]]] = {}
        self._said: dict[str, _Said] = {}

    def add(self, hit: Hit) -> None:
        group = Group([hit])
        self.groups.append(group)
        self._of_document.setdefault(group.document, []).append(group)
        self._learn(hit, group)

    def joins(self, hit: Hit) -> bool:
        said = self._look(hit.text)
        compared: set[int] = set()
        for value in said.sketch:
            for other, group in self._saying.get((value, said.numbers), ()):
                if hit.passage.document_id == group.document or id(other) in compared:
                    continue
                if said.is_like(other):
                    group.also.append(hit.passage)
                    return True
                compared.add(id(other))
        for group in self._of_document.get(hit.passage.document_id, ()):
            if group.takes(hit):
                group.hits.append(hit)
                self._learn(hit, group)
                return True
        return False

    def _learn(self, hit: Hit, group: Group) -> None:
        said = self._look(hit.text)
        for value in said.sketch:
            self._saying.setdefault((value, said.numbers), []).append((said, group))

    def _look(self, text: str) -> _Said:
        """Once a text: of a thousand copies with another number each, any two would be taken apart otherwise."""
        if text not in self._said:
            self._said[text] = _Said.of(text)
        return self._said[text]


@dataclass(frozen=True, slots=True, eq=False)
class _Said:
    """What a text says. Texts that differ in a number or an identifier are two, as the release notes of two versions
    are: only those with the same ``numbers`` are compared at all."""

    shingles: Set[int]
    """Their hashes: nearly the same words in the same order."""
    sketch: Sequence[int]
    """Minima of a hash over the shingles (Broder 1997): of two texts that are alike at least one is in both, but for
    odds of ALIKE's complement to the power of SKETCH. So they are compared with few others."""
    numbers: Set[str]

    @classmethod
    def of(cls, text: str) -> _Said:
        words = _WORD.findall(text.lower())
        shingles = zip(*(words[n:] for n in range(min(SHINGLE, len(words)))), strict=False)
        hashes = frozenset(map(hash, shingles))
        numbers = frozenset(
            (*exact_names(text), *(word for word in words if not word.isalpha() and any(map(str.isdigit, word))))
        )
        return cls(hashes, nsmallest(SKETCH, hashes), numbers)

    def is_like(self, other: _Said) -> bool:
        """Given that their numbers are the same."""
        common = len(self.shingles & other.shingles)
        return common >= ALIKE * (len(self.shingles) + len(other.shingles) - common)


def present(group: Group, details: Mapping[UUID, Detail]) -> Result:
    """A group as a result. Where the manifest has moved on meanwhile (no details), its best chunk alone."""
    best = group.hits[0]
    detail = details.get(best.passage.chunk_id)
    hits = group.in_order if all(hit.passage.chunk_id in details for hit in group.hits) else [best]
    text = best.text if len(hits) == 1 else joined([(details[h.passage.chunk_id].spans, h.text) for h in hits])
    return Result(
        best.passage,
        text,
        best.score,
        {ranker: min(h.ranks[ranker] for h in hits if ranker in h.ranks) for h in hits for ranker in h.ranks},
        tuple(hit.passage.chunk_id for hit in hits),
        tuple(group.also),
        best.rerank_score,
        detail.headings if detail else (),
    )


def joined(chunks: Sequence[tuple[Sequence[Span], str]]) -> str:
    """Chunks of one document (their spans, their texts) as one text, in reading order: what they both hold stands once.

    Law: every character that a span covers is in it, once. Between spans that do not touch there was white space, or
    text that is not shown: a line break stands there.
    """
    pieces: list[tuple[int, str]] = []
    for spans, text in chunks:
        at = 0
        for start, end in spans:
            pieces.append((start, text[at : at + end - start]))
            at += end - start
    pieces.sort(key=lambda piece: (piece[0], -len(piece[1])))
    parts: list[tuple[int, str]] = []
    reached = -1
    for start, piece in pieces:
        if start + len(piece) > reached:
            skipped = max(0, reached - start)
            parts.append((start + skipped, piece[skipped:]))
            reached = start + len(piece)
    text = parts[0][1] if parts else ""
    for (start, before), (following, piece) in pairwise(parts):
        gap = following - start - len(before)
        text += ("\n" * min(gap, 2)) + piece
    return text


def renamed(result: Result, current: Mapping[UUID, Passage]) -> Result:
    """A remembered result with title, place and author as the ledger has them now."""
    return replace(
        result,
        passage=current[result.passage.chunk_id],
        also=tuple(current[other.chunk_id] for other in result.also),
    )
