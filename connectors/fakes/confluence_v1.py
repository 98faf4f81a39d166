"""REST API v1: all of Data Center's, and the part of Cloud's that v2 lacks (search, restrictions, groups, files).

https://developer.atlassian.com/server/confluence/rest/ and https://developer.atlassian.com/cloud/confluence/rest/v1/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from connectors.fakes import confluence_cql as cql
from connectors.fakes.confluence_shapes import V1, expansions, results_page
from connectors.fakes.confluence_state import Item, Refusal, Space, User, no_such_content

if TYPE_CHECKING:
    from connectors.fakes.confluence import FakeConfluence

MAX_LIMIT, MAX_EXPANDED, MAX_BODIES = 1000, 200, 50
"""https://support.atlassian.com/confluence/kb/searching-for-content-with-the-rest-api-and-cql-always-limits-results-to-50"""


class _Api:
    def __init__(self, fake: FakeConfluence) -> None:
        self.fake = fake
        self.state = fake.state

    @property
    def shapes(self) -> V1:
        return V1(self.state, cloud=self.fake.cloud, base=self.fake.base)

    def item(self, id_: str, user: User) -> Item:
        item = self.state.items.get(id_)
        if item is None or not self.state.may_see(user, item):
            raise no_such_content()
        return item

    def respond(self, request: Request, results: Sequence[Any], shape: Any, *, content: bool = False) -> JSONResponse:
        """Respond with one page of results, by start and limit. Expansions silently reduce the limit, as they do in
        Confluence."""
        query = request.query_params
        limit = _limit(request)
        if "cql" in query and self.fake.faults.searchable is not None:
            limit = min(limit, self.fake.faults.searchable)
        start = int(query.get("start", 0))
        page, more = results[start : start + limit], len(results) > start + limit
        if content and self.fake.faults.truncated:
            page, more = page[: len(page) // 2], False
        next_query = {**query, "start": start + limit, "limit": limit}
        path = request.url.path.removeprefix(self.fake.context)
        next_link = f"{path}?{urlencode(next_query)}" if more else None
        return JSONResponse(
            results_page([shape(result) for result in page], start=start, limit=limit, next_link=next_link)
        )

    def content_shape(self, request: Request) -> Any:
        expand = expansions(request.query_params.get("expand", ""))
        if self.fake.faults.lose_restrictions:
            expand.pop("restrictions", None)
            expand.get("ancestors", {}).pop("restrictions", None)
        return lambda item: self.shapes.content(item, expand)

    def kind(self, query: Mapping[str, str]) -> Literal["page", "blogpost"]:
        match query.get("type", "page"):
            case "page":
                return "page"
            case "blogpost":
                return "blogpost"
            case _:
                raise Refusal(400, "BAD_REQUEST", "type must be page or blogpost")

    async def contents(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "")
        query = request.query_params
        kind, status = self.kind(query), query.get("status", "current")
        if (key := query.get("spaceKey")) and key not in self.state.spaces:
            raise Refusal(404, "NOT_FOUND", f"No space with key : {key}")
        items = [
            item
            for item in self.state.listed([kind], [key] if key else None)
            if item.status == status and self.state.may_see(user, item)
        ]
        return self.respond(request, items, self.content_shape(request), content=True)

    async def scan(self, request: Request) -> JSONResponse:
        """Data Center 7.18 and later: list content by cursor instead of by start."""
        user = self.fake.caller(request, "")
        query = request.query_params
        after = 0
        if cursor := query.get("cursor"):
            after = int(str(self.fake.position(cursor).get("after")))
        key, limit = query.get("spaceKey"), _limit(request)
        matching = (
            item
            for item in self.state.listed([self.kind(query)], [key] if key else None, after)
            if item.status == "current" and self.state.may_see(user, item)
        )
        items = list(islice(matching, limit + 1))
        next_link = None
        if len(items) > limit:
            following = {**query, "cursor": self.fake.cursor({"after": items[limit - 1].id}), "limit": limit}
            next_link = f"/rest/api/content/scan?{urlencode(following)}"
        shape = self.content_shape(request)
        return JSONResponse(
            results_page([shape(item) for item in items[:limit]], start=0, limit=limit, next_link=next_link)
        )

    async def content(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "")
        item = self.item(request.path_params["id"], user)
        container = self.state.items[item.container] if item.container else item
        status = request.query_params.get("status", "current")
        if status != "any" and not {item.status, container.status} <= {status}:
            raise no_such_content()
        return JSONResponse(self.content_shape(request)(item))

    async def children(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "")
        item = self.item(request.path_params["id"], user)
        deep = request.path_params["how"] == "descendant" or request.query_params.get("depth") == "all"
        items = self.shapes.children(item, request.path_params["kind"], deep=deep)
        return self.respond(request, items, self.content_shape(request))

    async def search(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "search:confluence")
        index = cql.Index(self.state, self.fake.index_delay, ZoneInfo(user.time_zone))
        try:
            items = cql.search(request.query_params.get("cql", ""), index)
        except cql.CqlError as error:
            raise Refusal(400, "BAD_REQUEST", str(error)) from error
        items = [item for item in items if self.state.may_see(user, item)]
        most = self.fake.faults.searchable
        is_first = "cursor" not in request.query_params and int(request.query_params.get("start", 0)) == 0
        if most is not None and not is_first:
            raise Refusal(400, "BAD_REQUEST", "Bad Request")
        if not self.fake.cloud:
            return self.respond(request, items, self.content_shape(request))
        limit, start = min(_limit(request), most or MAX_LIMIT), 0
        if cursor := request.query_params.get("cursor"):
            start = int(str(self.fake.position(cursor).get("start")))
        next_link = None
        if len(items) > start + limit:
            query = {
                "next": "true",
                "cursor": self.fake.cursor({"start": start + limit}),
                "cql": request.query_params["cql"],
                "expand": request.query_params.get("expand", ""),
                "limit": limit,
                "start": start + limit,
            }
            next_link = f"/rest/api/content/search?{urlencode(query)}"
        shape = self.content_shape(request)
        return JSONResponse(
            results_page(
                [shape(item) for item in items[start : start + limit]], start=start, limit=limit, next_link=next_link
            )
        )

    async def restriction(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:content.restriction:confluence")
        item = self.item(request.path_params["id"], user)
        query = request.query_params
        expand = expansions(query.get("expand", "restrictions.user,restrictions.group")).get("restrictions", {})
        start, limit = int(query.get("start", 0)), int(query.get("limit", 100))
        return JSONResponse(
            self.shapes.restriction(item, request.path_params["operation"], expand, start=start, limit=limit)
        )

    async def me(self, request: Request) -> JSONResponse:
        return JSONResponse(self.shapes.user(self.fake.caller(request, "read:user:confluence")))

    async def user(self, request: Request) -> JSONResponse:
        """Data Center: return a user by key or username."""
        self.fake.caller(request, "read:user:confluence")
        query = request.query_params
        for user in self.state.users.values():
            if query.get("key") == user.account_id or query.get("username") == user.username:
                return JSONResponse(self.shapes.user(user))
        raise Refusal(404, "NOT_FOUND", "No user found")

    async def members(self, request: Request) -> JSONResponse:
        self.fake.caller(request, "read:group:confluence")
        group = self.state.groups.get(request.path_params["id"])
        if group is None:
            raise Refusal(404, "NOT_FOUND", "No group found")
        members = [self.state.users[account] for account in sorted(group)]
        return self.respond(request, members, self.shapes.user)

    async def spaces(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "")
        keys, kind = set(request.query_params.getlist("spaceKey")), request.query_params.get("type")
        spaces = [
            space
            for key, space in sorted(self.state.spaces.items())
            if self.state.may_see_space(user, space)
            and (not keys or key in keys)
            and kind in (None, space.type)
            and request.query_params.get("status", space.status) == space.status
        ]
        return self.respond(request, spaces, self.shapes.space)

    async def permissions(self, request: Request) -> JSONResponse:
        """Data Center 9.1 and later: return a space's permissions as a bare list."""
        user = self.fake.caller(request, "")
        space = self.state.spaces.get(request.path_params["key"])
        if space is None or not self.state.may_see_space(user, space):
            raise Refusal(404, "NOT_FOUND", "No space found")
        subjects: list[dict[str, Any]] = [{"type": "user", "userKey": reader} for reader in sorted(space.readers.users)]
        subjects += [{"type": "group", "name": reader} for reader in sorted(space.readers.groups)]
        subjects += [{"type": "anonymous"}] if space.anonymous and not self.fake.faults.anonymous_apart else []
        return self._permissions(space, subjects)

    async def anonymous_permissions(self, request: Request) -> JSONResponse:
        """Data Center 9.1 and later: return what anonymous visitors may do in a space."""
        user = self.fake.caller(request, "")
        space = self.state.spaces.get(request.path_params["key"])
        if space is None or not self.state.may_see_space(user, space):
            raise Refusal(404, "NOT_FOUND", "No space found")
        return self._permissions(space, [{"type": "anonymous"}] if space.anonymous else [])

    def _permissions(self, space: Space, subjects: Sequence[Mapping[str, Any]]) -> JSONResponse:
        return JSONResponse(
            [
                {
                    "operation": {"targetType": target, "operationKey": key},
                    "subject": subject,
                    "spaceKey": space.key,
                    "spaceId": int(space.id),
                }
                for subject in subjects
                for key, target in (("read", "space"), ("create", "page"))
            ]
        )

    async def download(self, request: Request) -> Response:
        """Cloud: redirect to the media store."""
        user = self.fake.caller(request, "readonly:content.attachment:confluence")
        item = self.item(request.path_params["attachment"], user)
        target = self.fake.faults.moved_to or f"{self.fake.context}/media/{item.id}/binary"
        return RedirectResponse(target, status_code=302)

    async def media(self, request: Request) -> Response:
        self.fake.caller(request, "readonly:content.attachment:confluence")
        item = self.state.items[request.path_params["id"]]
        return Response(item.data, media_type=item.media_type or "application/octet-stream")

    async def file(self, request: Request) -> Response:
        user = self.fake.caller(request, "")
        if self.fake.faults.moved_to:
            return RedirectResponse(self.fake.faults.moved_to, status_code=302)
        for item in self.state.contained(request.path_params["id"], "attachment"):
            if item.title == request.path_params["name"] and self.state.may_see(user, item):
                return Response(item.data, media_type=item.media_type or "application/octet-stream")
        raise no_such_content()


def routes(fake: FakeConfluence) -> list[Route]:
    api = _Api(fake)
    shared = [
        Route("/rest/api/content/search", api.search),
        Route("/rest/api/content/{id}/restriction/byOperation/{operation}", api.restriction),
        Route("/rest/api/user/current", api.me),
    ]
    if fake.cloud:
        return [
            *shared,
            Route("/rest/api/group/{id}/membersByGroupId", api.members),
            Route("/rest/api/content/{id}/child/attachment/{attachment}/download", api.download),
            Route("/media/{id}/binary", api.media),
        ]
    return [
        *shared,
        Route("/rest/api/content", api.contents),
        Route("/rest/api/content/scan", api.scan),
        Route("/rest/api/content/{id}", api.content),
        Route("/rest/api/content/{id}/{how:str}/{kind:str}", api.children),
        Route("/rest/api/space", api.spaces),
        Route("/rest/api/space/{key}/permissions", api.permissions),
        Route("/rest/api/space/{key}/permissions/anonymous", api.anonymous_permissions),
        Route("/rest/api/user", api.user),
        Route("/rest/api/group/{id}/member", api.members),
        Route("/download/attachments/{id}/{name}", api.file),
    ]


def _limit(request: Request) -> int:
    query = request.query_params
    expand = query.get("expand", "")
    limit = int(query.get("limit", 25))
    if "body" in expand:
        return min(limit, MAX_BODIES)
    return min(limit, MAX_EXPANDED if expand else MAX_LIMIT)
