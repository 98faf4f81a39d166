"""What both flavours ask in the same words."""

from __future__ import annotations

from collections.abc import Sequence

from connectors.confluence import parsing
from connectors.confluence.api import Api, quoted, safe, shaped
from connectors.confluence.model import Person, Readers

USUAL = 50


async def all_readers(api: Api, id_: str, operation: str = "read") -> Readers:
    """Everybody whom a view restriction names, however many: users and groups are paged side by side."""
    people: list[Person] = []
    groups: list[str] = []
    start, size = 0, 100
    while True:
        answer = await api.get(
            f"rest/api/content/{safe(id_)}/restriction/byOperation/{operation}", start=start, limit=size,
            expand="restrictions.user,restrictions.group",
        )  # fmt: skip
        with shaped(api.web.name):
            some = parsing.readers_v1(answer["restrictions"])
        people += some.people
        groups += some.groups
        if max(len(some.people), len(some.groups)) < size:
            return Readers(people, groups)
        start += size


async def found_below(api: Api, id_: str, limit: int, *, attachments: bool) -> Sequence[str] | None:
    async def some(cql: str, left: int) -> list[str] | None:
        results, more = await api.page("rest/api/content/search", {"cql": cql, "limit": left + 1}, None)
        with shaped(api.web.name):
            return None if more or len(results) > left else [str(json["id"]) for json in results]

    pages = await some(f"ancestor = {quoted([id_])} and type = page", limit)
    if pages is None or not attachments:
        return pages
    attached = await some(f"type = attachment and container in ({quoted([id_, *pages])})", limit - len(pages))
    return None if attached is None else [*pages, *attached]


def listing_size(page_size: int, *, most: int) -> int:
    """How much to ask for at once: as much as the API gives, unless somebody has set pages smaller than usual."""
    return most if page_size >= USUAL else page_size
