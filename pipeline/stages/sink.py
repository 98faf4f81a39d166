"""Code that both sinks share: serving generations apart from each other, and setting one document aside."""

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
from pipeline.stages.stage import Incoming, used_apart
from pipeline.stores.postgres import Pool, translated

log = structlog.get_logger()

SET_ASIDE_BASE_SECONDS, SET_ASIDE_CAP_SECONDS = 30.0, 3600.0
FRAMES_SHOWN = 5


RESTS_AFTER, WITHIN_SECONDS = 3, 60.0
"""A generation rests after so many failures within so long, each at a service that had just served the active one."""
REST_SECONDS = 30.0
"""Hints of a resting generation are skipped for so long: then one batch is tried, which delays no other generation."""


KNOWN_SECONDS = 2.0
"""The generations are read again when they were read longer ago: a cut-over makes another one the active one."""


class Generations:
    """The generations that a sink serves, read again when a hint names another one, and every other second.

    Law: a generation whose table or index is gone, full or blocked does not hold up another one: neither one beside the
    active one (being built, or kept for a rollback), whose misses stay pending in the ledger until the sweeper brings
    them back, nor the active one itself, which may be just what a build replaces.
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
        self._failed: dict[str, deque[float]] = {}
        self._rests_until: dict[str, float] = {}
        self._through: dict[tuple[Service, str], float] = {}
        """When a service last served a generation."""

    async def serve(
        self, batch: Sequence[Incoming], converge: Callable[[Generation, Sequence[UUID]], Awaitable[None]]
    ) -> None:
        """Converge what a batch of hints names, of the active generation first. Raises what ``converge`` raises."""
        proved: set[Service] = set()
        wrong: list[tuple[Generation, Sequence[UUID], Misconfigured]] = []
        for generation, ids in sorted(await self.sort(batch), key=lambda work: work[0].state != "active"):
            if monotonic() < self._rests_until.get(generation.name, 0.0):
                continue
            try:
                with used_apart() as used:
                    await converge(generation, ids)
            except (Retryable, Misconfigured) as error:
                if error.service not in proved or not await self._rests(generation.name, error):
                    if isinstance(error, Retryable):
                        raise  # the world is down: the next generation would fail as well
                    wrong.append((generation, ids, error))
                    continue
                await self._set_aside(generation, ids, error)
            else:
                self._through |= {(service, generation.name): monotonic() for service in used}
                proved |= used if generation.state == "active" else set()
        for generation, documents, misconfigured in wrong:
            # "embedding" is as many services as there are models: another one's proves nothing about this one's.
            own = misconfigured.service == "embedding"
            if own or not self._others_got_through(generation.name, misconfigured.service):
                raise misconfigured
            await self._set_aside(generation, documents, misconfigured)

    async def _set_aside(self, generation: Generation, ids: Sequence[UUID], error: Retryable | Misconfigured) -> None:
        for id_ in ids if not isinstance(error, Deferred) else ():
            await set_aside(self._pool, self._store, id_, generation.name, error, self._metrics)

    def _others_got_through(self, name: str, service: Service | None) -> bool:
        """Whether the service (None: any) has just served another generation: then it is this one's table or index that
        is wrong, and waiting in the lane would hold up the others' work."""
        now = monotonic()
        return any(
            service in (at, None) and other != name and now - when < WITHIN_SECONDS
            for (at, other), when in self._through.items()
        )

    async def _rests(self, name: str, error: Retryable | Misconfigured) -> bool:
        """Whether this generation alone keeps failing: it failed at a service that has just served the active one."""
        await self._read()  # it may have become the active one since
        if name not in self._known or self._known[name].state == "active":
            return False
        failed, now = self._failed.setdefault(name, deque(maxlen=RESTS_AFTER)), monotonic()
        failed.append(now)
        if len(failed) < RESTS_AFTER or now - failed[0] > WITHIN_SECONDS:
            return False
        self._rests_until[name] = now + REST_SECONDS
        log.error(
            "generation_paused", store=self._store, generation=name, seconds=REST_SECONDS, reason=str(error)[:200]
        )
        return True

    async def sort(self, batch: Sequence[Incoming]) -> list[tuple[Generation, list[UUID]]]:
        """A batch of hints as documents by generation, one hint each being enough. A generation that is retired, or
        whose model another process serves, is passed over."""
        ids: dict[str, dict[UUID, None]] = {}
        for record in batch:
            document, generation = read_hint(record)
            ids.setdefault(generation, {})[document] = None
        if ids.keys() - self._known.keys() or monotonic() - self._read_at > KNOWN_SECONDS:
            await self._read()
        return [(self._known[name], list(documents)) for name, documents in ids.items() if name in self._known]

    async def _read(self) -> None:
        self._known = await self._load()
        self._read_at = monotonic()


async def set_aside(
    pool: Pool, store: Store, document: UUID, generation: str, error: Exception, metrics: Metrics
) -> None:
    """Record one document's failure with its reason; the sweeper brings it back, later and later."""
    reason = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__} in {store}"
    with translated(store):
        async with pool.connection() as connection:
            for w in await work.load(connection, generation, store, [document]):
                wait = backoff(
                    w.attempts + 1, base=SET_ASIDE_BASE_SECONDS, cap=SET_ASIDE_CAP_SECONDS, retry_after=None, random=1.0
                )
                await work.set_aside(connection, generation, store, document, error=reason, retry_in_seconds=wait)
    metrics.failed_documents.labels(sink=store).inc()
    # Never the traceback's texts: Postgres and Elasticsearch quote the row or entry that they refuse.
    frames = [f"{Path(f.filename).name}:{f.lineno}" for f in extract_tb(error.__traceback__)[-FRAMES_SHOWN:]]
    log.error("document_set_aside", store=store, document=str(document), reason=reason, at=frames)


MODEL_OUTAGE_SECONDS, MAX_MODEL_OUTAGE_SECONDS = 5.0, 30.0
"""Pause before such a model is called again, unless its answer says when; and the longest pause."""


class ModelBreaker:
    """Circuit breaker per non-active generation: an outage of its own model never blocks the lane.

    Law: the work that such a generation misses stays pending, and the build and the sweeper hint it again."""

    def __init__(
        self,
        load: Callable[[], Awaitable[Mapping[str, Generation]]],
        set_aside: Callable[[Generation, Sequence[UUID], Misconfigured], Awaitable[None]],
    ) -> None:
        """set_aside: records why nothing can be done for these documents until somebody changes something."""
        self._load = load
        self._set_aside = set_aside
        self._away_until: dict[str, float] = {}

    async def serve(
        self,
        generation: Generation,
        ids: Sequence[UUID],
        converge: Callable[[Generation, Sequence[UUID]], Awaitable[None]],
    ) -> None:
        """Raises what ``converge`` raises, unless it is this generation's own model that fails."""
        if monotonic() < self._away_until.get(generation.name, 0.0):
            return
        try:
            await converge(generation, ids)
        except (Retryable, Misconfigured) as error:
            if error.service != "embedding" or not await self._has_its_own(generation):
                raise
            retry_after = error.retry_after if isinstance(error, Retryable) else None
            wait = min(MAX_MODEL_OUTAGE_SECONDS, retry_after or MODEL_OUTAGE_SECONDS)
            self._away_until[generation.name] = monotonic() + wait
            log.error("generation_delayed", generation=generation.name, seconds=wait, reason=str(error)[:300])
            if isinstance(error, Misconfigured):
                await self._set_aside(generation, ids, error)

    async def _has_its_own(self, generation: Generation) -> bool:
        known = await self._load()  # it may have become the active one since
        active = next((g for g in known.values() if g.state == "active"), generation)
        return (active.model, active.dimensions, active.service) != (
            generation.model,
            generation.dimensions,
            generation.service,
        )
