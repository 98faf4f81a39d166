"""When nothing relevant is the better answer."""

from __future__ import annotations

import pytest

from query.retrieval.ranking import FLOORS, assess, coverage, stems

MODEL = "all-MiniLM-L6-v2"
FLOOR = FLOORS[MODEL]


def test_a_low_cosine_with_few_common_words_is_not_relevant() -> None:
    enough, why = assess("how do I bake sourdough bread", FLOOR.cosine - 0.05, ["Flow around a blunt body"], MODEL)
    assert not enough
    assert why == {"cosine": "0.25", "floor": "0.30", "coverage": "0.00", "coverage floor": "0.75"}


def test_a_sufficient_cosine_is_relevant_without_common_words() -> None:
    assert assess("holidays", FLOOR.cosine, ["Vacation days"], MODEL)[0]


def test_passages_with_the_words_of_the_query_are_relevant_at_any_cosine() -> None:
    assert assess("the lanterns of the canals", 0.05, ["Lanterns by a canal"], MODEL)[0]
    assert assess("PROJ-4821", 0.0, ["Closed PROJ-4821."], MODEL)[0]


def test_no_passages_means_not_relevant() -> None:
    assert not assess("anything", None, [], MODEL)[0]
    assert not assess("anything", None, [], "unheard of")[0]


def test_an_unknown_model_has_no_floor() -> None:
    assert assess("bread", -1.0, ["Flow"], "unheard of") == (True, {"cosine": "-1.00", "floor": "none for this model"})


def test_without_a_vector_keyword_results_are_relevant() -> None:
    assert assess("bread", None, ["Flow"], MODEL) == (True, {"floor": "none without a vector"})


@pytest.mark.parametrize(
    ("requests", "text", "share"),
    [("running the tests", "test runs", 0.5), ("naïve Café", "a naïve café", 1.0), ("the of and", "the of and", 0.0)],
)
def test_coverage_is_the_share_of_query_words_in_the_text(requests: str, text: str, share: float) -> None:
    assert coverage(stems(requests), text) == share
