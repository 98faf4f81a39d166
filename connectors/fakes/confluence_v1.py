"""REST API v1: all of Data Center's, and of Cloud's what v2 lacks (search, restrictions, groups, users, downloads).

https://developer.atlassian.com/server/confluence/rest/ and https://developer.atlassian.com/cloud/confluence/rest/v1/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from connectors.fakes import confluence_cql as cql
from connectors.fakes.confluence_shapes import V1, expansions, listed
from connectors.fakes.confluence_state import Item, Refusal, User, nothing

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
            raise nothing()
        return item

    def answer(self, request: Request, found: Sequence[Any], shape: Any, *, content: bool = False) -> JSONResponse:
        """By start and limit. The limit falls with what is expanded, without a word, as it does in Confluence."""
        asked = request.query_params
        limit = _limit(request)
        start = int(asked.get("start", 0))
        page, more = found[start : start + limit], len(found) > start + limit
        if content and self.fake.faults.truncated:
            page, more = page[: len(page) // 2], False
        query = {**asked, "start": start + limit, "limit": limit}
        path = request.url.path.removeprefix(self.fake.context)
        next_link = f"{path}?{urlencode(query)}" if more else None
        return JSONResponse(listed([shape(one) for one in page], start=start, limit=limit, next_link=next_link))

    def content_shape(self, request: Request) -> Any:
        expand = expansions(request.query_params.get("expand", ""))
        if self.fake.faults.lose_restrictions:
            expand.pop("restrictions", None)
            expand.get("ancestors", {}).pop("restrictions", None)
        return lambda item: self.shapes.content(item, expand)

    async def contents(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "")
        asked = request.query_params
        kind, status = asked.get("type", "page"), asked.get("status", "current")
        if kind not in ("page", "blogpost"):
            raise Refusal(400, "BAD_REQUEST", "type must be page or blogpost")
        if (key := asked.get("spaceKey")) and key not in self.state.spaces:
            raise Refusal(404, "NOT_FOUND", f"No space with key : {key}")
        found = [
            item
            for item in sorted(self.state.items.values(), key=lambda item: int(item.id.removeprefix("att")))
            if item.kind == kind
            and item.status == status
            and asked.get("spaceKey") in (None, item.space)
            and self.state.may_see(user, item)
        ]
        return self.answer(request, found, self.content_shape(request), content=True)

    async def content(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "")
        item = self.item(request.path_params["id"], user)
        container = self.state.items[item.container] if item.container else item
        asked = request.query_params.get("status", "current")
        if asked != "any" and not {item.status, container.status} <= {asked}:
            raise nothing()
        return JSONResponse(self.content_shape(request)(item))

    async def below(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "")
        item = self.item(request.path_params["id"], user)
        deep = request.path_params["how"] == "descendant" or request.query_params.get("depth") == "all"
        found = self.shapes.below(item, request.path_params["kind"], deep=deep)
        return self.answer(request, found, self.content_shape(request))

    async def search(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "search:confluence")
        index = cql.Index(self.state, self.fake.index_delay, ZoneInfo(user.time_zone))
        try:
            found = cql.search(request.query_params.get("cql", ""), index)
        except cql.CqlError as error:
            raise Refusal(400, "BAD_REQUEST", str(error)) from error
        found = [item for item in found if self.state.may_see(user, item)]
        if not self.fake.cloud:
            return self.answer(request, found, self.content_shape(request))
        limit, start = _limit(request), 0
        if cursor := request.query_params.get("cursor"):
            start = int(str(self.fake.position(cursor).get("start")))
        next_link = None
        if len(found) > start + limit:
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
            listed([shape(one) for one in found[start : start + limit]], start=start, limit=limit, next_link=next_link)
        )

    async def restriction(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:content.restriction:confluence")
        item = self.item(request.path_params["id"], user)
        asked = request.query_params
        expand = expansions(asked.get("expand", "restrictions.user,restrictions.group")).get("restrictions", {})
        start, limit = int(asked.get("start", 0)), int(asked.get("limit", 100))
        return JSONResponse(
            self.shapes.restriction(item, request.path_params["operation"], expand, start=start, limit=limit)
        )

    async def me(self, request: Request) -> JSONResponse:
        return JSONResponse(self.shapes.user(self.fake.caller(request, "read:user:confluence")))

    async def user(self, request: Request) -> JSONResponse:
        """Data Center: by key or username."""
        self.fake.caller(request, "read:user:confluence")
        asked = request.query_params
        for user in self.state.users.values():
            if asked.get("key") == user.account_id or asked.get("username") == user.username:
                return JSONResponse(self.shapes.user(user))
        raise Refusal(404, "NOT_FOUND", "No user found")

    async def members(self, request: Request) -> JSONResponse:
        self.fake.caller(request, "read:group:confluence")
        group = self.state.groups.get(request.path_params["id"])
        if group is None:
            raise Refusal(404, "NOT_FOUND", "No group found")
        found = [self.state.users[one] for one in sorted(group)]
        return self.answer(request, found, self.shapes.user)

    async def spaces(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "")
        keys, kind = set(request.query_params.getlist("spaceKey")), request.query_params.get("type")
        found = [
            space
            for key, space in sorted(self.state.spaces.items())
            if self.state.may_see_space(user, space) and (not keys or key in keys) and kind in (None, space.type)
        ]
        return self.answer(request, found, self.shapes.space)

    async def permissions(self, request: Request) -> JSONResponse:
        """Data Center 9.1 and later; a bare list."""
        user = self.fake.caller(request, "")
        space = self.state.spaces.get(request.path_params["key"])
        if space is None or not self.state.may_see_space(user, space):
            raise Refusal(404, "NOT_FOUND", "No space found")
        who: list[dict[str, Any]] = [{"type": "user", "userKey": one} for one in sorted(space.readers.users)]
        who += [{"type": "group", "name": one} for one in sorted(space.readers.groups)]
        who += [{"type": "anonymous"}] if space.anonymous else []
        return JSONResponse(
            [
                {
                    "operation": {"targetType": target, "operationKey": key},
                    "subject": subject,
                    "spaceKey": space.key,
                    "spaceId": int(space.id),
                }
                for subject in who
                for key, target in (("read", "space"), ("create", "page"))
            ]
        )

    async def download(self, request: Request) -> Response:
        """Cloud answers with the address of the media store, where everything lies."""
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
        for item in self.state.of(request.path_params["id"], "attachment"):
            if item.title == request.path_params["name"] and self.state.may_see(user, item):
                return Response(item.data, media_type=item.media_type or "application/octet-stream")
        raise nothing()


def routes(fake: FakeConfluence) -> list[Route]:
    api = _Api(fake)
    found = [
        Route("/rest/api/content/search", api.search),
        Route("/rest/api/content/{id}/restriction/byOperation/{operation}", api.restriction),
        Route("/rest/api/user/current", api.me),
    ]
    if fake.cloud:
        return [
            *found,
            Route("/rest/api/group/{id}/membersByGroupId", api.members),
            Route("/rest/api/content/{id}/child/attachment/{attachment}/download", api.download),
            Route("/media/{id}/binary", api.media),
        ]
    return [
        *found,
        Route("/rest/api/content", api.contents),
        Route("/rest/api/content/{id}", api.content),
        Route("/rest/api/content/{id}/{how:str}/{kind:str}", api.below),
        Route("/rest/api/space", api.spaces),
        Route("/rest/api/space/{key}/permissions", api.permissions),
        Route("/rest/api/user", api.user),
        Route("/rest/api/group/{id}/member", api.members),
        Route("/download/attachments/{id}/{name}", api.file),
    ]


def _limit(request: Request) -> int:
    asked = request.query_params
    expand = asked.get("expand", "")
    limit = int(asked.get("limit", 25))
    if "body" in expand:
        return min(limit, MAX_BODIES)
    return min(limit, MAX_EXPANDED if expand else MAX_LIMIT)
