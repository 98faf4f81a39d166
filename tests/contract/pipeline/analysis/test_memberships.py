"""Waiting for changed memberships, with real Kafka and Postgres."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from pipeline.analysis import memberships
from pipeline.analysis.memberships import Memberships, latest
from pipeline.kafka.client import deliver
from pipeline.kafka.groups import group, groups
from tests.support.connectors.runner_kit import Bench
from topics.messages import IdentityChanged
from topics.registry import IDENTITIES

pytestmark = pytest.mark.stack


async def commit(bench: Bench, *, short_of_end: int) -> None:
    """Let the stage ``identities`` have read all but so many records of each partition."""
    async with groups(bench.kafka) as client:
        logs = await client.logs([IDENTITIES.name], datetime.now(UTC))
        await client.commit(
            group("identities"), {place: max(log.begin, log.end - short_of_end) for place, log in logs.items()}
        )


async def test_a_membership_that_the_ledger_refuses_is_waited_for_until_its_stage_has_read_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer of the topic without a key stopped the events of all tenants: half a minute for each 200 records, of
    which 50,000 are read ahead."""
    monkeypatch.setattr(memberships, "APPLY_SECONDS", 600.0)
    forged = IdentityChanged(
        tenant=bench.tenant, source="wiki", principal="ann", groups=[], observed_at=datetime.now(UTC)
    )
    await deliver([bench.producer.send(IDENTITIES, forged)])
    await commit(bench, short_of_end=1)
    waiting = asyncio.create_task(Memberships(bench.pool, bench.kafka).until_applied([forged], latest()))
    await asyncio.sleep(2)
    assert not waiting.done()
    await commit(bench, short_of_end=0)
    await asyncio.wait_for(waiting, 60)
