"""From what the stores offer to one ranking, and whether it is about the question. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from query.arrange import Hit
from query.confidence import judge
from query.fusion import fuse
from query.model import Passage
from query.offers import Offers
from query.steps import Steps


def ranked(offers: Offers, passages: Mapping[UUID, Passage], steps: Steps, depth: int) -> list[Hit]:
    """The fusion of what may be shown, the first ``depth`` of each store."""
    with steps.step("fuse"):
        texts = {c.chunk_id: c.text for offer in offers.values() for c in offer.candidates}
        rankings = {ranker: offer.ranking(depth, passages) for ranker, offer in offers.items() if offer.error is None}
        for ranker, ranking in rankings.items():
            offers[ranker].facts["passages"] = len(ranking.ids)
        fused = fuse(rankings)
    return [Hit(passages[f.chunk_id], texts[f.chunk_id], f.score, f.ranks) for f in fused]


def reaches_further(offers: Offers, passages: Mapping[UUID, Passage], depth: int) -> bool:
    """Whether a store has more that may be shown than the ``depth`` that were taken of it."""
    return any(offer.error is None and offer.ranking(depth, passages).next_score for offer in offers.values())


def relevant(
    query: str, hits: Sequence[Hit], offers: Offers, passages: Mapping[UUID, Passage], model: str, steps: Steps
) -> bool:
    """Whether to answer at all (query/confidence.py)."""
    with steps.step("confidence") as facts:
        nearest = offers["vector"].ranking(1, passages).scores if "vector" in offers else ()
        texts = (f"{hit.passage.title}\n{hit.text}" for hit in hits)
        enough, why = judge(query, nearest[0] if nearest else None, texts, model)
        facts.update({"relevant": enough, **why})
    return enough
