"""Confluence Cloud: REST v2 for content, spaces and comments; v1 for search, restrictions, groups and downloads.

https://developer.atlassian.com/cloud/confluence/rest/v2/ and …/rest/v1/. Listings of pages are v2's and do not lag;
attachments and comments of a whole space can only be searched for. Cloud returns no inherited restrictions. One search
returns pages with their ancestors and the restrictions of all of them. But v1 omits what it does not know (folders,
whiteboards), and search may not know a page yet. So every step of a chain must be the parent that v2 names; where it is
not, the chain is read from v2 and the restrictions one at a time. What stays unknown is denied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from connectors.confluence import client
from connectors.confluence.client import (
    Api,
    Json,
    all_readers,
    batched,
    found_below,
    listing_size,
    myself,
    quoted,
    safe,
    shaped,
    wanted_spaces,
)
from connectors.confluence.model import (
    Changed,
    Content,
    Kind,
    Listing,
    Person,
    Position,
    Readers,
    Remark,
    Space,
    restriction_tag,
)
from connectors.confluence.options import ConfluenceOptions
from connectors.web import Denied, Missing

_OWN = "restrictions.read.restrictions.user,restrictions.read.restrictions.group"
_CHAIN = f"{_OWN},ancestors.restrictions.read.restrictions.user,ancestors.restrictions.read.restrictions.group"
MAX_IDS = 100
DEEPEST = 250
"""Ancestors that v2 shows at once; nothing is told of what lies above more."""


class Restrictions:
    """Good for one page of results: nothing of it is kept for the next."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._own: dict[str, bool | None] = {}
        """Content id → whether it has a view restriction of its own; None: that cannot be read."""
        self._above: dict[str, tuple[str, ...] | None] = {}
        """Parent id → ids from the top down to it."""

    async def of(self, pages: Sequence[Content]) -> Mapping[str, tuple[str, ...] | None]:
        """Required tags by id; None: they could not be read for certain."""
        chains = await self._shown([page.id for page in pages], _CHAIN)
        parents = {page.id: page.parent for page in pages}
        parents |= await self._parents({one for chain in chains.values() for one in chain} - set(parents))
        return {page.id: await self._required(page, chains.get(page.id), parents) for page in pages}

    async def own(self, pages: Sequence[Content]) -> Sequence[str]:
        """Of these pages, and of the folders above them, those with restrictions of their own."""
        await self._shown([page.id for page in pages], _OWN)
        asked = [page.id for page in pages]
        for page in pages:
            if page.parent and page.parent_kind != "page":
                asked += await self._chain_above(page) or ()
        return [one for one in dict.fromkeys(asked) if await self._is_restricted(one)]

    async def _shown(self, ids: Sequence[str], expand: str) -> dict[str, tuple[str, ...]]:
        """Page id → its ancestors as v1 shows them. Notes the restrictions that come along."""
        chains: dict[str, tuple[str, ...]] = {}
        for batch in batched(ids, MAX_IDS):
            some = self._api.every(
                "rest/api/content/search", cql=f"id in ({quoted(batch)})", expand=expand, limit=MAX_IDS
            )
            async for json in some:
                with shaped(self._api.web.name):
                    above = json.get("ancestors") or []
                    for one in [*above, json]:
                        if (restricted := client.is_restricted(one)) is not None:
                            self._own[str(one["id"])] = restricted
                    chains[str(json["id"])] = tuple(str(one["id"]) for one in above)
        return chains

    async def _parents(self, ids: set[str]) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for batch in batched(sorted(ids), MAX_IDS):
            async for json in self._api.every("api/v2/pages", id=",".join(batch), limit=DEEPEST):
                with shaped(self._api.web.name):
                    found[str(json["id"])] = str(json["parentId"]) if json.get("parentId") else None
        return found

    async def _required(
        self, page: Content, shown: tuple[str, ...] | None, parents: Mapping[str, str | None]
    ) -> tuple[str, ...] | None:
        above = shown if shown is not None and is_linked(page, shown, parents) else await self._chain_above(page)
        if above is None:
            return None
        found = []
        for one in (*above, page.id):
            restricted = await self._is_restricted(one)
            if restricted is None:
                return None
            if restricted:
                found.append(restriction_tag(one))
        return tuple(found)

    async def _chain_above(self, page: Content) -> tuple[str, ...] | None:
        """From v2, folders and all."""
        if page.parent is None:
            return ()
        if page.parent not in self._above:
            try:
                answer = await self._api.get(f"api/v2/{page.kind}s/{safe(page.id)}/ancestors", limit=DEEPEST)
            except (Missing, Denied) as error:
                if isinstance(error, Denied) and error.status == 401:
                    raise
                return None
            with shaped(self._api.web.name):
                found = tuple(str(one["id"]) for one in answer["results"])
            if len(found) >= DEEPEST or found[-1:] != (page.parent,):  # cut off, or moved since
                return None
            self._above[page.parent] = found
        return self._above[page.parent]

    async def _is_restricted(self, id_: str) -> bool | None:
        if id_ not in self._own:
            path = f"rest/api/content/{safe(id_)}/restriction/byOperation/read"
            try:
                answer = await self._api.get(path, expand="restrictions.user,restrictions.group", limit=1)
            except (Missing, Denied) as error:
                if isinstance(error, Denied) and error.status == 401:
                    raise
                self._own[id_] = None
            else:
                with shaped(self._api.web.name):
                    self._own[id_] = client.is_restricted({"restrictions": {"read": answer}})
        return self._own[id_]


def is_linked(page: Content, above: Sequence[str], parents: Mapping[str, str | None]) -> bool:
    """Whether the chain has no gap: each is the parent of the next, and the first has none."""
    expected = page.parent
    for one in reversed(above):
        if one != expected or one not in parents:
            return False
        expected = parents[one]
    return expected is None


MAX_LISTED = 250
MAX_COMMENTS = 2_000
"""Of one page. What comes after is left out: who discusses that long has another tool for it."""


async def of(api: Api, page: Content) -> list[Remark]:
    found: list[Remark] = []
    for where in ("footer-comments", "inline-comments"):
        waiting: list[tuple[str, str | None]] = [(f"api/v2/{page.kind}s/{safe(page.id)}/{where}", None)]
        while waiting and len(found) < MAX_COMMENTS:
            path, parent = waiting.pop(0)
            async for json in api.every(path, limit=MAX_LISTED, **{"body-format": "storage"}):
                with shaped(api.web.name):
                    remark = client.remark_v2(json, parent)
                found.append(remark)
                waiting.append((f"api/v2/{where}/{safe(remark.id)}/children", remark.id))
    return found


"""Ids in one request: v2 takes 250, but they stand in an address of limited length."""
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
            found = [client.content_v2(json, kind, space.key) for json in results]
        found = await self._with_access(found)
        return Listing(await self._with_remarks(found, full=full), following)

    async def _attachments(self, space: Space, position: Position | None) -> Listing:
        """By search: v2 lists those of one page or of the whole site."""
        results, following = await self._search(
            f'type = attachment and space = "{space.key}" order by created asc', position
        )
        with shaped(self._api.web.name):
            found = [client.content_v1(json, space.key) for json in results]
        return Listing(await self._within(found), following)

    async def _search(
        self, cql: str, position: Position | None = None, expand: str = "version,container,space,history"
    ) -> tuple[Sequence[Json], Position | None]:
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
                if json["status"] == "current" and client.container_v2(json):
                    attached.append(client.attachment_v2(json, ""))
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
                            found.append(client.content_v2(json, cast("Kind", kind), key))
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
                    marks.setdefault(str(json["container"]["id"]), []).append(client.remark_v1(json))
        if full:
            asked = [one for one in found if certain or one.id in marks]
            marks = {one.id: await of(self._api, one) for one in asked}
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
                    found.append(client.changed_v1(json))
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
            found = [client.content_v2(json, cast("Kind", kind), space.key) for json in results]
        named = await Restrictions(self._api).own(found)
        if following is None and kind == "page" and "blogpost" in self._options.kinds:
            return named, {"kind": "blogpost"}
        return named, None if following is None else {"kind": kind, "next": following}

    async def members(self, group: str) -> Sequence[Person]:
        found = []
        async for json in self._api.every(f"rest/api/group/{safe(group)}/membersByGroupId", limit=200):
            with shaped(self._api.web.name):
                found.append(client.person(json))
        return found

    async def people(self, ids: Sequence[str], *, fresh: bool = False) -> Mapping[str, Person]:
        found: dict[str, Person] = {}
        for batch in batched(dict.fromkeys(ids), MAX_LISTED):
            answer = await self._api.post("api/v2/users-bulk", {"accountIds": list(batch)})
            with shaped(self._api.web.name):
                found |= {(one := client.person(json)).id: one for json in answer["results"]}
        return found
