"""Reranking changes a ranking only where it should."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import uuid4

import pytest

from pipeline.core.errors import Misconfigured, PenstockError, Poison, Retryable
from query.model import Passage
from query.rerank.reranker import readable, rerank
from query.retrieval.arrange import Hit
from query.retrieval.steps import Steps


class Scores:
    """A ``port.Reranker`` that knows the score of each text."""

    model = "scores"

    def __init__(self, scores: dict[str, float] | PenstockError) -> None:
        self.scores = scores
        self.requests: list[tuple[str, list[str]]] = []

    async def rerank(self, query: str, texts: Sequence[str], *, tenant: str = "") -> Sequence[float]:
        self.requests.append((tenant, list(texts)))
        if isinstance(self.scores, PenstockError):
            raise self.scores
        return [self.scores[text] for text in texts]

    async def aclose(self) -> None:
        pass


def hits(texts: str, *, title: str = "") -> list[Hit]:
    return [
        Hit(Passage(uuid4(), uuid4(), text, "wiki", title, None, 0), text, 1 / (n + 1), {"keyword": n + 1})
        for n, text in enumerate(texts)
    ]


def text_and_score(ranked: Sequence[Hit]) -> list[tuple[str, float | None]]:
    return [(hit.text, hit.rerank_score) for hit in ranked]


async def test_the_rerank_pool_is_ordered_by_its_new_scores_and_the_rest_stays() -> None:
    reranker, steps = Scores({"a": 0.0, "b": 2.5, "c": 0.0, "d": -0.5}), Steps()
    ranked = await rerank(reranker, "q", hits("abcdzy"), tenant="acme", pool=4, steps=steps)
    assert text_and_score(ranked) == [("b", 2.5), ("a", 0.0), ("c", 0.0), ("d", -0.5), ("z", None), ("y", None)]
    assert [hit.score for hit in ranked[:2]] == [1 / 2, 1]  # the fusion's own stays
    assert [(step.name, step.facts) for step in steps.done] == [("rerank", {"passages": 4})]
    assert reranker.requests == [("acme", ["a", "b", "c", "d"])]


async def test_without_results_the_reranker_is_not_called_and_the_step_is_recorded() -> None:
    reranker, steps = Scores({}), Steps()
    assert await rerank(reranker, "q", [], tenant="acme", pool=4, steps=steps) == []
    assert reranker.requests == []
    assert [(step.name, step.facts) for step in steps.done] == [("rerank", {"passages": 0})]


@pytest.mark.parametrize("error", [Retryable("away"), Misconfigured("a wrong key"), Poison("too_long", "too long")])
async def test_a_failed_reranker_leaves_the_order_with_a_degraded_step(error: PenstockError) -> None:
    steps, before = Steps(), hits("abc")
    assert await rerank(Scores(error), "q", before, tenant="acme", pool=2, steps=steps) == before
    assert steps.done[0].facts == {"passages": 2, "degraded": True, "reason": str(error)}


def test_a_passage_is_reranked_together_with_its_title() -> None:
    assert [readable(hit) for hit in [*hits("a", title="Dams"), *hits("b")]] == ["Dams\na", "b"]
