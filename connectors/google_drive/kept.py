"""What an instance keeps between runs besides cursors, in the runner's Memory: the tags met, and grants that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import datetime

from connectors.source import Memory

TAGS = "tags"
ENDING = "ending"
MOST_ENDING = 5_000
"""The soonest ends that are remembered; of a later one the sweep tells."""


class Kept:
    """Groups cannot be listed from Drive, only met on files. So the tags met are kept: those that the last two whole
    listings showed (a tag too many harms nobody; one too few, after a listing that was cut, would), and what else is
    met later."""

    def __init__(self, memory: Memory, on_new_tags: Callable[[Collection[str]], None]) -> None:
        """on_new_tags: somebody should ask who holds them."""
        self._memory = memory
        self._on_new_tags = on_new_tags
        self._lock = asyncio.Lock()
        self._tags: set[str] | None = None
        self._shown: set[str] | None = None
        """By the last whole listing; None: there was none yet."""
        self._listings: list[set[str]] = []
        self._ending: dict[str, str] | None = None

    async def _load(self) -> tuple[set[str], dict[str, str]]:
        if self._tags is None or self._ending is None:
            kept = await self._memory.get(TAGS) or {}
            self._tags = set(kept.get("tags", ()))
            self._shown = None if kept.get("shown") is None else set(kept["shown"])
            self._ending = dict(await self._memory.get(ENDING) or {})
        return self._tags, self._ending

    async def tags(self) -> tuple[frozenset[str], bool]:
        """And whether they are all there are."""
        async with self._lock:
            tags, _ = await self._load()
            return frozenset(tags), self._shown is not None

    async def met(self, found: Mapping[str, tuple[Collection[str], datetime | None]]) -> None:
        """What was just read: external id → its tags, and when the first of its grants ends."""
        async with self._lock:
            tags, ending = await self._load()
            groups = {tag for seen, _ in found.values() for tag in seen if not tag.startswith("user:")}
            for listing in self._listings:
                listing |= groups
            new = groups - tags
            if new:
                tags |= new
                await self._save_tags()
            before = dict(ending)
            for id_, (_, until) in found.items():
                ending.pop(id_, None)
                if until is not None:
                    ending[id_] = until.isoformat()
            if ending != before:
                soonest = sorted(ending.items(), key=lambda one: datetime.fromisoformat(one[1]))[:MOST_ENDING]
                self._ending = dict(soonest)
                await self._memory.put(ENDING, self._ending)
        if new:
            self._on_new_tags(new)

    @asynccontextmanager
    async def listing(self) -> AsyncIterator[None]:
        """Around a whole listing. Once it has come to its end, tags that neither it nor the one before it met exist no
        more."""
        shown: set[str] = set()
        self._listings.append(shown)
        try:
            yield
            async with self._lock:
                tags, _ = await self._load()
                wanted = shown | (self._shown or set())
                if tags != wanted or self._shown != shown:
                    self._tags, self._shown = wanted, set(shown)
                    await self._save_tags()
        finally:
            self._listings = [one for one in self._listings if one is not shown]

    async def _save_tags(self) -> None:
        shown = None if self._shown is None else sorted(self._shown)
        await self._memory.put(TAGS, {"tags": sorted(self._tags or ()), "shown": shown})

    async def due(self, now: datetime) -> list[str]:
        """Documents of which a grant has ended, and which were not read since."""
        async with self._lock:
            _, ending = await self._load()
            return [id_ for id_, end in ending.items() if datetime.fromisoformat(end) <= now]

    async def next_end(self) -> datetime | None:
        async with self._lock:
            _, ending = await self._load()
            return min((datetime.fromisoformat(end) for end in ending.values()), default=None)

    async def gone(self, external_ids: Collection[str]) -> None:
        await self.met(dict.fromkeys(external_ids, ((), None)))
