"""The interface of a task of the worker ``analysis``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.kafka.producer import Producer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import Settings
from pipeline.stores.postgres import Pool
from topics.messages import Message
from topics.registry import Topic


@dataclass(frozen=True, slots=True)
class Services:
    """The objects that all tasks of a process share."""

    settings: Settings
    pool: Pool
    """Its login may read the ledger and the vectors, and write the tables that 2-grants.sql names for it."""
    producer: Producer
    metrics: Metrics


class Task(Protocol):
    """Analyses messages as they arrive. Each task has a consumer group of its own, ``penstock-NAME``, so that none
    waits for another; several processes divide the partitions among them.

    Law: a message's offset is committed after ``handle`` has returned, so that each is handled at least once, and those
    with one key in their order.
    """

    @property
    def name(self) -> str: ...

    @property
    def topics(self) -> Sequence[Topic]: ...

    async def handle(self, messages: Sequence[Message]) -> None:
        """Analyse messages of one tenant, at most ``loop.MAX_RECORDS`` of them, in their order. Whatever it raises
        delays this tenant alone: the same messages are given to it again after a pause, except for ``OF_ONE_MESSAGE``:
        then they are given to it one by one, and one that raises such an error again is passed over. Messages of
        several tenants are handled at the same time."""
        ...
