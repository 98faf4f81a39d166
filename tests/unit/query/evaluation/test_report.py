"""When a change of the ranking is not good enough."""

from __future__ import annotations

import asyncio

import pytest

from query.access.callers import Caller
from query.evaluation.dataset import BadDataset, Dataset, Document
from query.evaluation.measures import Rankings
from query.evaluation.rank import RERANKED, rank
from query.evaluation.report import Saved, failures, report, values_of
from query.model import MODES, Mode, SearchResults

QUERIES = {f"q{n}": f"question {n}" for n in range(12)}
DATASET = Dataset("made up", [Document("right", "", "text")], QUERIES, {query: {"right": 1} for query in QUERIES})
GOOD: Rankings = {query: ["right", "other"] for query in QUERIES}
BAD: Rankings = {query: ["other", "right"] for query in QUERIES}
ONE_WORSE: Rankings = {**GOOD, "q0": ["other", "right"]}


def saved(ranking: Rankings) -> Saved:
    return values_of(DATASET, {"hybrid": ranking})


def reasons(ranking: Rankings, before: Rankings | None = None, **bounds: float) -> list[str]:
    result = report(DATASET, {"hybrid": ranking}, {}, None if before is None else saved(before))
    named = {name.replace("_at_", "@"): bound for name, bound in bounds.items()}
    return failures(result, named, against=before is not None)


def test_a_measure_below_its_bound_is_a_failure() -> None:
    assert reasons(GOOD, nDCG_at_10=1.0, MRR=0.9) == []
    [reason] = reasons(BAD, nDCG_at_10=0.7, MRR=0.5)
    assert reason == "nDCG@10 of hybrid is 0.6309, below 0.7"


def test_a_significant_decline_is_a_failure_and_a_single_worse_query_is_not() -> None:
    [reason] = reasons(BAD, GOOD)
    assert reason.startswith("nDCG@10 of hybrid is significantly worse than the saved one: -0.3691, p = 0.000")
    assert reasons(ONE_WORSE, GOOD) == []
    assert reasons(GOOD, BAD) == []
    assert reasons(BAD, BAD) == [], "1 / log2(3) is rounded when it is saved"


def test_a_bound_and_a_comparison_apply_to_the_reranked_ranking_where_there_is_one() -> None:
    result = report(DATASET, {"hybrid": GOOD, RERANKED: BAD}, {}, saved(GOOD))
    assert result["comparisons"]["reranked over hybrid"]["nDCG@10"]["losses"] == 12
    [reason] = failures(result, {"MRR": 0.9}, against=False)
    assert "MRR of reranked is 0.5000" in reason
    with pytest.raises(BadDataset, match="no values of reranked"):
        failures(result, {}, against=True)


def test_a_comparison_without_a_common_query_is_refused() -> None:
    other = {"hybrid": {name: {"another": 1.0} for name in ("nDCG@10", "recall@50")}}
    with pytest.raises(BadDataset, match="no values of hybrid for these queries"):
        failures(report(DATASET, {"hybrid": GOOD}, {}, other), {}, against=True)


def test_only_the_additional_run_is_reranked() -> None:
    requests: list[tuple[str, bool]] = []

    class Recorder:
        async def search(self, query: str, caller: Caller, *, top: int, mode: Mode, rerank: bool) -> SearchResults:
            requests.append((mode, rerank))
            return SearchResults([], [], 0.0, False)

    rankings, _ = asyncio.run(rank(Recorder(), Caller("t", frozenset()), DATASET, MODES, rerank=True))
    assert rankings.keys() == {*MODES, RERANKED}
    assert set(requests) == {(mode, False) for mode in MODES} | {("hybrid", True)}
