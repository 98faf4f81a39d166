"""The words that relevance feedback adds."""

from __future__ import annotations

from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from query.retrieval.feedback import PASSAGES, WORDS, WORDS_WEIGHT, WeightedPassage, expansion_words, move_vector, weigh

FIRST, SECOND = UUID(int=1), UUID(int=2)


@given(st.lists(st.floats(0, 20), min_size=1, max_size=9))
def test_the_weights_of_feedback_passages_sum_to_one_and_follow_the_scores(scores: list[float]) -> None:
    candidates = [(UUID(int=n), "text", score) for n, score in enumerate(sorted(scores, reverse=True))]
    weights = [passage.weight for passage in weigh(candidates)]
    assert len(weights) == min(PASSAGES, len(scores))
    assert sum(weights) == pytest.approx(1)
    assert weights == sorted(weights, reverse=True)


def test_one_clearly_best_passage_gets_nearly_all_the_weight() -> None:
    assert weigh([(FIRST, "", 9.0), (SECOND, "", 2.0)])[0].weight > 0.99


def test_the_query_vector_moves_towards_the_passages_by_their_weights() -> None:
    question = np.array([1, 0, 0], dtype=np.float32)
    held = {FIRST: np.array([0, 1, 0], dtype=np.float32), SECOND: np.array([0, 0, 1], dtype=np.float32)}
    there = move_vector(question, [WeightedPassage(FIRST, "", 0.75), WeightedPassage(SECOND, "", 0.25)], held)
    assert there == pytest.approx(np.array([1, 0.75, 0.25]) / np.linalg.norm([1, 0.75, 0.25]))
    assert move_vector(question, [WeightedPassage(FIRST, "", 1.0)], {}) == pytest.approx(question)


def test_expansion_words_are_frequent_in_the_passages_and_rare_elsewhere() -> None:
    passages = [WeightedPassage(FIRST, "the turbine blade and the turbine housing of the engine", 1.0)]
    others = [f"engine report number {n} of the works" for n in range(9)]
    words = expansion_words(passages, [passages[0].text, *others])
    assert max(words, key=lambda word: words[word]) == "turbine"
    assert words["engine"] < words["blade"]
    assert "the" not in words
    assert "9" not in words


@given(st.lists(st.text("abcdefgh ", max_size=60), min_size=1, max_size=6))
def test_expansion_words_are_limited_in_number_and_total_weight(texts: list[str]) -> None:
    passages = weigh([(UUID(int=n), text, 1.0) for n, text in enumerate(texts)])
    words = expansion_words(passages, texts)
    assert len(words) <= WORDS
    assert sum(words.values()) == pytest.approx(WORDS_WEIGHT if words else 0)
