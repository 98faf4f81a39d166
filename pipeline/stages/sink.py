"""Code that both sinks share: serving several generations independently, and setting a document aside."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from traceback import extract_tb
from uuid import UUID

import structlog

from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Retryable, Service
from pipeline.core.model import Generation, Store
from pipeline.core.retry import backoff
from pipeline.ledger import work
from pipeline.observability.metrics import Metrics
from pipeline.stages.hints import read_hint
from pipeline.stages.stage import Incoming, services_used
from pipeline.stores.postgres import Pool, translated

log = structlog.get_logger()

SET_ASIDE_BASE_SECONDS, SET_ASIDE_CAP_SECONDS = 30.0, 3600.0
MAX_LOGGED_FRAMES = 5


PAUSE_AFTER_FAILURES, FAILURE_WINDOW_SECONDS = 3, 60.0
"""A generation is paused after this many failures within this time, each at a service that had just served the active
generation."""
PAUSE_SECONDS = 30.0
"""Hints for a paused generation are skipped for this long. Then one batch is tried."""


REREAD_SECONDS = 2.0
"""The generations are read again after this long, because a cut-over makes another one active."""


class Generations:
    """The generations that a sink serves. They are read again when a hint names an unknown one, and every
    REREAD_SECONDS.

    Law: a generation whose table or index is missing, full or blocked does not block another one. While a non-active
    generation (being built, or retained for a rollback) is paused, its work stays pending in the ledger, and the
    sweeper hints it again. The active one may fail as well, perhaps because of just what a build is to replace.
    """

    def __init__(
        self, store: Store, pool: Pool, load: Callable[[], Awaitable[Mapping[str, Generation]]], metrics: Metrics
    ) -> None:
        self._store: Store = store
        self._pool = pool
        self._load = load
        self._metrics = metrics
        self._known: Mapping[str, Generation] = {}
        self._read_at = -math.inf
        self._failed_at: dict[str, deque[float]] = {}
        """By generation, on time.monotonic(), as in the two that follow."""
        self._paused_until: dict[str, float] = {}
        self._served_at: dict[tuple[Service, str], float] = {}
        """By service and generation: when the service last served the generation."""

    async def serve(
        self, batch: Sequence[Incoming], converge: Callable[[Generation, Sequence[UUID]], Awaitable[None]]
    ) -> None:
        """Converge the documents that a batch of hints names, those of the active generation first. Raises what
        ``converge`` raises, unless it is the generation alone that fails."""
        served_active: set[Service] = set()
        misconfigured: list[tuple[Generation, Sequence[UUID], Misconfigured]] = []
        for generation, ids in sorted(await self.sort(batch), key=lambda work: work[0].state != "active"):
            if monotonic() < self._paused_until.get(generation.name, 0.0):
                continue
            try:
                with services_used() as used:
                    await converge(generation, ids)
            except (Retryable, Misconfigured) as error:
                if isinstance(error, Retryable) and error.alone:
                    raise  # a document's failure, not the generation's
                if error.service not in served_active or not await self._pause(generation.name, error):
                    if isinstance(error, Retryable):
                        raise  # an outage: the next generation would fail as well
                    misconfigured.append((generation, ids, error))
                    continue
                await self._set_aside(generation, ids, error)
            else:
                self._served_at |= {(service, generation.name): monotonic() for service in used}
                served_active |= used if generation.state == "active" else set()
        for generation, documents, failure in misconfigured:
            # Each model is a service of its own, although all are called "embedding": another generation's success
            # proves nothing.
            is_model = failure.service == "embedding"
            if is_model or not self._has_served_others(generation.name, failure.service):
                raise failure
            await self._set_aside(generation, documents, failure)

    async def _set_aside(self, generation: Generation, ids: Sequence[UUID], error: Retryable | Misconfigured) -> None:
        for id_ in ids if not isinstance(error, Deferred) else ():
            await set_aside(self._pool, self._store, id_, generation.name, error, self._metrics)

    def _has_served_others(self, name: str, service: Service | None) -> bool:
        """Whether the service (None: any) has recently served another generation than this one. Then this one's table
        or index is at fault, and waiting for it would delay the others' work."""
        now = monotonic()
        return any(
            service in (used, None) and other != name and now - served_at < FAILURE_WINDOW_SECONDS
            for (used, other), served_at in self._served_at.items()
        )

    async def _pause(self, name: str, error: Retryable | Misconfigured) -> bool:
        """Count a failure of this generation, at a service that has just served the active one, and pause it after
        PAUSE_AFTER_FAILURES. Returns whether it is paused."""
        await self._read()  # it may have become the active one since
        if name not in self._known or self._known[name].state == "active":
            return False
        failed_at, now = self._failed_at.setdefault(name, deque(maxlen=PAUSE_AFTER_FAILURES)), monotonic()
        failed_at.append(now)
        if len(failed_at) < PAUSE_AFTER_FAILURES or now - failed_at[0] > FAILURE_WINDOW_SECONDS:
            return False
        self._paused_until[name] = now + PAUSE_SECONDS
        log.error(
            "generation_paused", store=self._store, generation=name, seconds=PAUSE_SECONDS, reason=str(error)[:200]
        )
        return True

    async def sort(self, batch: Sequence[Incoming]) -> list[tuple[Generation, list[UUID]]]:
        """The documents that a batch of hints names, by generation, each document once. Hints for a generation that is
        retired, or whose model another process serves, are dropped."""
        ids: dict[str, dict[UUID, None]] = {}
        for record in batch:
            document, generation = read_hint(record)
            ids.setdefault(generation, {})[document] = None
        if ids.keys() - self._known.keys() or monotonic() - self._read_at > REREAD_SECONDS:
            await self._read()
        return [(self._known[name], list(documents)) for name, documents in ids.items() if name in self._known]

    async def _read(self) -> None:
        self._known = await self._load()
        self._read_at = monotonic()


async def set_aside(
    pool: Pool, store: Store, document: UUID, generation: str, error: Exception, metrics: Metrics
) -> None:
    """Record a document's failure with its reason. The sweeper hints it again, at growing intervals."""
    reason = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__} in {store}"
    with translated(store):
        async with pool.connection() as connection:
            for w in await work.load(connection, generation, store, [document]):
                wait = backoff(
                    w.attempts + 1, base=SET_ASIDE_BASE_SECONDS, cap=SET_ASIDE_CAP_SECONDS, retry_after=None, random=1.0
                )
                await work.set_aside(connection, generation, store, document, error=reason, retry_in_seconds=wait)
    metrics.failed_documents.labels(sink=store).inc()
    # Not the messages of the traceback: Postgres and Elasticsearch quote the row or entry that they refuse.
    frames = [f"{Path(f.filename).name}:{f.lineno}" for f in extract_tb(error.__traceback__)[-MAX_LOGGED_FRAMES:]]
    log.error("document_set_aside", store=store, document=str(document), reason=reason, at=frames)


async def put_off(pool: Pool, store: Store, document: UUID, generation: str, error: Retryable) -> None:
    """Record why a document is still pending, without a failure of it. The sweeper hints it again after as long as it
    has been pending, within the bounds of those that failed."""
    with translated(store):
        async with pool.connection() as connection:
            await work.put_off(
                connection,
                generation,
                store,
                document,
                reason=str(error),
                least_seconds=max(SET_ASIDE_BASE_SECONDS, error.retry_after or 0.0),
                most_seconds=SET_ASIDE_CAP_SECONDS,
            )
    log.warning("document_put_off", store=store, document=str(document), reason=str(error)[:300])


MODEL_OUTAGE_SECONDS, MAX_MODEL_OUTAGE_SECONDS = 5.0, 30.0
"""The pause before a model that failed is called again, unless its answer says how long; and the longest pause."""


class ModelBreaker:
    """A circuit breaker for each generation that has another model than the active one, so that an outage of that model
    does not block the lane.

    Law: the work that such a generation misses stays pending, and the build and the sweeper hint it again.
    """

    def __init__(
        self,
        load: Callable[[], Awaitable[Mapping[str, Generation]]],
        set_aside: Callable[[Generation, Sequence[UUID], Misconfigured], Awaitable[None]],
    ) -> None:
        """set_aside: records for these documents that the model is misconfigured."""
        self._load = load
        self._set_aside = set_aside
        self._open_until: dict[str, float] = {}
        """By generation, on time.monotonic()."""

    async def serve(
        self,
        generation: Generation,
        ids: Sequence[UUID],
        converge: Callable[[Generation, Sequence[UUID]], Awaitable[None]],
    ) -> None:
        """Converge these documents, or skip them while the circuit breaker is open. Raises what ``converge`` raises,
        except the failures of a model that the active generation does not use."""
        if monotonic() < self._open_until.get(generation.name, 0.0):
            return
        try:
            await converge(generation, ids)
        except (Retryable, Misconfigured) as error:
            is_alone = isinstance(error, Retryable) and error.alone  # the model answers others: no outage
            if is_alone or error.service != "embedding" or not await self._has_own_model(generation):
                raise
            retry_after = error.retry_after if isinstance(error, Retryable) else None
            wait = min(MAX_MODEL_OUTAGE_SECONDS, retry_after or MODEL_OUTAGE_SECONDS)
            self._open_until[generation.name] = monotonic() + wait
            log.error("generation_delayed", generation=generation.name, seconds=wait, reason=str(error)[:300])
            if isinstance(error, Misconfigured):
                await self._set_aside(generation, ids, error)

    async def _has_own_model(self, generation: Generation) -> bool:
        """Whether this generation's model, or where it is served, differs from the active generation's."""
        known = await self._load()  # it may have become the active one since
        active = next((g for g in known.values() if g.state == "active"), generation)
        return (active.model, active.dimensions, active.service) != (
            generation.model,
            generation.dimensions,
            generation.service,
        )
