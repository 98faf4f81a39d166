"""Laws of fusing rankings."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from query.fusion import RRF_K, Fused, Ranking, diversify, fuse

ids = st.lists(st.integers(0, 30).map(lambda n: UUID(int=n)), unique=True, max_size=20)


@st.composite
def rankings(draw: st.DrawFn) -> Ranking:
    held = draw(ids)
    scores = sorted((draw(st.floats(0.1, 40)) for _ in held), reverse=True)
    return Ranking(held, scores, draw(st.floats(0, scores[-1])) if scores else 0.0)


def test_a_hit_counts_by_its_rank_and_by_how_far_it_stands_out() -> None:
    a, b, c = (UUID(int=n) for n in range(3))
    vector, keyword = Ranking([a, b], [0.9, 0.6], 0.5), Ranking([b, c], [12.0, 3.0])
    fused = fuse({"vector": vector, "keyword": keyword}, {"vector": 1.0, "keyword": 2.0})
    assert [(f.chunk_id, f.ranks) for f in fused] == [
        (b, {"vector": 2, "keyword": 1}),
        (a, {"vector": 1}),
        (c, {"keyword": 2}),
    ]
    expected = [0.25 / (RRF_K + 2) + 2 / (RRF_K + 1), 1 / (RRF_K + 1), 2 * 0.25 / (RRF_K + 2)]
    assert [f.score for f in fused] == pytest.approx(expected)


def test_the_one_passage_that_holds_the_very_words_beats_those_that_are_a_bit_of_both() -> None:
    """With plain reciprocal ranks rank 10 in both rankings beats rank 1 in one."""
    literal, *middling = (UUID(int=n) for n in range(50))
    vector = Ranking(middling, [0.5 - n / 200 for n in range(49)], 0.25)
    keyword = Ranking([literal, *middling], [30.0, *(9.0 - n / 20 for n in range(49))], 6.5)
    assert fuse({"vector": vector, "keyword": keyword})[0].chunk_id == literal


@given(rankings(), rankings())
def test_nothing_is_lost_doubled_or_invented(vector: Ranking, keyword: Ranking) -> None:
    fused = fuse({"vector": vector, "keyword": keyword})
    assert sorted(f.chunk_id for f in fused) == sorted({*vector.ids, *keyword.ids})


@given(rankings())
def test_one_ranking_alone_keeps_its_order(ranking: Ranking) -> None:
    for others in ({}, {"vector": Ranking([], [])}, {"vector": ranking}):
        assert [f.chunk_id for f in fuse({"keyword": ranking, **others})] == ranking.ids


@given(rankings(), rankings())
def test_better_in_both_is_better(vector: Ranking, keyword: Ranking) -> None:
    fused = [f.chunk_id for f in fuse({"vector": vector, "keyword": keyword})]
    both = [i for i in vector.ids if i in keyword.ids]
    for first in both:
        for second in both:
            if vector.ids.index(first) < vector.ids.index(second) and keyword.ids.index(first) < keyword.ids.index(
                second
            ):
                assert fused.index(first) < fused.index(second)


@given(rankings(), rankings())
def test_the_same_rankings_give_the_same_answer(vector: Ranking, keyword: Ranking) -> None:
    one = [f.chunk_id for f in fuse({"vector": vector, "keyword": keyword})]
    assert one == [f.chunk_id for f in fuse({"vector": vector, "keyword": keyword})]


@given(rankings(), st.floats(0.01, 100))
def test_the_scale_of_a_store_does_not_matter(ranking: Ranking, factor: float) -> None:
    scaled = Ranking(ranking.ids, [s * factor for s in ranking.scores], ranking.next_score * factor)
    one, other = fuse({"vector": ranking}), fuse({"vector": scaled})
    assert [f.score for f in one] == pytest.approx([f.score for f in other], abs=1e-6)


@pytest.mark.parametrize("scores", [[-0.2, -0.3], [0.0, 0.0], [0.4, 0.4]])
def test_where_nothing_stands_out_ranks_decide(scores: list[float]) -> None:
    a, b = UUID(int=1), UUID(int=2)
    assert [f.score for f in fuse({"vector": Ranking([b, a], scores, scores[-1])})] == pytest.approx(
        [1 / (RRF_K + 1), 1 / (RRF_K + 2)]
    )


def document_of(chunk: UUID) -> UUID:
    return UUID(int=chunk.int // 100)


def chunks(*numbers: int) -> list[Fused]:
    return [Fused(UUID(int=n), 1.0, {"vector": 1}) for n in numbers]


def test_two_passages_a_document_while_others_have_something_to_say() -> None:
    ranked = chunks(100, 101, 102, 103, 200, 300)
    assert diversify(ranked, document_of, 4) == chunks(100, 101, 200, 300)


def test_more_of_a_document_when_nothing_else_is_left() -> None:
    ranked = chunks(100, 101, 102, 103, 200)
    assert diversify(ranked, document_of, 5) == chunks(100, 101, 200, 102, 103)


@given(st.lists(st.integers(0, 500), unique=True, max_size=40), st.integers(1, 50))
def test_as_many_as_there_are(numbers: list[int], top: int) -> None:
    taken = diversify(chunks(*numbers), document_of, top)
    assert len(taken) == min(top, len(numbers))
    assert len({f.chunk_id for f in taken}) == len(taken)
