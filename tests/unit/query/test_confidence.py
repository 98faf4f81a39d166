"""When nothing relevant is the better answer."""

from __future__ import annotations

import pytest

from query.retrieval.ranking import FLOORS, assess, coverage, stems

MODEL = "all-MiniLM-L6-v2"
FLOOR = FLOORS[MODEL]


def test_far_away_and_with_few_words_in_common_is_noise() -> None:
    enough, why = assess("how do I bake sourdough bread", FLOOR.cosine - 0.05, ["Flow around a blunt body"], MODEL)
    assert not enough
    assert why == {"cosine": "0.25", "floor": "0.30", "coverage": "0.00", "coverage floor": "0.75"}


def test_near_enough_needs_no_words() -> None:
    assert assess("holidays", FLOOR.cosine, ["Vacation days"], MODEL)[0]


def test_the_asked_words_themselves_are_enough() -> None:
    assert assess("the lanterns of the canals", 0.05, ["Lanterns by a canal"], MODEL)[0]
    assert assess("PROJ-4821", 0.0, ["Closed PROJ-4821."], MODEL)[0]


def test_nothing_found_is_nothing_relevant() -> None:
    assert not assess("anything", None, [], MODEL)[0]
    assert not assess("anything", None, [], "unheard of")[0]


def test_an_unknown_model_has_no_floor_and_says_so() -> None:
    assert assess("bread", -1.0, ["Flow"], "unheard of") == (True, {"cosine": "-1.00", "floor": "none for this model"})


def test_without_a_vector_words_were_matched_already() -> None:
    assert assess("bread", None, ["Flow"], MODEL) == (True, {"floor": "none without a vector"})


@pytest.mark.parametrize(
    ("asked", "text", "share"),
    [("running the tests", "test runs", 0.5), ("naïve Café", "a naïve café", 1.0), ("the of and", "the of and", 0.0)],
)
def test_coverage(asked: str, text: str, share: float) -> None:
    assert coverage(stems(asked), text) == share
