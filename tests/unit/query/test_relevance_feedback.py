"""The candidates that take part in relevance feedback do not depend on how much is withheld."""

from __future__ import annotations

from uuid import UUID

import pytest

from query.model import Candidate, Passage, Ranker
from query.retrieval.feedback import feedback_candidates
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
