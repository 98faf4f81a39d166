"""Confluence Data Center (9.1 and later, for the permissions of spaces): REST v1.

https://developer.atlassian.com/server/confluence/rest/. One listing brings pages with their ancestors' restrictions,
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
    all_readers,
    found_below,
    listing_size,
    myself,
    quoted,
    safe,
    shaped,
    wanted_spaces,
)
from connectors.confluence.cloud import IN_CQL, TYPES
from connectors.confluence.model import Changed, Content, Kind, Listing, Person, Position, Readers, Space
from connectors.confluence.options import ConfluenceOptions
from connectors.web import Missing

_WHO = "restrictions.read.restrictions.user,restrictions.read.restrictions.group"
_ACCESS = f"ancestors,{_WHO},{','.join(f'ancestors.{one}' for one in _WHO.split(','))}"
_REMARKS = "version,ancestors,extensions.inlineProperties,history"
OVERLAP = 5
"""So many of the page before are asked for again: what is removed meanwhile moves the rest up."""
MAX_LISTED, MAX_BODIES = 200, 50
"""At once, with expansions and with bodies (confluence.atlassian.com, “…always limits results to 50”)."""
AT_ONCE = 4


class DataCenter:
    def __init__(self, api: Api, options: ConfluenceOptions) -> None:
        self._api = api
        self._options = options
        self._spaces: Mapping[str, Space] = {}
        self._met: dict[str, Person] = {}
        """People that answers brought along, for their names."""

    async def close(self) -> None:
        await self._api.web.close()

    async def me(self) -> Person:
        return await myself(self._api)

    async def spaces(self) -> Mapping[str, Space]:
        found = await wanted_spaces(
            self._api, self._options, "rest/api/space", limit=MAX_LISTED, named={"spaceKey": list(self._options.spaces)}
        )
        self._spaces = found
        return found

    def kinds(self) -> Sequence[Kind]:
        return tuple(kind for kind in self._options.kinds if kind != "attachment")

    def _expand(self, *, full: bool) -> str:
        parts = ["version", "space", "history", _ACCESS]
        parts += ["body.storage"] if full else []
        if self._options.comments:
            inner = f"{_REMARKS},body.storage" if full else "version"
            parts += [f"descendants.comment.{one}" for one in inner.split(",")]
        if self._options.attachments:
            parts += [f"children.attachment.{one}" for one in ("version", "history", "container")]
        return ",".join(parts)

    async def listing(self, space: Space, kind: Kind, position: Position | None, *, full: bool) -> Listing:
        size = listing_size(self._options.page_size, most=MAX_BODIES if full else MAX_LISTED)
        start = int((position or {}).get("start", 0))
        overlap = min(OVERLAP, size // 4, start)
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
        found = [one for json in new for one in await self._with_all(json, space.key, full=full)]
        last = [str(json.get("id")) for json in results][-OVERLAP:]
        return Listing(found, None if following is None else {**following, "last": last})

    async def _with_all(self, json: Json, space: str, *, full: bool) -> list[Content]:
        """A page, and its attachments under the same access."""
        with shaped(self._api.web.name):
            page = replace(client.content_v1(json, space), required=client.required(json))
            self._met |= {one.id: one for one in client.people_in(json)}
        if self._options.comments:
            more = _REMARKS + (",body.storage" if full else "") if full else "version"
            remarks = await self._rest(json.get("descendants"), page.id, "descendant/comment", more)
            with shaped(self._api.web.name):
                page = replace(page, remarks=tuple(client.remark_v1(one) for one in remarks))
                self._met |= {who.id: who for one in remarks for who in client.people_in(one)}
        found = [page]
        if self._options.attachments:
            attached = await self._rest(json.get("children"), page.id, "child/attachment", "version,history,container")
            with shaped(self._api.web.name):
                some = [client.content_v1(one, space) for one in attached]
            found += [replace(one, container=page.id, required=page.required) for one in some]
        return found

    async def _rest(self, shown: Any, page: str, path: str, expand: str) -> list[Json]:
        """What is expanded within an answer is only the beginning of a listing."""
        with shaped(self._api.web.name):
            first = shown[path.rpartition("/")[2]]
            results = list(first["results"])
            if not first.get("_links", {}).get("next") and len(results) < int(first.get("limit", 25)):
                return results
        where = f"rest/api/content/{safe(page)}/{path}"
        depth = {"depth": "all"} if path.startswith("descendant") else {}
        return [one async for one in self._api.every(where, expand=expand, limit=MAX_LISTED, **depth)]

    async def get(self, ids: Sequence[str]) -> Sequence[Content]:
        if not self._spaces:
            await self.spaces()
        gate = asyncio.Semaphore(AT_ONCE)
        found = await asyncio.gather(*(self._one(one, gate) for one in ids))
        return [one for some in found for one in some]

    async def _one(self, id_: str, gate: asyncio.Semaphore) -> Sequence[Content]:
        if id_.isdigit():
            json = await self._content(id_, self._expand(full=True), gate)
            if json is None or json.get("type") not in self._options.kinds:
                return ()
            with shaped(self._api.web.name):
                key = str(json["space"]["key"])
            return (
                []
                if key not in self._spaces
                else [one for one in await self._with_all(json, key, full=True) if one.id == id_]
            )
        if not self._options.attachments:
            return ()
        json = await self._content(id_, "version,history,container,space", gate)
        if json is None or json.get("type") != "attachment":
            return ()
        with shaped(self._api.web.name):
            container = str(json["container"]["id"])
        page = await self._content(container, f"space,{_ACCESS}", gate)
        if page is None or page.get("type") not in self._options.kinds:
            return ()
        with shaped(self._api.web.name):
            key = str(page["space"]["key"])
            attached = client.content_v1(json, key)
        return [replace(attached, container=container, required=client.required(page))] if key in self._spaces else ()

    async def _content(self, id_: str, expand: str, gate: asyncio.Semaphore) -> Json | None:
        """None: not there, or not current."""
        async with gate:
            try:
                json = await self._api.get(f"rest/api/content/{safe(id_)}", expand=expand)
            except Missing:
                return None
        with shaped(self._api.web.name):
            return cast("Json", json) if json["status"] == "current" else None

    async def changed(self, minutes: int) -> Sequence[Changed]:
        spaces = list(await self.spaces())
        within = f" and space in ({quoted(spaces)})" if len(spaces) <= IN_CQL else ""
        cql = f'lastmodified >= now("-{minutes}m") and type in {TYPES}{within} order by lastmodified asc'
        found = []
        some = self._api.every("rest/api/content/search", cql=cql, expand="version,container,space", limit=MAX_LISTED)
        async for json in some:
            with shaped(self._api.web.name):
                if str(json["space"]["key"]) in spaces:
                    found.append(client.changed_v1(json))
        return found

    async def trashed(self) -> Sequence[str]:
        found: list[str] = []
        for kind in self.kinds():
            params = {"status": "trashed", "type": kind, "limit": MAX_LISTED, "expand": "space"}
            results, _ = await self._api.page("rest/api/content", params, None)
            with shaped(self._api.web.name):
                found += [str(json["id"]) for json in results if str(json["space"]["key"]) in self._spaces]
        return found

    async def below(self, id_: str, limit: int) -> Sequence[str] | None:
        return await found_below(self._api, id_, limit, attachments=self._options.attachments)

    async def readers(self, space: Space) -> Readers:
        """Raises Missing before 9.1, which has no such resource."""
        answer = await self._api.get(f"rest/api/space/{safe(space.key)}/permissions")
        people: list[Person] = []
        groups: list[str] = []
        anonymous = False
        with shaped(self._api.web.name):
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
        return await all_readers(self._api, id_)

    async def restricted(self, space: Space, position: Position | None) -> tuple[Sequence[str], Position | None]:
        kind = str((position or {}).get("kind", "page"))
        inner = (position or {}).get("next")
        params = {"spaceKey": space.key, "type": kind, "status": "current", "limit": MAX_LISTED, "expand": _WHO}
        results, following = await self._api.page("rest/api/content", params, inner)
        with shaped(self._api.web.name):
            named = [str(json["id"]) for json in results if client.is_restricted(json) is not False]
        if following is None and kind == "page" and "blogpost" in self._options.kinds:
            return named, {"kind": "blogpost"}
        return named, None if following is None else {"kind": kind, "next": following}

    async def members(self, group: str) -> Sequence[Person]:
        found = []
        async for json in self._api.every(f"rest/api/group/{safe(group)}/member", limit=MAX_LISTED):
            with shaped(self._api.web.name):
                found.append(client.person(json))
        return found

    async def people(self, ids: Sequence[str], *, fresh: bool = False) -> Mapping[str, Person]:
        """By user key, one by one: there is no other way."""
        found: dict[str, Person] = {}
        for one in dict.fromkeys(ids):
            if fresh or one not in self._met:
                try:
                    json = await self._api.get("rest/api/user", key=one)
                except Missing:
                    continue
                with shaped(self._api.web.name):
                    self._met[one] = client.person(json)
            found[one] = self._met[one]
        return found
