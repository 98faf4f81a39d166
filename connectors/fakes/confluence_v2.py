"""Cloud's REST API v2: https://developer.atlassian.com/cloud/confluence/rest/v2/"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from connectors.fakes.confluence_shapes import V2
from connectors.fakes.confluence_state import Item, Kind, Refusal, Space, User, no_such_content

if TYPE_CHECKING:
    from connectors.fakes.confluence import FakeConfluence

MAX_LIMIT = 250


class _Api:
    def __init__(self, fake: FakeConfluence) -> None:
        self.fake = fake
        self.state = fake.state
        self.shapes = V2(fake.state)

    def respond(
        self,
        request: Request,
        results: Iterable[Any],
        shape: Callable[[Any], Any],
        *,
        content: bool = False,
        number: Callable[[Any], int] | None = None,
    ) -> JSONResponse:
        """Respond with one page of results, which are in the order of their numbers (by default their ids); the cursor
        holds the last one."""
        number = number or _number
        limit = _limit(request)
        after = self.after(request)
        results = (result for result in results if number(result) > after)
        first = list(islice(results, limit + 1))
        page, more = first[:limit], len(first) > limit
        if content and self.fake.faults.truncated:
            page, more = page[: len(page) // 2], False
        links = {"base": self.fake.base}
        if more:
            query = {**request.query_params, "cursor": self.fake.cursor({"after": number(page[-1])})}
            links["next"] = f"{request.url.path}?{urlencode(query)}"
        return JSONResponse({"results": [shape(result) for result in page], "_links": links})

    def after(self, request: Request) -> int:
        """Return the number after which the requested page of results begins."""
        cursor = request.query_params.get("cursor")
        return int(str(self.fake.position(cursor).get("after"))) if cursor else -1

    def item(self, id_: str, user: User, *kinds: Kind) -> Item:
        item = self.state.items.get(id_)
        if item is None or item.kind not in kinds or not self.state.may_see(user, item):
            raise no_such_content()
        return item

    def space(self, id_: str, user: User) -> Space:
        for space in self.state.spaces.values():
            if space.id == id_ and self.state.may_see_space(user, space):
                return space
        raise no_such_content()

    def tree(self, kind: Kind) -> Callable[[Request], Any]:
        """Return a handler for pages or blog posts, of one space or by ids, spaces and status."""

        async def handle(request: Request) -> JSONResponse:
            user = self.fake.caller(request, "read:page:confluence")
            query = request.query_params
            spaces, ids = _many(request, "space-id"), _many(request, "id")
            if space_id := request.path_params.get("space"):
                spaces = {self.space(space_id, user).id}
            status = _many(request, "status") or {"current", "archived"}
            if len(ids) > MAX_LIMIT:
                raise Refusal(400, "INVALID_REQUEST_PARAMETER", "Too many values for 'id'")
            named = [self.state.items[id_] for id_ in sorted(ids, key=int) if id_ in self.state.items]
            keys = [space.key for space in self.state.spaces.values() if not spaces or space.id in spaces]
            items = (
                item
                for item in (named if ids else self.state.listed([kind], keys, self.after(request)))
                if item.kind == kind and item.status in status and item.space in keys and self.state.may_see(user, item)
            )
            body = query.get("body-format") == "storage"
            return self.respond(request, items, lambda item: self.shapes.page(item, body), content=not ids)

        return handle

    def single(self, kind: Kind) -> Callable[[Request], Any]:
        async def handle(request: Request) -> JSONResponse:
            user = self.fake.caller(request, "read:page:confluence")
            item = self.item(request.path_params["id"], user, kind)
            return JSONResponse(self.shapes.page(item, request.query_params.get("body-format") == "storage"))

        return handle

    def comments(self, inline: bool) -> Callable[[Request], Any]:
        """Return a handler for the top-level comments of a page, or the replies to a comment."""

        async def handle(request: Request) -> JSONResponse:
            user = self.fake.caller(request, "read:comment:confluence")
            parent = self.item(request.path_params["id"], user, "page", "blogpost", "comment")
            root = parent.kind != "comment"
            comments = [
                comment
                for comment in self.state.contained(parent.id if root else parent.container or "", "comment")
                if comment.parent == (None if root else parent.id)
                and (not root or (comment.selection is not None) == inline)
            ]
            body = request.query_params.get("body-format") == "storage"
            return self.respond(request, comments, lambda item: self.shapes.comment(item, body))

        return handle

    async def comment(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:comment:confluence")
        item = self.item(request.path_params["id"], user, "comment")
        inline = "inline" in request.url.path
        if (item.selection is not None) != inline or item.status != "current":
            raise no_such_content()
        return JSONResponse(self.shapes.comment(item, request.query_params.get("body-format") == "storage"))

    async def attachments(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:attachment:confluence")
        container = request.path_params.get("id")
        if container:
            self.item(container, user, "page", "blogpost")
        attachments = (
            attachment
            for attachment in (
                self.state.parts(container)
                if container
                else self.state.listed(["attachment"], None, self.after(request))
            )
            if attachment.kind == "attachment"
            and self.state.is_current(attachment)
            and self.state.may_see(user, attachment)
        )
        return self.respond(request, attachments, self.shapes.attachment, content=container is None)

    async def attachment(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:attachment:confluence")
        item = self.item(request.path_params["id"], user, "attachment")
        return JSONResponse(self.shapes.attachment(item))

    async def ancestors(self, request: Request) -> JSONResponse:
        """Return ancestors from the root down, folders included."""
        user = self.fake.caller(request, "read:content.metadata:confluence")
        item = self.item(request.path_params["id"], user, "page", "folder")
        ancestors = self.state.chain(item)[:-1]
        return JSONResponse(
            {"results": [{"id": ancestor.id, "type": ancestor.kind} for ancestor in ancestors], "_links": {}}
        )

    async def spaces(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:space:confluence")
        keys, kinds = _many(request, "keys"), _many(request, "type")
        spaces = [
            space
            for space in sorted(self.state.spaces.values(), key=lambda space: int(space.id))
            if self.state.may_see_space(user, space)
            and (not keys or space.key in keys)
            and (not kinds or space.type in kinds)
            and request.query_params.get("status", space.status) == space.status
        ]
        return self.respond(request, spaces, self.shapes.space)

    async def permissions(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:space.permission:confluence")
        space = self.space(request.path_params["id"], user)
        return JSONResponse({"results": self.shapes.permissions(space), "_links": {"base": self.fake.base}})

    async def roles(self, request: Request) -> JSONResponse:
        self.fake.caller(request, "read:space.permission:confluence")
        if not self.state.roles:
            raise no_such_content()
        return self.respond(request, list(enumerate(self.state.roles.items())), self.shapes.role, number=itemgetter(0))

    async def role_assignments(self, request: Request) -> JSONResponse:
        user = self.fake.caller(request, "read:space.permission:confluence")
        space = self.space(request.path_params["id"], user)
        if not self.state.roles:
            raise no_such_content()
        return self.respond(request, list(enumerate(space.assignments)), self.shapes.assignment, number=itemgetter(0))

    async def users(self, request: Request) -> JSONResponse:
        self.fake.caller(request, "read:user:confluence")
        ids = (await request.json()).get("accountIds", [])
        if not 1 <= len(ids) <= MAX_LIMIT:
            raise Refusal(400, "INVALID_REQUEST_PARAMETER", "accountIds must hold between 1 and 250 ids")
        users = [self.state.users[id_] for id_ in ids if id_ in self.state.users]
        return JSONResponse({"results": [self.shapes.user(user) for user in users], "_links": {}})


def routes(fake: FakeConfluence) -> list[Route]:
    api = _Api(fake)
    routes = [
        Route("/api/v2/spaces", api.spaces),
        Route("/api/v2/spaces/{id}/permissions", api.permissions),
        Route("/api/v2/spaces/{id}/role-assignments", api.role_assignments),
        Route("/api/v2/space-roles", api.roles),
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
        routes.append(Route(f"/api/v2/{kind}/{{id}}/ancestors", api.ancestors))
    for kind in ("pages", "blogposts"):
        routes.append(Route(f"/api/v2/{kind}/{{id}}/attachments", api.attachments))
        routes.append(Route(f"/api/v2/{kind}/{{id}}/footer-comments", api.comments(inline=False)))
        routes.append(Route(f"/api/v2/{kind}/{{id}}/inline-comments", api.comments(inline=True)))
    for location in ("footer-comments", "inline-comments"):
        routes.append(Route(f"/api/v2/{location}/{{id}}", api.comment))
        routes.append(Route(f"/api/v2/{location}/{{id}}/children", api.comments(inline=location.startswith("inline"))))
    return routes


def _number(entry: Item | Space) -> int:
    return entry.number if isinstance(entry, Item) else int(entry.id)


def _limit(request: Request) -> int:
    limit = request.query_params.get("limit", "25")
    if not limit.isdigit() or not 1 <= int(limit) <= MAX_LIMIT:
        raise Refusal(400, "INVALID_REQUEST_PARAMETER", "Provided value for 'limit' is not in the range 1 to 250")
    return int(limit)


def _many(request: Request, name: str) -> set[str]:
    return {part for value in request.query_params.getlist(name) for part in value.split(",") if part}
