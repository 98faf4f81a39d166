"""Reads the listings of many parts of a source, such as its spaces or projects, several at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from connectors.set_aside import each
from connectors.source import Listed, Unlisted
from pipeline.core.errors import PenstockError, Retryable
from pipeline.runtime.tasks import gather_or_cancel

Item = TypeVar("Item")
T = TypeVar("T")
Place = TypeVar("Place")
"""Where in which listing a page begins."""
CONCURRENT_LISTINGS = 8
"""As many as the client sends requests (``connectors.web.Limits.parallel``)."""


def each_entry(
    items: Iterable[Item],
    make: Callable[[Item], T],
    name: Callable[[Item], object] = lambda item: item["id"],  # type: ignore[index]
) -> list[T | Unlisted]:
    """Return an entry of a listing for each item of a response, and Unlisted for one whose data ``make`` cannot read:
    it is set aside, and the others are listed. name: of an item, which the status shows.

    The document of such an item is read by its id; until it can be read, nobody may read what was published of it."""
    made, failed = each(items, make, name)
    return [
        *made,
        *(Unlisted(part=f"document {name}", reason=str(error), is_document=True) for name, error in failed.items()),
    ]


Position = TypeVar("Position")


def moved_on(position: Position, before: object, source: str) -> Position:
    """Return the position of a source's next page. Raises Retryable where it is the one of the page before: such a
    listing would never end."""
    if position is not None and position == before:
        raise Retryable(f"{source} returned the same page twice, and would never end")
    return position


@dataclass(frozen=True, slots=True)
class ListedPage(Generic[Place]):
    """A page of a listing. next: where the following page begins; None: this is the last. failure: why it is the last,
    if the listing was set aside."""

    entries: Sequence[Listed | Unlisted]
    next: Place | None = None
    failure: PenstockError | None = None


async def read_listings(
    beginnings: Iterable[Place], read: Callable[[Place], Awaitable[ListedPage[Place]]]
) -> AsyncGenerator[Sequence[Listed | Unlisted], None]:
    """Yield the entries of all listings, of which CONCURRENT_LISTINGS are read at the same time, a page of each. Raises
    the failure of one when all have failed, and Retryable where one does not end.

    Nothing is read ahead: pages are requested when the caller asks for them, so that a time that it notes before is a
    time before all of their requests.
    """
    waiting, places = deque(beginnings), list[Place]()
    failure, any_listed = None, False
    while waiting or places:
        while waiting and len(places) < CONCURRENT_LISTINGS:
            places.append(waiting.popleft())
        pages = await gather_or_cancel(*(_called(read, place) for place in places))
        following = [moved_on(page.next, place, "a listing") for page, place in zip(pages, places, strict=True)]
        places = [place for place in following if place is not None]
        failure = next((page.failure for page in pages if page.failure is not None), failure)
        any_listed |= any(page.failure is None for page in pages)
        yield [entry for page in pages for entry in page.entries]
    if failure is not None and not any_listed:
        raise failure


async def _called(read: Callable[[Place], Awaitable[ListedPage[Place]]], place: Place) -> ListedPage[Place]:
    return await read(place)
