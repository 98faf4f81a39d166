"""Isolates errors of data: what the source says about one document never stops the reading of the others.

A source's own code may catch such an error where it makes something of one item (``set_aside.reading_data``); this is
for all others, of any source. It knows nothing but the ids of documents, and so reads by id what it could not read
otherwise (docs/adr/0110-data-of-one-document.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

from connectors.errors import BadData
from connectors.portions import pages_of
from connectors.protocol import Problem
from connectors.room import TooMuchText, bounded, insisting
from connectors.runner.guard import LIKELY_REASON, is_failing
from connectors.runner.plan import MAX_FETCH_DOCUMENTS
from connectors.set_aside import UNEXPECTED, read_isolated, reading_data
from connectors.source import (
    Cursor,
    CursorExpired,
    Document,
    Entry,
    Group,
    Listed,
    Page,
    Source,
    Unlisted,
    Unreadable,
)
from pipeline.core.errors import PenstockError

T = TypeVar("T")
BY_ID = "penstock_by_id"
"""The key of a cursor of a full read that continues by the ids of the listing: the last id that was read."""
RECENT_DOCUMENTS = 50
"""The documents that were read last, of which ``failing`` is judged."""
PAGE_DOCUMENTS = 20
MAX_ASIDE = 10_000


class Isolated:
    """The part of a source that reads documents and groups. Law: an error of data that the source raises leads to an
    entry (``fetch``), to another way of reading (``full``, ``changes``, ``groups``) or to BadData (``slim``). All other
    errors pass."""

    def __init__(self, source: Source, name: str) -> None:
        """name: of the instance."""
        self.source = source
        self._name = name
        self._recent: OrderedDict[str, bool] = OrderedDict()
        """The documents that were read last, and whether they are set aside because of their data."""
        self._aside: OrderedDict[str, None] = OrderedDict()
        """Documents that are set aside so. Each sweep tries them again, which says nothing about the others."""
        self._lost: str | None = None
        """Why the last reading of changes could not be finished."""

    @property
    def failing(self) -> str | None:
        """Why the source counts as failing: nearly all of the documents that were read last are set aside."""
        aside = sum(self._recent.values())
        if not is_failing(aside, len(self._recent)):
            return None
        return (
            f"{aside} of the {len(self._recent)} documents that were read last are set aside because of their data:"
            f" {LIKELY_REASON}"
        )

    @property
    def problems(self) -> list[Problem]:
        if self._lost is None:
            return []
        message = f"changes cannot be read one by one, so everything is compared instead: {self._lost}"
        return [Problem(self._name, "changes_unreadable", message)]

    async def start(self) -> Cursor | None:
        return await self.source.start()

    async def full(self, cursor: Cursor | None) -> AsyncGenerator[Page, None]:
        """Read everything; by the ids of the listing, once the source's own full read has met data that it cannot
        read, or a page that takes too much memory: nobody knows where it would continue after them."""
        read = set[str]()
        if cursor is None or BY_ID not in cursor:
            try:
                async with aclosing(guarded(self.source.full(cursor), is_bounded=True)) as pages:
                    async for page in pages:
                        self._note(page.entries)
                        read.update(entry.external_id for entry in page.entries)
                        yield page
            except (BadData, TooMuchText):
                cursor = {BY_ID: ""}
            else:
                return
        ids = set[str]()
        async with aclosing(self.slim()) as listing:
            async for entries in listing:
                ids.update(entry.external_id for entry in entries if isinstance(entry, Listed))
        order = sorted(ids - read)
        for start in range(bisect_right(order, cursor[BY_ID]), len(order), PAGE_DOCUMENTS):
            batch = order[start : start + PAGE_DOCUMENTS]
            async with aclosing(pages_of(batch, self.fetch, {BY_ID: batch[-1]})) as pages:
                async for page in pages:
                    yield page

    async def changes(self, cursor: Cursor) -> AsyncGenerator[Page, None]:
        """Read changes. Raises CursorExpired where the source's own reading has met data that it cannot read: changes
        are then read from now on, and a sweep finds those before."""
        try:
            async with aclosing(guarded(self.source.changes(cursor))) as pages:
                async for page in pages:
                    self._note(page.entries)
                    yield page
        except BadData as error:
            self._lost = str(error)
            raise CursorExpired(str(error)) from error
        self._lost = None

    def slim(self) -> AsyncGenerator[Sequence[Listed | Unlisted], None]:
        return guarded(self.source.slim())

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        """Read documents. One whose data cannot be read is Unreadable, and nobody may read it: who may is among these
        data, and what was published may be more than that."""

        async def read(ids: Sequence[str]) -> Sequence[Entry]:
            with reading_data(), insisting():
                return await self.source.fetch(ids)

        entries, failed = await read_isolated(external_ids, read, is_of_data)
        entries += [
            Unreadable(
                external_id=id_, code=UNEXPECTED, message=f"{error}: it is tried again with every sweep", acl_tags=()
            )
            for id_, error in failed.items()
        ]
        self._note(entries)
        return entries

    def _note(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if not isinstance(entry, Document | Unreadable):
                continue
            is_aside = isinstance(entry, Unreadable) and entry.code == UNEXPECTED
            if is_aside and entry.external_id in self._aside:
                continue
            self._aside.pop(entry.external_id, None)
            if is_aside:
                _add(self._aside, entry.external_id, None, MAX_ASIDE)
            _add(self._recent, entry.external_id, is_aside, RECENT_DOCUMENTS)


def _add(items: OrderedDict[str, T], name: str, value: T, most: int) -> None:
    """Set a value as the newest, without the oldest where there are too many."""
    items[name] = value
    items.move_to_end(name)
    if len(items) > most:
        items.popitem(last=False)


def is_of_data(error: PenstockError) -> bool:
    return isinstance(error, BadData)


async def groups_one_by_one(source: Source, tags: Collection[str]) -> tuple[list[Group], dict[str, PenstockError]]:
    """Return the groups with these tags and all groups within them, and the errors of those whose data cannot be
    read."""

    async def read(some: Sequence[str]) -> list[Group]:
        results: list[Group] = []
        try:
            async with aclosing(guarded(source.groups(some))) as groups:
                async for group in groups:
                    results.append(group)  # those before an error count
        except BadData:
            if not {group.tag for group in results}.issuperset(some):  # else it is of a group within these
                raise
        return results

    groups: list[Group] = []
    failed: dict[str, PenstockError] = {}
    waiting, seen = set(tags), set[str]()
    while waiting:
        seen |= waiting
        order = sorted(waiting)
        waiting = set()
        for start in range(0, len(order), MAX_FETCH_DOCUMENTS):
            some, errors = await read_isolated(order[start : start + MAX_FETCH_DOCUMENTS], read, is_of_data)
            groups += some
            failed |= errors
            waiting.update(tag for group in some for tag in group.of if isinstance(tag, str))
        waiting -= seen
    return groups, failed


async def guarded(items: AsyncIterator[T], *, is_bounded: bool = False) -> AsyncGenerator[T, None]:
    """Yield what a source's generator yields. Raises BadData for its errors of data, and for none of the caller.

    is_bounded: whether it raises TooMuchText for an item that takes too much memory."""
    async with aclosing(cast("Any", items)):
        while True:
            with reading_data(), bounded(is_divisible=is_bounded):
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            yield item
