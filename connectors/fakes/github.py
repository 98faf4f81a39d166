"""A fake GitHub, as far as a source needs it: GraphQL by the published schema, a few paths of REST, signed events.

``async with served(fake) as url``: the REST API is at ``url``, GraphQL at ``url``/graphql. Queries are executed by a
GraphQL library on github.graphql, the used part of GitHub's schema, so that a query that GitHub would refuse is refused
here, too. REST follows docs.github.com/rest.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
import itertools
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jwt
from graphql import DocumentNode, ExecutionResult, GraphQLError, GraphQLSchema, build_schema, execute, parse, validate
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from connectors.source import Request

Object = dict[str, Any]
SCHEMA = Path(__file__).with_suffix(".graphql")
TOKEN, WEBHOOK_SECRET = "github_pat_fake", "fake-webhook-secret"
DOCS = "https://docs.github.com/rest"
_EVENTS = {"Issue": ("issues", "issue"), "PullRequest": ("pull_request",) * 2, "Discussion": ("discussion",) * 2}


@cache
def schema() -> GraphQLSchema:
    return build_schema(SCHEMA.read_text())


@lru_cache(256)
def parsed(query: str) -> DocumentNode:
    """Parse a query, once for all requests with it. Raises GraphQLError for one that does not fit the schema."""
    document = parse(query)
    for problem in validate(schema(), document):
        raise problem
    return document


class ApiError(GraphQLError):
    """An error as GitHub's GraphQL reports it."""

    def __init__(self, type_: str) -> None:
        super().__init__(f"an error of type {type_}", extensions={"type": type_})


@dataclass
class Faults:
    throttled: int = 0
    """This many next requests are answered with 429."""
    failing: int = 0
    """This many next requests are answered with 500."""
    secondary: int = 0
    """This many next requests are answered with the 403 of a secondary limit, without Retry-After."""
    spent: int = 0
    """This many next requests are answered with the 403 of a spent budget, which is renewed at once."""
    truncated: bool = False
    """Whether lists of repositories end after the first few, as if they were complete."""
    taken_down: set[int] = field(default_factory=set)
    """Repositories that are answered with 451, and that GraphQL does not find."""
    refused: set[int] = field(default_factory=set)
    """Repositories whose documents GraphQL refuses."""
    hidden_collaborators: set[int] = field(default_factory=set)
    hidden_in_rest: set[int] = field(default_factory=set)
    """Repositories whose collaborators REST refuses, too."""
    hides_identities: bool = False
    hides_members: bool = False
    broken_query: str | None = None
    """A word; a query that contains it is answered with a failure of GitHub's own, with status 200."""


@dataclass
class Place:
    """A repository. ``items`` are its documents by number."""

    id: int
    owner: str
    name: str
    visibility: str = "PRIVATE"
    collaborators: set[str] = field(default_factory=set)
    items: dict[int, Object] = field(default_factory=dict)
    former: set[str] = field(default_factory=set)
    is_disabled: bool = False
    has_discussions: bool = True
    has_wiki: bool = True

    @property
    def full_name(self) -> str:
        return f"{self.owner}/{self.name}"

    @property
    def node(self) -> str:
        return f"R_{self.id}"


class FakeGitHub:
    """Repositories and people behind HTTP. ``token`` is the only valid one, besides those of the App's installation.
    ``clock`` returns seconds since 1970."""

    def __init__(self, *, clock: Callable[[], float] = time.time, token: str = TOKEN) -> None:
        self.clock, self.token = clock, token
        self.places: dict[int, Place] = {}
        self.organizations: dict[str, Object] = {}
        self.faults = Faults()
        self.app_key: Any = None
        """The public key of App 7, whose installation is 42; None: there is none."""
        self.installation_tokens: list[str] = []
        self.requests: list[str] = []
        """Method and path of every request."""
        self.queries: list[str] = []
        self.epoch = 0
        """Cursors of an earlier epoch are not known."""
        self._numbers = itertools.count(1)
        self._events: list[Request] = []
        self._app = Starlette(
            routes=[
                Route("/graphql", self._graphql, methods=["POST"]),
                Route("/repositories/{id:int}", self._repository),
                Route("/repos/{owner}/{name}/collaborators", self._collaborators),
                Route("/app/installations/{id:int}/access_tokens", self._installation_token, methods=["POST"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.requests.append(f"{scope['method']} {scope['path']}")
            if (fault := self._fault(scope)) is not None:
                await fault(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _fault(self, scope: Scope) -> Response | None:
        faults = self.faults
        if faults.throttled > 0:
            faults.throttled -= 1
            return error(429, "too many requests", headers={"retry-after": "0"})
        if faults.failing > 0:
            faults.failing -= 1
            return Response("a failure", 500)
        if faults.secondary > 0:
            faults.secondary -= 1
            link = f"{DOCS}/overview/rate-limits-for-the-rest-api#about-secondary-rate-limits"
            return error(403, "a secondary limit", link=link)
        if faults.spent > 0:
            faults.spent -= 1
            reset = str(int(self.clock()))
            return error(403, "a spent budget", headers={"x-ratelimit-remaining": "0", "x-ratelimit-reset": reset})
        bearer = dict(scope["headers"]).get(b"authorization", b"").decode().removeprefix("Bearer ")
        if scope["path"].startswith("/app/"):
            return None
        return None if bearer in (self.token, *self.installation_tokens) else error(401, "Bad credentials")

    # Content

    def now(self) -> str:
        return datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def organization(self, login: str, **members: str | None) -> None:
        """Add an organisation; ``members`` are the confirmed addresses of its members by login."""
        self.organizations[login] = {
            "id": next(self._numbers),
            "members": {name: [email] if email else [] for name, email in members.items()},
            "identities": None,
        }

    def repository(self, full_name: str, *collaborators: str, **fields: Any) -> Place:
        owner, _, name = full_name.partition("/")
        place = Place(1000 + next(self._numbers), owner, name, collaborators=set(collaborators), **fields)
        self.places[place.id] = place
        return place

    def rename(self, place: Place, full_name: str) -> None:
        """Rename or transfer a repository; its former name leads to it."""
        place.former.add(place.full_name)
        place.owner, _, place.name = full_name.partition("/")
        self._send(place, "repository", {"action": "renamed"})

    def add(self, place: Place, kind: str, title: str, body: str, *, by: str = "sam", **fields: Any) -> int:
        """Add an ``Issue``, ``PullRequest`` or ``Discussion``; returns its number."""
        number = max(place.items, default=0) + 1
        kinds: dict[str, Object] = {
            "Issue": {"state": "OPEN"},
            "PullRequest": {"state": "OPEN", "isDraft": False, "reviews": []},
            "Discussion": {"closed": False, "isAnswered": False, "category": {"id": "DC_1", "name": "Ideas"}},
        }
        place.items[number] = {
            **self._said(by, body),
            "__typename": kind,
            "number": number,
            "title": title,
            "labels": [],
            "milestone": None,
            "comments": [],
            **kinds[kind],
            **fields,
        }
        self.announce(place, number, "opened")
        return number

    def edit(self, place: Place, number: int, **fields: Any) -> None:
        """Change fields of a document."""
        said = {"lastEditedAt": self.now()} if fields.keys() & {"body", "title"} else {}
        place.items[number] |= {**fields, **said}
        self._touch(place, number)
        self.announce(place, number, "edited")

    def comment(self, place: Place, number: int, by: str, body: str, **fields: Any) -> Object:
        """Add a comment; ``fields`` such as ``isMinimized``, or for a discussion ``isAnswer``."""
        kind = place.items[number]["__typename"]
        more: Object = {"deletedAt": None, "isAnswer": False, "replies": []} if kind == "Discussion" else {}
        comment = {**self._said(by, body), "isMinimized": False, **more, **fields}
        place.items[number]["comments"].append(comment)
        self._touch(place, number)
        self.announce(place, number, "created", "discussion_comment" if kind == "Discussion" else "issue_comment")
        return comment

    def reply(self, comment: Object, by: str, body: str, **fields: Any) -> Object:
        reply = {**self._said(by, body), "isMinimized": False, "deletedAt": None, "isAnswer": False, **fields}
        comment["replies"].append(reply)
        return reply

    def review(self, place: Place, number: int, by: str, body: str, state: str, **comments: str) -> Object:
        """Add a review; ``comments`` are its comments by the path of a file."""
        review = {**self._said(by, body), "isMinimized": False, "state": state, "submittedAt": self.now()}
        review["comments"] = [
            {**self._said(by, text), "path": path, "isMinimized": False} for path, text in comments.items()
        ]
        place.items[number]["reviews"].append(review)
        self._touch(place, number)
        self.announce(place, number, "submitted", "pull_request_review")
        return review

    def delete(self, place: Place, number: int) -> Object:
        item = place.items.pop(number)
        event, name = _EVENTS[item["__typename"]]
        self._send(place, event, {"action": "deleted", name: {"number": number}})
        return item

    def restore(self, place: Place, item: Object) -> None:
        place.items[item["number"]] = item
        self.announce(place, item["number"], "reopened")

    def _said(self, by: str | None, body: str) -> Object:
        id = f"N_{next(self._numbers)}"
        author = {"__typename": "User", "login": by} if by else None
        return {"id": id, "author": author, "body": body, "createdAt": self.now(), "updatedAt": self.now()} | {
            "lastEditedAt": None
        }

    def _touch(self, place: Place, number: int) -> None:
        place.items[number]["updatedAt"] = self.now()

    # Events

    def announce(self, place: Place, number: int, action: str, event: str | None = None) -> None:
        default, name = _EVENTS[place.items[number]["__typename"]]
        updated = {"number": number, "updated_at": place.items[number]["updatedAt"]}
        self._send(place, event or default, {"action": action, name: {**updated, "id": next(self._numbers)}})

    def announce_wiki(self, place: Place, page: str, commit: str) -> None:
        """Send the event of a change of a wiki's page, which git serves (``connectors.git.playground.Backend``)."""
        self._send(place, "gollum", {"pages": [{"page_name": page, "title": page, "action": "edited", "sha": commit}]})

    def _send(self, place: Place | None, event: str, body: Object) -> None:
        repository = {"repository": {"id": place.id, "full_name": place.full_name}} if place is not None else {}
        self._events.append(self.signed(event, {**body, **repository}))

    def signed(self, event: str, body: Object, secret: str = WEBHOOK_SECRET) -> Request:
        data = json.dumps(body).encode()
        headers = {
            "content-type": "application/json",
            "x-github-event": event,
            "x-github-delivery": str(uuid.uuid4()),
            "x-hub-signature-256": "sha256=" + hmac.new(secret.encode(), data, hashlib.sha256).hexdigest(),
        }
        return Request(headers, {}, data)

    def sent(self) -> list[Request]:
        """Return the events since the last call."""
        events, self._events[:] = list(self._events), []
        return events

    # REST

    async def _repository(self, request: HttpRequest) -> Response:
        place = self.places.get(request.path_params["id"])
        if place is not None and place.id in self.faults.taken_down:
            return error(451, "Repository access blocked")
        if place is None:
            return error(404, "Not Found")
        row = {"id": place.id, "node_id": place.node, "name": place.name, "full_name": place.full_name}
        return JSONResponse({**row, "visibility": place.visibility.lower(), "private": place.visibility == "PRIVATE"})

    async def _collaborators(self, request: HttpRequest) -> Response:
        place = self._named(f"{request.path_params['owner']}/{request.path_params['name']}")
        if place is None:
            return error(404, "Not Found")
        if place.id in self.faults.hidden_in_rest:
            return error(403, "Must have push access to view repository collaborators.")
        page, size = int(request.query_params.get("page", 1)), int(request.query_params.get("per_page", 30))
        rows = sorted(place.collaborators)[(page - 1) * size : page * size]
        return JSONResponse([{"login": login, "type": "User", "role_name": "read"} for login in rows])

    async def _installation_token(self, request: HttpRequest) -> Response:
        assertion = request.headers.get("authorization", "").removeprefix("Bearer ")
        try:
            claim = jwt.decode(
                assertion, self.app_key, algorithms=["RS256"], options={"require": ["iat", "exp", "iss"]}
            )
        except (jwt.InvalidTokenError, TypeError):
            return error(401, "A JSON web token could not be decoded")
        if claim["iss"] != "7" or claim["exp"] - claim["iat"] > 660:
            return error(401, "'Issuer' claim ('iss') must be an Integer, or the token lives too long")
        if request.path_params["id"] != 42:
            return error(404, "Not Found")
        self.installation_tokens.append(f"ghs_{next(self._numbers)}")
        expires = datetime.fromtimestamp(self.clock(), UTC) + timedelta(hours=1)
        answer = {"token": self.installation_tokens[-1], "expires_at": expires.strftime("%Y-%m-%dT%H:%M:%SZ")}
        return JSONResponse(answer, 201)

    # GraphQL

    async def _graphql(self, request: HttpRequest) -> Response:
        body = await request.json()
        self.queries.append(body["query"])
        if self.faults.broken_query and self.faults.broken_query in body["query"]:
            return JSONResponse({"errors": [{"message": "Something went wrong while executing your query."}]})
        root = {
            "node": lambda info, id: self._node(id),
            "nodes": lambda info, ids: [self._node(id) for id in ids],
            "repository": lambda info, owner, name, followRenames=True: self._by_name(f"{owner}/{name}"),
            "repositoryOwner": lambda info, login: self._owner(login),
            "organization": lambda info, login: self._organization(login),
        }
        try:
            document = parsed(body["query"])
        except GraphQLError as problem:
            return JSONResponse({"errors": [{"message": problem.message}]})
        result = execute(schema(), document, root, variable_values=body.get("variables"))
        assert isinstance(result, ExecutionResult)
        answer: Object = {"data": result.data}
        if result.errors:
            answer["errors"] = [
                {"message": e.message, "path": e.path, **({"type": e.extensions["type"]} if e.extensions else {})}
                for e in result.errors
            ]
        return JSONResponse(answer)

    def _named(self, full_name: str) -> Place | None:
        places = list(self.places.values())
        names = full_name.lower()
        current = [place for place in places if place.full_name.lower() == names]
        return next(iter(current or [place for place in places if names in {n.lower() for n in place.former}]), None)

    def _by_name(self, full_name: str) -> Object:
        place = self._named(full_name)
        if place is None or place.id in self.faults.taken_down:
            raise ApiError("NOT_FOUND")
        return self._place(place)

    def _node(self, id: str) -> Object:
        for place in self.places.values():
            if place.id in self.faults.taken_down:
                continue
            if place.node == id:
                return self._place(place)
            for item in place.items.values():
                parts = [item, *item["comments"], *item.get("reviews", ())]
                if (matches := next((part for part in parts if part["id"] == id), None)) is not None:
                    return self._shown(place, item) if matches is item else self._part(item, matches)
        raise ApiError("NOT_FOUND")

    def _place(self, place: Place) -> Object:
        def documents(kind: str) -> Callable[..., Object]:
            def resolve(info: Any, first: int, after: str | None = None, orderBy: Any = None) -> Object:
                if place.id in self.faults.refused:
                    raise ApiError("FORBIDDEN")
                rows = [item for item in place.items.values() if item["__typename"] == kind]
                is_newest = orderBy["field"] == "UPDATED_AT"
                key = "updatedAt" if is_newest else "createdAt"
                rows.sort(key=lambda item: (item[key], item["number"]), reverse=orderBy["direction"] == "DESC")
                return self._page([self._shown(place, item) for item in rows], first, after)

            return resolve

        def numbered(*kinds: str) -> Callable[..., Object]:
            def resolve(info: Any, number: int) -> Object:
                if place.id in self.faults.refused:
                    raise ApiError("FORBIDDEN")
                item = place.items.get(number)
                if item is None or item["__typename"] not in kinds:
                    raise ApiError("NOT_FOUND")
                return self._shown(place, item)

            return resolve

        def collaborators(info: Any, first: int, after: str | None = None, affiliation: str = "ALL") -> Object:
            if place.id in self.faults.hidden_collaborators:
                raise ApiError("FORBIDDEN")
            people = [{"__typename": "User", "login": login} for login in sorted(place.collaborators)]
            return self._page(people, first, after)

        owner = self.organizations.get(place.owner)
        return {
            "__typename": "Repository",
            "id": place.node,
            "databaseId": place.id,
            "nameWithOwner": place.full_name,
            "visibility": place.visibility,
            "isDisabled": place.is_disabled,
            "hasDiscussionsEnabled": place.has_discussions,
            "hasWikiEnabled": place.has_wiki,
            "owner": {"__typename": "Organization", "login": place.owner, "databaseId": owner["id"]}
            if owner
            else {"__typename": "User", "login": place.owner},
            "issues": documents("Issue"),
            "pullRequests": documents("PullRequest"),
            "discussions": documents("Discussion"),
            "issueOrPullRequest": numbered("Issue", "PullRequest"),
            "discussion": numbered("Discussion"),
            "collaborators": collaborators,
        }

    def _shown(self, place: Place, item: Object) -> Object:
        path = {"Issue": "issues", "PullRequest": "pull", "Discussion": "discussions"}[item["__typename"]]
        shown = {
            **item,
            "url": f"https://github.example/{place.full_name}/{path}/{item['number']}",
            "labels": {"nodes": [{"id": f"L_{name}", "name": name} for name in item["labels"]]},
            "milestone": {"id": "MI_1", "title": item["milestone"]} if item["milestone"] else None,
            "comments": self._connection([self._part(item, comment) for comment in item["comments"]]),
        }
        if "reviews" in item:
            shown["reviews"] = self._connection([self._part(item, review) for review in item["reviews"]])
        return shown

    def _part(self, item: Object, part: Object) -> Object:
        """Return a comment or review with its own connections."""
        if "submittedAt" in part:
            comments = [{**comment, "__typename": "PullRequestReviewComment"} for comment in part["comments"]]
            return {**part, "__typename": "PullRequestReview", "comments": self._connection(comments)}
        if item["__typename"] == "Discussion":
            replies = [{**reply, "__typename": "DiscussionComment"} for reply in part["replies"]]
            return {**part, "__typename": "DiscussionComment", "replies": self._connection(replies)}
        return {**part, "__typename": "IssueComment"}

    def _connection(self, rows: Sequence[Object]) -> Callable[..., Object]:
        def resolve(info: Any, first: int, after: str | None = None, orderBy: Any = None) -> Object:
            ordered = list(rows)
            if orderBy:
                ordered.sort(key=lambda row: row["updatedAt"], reverse=orderBy["direction"] == "DESC")
            return self._page(ordered, first, after)

        return resolve

    def _owner(self, login: str) -> Object:
        names = {place.owner.lower() for place in self.places.values()} | self.organizations.keys()
        if login.lower() not in names:
            raise ApiError("NOT_FOUND")

        def repositories(info: Any, first: int, after: str | None = None, ownerAffiliations: Any = None) -> Object:
            places = [place for _, place in sorted(self.places.items()) if place.owner.lower() == login.lower()]
            rows = [self._place(place) for place in places if place.id not in self.faults.taken_down]
            return self._page(rows[:3] if self.faults.truncated else rows, first, after)

        kind = "Organization" if login.lower() in self.organizations else "User"
        return {"__typename": kind, "login": login, "repositories": repositories}

    def _organization(self, login: str) -> Object:
        known = self.organizations.get(login.lower())
        if known is None:
            raise ApiError("NOT_FOUND")

        def members(info: Any, first: int, after: str | None = None) -> Object:
            if self.faults.hides_members:
                raise ApiError("FORBIDDEN")
            people = [
                {
                    "__typename": "User",
                    "login": name,
                    "organizationVerifiedDomainEmails": lambda info, login, emails=tuple(emails): list(emails),
                }
                for name, emails in sorted(known["members"].items())
            ]
            return self._page(people, first, after)

        def identities(info: Any, first: int, after: str | None = None) -> Object:
            rows = [
                {"id": f"EI_{name}", "user": {"__typename": "User", "login": name}, "samlIdentity": {"nameId": name_id}}
                for name, name_id in sorted(known["identities"].items())
            ]
            return self._page(rows, first, after)

        def provider(info: Any) -> Object | None:
            if self.faults.hides_identities:
                raise ApiError("FORBIDDEN")
            return None if known["identities"] is None else {"id": "OIP_1", "externalIdentities": identities}

        return {
            "__typename": "Organization",
            "login": login,
            "databaseId": known["id"],
            "membersWithRole": members,
            "samlIdentityProvider": provider,
        }

    def _page(self, rows: Sequence[Object], first: int, after: str | None) -> Object:
        """Return a page of a connection. A cursor names the last row by its id, or by its login."""
        begin = 0
        if after is not None:
            epoch, _, key = base64.b64decode(after).decode().partition(":")
            keys = [_key(row) for row in rows]
            if int(epoch) != self.epoch:
                raise ApiError("INVALID_CURSOR_ARGUMENTS")
            begin = keys.index(key) + 1 if key in keys else len(rows)
        page = [copy.copy(row) for row in rows[begin : begin + first]]
        cursor = base64.b64encode(f"{self.epoch}:{_key(page[-1])}".encode()).decode() if page else None
        more = begin + first < len(rows)
        return {"totalCount": len(rows), "nodes": page, "pageInfo": {"hasNextPage": more, "endCursor": cursor}}


def _key(row: Mapping[str, Any]) -> str:
    return str(row.get("id") or row["login"])


def error(status: int, message: str, *, headers: Mapping[str, str] | None = None, link: str = DOCS) -> Response:
    return JSONResponse({"message": message, "documentation_url": link, "status": str(status)}, status, headers)
