"""How much of the nearest passages a search has returned, and that checking it disturbs nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from uuid import UUID, uuid4

import numpy as np
import pytest

from pipeline.core.errors import Retryable
from query.access.callers import Caller
from query.model import Candidate
from query.retrieval.recall import RecallCheck, recall
from query.retrieval.vectors import NeighbourQuery, Tuning
from query.telemetry import QueryMetrics
from tests.support.waiting import until


def candidates(*scores: float) -> list[Candidate]:
    return [Candidate(uuid4(), UUID(int=0), "", score) for score in scores]


def test_recall_is_the_share_of_the_nearest_passages_among_the_candidates() -> None:
    exact = candidates(0.9, 0.8, 0.7, 0.6)
    assert recall([*exact, *candidates(0.5)], exact) == 1
    assert recall([exact[0], exact[2], exact[3], *candidates(0.5)], exact) == 0.75
    assert recall(candidates(0.5, 0.4), exact) == 0


def test_passages_with_equal_vectors_stand_for_each_other() -> None:
    assert recall(candidates(0.9, 0.8, 0.8), candidates(0.9, 0.8, 0.8)) == 1


@pytest.mark.parametrize("error", [Retryable("Postgres is away"), ZeroDivisionError()])
async def test_a_check_that_fails_is_counted_and_the_next_one_waits(error: Exception) -> None:
    opened: list[str] = []

    @asynccontextmanager
    async def connect(_seconds: float, _doing: str, tenant: str) -> AsyncIterator[Any]:
        opened.append(tenant)
        raise error
        yield

    metrics = QueryMetrics()
    check = RecallCheck(connect, Tuning(), metrics)
    query = NeighbourQuery(cast(Any, None), Caller("acme", frozenset()), cast(Any, None))
    unfinished = metrics.recall_checks.labels(outcome="unfinished")
    check.offer(query, np.zeros(2, dtype=np.float32), "graph", limit=74)
    check.offer(query, np.zeros(2, dtype=np.float32), "graph", limit=74)  # while one runs
    await until(lambda: unfinished._value.get() == 1)
    check.offer(query, np.zeros(2, dtype=np.float32), "graph", limit=74)
    await check.aclose()
    assert opened == ["acme"]
