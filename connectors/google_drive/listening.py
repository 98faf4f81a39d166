"""What an instance wants done without being asked: sweeps and groups that changes called for, grants that have just
ended, and push channels kept open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime, timedelta

import structlog

from connectors.google_drive.kept import Kept
from connectors.source import Reaction
from connectors.web import Answered
from pipeline.core.errors import Misconfigured, Retryable

log = structlog.get_logger()

React = Callable[[Reaction], Awaitable[None]]
Renew = Callable[[], Awaitable[datetime | None]]
"""Keeps the channels open, and says when to be called again."""

LOOK_SECONDS = 15.0
"""How often the end of a grant is looked for: a reader keeps an ended grant about so long."""
AGAIN = timedelta(minutes=5)
"""Until a document that should have been read again is asked for again, and a refused channel is tried again."""


class Listener:
    def __init__(self) -> None:
        self._groups: set[str] = set()
        self._sweep = False
        self._wish = asyncio.Event()
        self._asked: dict[str, datetime] = {}

    def groups(self, tags: Collection[str]) -> None:
        self._groups |= set(tags)
        self._wish.set()

    def sweep(self) -> None:
        self._sweep = True
        self._wish.set()

    async def run(
        self, react: React, kept: Kept, now: Callable[[], datetime], renew: Renew | None, *, source: str,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:  # fmt: skip
        """Until cancelled. renew None: nothing can be sent to us."""
        renewal: datetime | None = None
        while True:
            if renew is not None and (renewal is None or renewal <= now()):
                renewal = await _renewed(renew, source) or now() + AGAIN
            ended = self._not_asked(await kept.due(now()), now())
            groups, sweep = self._groups, self._sweep
            self._groups, self._sweep = set(), False
            self._wish.clear()
            if ended or groups or sweep:
                await react(Reaction(ids=ended, groups=groups, sweep=sweep))
            try:
                async with asyncio.timeout(look_seconds):
                    await self._wish.wait()
            except TimeoutError:
                continue

    def _not_asked(self, ids: Sequence[str], now: datetime) -> list[str]:
        self._asked = {id_: at for id_, at in self._asked.items() if now - at < AGAIN}
        new = [id_ for id_ in ids if id_ not in self._asked]
        self._asked |= dict.fromkeys(new, now)
        return new


async def _renewed(renew: Renew, source: str) -> datetime | None:
    """None: not now. Polling goes on in any case."""
    try:
        return await renew()
    except (Retryable, Misconfigured, Answered) as error:
        log.warning("google_drive", source=source, code="channel", problem=str(error))
        return None
