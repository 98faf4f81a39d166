"""Asking a library's search as staff."""

from __future__ import annotations

from query.access.filters import NONE, Filters
from query.model import Mode, SearchResults
from query.retrieval.search import Search
from tests.support.query.library import Library


async def find(
    library: Library,
    tenant: str,
    query: str,
    filters: Filters = NONE,
    *,
    mode: Mode = "hybrid",
    top: int = 10,
    search: Search | None = None,
) -> SearchResults:
    caller = await library.caller(tenant, "staff")
    return await (search or library.search).search(query, caller, mode=mode, top=top, filters=filters)


def names(response: SearchResults) -> list[str]:
    return [result.passage.external_id for result in response.results]
