"""The sweep: everything that is there, by a listing. It finds what no event told of, and it alone deletes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any, cast

from connectors.checkpoint import PAGE, ListedIds
from connectors.clock import Clock
from connectors.extraction.remote import condition
from connectors.protocol import Problem
from connectors.runner.compare import access_of, is_stale, is_storable_id
from connectors.runner.guard import is_mass_deletion
from connectors.runner.plan import FETCH
from connectors.runner.publish import Publisher
from connectors.runner.rows import Rows
from connectors.runner.state import State
from connectors.source import Entry, Gone, Listed, Source

FEW = 500
"""As many documents never seen before go live; more at once are a first load that came by a listing."""


class Sweep:
    """Law: nothing is deleted but what a listing that came to its end lacks and the source, asked for it by name, says
    is gone; and never much at once unless somebody allowed it. What was read since the listing began is left alone.

    For a document that is as it was nothing is written: what the listing has shown is kept in memory until the sweep
    ends, and one that is cut off begins anew."""

    def __init__(
        self,
        source: Source,
        state: State,
        publisher: Publisher,
        clock: Clock,
        *,
        between_pages: Callable[[], None],
        unrevised: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        """unrevised: the listing cannot tell one content from another, so a gap is closed by a full read only. done: a
        sweep came to its end."""
        self._source = source
        self._state = state
        self._publisher = publisher
        self._rows: Rows = publisher.rows
        self._clock = clock
        self._between_pages = between_pages
        self._unrevised = unrevised
        self._done = done
        self.problems: list[Problem] = []
        """What the last sweep found wrong with the whole."""
        self.listed = 0

    async def run(self, words: frozenset[str]) -> Mapping[str, Any]:
        """words: "allow": much may be deleted; "gap": changes may have been missed."""
        started = await self._rows.now()
        loading = (await self._state.reading()).loaded_at is None
        tally, self.listed = Counter[str](), 0
        newcomers, unrevised, shown = 0, False, ListedIds()
        pages = self._source.slim()
        async with aclosing(cast("Any", pages)):
            while True:
                at = self._clock.stamp()  # before the page is asked for
                try:
                    page = await anext(pages)
                except StopAsyncIteration:
                    break
                unrevised |= any(one.revision is None for one in page)
                shown.add(one.external_id for one in page if is_storable_id(one.external_id))
                fetched, page_tally = await self._page(page, at, loading=loading, newcomers=newcomers)
                newcomers += fetched
                tally += page_tally
                self._between_pages()
        tally += await self._unlisted(started, shown, allowed="allow" in words)
        if "gap" in words and unrevised:
            self._unrevised()
        self._done()
        return {**tally, "listed": self.listed, "problems": [problem.message for problem in self.problems]}

    async def _page(
        self, page: Sequence[Listed], at: datetime, *, loading: bool, newcomers: int
    ) -> tuple[int, Counter[str]]:
        """Returns how many documents it fetched that were unknown, and what became of all."""
        entries = {one.external_id: one for one in page if is_storable_id(one.external_id)}
        self.listed += len(entries)
        awaited = self._publisher.awaited(entries, at)  # before the rows are read: an answer that came sooner is there
        known = await self._rows.find(entries)
        told = {
            id_: entries[id_]
            for id_, row in known.items()
            if row.is_unlisted
            or id_ in awaited
            or (row.acl_tags, row.required_tags) != access_of(entries[id_].acl_tags, entries[id_].required_tags)
        }
        tally = await self._publisher.relisted(told, at) if told else Counter[str]()
        can_extract = (await condition())["files"] not in ("refused", "unreachable")
        stale = [id_ for id_, entry in entries.items() if is_stale(known.get(id_), entry, can_extract=can_extract)]
        new = [id_ for id_ in stale if id_ not in known]
        if loading:  # the first load brings them
            new = []
        edited = [id_ for id_ in stale if id_ in known]
        for number, ids in enumerate((edited, new)):
            for start in range(0, len(ids), FETCH):
                lane = "backfill" if number and newcomers + start >= FEW else "live"
                fetched_at = self._clock.stamp()
                found = await self._source.fetch(ids[start : start + FETCH])
                tally += await self._publisher.publish(found, fetched_at, lane)  # type: ignore[arg-type]  # a Lane
        return len(new), tally

    async def _unlisted(self, started: datetime, shown: ListedIds, *, allowed: bool) -> Counter[str]:
        candidates, unpublished, known = await self._lacking(started, shown)
        if is_mass_deletion(len(candidates), known) and not allowed:
            self.problems = [
                Problem(
                    self._rows.holder.source,
                    "mass_delete",
                    f"a sweep lacks {len(candidates)} of {known} documents: none is deleted. If they are really gone:"
                    f" penstock connector run {self._rows.holder.source} --allow-mass-delete",
                )
            ]
            for start in range(0, len(candidates), PAGE):
                await self._rows.mark_unlisted(candidates[start : start + PAGE], started)
            await self._state.guard({"missing": len(candidates), "published": known, "at": started.isoformat()})
            return Counter()
        tally = Counter[str]()
        still_there = 0
        for start in range(0, len(candidates), FETCH):
            at = self._clock.stamp()
            entries: Sequence[Entry] = await self._source.fetch(candidates[start : start + FETCH])
            still_there += sum(not isinstance(entry, Gone) for entry in entries)
            tally += await self._publisher.publish(entries, at, "live")
            self._between_pages()
        for start in range(0, len(unpublished), PAGE):
            await self._rows.forget_unpublished(unpublished[start : start + PAGE], started)
        self.problems = []
        if still_there:
            self.problems = [
                Problem(
                    self._rows.holder.source,
                    "listing_incomplete",
                    f"a sweep lacked {still_there} documents that are still there: they stay. If the next sweep lacks"
                    " them too, the account may read but not list them",
                )
            ]
        await self._state.guard(None)
        return tally

    async def _lacking(self, started: datetime, shown: ListedIds) -> tuple[list[str], list[str], int]:
        """What neither the listing nor a read has shown since then: published documents, and rows of others. Besides,
        how many documents are published."""
        published, others, known = list[str](), list[str](), 0
        after: str | None = ""
        while after is not None:
            page = await self._rows.sweepable(started, after)
            known += sum(row.is_published for row in page)
            lacking = set(shown.lacks([row.external_id for row in page]))
            for row in page:
                if row.is_old and row.external_id in lacking:
                    (published if row.is_published else others).append(row.external_id)
            after = page[-1].external_id if len(page) == PAGE else None
            self._between_pages()
        return published, others, known
