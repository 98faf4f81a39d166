"""Documents that are made to be large do not fill the memory of all connectors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest

import connectors.room as room
from connectors.base import SmallSource
from connectors.conform.memory_runner import MemoryRunner
from connectors.portions import in_portions, pages_of
from connectors.runner.isolate import BY_ID, Isolated
from connectors.set_aside import SetAside
from connectors.source import Cursor, Document, Entry, Listed, Page
from tests.support.connectors.runner_world import World

LIMIT = 100_000
LARGE = 20_000
DOCUMENTS = 40


@pytest.fixture(autouse=True)
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def condition() -> dict[str, str]:
        return {"files": "unreachable"}

    monkeypatch.setattr("connectors.runner.sweep.condition", condition)
    monkeypatch.setattr(room, "MAX_HELD_BYTES", LIMIT)


class Library(SmallSource):
    """Documents of which ``size`` says how large they are, read in one of the ways in which sources read."""

    def __init__(self, sizes: Sequence[int], how: str = "in turn") -> None:
        super().__init__(None, cast(Any, Context()))
        self.sizes = {f"d{number:03}": size for number, size in enumerate(sizes)}
        self.how = how
        self.requests: list[int] = []
        self.caught: Exception | None = None
        self.returned: list[int] = []
        """Characters of the texts of each request that was answered."""
        self.revision = "1"
        self.page_documents = 40

    async def list(self) -> AsyncIterator[Sequence[Listed]]:
        yield [Listed(external_id=id_, acl_tags=["staff"], revision=self.revision) for id_ in self.sizes]

    def _document(self, id_: str) -> Document:
        text = id_[-1] * (self.sizes[id_] - 10) + datetime.now(UTC).isoformat()[-10:]
        return Document(external_id=id_, title="", content=text, acl_tags=["staff"], revision=self.revision)

    def _documents(self, ids: Iterable[str]) -> Iterator[Document]:
        for id_ in ids:
            try:
                yield self._document(id_)
            except Exception as error:  # noqa: BLE001 - the source of somebody else
                self.caught = error

    async def read(self, external_id: str) -> Entry:
        if self.how == "threads":
            return await self.blocking(self._document, external_id)
        await asyncio.sleep(0)
        entry = self._document(external_id)
        return replace(entry, title="again") if self.how == "replaced" else entry

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        self.requests.append(len(external_ids))
        entries: Sequence[Entry]
        if self.how == "swallows":
            entries = [*self._documents(external_ids)]
        elif self.how == "says something else":
            try:
                entries = [self._document(id_) for id_ in external_ids]
            except room.TooMuchText as error:
                raise ValueError("something else") from error
        else:
            entries = await super().fetch(external_ids)
        self.returned.append(sum(len(entry.content) for entry in entries if isinstance(entry, Document)))
        return entries


class Context:
    name = "library"


async def ids_read(source: Library) -> list[str]:
    portions = in_portions(list(source.sizes), source.fetch)
    return [entry.external_id async for _, entries in portions for entry in entries]


@pytest.mark.parametrize("how", ["in turn", "threads", "replaced"])
async def test_a_fetch_of_large_documents_holds_a_few_of_them_at_a_time(how: str) -> None:
    """A fetch held fifty texts of 4 MiB: 800 MB, if each has one character of four bytes."""
    source = Library([LARGE] * DOCUMENTS, how)
    portions = [(ids, entries) async for ids, entries in in_portions(list(source.sizes), source.fetch)]
    assert [id_ for ids, _ in portions for id_ in ids] == list(source.sizes), "each once, in the order of the request"
    assert [entry.external_id for _, entries in portions for entry in entries] == list(source.sizes)
    assert max(source.returned) <= LIMIT
    assert len(source.requests) < 0.7 * DOCUMENTS, "requests of single documents"


async def test_characters_of_four_bytes_count_as_such() -> None:
    source = Library([LARGE // 4] * DOCUMENTS)
    source._document = lambda id_: Document(  # type: ignore[method-assign]
        external_id=id_, title="", content="\U0001f600" + "a" * (LARGE // 4 - 1), acl_tags=[]
    )
    async for _, entries in in_portions(list(source.sizes), source.fetch):
        assert len(entries) * LARGE <= LIMIT


async def test_ordinary_documents_are_read_with_one_request() -> None:
    source = Library([LIMIT // (2 * DOCUMENTS)] * DOCUMENTS)
    assert len([portion async for portion in in_portions(list(source.sizes), source.fetch)]) == 1
    assert source.requests == [DOCUMENTS]


@pytest.mark.parametrize("sizes", [[1_000] * 20 + [LARGE] * 20, [LARGE] * 20 + [1_000] * 20, [1_000, 3 * LIMIT] * 20])
async def test_small_documents_do_not_hide_large_ones(sizes: Sequence[int]) -> None:
    source = Library(sizes)
    assert await ids_read(source) == list(source.sizes)
    assert max(source.returned) <= max(LIMIT, *sizes), "a single one has no limit but its own"


async def test_a_source_that_catches_every_error_loses_no_document() -> None:
    source = Library([LARGE] * DOCUMENTS, "swallows")
    assert await ids_read(source) == list(source.sizes)
    assert isinstance(source.caught, room.TooMuchText)


async def test_a_source_that_makes_another_error_of_it_loses_no_time_with_requests_of_single_documents() -> None:
    """It was taken for an error of data: each document was requested by itself, again for every size of a portion."""
    source = Library([LARGE] * DOCUMENTS, "says something else")
    isolated = Isolated(cast(Any, source), "library")
    entries = [entry async for _, some in in_portions(list(source.sizes), isolated.fetch) for entry in some]
    assert [entry.external_id for entry in entries] == list(source.sizes)
    assert len(source.requests) < 0.7 * DOCUMENTS, "requests of single documents"
    assert isolated.failing is None


async def test_a_full_read_that_catches_every_error_loses_no_document() -> None:
    """It lacked the documents for which there was no room, until a sweep."""

    class Paged(Library):
        async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
            yield Page([*self._documents(self.sizes)], {"after": "d039"})

    source = Paged([LARGE] * DOCUMENTS)
    pages = [page async for page in Isolated(cast(Any, source), "library").full(None)]
    assert [entry.external_id for page in pages for entry in page.entries] == list(source.sizes)
    assert isinstance(source.caught, room.TooMuchText)


Activity = Callable[[MemoryRunner], Any]


async def events(runner: MemoryRunner) -> bool:
    await runner._crawl().fetch(frozenset(cast(Library, runner.source).sizes))
    return True


@pytest.mark.parametrize("activity", [MemoryRunner.sweep, events, MemoryRunner.full])
async def test_the_runner_reads_large_documents_in_portions(activity: Activity) -> None:
    source = Library([LARGE] * DOCUMENTS)
    runner = MemoryRunner(cast(Any, source), SetAside())
    runner.progress = replace(runner.progress, loaded_at=datetime.now(UTC))
    assert await activity(runner)
    assert runner.published.keys() == source.sizes.keys()
    assert max(source.returned) <= LIMIT
    assert runner.problems == []
    assert runner.deleted == []


async def test_a_full_read_whose_page_is_too_large_continues_by_ids() -> None:
    """The size of a page is up to its source."""
    world = World()

    class Paged(Library):
        async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
            yield Page([self._document("d000")], {"after": "d000"})
            yield Page([self._document(id_) for id_ in self.sizes], {"after": "d039"})

    source = Paged([LARGE] * DOCUMENTS)
    runner = MemoryRunner(cast(Any, source), SetAside())
    assert await runner.full()
    assert runner.published.keys() == source.sizes.keys()
    assert runner.progress.full_state == "done"
    assert max(source.returned) <= LIMIT
    assert world.errors == {}


async def test_only_the_last_page_of_portions_has_the_cursor() -> None:
    source = Library([LARGE] * DOCUMENTS)
    began, own = datetime(2026, 1, 1, tzinfo=UTC), {BY_ID: "d039"}
    pages = [page async for page in pages_of(list(source.sizes), source.fetch, own, began=began)]
    assert len(pages) > 1
    assert [page.cursor for page in pages] == [None] * (len(pages) - 1) + [own]
    assert {entry.read_at for entry in pages[0].entries} == {None}, "it is as old as the request for the page"
    assert {entry.read_at for page in pages[1:] for entry in page.entries} == {began}
    assert [page async for page in pages_of([], source.fetch, own)] == [Page((), own)]
