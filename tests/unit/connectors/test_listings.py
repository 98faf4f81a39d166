"""Listings of many parts of a source at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from connectors.github.queries import following
from connectors.google_drive.client import Api
from connectors.listings import CONCURRENT_LISTINGS, ListedPage, read_listings
from connectors.sharepoint.client import Graph
from connectors.source import Listed, Unlisted
from connectors.web import ServerFailed
from pipeline.core.errors import Retryable

Place = tuple[int, int]
"""A listing, and the page of it."""
PAGES = 3


class Listings:
    """Twenty listings of three pages each, some of which fail at their second page."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.requested: list[Place] = []
        self.concurrent = self.most = 0

    async def read(self, place: Place) -> ListedPage[Place]:
        number, page = place
        self.requested.append(place)
        self.concurrent += 1
        self.most = max(self.most, self.concurrent)
        await asyncio.sleep(0)
        self.concurrent -= 1
        if number in self.failing and page == 1:
            return ListedPage([Unlisted(part=f"part {number}", reason="500")], failure=ServerFailed("500"))
        following = (number, page + 1) if page + 1 < PAGES else None
        return ListedPage([Listed(external_id=f"{number}.{page}", acl_tags=())], following)


async def test_all_listings_are_read_to_their_ends_and_eight_at_the_same_time() -> None:
    listings = Listings()
    pages = [page async for page in read_listings([(number, 0) for number in range(20)], listings.read)]
    ids = [entry.external_id for page in pages for entry in page if isinstance(entry, Listed)]
    assert sorted(ids) == sorted(f"{number}.{page}" for number in range(20) for page in range(PAGES))
    assert listings.most == CONCURRENT_LISTINGS


async def test_no_page_is_requested_before_the_caller_asks_for_it() -> None:
    """A page that is read ahead is older than its stamp: an edit in between would be lost."""
    listings = Listings()
    pages = read_listings([(number, 0) for number in range(20)], listings.read)
    await anext(pages)
    assert len(listings.requested) == CONCURRENT_LISTINGS
    await asyncio.sleep(0.01)
    assert len(listings.requested) == CONCURRENT_LISTINGS
    await pages.aclose()


async def test_a_listing_that_fails_ends_and_the_others_go_on() -> None:
    listings = Listings(3)
    pages = [page async for page in read_listings([(number, 0) for number in range(20)], listings.read)]
    entries = [entry for page in pages for entry in page]
    assert [entry.part for entry in entries if isinstance(entry, Unlisted)] == ["part 3"]
    assert len(entries) == 19 * PAGES + 2
    assert (3, 2) not in listings.requested


async def test_when_every_listing_fails_at_once_so_does_the_whole() -> None:
    async def read(place: int) -> ListedPage[int]:
        return ListedPage([Unlisted(part=f"part {place}", reason="500")], failure=ServerFailed("500"))

    with pytest.raises(ServerFailed):
        [page async for page in read_listings(range(10), read)]


async def test_a_listing_whose_page_comes_again_and_again_ends_with_an_error() -> None:
    """A sweep that never ends finds no deletion and no revocation."""

    async def read(place: int) -> ListedPage[int]:
        return ListedPage([Listed(external_id="a", acl_tags=())], place)

    with pytest.raises(Retryable, match="the same page twice"):
        async with asyncio.timeout(5):
            [page async for page in read_listings([1, 2], read)]


async def test_clients_read_no_page_again_and_again() -> None:
    """Lists that are read whole filled the memory of the connectors."""
    graph, drive = Graph.__new__(Graph), Api.__new__(Api)
    page: dict[str, Any] = {"value": [{}], "@odata.nextLink": "next", "permissions": [{}], "nextPageToken": "next"}

    async def get(*_: object) -> dict[str, Any]:
        await asyncio.sleep(0)
        return page

    graph._get = drive._get = get  # type: ignore[method-assign]
    connection = {"pageInfo": {"hasNextPage": True, "endCursor": "next"}}
    async with asyncio.timeout(5):
        with pytest.raises(Retryable, match="the same page twice"):
            [entry async for entry in graph.drives("site")]
        with pytest.raises(Retryable, match="the same page twice"):
            await graph._all(page)
        with pytest.raises(Retryable, match="the same page twice"):
            await drive.permissions("file")
        with pytest.raises(Retryable, match="the same page twice"):
            following(connection, following(connection))
