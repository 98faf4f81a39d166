"""Confluence Cloud: REST v2 for content and spaces, v1 for search, restrictions, groups and downloads.

https://developer.atlassian.com/cloud/confluence/rest/v2/ and …/rest/v1/. Listings of pages are v2's, which lag behind
nothing; attachments and comments of a whole space can only be searched for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from connectors.confluence import cloud_comments, parsing
from connectors.confluence.api import Api, Json, batched, quoted, safe, shaped
from connectors.confluence.cloud_access import Restrictions
from connectors.confluence.common import all_readers, found_below, listing_size, myself, wanted_spaces
from connectors.confluence.model import Changed, Content, Kind, Listing, Person, Position, Readers, Remark, Space
from connectors.confluence.options import ConfluenceOptions
from connectors.web import Missing

MAX_IDS = 100
"""Ids in one request: v2 takes 250, but they stand in an address of limited length."""
MAX_LISTED = 250
IN_CQL = 40
"""More spaces than this are searched for without naming them."""
TYPES = "(page, blogpost, comment, attachment)"


class Cloud:
    def __init__(self, api: Api, options: ConfluenceOptions) -> None:
        self._api = api
        self._options = options
        self._keys: dict[str, str] = {}
        """Space id → key, of the spaces that are read."""

    async def close(self) -> None:
        await self._api.web.close()

    async def me(self) -> Person:
        return await myself(self._api)

    async def spaces(self) -> Mapping[str, Space]:
        found = await wanted_spaces(
            self._api, self._options, "api/v2/spaces", limit=MAX_LISTED, named={"keys": ",".join(self._options.spaces)}
        )
        self._keys = {space.id: space.key for space in found.values()}
        return found

    def kinds(self) -> Sequence[Kind]:
        return self._options.kinds

    async def listing(self, space: Space, kind: Kind, position: Position | None, *, full: bool) -> Listing:
        if kind == "attachment":
            return await self._attachments(space, position)
        size = listing_size(self._options.page_size, most=self._options.page_size if full else MAX_IDS)
        params: dict[str, Any] = {"limit": size, "sort": "id", "status": "current"}
        if full:
            params["body-format"] = "storage"
        results, following = await self._api.page(f"api/v2/spaces/{space.id}/{kind}s", params, position)
        with shaped(self._api.web.name):
            found = [parsing.content_v2(json, kind, space.key) for json in results]
        found = await self._with_access(found)
        return Listing(await self._with_remarks(found, full=full), following)

    async def _attachments(self, space: Space, position: Position | None) -> Listing:
        """By search: v2 lists those of one page or of the whole site."""
        results, following = await self._search(
            f'type = attachment and space = "{space.key}" order by created asc', position
        )
        with shaped(self._api.web.name):
            found = [parsing.content_v1(json, space.key) for json in results]
        return Listing(await self._within(found), following)

    async def _search(self, cql: str, position: Position | None = None, expand: str = "version,container,space,history"
                      ) -> tuple[Sequence[Json], Position | None]:  # fmt: skip
        params = {"cql": cql, "expand": expand, "limit": min(self._options.page_size, MAX_IDS)}
        return await self._api.page("rest/api/content/search", params, position)

    async def _all_found(self, cql: str, expand: str = "version,container,space") -> list[Json]:
        found: list[Json] = []
        async for json in self._api.every("rest/api/content/search", cql=cql, expand=expand, limit=MAX_IDS):
            found.append(json)
        return found

    async def get(self, ids: Sequence[str]) -> Sequence[Content]:
        pages = await self._tree([one for one in ids if one.isdigit()], bodies=True)
        pages = await self._with_remarks(await self._with_access(pages), full=True, certain=True)
        attached: list[Content] = []
        for one in ids:
            if one.isdigit() or not self._options.attachments:
                continue
            try:
                json = await self._api.get(f"api/v2/attachments/{safe(one)}")
            except Missing:
                continue
            with shaped(self._api.web.name):
                if json["status"] == "current" and parsing.container_v2(json):
                    attached.append(parsing.attachment_v2(json, ""))
        return [*pages, *await self._within(attached)]

    async def _tree(self, ids: Sequence[str], *, bodies: bool) -> list[Content]:
        """Current pages and blog posts of our spaces, by id."""
        if not self._keys:
            await self.spaces()
        found: list[Content] = []
        body = {"body-format": "storage"} if bodies else {}
        for batch in batched(ids, MAX_IDS):
            left = list(batch)
            for kind in ("page", "blogpost"):
                if not left or kind not in self._options.kinds:
                    continue
                some = self._api.every(f"api/v2/{kind}s", id=",".join(left), status="current", limit=MAX_LISTED, **body)
                async for json in some:
                    with shaped(self._api.web.name):
                        left.remove(str(json["id"]))
                        if key := self._keys.get(str(json["spaceId"])):
                            found.append(parsing.content_v2(json, cast("Kind", kind), key))
        return found

    async def _with_access(self, found: Sequence[Content]) -> list[Content]:
        known = await Restrictions(self._api).of(found)
        return [replace(one, required=known[one.id]) for one in found]

    async def _within(self, attached: Sequence[Content]) -> list[Content]:
        """Attachments of current pages in our spaces, under the access of their page as it is now."""
        containers = await self._tree(sorted({one.container for one in attached if one.container}), bodies=False)
        pages = {page.id: page for page in await self._with_access(containers)}
        return [
            replace(one, space=page.space, required=page.required)
            for one in attached
            if (page := pages.get(one.container or ""))
        ]

    async def _with_remarks(self, found: Sequence[Content], *, full: bool, certain: bool = False) -> list[Content]:
        """certain: ask every page for its comments; else only those of which search knows that they have some."""
        if not self._options.comments or not found:
            return list(found)
        marks: dict[str, list[Remark]] = {}
        if not certain:
            cql = f"type = comment and container in ({quoted([one.id for one in found])})"
            for json in await self._all_found(cql):
                with shaped(self._api.web.name):
                    marks.setdefault(str(json["container"]["id"]), []).append(parsing.remark_v1(json))
        if full:
            asked = [one for one in found if certain or one.id in marks]
            marks = {one.id: await cloud_comments.of(self._api, one) for one in asked}
        return [replace(one, remarks=tuple(marks.get(one.id, ()))) for one in found]

    async def changed(self, minutes: int) -> Sequence[Changed]:
        """``now("-15m")`` spares us the time zone in which a written time would be read, and clocks that differ."""
        spaces = list(await self.spaces())
        within = f" and space in ({quoted(spaces)})" if len(spaces) <= IN_CQL else ""
        cql = f'lastmodified >= now("-{minutes}m") and type in {TYPES}{within} order by lastmodified asc'
        found = []
        for json in await self._all_found(cql):
            with shaped(self._api.web.name):
                if str(json["space"]["key"]) in spaces:
                    found.append(parsing.changed_v1(json))
        return found

    async def trashed(self) -> Sequence[str]:
        found: list[str] = []
        for kind in self._options.kinds:
            if kind == "attachment":  # found again with its page, or by the sweep
                continue
            params = {"status": "trashed", "sort": "-modified-date", "limit": MAX_LISTED}
            results, _ = await self._api.page(f"api/v2/{kind}s", params, None)
            with shaped(self._api.web.name):
                found += [str(json["id"]) for json in results if str(json["spaceId"]) in self._keys]
        return found

    async def below(self, id_: str, limit: int) -> Sequence[str] | None:
        return await found_below(self._api, id_, limit, attachments=self._options.attachments)

    async def readers(self, space: Space) -> Readers:
        people: list[Person] = []
        groups: list[str] = []
        async for json in self._api.every(f"api/v2/spaces/{space.id}/permissions", limit=MAX_LISTED):
            with shaped(self._api.web.name):
                operation, who = json["operation"], json["principal"]
                if (operation["key"], operation["targetType"]) != ("read", "space"):
                    continue
                if who["type"] == "user":
                    people.append(Person(str(who["id"])))
                elif who["type"] == "group":
                    groups.append(str(who["id"]))
        return Readers(people, groups)

    async def restriction(self, id_: str) -> Readers:
        return await all_readers(self._api, id_)

    async def restricted(self, space: Space, position: Position | None) -> tuple[Sequence[str], Position | None]:
        params = {"limit": MAX_IDS, "sort": "id", "status": "current"}
        kind = str((position or {}).get("kind", "page"))
        inner = (position or {}).get("next")
        results, following = await self._api.page(f"api/v2/spaces/{space.id}/{kind}s", params, inner)
        with shaped(self._api.web.name):
            found = [parsing.content_v2(json, cast("Kind", kind), space.key) for json in results]
        named = await Restrictions(self._api).own(found)
        if following is None and kind == "page" and "blogpost" in self._options.kinds:
            return named, {"kind": "blogpost"}
        return named, None if following is None else {"kind": kind, "next": following}

    async def members(self, group: str) -> Sequence[Person]:
        found = []
        async for json in self._api.every(f"rest/api/group/{safe(group)}/membersByGroupId", limit=200):
            with shaped(self._api.web.name):
                found.append(parsing.person(json))
        return found

    async def people(self, ids: Sequence[str], *, fresh: bool = False) -> Mapping[str, Person]:
        found: dict[str, Person] = {}
        for batch in batched(dict.fromkeys(ids), MAX_LISTED):
            answer = await self._api.post("api/v2/users-bulk", {"accountIds": list(batch)})
            with shaped(self._api.web.name):
                found |= {(one := parsing.person(json)).id: one for json in answer["results"]}
        return found
