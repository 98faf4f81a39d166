"""One ranking from the candidates of both stores, and whether any of it is relevant to the query. Pure.

Two signs of relevance count, and either is enough: the cosine of the nearest passage, and the share of the query's
words that occur in one passage. Neither depends on documents that the caller may not read. The stores' own scores do
not serve: BM25 has no absolute scale and depends on the whole index. The floors were measured by
``python -m bench.confidence`` (docs/adr/0019-retrieval.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from query.model import Facts, Passage
from query.retrieval.arrange import Hit
from query.retrieval.fusion import fuse
from query.retrieval.steps import Steps
from query.retrieval.stores import Offers

_WORD = re.compile(r"[^\W_]+(?:[._'-][^\W_]+)*")
_ENDING = re.compile(r"(?:ations?|ings?|edly|ed|ies|es|s|ly|e)$")
COMMON_WORDS = (
    "a about after all also am an and any are as at be been before being between both but by can cannot could did "
    "do does doing for from had has have having he her here his how i if in into is it its just like made make many "
    "may me might more most much must my need needed no nor not of off on one only or other our out over possible "
    "really shall she should so some such than that the their them then there these they this those through to too "
    "under until up upon us use used using very want was way we were what when where whether which while who whom "
    "whose why will with within without would yet you your "
)
COMMON = frozenset(COMMON_WORDS.split())


@dataclass(frozen=True, slots=True)
class Floor:
    """The thresholds of relevance: below both, the results are noise."""

    cosine: float
    coverage: float
    source: str
    """The measurement that both numbers come from."""


FLOORS: Mapping[str, Floor] = {
    "all-MiniLM-L6-v2": Floor(0.30, 0.75, "bench/confidence.py: 265 right questions, 337 wrong ones, two collections"),
}


def stems(text: str) -> set[str]:
    """The content words without their most common English endings. They are compared, never shown."""
    words = {word.lower().removesuffix("'s") for word in _WORD.findall(text)} - COMMON
    return {_ENDING.sub("", word) if len(word) > 4 else word for word in words}


def coverage(query_stems: set[str], text: str) -> float:
    """The share of the query's stems that a text contains; 0 if the query has none."""
    return len(query_stems & stems(text)) / len(query_stems) if query_stems else 0.0


def best_coverage(query_stems: set[str], texts: Iterable[str]) -> float:
    """The highest coverage of any of the texts. Substring search skips most texts before they are split into words."""
    best = 0.0
    for text in texts:
        lowered = text.lower()
        if sum(stem in lowered for stem in query_stems) > best * len(query_stems):
            best = max(best, coverage(query_stems, text))
    return best


def assess(query: str, cosine: float | None, texts: Iterable[str], model: str) -> tuple[bool, Facts]:
    """Whether the candidates are relevant to the query, and why.

    cosine: that of the nearest passage; None if there is no vector search or it failed.
    texts: the candidates with their titles, read only as far as needed.
    """
    facts: Facts = {} if cosine is None else {"cosine": f"{cosine:.2f}"}
    floor = FLOORS.get(model)
    if floor is None or cosine is None:
        facts["floor"] = "none for this model" if floor is None else "none without a vector"
        return any(True for _ in texts), facts
    facts["floor"] = f"{floor.cosine:.2f}"
    if cosine >= floor.cosine:
        return True, facts
    best = best_coverage(stems(query), texts)
    return best >= floor.coverage, {**facts, "coverage": f"{best:.2f}", "coverage floor": f"{floor.coverage:.2f}"}


def rank_candidates(offers: Offers, passages: Mapping[UUID, Passage], steps: Steps, depth: int) -> list[Hit]:
    """The fusion of both stores' readable candidates, the first ``depth`` of each."""
    with steps.step("fuse"):
        texts = {c.chunk_id: c.text for offer in offers.values() for c in offer.candidates}
        rankings = {ranker: offer.ranking(depth, passages) for ranker, offer in offers.items() if offer.error is None}
        for ranker, ranking in rankings.items():
            offers[ranker].facts["passages"] = len(ranking.ids)
        fused = fuse(rankings)
    return [Hit(passages[f.chunk_id], texts[f.chunk_id], f.score, f.ranks) for f in fused]


def has_more(offers: Offers, passages: Mapping[UUID, Passage], depth: int) -> bool:
    """Whether a store has more readable candidates than the ``depth`` that were ranked."""
    return any(offer.error is None and offer.ranking(depth, passages).next_score for offer in offers.values())


def is_relevant(
    query: str, hits: Sequence[Hit], offers: Offers, passages: Mapping[UUID, Passage], model: str, steps: Steps
) -> bool:
    """Whether the candidates are relevant to the query; the step records why."""
    with steps.step("confidence") as facts:
        nearest = offers["vector"].ranking(1, passages).scores if "vector" in offers else ()
        texts = (f"{hit.passage.title}\n{hit.text}" for hit in hits)
        verdict, reasons = assess(query, nearest[0] if nearest else None, texts, model)
        facts.update({"relevant": verdict, **reasons})
    return verdict
