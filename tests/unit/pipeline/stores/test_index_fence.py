"""When a keyword index counts as another one than the ledger filled."""

from __future__ import annotations

import asyncio
from datetime import datetime
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock
from uuid import UUID

import pytest
from elastic_transport import ObjectApiResponse
from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import IndexFenced, Retryable
from pipeline.stores.index_fence import Change, Known, Seen, Shard, change, latest_shards, look, require, require_all
from query.retrieval import stores as offers
from query.retrieval.stores import Stores, Timeouts
from query.retrieval.vectors import Tuning

KNOWN = Known("chunks-g1", "uuid", {0: Shard("a", 10), 1: Shard("b", 20)})


def seen_index(uuid: str = "uuid", **last: tuple[str, int]) -> Seen:
    """last: shard → its history and its highest sequence number."""
    return Seen(
        uuid,
        {int(n[1:]): Shard(history, operation) for n, (history, operation) in last.items()},
        {int(n[1:]): operation for n, (_, operation) in last.items()},
    )


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (seen_index(s0=("a", 10), s1=("b", 20)), None),
        (seen_index(s0=("a", 11), s1=("b", 500)), None),
        (seen_index(s0=("a", 11)), None),  # a shard that has no primary at the moment
        (seen_index(), None),
        (seen_index("other", s0=("c", -1), s1=("d", -1)), "recreated"),
        (seen_index(s0=("a", 10), s1=("c", 20)), "new_history"),
        (seen_index(s0=("a", 10), s1=("c", 900)), "new_history"),
        (seen_index(s0=("a", 9), s1=("b", 20)), "rewound"),
    ],
)
def test_an_index_change_is_detected_by_its_uuid_history_or_lost_operations(now: Seen, expected: Change | None) -> None:
    assert change(KNOWN, now) == expected


def test_operations_lost_in_a_failover_before_replication_are_no_index_change() -> None:
    before = Seen("uuid", {0: Shard("a", 7)}, {0: 9})  # 8 and 9 were on the primary alone
    known = Known("chunks-g1", "uuid", before.shards)
    assert change(known, Seen("uuid", {0: Shard("a", 8)}, {0: 8})) is None


@pytest.mark.parametrize(
    ("position", "compared", "share"),
    [(None, False, "0%"), (UUID(int=2**127), False, "50%"), (UUID(int=2**127), True, "100%")],
)
def test_the_index_status_states_the_share_that_was_compared(position: UUID | None, compared: bool, share: str) -> None:
    known = Known("chunks-g1", "uuid", {}, 1, "recreated", datetime(2026, 11, 20, 8, 0), position, compared)
    assert str(known) == f"chunks-g1 changed (recreated, 2026-11-20 08:00 UTC), {share} compared"


def _stats(*copies: tuple[bool, str, int]) -> AsyncElasticsearch:
    """copies: of shard 0, whether it is a primary, its state, and its highest operation."""
    shards = [
        {
            "routing": {"primary": primary, "state": state},
            "seq_no": {"max_seq_no": last, "global_checkpoint": last},
            "commit": {"user_data": {"history_uuid": "a"}},
        }
        for primary, state, last in copies
    ]
    body = {"indices": {"chunks-g1": {"uuid": "uuid", "shards": {"0": shards}}}}
    es: Any = SimpleNamespace(indices=SimpleNamespace(stats=AsyncMock(return_value=ObjectApiResponse(body, None))))  # type: ignore[arg-type]
    return cast(AsyncElasticsearch, es)


async def test_a_primary_shard_that_is_still_starting_is_retryable() -> None:
    with pytest.raises(Retryable, match="have not started"):
        await look(_stats((True, "INITIALIZING", 3)), "chunks-g1")
    moving = await look(_stats((True, "RELOCATING", 10), (True, "INITIALIZING", 3)), "chunks-g1")
    assert moving == Seen("uuid", {0: Shard("a", 10)}, {0: 10})


def test_the_highest_checkpoint_of_a_shard_history_is_stored() -> None:
    now = Seen("uuid", {0: Shard("a", 7), 1: Shard("c", 3)}, {0: 12, 1: 5})
    assert latest_shards(KNOWN, now) == {0: Shard("a", 10), 1: Shard("c", 3)}
    assert latest_shards(KNOWN, seen_index(s0=("a", 30))) == {0: Shard("a", 30), 1: Shard("b", 20)}
    assert latest_shards(KNOWN, seen_index(s0=("a", 4)))[0] == Shard("a", 4), (
        "it was set back: its numbers go on from there"
    )


async def test_a_missing_shard_is_retryable() -> None:
    with pytest.raises(Retryable):
        require_all(KNOWN, seen_index(s0=("a", 11)))
    require_all(KNOWN, seen_index(s0=("a", 11), s1=("b", 20)))
    with pytest.raises(Retryable, match="some of its shards"):
        await require(KNOWN, _stats((True, "STARTED", 10)))


async def test_concurrent_queries_share_an_index_check_and_survive_a_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = SimpleNamespace(options=lambda **_: None)
    generation: Any = SimpleNamespace(keyword_index="chunks-g1")
    stores = Stores(nothing, nothing, Timeouts(), Tuning())
    looks: list[str] = []
    outcomes: list[Exception | None] = [None, Retryable("busy"), IndexFenced(), Retryable("busy")]

    async def look(index: str) -> None:
        looks.append(index)
        await asyncio.sleep(0)
        if (outcome := outcomes.pop(0)) is not None:
            if isinstance(outcome, IndexFenced):
                del stores._index_checked_at[index]
            raise outcome
        stores._index_checked_at[index] = monotonic()

    monkeypatch.setattr(stores, "_check_index", look)
    monkeypatch.setattr(offers, "INDEX_CHECK_SECONDS", 0.0)
    await asyncio.gather(*(stores.require_index(generation) for _ in range(5)))
    assert len(looks) == 1
    await stores.require_index(generation)
    for expected in (IndexFenced, Retryable):
        with pytest.raises(expected):
            await stores.require_index(generation)
    assert len(looks) == 4
