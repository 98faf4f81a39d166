"""Admission: a record is taken in only if an enrolled producer signed it and may publish for its tenant and source.

See docs/adr/0047-producer-authorisation.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from time import monotonic
from typing import Generic, Literal, Protocol, TypeVar

import structlog

from pipeline.core.errors import Poison
from pipeline.core.identity import source_of
from pipeline.core.producers import CODES, Registry, Unauthorised
from pipeline.ledger import producers
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import Producers
from pipeline.stages.stage import Incoming
from pipeline.stores.postgres import Pool, translated

log = structlog.get_logger()

REGISTRY_SECONDS = 2.0
"""A key that was removed is refused at the latest after so long. One that was added holds at once: before anything is
refused the registry is read again."""

STAGES = ("detect", "identities", "conversations")


class Scope(Protocol):
    """The tenant and source that a message is about."""

    @property
    def tenant(self) -> str: ...

    @property
    def source(self) -> str: ...


T = TypeVar("T")


@dataclass(slots=True)
class Sorted(Generic[T]):
    """A batch, sorted."""

    accepted: list[T] = field(default_factory=list)
    """The messages of the valid records."""
    valid: list[Incoming] = field(default_factory=list)
    """The valid records, in the same order."""
    producers: list[str | None] = field(default_factory=list)
    """The producers that signed them; None: signatures are not checked."""
    poison: list[tuple[Incoming, Poison]] = field(default_factory=list)


class Unchecked:
    """Accepts every record: signatures are not checked."""

    async def sort(
        self,
        batch: Sequence[Incoming],
        read: Callable[[Incoming], T],
        scope: Callable[[T], Scope],
        *,
        stage: str,
        concerns_tenant: Callable[[T], bool] = lambda message: False,
    ) -> Sorted[T]:
        """Read a batch, in a thread. read: raises Poison. scope: of what was read. concerns_tenant: whether it concerns
        all sources of its tenant. Raises Retryable while the registry cannot be read."""
        return await asyncio.to_thread(_sort, batch, lambda record: (read(record), None))

    async def refusal(self, record: Incoming, message: Scope) -> Unauthorised | None:
        """Why this record would be refused now; None: it would not. Raises Retryable."""
        return None


UNCHECKED = Unchecked()


class Admission(Unchecked):
    """Law: with ``enforce`` nothing is accepted that no producer in force has signed for the very record, or that the
    producer may not publish. With ``warn`` the same is counted and accepted."""

    def __init__(self, pool: Pool, metrics: Metrics, mode: Literal["warn", "enforce"]) -> None:
        self._pool = pool
        self._metrics = metrics
        self._mode = mode
        self._registry: Registry | None = None
        self._read_at = 0.0
        """On time.monotonic(): before the registry was asked for."""
        self._reading = asyncio.Lock()
        for stage, code in product(STAGES, CODES):  # or the first record of a kind would be no increase
            metrics.unauthorised.labels(stage=stage, reason=code, mode=mode)

    async def sort(
        self,
        batch: Sequence[Incoming],
        read: Callable[[Incoming], T],
        scope: Callable[[T], Scope],
        *,
        stage: str,
        concerns_tenant: Callable[[T], bool] = lambda message: False,
    ) -> Sorted[T]:
        began = monotonic()

        def judged(record: Incoming, registry: Registry) -> tuple[T, str]:
            now = datetime.now(UTC)
            producer = verified(registry, record, now)
            try:
                message = read(record)
            except Poison as error:  # its letter counts for the source in its key, which must not be another's
                registry.authorise_key(producer, source_of(record.key).decode(errors="replace"), error)
                raise
            if concerns_tenant(message):
                registry.authorise_tenant(producer, scope(message).tenant)
            else:
                registry.authorise(producer, scope(message).tenant, scope(message).source)
            return message, producer

        registry = await self._read(began - REGISTRY_SECONDS)
        sorted_batch = await asyncio.to_thread(_sort, batch, lambda record: judged(record, registry))
        if any(isinstance(error, Unauthorised) for _, error in sorted_batch.poison) and self._read_at < began:
            newer = await self._read(began)  # somebody may have been enrolled a moment ago
            if newer != registry:
                sorted_batch = await asyncio.to_thread(_sort, batch, lambda record: judged(record, newer))
        refused = Counter(error.code for _, error in sorted_batch.poison if isinstance(error, Unauthorised))
        for code, count in refused.items():
            self._metrics.unauthorised.labels(stage=stage, reason=code, mode=self._mode).inc(count)
        if refused and self._mode == "warn":
            log.warning("unauthorised_records_accepted", stage=stage, **refused)
            return await asyncio.to_thread(_sort, batch, lambda record: (read(record), None))
        return sorted_batch

    async def refusal(self, record: Incoming, message: Scope) -> Unauthorised | None:
        if self._mode != "enforce":
            return None
        registry = await self._read(monotonic())
        try:
            registry.authorise(verified(registry, record, datetime.now(UTC)), message.tenant, message.source)
        except Unauthorised as error:
            return error
        return None

    async def _read(self, not_before: float) -> Registry:
        """The registry as it was at that moment (on time.monotonic()), or later."""
        async with self._reading:
            if self._registry is None or self._read_at < not_before:
                requested_at = monotonic()
                with translated("producers"):
                    async with self._pool.connection() as connection:
                        self._registry = await producers.load(connection)
                self._read_at = requested_at
            return self._registry


def admission(pool: Pool, metrics: Metrics, mode: Producers) -> Unchecked:
    """As the setting PENSTOCK_PRODUCERS has it."""
    return UNCHECKED if mode == "off" else Admission(pool, metrics, mode)


def verified(registry: Registry, record: Incoming, now: datetime) -> str:
    """The name of the producer that signed the record. Raises Unauthorised."""
    from topics import signatures  # cryptography takes 50 ms: only where signatures are looked at

    signature = signatures.read_signature(record.headers)
    if signature is None:
        raise Unauthorised("unsigned", f"it carries no header {signatures.HEADER} that can be read")
    key = registry.key(signature.key_id, now)
    topics = signatures.signed_for(record.topic)
    if not signatures.is_valid(key.public_key, signature.signature, topics, record.key, record.value, record.headers):
        raise Unauthorised(
            "bad_signature", f"its signature by {key.producer} is of another record, topic or key, or is forged"
        )
    return key.producer


def _sort(batch: Sequence[Incoming], read: Callable[[Incoming], tuple[T, str | None]]) -> Sorted[T]:
    """An invalid record never hides the valid one before it. read: gives the message and who signed it."""
    sorted_batch: Sorted[T] = Sorted()
    for record in batch:
        try:
            message, producer = read(record)
        except Poison as error:
            sorted_batch.poison.append((record, error))
        else:
            sorted_batch.accepted.append(message)
            sorted_batch.producers.append(producer)
            sorted_batch.valid.append(record)
    return sorted_batch
