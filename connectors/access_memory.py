"""Memory of access, for sources whose groups are known only from the documents that name them, and the work that such a
source starts by itself: sweeps, groups, documents whose grants expire, and the renewal of push channels.

In addition to cursors, the runner's Memory stores the tags that documents name and the grants that expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from connectors.source import Memory, Reaction

TAGS = "tags"
ENDING = "ending"
MAX_EXPIRING = 5_000
"""Documents with expiring grants that are remembered, the soonest ones; a sweep finds later ones."""


@dataclass
class Listing:
    """A listing that is under way."""

    tags: set[str] = field(default_factory=set)
    lacks_parts: bool = False
    """Whether documents were left out, whose tags are therefore not recorded: no tag is forgotten."""


class AccessMemory:
    """Remembers the tags that documents name and the grants that expire. A source that does not list its groups knows
    tags only from documents: those of the last two complete listings, and those that were read later. (A tag too many
    does no harm; a missing one, after a listing that was cut short, would.)"""

    def __init__(self, memory: Memory, on_new_tags: Callable[[Collection[str]], None]) -> None:
        """on_new_tags: called with tags whose members are not known yet."""
        self._memory = memory
        self._on_new_tags = on_new_tags
        self._lock = asyncio.Lock()
        self._tags: set[str] | None = None
        self._listed: set[str] | None = None
        """The tags of the last complete listing; None: there was none yet."""
        self._listings: list[Listing] = []
        self._ending: dict[str, str] | None = None
        """By external id: when the first grant expires, in ISO 8601."""

    async def _load(self) -> tuple[set[str], dict[str, str]]:
        if self._tags is None or self._ending is None:
            stored = await self._memory.get(TAGS) or {}
            self._tags = set(stored.get("tags", ()))
            self._listed = None if stored.get("shown") is None else set(stored["shown"])
            self._ending = dict(await self._memory.get(ENDING) or {})
        return self._tags, self._ending

    async def tags(self) -> tuple[frozenset[str], bool]:
        """Return the known tags, and whether a complete listing has shown them all."""
        async with self._lock:
            tags, _ = await self._load()
            return frozenset(tags), self._listed is not None

    async def all_tags(self, slim: Callable[[], AsyncGenerator[object, None]]) -> frozenset[str]:
        """Return all tags. slim: the source's listing, which is read through if no complete one has shown them yet."""
        tags, is_complete = await self.tags()
        if not is_complete:
            async with aclosing(slim()) as pages:
                async for _ in pages:
                    pass
            tags, _ = await self.tags()
        return tags

    async def record(self, accesses: Mapping[str, tuple[Collection[str], datetime | None]]) -> None:
        """Record the access of documents that were just read: by external id, the tags and when the first grant
        expires."""
        async with self._lock:
            tags, ending = await self._load()
            groups = {tag for named, _ in accesses.values() for tag in named if not tag.startswith("user:")}
            for listing in self._listings:
                listing.tags |= groups
            new = groups - tags
            if new:
                tags |= new
                await self._save_tags()
            before = dict(ending)
            for id_, (_, expires_at) in accesses.items():
                ending.pop(id_, None)
                if expires_at is not None:
                    ending[id_] = expires_at.isoformat()
            if ending != before:
                soonest = sorted(ending.items(), key=lambda entry: datetime.fromisoformat(entry[1]))[:MAX_EXPIRING]
                self._ending = dict(soonest)
                await self._memory.put(ENDING, self._ending)
        if new:
            self._on_new_tags(new)

    @asynccontextmanager
    async def listing(self) -> AsyncIterator[Listing]:
        """Wrap a complete listing. When it ends, tags are forgotten that neither it nor the listing before it has
        recorded."""
        under_way = Listing()
        self._listings.append(under_way)
        try:
            yield under_way
            listed = under_way.tags
            async with self._lock:
                tags, _ = await self._load()
                if under_way.lacks_parts:
                    listed |= tags
                current = listed | (self._listed or set())
                if tags != current or self._listed != listed:
                    self._tags, self._listed = current, set(listed)
                    await self._save_tags()
        finally:
            self._listings = [listing for listing in self._listings if listing is not under_way]

    async def _save_tags(self) -> None:
        listed = None if self._listed is None else sorted(self._listed)
        await self._memory.put(TAGS, {"tags": sorted(self._tags or ()), "shown": listed})

    async def expired(self, now: datetime) -> list[str]:
        """Return documents of which a grant has expired since they were read."""
        async with self._lock:
            _, ending = await self._load()
            return [id_ for id_, end in ending.items() if datetime.fromisoformat(end) <= now]

    async def forget(self, external_ids: Collection[str]) -> None:
        """Forget the grants of documents that are deleted."""
        await self.record(dict.fromkeys(external_ids, ((), None)))


React = Callable[[Reaction], Awaitable[None]]
Renew = Callable[[], Awaitable[datetime | None]]
"""Renews push channels, and returns when to call it again; None if that failed."""

EXPIRY_CHECK_SECONDS = 15.0
"""Time between two checks for expired grants; a reader keeps an expired grant for about so long."""
RETRY_AFTER = timedelta(minutes=5)
"""Time until a document whose grant has expired is requested again, and a refused channel is retried."""


class Listener:
    """Collects requests for groups and sweeps, and passes them to the runner with documents whose grants expire."""

    def __init__(self) -> None:
        self._groups: set[str] = set()
        self._sweep = False
        self._renew_now = False
        self._wakeup = asyncio.Event()
        self._requested: dict[str, datetime] = {}

    def groups(self, tags: Collection[str]) -> None:
        self._groups |= set(tags)
        self._wakeup.set()

    def sweep(self) -> None:
        self._sweep = True
        self._wakeup.set()

    def renew_now(self) -> None:
        """Renew the push channels now, whatever their end."""
        self._renew_now = True
        self._wakeup.set()

    async def run(
        self,
        react: React,
        memory: AccessMemory,
        now: Callable[[], datetime],
        renew: Renew | None,
        *,
        expiry_check_seconds: float = EXPIRY_CHECK_SECONDS,
    ) -> None:
        """Run until cancelled. renew: None if the instance has no address for notifications."""
        renewal: datetime | None = None
        while True:
            if renew is not None and (self._renew_now or renewal is None or renewal <= now()):
                self._renew_now = False
                renewal = await renew() or now() + RETRY_AFTER
            expired = self._new_requests(await memory.expired(now()), now())
            groups, sweep = self._groups, self._sweep
            self._groups, self._sweep = set(), False
            self._wakeup.clear()
            if expired or groups or sweep:
                await react(Reaction(ids=expired, groups=groups, sweep=sweep))
            try:
                async with asyncio.timeout(expiry_check_seconds):
                    await self._wakeup.wait()
            except TimeoutError:
                continue

    def _new_requests(self, ids: Sequence[str], now: datetime) -> list[str]:
        self._requested = {id_: at for id_, at in self._requested.items() if now - at < RETRY_AFTER}
        new = [id_ for id_ in ids if id_ not in self._requested]
        self._requested |= dict.fromkeys(new, now)
        return new
