"""Admission: a record is accepted only if an enrolled producer signed it and may publish for its tenant and source.

The reasons are in docs/adr/0047-producer-authorisation.md.
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
"""A removed key may be accepted for this long. An added one is accepted at once, because the registry is read again
before a record is refused."""

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
    """A batch after it was read: its valid records and its poison."""

    accepted: list[T] = field(default_factory=list)
    """The messages of the valid records."""
    valid: list[Incoming] = field(default_factory=list)
    """The valid records, in the same order."""
    producers: list[str | None] = field(default_factory=list)
    """The producers that signed them, in the same order; None where signatures are not checked."""
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
        """Read a batch in a thread, and separate valid records from poison.

        read: parses one record, or raises Poison. scope: the tenant and source of a message. concerns_tenant: whether a
        message concerns all sources of its tenant, and so needs a producer that may publish for all of them. Raises
        Retryable while the registry cannot be read.
        """
        return await asyncio.to_thread(_sort, batch, lambda record: (read(record), None))

    async def refusal(self, record: Incoming, message: Scope) -> Unauthorised | None:
        """Why this record would be refused now; None: it would not. Raises Retryable."""
        return None


UNCHECKED = Unchecked()


class Admission(Unchecked):
    """Checks signatures against the registry of producers.

    Law: with ``enforce`` a record is accepted only if a producer in force has signed exactly this record, and may
    publish it. With ``warn`` other records are counted, and accepted.
    """

    def __init__(self, pool: Pool, metrics: Metrics, mode: Literal["warn", "enforce"]) -> None:
        self._pool = pool
        self._metrics = metrics
        self._mode = mode
        self._registry: Registry | None = None
        self._read_at = 0.0
        """When the last read of the registry began, on time.monotonic()."""
        self._reading = asyncio.Lock()
        for stage, code in product(STAGES, CODES):  # so that the first refusal is an increase for Prometheus
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
            except (
                Poison
            ) as error:  # the letter counts for the source in the record's key, which must be the producer's
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
            newer = await self._read(began)  # a producer may have been enrolled a moment ago
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
        """The registry as it was at ``not_before`` (on time.monotonic()) or later. Raises Retryable."""
        async with self._reading:
            if self._registry is None or self._read_at < not_before:
                requested_at = monotonic()
                with translated("producers"):
                    async with self._pool.connection() as connection:
                        self._registry = await producers.load(connection)
                self._read_at = requested_at
            return self._registry


def admission(pool: Pool, metrics: Metrics, mode: Producers) -> Unchecked:
    """The admission that the setting PENSTOCK_PRODUCERS asks for."""
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


def without_traceback(error: T) -> T:
    """Remove the tracebacks of an error and its causes. Their frames hold the batch, and the batch the error: large
    records would stay in memory until Python looks for such circles, which it does after many objects, not bytes."""
    cause: BaseException | None = error if isinstance(error, BaseException) else None
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def _sort(batch: Sequence[Incoming], read: Callable[[Incoming], tuple[T, str | None]]) -> Sorted[T]:
    """Read every record, so that poison does not hide a valid one. read: returns the message and the name of the
    producer that signed it, or raises Poison."""
    sorted_batch: Sorted[T] = Sorted()
    for record in batch:
        try:
            message, producer = read(record)
        except Poison as error:
            sorted_batch.poison.append((record, without_traceback(error)))
        else:
            sorted_batch.accepted.append(message)
            sorted_batch.producers.append(producer)
            sorted_batch.valid.append(record)
    return sorted_batch
