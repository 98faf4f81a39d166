"""Laws of fusing rankings."""

from __future__ import annotations

from math import sqrt
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from query.retrieval.fusion import Ranking, fuse

ids = st.lists(st.integers(0, 30).map(lambda n: UUID(int=n)), unique=True, max_size=20)


@st.composite
def rankings(draw: st.DrawFn) -> Ranking:
    held = draw(ids)
    scores = sorted((draw(st.floats(0.1, 40)) for _ in held), reverse=True)
    return Ranking(held, scores, draw(st.floats(0, scores[-1])) if scores else 0.0)


def test_fused_scores_measure_the_distance_above_the_end_of_each_ranking() -> None:
    """In standard deviations, of ten candidates at least: what was left out fills them up."""
    a, b, c = (UUID(int=n) for n in range(3))
    vector, keyword = Ranking([a, b], [0.9, 0.6], 0.5), Ranking([b, c], [12.0, 3.0])
    fused = fuse({"vector": vector, "keyword": keyword}, {"vector": 1.0, "keyword": 2.0})
    assert [(f.chunk_id, f.ranks) for f in fused] == [
        (b, {"vector": 2, "keyword": 1}),
        (a, {"vector": 1}),
        (c, {"keyword": 2}),
    ]
    cosines = sqrt((0.4**2 + 0.1**2) / 10 - (0.5 / 10) ** 2)
    words = sqrt((12**2 + 3**2) / 10 - (15 / 10) ** 2)
    assert [f.score for f in fused] == pytest.approx([0.1 / cosines + 2 * 12 / words, 0.4 / cosines, 2 * 3 / words])


def test_a_ranking_of_nearly_equal_scores_leaves_the_order_to_the_other() -> None:
    first, second, third = (UUID(int=n) for n in range(3))
    cosines = Ranking([third, second, first], [0.302, 0.301, 0.3], 0.1)
    words = Ranking([first, second, third], [9.0, 5.0, 2.0])
    assert [f.chunk_id for f in fuse({"vector": cosines, "keyword": words})] == [first, second, third]


def test_an_outstanding_keyword_match_beats_middling_matches_in_both_rankings() -> None:
    """With plain reciprocal ranks rank 10 in both rankings beats rank 1 in one."""
    literal, *middling = (UUID(int=n) for n in range(50))
    vector = Ranking(middling, [0.5 - n / 200 for n in range(49)], 0.25)
    keyword = Ranking([literal, *middling], [30.0, *(9.0 - n / 20 for n in range(49))], 6.5)
    assert fuse({"vector": vector, "keyword": keyword})[0].chunk_id == literal


@given(rankings(), rankings())
def test_fusion_returns_every_candidate_exactly_once(vector: Ranking, keyword: Ranking) -> None:
    fused = fuse({"vector": vector, "keyword": keyword})
    assert sorted(f.chunk_id for f in fused) == sorted({*vector.ids, *keyword.ids})


@given(rankings())
def test_a_single_ranking_keeps_its_order(ranking: Ranking) -> None:
    for others in ({}, {"vector": Ranking([], [])}, {"vector": ranking}):
        assert [f.chunk_id for f in fuse({"keyword": ranking, **others})] == ranking.ids


@given(rankings(), rankings())
def test_a_candidate_ranked_higher_in_both_rankings_is_fused_higher(vector: Ranking, keyword: Ranking) -> None:
    fused = [f.chunk_id for f in fuse({"vector": vector, "keyword": keyword})]
    both = [i for i in vector.ids if i in keyword.ids]
    for first in both:
        for second in both:
            if vector.ids.index(first) < vector.ids.index(second) and keyword.ids.index(first) < keyword.ids.index(
                second
            ):
                assert fused.index(first) < fused.index(second)


@given(rankings(), rankings())
def test_fusion_is_deterministic(vector: Ranking, keyword: Ranking) -> None:
    one = [f.chunk_id for f in fuse({"vector": vector, "keyword": keyword})]
    assert one == [f.chunk_id for f in fuse({"vector": vector, "keyword": keyword})]


@given(rankings(), st.floats(0.01, 100))
@example(Ranking([UUID(int=0)], [3.5206024007813865], 3.520602400781386), 3.0)
def test_fusion_is_independent_of_the_scale_of_scores(ranking: Ranking, factor: float) -> None:
    scaled = Ranking(ranking.ids, [s * factor for s in ranking.scores], ranking.next_score * factor)
    one, other = fuse({"vector": ranking}), fuse({"vector": scaled})
    assert [f.score for f in one] == pytest.approx([f.score for f in other], abs=1e-6)


@pytest.mark.parametrize("scores", [[-0.2, -0.3], [0.0, 0.0], [0.4, 0.4]])
def test_with_equal_scores_the_ranks_decide(scores: list[float]) -> None:
    a, b = UUID(int=1), UUID(int=2)
    fused = fuse({"vector": Ranking([b, a], scores, scores[-1])})
    assert [(f.chunk_id, f.score) for f in fused] == [(b, 0.0), (a, 0.0)]


@given(rankings(), rankings())
def test_fused_scores_are_not_negative_and_bounded(vector: Ranking, keyword: Ranking) -> None:
    """The furthest that one of n values can stand above the least is √2n standard deviations."""
    fused = fuse({"vector": vector, "keyword": keyword})
    assert all(0 <= f.score <= 2 * sqrt(2 * 21) + 1e-6 for f in fused)
