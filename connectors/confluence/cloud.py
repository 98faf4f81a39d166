"""Confluence Cloud: REST v2 for content, spaces and comments; v1 for search, restrictions, groups and downloads.

https://developer.atlassian.com/cloud/confluence/rest/v2/ and …/rest/v1/. Listings of pages come from v2 and do not lag;
attachments and comments of a whole space can only be searched for. Cloud returns no inherited restrictions. One search
returns pages with their ancestors and the restrictions of all of them. But v1 omits what it does not know (folders,
whiteboards), and search may not know a page yet. So each step of a chain of ancestors must be the parent that v2 names;
where it is not, the chain is read from v2 and the restrictions one at a time. Access that stays unknown is denied.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from connectors.atlassian import Person
from connectors.confluence import client
from connectors.confluence.client import (
    RESTRICTIONS,
    Api,
    Json,
    batched,
    cql_list,
    current_user,
    descendant_ids,
    listing_size,
    missing_spaces,
    parsing,
    path_segment,
    restriction_readers,
    search_changes,
    selected_spaces,
)
from connectors.confluence.content import MAX_STORAGE_CHARACTERS
from connectors.confluence.model import (
    Change,
    Comment,
    Content,
    Kind,
    Listing,
    Position,
    Readers,
    Space,
    restriction_tag,
)
from connectors.confluence.options import ConfluenceOptions
from connectors.errors import BadData
from connectors.set_aside import (
    Failures,
    each,
    may_be_set_aside,
    name_of,
    read_accounts,
    read_isolated,
    reading_data,
)
from connectors.web import Denied, Missing, Rejected
from pipeline.core.errors import PenstockError
from pipeline.runtime.tasks import gather_or_cancel

_ANCESTOR_RESTRICTIONS = (
    f"{RESTRICTIONS},ancestors.restrictions.read.restrictions.user,ancestors.restrictions.read.restrictions.group"
)
_LABELS = "metadata.labels"
MAX_IDS = 100
"""Ids in one request: v2 accepts 250, but they are part of a URL of limited length."""
MAX_LISTED = 250
"""Results that v2 returns at most in one response."""
VIEWING = "read/space"
"""The permission, among those of a role, by which its holders may view a space."""
LICENSED = frozenset({"all-licensed-users", "authenticated-users", "anonymous-users"})
"""Access classes that contain all users with a licence."""
MAX_ANCESTORS = 250
"""Ancestors that v2 returns at most; it leaves out the ones above them."""
MAX_REQUESTED_SINGLY = 10
"""Pages whose comments are requested one by one, at two requests each, when they are fetched. With more of them at
once search says which have comments, as in a listing; a comment that it does not know yet arrives with a later poll."""
MAX_COMMENTS = 2_000
"""Comments that are read for one page; later ones are left out."""


class Restrictions:
    """View restrictions for one page of results. They are never reused for the next, because they may change."""

    def __init__(self, api: Api, failures: Failures) -> None:
        """failures: of the requests for restrictions and ancestors, over all pages of results."""
        self._api = api
        self._failures = failures
        self._restricted: dict[str, bool | None] = {}
        """Content id → whether it has a view restriction of its own, or None if that cannot be read."""
        self._readers: dict[str, Readers | None] = {}
        """Content id → whom its own restriction names, as far as a response includes all of them."""
        self._ancestors: dict[str, tuple[str, ...] | None] = {}
        """Parent id → the ids from the root of the tree to it."""
        self.labels: dict[str, tuple[str, ...]] = {}
        """Content id → its labels, of the pages that search knows."""

    async def required_tags(self, pages: Sequence[Content]) -> Mapping[str, tuple[str, ...] | None]:
        """Return the required tags by id; None: they could not be read for certain."""
        chains = await self._ancestors_by_search([page.id for page in pages], f"{_ANCESTOR_RESTRICTIONS},{_LABELS}")
        parents = {page.id: page.parent for page in pages}
        parents |= await self._parents({id_ for chain in chains.values() for id_ in chain} - set(parents))
        return {page.id: await self._required_tags(page, chains.get(page.id), parents) for page in pages}

    async def readers(self, pages: Sequence[Content]) -> Mapping[str, Readers | None]:
        """Return the ids, among these pages and the folders above them, that have restrictions of their own, with whom
        these name; None: that has to be requested."""
        await self._ancestors_by_search([page.id for page in pages], RESTRICTIONS)
        ids = [page.id for page in pages]
        for page in pages:
            if page.parent and page.parent_kind != "page":
                ids += await self._read_ancestors(page) or ()
        return {id_: self._readers.get(id_) for id_ in dict.fromkeys(ids) if await self._is_restricted(id_)}

    async def _ancestors_by_search(self, ids: Sequence[str], expand: str) -> dict[str, tuple[str, ...]]:
        """Return each page's ancestors as v1 knows them, and record the restrictions and labels that are returned with
        them."""
        chains: dict[str, tuple[str, ...]] = {}

        async def search(batch: Sequence[str]) -> Sequence[None]:
            results = self._api.all_results(
                "rest/api/content/search", cql=f"id in ({cql_list(batch)})", expand=expand, limit=MAX_IDS
            )
            async for json in results:
                with reading_data():
                    above = json.get("ancestors") or []
                    for content in [*above, json]:
                        if (restricted := client.is_restricted(content)) is not None:
                            self._restricted[str(content["id"])] = restricted
                            self._readers[str(content["id"])] = client.included_readers(content)
                    chains[str(json["id"])] = tuple(str(content["id"]) for content in above)
                    self.labels[str(json["id"])] = client.labels(json)
            return ()

        # One page with an ancestor that cannot be read (a draft, or trashed) is answered with 404 for all of them
        # (CONFCLOUD-76424, CONFCLOUD-77618). Pages that fail by themselves have no chain: it is read from v2.
        await gather_or_cancel(*(read_isolated(batch, search) for batch in batched(ids, MAX_IDS)))
        return chains

    async def _parents(self, ids: set[str]) -> dict[str, str | None]:
        parents: dict[str, str | None] = {}

        async def read(batch: Sequence[str]) -> None:
            async for json in self._api.all_results("api/v2/pages", id=",".join(batch), limit=MAX_ANCESTORS):
                with suppress(BadData), reading_data():  # without it the chain is read from v2
                    parents[str(json["id"])] = str(json["parentId"]) if json.get("parentId") else None

        await gather_or_cancel(*(read(batch) for batch in batched(sorted(ids), MAX_IDS)))
        return parents

    async def _required_tags(
        self, page: Content, shown: tuple[str, ...] | None, parents: Mapping[str, str | None]
    ) -> tuple[str, ...] | None:
        above = (
            shown if shown is not None and is_complete_chain(page, shown, parents) else await self._read_ancestors(page)
        )
        if above is None:
            return None
        tags = []
        for id_ in (*above, page.id):
            restricted = await self._is_restricted(id_)
            if restricted is None:
                return None
            if restricted:
                tags.append(restriction_tag(id_))
        return tuple(tags)

    async def _read_ancestors(self, page: Content) -> tuple[str, ...] | None:
        """Read a page's ancestors, folders included, from v2. None: they cannot be read for certain."""
        if page.parent is None:
            return ()
        if page.parent not in self._ancestors:
            try:
                answer = await self._api.get(
                    f"api/v2/{page.kind}s/{path_segment(page.id)}/ancestors", limit=MAX_ANCESTORS
                )
                with reading_data():
                    ancestors = tuple(str(ancestor["id"]) for ancestor in answer["results"])
            except PenstockError as error:
                if not may_be_set_aside(error) or not self._failures.fail(f"ancestors {page.id}", error):
                    raise
                return None
            self._failures.succeed(f"ancestors {page.id}")
            if len(ancestors) >= MAX_ANCESTORS or ancestors[-1:] != (page.parent,):  # truncated, or moved meanwhile
                return None
            self._ancestors[page.parent] = ancestors
        return self._ancestors[page.parent]

    async def _is_restricted(self, id_: str) -> bool | None:
        if id_ not in self._restricted:
            path = f"rest/api/content/{path_segment(id_)}/restriction/byOperation/read"
            try:
                answer = await self._api.get(path, expand="restrictions.user,restrictions.group", limit=1)
                with reading_data():
                    is_restricted = client.is_restricted({"restrictions": {"read": answer}})
            except PenstockError as error:
                if not may_be_set_aside(error) or not self._failures.fail(f"restriction {id_}", error):
                    raise
                self._restricted[id_] = None
            else:
                self._failures.succeed(f"restriction {id_}")
                self._restricted[id_] = is_restricted
        return self._restricted[id_]


def is_complete_chain(page: Content, above: Sequence[str], parents: Mapping[str, str | None]) -> bool:
    """True when each ancestor is the parent of the next, the last is the page's parent, and the first has none."""
    expected = page.parent
    for id_ in reversed(above):
        if id_ != expected or id_ not in parents:
            return False
        expected = parents[id_]
    return expected is None


def _others(comments: Iterable[Comment], read: Iterable[Comment]) -> list[Comment]:
    """Return the comments that were not read, for the revision of their page: a listing knows them, and the page would
    be read again with each sweep."""
    ids = {comment.id for comment in read}
    return [replace(comment, body="", author="") for comment in comments if comment.id not in ids]


async def page_comments(api: Api, page: Content) -> list[Comment]:
    """Read at most MAX_COMMENTS comments of a page, with replies; without texts where no document can hold them."""
    comments: list[Comment] = []
    length = 0
    for kind in ("footer-comments", "inline-comments"):
        pending: list[tuple[str, str | None]] = [(f"api/v2/{page.kind}s/{path_segment(page.id)}/{kind}", None)]
        while pending and len(comments) < MAX_COMMENTS:
            path, parent = pending.pop(0)
            async for json in api.all_results(path, limit=MAX_LISTED, **{"body-format": "storage"}):
                with reading_data():
                    comment = client.comment_v2(json, parent)
                comments.append(replace(comment, body="") if length > MAX_STORAGE_CHARACTERS else comment)
                length += len(comment.body)
                if len(comments) >= MAX_COMMENTS:
                    return comments
                pending.append((f"api/v2/{kind}/{path_segment(comment.id)}/children", comment.id))
    return comments


class Cloud:
    """A site of Confluence Cloud."""

    def __init__(self, api: Api, options: ConfluenceOptions) -> None:
        self._api = api
        self._options = options
        self._keys: dict[str, str] = {}
        """Space id → key, for the spaces to read."""
        self._failures = Failures()

    async def close(self) -> None:
        await self._api.web.close()

    async def me(self) -> Person:
        return await current_user(self._api)

    async def spaces(self) -> Mapping[str, Space]:
        spaces = await selected_spaces(
            self._api, self._options, "api/v2/spaces", limit=MAX_LISTED, named={"keys": ",".join(self._options.spaces)}
        )
        self._keys = {space.id: space.key for space in spaces.values()}
        return spaces

    def kinds(self) -> Sequence[Kind]:
        return self._options.kinds

    async def listing(self, space: Space, kind: Kind, position: Position | None, *, full: bool) -> Listing:
        if kind == "attachment":
            return await self._attachments(space, position)
        size = listing_size(self._options.page_size, most=self._options.page_size if full else MAX_LISTED)
        params: dict[str, Any] = {"limit": size, "sort": "id", "status": "current"}
        if full:
            params["body-format"] = "storage"
        results, following = await self._api.page(f"api/v2/spaces/{space.id}/{kind}s", params, position)
        contents, unreadable = each(results, lambda json: client.content_v2(json, kind, space.key), client.id_in)
        failed: dict[str, PenstockError] = {**unreadable}
        accessed, commented = await gather_or_cancel(
            self._with_access(contents), self._with_comments(contents, full=full, failed=failed)
        )
        comments = {page.id: page.comments for page in commented}
        pages = [replace(page, comments=comments[page.id]) for page in accessed if page.id in comments]
        return Listing(pages, following, failed)

    async def _attachments(self, space: Space, position: Position | None) -> Listing:
        """List a space's attachments by search, since v2 lists only those of one page or of the whole site."""
        results, following = await self._search(
            f'type = attachment and space = "{space.key}" order by created asc', position
        )
        attachments, unreadable = each(results, lambda json: client.content_v1(json, space.key), client.id_in)
        failed: dict[str, PenstockError] = {**unreadable}
        return Listing(await self._with_page_access(attachments, failed), following, failed)

    async def _search(
        self, cql: str, position: Position | None = None, expand: str = "version,container,space,history"
    ) -> tuple[Sequence[Json], Position | None]:
        params = {"cql": cql, "expand": expand, "limit": min(self._options.page_size, MAX_IDS)}
        return await self._api.page("rest/api/content/search", params, position)

    def _search_each(self, cql: str) -> AsyncIterator[Json]:
        return self._api.all_results(
            "rest/api/content/search", cql=cql, expand="version,container,space", limit=MAX_IDS
        )

    async def get(self, ids: Sequence[str], *, bodies: bool = True) -> Sequence[Content]:
        pages = await self._with_access(await self._current_pages([id_ for id_ in ids if id_.isdigit()], bodies=bodies))
        if bodies:
            pages = await self._with_comments(pages, full=True, certain=len(pages) <= MAX_REQUESTED_SINGLY)
        attachments: list[Content] = []
        for id_ in ids:
            if id_.isdigit() or not self._options.attachments:
                continue
            try:
                json = await self._api.get(f"api/v2/attachments/{path_segment(id_)}")
            except Missing:
                continue
            with reading_data():
                if json["status"] == "current" and client.container_v2(json):
                    attachments.append(client.attachment_v2(json, ""))
        return [*pages, *await self._with_page_access(attachments)]

    async def _current_pages(
        self, ids: Sequence[str], *, bodies: bool, failed: dict[str, PenstockError] | None = None
    ) -> list[Content]:
        """Read the current pages and blog posts with these ids in the spaces to read. failed: receives the errors of
        those whose data cannot be read; None raises them."""
        if not self._keys:
            await self.spaces()
        contents: list[Content] = []
        body = {"body-format": "storage"} if bodies else {}
        for batch in batched(ids, MAX_IDS):
            remaining = list(batch)
            for kind in ("page", "blogpost"):
                if not remaining or kind not in self._options.kinds:
                    continue
                results = self._api.all_results(
                    f"api/v2/{kind}s", id=",".join(remaining), status="current", limit=MAX_LISTED, **body
                )
                async for json in results:
                    try:
                        with reading_data():
                            remaining.remove(str(json["id"]))
                            key = self._keys.get(str(json["spaceId"]))
                            if key or missing_spaces(self._options, self._keys.values()):
                                contents.append(client.content_v2(json, cast("Kind", kind), key or ""))
                    except BadData as error:
                        if failed is None:
                            raise
                        failed[name_of(json, client.id_in)] = error
        return contents

    async def _with_access(self, contents: Sequence[Content]) -> list[Content]:
        """Return the contents with their access, and with the labels that the same requests return."""
        restrictions = Restrictions(self._api, self._failures)
        required_tags = await restrictions.required_tags(contents)
        return [
            replace(content, required_tags=required_tags[content.id], labels=restrictions.labels.get(content.id, ()))
            for content in contents
        ]

    async def _with_page_access(
        self, attachments: Sequence[Content], failed: dict[str, PenstockError] | None = None
    ) -> list[Content]:
        """Return the attachments whose pages are current and in the spaces to read, with their page's access. failed:
        receives the errors of those whose page's data cannot be read; None raises them."""
        unreadable: dict[str, PenstockError] | None = None if failed is None else {}
        containers = await self._current_pages(
            sorted({attachment.container for attachment in attachments if attachment.container}),
            bodies=False,
            failed=unreadable,
        )
        if failed is not None and unreadable:
            of_page = {item.id: unreadable.get(item.container or "") for item in attachments}
            failed.update({id_: error for id_, error in of_page.items() if error is not None})
        pages = {page.id: page for page in await self._with_access(containers)}
        return [
            replace(attachment, space=page.space, required_tags=page.required_tags)
            for attachment in attachments
            if (page := pages.get(attachment.container or ""))
        ]

    async def _with_comments(
        self,
        contents: Sequence[Content],
        *,
        full: bool,
        certain: bool = False,
        failed: dict[str, PenstockError] | None = None,
    ) -> list[Content]:
        """Add comments. With ``certain`` every page is asked for them, otherwise only pages for which search reports
        some. failed: receives the errors of pages whose comments' data cannot be read, which are left out; None raises
        them."""
        if not self._options.comments or not contents:
            return list(contents)
        comments: dict[str, list[Comment]] = {}
        errors: dict[str, PenstockError] = {}

        async def search(batch: Sequence[str]) -> None:
            async for json in self._search_each(f"type = comment and container in ({cql_list(batch)})"):
                page = name_of(json, lambda json: json["container"]["id"])
                try:
                    with reading_data():
                        comments.setdefault(page, []).append(client.comment_v1(json))
                except BadData as error:
                    errors[page] = error

        if not certain:
            ids = [content.id for content in contents]
            await gather_or_cancel(*(search(batch) for batch in batched(ids, MAX_IDS)))
        if full:
            for content in [content for content in contents if certain or content.id in comments]:
                try:
                    read = await page_comments(self._api, content)
                except BadData as error:
                    errors[content.id] = error
                    continue
                if len(read) >= MAX_COMMENTS:
                    if certain:
                        await search([content.id])
                    read += _others(comments.get(content.id, ()), read)
                comments[content.id] = read
        if errors and failed is None:
            raise next(iter(errors.values()))
        (failed if failed is not None else {}).update(errors)
        return [
            replace(content, comments=tuple(comments.get(content.id, ())))
            for content in contents
            if content.id not in errors
        ]

    async def recent_changes(self, minutes: int) -> Sequence[Change]:
        return await search_changes(self._api, self._search_each, await self.spaces(), minutes)

    async def trashed(self) -> Sequence[str]:
        ids: list[str] = []
        for kind in self._options.kinds:
            if kind == "attachment":  # read again with its page, or by the sweep
                continue
            params = {"status": "trashed", "sort": "-modified-date", "limit": MAX_LISTED}
            results, _ = await self._api.page(f"api/v2/{kind}s", params, None)
            trashed, _ = each(results, lambda json: (str(json["id"]), str(json["spaceId"])), client.id_in)
            ids += [id_ for id_, space in trashed if space in self._keys]
        return ids

    async def descendants(self, id_: str, limit: int) -> Sequence[str] | None:
        return await descendant_ids(self._api, id_, limit, attachments=self._options.attachments)

    async def readers(self, space: Space) -> Readers:
        """Return who may view a space: by its permissions, and by roles, where the site has them."""
        people, groups, licensed = await self._readers_by_role(space)
        async for json in self._api.all_results(f"api/v2/spaces/{space.id}/permissions", limit=MAX_LISTED):
            with reading_data():
                operation, principal = json["operation"], json["principal"]
                if (operation["key"], operation["targetType"]) != ("read", "space"):
                    continue
                if principal["type"] == "user":
                    people.append(Person(str(principal["id"])))
                elif principal["type"] == "group":
                    groups.append(str(principal["id"]))
        return Readers(people, groups, licensed=licensed)

    async def _readers_by_role(self, space: Space) -> tuple[list[Person], list[str], bool]:
        """Return the people and groups that hold a role with the permission to view the space, and whether all licensed
        users do. A role that is not known grants nothing, and a site without roles (it refuses the request) has none.

        https://developer.atlassian.com/cloud/confluence/rest/v2/api-group-space-roles
        """
        people: list[Person] = []
        groups: list[str] = []
        licensed = False
        try:
            path = f"api/v2/spaces/{space.id}/role-assignments"
            assignments = [json async for json in self._api.all_results(path, limit=MAX_LISTED)]
            path = "api/v2/space-roles"
            roles = [json async for json in self._api.all_results(path, limit=MAX_LISTED)] if assignments else []
        except (Missing, Rejected, Denied) as error:
            if error.status == 401:
                raise
            return people, groups, licensed
        with reading_data():
            reading = {str(role["id"]) for role in roles if VIEWING in role["spacePermissions"]}
            for assignment in assignments:
                principal = assignment["principal"]
                if str(assignment["roleId"]) not in reading:
                    continue
                match principal["principalType"]:
                    case "USER":
                        people.append(Person(str(principal["principalId"])))
                    case "GROUP":
                        groups.append(str(principal["principalId"]))
                    case "ACCESS_CLASS":
                        licensed |= principal["principalId"] in LICENSED
        return people, groups, licensed

    async def restriction(self, id_: str) -> Readers:
        return await restriction_readers(self._api, id_)

    async def restrictions(
        self, space: Space, position: Position | None
    ) -> tuple[Mapping[str, Readers | None], Position | None]:
        params = {"limit": MAX_IDS, "sort": "id", "status": "current"}
        kind = str((position or {}).get("kind", "page"))
        inner = (position or {}).get("next")
        results, following = await self._api.page(f"api/v2/spaces/{space.id}/{kind}s", params, inner)
        # What cannot be read has no holders: its documents are closed until it can.
        contents, _ = each(results, lambda json: client.content_v2(json, cast("Kind", kind), space.key), client.id_in)
        named = await Restrictions(self._api, self._failures).readers(contents)
        if following is None and kind == "page" and "blogpost" in self._options.kinds:
            return named, {"kind": "blogpost"}
        return named, None if following is None else {"kind": kind, "next": following}

    async def members(self, group: str) -> Sequence[Person]:
        rows = self._api.all_results(f"rest/api/group/{path_segment(group)}/membersByGroupId", limit=200)
        return await read_accounts(rows, client.person)

    async def people(self, ids: Sequence[str], *, fresh: bool = False) -> Mapping[str, Person]:
        people: dict[str, Person] = {}
        for batch in batched(dict.fromkeys(ids), MAX_LISTED):
            answer = await self._api.post("api/v2/users-bulk", {"accountIds": list(batch)})
            with parsing(self._api.web.name):
                results = list(answer["results"])
            people |= {person.id: person for person in each(results, client.person, client.id_in)[0]}
        return people
