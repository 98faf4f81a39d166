"""The sweep: compares a complete listing with what was published. It alone deletes documents that are not listed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeGuard, cast

from connectors.clock import Clock
from connectors.extraction.remote import condition
from connectors.portions import in_portions
from connectors.protocol import Problem
from connectors.runner.compare import access_of, is_stale, is_storable_id
from connectors.runner.freshness import Listing
from connectors.runner.guard import LIKELY_REASON, is_failing, is_mass_deletion
from connectors.runner.listing import ListedIds, Prefixes, UnlistedParts
from connectors.runner.plan import MAX_FETCH_DOCUMENTS
from connectors.runner.publish import Publisher
from connectors.runner.rows import PAGE, Rows
from connectors.runner.state import State
from connectors.set_aside import UNEXPECTED, SetAside
from connectors.source import Entry, Gone, Listed, Source, Unlisted, Unreadable
from pipeline.core.errors import Misconfigured

MAX_LIVE_NEW_DOCUMENTS = 500
"""New documents of one sweep that are published live; the rest of them goes to the backfill lane, as a first load."""


class Sweep:
    """Law: a sweep deletes only documents that a complete listing lacks and that the source, when fetched by name,
    reports as gone, and never many at once unless an operator allows it. Documents that were read since the listing
    began, and those of a part that could not be listed, are left alone; those of a closed part lose their readers.

    Nothing is written for an unchanged document: the listed ids are held in memory until the sweep ends, and an
    interrupted sweep starts again.
    """

    def __init__(
        self,
        source: Source,
        state: State,
        publisher: Publisher,
        clock: Clock,
        *,
        set_aside: SetAside,
        between_pages: Callable[[], None],
        on_no_revisions: Callable[[], None],
        on_done: Callable[[], None],
        on_complete: Callable[[Listing], None] = lambda _listing: None,
    ) -> None:
        """set_aside: receives the parts that could not be listed. between_pages: raises Paused while the instance is
        paused. on_no_revisions: called when changes may have been missed and the listing has no revisions, so that only
        a full read finds them. on_done: called after a complete sweep. on_complete: called after one that left nothing
        out and has published everything that it showed."""
        self._source = source
        self._state = state
        self._publisher = publisher
        self._rows: Rows = publisher.rows
        self._clock = clock
        self._set_aside = set_aside
        self._between_pages = between_pages
        self._on_no_revisions = on_no_revisions
        self._on_done = on_done
        self._on_complete = on_complete
        self._running = asyncio.Lock()
        self.problems: list[Problem] = []
        """Problems of the source as a whole that the last sweep found."""
        self._began = datetime.min.replace(tzinfo=UTC)
        """When the source began to read the oldest of what the present sweep shows."""

    async def run(self, arguments: frozenset[str]) -> Mapping[str, Any]:
        """Sweep the source, after a sweep that is running. Returns the entries by outcome, the numbers of listed
        documents and of parts that were set aside, and the problems.

        arguments: "allow" permits a mass deletion; "gap" says that changes may have been missed; "poll", that the
        source has no log of changes.
        """
        async with self._running:
            return await self._run(arguments)

    async def _run(self, arguments: frozenset[str]) -> Mapping[str, Any]:
        started = await self._rows.now()
        self._began, is_storable = min(started, datetime.now(UTC)), True
        loading = (await self._state.read_progress()).loaded_at is None
        tally, listed = Counter[str](), 0
        new_documents, lacks_revisions, listed_ids = 0, False, ListedIds()
        unlisted: list[Unlisted] = []
        pages = self._source.slim()
        async with aclosing(cast("Any", pages)):
            while True:
                at = self._clock.stamp()  # before the page is requested
                try:
                    page = await anext(pages)
                except StopAsyncIteration:
                    break
                unlisted += [entry for entry in page if isinstance(entry, Unlisted)]
                documents = [entry for entry in page if isinstance(entry, Listed)]
                self._note_reading(documents)
                is_storable = is_storable and all(is_storable_id(entry.external_id) for entry in documents)
                lacks_revisions |= any(entry.revision is None for entry in documents)
                entries = {entry.external_id: entry for entry in documents if is_storable_id(entry.external_id)}
                listed += len(entries)
                listed_ids.add(entries)
                fetched, page_tally = await self._compare_page(
                    entries, at, loading=loading, new_documents=new_documents
                )
                new_documents += fetched
                tally += page_tally
                self._between_pages()
        self._set_aside.replace("listing", {part.part: part.reason for part in unlisted})
        if closed := [part.id_prefix for part in unlisted if part.is_closed and part.id_prefix is not None]:
            tally += await self._close(started, Prefixes(closed), at)
        _require_working(unlisted, listed)  # after what nobody may read any more is closed
        tally += await self._delete_unlisted(started, listed_ids, unlisted, allowed="allow" in arguments)
        left_out = unlisted or self.problems or tally["late"] or tally["invalid"]
        if is_storable and not (left_out or loading):
            self._on_complete(Listing(self._began, has_revisions=not lacks_revisions))
        if "gap" in arguments and lacks_revisions:
            self._on_no_revisions()
        if "poll" in arguments and lacks_revisions:
            self.problems.append(
                Problem(
                    self._rows.holder.source,
                    "no_revision",
                    "the source has no log of changes, and lists documents without a revision: edits of them are not"
                    " noticed",
                )
            )
        self._on_done()
        set_aside = sum(not part.is_document for part in unlisted)
        problems = [problem.message for problem in self.problems]
        return {**tally, "listed": listed, "set_aside": set_aside, "problems": problems}

    def _note_reading(self, entries: Iterable[Entry | Listed]) -> None:
        self._began = min([self._began, *(entry.read_at for entry in entries if entry.read_at is not None)])

    async def _compare_page(
        self, entries: Mapping[str, Listed], at: datetime, *, loading: bool, new_documents: int
    ) -> tuple[int, Counter[str]]:
        """Publish what a page of the listing shows. Returns how many new documents were fetched, and all documents by
        outcome.

        entries: by external id. new_documents: those that the sweep has fetched before this page.
        """
        # Before the rows are read: a response that was published by then is in the rows.
        requested = self._publisher.requested_before(entries, at)
        known = await self._rows.find(entries)
        can_extract = (await condition())["files"] not in ("refused", "unreachable")
        stale = [id_ for id_, entry in entries.items() if is_stale(known.get(id_), entry, can_extract=can_extract)]
        # The last fetch has admitted nobody: the listing would admit its readers until the next one, which follows.
        undecided = {id_ for id_ in stale if (row := known.get(id_)) and row.problem_code and not row.acl_tags}
        changed_access = {
            id_: entries[id_]
            for id_, row in known.items()
            if row.is_unlisted
            or id_ in requested
            or (
                id_ not in undecided
                and (row.acl_tags, row.required_tags) != access_of(entries[id_].acl_tags, entries[id_].required_tags)
            )
        }
        tally = await self._publisher.publish_access(changed_access, at) if changed_access else Counter[str]()
        new = [id_ for id_ in stale if id_ not in known]
        if loading:  # the first load publishes them
            new = []
        edited = [id_ for id_ in stale if id_ in known]
        for number, ids in enumerate((edited, new)):
            for start in range(0, len(ids), MAX_FETCH_DOCUMENTS):
                lane = "backfill" if number and new_documents + start >= MAX_LIVE_NEW_DOCUMENTS else "live"
                async for fetched_at, fetched in self._fetched(ids[start : start + MAX_FETCH_DOCUMENTS]):
                    closed = [
                        _with_access_of(entries[entry.external_id], entry)
                        for entry in fetched
                        if _lacks_access(entry) and entry.external_id in entries
                    ]
                    others = [entry for entry in fetched if not _lacks_access(entry)]
                    tally += await self._publisher.publish(others, fetched_at, lane)  # type: ignore[arg-type]  # a Lane
                    if closed:  # as old as the listing: what was read of their access since then counts
                        tally += await self._publisher.publish(closed, at, "live")
        return len(new), tally

    async def _fetched(self, ids: Sequence[str]) -> AsyncGenerator[tuple[datetime, Sequence[Entry]], None]:
        """Yield the documents with these ids, with a stamp from before their request."""
        at = self._began

        async def fetch(some: Sequence[str]) -> Sequence[Entry]:
            nonlocal at
            at = self._clock.stamp()
            return await self._source.fetch(some)

        async with aclosing(in_portions(ids, fetch)) as portions:
            async for _, entries in portions:
                self._note_reading(entries)
                yield at, entries

    async def _delete_unlisted(
        self, started: datetime, listed_ids: ListedIds, unlisted: Sequence[Unlisted], *, allowed: bool
    ) -> Counter[str]:
        candidates, unpublished, known = await self._find_unlisted(started, listed_ids, unlisted)
        is_guarded = is_mass_deletion(len(candidates), known) and not allowed
        aside = sum(part.is_document for part in unlisted)  # they are among the candidates if they are published
        if is_guarded and is_mass_deletion(len(candidates) - aside, known):
            await self._keep(candidates, known, started)
            return Counter()
        tally = Counter[str]()
        existing, gone = 0, list[tuple[datetime, Sequence[Gone]]]()
        for start in range(0, len(candidates), MAX_FETCH_DOCUMENTS):
            async for at, entries in self._fetched(candidates[start : start + MAX_FETCH_DOCUMENTS]):
                existing += sum(not isinstance(entry, Gone) for entry in entries)
                if is_guarded:
                    gone.append((at, [entry for entry in entries if isinstance(entry, Gone)]))
                    entries = [entry for entry in entries if not isinstance(entry, Gone)]
                tally += await self._publisher.publish(entries, at, "live")
            self._between_pages()
        missing = [entry.external_id for _, page in gone for entry in page]
        if is_mass_deletion(len(missing), known):
            await self._keep(missing, known, started)
            return tally
        for at, page in gone:
            tally += await self._publisher.publish(page, at, "live")
        for start in range(0, len(unpublished), PAGE):
            await self._rows.forget_unpublished(unpublished[start : start + PAGE], started)
        self.problems = []
        if existing:
            self.problems = [
                Problem(
                    self._rows.holder.source,
                    "listing_incomplete",
                    f"a sweep lacked {existing} documents that are still there: they stay. If the next sweep lacks"
                    " them too, the account may read but not list them",
                )
            ]
        await self._state.set_guard(None)
        return tally

    async def _keep(self, missing: Sequence[str], known: int, started: datetime) -> None:
        """Delete none of so many documents before an operator has confirmed it. known: the number of all documents."""
        source = self._rows.holder.source
        self.problems = [
            Problem(
                source,
                "mass_delete",
                f"a sweep lacks {len(missing)} of {known} documents: none is deleted. If they are really gone:"
                f" penstock connector run {source} --allow-mass-delete",
            )
        ]
        for start in range(0, len(missing), PAGE):
            await self._rows.mark_unlisted(missing[start : start + PAGE], started)
        await self._state.set_guard({"missing": len(missing), "published": known, "at": started.isoformat()})

    async def _close(self, started: datetime, prefixes: Prefixes, at: datetime) -> Counter[str]:
        """Publish that nobody may read the documents whose ids begin with any of these prefixes."""
        tally, after = Counter[str](), ""
        while True:
            page = await self._rows.sweep_page(started, after)
            ids = [row.external_id for row in page if row.acl_tags and row.external_id in prefixes]
            if ids:
                tally += await self._publisher.publish_access(_without_readers(ids), at)
            if len(page) < PAGE:
                return tally
            after = page[-1].external_id

    async def _find_unlisted(
        self, started: datetime, listed_ids: ListedIds, parts: Sequence[Unlisted]
    ) -> tuple[list[str], list[str], int]:
        """Return what neither the listing nor a read has shown since ``started``, outside of the parts that could not
        be listed: the ids of published documents, and the ids of other rows. The third value is the number of published
        documents."""
        published, others, known, set_aside = list[str](), list[str](), 0, UnlistedParts(parts)
        after: str | None = ""
        while after is not None:
            page = await self._rows.sweep_page(started, after)
            known += sum(row.is_published for row in page)
            unlisted = set(listed_ids.lacks([row.external_id for row in page]))
            for row in page:
                if row.is_unchanged and row.external_id in unlisted and not set_aside.may_hold(row):
                    (published if row.is_published else others).append(row.external_id)
            after = page[-1].external_id if len(page) == PAGE else None
            self._between_pages()
        return published, others, known


def _require_working(unlisted: Sequence[Unlisted], listed: int) -> None:
    """Raise Misconfigured, before anything is deleted, if nearly all documents of a listing are set aside."""
    aside = [part for part in unlisted if part.is_document]
    if is_failing(len(aside), len(aside) + listed):
        raise Misconfigured(
            f"{len(aside)} of {len(aside) + listed} documents of the listing are set aside, so nothing is deleted:"
            f" {LIKELY_REASON} ({aside[0].reason})"
        )


def _lacks_access(entry: Entry) -> TypeGuard[Unreadable]:
    """Whether nobody may read a document, because its data could not be read."""
    return isinstance(entry, Unreadable) and entry.code == UNEXPECTED and not entry.acl_tags


def _with_access_of(listed: Listed, entry: Unreadable) -> Unreadable:
    """Return the entry with the access that the listing has just shown."""
    return replace(entry, acl_tags=listed.acl_tags, required_tags=listed.required_tags, read_at=listed.read_at)


def _without_readers(ids: Sequence[str]) -> dict[str, Listed]:
    return {id_: Listed(external_id=id_, acl_tags=()) for id_ in ids}
