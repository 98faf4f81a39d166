"""The floor of relevance, from the scores of everyday questions and of known items."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.relevance import ANSWERED_SHARE, EVERYDAY, GROWTH, KNOWN_WORDS, is_due, known_item, measure, quantile
from tests.unit.query.test_confidence import CALIBRATION

RANDOM = Random(20261128)
UNRELATED = [RANDOM.gauss(0.20, 0.06) for _ in range(120)]
KNOWN = [RANDOM.gauss(0.58, 0.12) for _ in range(120)]

GEOMETRIES: dict[str, Callable[[float], float]] = {
    "as it is": lambda cosine: cosine,
    "unrelated at .75": lambda cosine: 0.70 + 0.30 * cosine,
    "low": lambda cosine: 0.3 * cosine - 0.05,
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_floor_separates_unrelated_from_answerable_questions_in_every_geometry(geometry: str) -> None:
    scores = GEOMETRIES[geometry]
    floor = measure([scores(s) for s in UNRELATED], [scores(s) for s in KNOWN]).floor
    held_out = Random(7)
    unrelated = [scores(held_out.gauss(0.20, 0.06)) for _ in range(1_000)]
    answerable = [scores(held_out.gauss(0.60, 0.10)) for _ in range(1_000)]
    assert sum(s < floor for s in unrelated) >= 900
    assert sum(s < floor for s in answerable) <= 30


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9, 1.0])
def test_everyday_questions_that_a_collection_answers_do_not_raise_its_floor(share: float) -> None:
    answered = int(share * len(UNRELATED))
    floor = measure([*UNRELATED[answered:], *KNOWN[:answered]], KNOWN).floor
    assert floor <= quantile(KNOWN, ANSWERED_SHARE)


def test_words_count_although_a_collection_answers_every_everyday_question() -> None:
    """Somebody may have written all answers into it: the questions are in this repository."""
    measured = measure([1.0] * len(UNRELATED), KNOWN)
    assert measured.floor == quantile(KNOWN, ANSWERED_SHARE)
    assert measured.unrelated < measured.floor


scores = st.lists(st.floats(-1, 1), min_size=1, max_size=200)


@given(scores, scores)
def test_the_floor_is_between_the_scores_that_it_was_measured_on(everyday: list[float], known: list[float]) -> None:
    measured = measure(everyday, known)
    assert min(*everyday, *known) - 1e-9 <= measured.floor <= max(known) + 1e-9
    assert 0 <= measured.questions <= len(everyday)


def test_a_known_item_is_a_few_neighbouring_words_of_its_text() -> None:
    text = " ".join(f"word{n}" for n in range(50))
    items = {known_item(text, seed) for seed in range(100)}
    assert len(items) > 10
    assert all(item in text and len(item.split()) == KNOWN_WORDS for item in items)
    assert known_item("two words", 5) == "two words"


def test_a_collection_is_calibrated_when_it_is_new_and_when_it_has_grown() -> None:
    assert [is_due(None, chunks) for chunks in (0, 4, 5, 10_000)] == [False, False, True, True]
    assert [is_due(CALIBRATION, chunks) for chunks in (0, 2_000, GROWTH * 2_000)] == [False, False, True]


def test_the_everyday_questions_are_different_from_each_other() -> None:
    assert len(set(EVERYDAY)) == len(EVERYDAY) >= 100
