"""Confluence Data Center (9.1 and later, for the permissions of spaces): REST v1.

https://developer.atlassian.com/server/confluence/rest/. One listing returns pages with their ancestors' restrictions,
comments and attachments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from connectors.confluence import client
from connectors.confluence.client import (
    Api,
    Json,
    changes_cql,
    current_user,
    descendant_ids,
    listing_size,
    parsing,
    path_segment,
    restriction_readers,
    selected_spaces,
)
from connectors.confluence.model import Change, Content, Kind, Listing, Person, Position, Readers, Space
from connectors.confluence.options import ConfluenceOptions
from connectors.web import Missing

_RESTRICTIONS = "restrictions.read.restrictions.user,restrictions.read.restrictions.group"
_ACCESS = f"ancestors,{_RESTRICTIONS},{','.join(f'ancestors.{field}' for field in _RESTRICTIONS.split(','))}"
_COMMENT_FIELDS = "version,ancestors,extensions.inlineProperties,history"
OVERLAP_RESULTS = 5
"""Each page of a listing repeats this many results of the previous one, because removing content moves the rest up."""
MAX_LISTED, MAX_BODIES = 200, 50
"""Results in one response with expansions, and with bodies (confluence.atlassian.com: “limits results to 50”)."""
MAX_CONCURRENT_REQUESTS = 4


class DataCenter:
    """A site of Confluence Data Center."""

    def __init__(self, api: Api, options: ConfluenceOptions) -> None:
        self._api = api
        self._options = options
        self._spaces: Mapping[str, Space] = {}
        self._people: dict[str, Person] = {}
        """People by user key, from earlier responses, for their display names."""

    async def close(self) -> None:
        await self._api.web.close()

    async def me(self) -> Person:
        return await current_user(self._api)

    async def spaces(self) -> Mapping[str, Space]:
        spaces = await selected_spaces(
            self._api, self._options, "rest/api/space", limit=MAX_LISTED, named={"spaceKey": list(self._options.spaces)}
        )
        self._spaces = spaces
        return spaces

    def kinds(self) -> Sequence[Kind]:
        return tuple(kind for kind in self._options.kinds if kind != "attachment")

    def _expand(self, *, full: bool) -> str:
        parts = ["version", "space", "history", _ACCESS]
        parts += ["body.storage"] if full else []
        if self._options.comments:
            inner = f"{_COMMENT_FIELDS},body.storage" if full else "version"
            parts += [f"descendants.comment.{field}" for field in inner.split(",")]
        if self._options.attachments:
            parts += [f"children.attachment.{field}" for field in ("version", "history", "container")]
        return ",".join(parts)

    async def listing(self, space: Space, kind: Kind, position: Position | None, *, full: bool) -> Listing:
        size = listing_size(self._options.page_size, most=MAX_BODIES if full else MAX_LISTED)
        start = int((position or {}).get("start", 0))
        overlap = min(OVERLAP_RESULTS, size // 4, start)
        known = set((position or {}).get("last", ()))
        params = {
            "spaceKey": space.key,
            "type": kind,
            "status": "current",
            "limit": size,
            "expand": self._expand(full=full),
        }
        results, following = await self._api.page("rest/api/content", params, {"start": start - overlap})
        new = [json for json in results if str(json.get("id")) not in known]
        contents = [content for json in new for content in await self._with_attachments(json, space.key, full=full)]
        last = [str(json.get("id")) for json in results][-OVERLAP_RESULTS:]
        return Listing(contents, None if following is None else {**following, "last": last})

    async def _with_attachments(self, json: Json, space: str, *, full: bool) -> list[Content]:
        """Return a page and its attachments, which have the page's access."""
        with parsing(self._api.web.name):
            page = replace(client.content_v1(json, space), required_tags=client.required_tags(json))
            self._people |= {account.id: account for account in client.people_in(json)}
        if self._options.comments:
            more = _COMMENT_FIELDS + (",body.storage" if full else "") if full else "version"
            comments = await self._nested_results(json.get("descendants"), page.id, "descendant/comment", more)
            with parsing(self._api.web.name):
                page = replace(page, comments=tuple(client.comment_v1(comment) for comment in comments))
                self._people |= {account.id: account for comment in comments for account in client.people_in(comment)}
        contents = [page]
        if self._options.attachments:
            attached = await self._nested_results(
                json.get("children"), page.id, "child/attachment", "version,history,container"
            )
            with parsing(self._api.web.name):
                attachments = [client.content_v1(attachment, space) for attachment in attached]
            contents += [
                replace(attachment, container=page.id, required_tags=page.required_tags) for attachment in attachments
            ]
        return contents

    async def _nested_results(self, expanded: Any, page: str, path: str, expand: str) -> list[Json]:
        """Return the comments or attachments of a page. The response about the page holds only the first of them; if
        there are more, the whole listing is read."""
        with parsing(self._api.web.name):
            first = expanded[path.rpartition("/")[2]]
            results = list(first["results"])
            if not first.get("_links", {}).get("next") and len(results) < int(first.get("limit", 25)):
                return results
        address = f"rest/api/content/{path_segment(page)}/{path}"
        depth = {"depth": "all"} if path.startswith("descendant") else {}
        return [result async for result in self._api.all_results(address, expand=expand, limit=MAX_LISTED, **depth)]

    async def get(self, ids: Sequence[str]) -> Sequence[Content]:
        if not self._spaces:
            await self.spaces()
        gate = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        batches = await asyncio.gather(*(self._read_current(id_, gate) for id_ in ids))
        return [content for batch in batches for content in batch]

    async def _read_current(self, id_: str, gate: asyncio.Semaphore) -> Sequence[Content]:
        if id_.isdigit():
            json = await self._current_json(id_, self._expand(full=True), gate)
            if json is None or json.get("type") not in self._options.kinds:
                return ()
            with parsing(self._api.web.name):
                key = str(json["space"]["key"])
            return (
                []
                if key not in self._spaces
                else [content for content in await self._with_attachments(json, key, full=True) if content.id == id_]
            )
        if not self._options.attachments:
            return ()
        json = await self._current_json(id_, "version,history,container,space", gate)
        if json is None or json.get("type") != "attachment":
            return ()
        with parsing(self._api.web.name):
            container = str(json["container"]["id"])
        page = await self._current_json(container, f"space,{_ACCESS}", gate)
        if page is None or page.get("type") not in self._options.kinds:
            return ()
        with parsing(self._api.web.name):
            key = str(page["space"]["key"])
            attached = client.content_v1(json, key)
        return (
            [replace(attached, container=container, required_tags=client.required_tags(page))]
            if key in self._spaces
            else ()
        )

    async def _current_json(self, id_: str, expand: str, gate: asyncio.Semaphore) -> Json | None:
        """Read a content; None: it does not exist, or is not current."""
        async with gate:
            try:
                json = await self._api.get(f"rest/api/content/{path_segment(id_)}", expand=expand)
            except Missing:
                return None
        with parsing(self._api.web.name):
            return cast("Json", json) if json["status"] == "current" else None

    async def recent_changes(self, minutes: int) -> Sequence[Change]:
        spaces = list(await self.spaces())
        cql = changes_cql(spaces, minutes)
        changes = []
        results = self._api.all_results(
            "rest/api/content/search", cql=cql, expand="version,container,space", limit=MAX_LISTED
        )
        async for json in results:
            with parsing(self._api.web.name):
                if str(json["space"]["key"]) in spaces:
                    changes.append(client.change_v1(json))
        return changes

    async def trashed(self) -> Sequence[str]:
        ids: list[str] = []
        for kind in self.kinds():
            params = {"status": "trashed", "type": kind, "limit": MAX_LISTED, "expand": "space"}
            results, _ = await self._api.page("rest/api/content", params, None)
            with parsing(self._api.web.name):
                ids += [str(json["id"]) for json in results if str(json["space"]["key"]) in self._spaces]
        return ids

    async def descendants(self, id_: str, limit: int) -> Sequence[str] | None:
        return await descendant_ids(self._api, id_, limit, attachments=self._options.attachments)

    async def readers(self, space: Space) -> Readers:
        """Return who may view a space. Raises Missing before Confluence 9.1, which lacks this resource."""
        answer = await self._api.get(f"rest/api/space/{path_segment(space.key)}/permissions")
        people: list[Person] = []
        groups: list[str] = []
        anonymous = False
        with parsing(self._api.web.name):
            for json in answer["results"] if isinstance(answer, Mapping) else answer:
                operation, subject = json["operation"], json["subject"]
                if (operation["operationKey"], operation["targetType"]) != ("read", "space"):
                    continue
                kind = str(subject["type"])
                if kind == "user":
                    people.append(Person(str(subject["userKey"])))
                elif kind == "group":
                    groups.append(str(subject["name"]))
                else:
                    anonymous |= kind == "anonymous"
        return Readers(people, groups, anonymous)

    async def restriction(self, id_: str) -> Readers:
        return await restriction_readers(self._api, id_)

    async def restricted_ids(self, space: Space, position: Position | None) -> tuple[Sequence[str], Position | None]:
        kind = str((position or {}).get("kind", "page"))
        inner = (position or {}).get("next")
        params = {
            "spaceKey": space.key,
            "type": kind,
            "status": "current",
            "limit": MAX_LISTED,
            "expand": _RESTRICTIONS,
        }
        results, following = await self._api.page("rest/api/content", params, inner)
        with parsing(self._api.web.name):
            named = [str(json["id"]) for json in results if client.is_restricted(json) is not False]
        if following is None and kind == "page" and "blogpost" in self._options.kinds:
            return named, {"kind": "blogpost"}
        return named, None if following is None else {"kind": kind, "next": following}

    async def members(self, group: str) -> Sequence[Person]:
        people = []
        async for json in self._api.all_results(f"rest/api/group/{path_segment(group)}/member", limit=MAX_LISTED):
            with parsing(self._api.web.name):
                people.append(client.person(json))
        return people

    async def people(self, ids: Sequence[str], *, fresh: bool = False) -> Mapping[str, Person]:
        """Return people by user key. The API returns one person for each request."""
        people: dict[str, Person] = {}
        for key in dict.fromkeys(ids):
            if fresh or key not in self._people:
                try:
                    json = await self._api.get("rest/api/user", key=key)
                except Missing:
                    continue
                with parsing(self._api.web.name):
                    self._people[key] = client.person(json)
            people[key] = self._people[key]
        return people
