"""Turn a ranking of chunks into passages: neighbours merged, duplicates removed, documents mixed. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from heapq import nsmallest
from itertools import pairwise
from uuid import UUID

from pipeline.core.identifiers import exact_names
from pipeline.core.model import Span
from pipeline.ledger.entry import to_the_hour
from query.access.verify import Detail
from query.model import Passage, Ranker, Result, Sort

MAX_MERGED_CHUNKS = 3
"""The most chunks that one passage is made of; whoever needs a longer text reads the document."""
SHINGLE_WORDS = 3
"""The words in a shingle. Because of shingles, texts with the same words in another order are different texts."""
MIN_SIMILARITY = 0.9
"""The share of common shingles (Jaccard) from which on two passages are duplicates."""

SKETCH_SIZE = 8

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
    """Adjacent chunks that form one passage, the best first, and duplicates of them in other documents."""

    hits: list[Hit]
    also: list[Passage] = field(default_factory=list)

    @property
    def document(self) -> UUID:
        return self.hits[0].passage.document_id

    @property
    def in_reading_order(self) -> list[Hit]:
        return sorted(self.hits, key=lambda hit: hit.passage.chunk_index)

    def accepts(self, hit: Hit) -> bool:
        """Whether the chunk is directly before or after the group and the group has room for it."""
        if hit.passage.document_id != self.document or len(self.hits) >= MAX_MERGED_CHUNKS:
            return False
        indexes = [h.passage.chunk_index for h in self.hits]
        return hit.passage.chunk_index in (min(indexes) - 1, max(indexes) + 1)


def exact_first(hits: Sequence[Hit], named: Sequence[str]) -> list[Hit]:
    """Move passages that contain the query's identifiers to the front: the more of them, the further. Otherwise the
    order stays. named: the identifiers."""
    if not named:
        return list(hits)
    identifiers = set(named)

    def count(hit: Hit) -> int:
        text = f"{hit.passage.title}\n{hit.text}"
        lowered = text.lower().replace("\\", "/")
        return len(identifiers & exact_names(text)) if any(name in lowered for name in identifiers) else 0

    return sorted(hits, key=lambda hit: -count(hit))


def by_time(hits: Sequence[Hit], sort: Sort, *, complete: bool) -> list[Hit]:
    """The hits in the order of their documents' times, those without a time last; within a document in reading order.
    complete: False if the index has more hits. The index sorts by the hour, so the hits of the last hour may be
    incomplete: they are left to the next, larger round, unless there are no others."""

    def key(hit: Hit) -> tuple[bool, float, UUID, int]:
        at = hit.passage.source_modified_at
        seconds = 0.0 if at is None else at.timestamp() * (-1 if sort == "newest" else 1)
        return at is None, seconds, hit.passage.document_id, hit.passage.chunk_index

    ordered = sorted(hits, key=key)
    if complete or not ordered:
        return ordered
    last = _hour(ordered[-1])
    return [hit for hit in ordered if _hour(hit) != last] or ordered


def _hour(hit: Hit) -> datetime | None:
    at = hit.passage.source_modified_at
    return to_the_hour(at) if at else None


def arrange(hits: Sequence[Hit], *, top: int, per_document: int) -> list[Group]:
    """The first ``top`` passages of a ranking, best first, with at most ``per_document`` of one document unless nothing
    else is left.

    A chunk that is adjacent to a chosen passage is merged into it; a duplicate of a chosen passage of another document
    is listed in that passage's ``also``. Neither counts as a passage of its own.
    """
    chosen = _Groups()
    spare: list[Hit] = []
    count: dict[UUID, int] = {}
    for hit in hits:
        if chosen.merge(hit):
            continue
        if len(chosen.groups) == top:
            break
        document = hit.passage.document_id
        count[document] = count.get(document, 0) + 1
        if count[document] <= per_document:
            chosen.add(hit)
        else:
            spare.append(hit)
    for hit in spare:
        if not chosen.merge(hit) and len(chosen.groups) < top:
            chosen.add(hit)
    return chosen.groups


class _Groups:
    """The chosen groups, indexed by document and by the fingerprints of their texts."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._of_document: dict[UUID, list[Group]] = {}
        self._by_sketch: dict[tuple[int, Set[str]], list[tuple[_Fingerprint, Group]]] = {}
        self._fingerprints: dict[str, _Fingerprint] = {}

    def add(self, hit: Hit) -> None:
        group = Group([hit])
        self.groups.append(group)
        self._of_document.setdefault(group.document, []).append(group)
        self._index(hit, group)

    def merge(self, hit: Hit) -> bool:
        """Whether the hit was merged into a chosen group, as a duplicate or as a neighbour."""
        fingerprint = self._fingerprint(hit.text)
        compared: set[int] = set()
        for value in fingerprint.sketch:
            for other, group in self._by_sketch.get((value, fingerprint.numbers), ()):
                if hit.passage.document_id == group.document or id(other) in compared:
                    continue
                if fingerprint.is_similar(other):
                    group.also.append(hit.passage)
                    return True
                compared.add(id(other))
        for group in self._of_document.get(hit.passage.document_id, ()):
            if group.accepts(hit):
                group.hits.append(hit)
                self._index(hit, group)
                return True
        return False

    def _index(self, hit: Hit, group: Group) -> None:
        fingerprint = self._fingerprint(hit.text)
        for value in fingerprint.sketch:
            self._by_sketch.setdefault((value, fingerprint.numbers), []).append((fingerprint, group))

    def _fingerprint(self, text: str) -> _Fingerprint:
        """The fingerprint of a text, which is computed once."""
        if text not in self._fingerprints:
            self._fingerprints[text] = _Fingerprint.of(text)
        return self._fingerprints[text]


@dataclass(frozen=True, slots=True, eq=False)
class _Fingerprint:
    """A text in a form that shows duplicates. Texts that differ in a number or an identifier are not duplicates (such
    as the release notes of two versions): only texts with the same ``numbers`` are compared."""

    shingles: Set[int]
    """The hashes of the text's shingles."""
    sketch: Sequence[int]
    """The smallest hashes (MinHash: Broder 1997). Two duplicates have at least one in common, except with probability
    (1 - MIN_SIMILARITY) ** SKETCH_SIZE, so a text is compared with few others."""
    numbers: Set[str]

    @classmethod
    def of(cls, text: str) -> _Fingerprint:
        words = _WORD.findall(text.lower())
        shingles = zip(*(words[n:] for n in range(min(SHINGLE_WORDS, len(words)))), strict=False)
        hashes = frozenset(map(hash, shingles))
        numbers = frozenset(
            (*exact_names(text), *(word for word in words if not word.isalpha() and any(map(str.isdigit, word))))
        )
        return cls(hashes, nsmallest(SKETCH_SIZE, hashes), numbers)

    def is_similar(self, other: _Fingerprint) -> bool:
        """Whether the texts are duplicates, provided that their numbers are the same."""
        common = len(self.shingles & other.shingles)
        return common >= MIN_SIMILARITY * (len(self.shingles) + len(other.shingles) - common)


def present(group: Group, details: Mapping[UUID, Detail]) -> Result:
    """A group as a result; only its best chunk if the manifest has changed meanwhile (details are missing)."""
    best = group.hits[0]
    detail = details.get(best.passage.chunk_id)
    hits = group.in_reading_order if all(hit.passage.chunk_id in details for hit in group.hits) else [best]
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
    """Chunks of one document (their spans and texts) as one text in reading order, without their overlaps.

    Law: every character that a span covers is in it exactly once. Spans that do not touch, because of white space or
    text that is not shown, are separated by a line break.
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


def refreshed(result: Result, current: Mapping[UUID, Passage], details: Mapping[UUID, Detail]) -> Result:
    """A cached result with title, address, author and headings as the ledger has them now. details: of the best chunks
    that had headings."""
    detail = details.get(result.passage.chunk_id)
    return replace(
        result,
        passage=current[result.passage.chunk_id],
        also=tuple(current[other.chunk_id] for other in result.also),
        headings=detail.headings if detail else (),
    )
