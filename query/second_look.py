"""The question asked once more, with what the first look found (query/expansion.py).

Only Elasticsearch is asked anew. By the vector that has moved the passages are compared that are known already, whoever
offered them: another walk through the graph takes as long as the first one, and the answers are no better for it
(docs/evaluation.md). Of each offer count as many as there are however much is withheld, and no spare ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from pipeline.core.errors import PenstockError
from pipeline.embedding.port import Vectors
from pipeline.tasks import ended
from query import expansion
from query.arrange import Hit
from query.embedder import bounded
from query.model import Candidate, Passage, Ranker
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
    spare: int,
) -> tuple[list[Hit], Mapping[UUID, Passage]] | None:
    """The ranking with it, and all of what was offered that may be shown. None: a half is missing, or this took too
    long (the step says why); then the first look stands.

    first, passages, hits: what the first look was offered, may show, and made of it.
    """
    if any(offer.error is not None for offer in first.values()):
        return None
    inner = Steps()  # a step "feedback" stands for them
    try:
        with steps.step("feedback") as facts:
            async with bounded(stores.timeouts.vectors * SHARE, "the second look"):
                chosen = expansion.weighed([(hit.passage.chunk_id, hit.text, hit.score) for hit in hits])
                facts["passages"] = len(chosen)
                words = expansion.typical(chosen, [hit.text for hit in hits])
                known = counted(first, passages, depth)
                comparing = asyncio.create_task(_compared(stores, scope, embedding, chosen, list(known), inner))
                try:
                    again, shown = await stores.offers(
                        replace(question, mode="keyword"), scope, None, inner,
                        depth=depth, spare=spare, more=words, known=passages,
                    )  # fmt: skip
                    vector, scores = await comparing
                finally:
                    await ended([comparing])
                new = [id_ for id_ in counted(again, shown, depth) if id_ not in known]
                with inner.step("vectors"):
                    scores |= await stores.likeness(scope, new, vector)
    except PenstockError:
        return None
    offers: dict[Ranker, Offer] = {**again, "vector": _by_likeness([*first.values(), *again.values()], scores)}
    shown = {**passages, **shown}
    return ranked(offers, shown, inner, depth), shown


def counted(offers: Offers, passages: Mapping[UUID, Passage], depth: int) -> dict[UUID, None]:
    """The first of each offer, and one more each, that says where the ranking ends."""
    return {id_: None for offer in offers.values() for id_ in offer.ranking(depth + 1, passages).ids}


async def _compared(
    stores: Stores,
    scope: Scope,
    embedding: Embedding,
    chosen: Sequence[expansion.Weighed],
    ids: Sequence[UUID],
    steps: Steps,
) -> tuple[Vectors, dict[UUID, float]]:
    """The question's vector, moved, and how near these passages are to it."""
    _, vector = await asyncio.shield(embedding)
    with steps.step("vectors"):
        vector = expansion.moved(vector, chosen, await stores.embeddings(scope, chosen))
        return vector, await stores.likeness(scope, ids, vector)


def _by_likeness(offers: Sequence[Offer], scores: Mapping[UUID, float]) -> Offer:
    """Everything that was offered and has a score, nearest first."""
    offered = {c.chunk_id: c for offer in offers for c in offer.candidates}
    found = [Candidate(id_, offered[id_].document_id, offered[id_].text, score) for id_, score in scores.items()]
    return Offer(len(found), sorted(found, key=lambda c: (-c.score, c.chunk_id)))
