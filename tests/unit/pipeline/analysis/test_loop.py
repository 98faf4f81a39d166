"""The loop of the analysis worker in random histories: partitions come and go while their messages are handled, some of
them fail, and commits are refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import UUID

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError

from pipeline.analysis import loop
from pipeline.analysis.loop import MAX_TENANTS, Loop, Waiting
from pipeline.core.errors import Retryable
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings
from topics.codec import encode
from topics.messages import DocumentIndexed, Message
from topics.registry import Topic

PLACES = [TopicPartition("documents.indexed.v1", partition) for partition in range(3)]
TENANTS = 4
STEPS = 150


class Failing:
    """A task that takes a few turns of the event loop, and fails now and then."""

    name = "conflicts"
    topics: Sequence[Topic] = ()

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    async def handle(self, messages: Sequence[Message]) -> None:
        for _ in range(self._dice.randrange(4)):
            await asyncio.sleep(0)
        if self._dice.random() < 0.2:
            raise Retryable("the database is away", service="postgres")
        if self._dice.random() < 0.05:
            raise RuntimeError


class Noting(Loop):
    """Remembers which records were handled."""

    handled: set[tuple[TopicPartition, int]]

    def _handled(self, tenant: str, batch: Sequence[Waiting]) -> None:
        self.handled |= {(waiting.place, waiting.token.offset) for waiting in batch}
        super()._handled(tenant, batch)


class Group:
    """The consumer group: the log of each partition, how far it was committed, and which are assigned."""

    def __init__(self, consuming: Noting, dice: random.Random) -> None:
        self.consuming = consuming
        self._dice = dice
        consuming.handled = set()
        records = [_record(f"t{tenant}") for tenant in range(TENANTS)]
        self.logs = {place: [dice.choice(records) for _ in range(dice.randrange(5, 40))] for place in PLACES}
        self.committed = dict.fromkeys(PLACES, 0)
        self._positions: dict[TopicPartition, int] = {}
        self.assign(PLACES)

    @property
    def assigned(self) -> list[TopicPartition]:
        return sorted(self._positions)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        for _ in range(self._dice.randrange(3)):
            await asyncio.sleep(0)
        if self._dice.random() < 0.1:
            raise CommitFailedError
        for place, offset in offsets.items():
            skipped = {(place, n) for n in range(self.committed[place], offset)} - self.consuming.handled
            assert not skipped, "an offset was committed before everything in front of it was handled"
            self.committed[place] = max(self.committed[place], offset)

    def assign(self, places: Sequence[TopicPartition]) -> None:
        self.consuming.assigned(places)
        self._positions |= {place: self.committed[place] for place in places}

    async def revoke(self, places: Sequence[TopicPartition]) -> None:
        for place in places:
            del self._positions[place]
        await self.consuming.revoked(self, places)

    def read(self, most: int) -> None:
        for place, position in self._positions.items():
            for offset, record in enumerate(self.logs[place][position : position + most], position):
                at = SimpleNamespace(offset=offset, key=record.key, value=record.value, headers=record.headers)
                self.consuming._read(place, at)
                self._positions[place] = offset + 1

    @property
    def is_done(self) -> bool:
        return all(self.committed[place] == len(log) for place, log in self.logs.items())


def _record(tenant: str) -> SimpleNamespace:
    message = DocumentIndexed(
        tenant=tenant,
        source="wiki",
        external_id="page",
        observed_at=datetime.now(UTC),
        document_id=str(UUID(int=1)),
        seq=1,
        state="searchable",
        generation="g1",
    )
    record = encode(message)
    return SimpleNamespace(key=record.key, value=record.value, headers=record.headers)


@pytest.mark.parametrize("seed", [*range(8), None])
async def test_no_message_is_lost_and_none_is_committed_early_while_partitions_come_and_go(
    monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    monkeypatch.setattr(loop, "AGAIN_SECONDS", 0.001)
    seed = random.randrange(10**6) if seed is None else seed
    dice = random.Random(seed)
    group = Group(Noting(Failing(dice), KafkaSettings(), Metrics()), dice)
    consuming = group.consuming
    serving = [asyncio.create_task(consuming._serve()) for _ in range(MAX_TENANTS)]
    for _ in range(STEPS):
        match dice.choices(("read", "commit", "revoke", "assign"), (6, 2, 1, 1))[0]:
            case "read":
                group.read(dice.randrange(4))
            case "commit":
                await consuming.commit(group)
            case "revoke" if group.assigned:
                await group.revoke(dice.sample(group.assigned, dice.randrange(1, len(group.assigned) + 1)))
            case _:
                if others := sorted(set(PLACES) - set(group.assigned)):
                    group.assign(dice.sample(others, dice.randrange(1, len(others) + 1)))
        if dice.random() < 0.5:
            await asyncio.sleep(0)
    group.assign(sorted(set(PLACES) - set(group.assigned)))
    try:
        async with asyncio.timeout(30):
            while not group.is_done:
                group.read(100)
                await asyncio.sleep(0.001)
                await consuming.commit(group)
    except TimeoutError:
        pytest.fail(f"seed {seed}: messages are never handled: {group.committed}")
    assert consuming._held_bytes == 0, seed
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
