"""Cloud's REST API v2: https://developer.atlassian.com/cloud/confluence/rest/v2/"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from connectors.fakes.confluence_shapes import V2
from connectors.fakes.confluence_state import Item, Kind, Refusal, Space, User, nothing

if TYPE_CHECKING:
    from connectors.fakes.confluence import FakeConfluence

MAX_LIMIT = 250


class _Api:
    def __init__(self, fake: FakeConfluence) -> None:
        self.fake = fake
        self.state = fake.state
        self.shapes = V2(fake.state)

    def answer(
        self, request: Request, found: Sequence[Any], shape: Callable[[Any], Any], *, content: bool = False
    ) -> JSONResponse:
        """One page of what was found, which is in the order of ids: the cursor names the last one given."""
        limit = _limit(request)
        if cursor := request.query_params.get("cursor"):
            after = self.fake.position(cursor).get("after")
            found = [one for one in found if _number(one) > int(str(after))]
        page, more = found[:limit], len(found) > limit
        if content and self.fake.faults.truncated:
            page, more = page[: len(page) // 2], False
        links = {"base": self.fake.base}
        if more:
            query = {**request.query_params, "cursor": self.fake.cursor({"after": _number(page[-1])})}
            links["next"] = f"{request.url.path}?{urlencode(query)}"
        return JSONResponse({"results": [shape(one) for one in page], "_links": links})

    def item(self, id_: str, user: User, *kinds: Kind) -> Item:
        item = self.state.items.get(id_)
        if item is None or item.kind not in kinds or not self.state.may_see(user, item):
            raise nothing()
        return item

    def space(self, id_: str, user: User) -> Space:
        for space in self.state.spaces.values():
            if space.id == id_ and self.state.may_see_space(user, space):
                return space
        raise nothing()

    def tree(self, kind: Kind) -> Callable[[Request], Any]:
        """Pages or blog posts, of one space or by ids, spaces and status."""

        async def handle(request: Request) -> JSONResponse:
            user = self.fake.caller(request, "read:page:confluence")
            asked = request.query_params
            spaces, ids = _many(request, "space-id"), _many(request, "id")
            if one := request.path_params.get("space"):
                spaces = {self.space(one, user).id}
            status = _many(request, "status") or {"current", "archived"}
            if len(ids) > MAX_LIMIT:
                raise Refusal(400, "INVALID_REQUEST_PARAMETER", "Too many values for 'id'")
            found = [
                item
                for item in _ordered(self.state.items.values())
                if item.kind == kind
                and item.status in status
                and (not ids or item.id in ids)
                and (not spaces or self.state.spaces[item.space].id in spaces)
                and self.state.may_see(user, item)
            ]
            body = asked.get("body-format") == "storage"
            return self.answer(request, found, lambda item: self.shapes.page(item, body), content=not ids)

        return handle

    def single(self, kind: Kind) -> Callable[[Request], Any]:
        async def handle(request: Request) -> JSONResponse:
            user = self.fake.caller(request, "read:page:confluence")
            item = self.item(request.path_params["id"], user, kind)
            return JSONResponse(self.shapes.page(item, request.query_params.get("body-format") == "storage"))

        return handle

    def comments(self, inline: bool) -> Callable[[Request], Any]:
        """The roots of a page, or a comment's children."""

        async def handle(request: Request) -> JSONResponse:
            user = self.fake.caller(request, "read:comment:confluence")
            above = self.item(request.path_params["id"], user, "page", "blogpost", "comment")
            root = above.kind != "comment"
            found = [
                one
                for one in self.state.current("comment")
                if (one.container == above.id and one.parent is None if root else one.parent == above.id)
                and (not root or (one.selection is not None) == inline)
            ]
            body = request.query_params.get("body-format") == "storage"
            return self.answer(request, found, lambda item: self.shapes.comment(item, body))

        return handle

    async def comment(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:comment:confluence")
        item = self.item(request.path_params["id"], user, "comment")
        inline = "inline" in request.url.path
        if (item.selection is not None) != inline or item.status != "current":
            raise nothing()
        return JSONResponse(self.shapes.comment(item, request.query_params.get("body-format") == "storage"))

    async def attachments(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:attachment:confluence")
        container = request.path_params.get("id")
        if container:
            self.item(container, user, "page", "blogpost")
        found = [
            one
            for one in self.state.current("attachment")
            if self.state.may_see(user, one) and container in (None, one.container)
        ]
        return self.answer(request, found, self.shapes.attachment, content=container is None)

    async def attachment(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:attachment:confluence")
        item = self.item(request.path_params["id"], user, "attachment")
        return JSONResponse(self.shapes.attachment(item))

    async def ancestors(self, request: Request) -> JSONResponse:
        """From the top down, folders and all."""
        user = self.fake.caller(request, "read:content.metadata:confluence")
        item = self.item(request.path_params["id"], user, "page", "folder")
        above = self.state.chain(item)[:-1]
        return JSONResponse({"results": [{"id": one.id, "type": one.kind} for one in above], "_links": {}})

    async def spaces(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:space:confluence")
        keys, kinds = _many(request, "keys"), _many(request, "type")
        found = [
            space
            for space in sorted(self.state.spaces.values(), key=lambda space: int(space.id))
            if self.state.may_see_space(user, space)
            and (not keys or space.key in keys)
            and (not kinds or space.type in kinds)
        ]
        return self.answer(request, found, self.shapes.space)

    async def permissions(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:space.permission:confluence")
        space = self.space(request.path_params["id"], user)
        return JSONResponse({"results": self.shapes.permissions(space), "_links": {"base": self.fake.base}})

    async def users(self, request: Request) -> JSONResponse:
        self.fake.caller(request, "read:user:confluence")
        asked = (await request.json()).get("accountIds", [])
        if not 1 <= len(asked) <= MAX_LIMIT:
            raise Refusal(400, "INVALID_REQUEST_PARAMETER", "accountIds must hold between 1 and 250 ids")
        found = [self.state.users[one] for one in asked if one in self.state.users]
        return JSONResponse({"results": [self.shapes.user(one) for one in found], "_links": {}})


def routes(fake: FakeConfluence) -> list[Route]:
    api = _Api(fake)
    found = [
        Route("/api/v2/spaces", api.spaces),
        Route("/api/v2/spaces/{id}/permissions", api.permissions),
        Route("/api/v2/spaces/{space}/pages", api.tree("page")),
        Route("/api/v2/spaces/{space}/blogposts", api.tree("blogpost")),
        Route("/api/v2/pages", api.tree("page")),
        Route("/api/v2/blogposts", api.tree("blogpost")),
        Route("/api/v2/pages/{id}", api.single("page")),
        Route("/api/v2/blogposts/{id}", api.single("blogpost")),
        Route("/api/v2/attachments", api.attachments),
        Route("/api/v2/attachments/{id}", api.attachment),
        Route("/api/v2/users-bulk", api.users, methods=["POST"]),
    ]
    for kind in ("pages", "folders"):
        found.append(Route(f"/api/v2/{kind}/{{id}}/ancestors", api.ancestors))
    for kind in ("pages", "blogposts"):
        found.append(Route(f"/api/v2/{kind}/{{id}}/attachments", api.attachments))
        found.append(Route(f"/api/v2/{kind}/{{id}}/footer-comments", api.comments(inline=False)))
        found.append(Route(f"/api/v2/{kind}/{{id}}/inline-comments", api.comments(inline=True)))
    for where in ("footer-comments", "inline-comments"):
        found.append(Route(f"/api/v2/{where}/{{id}}", api.comment))
        found.append(Route(f"/api/v2/{where}/{{id}}/children", api.comments(inline=where.startswith("inline"))))
    return found


def _ordered(items: Any) -> list[Item]:
    return sorted(items, key=_number)


def _number(one: Item | Space) -> int:
    return int(one.id.removeprefix("att"))


def _limit(request: Request) -> int:
    asked = request.query_params.get("limit", "25")
    if not asked.isdigit() or not 1 <= int(asked) <= MAX_LIMIT:
        raise Refusal(400, "INVALID_REQUEST_PARAMETER", "Provided value for 'limit' is not in the range 1 to 250")
    return int(asked)


def _many(request: Request, name: str) -> set[str]:
    return {part for value in request.query_params.getlist(name) for part in value.split(",") if part}
