"""What reranking does to a ranking, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeline.core.errors import Misconfigured, PenstockError, Poison, Retryable
from query.rerank.apply import readable, rerank
from query.steps import Steps


class Scores:
    """A ``port.Reranker`` that knows the score of each text."""

    model = "scores"

    def __init__(self, scores: dict[str, float] | PenstockError) -> None:
        self.scores = scores
        self.asked: list[list[str]] = []

    async def rerank(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        self.asked.append(list(texts))
        if isinstance(self.scores, PenstockError):
            raise self.scores
        return [self.scores[text] for text in texts]

    async def aclose(self) -> None:
        pass


async def test_the_pool_by_its_new_scores_then_the_rest_as_it_was() -> None:
    reranker, steps = Scores({"a": 0.1, "b": 0.9, "c": 0.1, "d": 0.5}), Steps()
    ranked = await rerank(reranker, "q", list("abcdzy"), str, pool=4, steps=steps)
    assert ranked == [("b", 0.9), ("d", 0.5), ("a", 0.1), ("c", 0.1), ("z", None), ("y", None)]
    assert [(step.name, step.facts) for step in steps.done] == [("rerank", {"passages": 4})]


async def test_nothing_is_asked_about_nothing_and_the_step_looks_the_same() -> None:
    reranker, steps = Scores({}), Steps()
    assert await rerank(reranker, "q", [], str, pool=4, steps=steps) == []
    assert reranker.asked == []
    assert [(step.name, step.facts) for step in steps.done] == [("rerank", {"passages": 0})]


@pytest.mark.parametrize("error", [Retryable("away"), Misconfigured("a wrong key"), Poison("too_long", "too long")])
async def test_a_failure_leaves_the_order_and_says_so(error: PenstockError) -> None:
    steps = Steps()
    ranked = await rerank(Scores(error), "q", list("abc"), str, pool=2, steps=steps)
    assert ranked == [("a", None), ("b", None), ("c", None)]
    assert steps.done[0].facts == {"passages": 2, "degraded": True, "reason": str(error)}


def test_a_passage_is_read_under_its_title_and_headings() -> None:
    assert readable("Dams", ["Turbines", "Hall"], "It stopped.") == "Dams › Turbines › Hall\nIt stopped."
    assert readable("", [], "It stopped.") == "It stopped."
