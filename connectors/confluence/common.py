"""What both flavours ask in the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from connectors.confluence import parsing
from connectors.confluence.api import Api, quoted, safe, shaped
from connectors.confluence.model import Person, Readers, Space
from connectors.confluence.options import ConfluenceOptions
from pipeline.core.errors import Misconfigured

USUAL = 50


async def myself(api: Api) -> Person:
    with shaped(api.web.name):
        return parsing.person(await api.get("rest/api/user/current"))


async def wanted_spaces(
    api: Api, options: ConfluenceOptions, path: str, *, limit: int, named: Mapping[str, Any]
) -> dict[str, Space]:
    """Key → space, by key: those that the settings name, else those that the account sees. named: how the flavour
    asks for ``options.spaces``. Raises Misconfigured when one of them cannot be seen."""
    asked: dict[str, Any] = {"limit": limit, "status": "current"}
    if options.spaces:
        asked |= named
    elif not options.personal_spaces:
        asked["type"] = "global"
    found: dict[str, Space] = {}
    async for json in api.every(path, **asked):
        with shaped(api.web.name):
            space = Space(str(json["id"]), str(json["key"]), str(json["name"]))
        if space.key not in options.exclude_spaces:
            found[space.key] = space
    if missing := sorted(set(options.spaces) - set(found) - set(options.exclude_spaces)):
        raise Misconfigured(
            f"{api.web.name}: the account sees no space with the key {', '.join(missing)}: correct spaces,"
            " or let the account view it"
        )
    return dict(sorted(found.items()))


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
