"""One ranking from the candidates of both stores, and whether any of it is relevant to the query. Pure.

Two signs of relevance count, and either is enough: the cosine of the nearest passage, and the share of the query's
words that occur in one passage, unless its cosine is that of most unrelated questions. Where a reranker has a floor,
its best score takes the place of the cosine. None of them depends on documents that the caller may not read. The
stores' own scores do not serve: BM25 has no absolute scale and depends on the whole index. The floors belong to the
generation (docs/adr/0072-relevance-floor.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from pipeline.core.identifiers import identifiers
from pipeline.core.model import Generation
from query.model import Facts, Passage, Ranker
from query.retrieval.arrange import Hit
from query.retrieval.fusion import WEIGHTS, fuse
from query.retrieval.keywords import matched
from query.retrieval.steps import Steps
from query.retrieval.stores import Offers
from query.retrieval.words import best_coverage
from query.settings import RankingSettings

MEASURED: Mapping[str, float] = {"all-MiniLM-L6-v2": 0.30}
"""The floor of a model before its generation is calibrated. By two collections: 265 right questions, 337 wrong ones."""


@dataclass(frozen=True, slots=True)
class Floors:
    """The thresholds of relevance: a query whose passages are below all of them is not answered."""

    cosine: float | None
    """None: not known, so that every candidate counts as relevant."""
    coverage: float
    source: str
    """Where the cosine's floor comes from, in a few words for the steps."""
    unrelated: float | None = None
    """Words in common count from this cosine on, unless one is an identifier; None: at any cosine."""
    rerank: float | None = None
    """The least score of the reranker in use; None: none is set, or it was not calibrated."""


def floors_of(
    generation: Generation, settings: RankingSettings, *, reranker: str | None = None, rerank: float | None = None
) -> Floors:
    """The floors that are configured, else calibrated. reranker: the model of the reranker in use. rerank: its
    configured floor."""
    calibration = generation.calibration
    unrelated = None
    if settings.cosine_floor is not None:
        cosine: float | None = settings.cosine_floor
        source = "PENSTOCK_QUERY_COSINE_FLOOR"
    elif calibration is not None:
        cosine, unrelated = calibration.cosine, calibration.unrelated
        source = "calibrated"  # not on how many chunks: most of them this caller may not read
    else:
        cosine = MEASURED.get(generation.model)
        source = "not calibrated yet" if cosine is None else "measured for this model"
    if rerank is None and calibration is not None and calibration.reranker == reranker:
        rerank = calibration.rerank
    return Floors(cosine, settings.coverage_floor, source, unrelated, None if reranker is None else rerank)


def assess(
    query: str, cosine: float | None, texts: Iterable[str], floors: Floors, rerank_score: float | None = None
) -> tuple[bool, Facts]:
    """Whether the candidates are relevant to the query, and why.

    cosine: that of the nearest passage; None if there is no vector search or it failed.
    texts: the candidates with their titles, read only as far as needed. Of a long query, the words count that are
    searched for.
    rerank_score: the best score of the reranker; None if it did not score them.
    """
    facts: Facts = {} if cosine is None else {"cosine": f"{cosine:.2f}"}
    if rerank_score is not None and floors.rerank is not None:
        facts |= {"rerank score": f"{rerank_score:.3f}", "rerank floor": f"{floors.rerank:.3f}"}
        if rerank_score >= floors.rerank:
            return True, facts
    elif cosine is None or floors.cosine is None:
        facts["floor"] = "none without a vector" if cosine is None else f"none: {floors.source}"
        return any(True for _ in texts), facts
    else:
        facts |= {"floor": f"{floors.cosine:.2f}", "floor source": floors.source}
        if cosine >= floors.cosine:
            return True, facts
        if floors.unrelated is not None and cosine < floors.unrelated and not identifiers(query):
            return False, {**facts, "coverage": f"not below a cosine of {floors.unrelated:.2f}"}
    best = best_coverage(matched(query), texts)
    return best >= floors.coverage, {**facts, "coverage": f"{best:.2f}", "coverage floor": f"{floors.coverage:.2f}"}


def rank_candidates(
    offers: Offers,
    passages: Mapping[UUID, Passage],
    steps: Steps,
    depth: int,
    weights: Mapping[Ranker, float],
) -> list[Hit]:
    """The fusion of both stores' readable candidates, the first ``depth`` of each."""
    with steps.step("fuse"):
        texts = {c.chunk_id: c.text for offer in offers.values() for c in offer.candidates}
        rankings = {ranker: offer.ranking(depth, passages) for ranker, offer in offers.items() if offer.error is None}
        for ranker, ranking in rankings.items():
            offers[ranker].facts["passages"] = len(ranking.ids)
        fused = fuse(rankings, weights)
    return [Hit(passages[f.chunk_id], texts[f.chunk_id], f.score, f.ranks) for f in fused]


def weights_of(settings: RankingSettings) -> Mapping[Ranker, float]:
    """The weights of the fusion."""
    return {**WEIGHTS, "keyword": settings.keyword_weight}


def has_more(offers: Offers, passages: Mapping[UUID, Passage], depth: int) -> bool:
    """Whether a store has more readable candidates than the ``depth`` that were ranked."""
    return any(offer.error is None and offer.ranking(depth, passages).next_score for offer in offers.values())


def nearest_cosine(offers: Offers, passages: Mapping[UUID, Passage]) -> float | None:
    """The cosine of the nearest readable passage; None if there is no vector search or it failed."""
    scores = offers["vector"].ranking(1, passages).scores if "vector" in offers else ()
    return scores[0] if scores else None


def is_relevant(query: str, hits: Sequence[Hit], cosine: float | None, floors: Floors, steps: Steps) -> bool:
    """Whether the candidates are relevant to the query; the step records why. Hits that were reranked count by their
    best score."""
    with steps.step("confidence") as facts:
        texts = (f"{hit.passage.title}\n{hit.text}" for hit in hits)
        scores = [hit.rerank_score for hit in hits if hit.rerank_score is not None]
        verdict, reasons = assess(query, cosine, texts, floors, max(scores, default=None))
        facts.update({"relevant": verdict, **reasons})
    return verdict
