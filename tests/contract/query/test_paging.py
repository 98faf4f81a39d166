"""Pages and order by time, on the real servers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from query.model import MODES, BadQuery, Mode, SearchResults, Sort
from tests.support.query.library import Library, access, document
from tests.support.query.retrieval_kit import names

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

DAY = datetime(2026, 3, 1, 12, tzinfo=UTC)


async def page(
    library: Library,
    tenant: str,
    cursor: str | None = None,
    *,
    top: int = 10,
    mode: Mode = "hybrid",
    sort: Sort = "relevance",
    query: str = "estuary report",
) -> SearchResults:
    caller = await library.caller(tenant, "staff")
    return await library.search.search(query, caller, top=top, mode=mode, sort=sort, cursor=cursor)


async def pages(
    library: Library, tenant: str, *, top: int = 10, mode: Mode = "hybrid", sort: Sort = "relevance"
) -> list[list[str]]:
    """The names on all pages of a search."""
    cursor, every = None, []
    while True:
        results = await page(library, tenant, cursor, top=top, mode=mode, sort=sort)
        every.append(names(results))
        if (cursor := results.cursor) is None:
            return every
        assert len(results.results) == top, "only the last page is short"


async def test_pages_return_every_passage_once_and_more_than_a_hundred(library: Library, tenant: str) -> None:
    expected = [f"{n}.md" for n in range(230)]
    await library.put(*(document(name, f"Report {name} on the estuary.", tenant=tenant) for name in expected))
    for mode in MODES:
        returned = [name for part in await pages(library, tenant, top=50, mode=mode) for name in part]
        assert len(returned) == len(expected)
        assert set(returned) == set(expected), mode


async def test_very_long_passages_are_divided_among_more_pages(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred passages that were made to be long took 250 MB as a response."""
    monkeypatch.setattr("query.retrieval.search.MAX_PAGE_CHARACTERS", 70)
    expected = [f"{n}.md" for n in range(7)]
    await library.put(*(document(name, f"Report {name} on the estuary.", tenant=tenant) for name in expected))
    cursor, returned, sizes = None, list[str](), list[int]()
    while True:
        results = await page(library, tenant, cursor)
        returned += names(results)
        sizes.append(len(results.results))
        if (cursor := results.cursor) is None:
            break
    assert sorted(returned) == expected
    assert max(sizes) <= 2
    monkeypatch.setattr("query.retrieval.search.MAX_PAGE_CHARACTERS", 1)
    assert len((await page(library, tenant, top=9)).results) == 1, "one, however long it is"


async def test_the_first_page_is_that_of_a_search_without_pages(library: Library, tenant: str) -> None:
    await library.put(*(document(f"{n}.md", f"Report {n} on the estuary.", tenant=tenant) for n in range(7)))
    whole = await page(library, tenant, top=7)
    assert whole.cursor is None
    parts = await pages(library, tenant, top=3)
    assert parts[0] == names(whole)[:3]
    assert [len(part) for part in parts] == [3, 3, 1]


async def test_later_pages_follow_changes_of_access_and_of_documents(library: Library, tenant: str) -> None:
    documents = [document(f"{n}.md", f"Report {n} on the estuary.", tenant=tenant) for n in range(9)]
    await library.put(*documents)
    first = await page(library, tenant, top=3)
    rest = [d for d in documents if d.external_id not in names(first)]
    await library.accept(access(rest[0], ["board"]))
    await library.put(document("new.md", "Report 9 on the estuary.", tenant=tenant))
    second = await page(library, tenant, first.cursor, top=20)
    assert sorted(names(second)) == sorted([*(d.external_id for d in rest[1:]), "new.md"])


async def test_a_cursor_of_another_search_is_refused(library: Library, tenant: str) -> None:
    await library.put(*(document(f"{n}.md", f"Report {n} on the estuary.", tenant=tenant) for n in range(3)))
    cursor = (await page(library, tenant, top=1)).cursor
    assert cursor is not None
    with pytest.raises(BadQuery, match="another search"):
        await page(library, tenant, cursor, top=1, query="estuary")


async def test_a_search_by_time_is_exact_and_pages_on(library: Library, tenant: str) -> None:
    """The ledger orders times within one hour; a document without a time comes last."""
    moments = [DAY + timedelta(minutes=17 * n) for n in range(20)]
    order = sorted(range(20), key=lambda n: n * 7 % 20)
    await library.put(
        *(
            document(f"{n}.md", f"Report {n} on the estuary.", tenant=tenant, source_modified_at=moments[n])
            for n in order
        ),
        document("none.md", "Report on the estuary.", tenant=tenant),
        document("other.md", "The report of a harbour and a lighthouse.", tenant=tenant, source_modified_at=moments[0]),
    )
    newest = [f"{n}.md" for n in reversed(range(20))]
    for mode in ("hybrid", "keyword"):
        by_time = [name for part in await pages(library, tenant, top=6, mode=mode, sort="newest") for name in part]
        assert by_time == [*newest, "none.md"]
    by_time = [name for part in await pages(library, tenant, top=6, sort="oldest") for name in part]
    assert by_time == [*reversed(newest), "none.md"]


async def test_a_search_by_time_shows_nothing_that_was_revoked(library: Library, tenant: str) -> None:
    documents = [
        document(f"{n}.md", "Report on the estuary.", tenant=tenant, source_modified_at=DAY + timedelta(days=n))
        for n in range(80)
    ]
    await library.put(*documents)
    await library.accept(*(access(d, ["board"]) for d in documents[5:]))
    results = await page(library, tenant, top=10, sort="newest")
    also = [passage.external_id for result in results.results for passage in result.also]
    assert set(names(results)) | set(also) == {f"{n}.md" for n in range(5)}
    assert results.cursor is None


async def test_vectors_alone_have_no_order_by_time(library: Library, tenant: str) -> None:
    with pytest.raises(BadQuery, match="keyword"):
        await page(library, tenant, mode="vector", sort="newest")
