"""Stores what events have named and no run has read yet: some changes are shown by their event alone until the next
sweep, and a process that is killed in between would have forgotten them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from connectors.runner.activity import Activity
from connectors.source import Memory

BY_EVENT = "event"
"""The argument of a sweep that an event has requested."""
MAX_STORED_DOCUMENTS = 1_000
"""With more documents than that a sweep is stored in their place: every event would write all of them again."""
_NAME = "runner:unfinished"
_KINDS = ("events", "tags", "sweep")
"""The activities that events trigger, except for reading changes, which every runner begins with."""


class Unfinished:
    """Law: what is stored covers everything that was unfinished when the last ``save`` that returned was called. It may
    cover more, which is then read once too often."""

    def __init__(self, memory: Memory, activities: Mapping[str, Activity]) -> None:
        self._memory = memory
        self._activities = activities
        self._stored: Mapping[str, frozenset[str]] | None = None
        """None: unknown, because a write did not return."""
        self._lock = asyncio.Lock()

    async def resume(self) -> None:
        """Trigger what the last runner has left."""
        stored = await self._memory.get(_NAME) or {}
        self._stored = {kind: frozenset(map(str, stored.get(kind, ()))) for kind in _KINDS}
        for kind, arguments in self._stored.items():
            if arguments:
                self._activities[kind].trigger(*arguments)

    async def save(self) -> None:
        """Store what is unfinished now, unless it is stored. Events that arrive while others are stored are stored
        together. Raises Retryable."""
        async with self._lock:
            now = self._now()
            if self._stored is None or any(now[kind] - self._stored[kind] for kind in _KINDS):
                await self._put(now)

    async def prune(self) -> None:
        """Remove what is finished. Raises Retryable."""
        async with self._lock:
            if (now := self._now()) != self._stored:
                await self._put(now)

    async def _put(self, now: Mapping[str, frozenset[str]]) -> None:
        self._stored = None
        stored = {kind: sorted(arguments) for kind, arguments in now.items() if arguments}
        await self._memory.put(_NAME, stored or None)
        self._stored = now

    def _now(self) -> Mapping[str, frozenset[str]]:
        events, tags, sweep = (self._activities[kind].unfinished for kind in _KINDS)
        sweep &= {BY_EVENT}  # not the permission of an operator to delete many documents
        if len(events) > MAX_STORED_DOCUMENTS:
            events, sweep = frozenset(), frozenset({BY_EVENT})
        return {"events": events, "tags": tags, "sweep": sweep}
