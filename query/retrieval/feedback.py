"""Pseudo-relevance feedback: rank the candidates again, with a query that the best of them have expanded.

No store is searched again. The moved query vector and the added words score the candidates that both stores proposed. A
second search of both stores would take as long as the first one without better results (docs/evaluation.md). A fixed
number of candidates of each store takes part, however much is withheld, and no spare ones.
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
from pipeline.core.languages import ENGLISH, STOP_WORDS, language_of
from pipeline.embedding.port import Vectors
from pipeline.runtime.tasks import gather_or_cancel, time_limit
from query.model import Candidate, Passage
from query.retrieval.arrange import Hit
from query.retrieval.ranking import rank_candidates
from query.retrieval.steps import Steps
from query.retrieval.stores import Embedding, Offer, Offers, Query, Scope, Stores

TIME_SHARE = 1 / 3
"""The time limit of feedback, as a share of the time for vectors: what a search's time budget
(query/retrieval/timeouts.py) has left."""


async def rank_with_feedback(
    stores: Stores,
    question: Query,
    scope: Scope,
    embedding: Embedding,
    steps: Steps,
    first: Offers,
    passages: Mapping[UUID, Passage],
    hits: Sequence[Hit],
    *,
    depth: int,
) -> list[Hit] | None:
    """The ranking with feedback. None if one store's candidates are missing or this took too long (the step says why);
    then the first ranking stands.

    first, passages, hits: the first ranking's candidates, the readable passages among them, and the ranking itself.
    """
    if any(offer.error is not None for offer in first.values()):
        return None
    try:
        with steps.step("feedback") as facts:
            async with time_limit(stores.timeouts.vectors * TIME_SHARE, "relevance feedback"):
                chosen = weigh([(hit.passage.chunk_id, hit.text, hit.score) for hit in hits])
                facts["passages"] = len(chosen)
                known = feedback_candidates(first, passages, depth)
                # In this order, Postgres works while Python searches for words.
                cosine_scores, bm25_scores = await gather_or_cancel(
                    _cosine_scores(stores, scope, embedding, chosen, list(known)),
                    _bm25_scores(stores, scope, question, chosen, list(known), hits),
                )
    except PenstockError:
        return None
    again: Offers = {
        "vector": _offer(known.values(), cosine_scores, first["vector"]),
        "keyword": _offer(known.values(), bm25_scores, first["keyword"]),
    }
    return rank_candidates(again, passages, Steps(), depth)  # a separate record: the step "feedback" covers all of it


def feedback_candidates(offers: Offers, passages: Mapping[UUID, Passage], depth: int) -> dict[UUID, Candidate]:
    """The first ``depth`` candidates of each store, and one more each, whose score is where the ranking ends."""
    candidates = {c.chunk_id: c for offer in offers.values() for c in offer.candidates}
    return {id_: candidates[id_] for offer in offers.values() for id_ in offer.ranking(depth + 1, passages).ids}


async def _cosine_scores(
    stores: Stores, scope: Scope, embedding: Embedding, chosen: Sequence[WeightedPassage], ids: Sequence[UUID]
) -> dict[UUID, float]:
    """The cosine of each of these passages to the moved query vector."""
    _, vector = await asyncio.shield(embedding)
    vector = move_vector(vector, chosen, await stores.embeddings(scope, [passage.chunk_id for passage in chosen]))
    return await stores.cosine_scores(scope, ids, vector)


async def _bm25_scores(
    stores: Stores,
    scope: Scope,
    question: Query,
    chosen: Sequence[WeightedPassage],
    ids: Sequence[UUID],
    hits: Sequence[Hit],
) -> dict[UUID, float]:
    """BM25 of these passages for the query's words and the added ones."""
    return await stores.bm25_scores(scope, ids, question.text, expansion_words(chosen, [hit.text for hit in hits]))


def _offer(candidates: Iterable[Candidate], scores: Mapping[UUID, float], first: Offer) -> Offer:
    """The candidates that have a score, best first, with the facts of the first ranking's offer."""
    scored = [replace(c, score=scores[c.chunk_id]) for c in candidates if c.chunk_id in scores]
    return Offer(len(scored), sorted(scored, key=lambda c: (-c.score, c.chunk_id)), first.facts)


PASSAGES = 5
"""How many passages the query vector moves towards."""
WORD_PASSAGES = 3
"""How many passages words are taken from: further down, passages are about something else."""
WORDS = 20
"""How many words are added."""
WORDS_WEIGHT = 2.0
"""The weight of all added words together; each of the query's own words has 1."""

_WORD = re.compile(r"[^\W\d_]{3,}")
_NON_LETTERS = {n: " " for n in range(128) if not chr(n).isalpha()}
"""A translation table for ASCII texts, for which it is four times as fast as the expression."""


@dataclass(frozen=True, slots=True)
class WeightedPassage:
    """A passage that expands the query, and its weight: all weights add up to 1."""

    chunk_id: UUID
    text: str
    weight: float


def weigh(passages: Sequence[tuple[UUID, str, float]]) -> list[WeightedPassage]:
    """The first passages with their weights, which are the softmax of their scores.

    passages: chunk, text and score of the fusion (standard deviations), best first.
    """
    first = passages[:PASSAGES]
    shares = [exp(score - first[0][2]) for _, _, score in first]
    return [
        WeightedPassage(id_, text, share / sum(shares)) for (id_, text, _), share in zip(first, shares, strict=True)
    ]


def move_vector(vector: Vectors, passages: Sequence[WeightedPassage], embeddings: Mapping[UUID, Vectors]) -> Vectors:
    """The query vector moved half way to the passages' mean; float32, unit length. A passage whose embedding was
    deleted meanwhile is ignored."""
    total = np.asarray(vector, dtype=np.float32)
    for passage in passages:
        if passage.chunk_id in embeddings:
            total = total + passage.weight * embeddings[passage.chunk_id]
    length = float(np.linalg.norm(total))
    return np.asarray(total / length if length else vector, dtype=np.float32)


def expansion_words(passages: Sequence[WeightedPassage], background: Sequence[str]) -> dict[str, float]:
    """The most typical words of the passages with their weights, which add up to at most WORDS_WEIGHT. background: the
    texts of the whole ranking."""
    worth: dict[str, float] = {}
    first = passages[:WORD_PASSAGES]
    vocabulary = {word for passage in first for word in _words(passage.text)}
    frequency = Counter(word for text in background for word in vocabulary.intersection(_all_words(text)))
    weight = sum(passage.weight for passage in first)
    for passage in first:
        words = _words(passage.text)
        for word in words:
            rare = log(1 + len(background) / max(1, frequency[word]))
            worth[word] = worth.get(word, 0.0) + passage.weight / weight / len(words) * rare
    best = sorted(worth, key=lambda word: (-worth[word], word))[:WORDS]
    total = sum(worth[word] for word in best)
    return {word: WORDS_WEIGHT * worth[word] / total for word in best}


def _words(text: str) -> list[str]:
    common = STOP_WORDS.get(language_of(text) or ENGLISH, frozenset())
    return [word for word in _WORD.findall(text.lower()) if word not in common]


def _all_words(text: str) -> list[str]:
    """All words in lower case, including short ones. It must be fast: each search reads hundreds of texts."""
    lowered = text.lower()
    return lowered.translate(_NON_LETTERS).split() if lowered.isascii() else _WORD.findall(lowered)
