"""Which generations there are, looked at every few seconds: a model is loaded and asked once before a query needs it,
so that neither a cut-over nor a rollback has a slow first query."""

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
class Seen:
    """At one moment."""

    active: Generation
    candidate: Generation | None
    """What may take its place: the one that is being built, once it is complete, else the previous."""


class Following:
    """One a service. What queries pin they ask the ledger for; this only prepares."""

    def __init__(self, pool: Pool, embedders: Embedders, metrics: QueryMetrics) -> None:
        self._pool = pool
        self._embedders = embedders
        self._metrics = metrics
        self._loop: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._answered: set[str] = set()
        self.seen: Seen | None = None
        self.warm = asyncio.Event()
        """Whether the active generation's model has answered once, or failed to: it is not waited for any longer."""
        self.errors: dict[str, PenstockError] = {}
        """By generation: why its model did not answer when it was last tried."""

    def start(self) -> None:
        """In the background, until ``aclose``; a second call has the models that failed tried again now."""
        if self._loop is None:
            self._loop = asyncio.create_task(self._follow(), name="follow generations")
        self._wake.set()

    async def aclose(self) -> None:
        if self._loop is not None:
            await cancel_and_wait([self._loop])

    async def _follow(self) -> None:
        said: str | None = None
        while True:
            self._wake.clear()
            try:
                await self.look()
                said = None
            except PenstockError as error:  # the next look is soon, and queries ask the ledger themselves
                if str(error) != said:
                    _log.warning("generations_not_followed", reason=str(error))
                said = str(error)
            except Exception as error:  # noqa: BLE001  (a mistake of ours: said, for nobody waits for this task)
                _log.error("generations_crashed", kind=type(error).__name__)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_SECONDS):
                    await self._wake.wait()

    async def look(self) -> None:
        """Once. Raises Retryable or Misconfigured when the ledger cannot be asked."""
        async with time_limit(LEDGER_SECONDS, "Postgres"):
            with translated("generations"):
                async with self._pool.connection() as connection:
                    existing = await generations.writable(connection)
                    cursor = await connection.execute("SELECT generation FROM builds WHERE ready_at IS NOT NULL")
                    ready = {name for (name,) in await cursor.fetchall()}
        self.seen = _seen(existing, ready)
        await self._embedders.keep(existing)
        self._answered &= {generation.name for generation in existing}
        await asyncio.gather(
            *(self._ask(generation) for generation in existing if generation.name not in self._answered)
        )
        self.errors = {
            name: error for name, error in self.errors.items() if name in {generation.name for generation in existing}
        }
        self._metrics.models_ready.clear()
        for generation in existing:
            self._metrics.models_ready.labels(generation.state).set(generation.name in self._answered)

    async def _ask(self, generation: Generation) -> None:
        try:
            await self._embedders.of(generation).embed("warm up")
            self._answered.add(generation.name)
            self.errors.pop(generation.name, None)
        except PenstockError as error:
            if str(error) != str(self.errors.get(generation.name)):
                _log.warning("model_not_ready", generation=generation.name, state=generation.state, reason=str(error))
            self.errors[generation.name] = error
        if generation.state == "active":
            self.warm.set()


def _seen(existing: Sequence[Generation], ready: set[str]) -> Seen | None:
    by_state = {
        generation.state: generation
        for generation in existing
        if generation.state != "building" or generation.name in ready
    }
    if "active" not in by_state:
        return None
    return Seen(by_state["active"], by_state.get("building") or by_state.get("previous"))
