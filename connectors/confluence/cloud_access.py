"""Which view restrictions stand on the way down to a page: Cloud tells of no inherited ones.

One search shows pages with their ancestors and the restrictions of all of them. But v1 leaves out what it does not
know (folders, whiteboards), and search may not know a page yet. So every step of a chain must be the parent that v2
names; where it is not, the chain is read from v2 and the restrictions one by one. What stays unknown is denied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from connectors.confluence import parsing
from connectors.confluence.api import Api, batched, quoted, safe, shaped
from connectors.confluence.model import Content, restriction_tag
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
                        if (restricted := parsing.is_restricted(one)) is not None:
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
                    self._own[id_] = parsing.is_restricted({"restrictions": {"read": answer}})
        return self._own[id_]


def is_linked(page: Content, above: Sequence[str], parents: Mapping[str, str | None]) -> bool:
    """Whether the chain has no gap: each is the parent of the next, and the first has none."""
    expected = page.parent
    for one in reversed(above):
        if one != expected or one not in parents:
            return False
        expected = parents[one]
    return expected is None
