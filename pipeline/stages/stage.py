"""The interface between a stage and the lanes that hand it records (``pipeline.stream.lanes``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from pipeline.core.errors import Deferred, Retryable, Service
from pipeline.core.model import Lane
from topics.codec import Headers
from topics.registry import Topic

SERVICES_USED: ContextVar[set[Service]] = ContextVar("used_services")
"""The services that have answered during the current batch: evidence that another batch's failure is no outage."""


def used(service: Service) -> None:
    """Record that a service has just answered without an error. Postgres need not be recorded: every batch uses it."""
    if (services := SERVICES_USED.get(None)) is not None:
        services.add(service)


@contextmanager
def services_used() -> Iterator[set[Service]]:
    """Yield a set that collects the services that answer inside the block; at its end they are added to the batch's."""
    inside: set[Service] = {"postgres"}
    token = SERVICES_USED.set(inside)
    try:
        yield inside
    finally:
        SERVICES_USED.reset(token)
        if (services := SERVICES_USED.get(None)) is not None:
            services |= inside


@dataclass(frozen=True, slots=True)
class Incoming:
    """A Kafka record as a stage receives it. ``lane`` is that of its topic."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    lane: Lane


class Flooded(Deferred):
    """These records exceed the limit on dead letters and were left as they are; the rest of their batch was handled."""

    def __init__(self, message: str, records: Sequence[Incoming], *, retry_after: float) -> None:
        super().__init__(message, retry_after=retry_after, service="dead-letters")
        self.records = records


class Stage(Protocol):
    """A step of the pipeline, which handles the records of its topics.

    Law: ``handle`` may be called again with the same records, at any time, in any process.
    """

    name: str
    topics: dict[Lane, Topic]
    """The live topic and its co-partitioned backfill topic."""
    batch_size: int
    """The most records that a lane passes to ``handle``."""

    async def handle(self, batch: Sequence[Incoming]) -> None:
        """Handle all of these records, or raise. After Retryable the batch is tried again; after Flooded only its
        records are. After any other error the batch is halved until the failing record is alone."""
        ...

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        """Store a record that cannot be handled where an operator sees it, so that its partition can go on. Raises
        what ``handle`` raises; the record is then tried again."""
        ...

    async def put_off(self, record: Incoming, error: Retryable) -> bool:
        """Record where an operator sees it that a record fails while the service answers others, and when it is tried
        again; its partition goes on. No failure of the record. Returns False where nothing would try it again. Raises
        what ``handle`` raises."""
        ...

    async def is_backlogged(self) -> bool:
        """Whether backfill should wait, because the stages that follow have enough work pending. Never raises."""
        ...


class FinalStage:
    """Base class of a stage that no other one follows."""

    async def put_off(self, record: Incoming, error: Retryable) -> bool:
        return False

    async def is_backlogged(self) -> bool:
        return False
