"""A model that only a generation beside the active one uses holds up nobody else's work when it is away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from uuid import UUID

import structlog

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Generation

log = structlog.get_logger()

AWAY_SECONDS, LONGEST_AWAY_SECONDS = 5.0, 30.0
"""Before such a model is asked again, unless it says when itself; and at most."""


class OwnModels:
    """Law: what such a generation misses stays pending; whoever builds it hints again, and so does the sweeper."""

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
            asked = error.retry_after if isinstance(error, Retryable) else None
            wait = min(LONGEST_AWAY_SECONDS, asked or AWAY_SECONDS)
            self._away_until[generation.name] = monotonic() + wait
            log.error("generation_waits", generation=generation.name, seconds=wait, reason=str(error)[:300])
            if isinstance(error, Misconfigured):
                await self._set_aside(generation, ids, error)

    async def _has_its_own(self, generation: Generation) -> bool:
        known = await self._load()  # it may have become the active one since
        active = next((g for g in known.values() if g.state == "active"), generation)
        return (active.model, active.dimensions, active.service) != (
            generation.model, generation.dimensions, generation.service,
        )  # fmt: skip
