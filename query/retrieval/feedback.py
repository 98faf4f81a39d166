"""The question asked once more, with what the first look found (query/retrieval/feedback.py).

No store is searched anew: by the vector that has moved, and by the words that were added, the passages are compared
that are known already, whoever offered them. Another search of both takes as long as the first one, and the answers are
no better for it (docs/evaluation.md). Of each offer count as many as there are however much is withheld, and no spare
ones.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from uuid import UUID

import numpy as np

from pipeline.core.errors import PenstockError
from pipeline.embedding.port import Vectors
from pipeline.runtime.tasks import gather_or_cancel, time_limit
from query.model import Candidate, Passage
from query.retrieval.arrange import Hit
from query.retrieval.ranking import COMMON, ranked
from query.retrieval.steps import Steps
from query.retrieval.stores import Embedding, Offer, Offers, Question, Scope, Stores

SHARE = 1 / 3
"""Of the time for vectors: what a search's budget (query/retrieval/timeouts.py) has left."""


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
            async with time_limit(stores.timeouts.vectors * SHARE, "the second look"):
                chosen = weighed([(hit.passage.chunk_id, hit.text, hit.score) for hit in hits])
                facts["passages"] = len(chosen)
                known = counted(first, passages, depth)
                (
                    likeness,
                    relevance,
                ) = await gather_or_cancel(  # in this order: Postgres works while Python looks for words
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
    stores: Stores, scope: Scope, embedding: Embedding, chosen: Sequence[Weighed], ids: Sequence[UUID]
) -> dict[UUID, float]:
    """How near these passages are to the question's vector when that has moved."""
    _, vector = await asyncio.shield(embedding)
    vector = moved(vector, chosen, await stores.embeddings(scope, [passage.chunk_id for passage in chosen]))
    return await stores.likeness(scope, ids, vector)


async def _relevance(
    stores: Stores,
    scope: Scope,
    question: Question,
    chosen: Sequence[Weighed],
    ids: Sequence[UUID],
    hits: Sequence[Hit],
) -> dict[UUID, float]:
    """What these passages are worth to the question's words and those that were added."""
    return await stores.relevance(scope, ids, question.text, typical(chosen, [hit.text for hit in hits]))


def _offer(candidates: Iterable[Candidate], scores: Mapping[UUID, float], first: Offer) -> Offer:
    """Those that have a score, best first. How many they are is told in the place of the first look's."""
    scored = [replace(c, score=scores[c.chunk_id]) for c in candidates if c.chunk_id in scores]
    return Offer(len(scored), sorted(scored, key=lambda c: (-c.score, c.chunk_id)), first.facts)


PASSAGES = 5
"""That the vector moves towards."""
WORD_PASSAGES = 3
"""That words are taken from: further down they are about something else."""
WORDS = 20
WORDS_WEIGHT = 2.0
"""Of all of these words together, one of the question's own being 1."""

_WORD = re.compile(r"[^\W\d_]{3,}")
_APART = {n: " " for n in range(128) if not chr(n).isalpha()}
"""For ASCII, where that is four times as fast."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A passage that has a say, and how much: the weights of all of them are 1 together."""

    chunk_id: UUID
    text: str
    weight: float


def weighed(found: Sequence[tuple[UUID, str, float]]) -> list[Weighed]:
    """found: chunk, text and score of the fusion (standard deviations), best first."""
    first = found[:PASSAGES]
    shares = [exp(score - first[0][2]) for _, _, score in first]
    return [Weighed(id_, text, share / sum(shares)) for (id_, text, _), share in zip(first, shares, strict=True)]


def moved(vector: Vectors, passages: Sequence[Weighed], embeddings: Mapping[UUID, Vectors]) -> Vectors:
    """The question's vector half way to the passages' mean; float32, unit length. A passage whose embedding is gone
    meanwhile has no say."""
    here = np.asarray(vector, dtype=np.float32)
    for passage in passages:
        if passage.chunk_id in embeddings:
            here = here + passage.weight * embeddings[passage.chunk_id]
    length = float(np.linalg.norm(here))
    return np.asarray(here / length if length else vector, dtype=np.float32)


def typical(passages: Sequence[Weighed], background: Sequence[str]) -> dict[str, float]:
    """Words of the passages and what each is worth, together WORDS_WEIGHT at most. background: the texts of everything
    that was found."""
    worth: dict[str, float] = {}
    first = passages[:WORD_PASSAGES]
    theirs = {word for passage in first for word in _words(passage.text)}
    frequency = Counter(word for text in background for word in theirs.intersection(_all_words(text)))
    whole = sum(passage.weight for passage in first)
    for passage in first:
        words = _words(passage.text)
        for word in words:
            rare = log(1 + len(background) / max(1, frequency[word]))
            worth[word] = worth.get(word, 0.0) + passage.weight / whole / len(words) * rare
    best = sorted(worth, key=lambda word: (-worth[word], word))[:WORDS]
    total = sum(worth[word] for word in best)
    return {word: WORDS_WEIGHT * worth[word] / total for word in best}


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text.lower()) if word not in COMMON]


def _all_words(text: str) -> list[str]:
    """In lower case, shorter ones too: hundreds of texts are looked through in every search."""
    lowered = text.lower()
    return lowered.translate(_APART).split() if lowered.isascii() else _WORD.findall(lowered)
