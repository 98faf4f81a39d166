"""The REST APIs v1 and v2: paging, the requests that both flavours share, and parsing JSON into the model.

Parsing functions raise KeyError, TypeError or ValueError where a required part is missing. In the envelope of a
response ``parsing`` turns these into Retryable; in one of the things that it holds ``reading_data`` turns them into
BadData, which concerns that thing alone.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast
from urllib.parse import parse_qs, quote, urlsplit

from connectors.atlassian import Person
from connectors.confluence.changes import MAX_CHANGES
from connectors.confluence.model import Change, Comment, Content, Kind, Readers, Space, restriction_tag
from connectors.confluence.options import ConfluenceOptions
from connectors.set_aside import reading_data
from connectors.source import CursorExpired
from connectors.web import Missing, Rejected, ServerFailed, TooLarge, Web
from pipeline.core.errors import Misconfigured, Retryable

Json = Mapping[str, Any]
RESTRICTIONS = "restrictions.read.restrictions.user,restrictions.read.restrictions.group"
"""The fields of v1 that hold who may read a content."""
_CQL_ITEM = re.compile(r"[\w~.@+\-]+")
MAX_PAGES = 100_000
"""A listing with more pages is taken for a server's mistake that would never end."""
MAX_SPACES_IN_CQL = 40
"""With more spaces than this a search does not name them, because they are part of the URL."""
DEFAULT_PAGE_SIZE = 50
FAILING_SECONDS = 5.0
"""Attempts at a request that Confluence answers with 5xx; after them less is requested, because a single page that
cannot be rendered fails every response that contains it."""
SMALLER = 5
"""After a failure a listing requests results in pages that are smaller by this factor, down to single ones."""


class Api:
    """Requests relative to the base address."""

    def __init__(self, web: Web, *, cloud: bool) -> None:
        """cloud: whether bursts are limited for each endpoint. Data Center limits all requests together."""
        self.web = web
        self._cloud = cloud

    async def get(self, path: str, **params: Any) -> Any:
        """Get JSON from a path below the base address, such as ``rest/api/user/current``."""
        return await self.web.json(
            "GET", path, params=params, failing_seconds=FAILING_SECONDS, bucket=self._bucket(path)
        )

    async def post(self, path: str, body: Any) -> Any:
        return await self.web.json("POST", path, json=body, failing_seconds=FAILING_SECONDS, bucket=self._bucket(path))

    def _bucket(self, path: str) -> str | None:
        """Return the name of a path's endpoint: the fourth part of a path is an id, or else the end of the name."""
        parts = path.split("/")
        return "/".join([*parts[:3], *parts[4:]]) if self._cloud else None

    async def page(
        self, path: str, params: Mapping[str, Any], position: Mapping[str, Any] | None, *, shrinks: bool = True
    ) -> tuple[Sequence[Json], Mapping[str, Any] | None]:
        """Return one page of results and the position of the next. Only the cursor or start of a ``next`` link is used,
        never its address: behind api.atlassian.com it has another path, and a server must not choose where requests
        go. With ``shrinks`` a page that Confluence fails to make, or that is too large, is requested with a smaller
        ``limit``. Raises CursorExpired."""
        try:
            answer = await self.get(path, **params, **(position or {}))
        except (ServerFailed, TooLarge):
            limit = params.get("limit")
            if not shrinks or not isinstance(limit, int) or limit <= 1:
                raise
            return await self.page(path, {**params, "limit": max(1, limit // SMALLER)}, position)
        except Rejected as error:
            if position and "cursor" in position and error.status == 400:
                raise CursorExpired(f"{self.web.name}: Confluence no longer knows the cursor of a listing") from error
            raise
        with parsing(self.web.name):
            results = answer["results"]
            if not isinstance(results, list):
                raise TypeError
            return results, self._next(answer.get("_links", {}).get("next"), position)

    def _next(self, link: str | None, position: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if not link:
            return None
        query = parse_qs(urlsplit(link).query)
        if "cursor" in query:
            following: Mapping[str, Any] = {"cursor": query["cursor"][0]}
        else:
            following = {"start": int(query["start"][0])}
        if following == position:
            raise ValueError
        return following

    async def all_results(self, path: str, **params: Any) -> AsyncIterator[Json]:
        """Yield all results of a listing. Raises Retryable after MAX_PAGES pages."""
        position: Mapping[str, Any] | None = None
        for _ in range(MAX_PAGES):
            results, position = await self.page(path, params, position)
            for result in results:
                yield result
            if position is None:
                return
        raise Retryable(f"{self.web.name}: a listing of Confluence does not end")


@contextmanager
def parsing(name: str) -> Iterator[None]:
    """Raise Retryable, without any content, for a response that is not in Confluence's format, such as a proxy's."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Retryable(
            f"{name}: a response is not in Confluence's format ({type(error).__name__}); if this persists, check that"
            " base_url is the address of Confluence itself"
        ) from None


def id_in(json: Any) -> object:
    return json["id"]


def cql_list(ids: Sequence[str]) -> str:
    """Return the items of a CQL list. Personal spaces have the user's name as key, which may be an address; an item
    with a quote, a backslash or a space is left out, so that nothing can be injected into a query."""
    return ", ".join(f'"{id_}"' for id_ in ids if _CQL_ITEM.fullmatch(id_))


def path_segment(segment: str) -> str:
    """Escape one segment of a path: ids and names of groups come from responses and events, and may hold anything."""
    return quote(segment, safe="") if segment.strip(".") else "-"


def batched(ids: Iterable[str], size: int) -> Iterator[list[str]]:
    remaining = iter(ids)
    while batch := list(islice(remaining, size)):
        yield batch


def _nested(json: Any, *path: str) -> Any:
    """Return the value at a path of keys, or None where one is missing or its parent is no object."""
    for part in path:
        json = json.get(part) if isinstance(json, Mapping) else None
    return json


def person(json: Json) -> Person:
    """Parse a user of either API."""
    return Person(
        id=str(json.get("accountId") or json.get("userKey") or ""),
        name=str(json.get("displayName") or json.get("publicName") or ""),
        username=str(json.get("username") or ""),
        email=str(json.get("email") or ""),
    )


def _body(json: Json) -> str | None:
    """Return the text of a content in storage format; None: the response has none."""
    storage = (json.get("body") or {}).get("storage")
    if not storage:
        return None
    if not isinstance(storage["value"], str):
        raise TypeError("a body is no text")
    return str(storage["value"])


# v1


def content_v1(json: Json, space: str | None = None) -> Content:
    kind = cast("Kind", json["type"])
    attached = kind == "attachment"
    return Content(
        id=str(json["id"]),
        kind=kind,
        space=str(json["space"]["key"]) if space is None else space,
        title=str(json["title"]),
        version_number=int(json["version"]["number"]),
        modified_at=str(json["version"]["when"]),
        webui=str(_nested(json, "_links", "webui") or "") if not attached else "",
        author=person(
            (not attached and _nested(json, "history", "createdBy")) or _nested(json, "version", "by") or {}
        ).id,
        body=_body(json),
        container=str(_nested(json, "container", "id") or "") or None if attached else None,
        media_type=str(_nested(json, "extensions", "mediaType") or _nested(json, "metadata", "mediaType") or ""),
        size=int(_nested(json, "extensions", "fileSize") or 0),
        download=str(_nested(json, "_links", "download") or ""),
        labels=() if attached else labels(json),
    )


def labels(json: Json) -> tuple[str, ...]:
    """Return the labels that a v1 content shows to everybody: those of the prefix ``global``, as most are. Others are a
    person's own (``my``), or belong to teams and to Confluence itself."""
    results = _nested(json, "metadata", "labels", "results") or []
    return tuple(sorted({str(label["name"]) for label in results if label.get("prefix", "global") == "global"}))


def people_in(json: Json) -> Iterable[Person]:
    """Return the people that a v1 content names: its creator and the author of its version."""
    for user in (_nested(json, "history", "createdBy"), _nested(json, "version", "by")):
        if isinstance(user, Mapping) and (account := person(user)).id:
            yield account


def text_of_comment(json: Json) -> str:
    return str(_nested(json, "body", "storage", "value") or "")


def comment_v1(json: Json) -> Comment:
    above = json.get("ancestors") or []
    inline = _nested(json, "extensions", "location") == "inline"
    return Comment(
        id=str(json["id"]),
        version_number=int(json["version"]["number"]),
        modified_at=str(json["version"]["when"]),
        body=text_of_comment(json),
        parent=str(above[-1]["id"]) if above else None,
        selection=str(_nested(json, "extensions", "inlineProperties", "originalSelection") or "") if inline else None,
        author=person(_nested(json, "history", "createdBy") or _nested(json, "version", "by") or {}).id,
    )


def change_v1(json: Json) -> Change:
    """Parse a change. Whether the version is one is seen when the document is read."""
    container = _nested(json, "container", "id")
    version = f"{_nested(json, 'version', 'number')}@{_nested(json, 'version', 'when')}"
    return Change(str(json["id"]), json["type"], str(container) if container else None, version)


def is_restricted(json: Json) -> bool | None:
    """Return whether a content has a view restriction of its own, or None if the response does not include that."""
    restrictions = _nested(json, "restrictions", "read", "restrictions")
    counts = [_count(_nested(restrictions, kind)) for kind in ("user", "group")]
    return None if None in counts else any(counts)


def _count(json: Any) -> int | None:
    results = _nested(json, "results")
    return max(len(results), int(_nested(json, "size") or 0)) if isinstance(results, list) else None


def included_readers(json: Json) -> Readers | None:
    """Return everybody whom a content's own view restriction names, or None if the response does not include all."""
    restrictions = _nested(json, "restrictions", "read", "restrictions")
    for kind in ("user", "group"):
        count, limit = _count(_nested(restrictions, kind)), _nested(restrictions, kind, "limit")
        if count is None or not isinstance(limit, int) or count >= limit:
            return None
    return readers_v1(restrictions)


def required_tags(json: Json) -> tuple[str, ...] | None:
    """Return one tag for each view restriction on a content and its ancestors, all from one response, or None if that
    response does not include them all."""
    above = json.get("ancestors")
    if not isinstance(above, list):
        return None
    restrictions = [(str(content["id"]), is_restricted(content)) for content in [*above, json]]
    if any(restricted is None for _, restricted in restrictions):
        return None
    return tuple(restriction_tag(id_) for id_, restricted in restrictions if restricted)


def readers_v1(restrictions: Json) -> Readers:
    """Parse the ``restrictions`` of one operation, which hold a ``user`` and a ``group`` list."""
    people = [person(principal) for principal in restrictions["user"]["results"]]
    return Readers(people, [group_name(principal) for principal in restrictions["group"]["results"]])


def group_name(json: Json) -> str:
    """Return a group's id (Cloud) or name (Data Center, which has no ids)."""
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
        version_number=int(version["number"]),
        modified_at=str(version["createdAt"]),
        webui=str(_nested(json, "_links", "webui") or ""),
        author=str(json.get("authorId") or version.get("authorId") or ""),
        body=_body(json),
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
        version_number=int(version["number"]),
        modified_at=str(version["createdAt"]),
        author=str(version.get("authorId") or ""),
        container=container_v2(json),
        media_type=str(json.get("mediaType") or ""),
        size=int(json.get("fileSize") or 0),
    )


def container_v2(json: Json) -> str | None:
    container = json.get("pageId") or json.get("blogPostId")
    return str(container) if container else None


def comment_v2(json: Json, parent: str | None) -> Comment:
    version = json["version"]
    selection = _nested(json, "properties", "inlineOriginalSelection")
    return Comment(
        id=str(json["id"]),
        version_number=int(version["number"]),
        modified_at=str(version["createdAt"]),
        body=text_of_comment(json),
        parent=parent,
        selection=str(selection) if selection else None,
        author=str(version.get("authorId") or ""),
    )


# Requests of both flavours


async def current_user(api: Api) -> Person:
    with parsing(api.web.name):
        return person(await api.get("rest/api/user/current"))


async def selected_spaces(
    api: Api, options: ConfluenceOptions, path: str, *, limit: int, named: Mapping[str, Any]
) -> dict[str, Space]:
    """Return the current spaces that the settings name, otherwise those that the account may view, sorted by key.
    Without ``personal_spaces`` every type but personal counts: Cloud has more than two (CONFCLOUD-78652).
    ``named`` is the query parameter by which the flavour requests ``options.spaces``. Raises Misconfigured when the
    account can view none of them."""
    params: dict[str, Any] = {"limit": limit, "status": "current"}
    if options.spaces:
        params |= named
    spaces: dict[str, Space] = {}
    async for json in api.all_results(path, **params):
        with parsing(api.web.name):
            space = Space(str(json["id"]), str(json["key"]), str(json["name"]))
            is_left_out = json.get("type") == "personal" and not (options.personal_spaces or options.spaces)
        if space.key not in options.exclude_spaces and not is_left_out:
            spaces[space.key] = space
    if not spaces and (missing := missing_spaces(options, spaces)):
        raise Misconfigured(f"{api.web.name}: {no_such_space(missing)}")
    return dict(sorted(spaces.items()))


def missing_spaces(options: ConfluenceOptions, spaces: Collection[str]) -> list[str]:
    """Return the keys that the settings name and that are not among the current spaces which the account may view."""
    return sorted(set(options.spaces) - set(spaces) - set(options.exclude_spaces))


def no_such_space(keys: Sequence[str]) -> str:
    return (
        f"the account sees no current space with the key {', '.join(keys)}: if it is archived or deleted, remove it"
        " from spaces; otherwise correct the key, or let the account view it"
    )


async def restriction_readers(api: Api, id_: str) -> Readers:
    """Return everybody whom a view restriction names. Each page of results holds users and groups."""
    people: list[Person] = []
    groups: list[str] = []
    start, size = 0, 100
    while True:
        answer = await api.get(
            f"rest/api/content/{path_segment(id_)}/restriction/byOperation/read",
            start=start,
            limit=size,
            expand="restrictions.user,restrictions.group",
        )
        with reading_data():
            readers = readers_v1(answer["restrictions"])
        people += readers.people
        groups += readers.groups
        if max(len(readers.people), len(readers.groups)) < size:
            return Readers(people, groups)
        start += size


def changes_cql(spaces: Sequence[str], minutes: int, until: int = 0) -> str:
    """Return a search for the changes of the last ``minutes``, without those of the last ``until`` minutes.
    ``now("-15m")`` depends neither on the local clock nor on the time zone in which Confluence would read a written
    time."""
    within = f" and space in ({cql_list(spaces)})" if 0 < len(spaces) <= MAX_SPACES_IN_CQL else ""
    before = f' and lastmodified <= now("-{until}m")' if until else ""
    kinds = "(page, blogpost, comment, attachment)"
    return f'lastmodified >= now("-{minutes}m"){before} and type in {kinds}{within} order by lastmodified asc'


class ChangesMissed(CursorExpired):
    """Some changes cannot be searched for, so that only a sweep finds them."""


async def search_changes(
    api: Api,
    search: Callable[[str], AsyncIterator[Json]],
    spaces: Collection[str],
    minutes: int,
    until: int = 0,
    *,
    limit: int = MAX_CHANGES,
) -> list[Change]:
    """Search for the changes in these spaces between ``minutes`` and ``until`` minutes ago, the oldest first. Where
    Confluence returns the first results and rejects the request for more, or fails, the two halves of that time are
    searched, down to single minutes. Raises ChangesMissed, also for more than ``limit`` changes."""
    changes, any_result = list[Change](), False
    try:
        async for json in search(changes_cql(list(spaces), minutes, until)):
            any_result = True
            with reading_data():  # nothing but the change is kept: a result is many times larger
                if str(json["space"]["key"]) in spaces:
                    changes.append(change_v1(json))
            if len(changes) > limit:
                break
    except (CursorExpired, Missing, Rejected, ServerFailed) as error:  # a 400 that answers a cursor is CursorExpired
        middle = (minutes + until) // 2
        if not any_result:
            raise
        if middle in (minutes, until):
            raise ChangesMissed(f"{error}: everything is compared instead of reading changes") from error
        older = await search_changes(api, search, spaces, minutes, middle, limit=limit)
        return [*older, *await search_changes(api, search, spaces, middle, until, limit=limit - len(older))]
    if len(changes) > limit:
        raise ChangesMissed(
            f"{api.web.name}: more than {MAX_CHANGES:,} changes: everything is compared instead of reading changes"
        )
    return changes


async def descendant_ids(api: Api, id_: str, limit: int, *, attachments: bool) -> Sequence[str] | None:
    """Return the ids of the pages, and with ``attachments`` of the files, below a page; None: more than ``limit``."""

    async def search(cql: str, remaining: int) -> list[str] | None:
        results, more = await api.page("rest/api/content/search", {"cql": cql, "limit": remaining + 1}, None)
        with parsing(api.web.name):
            return None if more or len(results) > remaining else [str(json["id"]) for json in results]

    pages = await search(f"ancestor = {cql_list([id_])} and type = page", limit)
    if pages is None or not attachments:
        return pages
    attached = await search(f"type = attachment and container in ({cql_list([id_, *pages])})", limit - len(pages))
    return None if attached is None else [*pages, *attached]


def listing_size(page_size: int, *, most: int) -> int:
    """Return how many results to request at once: as many as the API returns, unless ``page_size`` was reduced."""
    return most if page_size >= DEFAULT_PAGE_SIZE else page_size
