"""Confluence Data Center (9.1 and later, for the permissions of spaces): REST v1.

https://developer.atlassian.com/server/confluence/rest/. One listing returns pages with their ancestors' restrictions,
comments and attachments.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from connectors.atlassian import Person
from connectors.confluence import client
from connectors.confluence.client import (
    RESTRICTIONS,
    SMALLER,
    Api,
    Json,
    current_user,
    descendant_ids,
    listing_size,
    missing_spaces,
    path_segment,
    restriction_readers,
    search_changes,
    selected_spaces,
)
from connectors.confluence.content import MAX_STORAGE_CHARACTERS
from connectors.confluence.model import Change, Content, Kind, Listing, Position, Readers, Space
from connectors.confluence.options import ConfluenceOptions
from connectors.set_aside import each, may_be_set_aside, name_of, read_accounts, reading_data
from connectors.web import Answered, Denied, Missing, Rejected, ServerFailed, TooLarge
from pipeline.core.errors import PenstockError
from pipeline.runtime.tasks import gather_or_cancel

_ACCESS = f"ancestors,{RESTRICTIONS},{','.join(f'ancestors.{field}' for field in RESTRICTIONS.split(','))}"
_COMMENT_FIELDS = "version,ancestors,extensions.inlineProperties,history"
_PLAIN = f"version,history,{_ACCESS}"
OVERLAP_RESULTS = 5
"""Each page of a listing repeats this many results of the previous one, because removing content moves the rest up."""
MAX_LISTED, MAX_BODIES = 200, 50
"""Results in one response with expansions, and with bodies (confluence.atlassian.com: “limits results to 50”)."""
MAX_CONCURRENT_REQUESTS = 4
CONTENT = "rest/api/content"
SCAN = "scan"
"""Key of a position in ``/content/scan``; a position without it is one in ``/content``."""


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
        parts = ["version", "space", "history", "metadata.labels", _ACCESS]
        parts += ["body.storage"] if full else []
        if self._options.comments:
            inner = f"{_COMMENT_FIELDS},body.storage" if full else "version"
            parts += [f"descendants.comment.{field}" for field in inner.split(",")]
        if self._options.attachments:
            parts += [f"children.attachment.{field}" for field in ("version", "history", "container")]
        return ",".join(parts)

    async def listing(self, space: Space, kind: Kind, position: Position | None, *, full: bool) -> Listing:
        size = listing_size(self._options.page_size, most=MAX_BODIES if full else MAX_LISTED)
        known = set((position or {}).get("last", ()))
        results, following, failed = await self._contents(space, kind, position, size, self._expand(full=full))
        contents: list[Content] = []
        for number, json in enumerate(results, 1):
            id_ = name_of(json, client.id_in, number)
            if id_ in known:
                continue
            try:
                contents += await self._with_attachments(json, space.key, full=full)
            except PenstockError as error:
                if not may_be_set_aside(error):
                    raise
                failed[id_] = error
        last = [name_of(json, client.id_in) for json in results][-OVERLAP_RESULTS:]
        return Listing(contents, None if following is None else {**following, "last": last}, failed)

    async def _contents(
        self, space: Space, kind: str, position: Position | None, size: int, expand: str
    ) -> tuple[Sequence[Json], Position | None, dict[str, PenstockError]]:
        """Return one page of a space's pages or blog posts, the next position, and the error of a content that no
        response can contain.

        Where ``/content`` is blocked, as many administrators do because it is slow (CONFSERVER-57639), or
        ends before the last page, ``/content/scan`` (Confluence 7.18 and later) lists the space from its beginning.
        """
        params = {"spaceKey": space.key, "type": kind, "status": "current", "limit": size, "expand": expand}
        at = position or {}
        if SCAN in at:
            return *await self._scan(params, str(at[SCAN])), {}
        start = int(at.get("start", 0))
        try:
            return *await self._by_start(params, start), {}
        except PenstockError as error:
            if not may_be_set_aside(error):
                raise
            failure = error
        if isinstance(failure, ServerFailed):  # the single content at ``start`` was the smallest request
            with suppress(ServerFailed, Answered):
                page = await self._api.page(CONTENT, {**params, "limit": 1}, {"start": start + 1}, shrinks=False)
                return *page, {f"number {start + 1} of its {kind}s": failure}
        with suppress(ServerFailed, Answered):
            return *await self._scan(params, ""), {}
        raise failure

    async def _by_start(self, params: Mapping[str, Any], start: int) -> tuple[Sequence[Json], Position | None]:
        overlap = min(OVERLAP_RESULTS, params["limit"] // 4, start)
        try:
            results, following = await self._api.page(CONTENT, params, {"start": start - overlap}, shrinks=False)
            if following is None or following["start"] > start:
                return results, following
            # The server permits so few results that none is new.
            return await self._api.page(CONTENT, params, {"start": start}, shrinks=False)
        except (ServerFailed, TooLarge):
            return await self._api.page(
                CONTENT, {**params, "limit": max(1, params["limit"] // SMALLER)}, {"start": start}
            )

    async def _scan(self, params: Mapping[str, Any], cursor: str) -> tuple[Sequence[Json], Position | None]:
        results, following = await self._api.page(f"{CONTENT}/scan", params, {"cursor": cursor} if cursor else None)
        return results, None if following is None else {SCAN: following["cursor"]}

    async def _with_attachments(self, json: Json, space: str, *, full: bool) -> list[Content]:
        """Return a page and its attachments, which have the page's access."""
        with reading_data():
            page = replace(client.content_v1(json, space), required_tags=client.required_tags(json))
            self._people |= {account.id: account for account in client.people_in(json)}
        if self._options.comments:
            more = _COMMENT_FIELDS + (",body.storage" if full else "") if full else "version"
            comments = await self._nested_results(json.get("descendants"), page.id, "descendant/comment", more)
            with reading_data():
                page = replace(page, comments=tuple(client.comment_v1(comment) for comment in comments))
                self._people |= {account.id: account for comment in comments for account in client.people_in(comment)}
        contents = [page]
        if self._options.attachments:
            attached = await self._nested_results(
                json.get("children"), page.id, "child/attachment", "version,history,container"
            )
            with reading_data():
                attachments = [client.content_v1(attachment, space) for attachment in attached]
            contents += [
                replace(attachment, container=page.id, required_tags=page.required_tags) for attachment in attachments
            ]
        return contents

    async def _nested_results(self, expanded: Any, page: str, path: str, expand: str) -> list[Json]:
        """Return the comments or attachments of a page, without texts once they are more than a document can hold. The
        response about the page holds only the first of them; if there are more, the whole listing is read."""
        with reading_data():
            first = expanded[path.rpartition("/")[2]]
            results = list(first["results"])
            if not first.get("_links", {}).get("next") and len(results) < int(first.get("limit", 25)):
                return results
        address = f"rest/api/content/{path_segment(page)}/{path}"
        depth = {"depth": "all"} if path.startswith("descendant") else {}
        results, length = list[Json](), 0
        async for result in self._api.all_results(address, expand=expand, limit=MAX_LISTED, **depth):
            with reading_data():
                results.append({**result, "body": None} if length > MAX_STORAGE_CHARACTERS else result)
                length += len(client.text_of_comment(result))
        return results

    async def get(self, ids: Sequence[str], *, bodies: bool = True) -> Sequence[Content]:
        if not self._spaces:
            await self.spaces()
        gate = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        batches = await gather_or_cancel(*(self._read_current(id_, gate, bodies=bodies) for id_ in ids))
        return [content for batch in batches for content in batch]

    async def _read_current(self, id_: str, gate: asyncio.Semaphore, *, bodies: bool) -> Sequence[Content]:
        if id_.isdigit():
            json = await self._current_json(id_, self._expand(full=True) if bodies else f"space,{_PLAIN}", gate)
            if json is None or json.get("type") not in self._options.kinds:
                return ()
            with reading_data():
                key = self._space_read(json)
                if key is not None and not bodies:
                    return [replace(client.content_v1(json, key), required_tags=client.required_tags(json))]
            return (
                []
                if key is None
                else [content for content in await self._with_attachments(json, key, full=True) if content.id == id_]
            )
        if not self._options.attachments:
            return ()
        json = await self._current_json(id_, "version,history,container,space", gate)
        if json is None or json.get("type") != "attachment":
            return ()
        with reading_data():
            container = str(json["container"]["id"])
        page = await self._current_json(container, f"space,{_ACCESS}", gate)
        if page is None or page.get("type") not in self._options.kinds:
            return ()
        with reading_data():
            key = self._space_read(page)
            if key is None:
                return ()
            attached = client.content_v1(json, key)
        return [replace(attached, container=container, required_tags=client.required_tags(page))]

    def _space_read(self, json: Json) -> str | None:
        """Return the key of a page's space; empty for one that the settings name and the account does not list; None
        for one that is not read."""
        key = str(json["space"]["key"])
        if key in self._spaces:
            return key
        return "" if key in missing_spaces(self._options, self._spaces) else None

    async def _current_json(self, id_: str, expand: str, gate: asyncio.Semaphore) -> Json | None:
        """Read a content; None: it does not exist, or is not current."""
        async with gate:
            try:
                json = await self._api.get(f"rest/api/content/{path_segment(id_)}", expand=expand)
            except Missing:
                return None
        with reading_data():
            return cast("Json", json) if json["status"] == "current" else None

    async def recent_changes(self, minutes: int) -> Sequence[Change]:
        def search(cql: str) -> AsyncIterator[Json]:
            return self._api.all_results(
                "rest/api/content/search", cql=cql, expand="version,container,space", limit=MAX_LISTED
            )

        return await search_changes(self._api, search, await self.spaces(), minutes)

    async def trashed(self) -> Sequence[str]:
        ids: list[str] = []
        for kind in self.kinds():
            params = {"status": "trashed", "type": kind, "limit": MAX_LISTED, "expand": "space"}
            results, _ = await self._api.page(CONTENT, params, None)
            trashed, _ = each(results, lambda json: (str(json["id"]), str(json["space"]["key"])), client.id_in)
            ids += [id_ for id_, space in trashed if space in self._spaces]
        return ids

    async def descendants(self, id_: str, limit: int) -> Sequence[str] | None:
        return await descendant_ids(self._api, id_, limit, attachments=self._options.attachments)

    async def readers(self, space: Space) -> Readers:
        """Return who may view a space. Raises Missing before Confluence 9.1, which lacks this resource."""
        path = f"rest/api/space/{path_segment(space.key)}/permissions"
        people: list[Person] = []
        groups: list[str] = []
        anonymous = False
        for subject in self._viewing(await self._api.get(path)):
            with reading_data():
                kind = str(subject["type"])
                if kind == "user":
                    people.append(Person(str(subject["userKey"])))
                elif kind == "group":
                    groups.append(str(subject["name"]))
                else:
                    anonymous |= kind == "anonymous"
        if self._options.anonymous_tag and not anonymous:  # not all releases list anonymous visitors among the others
            try:
                anonymous = bool(self._viewing(await self._api.get(f"{path}/anonymous")))
            except (Missing, Rejected, Denied) as error:
                if error.status == 401:
                    raise
        return Readers(people, groups, anonymous)

    def _viewing(self, answer: Any) -> list[Mapping[str, Any]]:
        """Return the subjects that have the permission to view a space."""
        with reading_data():
            return [
                json["subject"]
                for json in (answer["results"] if isinstance(answer, Mapping) else answer)
                if (json["operation"]["operationKey"], json["operation"]["targetType"]) == ("read", "space")
            ]

    async def restriction(self, id_: str) -> Readers:
        return await restriction_readers(self._api, id_)

    async def restrictions(
        self, space: Space, position: Position | None
    ) -> tuple[Mapping[str, Readers | None], Position | None]:
        kind = str((position or {}).get("kind", "page"))
        inner = (position or {}).get("next")
        results, following, failed = await self._contents(space, kind, inner, MAX_LISTED, RESTRICTIONS)
        if failed:
            raise next(iter(failed.values()))
        # What cannot be read has no holders: its documents are closed until it can.
        restricted, _ = each(
            results,
            lambda json: (str(json["id"]), client.is_restricted(json), client.included_readers(json)),
            client.id_in,
        )
        named = {id_: readers for id_, is_restricted, readers in restricted if is_restricted is not False}
        if following is None and kind == "page" and "blogpost" in self._options.kinds:
            return named, {"kind": "blogpost"}
        return named, None if following is None else {"kind": kind, "next": following}

    async def members(self, group: str) -> Sequence[Person]:
        rows = self._api.all_results(f"rest/api/group/{path_segment(group)}/member", limit=MAX_LISTED)
        return await read_accounts(rows, client.person)

    async def people(self, ids: Sequence[str], *, fresh: bool = False) -> Mapping[str, Person]:
        """Return people by user key. The API returns one person for each request."""
        people: dict[str, Person] = {}
        for key in dict.fromkeys(ids):
            if fresh or key not in self._people:
                try:
                    json = await self._api.get("rest/api/user", key=key)
                except Missing:
                    continue
                with reading_data():
                    self._people[key] = client.person(json)
            people[key] = self._people[key]
        return people
