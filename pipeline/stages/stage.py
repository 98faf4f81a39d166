"""The interface between a stage and the module that consumes for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from pipeline.core.errors import Deferred, Service
from pipeline.core.model import Lane
from topics.codec import Headers
from topics.registry import Topic

USED: ContextVar[set[Service]] = ContextVar("used_services")
"""Services that answered during the present batch: they prove that a failure is not a general outage."""


def used(service: Service) -> None:
    """Say that a service other than Postgres (which every batch uses) has just answered well."""
    if (services := USED.get(None)) is not None:
        services.add(service)


@contextmanager
def used_apart() -> Iterator[set[Service]]:
    """Collect the services that answer inside; they are added to those of the batch at the end."""
    mine: set[Service] = {"postgres"}
    token = USED.set(mine)
    try:
        yield mine
    finally:
        USED.reset(token)
        if (services := USED.get(None)) is not None:
            services |= mine


@dataclass(frozen=True, slots=True)
class Incoming:
    """One Kafka record as a stage sees it. ``lane`` is that of its topic."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    lane: Lane


class Flooded(Deferred):
    """There are too many dead letters: these records are as they were. All others of their batch were handled."""

    def __init__(self, message: str, records: Sequence[Incoming], *, retry_after: float) -> None:
        super().__init__(message, retry_after=retry_after, service="dead-letters")
        self.records = records


class Stage(Protocol):
    """Law: ``handle`` may be called again with the same records, at any time, in any process."""

    name: str
    topics: dict[Lane, Topic]
    """The live topic and its co-partitioned backfill topic."""
    batch_size: int
    """Most records that one lane hands over at once."""

    async def handle(self, batch: Sequence[Incoming]) -> None:
        """Do all of it or raise: Retryable (the whole batch is kept and tried again), anything else (the batch is
        halved until the one failing record stands alone)."""
        ...

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        """A single record that fails for good: make it visible and keep it, so that the partition goes on."""
        ...

    async def crowded(self) -> bool:
        """Whether backfill should wait, because what follows this stage has enough to do. Never raises."""
        ...


class Last:
    """A stage that nothing follows."""

    async def crowded(self) -> bool:
        return False
