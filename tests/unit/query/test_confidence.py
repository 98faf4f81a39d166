"""When nothing relevant is the better answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.core.relevance import Calibration
from query.retrieval.ranking import MEASURED, Floors, assess, floors_of
from query.settings import RetrievalSettings
from tests.support.pipeline.generations import generation

FLOORS = Floors(0.30, 0.75, "this test")
CALIBRATION = Calibration(0.81, 0.76, 0.86, 0.75, 2_000, 110, "2026-11-28T00:00:00+00:00", "judge", 0.4)
SETTINGS = RetrievalSettings()


def test_a_low_cosine_with_few_common_words_is_not_relevant() -> None:
    enough, why = assess("how do I bake sourdough bread", 0.25, ["Flow around a blunt body"], FLOORS)
    assert not enough
    assert why == {
        "cosine": "0.25",
        "floor": "0.30",
        "floor source": "this test",
        "coverage": "0.00",
        "coverage floor": "0.75",
    }


def test_a_sufficient_cosine_is_relevant_without_common_words() -> None:
    assert assess("holidays", 0.30, ["Vacation days"], FLOORS)[0]


def test_passages_with_the_words_of_the_query_are_relevant_at_any_cosine() -> None:
    assert assess("the lanterns of the canals", 0.05, ["Lanterns by a canal"], FLOORS)[0]
    assert assess("PROJ-4821", 0.0, ["Closed PROJ-4821."], FLOORS)[0]
    assert assess("Wie lange gelten die Reisekosten?", 0.0, ["Reisekosten gelten ein Jahr lang."], FLOORS)[0]


def test_a_few_common_words_are_no_sign_at_the_cosine_of_unrelated_questions() -> None:
    floors = replace(FLOORS, unrelated=0.2)
    assert not assess("method returns value", 0.1, ["A method that returns a value."], floors)[0]
    assert assess("method returns value", 0.2, ["A method that returns a value."], floors)[0]
    assert assess("PROJ-4821", 0.1, ["Closed PROJ-4821."], floors)[0], "an identifier counts at any cosine"


def test_no_passages_means_not_relevant() -> None:
    assert not assess("anything", None, [], FLOORS)[0]
    assert not assess("anything", None, [], Floors(None, 0.75, ""))[0]


def test_without_a_vector_keyword_results_are_relevant() -> None:
    assert assess("bread", None, ["Flow"], FLOORS) == (True, {"floor": "none without a vector"})


def test_the_score_of_a_calibrated_reranker_counts_in_place_of_the_cosine() -> None:
    floors = replace(FLOORS, rerank=0.4)
    assert assess("bread", 0.9, ["Flow"], floors, 0.1)[0] is False
    assert assess("bread", 0.1, ["Flow"], floors, 0.5)[0] is True
    assert assess("bread", 0.9, ["Flow"], floors)[0] is True, "the reranker failed"
    assert assess("bread", 0.9, ["Flow"], FLOORS, 0.1)[0] is True, "its scale is not known"


def test_a_model_without_calibration_has_a_floor_only_if_it_was_measured() -> None:
    assert floors_of(generation(model="another"), SETTINGS).cosine is None
    known = floors_of(generation(model="all-MiniLM-L6-v2"), SETTINGS)
    assert (known.cosine, known.source) == (MEASURED["all-MiniLM-L6-v2"], "measured for this model")
    assert assess("bread", -1.0, ["Flow"], floors_of(generation(model="another"), SETTINGS)) == (
        True,
        {"cosine": "-1.00", "floor": "none: not calibrated yet"},
    )


@pytest.mark.parametrize("model", ["another", "all-MiniLM-L6-v2"])
def test_the_calibrated_floor_counts_for_every_model_and_a_setting_replaces_it(model: str) -> None:
    calibrated = generation(model=model, calibration=CALIBRATION)
    assert floors_of(calibrated, SETTINGS).cosine == 0.81
    configured = floors_of(calibrated, RetrievalSettings(cosine_floor=-1, coverage_floor=2))
    assert (configured.cosine, configured.coverage) == (-1, 2)


def test_the_floor_says_nothing_about_how_many_passages_there_are() -> None:
    """They are those of all tenants."""
    few, many = (floors_of(generation(calibration=replace(CALIBRATION, chunks=n)), SETTINGS) for n in (300, 90_000))
    assert few == many


def test_the_floor_of_a_reranker_is_that_of_its_own_model() -> None:
    calibrated = generation(calibration=CALIBRATION)
    assert floors_of(calibrated, SETTINGS, reranker="judge").rerank == 0.4
    assert floors_of(calibrated, SETTINGS, reranker="another judge").rerank is None
    assert floors_of(calibrated, SETTINGS, reranker="another judge", rerank=0.2).rerank == 0.2
    assert floors_of(calibrated, SETTINGS, rerank=0.2).rerank is None, "no reranker is in use"
