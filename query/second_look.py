"""The question asked once more, with what the first look found (query/expansion.py).

No store is searched anew: by the vector that has moved, and by the words that were added, the passages are compared
that are known already, whoever offered them. Another search of both takes as long as the first one, and the answers are
no better for it (docs/evaluation.md). Of each offer count as many as there are however much is withheld, and no spare
ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from pipeline.core.errors import PenstockError
from pipeline.tasks import together
from query import expansion
from query.arrange import Hit
from query.embedder import bounded
from query.model import Candidate, Passage
from query.offers import Embedding, Offer, Offers, Question, Scope, Stores
from query.ranking import ranked
from query.steps import Steps

SHARE = 1 / 3
"""Of the time for vectors: what a search's budget (query/budget.py) has left."""


async def second_look(
    stores: Stores,
    question: Question,
    scope: Scope,
    embedding: Embedding,
    steps: Steps,
    first: Offers,
    passages: Mapping[UUID, Passage],
    hits: Sequence[Hit],
    *,
    depth: int,
) -> list[Hit] | None:
    """The ranking with it. None: a half is missing, or this took too long (the step says why); then the first look
    stands.

    first, passages, hits: what the first look was offered, may show, and made of it.
    """
    if any(offer.error is not None for offer in first.values()):
        return None
    try:
        with steps.step("feedback") as facts:
            async with bounded(stores.timeouts.vectors * SHARE, "the second look"):
                chosen = expansion.weighed([(hit.passage.chunk_id, hit.text, hit.score) for hit in hits])
                facts["passages"] = len(chosen)
                known = counted(first, passages, depth)
                likeness, relevance = await together(  # in this order: Postgres works while Python looks for words
                    _likeness(stores, scope, embedding, chosen, list(known)),
                    _relevance(stores, scope, question, chosen, list(known), hits),
                )
    except PenstockError:
        return None
    again: Offers = {
        "vector": _offer(known.values(), likeness, first["vector"]),
        "keyword": _offer(known.values(), relevance, first["keyword"]),
    }
    return ranked(again, passages, Steps(), depth)  # the step "feedback" stands for all of it


def counted(offers: Offers, passages: Mapping[UUID, Passage], depth: int) -> dict[UUID, Candidate]:
    """The first of each offer, and one more each, that says where the ranking ends."""
    candidates = {c.chunk_id: c for offer in offers.values() for c in offer.candidates}
    return {id_: candidates[id_] for offer in offers.values() for id_ in offer.ranking(depth + 1, passages).ids}


async def _likeness(
    stores: Stores, scope: Scope, embedding: Embedding, chosen: Sequence[expansion.Weighed], ids: Sequence[UUID]
) -> dict[UUID, float]:
    """How near these passages are to the question's vector when that has moved."""
    _, vector = await asyncio.shield(embedding)
    vector = expansion.moved(vector, chosen, await stores.embeddings(scope, chosen))
    return await stores.likeness(scope, ids, vector)


async def _relevance(
    stores: Stores,
    scope: Scope,
    question: Question,
    chosen: Sequence[expansion.Weighed],
    ids: Sequence[UUID],
    hits: Sequence[Hit],
) -> dict[UUID, float]:
    """What these passages are worth to the question's words and those that were added."""
    return await stores.relevance(scope, ids, question.text, expansion.typical(chosen, [hit.text for hit in hits]))


def _offer(candidates: Iterable[Candidate], scores: Mapping[UUID, float], first: Offer) -> Offer:
    """Those that have a score, best first. How many they are is told in the place of the first look's."""
    found = [replace(c, score=scores[c.chunk_id]) for c in candidates if c.chunk_id in scores]
    return Offer(len(found), sorted(found, key=lambda c: (-c.score, c.chunk_id)), first.facts)
