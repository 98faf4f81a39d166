"""The two REST APIs, as requests: addresses, paging, and what answers must look like."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from connectors.source import CursorExpired
from connectors.web import Rejected, Web
from pipeline.core.errors import Retryable

Json = Mapping[str, Any]
MAX_PAGES = 100_000
"""A listing that never ends is a server's mistake."""


class Api:
    def __init__(self, web: Web) -> None:
        self.web = web

    async def get(self, path: str, **params: Any) -> Any:
        """path: behind the base address, such as ``rest/api/user/current``."""
        return await self.web.json("GET", path, params=params)

    async def post(self, path: str, body: Any) -> Any:
        return await self.web.json("POST", path, json=body)

    async def page(
        self, path: str, params: Mapping[str, Any], position: Mapping[str, Any] | None
    ) -> tuple[Sequence[Json], Mapping[str, Any] | None]:
        """One page of results, and the position of the next. Of a ``next`` link only the cursor or start is taken,
        never its address: behind api.atlassian.com it names another path, and what servers say is no address to ask.
        Raises CursorExpired."""
        try:
            answer = await self.get(path, **params, **(position or {}))
        except Rejected as error:
            if position and "cursor" in position and error.status == 400:
                raise CursorExpired(f"{self.web.name}: Confluence no longer knows where a listing stood") from error
            raise
        with shaped(self.web.name):
            results = answer["results"]
            if not isinstance(results, list):
                raise TypeError
            return results, self._next(answer.get("_links", {}).get("next"), position)

    def _next(self, link: str | None, position: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if not link:
            return None
        query = parse_qs(urlsplit(link).query)
        if "cursor" in query:
            found: Mapping[str, Any] = {"cursor": query["cursor"][0]}
        else:
            found = {"start": int(query["start"][0])}
        if found == position:
            raise ValueError
        return found

    async def every(self, path: str, **params: Any) -> AsyncIterator[Json]:
        """All results of a listing, page by page."""
        position: Mapping[str, Any] | None = None
        for _ in range(MAX_PAGES):
            results, position = await self.page(path, params, position)
            for one in results:
                yield one
            if position is None:
                return
        raise Retryable(f"{self.web.name}: a listing of Confluence does not end")


@contextmanager
def shaped(name: str) -> Iterator[None]:
    """An answer that is none of Confluence's (a proxy's, a future version's) is told as such, without its content."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Retryable(
            f"{name}: an answer does not look like one of Confluence's ({type(error).__name__}); if it stays so, is"
            " base_url the address of Confluence itself?"
        ) from None


def quoted(ids: Sequence[str]) -> str:
    """A CQL list. Ids are digits, keys letters and digits; what is neither does not get into a query."""
    return ", ".join(f'"{one}"' for one in ids if one.replace("~", "").replace("-", "").replace("_", "").isalnum())


def safe(segment: str) -> str:
    """As a part of a path: ids and names of groups come from answers and events."""
    return quote(segment, safe="") if segment.strip(".") else "-"


def batched(ids: Iterable[str], size: int) -> Iterator[list[str]]:
    left = iter(ids)
    while batch := list(islice(left, size)):
        yield batch
