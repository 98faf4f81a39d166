"""Pseudo-relevance feedback: rank the candidates again, with a query that the best of them have expanded, and with the
scores of the passages that are nearest to each.

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
from query.retrieval.many import computed
from query.retrieval.ranking import rank_candidates, weights_of
from query.retrieval.steps import Steps
from query.retrieval.stores import Embedding, Offer, Offers, Query, Scope, Stores
from query.settings import RankingSettings

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
    settings: RankingSettings,
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
                embeddings: dict[UUID, Vectors] = {}

                async def cosine_scores() -> dict[UUID, float]:
                    """The cosine of each passage to the moved query vector."""
                    embeddings.update(await stores.embeddings(scope, list(known)))
                    _, vector = await asyncio.shield(embedding)
                    moved = move_vector(vector, chosen, embeddings)
                    return {id_: float(row @ moved) for id_, row in embeddings.items()}

                # In this order, Postgres works while Python searches for words.
                cosines, bm25 = await gather_or_cancel(
                    cosine_scores(), _bm25_scores(stores, scope, question, chosen, list(known), hits)
                )
                again: Offers = {
                    "vector": _offer(known.values(), cosines, first["vector"]),
                    "keyword": _offer(known.values(), bm25, first["keyword"]),
                }
                # A separate record, because the step "feedback" covers all of it.
                ranked = rank_candidates(again, passages, Steps(), depth, weights_of(settings))
                return await computed(ranked, lambda: smooth(ranked, embeddings, settings.neighbour_weight))
    except PenstockError:
        return None


def feedback_candidates(offers: Offers, passages: Mapping[UUID, Passage], depth: int) -> dict[UUID, Candidate]:
    """The first ``depth`` candidates of each store, and one more each, whose score is where the ranking ends."""
    candidates = {c.chunk_id: c for offer in offers.values() for c in offer.candidates}
    return {id_: candidates[id_] for offer in offers.values() for id_ in offer.ranking(depth + 1, passages).ids}


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
NEIGHBOURS = 8
"""How many of the nearest candidates count for a candidate (docs/adr/0083-neighbours.md)."""
NEIGHBOUR_STEPS = 12
"""How far scores are passed on, from neighbour to neighbour: with a weight of 0.5, what is further counts less than
1 / 4,000."""

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


def smooth(hits: Sequence[Hit], embeddings: Mapping[UUID, Vectors], weight: float) -> list[Hit]:
    """The hits by their scores and those of their neighbours, best first: similar passages are relevant to the same
    queries. To each score, ``weight`` times the mean score of the NEIGHBOURS nearest hits is added, where theirs have
    got the same from their own neighbours.

    embeddings: unit length. A hit whose embedding was deleted meanwhile is no neighbour and has none.
    """
    embedded = [hit for hit in hits if hit.passage.chunk_id in embeddings]
    if len(embedded) < 2:
        return list(hits)
    vectors = np.stack([embeddings[hit.passage.chunk_id] for hit in embedded])
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, : min(NEIGHBOURS, len(embedded) - 1)]
    own = np.array([hit.score for hit in embedded])
    scores = own
    for _ in range(NEIGHBOUR_STEPS):
        scores = own + weight * scores[nearest].mean(axis=1)
    passed = {hit.passage.chunk_id: float(score) for hit, score in zip(embedded, scores, strict=True)}
    smoothed = [replace(hit, score=passed.get(hit.passage.chunk_id, hit.score)) for hit in hits]
    return sorted(smoothed, key=lambda hit: -hit.score)


def expansion_words(passages: Sequence[WeightedPassage], background: Sequence[str]) -> dict[str, float]:
    """The most typical words of the passages with their weights, which add up to at most WORDS_WEIGHT. background: the
    texts of the whole ranking."""
    worth: dict[str, float] = {}
    first = passages[:WORD_PASSAGES]
    words_of = [_words(passage.text) for passage in first]
    vocabulary = {word for words in words_of for word in words}
    frequency = Counter(word for text in background for word in vocabulary.intersection(_all_words(text)))
    weight = sum(passage.weight for passage in first)
    for passage, words in zip(first, words_of, strict=True):
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
