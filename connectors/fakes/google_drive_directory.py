"""The part of the Admin SDK's directory that tells who is in a group and in a domain.

https://developers.google.com/workspace/admin/directory/reference/rest/v1/members/list
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from connectors.fakes.google_drive_answers import flag
from connectors.fakes.google_drive_corpus import Corpus
from connectors.fakes.google_drive_errors import ApiError, insufficient_scopes
from connectors.fakes.google_drive_listing import Pages
from connectors.fakes.google_drive_tokens import Tokens

AUTH = "https://www.googleapis.com/auth/"
MEMBER_SCOPES = (f"{AUTH}admin.directory.group.member.readonly", f"{AUTH}admin.directory.group.readonly")
USER_SCOPES = (f"{AUTH}admin.directory.user.readonly",)

EVERYBODY = "*"
"""As a member of a group: all users of the company, whom the list does not name."""


class Directory:
    def __init__(self, corpus: Corpus, tokens: Tokens, pages: Pages) -> None:
        self._corpus = corpus
        self._tokens = tokens
        self._pages = pages
        self.admins: set[str] = set()
        """Who may ask."""
        self.routes = [
            Route("/admin/directory/v1/groups/{key}/members", self._members, methods=["GET"]),
            Route("/admin/directory/v1/users", self._users, methods=["GET"]),
        ]

    def _administrator(self, request: Request, scopes: tuple[str, ...]) -> None:
        token = self._tokens.bearer(request.headers.get("authorization", ""), scopes)
        if token is None:
            raise insufficient_scopes()
        if token.account not in self.admins:
            raise ApiError(403, "forbidden", "Not Authorized to access this resource/api")

    async def _members(self, request: Request) -> Response:
        self._administrator(request, MEMBER_SCOPES)
        key = request.path_params["key"]
        if key not in self._corpus.groups:
            raise ApiError(404, "notFound", f"Resource Not Found: {key}", location="groupKey")
        derived = flag(request, "includeDerivedMembership")
        addresses = self._corpus.people_of(key) if derived else self._corpus.groups[key]
        members = [self._member(address) for address in sorted(addresses)]
        shown, after = self._pages.plain(members, request.query_params, "maxResults", most=200, usual=200)
        body = {"kind": "admin#directory#members", "etag": '"1"', "members": shown}
        return JSONResponse(body | ({"nextPageToken": after} if after else {}))

    def _member(self, address: str) -> dict[str, Any]:
        shown = {"kind": "admin#directory#member", "etag": '"1"', "id": address.encode().hex()[:21], "role": "MEMBER"}
        if address == EVERYBODY:
            return {**shown, "type": "CUSTOMER", "status": "ACTIVE"}
        kind = "GROUP" if address in self._corpus.groups else "USER"
        status = "SUSPENDED" if self._corpus.users.get(address) else "ACTIVE"
        return {**shown, "email": address, "type": kind, "status": status}

    async def _users(self, request: Request) -> Response:
        self._administrator(request, USER_SCOPES)
        domain = request.query_params.get("domain")
        if not domain:
            raise ApiError(400, "badRequest", "Bad Request")
        people = [
            {"kind": "admin#directory#user", "primaryEmail": address, "suspended": suspended, "archived": False}
            for address, suspended in sorted(self._corpus.users.items())
            if address.endswith(f"@{domain}")
        ]
        shown, after = self._pages.plain(people, request.query_params, "maxResults", most=500, usual=100)
        body = {"kind": "admin#directory#users", "etag": '"1"', "users": shown}
        return JSONResponse(body | ({"nextPageToken": after} if after else {}))
