"""Following the generations in the background: every model is loaded and used once before a query needs it, so that
the first query after a cut-over or a rollback is not slow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation
from pipeline.ledger import generations
from pipeline.runtime.tasks import cancel_and_wait, time_limit
from pipeline.stores.postgres import Pool, translated
from query.embedding.embedders import Embedders
from query.telemetry import QueryMetrics

_log = structlog.get_logger(__name__)

EVERY_SECONDS = 5.0
LEDGER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The generations at one moment."""

    active: Generation
    candidate: Generation | None
    """The generation that may replace the active one: the one being built once it is complete, else the previous."""


class GenerationFollower:
    """Prepares the models of all generations of a service. Queries still read the active generation from the ledger."""

    def __init__(self, pool: Pool, embedders: Embedders, metrics: QueryMetrics) -> None:
        self._pool = pool
        self._embedders = embedders
        self._metrics = metrics
        self._loop: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._ready: set[str] = set()
        self.seen: Snapshot | None = None
        self.warm = asyncio.Event()
        """Set once the active generation's model has answered or failed, which ends the start-up."""
        self.errors: dict[str, PenstockError] = {}
        """The last error of each generation's model."""

    def start(self) -> None:
        """Follow in the background until ``aclose``. A further call retries failed models at once."""
        if self._loop is None:
            self._loop = asyncio.create_task(self._follow(), name="follow generations")
        self._wake.set()

    async def aclose(self) -> None:
        if self._loop is not None:
            await cancel_and_wait([self._loop])

    async def _follow(self) -> None:
        reported: str | None = None
        while True:
            self._wake.clear()
            try:
                await self.refresh()
                reported = None
            except PenstockError as error:  # the next look is soon, and queries ask the ledger themselves
                if str(error) != reported:
                    _log.warning("generations_not_followed", reason=str(error))
                reported = str(error)
            except Exception as error:  # noqa: BLE001  (a mistake of ours: said, for nobody waits for this task)
                _log.error("generations_crashed", kind=type(error).__name__)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_SECONDS):
                    await self._wake.wait()

    async def refresh(self) -> None:
        """Read the generations once, and load the models that are new. Raises Retryable or Misconfigured when the
        ledger does not answer."""
        async with time_limit(LEDGER_SECONDS, "Postgres"):
            with translated("generations"):
                async with self._pool.connection() as connection:
                    existing = await generations.writable(connection)
                    cursor = await connection.execute("SELECT generation FROM builds WHERE ready_at IS NOT NULL")
                    ready = {name for (name,) in await cursor.fetchall()}
        self.seen = _seen(existing, ready)
        await self._embedders.keep(existing)
        self._ready &= {generation.name for generation in existing}
        await asyncio.gather(
            *(self._warm_up(generation) for generation in existing if generation.name not in self._ready)
        )
        self.errors = {
            name: error for name, error in self.errors.items() if name in {generation.name for generation in existing}
        }
        self._metrics.models_ready.clear()
        for generation in existing:
            self._metrics.models_ready.labels(generation.state).set(generation.name in self._ready)

    async def _warm_up(self, generation: Generation) -> None:
        try:
            await self._embedders.of(generation).embed("warm up")
            self._ready.add(generation.name)
            self.errors.pop(generation.name, None)
        except PenstockError as error:
            if str(error) != str(self.errors.get(generation.name)):
                _log.warning("model_not_ready", generation=generation.name, state=generation.state, reason=str(error))
            self.errors[generation.name] = error
        if generation.state == "active":
            self.warm.set()


def _seen(existing: Sequence[Generation], ready: set[str]) -> Snapshot | None:
    by_state = {
        generation.state: generation
        for generation in existing
        if generation.state != "building" or generation.name in ready
    }
    if "active" not in by_state:
        return None
    return Snapshot(by_state["active"], by_state.get("building") or by_state.get("previous"))
