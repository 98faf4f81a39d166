"""The two REST APIs: addresses, paging, requests that both flavours share, and JSON as the model.

Parsing raises KeyError, TypeError or ValueError where a required part is missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast
from urllib.parse import parse_qs, quote, urlsplit

from connectors.confluence.model import Changed, Content, Kind, Person, Readers, Remark, Space, restriction_tag
from connectors.confluence.options import ConfluenceOptions
from connectors.source import CursorExpired
from connectors.web import Rejected, Web
from pipeline.core.errors import Misconfigured, Retryable

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


def _dig(json: Any, *path: str) -> Any:
    """None where a step is missing or is no object."""
    for part in path:
        json = json.get(part) if isinstance(json, Mapping) else None
    return json


def person(json: Json) -> Person:
    """Of a user, in either API."""
    return Person(
        id=str(json.get("accountId") or json.get("userKey") or ""),
        name=str(json.get("displayName") or json.get("publicName") or ""),
        username=str(json.get("username") or ""),
        email=str(json.get("email") or ""),
    )


# v1


def content_v1(json: Json, space: str | None = None) -> Content:
    kind = cast("Kind", json["type"])
    attached = kind == "attachment"
    return Content(
        id=str(json["id"]),
        kind=kind,
        space=space or str(json["space"]["key"]),
        title=str(json["title"]),
        number=int(json["version"]["number"]),
        when=str(json["version"]["when"]),
        webui=str(_dig(json, "_links", "webui") or "") if not attached else "",
        author=person((not attached and _dig(json, "history", "createdBy")) or _dig(json, "version", "by") or {}).id,
        body=_dig(json, "body", "storage", "value"),
        container=str(_dig(json, "container", "id") or "") or None if attached else None,
        media_type=str(_dig(json, "extensions", "mediaType") or _dig(json, "metadata", "mediaType") or ""),
        size=int(_dig(json, "extensions", "fileSize") or 0),
        download=str(_dig(json, "_links", "download") or ""),
    )


def people_in(json: Json) -> Iterable[Person]:
    """Whom a v1 content names: its creator and the author of its version."""
    for found in (_dig(json, "history", "createdBy"), _dig(json, "version", "by")):
        if isinstance(found, Mapping) and (one := person(found)).id:
            yield one


def remark_v1(json: Json) -> Remark:
    above = json.get("ancestors") or []
    inline = _dig(json, "extensions", "location") == "inline"
    return Remark(
        id=str(json["id"]),
        number=int(json["version"]["number"]),
        when=str(json["version"]["when"]),
        body=str(_dig(json, "body", "storage", "value") or ""),
        parent=str(above[-1]["id"]) if above else None,
        selection=str(_dig(json, "extensions", "inlineProperties", "originalSelection") or "") if inline else None,
        author=person(_dig(json, "history", "createdBy") or _dig(json, "version", "by") or {}).id,
    )


def changed_v1(json: Json) -> Changed:
    container = _dig(json, "container", "id")
    version = json["version"]
    return Changed(
        str(json["id"]), json["type"], str(container) if container else None, f"{version['number']}@{version['when']}"
    )


def is_restricted(json: Json) -> bool | None:
    """Whether a content has a view restriction of its own; None: the answer does not tell."""
    who = _dig(json, "restrictions", "read", "restrictions")
    counts = [_count(_dig(who, one)) for one in ("user", "group")]
    return None if None in counts else any(counts)


def _count(json: Any) -> int | None:
    found = _dig(json, "results")
    return max(len(found), int(_dig(json, "size") or 0)) if isinstance(found, list) else None


def required(json: Json) -> tuple[str, ...] | None:
    """A tag for each view restriction on a content and its ancestors, as one answer shows them; None: not certain."""
    above = json.get("ancestors")
    if not isinstance(above, list):
        return None
    found = [(str(one["id"]), is_restricted(one)) for one in [*above, json]]
    if any(restricted is None for _, restricted in found):
        return None
    return tuple(restriction_tag(id_) for id_, restricted in found if restricted)


def readers_v1(who: Json) -> Readers:
    """Of ``restrictions`` in an answer about one operation: ``user`` and ``group`` lists."""
    people = [person(one) for one in who["user"]["results"]]
    return Readers(people, [group_name(one) for one in who["group"]["results"]])


def group_name(json: Json) -> str:
    """Cloud: its id; Data Center knows only names."""
    return str(json.get("id") or json["name"])


# v2


def content_v2(json: Json, kind: Kind, space: str) -> Content:
    version = json["version"]
    parent = json.get("parentId")
    return Content(
        id=str(json["id"]),
        kind=kind,
        space=space,
        title=str(json["title"]),
        number=int(version["number"]),
        when=str(version["createdAt"]),
        webui=str(_dig(json, "_links", "webui") or ""),
        author=str(json.get("authorId") or version.get("authorId") or ""),
        body=_dig(json, "body", "storage", "value"),
        parent=str(parent) if parent else None,
        parent_kind=str(json.get("parentType") or "") if parent else "",
    )


def attachment_v2(json: Json, space: str) -> Content:
    version = json["version"]
    return Content(
        id=str(json["id"]),
        kind="attachment",
        space=space,
        title=str(json["title"]),
        number=int(version["number"]),
        when=str(version["createdAt"]),
        author=str(version.get("authorId") or ""),
        container=container_v2(json),
        media_type=str(json.get("mediaType") or ""),
        size=int(json.get("fileSize") or 0),
    )


def container_v2(json: Json) -> str | None:
    found = json.get("pageId") or json.get("blogPostId")
    return str(found) if found else None


def remark_v2(json: Json, parent: str | None) -> Remark:
    version = json["version"]
    selection = _dig(json, "properties", "inlineOriginalSelection")
    return Remark(
        id=str(json["id"]),
        number=int(version["number"]),
        when=str(version["createdAt"]),
        body=str(_dig(json, "body", "storage", "value") or ""),
        parent=parent,
        selection=str(selection) if selection else None,
        author=str(version.get("authorId") or ""),
    )


USUAL = 50


async def myself(api: Api) -> Person:
    with shaped(api.web.name):
        return person(await api.get("rest/api/user/current"))


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
            f"rest/api/content/{safe(id_)}/restriction/byOperation/{operation}",
            start=start,
            limit=size,
            expand="restrictions.user,restrictions.group",
        )
        with shaped(api.web.name):
            some = readers_v1(answer["restrictions"])
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
