"""When a keyword index counts as another one than the ledger filled."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import pytest

from pipeline.stores.index_fence import Change, Known, Seen, Shard, change

KNOWN = Known("chunks-g1", "uuid", {0: Shard("a", 10), 1: Shard("b", 20)})


def seen(uuid: str = "uuid", **last: tuple[str, int]) -> Seen:
    """last: shard → its history and its highest sequence number."""
    return Seen(
        uuid,
        {int(n[1:]): Shard(history, operation) for n, (history, operation) in last.items()},
        {int(n[1:]): operation for n, (_, operation) in last.items()},
    )


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (seen(s0=("a", 10), s1=("b", 20)), None),
        (seen(s0=("a", 11), s1=("b", 500)), None),
        (seen(s0=("a", 11)), None),  # a shard that has no primary at the moment
        (seen(), None),
        (seen("other", s0=("c", -1), s1=("d", -1)), "recreated"),
        (seen(s0=("a", 10), s1=("c", 20)), "new_history"),
        (seen(s0=("a", 10), s1=("c", 900)), "new_history"),
        (seen(s0=("a", 9), s1=("b", 20)), "rewound"),
    ],
)
def test_an_index_is_another_one_by_its_uuid_its_histories_or_lost_operations(
    now: Seen, expected: Change | None
) -> None:
    assert change(KNOWN, now) == expected


def test_operations_that_were_not_in_every_copy_may_be_lost_in_a_failover() -> None:
    before = Seen("uuid", {0: Shard("a", 7)}, {0: 9})  # 8 and 9 were on the primary alone
    known = Known("chunks-g1", "uuid", before.shards)
    assert change(known, Seen("uuid", {0: Shard("a", 8)}, {0: 8})) is None


@pytest.mark.parametrize(
    ("position", "compared", "share"),
    [(None, False, "0%"), (UUID(int=2**127), False, "50%"), (UUID(int=2**127), True, "100%")],
)
def test_status_says_how_much_was_compared(position: UUID | None, compared: bool, share: str) -> None:
    known = Known("chunks-g1", "uuid", {}, 1, "recreated", datetime(2026, 11, 20, 8, 0), position, compared)
    assert str(known) == f"chunks-g1 changed (recreated, 2026-11-20 08:00 UTC), {share} compared"
