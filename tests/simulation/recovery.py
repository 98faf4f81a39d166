"""The steps of an operator after Postgres lost its tail: those of ``penstock recover``, then the audit with repair.

``Recovery``, ``Examiner`` and ``Repairer`` are the product's own. Here are Kafka's offsets as they see them. An audit's
memory of its runs (``pipeline.audit.runs``) is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from pipeline.audit.examine import Examiner, ranges_end
from pipeline.audit.repair import Repairer
from pipeline.audit.walk import SECOND_LOOK_SECONDS
from pipeline.core.errors import PenstockError
from pipeline.kafka.groups import GroupBusy, Log, OffsetsUnavailable
from pipeline.maintenance.recover import Recovery
from pipeline.stores.keywords import Keywords
from tests.simulation.keyword_store import Elasticsearch

if TYPE_CHECKING:
    from tests.simulation.kafka import Group
    from tests.simulation.world import Process, World

AGAIN_SECONDS = 5.0
"""After a failure the operator runs the command again."""
ROUNDS = 3
"""As pipeline.audit.repair.ROUNDS."""


async def recovered(operator: Process, since: datetime, stop: Callable[[], Callable[[], None]]) -> None:
    """``penstock recover --since``, run until it succeeds. ``stop`` ends the workers that write the ledger and returns
    what starts them again."""
    recovery = _recovery(operator)
    while True:
        start = stop()
        try:
            await recovery.require_stopped()
            await recovery.raise_sequence()
            rewound = await recovery.rewind(since)
            start()
            await recovery.replayed(rewound, lambda: None)
            await recovery.look_again()
            await recovery.settled()
            await audited(operator)
            return
        except PenstockError:
            await asyncio.sleep(AGAIN_SECONDS)


async def audited(operator: Process) -> None:
    """``penstock audit --repair``: compare everything, request repairs of what differs, wait for the sinks, and compare
    again. Raises Retryable, Misconfigured."""
    es: Any = Elasticsearch(operator)
    examiner = Examiner(cast(Any, operator.pool), es, operator.world.generation)
    repairer = Repairer(examiner, Keywords(es), cast(Any, operator.producer))
    for _ in range(ROUNDS):
        await examiner.refresh()
        suspects: set[UUID] = set()
        position: UUID | None = None
        while documents := await examiner.following(position):
            suspects |= await _differing(examiner, position, documents)
            position = documents[-1]
        suspects |= await _differing(examiner, position, [])
        await asyncio.sleep(SECOND_LOOK_SECONDS)
        if not suspects or not await repairer.request_repairs(suspects):
            return
        operator.world.tally["documents repaired by the audit"] += len(suspects)
        await _recovery(operator).settled()


async def _differing(examiner: Examiner, after: UUID | None, documents: list[UUID]) -> set[UUID]:
    async with aclosing(examiner.examine(ranges_end(documents, after), documents)) as verdicts:
        return {verdict.document async for verdict in verdicts if not verdict.clean}


def _recovery(operator: Process) -> Recovery:
    es: Any = Elasticsearch(operator)
    return Recovery(cast(Any, operator.pool), es, cast(Any, Offsets(operator)))


class Offsets:
    """The part of ``pipeline.kafka.groups.Groups`` that the product uses."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world: World = process.world

    async def members(self, group: str) -> list[str]:
        async with self._reached("members"):
            consumer_group = self._group(group)
            return [] if consumer_group is None else [member.process.name for member in consumer_group.members]

    async def committed(self, group: str) -> dict[tuple[str, int], int]:
        async with self._reached("committed"):
            consumer_group = self._group(group)
            return {} if consumer_group is None else dict(consumer_group.committed)

    async def logs(self, topics: Collection[str], moment: datetime) -> dict[tuple[str, int], Log]:
        async with self._reached("logs"):
            return {
                place: Log(0, times[0] if times else None, sum(at < moment for at in times), len(times))
                for place, times in self._world.broker.sent(topics).items()
            }

    async def commit(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        async with self._reached("commit"):
            consumer_group = self._group(group)
            if consumer_group is None or not offsets:
                return
            if consumer_group.members:
                raise GroupBusy(f"{group} has {len(consumer_group.members)} members")
            consumer_group.committed.update(offsets)
            consumer_group.rebalance()

    def _group(self, name: str) -> Group | None:
        return self._world.broker.groups.get(name.removeprefix("penstock-"))

    @asynccontextmanager
    async def _reached(self, doing: str) -> AsyncIterator[None]:
        try:
            await self._process.reach("kafka", doing)
        except ConnectionError as error:
            raise OffsetsUnavailable("Kafka is away") from error
        yield
