"""A fake Jira: Cloud (REST v3) or Data Center (REST v2).

``async with served(fake) as address``; the base address is then ``address + fake.context``. It follows the published
API and the limits that its users report: a search in Cloud holds the first 20 comments of an issue and pages by tokens,
it lags behind (``index_delay``), and accounts see only what their permissions admit.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from html import escape
from typing import Any, Literal
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from connectors.fakes.jira_state import Attachment, Comment, Event, Grant, Group, Issue, Project, State, User
from connectors.source import Request

Flavour = Literal["cloud", "data-center"]
Json = dict[str, Any]
_IN_PROJECT = re.compile(r'project = "(\w+)" ORDER BY created ASC, key ASC')
_UPDATED = re.compile(r'updated >= "-(\d+)m"(?: AND project in \(([^)]*)\))? ORDER BY updated ASC')


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Faults:
    """Faults of the server. Numbers count down with each faulty response; the rest stays until changed."""

    throttled: int = 0
    retry_after: str | None = "1"
    failing: int = 0
    truncated: bool = False
    """Searches end in the middle of their first page, as if it were the last."""
    most: int = 100
    """The most issues on a page of a search, whatever was requested."""
    broken: set[str] = field(default_factory=set)
    """Ids of issues that make every response fail that contains their texts."""
    denied: set[str] = field(default_factory=set)
    """Paths that contain one of these respond with 403."""
    failing_paths: set[str] = field(default_factory=set)
    """Paths that contain one of these respond with 500."""
    paging: Literal["endless", "lost"] | None = None
    """endless: every page of a search has the same token. lost: a page that is not the last has none."""
    moved_to: str | None = None
    """The address to which downloads are redirected; None: this server."""


class FakeJira:
    def __init__(self, flavour: Flavour = "cloud") -> None:
        self.cloud = flavour == "cloud"
        self.context = "" if self.cloud else "/jira"
        self.root = f"{self.context}/rest/api/{3 if self.cloud else 2}"
        self.state = State()
        self.faults = Faults()
        self.index_delay = timedelta()
        self.most_comments = 20 if self.cloud else None
        """The most comments of an issue in a response about several issues; None: all."""
        self.tokens: dict[str, User] = {}
        self.requests: list[str] = []
        """``GET /rest/api/…?…`` for every request, in order."""
        self.base = ""
        self.webhook_secret = secrets.token_hex(16)
        self.epoch = secrets.token_hex(4)
        """A part of every page token. When it changes, earlier tokens are no longer known."""
        self._inner = Starlette(routes=self._routes(), exception_handlers={Refusal: _refused})

    def token_for(self, user: User) -> str:
        token = f"ATATT-{secrets.token_hex(12)}"
        self.tokens[token] = user
        return token

    def expire_tokens(self) -> None:
        self.epoch = secrets.token_hex(4)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        request = HttpRequest(scope)
        self.base = f"{request.url.scheme}://{request.url.netloc}{self.context}"
        line = f"{request.method} {unquote(request.url.path)}?{request.url.query}"
        self.requests.append(line)
        faults = self.faults
        answer: Response | None = None
        if faults.throttled > 0:
            faults.throttled -= 1
            headers = {"X-RateLimit-Reason": "jira-burst-based"}
            headers |= {} if faults.retry_after is None else {"Retry-After": faults.retry_after}
            answer = JSONResponse({"errorMessages": ["Rate limit exceeded."]}, status_code=429, headers=headers)
        elif faults.failing > 0:
            faults.failing -= 1
            answer = JSONResponse({"errorMessages": ["Internal server error"], "errors": {}}, status_code=500)
        elif any(part in line for part in faults.failing_paths):
            answer = JSONResponse({"errorMessages": ["Internal server error"], "errors": {}}, status_code=500)
        elif any(part in line for part in faults.denied):
            answer = JSONResponse({"errorMessages": ["Forbidden"], "errors": {}}, status_code=403)
        await (answer or self._inner)(scope, receive, send)

    # Routes

    def _routes(self) -> list[Route]:
        both: dict[str, Callable[[HttpRequest, User], Any]] = {
            "myself": lambda request, user: self.user(user, user),
            "project/{project}": lambda request, user: self.project(self._project(request, user)),
            "project/{project}/permissionscheme": self._permission_scheme,
            "project/{project}/role/{role}": self._role,
            "group/member": self._group_members,
            "applicationrole": self._applications,
            "issue/{issue}": self._one_issue,
            "issue/{issue}/comment": self._comments,
        }
        cloud: dict[str, Callable[[HttpRequest, User], Any]] = {
            "project/search": self._project_search,
            "project/{project}/issuesecuritylevelscheme": self._security_scheme,
            "issuesecurityschemes/{scheme}/members": self._level_members,
            "user/bulk": self._users,
            "search/jql": self._search,
            "attachment/content/{attachment}": self._redirect_to_media,
        }
        data_center: dict[str, Callable[[HttpRequest, User], Any]] = {
            "project": lambda request, user: [self.project(project) for project in self._visible_projects(user)],
            "project/{project}/role": self._roles,
            "user": self._one_user,
            "user/viewissue/search": self._readers,
            "search": self._search,
        }
        # Paths with parameters last: ``project/search`` is no project.
        paths = sorted((cloud if self.cloud else data_center).items()) + sorted(both.items())
        routes = [self._route(f"{self.root}/{path}", answer) for path, answer in paths]
        if self.cloud:
            routes.append(Route(f"{self.root}/issue/bulkfetch", self._bulk_fetch, methods=["POST"]))
            routes.append(Route("/media/{attachment}", self._media))
        else:
            path = f"{self.context}/secure/attachment/{{attachment}}/{{name}}"
            routes.append(self._route(path, lambda request, user: self._file(request.path_params["attachment"], user)))
        return routes

    def _route(self, path: str, answer: Callable[[HttpRequest, User], Any]) -> Route:
        async def respond(request: HttpRequest) -> Response:
            value = answer(request, self._caller(request))
            return value if isinstance(value, Response) else JSONResponse(value)

        return Route(path, respond)

    def _caller(self, request: HttpRequest) -> User:
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        email = None
        if kind.lower() == "basic" and self.cloud:
            email, _, value = base64.b64decode(value).decode().partition(":")
        elif kind.lower() != "bearer":
            value = ""
        user = self.tokens.get(value)
        if user is None or (email is not None and email.lower() != user.email.lower()):
            raise Refusal(401, "Client must be authenticated to access this resource.")
        return user

    # People and groups

    def user(self, user: User, caller: User | None = None) -> Json:
        shown = {
            "self": f"{self.base}/rest/api/2/user?accountId={user.account_id}",
            "displayName": user.display,
            "active": user.is_active,
            "timeZone": "Australia/Sydney",
        }
        if user.shows_email or user is caller:
            shown["emailAddress"] = user.email
        if self.cloud:
            return {**shown, "accountId": user.account_id, "accountType": user.account_type}
        return {**shown, "key": user.account_id, "name": user.name}

    def group(self, group: Group) -> Json:
        return {"name": group.name, **({"groupId": group.id} if self.cloud else {})}

    def _group_members(self, request: HttpRequest, user: User) -> Json:
        self._require_admin(user, "Browse users and groups")
        id, name = request.query_params.get("groupId"), request.query_params.get("groupname")
        groups = [group for group in self.state.groups.values() if (id and group.id == id) or group.name == name]
        if not groups:
            raise Refusal(404, "The group was not found.")
        people = sorted(groups[0].members)
        members = [self.user(self.state.users[id]) for id in people if self.state.users[id].is_active]
        return self._page(request, members, 50)

    def _users(self, request: HttpRequest, user: User) -> Json:
        ids = request.query_params.getlist("accountId")
        users = [self.state.users[id] for id in ids if id in self.state.users]
        return self._page(request, [self.user(person) for person in users], 100, default=10)

    def _one_user(self, request: HttpRequest, user: User) -> Json:
        key, name = request.query_params.get("key"), request.query_params.get("username")
        for person in self.state.users.values():
            if person.account_id == key or person.name == name:
                return self.user(person)
        raise Refusal(404, "The user does not exist")

    def _readers(self, request: HttpRequest, user: User) -> list[Json]:
        issue = self._issue(request.query_params["issueKey"], user)
        readers = [person for person in self.state.users.values() if self.state.may_see(person, issue)]
        return [self.user(person) for person in readers[: int(request.query_params.get("maxResults", 50))]]

    def _applications(self, request: HttpRequest, user: User) -> list[Json]:
        self._require_admin(user, "Administer Jira")
        answers = []
        for key, names in self.state.applications.items():
            answer: Json = {"key": key, "name": key.capitalize(), "groups": sorted(names), "defined": True}
            if self.cloud:
                answer["groupDetails"] = [self.group(self.state.groups[name]) for name in sorted(names)]
            answers.append(answer)
        return answers

    def _require_admin(self, user: User, permission: str) -> None:
        if not user.is_admin:
            raise Refusal(403, f"You need the permission {permission}.")

    def _page(self, request: HttpRequest, entries: Sequence[Any], most: int, *, default: int = 50) -> Json:
        start = int(request.query_params.get("startAt", 0))
        size = min(int(request.query_params.get("maxResults", default)), most)
        values = list(entries[start : start + size])
        is_last = start + len(values) >= len(entries)
        return {"maxResults": size, "startAt": start, "total": len(entries), "isLast": is_last, "values": values}

    # Projects

    def project(self, project: Project) -> Json:
        return {
            "self": f"{self.base}/rest/api/3/project/{project.id}",
            "id": project.id,
            "key": project.key,
            "name": project.name,
            "projectTypeKey": project.type,
            "lead": self.user(self.state.users[project.lead]),
            **({"archived": True} if project.is_archived else {}),
        }

    def _visible_projects(self, user: User) -> list[Project]:
        projects = sorted(self.state.projects.values(), key=lambda project: project.key)
        return [
            project for project in projects if not project.is_archived and self.state.may_see_project(user, project)
        ]

    def _project_search(self, request: HttpRequest, user: User) -> Json:
        return self._page(request, [self.project(project) for project in self._visible_projects(user)], 50)

    def _project(self, request: HttpRequest, user: User) -> Project:
        name = request.path_params["project"]
        for project in self.state.projects.values():
            if name in (project.id, project.key) and self.state.may_see_project(user, project):
                return project
        raise Refusal(404, f"No project could be found with key '{name}'.")

    def _permission_scheme(self, request: HttpRequest, user: User) -> Json:
        project = self._project(request, user)
        self._require_admin(user, "Administer Projects")
        scheme = f"{self.base}/rest/api/3/permissionscheme/{project.id}"
        answer: Json = {"id": int(project.id), "self": scheme, "name": f"{project.key} scheme"}
        if request.query_params.get("expand"):
            answer["permissions"] = [
                {"id": number, "self": f"{scheme}/permission/{number}", **self._grant(grant)}
                for number, grant in enumerate(project.grants, 1)
            ]
        return answer

    def _grant(self, grant: Grant) -> Json:
        return {"permission": grant.permission, "holder": self._holder(grant)}

    def _holder(self, grant: Grant) -> Json:
        holder: Json = {"type": grant.type}
        if grant.parameter:
            holder["parameter"] = grant.parameter
            if self.cloud:
                is_group = grant.type == "group"
                holder["value"] = self.state.groups[grant.parameter].id if is_group else grant.parameter
        return holder

    def _security_scheme(self, request: HttpRequest, user: User) -> Json:
        project = self._project(request, user)
        self._require_admin(user, "Administer Projects")
        if not project.security_scheme:
            raise Refusal(404, "The project has no issue security scheme.")
        levels = [{"id": level.id, "name": level.name} for level in project.levels]
        return {"id": int(project.security_scheme), "name": "Security", "levels": levels}

    def _level_members(self, request: HttpRequest, user: User) -> Json:
        self._require_admin(user, "Administer Jira")
        scheme = request.path_params["scheme"]
        levels = [
            level
            for project in self.state.projects.values()
            if project.security_scheme == scheme
            for level in project.levels
        ]
        members = [
            {"id": number, "issueSecurityLevelId": int(level.id), "holder": self._holder(grant)}
            for level in levels
            for number, grant in enumerate(level.members, 1)
        ]
        return self._page(request, members, 50)

    def _roles(self, request: HttpRequest, user: User) -> Json:
        project = self._project(request, user)
        address = f"{self.base}/rest/api/2/project/{project.id}/role"
        return {name: f"{address}/{id}" for id, name in self.state.roles.items()}

    def _role(self, request: HttpRequest, user: User) -> Json:
        project, role = self._project(request, user), request.path_params["role"]
        if role not in self.state.roles or not user.is_admin:
            raise Refusal(404, "The role was not found, or you may not see it.")
        actors = [self._actor(number, actor) for number, actor in enumerate(sorted(project.roles.get(role, ())), 1)]
        return {"id": int(role), "name": self.state.roles[role], "actors": actors}

    def _actor(self, id: int, actor: str) -> Json:
        if actor.startswith("%"):
            group = self.state.groups[actor[1:]]
            answer: Json = {"id": id, "type": "atlassian-group-role-actor", "displayName": group.name}
            return (
                answer
                | ({"actorGroup": {**self.group(group), "displayName": group.name}} if self.cloud else {})
                | {"name": group.name}
            )
        user = self.state.users[actor]
        answer = {"id": id, "type": "atlassian-user-role-actor", "displayName": user.display}
        return answer | ({"actorUser": {"accountId": user.account_id}} if self.cloud else {"name": user.name})

    # Issues

    def _issue(self, name: str, user: User) -> Issue:
        for issue in self.state.issues.values():
            if name in (issue.id, self.state.key(issue)) and self.state.may_see(user, issue):
                return issue
        raise Refusal(404, "Issue does not exist or you do not have permission to see it.")

    def _one_issue(self, request: HttpRequest, user: User) -> Json:
        issue = self._issue(request.path_params["issue"], user)
        return self.issue(issue, user, _fields(request.query_params.get("fields", "*all")), comments=None)

    def issue(self, issue: Issue, user: User, fields: Sequence[str], *, comments: int | None) -> Json:
        """comments: the most comments in the answer; None: all."""
        has_text = {"*all", "description", "comment"} & set(fields)
        if issue.id in self.faults.broken and has_text:
            raise Refusal(500, "Internal server error")
        everything = self._all_fields(issue, user, comments)
        shown = everything if "*all" in fields else {name: everything[name] for name in fields if name in everything}
        answer: Json = {
            "expand": "renderedFields",
            "id": issue.id,
            "self": f"{self.base}/rest/api/3/issue/{issue.id}",
            "key": self.state.key(issue),
            "fields": shown,
        }
        if not self.cloud:
            rendered: Json = {"description": _html(issue.description)}
            if "comment" in shown:
                visible = [c for c in issue.comments if self.state.may_see_comment(user, issue, c)]
                bodies = [{"id": comment.id, "body": _html(comment.body)} for comment in visible]
                rendered["comment"] = {"comments": bodies}
            answer["renderedFields"] = {name: value for name, value in rendered.items() if name in shown}
        return answer

    def _all_fields(self, issue: Issue, user: User, most: int | None) -> Json:
        state, project = self.state, self.state.projects[issue.project]
        comments = [comment for comment in issue.comments if state.may_see_comment(user, issue, comment)]
        shown = comments if most is None else comments[:most]
        level = next((level for level in project.levels if level.id == issue.level), None)
        fields: Json = {
            "summary": issue.summary,
            "description": self.text(issue.description) if issue.description else None,
            "environment": None,
            "project": {
                "id": project.id,
                "key": project.key,
                "name": project.name,
                "projectTypeKey": project.type,
            },
            "issuetype": {"id": "10001", "name": "Task", "subtask": False},
            "status": {"id": "10000", "name": issue.status},
            "resolution": None,
            "priority": {"id": "3", "name": "Medium"},
            "labels": issue.labels,
            "components": [],
            "fixVersions": [],
            "reporter": self._person(issue.reporter),
            "assignee": self._person(issue.assignee),
            "created": _time(issue.created),
            "updated": _time(issue.updated),
            "attachment": [self.attachment(attachment) for attachment in issue.attachments],
            "comment": {
                "comments": [self.comment(issue, comment) for comment in shown],
                "maxResults": len(shown),
                "total": len(comments),
                "startAt": 0,
            },
            **{name: self._custom(value) for name, value in issue.custom.items()},
        }
        if level is not None:
            fields["security"] = {"id": level.id, "name": level.name}
        if self.cloud:
            roles = {"projectrole": [int(role) for role in issue.restricted_to]} if issue.restricted_to else {}
            fields["issuerestriction"] = {"issuerestrictions": roles, "shouldDisplay": bool(roles)}
        elif issue.archived is not None:
            fields["archiveddate"] = _time(issue.archived)
        return fields

    def _person(self, account: str | None) -> Json | None:
        return None if account is None else self.user(self.state.users[account])

    def _custom(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._custom(entry) for entry in value]
        if value in self.state.users:
            return self.user(self.state.users[value])
        return self.group(self.state.groups[value]) if value in self.state.groups else value

    def comment(self, issue: Issue, comment: Comment) -> Json:
        answer: Json = {
            "self": f"{self.base}/rest/api/3/issue/{issue.id}/comment/{comment.id}",
            "id": comment.id,
            "author": self._person(comment.author),
            "updateAuthor": self._person(comment.author),
            "body": self.text(comment.body),
            "created": _time(comment.created),
            "updated": _time(comment.updated),
        }
        if comment.visibility is not None:
            kind, name = comment.visibility
            shown = self.state.roles[name] if kind == "role" else name
            answer["visibility"] = {"type": kind, "value": shown}
            if self.cloud:
                identifier = name if kind == "role" else self.state.groups[name].id
                answer["visibility"]["identifier"] = identifier
        if self.cloud and self.state.projects[issue.project].type == "service_desk":
            answer["jsdPublic"] = not comment.is_internal
        elif self.cloud:
            answer["jsdPublic"] = True
        return answer

    def attachment(self, attachment: Attachment) -> Json:
        return {
            "self": f"{self.base}/rest/api/3/attachment/{attachment.id}",
            "id": attachment.id,
            "filename": attachment.name,
            "author": self._person(attachment.author),
            "created": _time(attachment.created),
            "size": len(attachment.data),
            "mimeType": attachment.media_type,
            "content": f"{self.base}/rest/api/3/attachment/content/{attachment.id}",
        }

    def text(self, text: Any) -> Any:
        """Return a text as the flavour stores it; one that is no string is a document of ADF already."""
        if not self.cloud or not isinstance(text, str):
            return text
        content = [
            {"type": "paragraph", "content": [{"type": "text", "text": part}]} for part in text.split("\n\n") if part
        ]
        return {"type": "doc", "version": 1, "content": content}

    def _comments(self, request: HttpRequest, user: User) -> Json:
        issue = self._issue(request.path_params["issue"], user)
        visible = [comment for comment in issue.comments if self.state.may_see_comment(user, issue, comment)]
        rows = [self.comment(issue, comment) for comment in visible]
        if "renderedBody" in request.query_params.get("expand", ""):
            rows = [{**row, "renderedBody": _html(comment.body)} for row, comment in zip(rows, visible, strict=True)]
        page = self._page(request, rows, 100)
        return {
            "startAt": page["startAt"],
            "maxResults": page["maxResults"],
            "total": page["total"],
            "comments": page["values"],
        }

    async def _bulk_fetch(self, request: HttpRequest) -> Response:
        user, body = self._caller(request), await request.json()
        if not 0 < len(body["issueIdsOrKeys"]) <= 100:
            raise Refusal(400, "1 to 100 issues have to be requested.")
        rows, errors = [], []
        for name in body["issueIdsOrKeys"]:
            try:
                rows.append(self._issue(name, user))
            except Refusal as refusal:
                errors.append({"id": name, "errorMessage": refusal.message})
        issues = [
            self.issue(issue, user, body["fields"], comments=self.most_comments)
            for issue in sorted(rows, key=lambda issue: int(issue.id))
        ]
        return JSONResponse({"issues": issues, "issueErrors": errors})

    def _search(self, request: HttpRequest, user: User) -> Json:
        matches = self._matches(request.query_params.get("jql", ""), user)
        fields = _fields(request.query_params.get("fields", "id"))
        size = min(int(request.query_params.get("maxResults", 50)), self.faults.most)
        if self.faults.truncated:
            matches = matches[: max(1, size // 2)]
        if not self.cloud:
            start = int(request.query_params.get("startAt", 0))
            page = matches[start : start + size]
            issues = [self.issue(issue, user, fields, comments=self.most_comments) for issue in page]
            return {"startAt": start, "maxResults": size, "total": len(matches), "issues": issues}
        after = self._position(request.query_params.get("nextPageToken"))
        ids = [issue.id for issue in matches]
        start = ids.index(after) + 1 if after in ids else 0
        page = matches[start : start + size]
        answer: Json = {
            "issues": [self.issue(issue, user, fields, comments=self.most_comments) for issue in page],
            "isLast": start + size >= len(matches),
        }
        if self.faults.paging == "endless":
            answer |= {"isLast": False, "nextPageToken": self._page_token(matches[0].id)}
        elif not answer["isLast"] and self.faults.paging is None:
            answer["nextPageToken"] = self._page_token(page[-1].id)
        return answer

    def _matches(self, jql: str, user: User) -> list[Issue]:
        visible = [issue for issue in self.state.issues.values() if self.state.may_see(user, issue)]
        visible = [issue for issue in visible if issue.archived is None]
        if match := _IN_PROJECT.fullmatch(jql):
            [project] = self._projects_in(match[1], user)
            return sorted(
                (issue for issue in visible if issue.project == project.id), key=lambda i: (i.created, i.number)
            )
        if match := _UPDATED.fullmatch(jql):
            since, until = self.state.now() - timedelta(minutes=int(match[1])), self.state.now() - self.index_delay
            ids = {project.id for project in self._projects_in(match[2], user)} if match[2] else None
            return sorted(
                (i for i in visible if since <= i.updated <= until and (ids is None or i.project in ids)),
                key=lambda issue: issue.updated,
            )
        raise Refusal(400, "Error in the JQL Query.")

    def _projects_in(self, keys: str, user: User) -> list[Project]:
        by_key = {project.key: project for project in self._visible_projects(user)}
        names = [key.strip(' "') for key in keys.split(",")]
        for name in names:
            if name not in by_key:
                raise Refusal(400, f"The value '{name}' does not exist for the field 'project'.")
        return [by_key[name] for name in names]

    def _page_token(self, after: str) -> str:
        return base64.urlsafe_b64encode(json.dumps([self.epoch, after]).encode()).decode()

    def _position(self, token: str | None) -> str | None:
        if token is None:
            return None
        try:
            epoch, after = json.loads(base64.urlsafe_b64decode(token))
        except ValueError:
            epoch, after = "", ""
        if epoch != self.epoch:
            raise Refusal(400, "The provided next page token is invalid or expired.")
        return str(after)

    # Files

    def _redirect_to_media(self, request: HttpRequest, user: User) -> Response:
        id = request.path_params["attachment"]
        self._file(id, user)
        return RedirectResponse(f"{self.faults.moved_to or self.base}/media/{id}", status_code=303)

    async def _media(self, request: HttpRequest) -> Response:
        if "authorization" in request.headers and self.faults.moved_to:
            raise Refusal(400, "A credential was sent to the media store.")
        return self._bytes(request.path_params["attachment"])

    def _file(self, id: str, user: User) -> Response:
        for issue in self.state.issues.values():
            if any(attachment.id == id for attachment in issue.attachments) and self.state.may_see(user, issue):
                return self._bytes(id)
        raise Refusal(404, "The attachment was not found.")

    def _bytes(self, id: str) -> Response:
        for issue in self.state.issues.values():
            for attachment in issue.attachments:
                if attachment.id == id:
                    return Response(attachment.data, media_type=attachment.media_type)
        raise Refusal(404, "The attachment was not found.")

    # Events

    def sent(self) -> list[Request]:
        """Return the signed webhooks of everything that happened since the last call."""
        events, self.state.events = self.state.events, []
        return [signed(self._webhook(event), self.webhook_secret) for event in events]

    def _webhook(self, event: Event) -> Json:
        bot = next(iter(self.state.users.values()))
        body: Json = {"timestamp": int(event.at.timestamp() * 1000), "webhookEvent": event.name}
        if event.issue is not None:
            key = self.state.key(event.issue)
            fields = {"summary": event.issue.summary}
            body["issue"] = {"id": event.issue.id, "self": f"{self.base}/issue/{key}", "key": key, "fields": fields}
        if event.comment is not None and event.issue is not None:
            body["comment"] = self.comment(event.issue, event.comment)
        elif event.attachment is not None:
            body["attachment"] = self.attachment(event.attachment)
        else:
            body["user"] = self.user(bot)
        return body


async def _refused(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    if error.status == 401:
        return Response(error.message, 401, media_type="text/plain")
    return JSONResponse({"errorMessages": [error.message], "errors": {}}, status_code=error.status)


def signed(body: Mapping[str, Any], secret: str) -> Request:
    raw = json.dumps(body).encode()
    digest = hmac.new(secret.encode(), raw, hashlib.sha256).hexdigest()
    return Request({"content-type": "application/json", "x-hub-signature": f"sha256={digest}"}, {}, raw)


def _fields(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}+0000"


def _html(text: Any) -> str:
    return "".join(f"<p>{escape(part)}</p>" for part in str(text or "").split("\n\n"))
