"""Relevance feedback: the candidates that take part do not depend on how much is withheld, and neighbours' scores
count."""

from __future__ import annotations

from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from query.model import Candidate, Passage, Ranker
from query.retrieval.arrange import Hit
from query.retrieval.feedback import NEIGHBOURS, feedback_candidates, smooth
from query.retrieval.stores import Offer

DEPTH, SPARE = 4, 16


def candidate(n: int) -> Candidate:
    return Candidate(UUID(int=n), UUID(int=n), f"text {n}", 1.0 - n / 100)


def passage(n: int) -> Passage:
    return Passage(UUID(int=n), UUID(int=n), f"{n}.md", "wiki", "", None, 0)


@pytest.mark.parametrize("withheld", [0, 7, 15])
def test_the_number_of_feedback_candidates_does_not_depend_on_withheld_ones(withheld: int) -> None:
    offered = [candidate(n) for n in range(DEPTH + SPARE)]
    shown = {UUID(int=n): passage(n) for n in range(withheld, DEPTH + SPARE)}
    offers: dict[Ranker, Offer] = {
        "vector": Offer(len(offered), offered),
        "keyword": Offer(len(offered), offered[::-1]),
    }
    first = [UUID(int=n) for n in range(withheld, withheld + DEPTH + 1)]
    last = [UUID(int=n) for n in reversed(range(max(withheld, SPARE - 1), DEPTH + SPARE))]
    assert list(feedback_candidates(offers, shown, DEPTH)) == list(dict.fromkeys([*first, *last]))


def hit(n: int, score: float) -> Hit:
    return Hit(passage(n), f"text {n}", score, {"vector": n + 1})


def direction(degrees: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], dtype=np.float32)


def test_a_passage_among_good_ones_comes_before_an_equal_one_among_bad_ones() -> None:
    """Each good one has the score 5, and as much again from its neighbours, which have theirs."""
    good = [hit(n, 5.0) for n in range(NEIGHBOURS + 1)]
    bad = [hit(10 + n, 1.0) for n in range(NEIGHBOURS + 1)]
    hits = [*good, hit(20, 3.0), hit(21, 3.0), *bad]
    embeddings = {h.passage.chunk_id: direction(h.passage.chunk_id.int % 10) for h in good}
    embeddings |= {h.passage.chunk_id: direction(80 + h.passage.chunk_id.int % 10) for h in bad}
    embeddings |= {UUID(int=20): direction(60), UUID(int=21): direction(30)}
    smoothed = {h.passage.chunk_id.int: h.score for h in smooth(hits, embeddings, 0.5)}
    assert smoothed[21] == pytest.approx(3 + 5, rel=0.001)
    assert smoothed[20] == pytest.approx(3 + 1, rel=0.001)


def test_a_clear_match_stays_first_whatever_is_near_it() -> None:
    hits = [hit(0, 9.0), *(hit(n, 2.0) for n in range(1, 20))]
    embeddings = {h.passage.chunk_id: direction(0 if h.passage.chunk_id.int else 90) for h in hits}
    assert smooth(hits, embeddings, 0.5)[0].passage == passage(0)


@given(st.lists(st.tuples(st.floats(0, 20), st.none() | st.floats(0, 360)), max_size=12))
def test_smoothing_keeps_all_hits_also_without_embeddings(drawn: list[tuple[float, float | None]]) -> None:
    hits = [hit(n, score) for n, (score, _) in enumerate(drawn)]
    embeddings = {UUID(int=n): direction(degrees) for n, (_, degrees) in enumerate(drawn) if degrees is not None}
    smoothed = smooth(hits, embeddings, 0.5)
    assert sorted(h.passage.chunk_id for h in smoothed) == [h.passage.chunk_id for h in hits]
    if len(embeddings) > 1:
        assert [h.score for h in smoothed] == sorted((h.score for h in smoothed), reverse=True)
    assert {h.passage.chunk_id.int: h.score for h in smoothed if h.passage.chunk_id not in embeddings} == {
        n: score for n, (score, degrees) in enumerate(drawn) if degrees is None
    }
