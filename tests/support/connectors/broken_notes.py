"""The example connector, broken in one way each: what the laws are there to find."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Any

from connectors.source import Cursor, Document, Entry, Gone, Group, Listed, Page, Reaction, Request
from examples.notes import Notes


class SkipsAPage(Notes):
    """full-crawl: the second page is missing, here and in the listing."""

    async def pages(self, after: str | None) -> AsyncIterator[tuple[Any, Any]]:
        async for number, page in _numbered(super().pages(after)):
            if number != 1:
                yield page


class IsNeverSure(Notes):
    """no-change: a text that is another one every time it is read."""

    reads = 0

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        return [self.altered(entry) for entry in await super().fetch(external_ids)]

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        async for page in super().full(cursor):
            yield Page([self.altered(entry) for entry in page.entries], page.cursor)

    def altered(self, entry: Entry) -> Entry:
        type(self).reads += 1
        return replace(entry, content=f"{entry.content} {self.reads}") if isinstance(entry, Document) else entry


class SeesNoChanges(Notes):
    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        return
        yield


class NamesByTitle(Notes):
    """move: the document's name is what may change."""

    def named(self, entry: Entry) -> Entry:
        return replace(entry, external_id=entry.title) if isinstance(entry, Document) else entry

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        async for page in super().full(cursor):
            yield Page([self.named(entry) for entry in page.entries], page.cursor)

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        async for page in super().changes(cursor):
            yield Page([self.named(entry) for entry in page.entries], page.cursor)


class NeverDeletes(Notes):
    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        return [entry for entry in await super().fetch(external_ids) if not isinstance(entry, Gone)]


class ListsWithoutRestrictions(Notes):
    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        async for page in super().slim():
            yield [replace(entry, required_tags=[]) for entry in page]


class RemembersMembers(Notes):
    remembered: list[Group] | None = None

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        if self.remembered is None:
            self.remembered = [group async for group in super().groups(tags)]
        for group in self.remembered:
            yield group


class BelievesAnybody(Notes):
    async def on_event(self, request: Request) -> Reaction:
        return Reaction(changes=True)


class ReadsAhead(Notes):
    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        for page in [page async for page in super().full(cursor)]:
            yield page


class BelievesItsListing(Notes):
    """truncated-listing: asked by name, it looks into a listing again."""

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        listed = {entry.external_id async for page in super().slim() for entry in page}
        return [Gone(id_) if id_ not in listed else await self._read_entry(id_) for id_ in external_ids]


async def _numbered(pages: AsyncIterator[Any]) -> AsyncIterator[tuple[int, Any]]:
    number = 0
    async for page in pages:
        yield number, page
        number += 1


class CannotLoad(Notes):
    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        raise KeyError("a note without a title")
        yield


class CountsRevisions(Notes):
    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        number: Any = 17
        async for page in super().full(cursor):
            yield Page([replace(entry, revision=number) for entry in page.entries], page.cursor)  # type: ignore[call-arg]
