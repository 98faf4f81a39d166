"""Atlassian's published descriptions of Jira as a judge of every exchange with the fake.

Cloud's is an excerpt (``tests/data/jira-openapi.json``). Data Center's carries no licence to copy it, so that only the
names are here that it gives to parameters and properties (version 10.3.24, jira_software_dc_10003_swagger.v3.json).
It leaves out what its own examples show: the type and lead of a project, and the type of a role's actor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import jsonschema
from starlette.types import Message, Receive, Scope, Send

from connectors.fakes.jira import FakeJira

OPENAPI = json.loads((Path(__file__).parents[2] / "data" / "jira-openapi.json").read_text())
CLOUD: Mapping[str, Mapping[str, Any]] = OPENAPI["operations"]
FIELDS = {
    "attachment": {"type": "array", "items": {"$ref": "#/schemas/Attachment"}},
    "comment": {"$ref": "#/schemas/PageOfComments"},
    "project": {"$ref": "#/schemas/ProjectDetails"},
    "reporter": {"$ref": "#/schemas/UserDetails"},
    "assignee": {"$ref": "#/schemas/UserDetails"},
    "status": {"$ref": "#/schemas/StatusDetails"},
    "issuetype": {"$ref": "#/schemas/IssueTypeDetails"},
    "priority": {"$ref": "#/schemas/Priority"},
    "security": {"$ref": "#/schemas/SecurityLevel"},
    "labels": {"type": "array", "items": {"type": "string"}},
    "updated": {"type": "string"},
}
"""The description leaves the fields of an issue open; these are its own schemas of what is in them."""

_USER = {"self", "key", "name", "emailAddress", "avatarUrls", "displayName", "active", "timeZone"}
_ISSUE = {"expand", "id", "self", "key", "fields", "renderedFields"}
_PAGE = {"maxResults", "startAt", "total"}
DATA_CENTER: Mapping[str, tuple[set[str], set[str]]] = {
    "myself": (set(), _USER | {"locale", "deleted"}),
    "project": (
        {"includeArchived", "expand", "recent", "browseArchive"},
        {"self", "id", "key", "name", "archived", "projectTypeKey", "lead"},
    ),
    "project/{}": ({"expand"}, {"self", "id", "key", "name", "archived", "projectTypeKey", "lead"}),
    "project/{}/permissionscheme": ({"expand"}, {"id", "self", "name", "description", "permissions"}),
    "project/{}/role": (set(), set()),
    "project/{}/role/{}": (set(), {"self", "name", "id", "description", "actors"}),
    "group/member": (
        {"includeInactiveUsers", "maxResults", "groupname", "startAt"},
        _PAGE | {"isLast", "values", "self", "nextPage"},
    ),
    "applicationrole": (
        set(),
        {"key", "name", "groups", "defaultGroups", "defined", "selectedByDefault", "numberOfSeats", "userCount"},
    ),
    "user": ({"includeDeleted", "key", "username"}, _USER),
    "user/viewissue/search": ({"projectKey", "issueKey", "maxResults", "username"}, _USER),
    "search": (
        {"expand", "jql", "maxResults", "validateQuery", "fields", "startAt"},
        _PAGE | {"expand", "issues", "names", "schema", "warningMessages"},
    ),
    "issue/{}": ({"expand", "fields", "updateHistory", "properties"}, _ISSUE),
    "issue/{}/comment": ({"expand", "maxResults", "orderBy", "startAt"}, _PAGE | {"comments"}),
}
"""By path: the parameters of the query, and the properties of the answer or of the entries of a list."""


def violations(value: Any, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for everything in a JSON value that a schema of Cloud's description does not have."""
    whole = {"schemas": OPENAPI["schemas"], **schema}
    for error in jsonschema.Draft202012Validator(whole).iter_errors(value):
        yield f"{error.json_path}: {error.message[:200]}"


class Recorder:
    """Judges every exchange."""

    def __init__(self, fake: FakeJira) -> None:
        self._fake = fake
        self.judged: dict[str, int] = {}
        self.wrong: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body, request_body = 0, b"", b""

        async def on_send(message: Message) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")
            await send(message)

        async def on_receive() -> Message:
            nonlocal request_body
            message = await receive()
            request_body += message.get("body", b"")
            return message

        await self._fake(scope, on_receive, on_send)
        if scope["type"] != "http" or "/rest/api/" not in scope["path"]:
            return
        query = {name for name, _ in parse_qsl(scope["query_string"].decode())}
        answer = json.loads(body) if body and status != 401 else None
        judge = self._judge_cloud if self._fake.cloud else self._judge_data_center
        judge(scope["method"], scope["path"], query, request_body, status, answer)

    def _judge_cloud(
        self, method: str, path: str, query: set[str], request_body: bytes, status: int, answer: Any
    ) -> None:
        names = sorted(CLOUD, key=lambda name: name.count("{"))
        matching = (n for n in names if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", n), f"{method} {path}"))
        if (name := next(matching, None)) is None:
            self.wrong.append(f"{method} {path}: no such operation")
            return
        self.judged[name] = self.judged.get(name, 0) + 1
        operation = CLOUD[name]
        self.wrong += [f"{name}: no parameter {other}" for other in query - set(operation["parameters"])]
        if "body" in operation:
            self.wrong += [f"{name}: no {other}" for other in json.loads(request_body).keys() - set(operation["body"])]
        schema = {"$ref": "#/schemas/ErrorCollection"} if status >= 400 else operation.get("response")
        if schema is not None and status != 401:
            self.wrong += [f"{name}: {line}" for line in violations(answer, schema)]
        for issue in (answer or {}).get("issues", ()) if isinstance(answer, dict) else ():
            for field, value in issue.get("fields", {}).items():
                if field in FIELDS and value is not None:
                    self.wrong += [f"{name} {field}: {line}" for line in violations(value, FIELDS[field])]

    def _judge_data_center(
        self, method: str, path: str, query: set[str], request_body: bytes, status: int, answer: Any
    ) -> None:
        path = path.partition("/rest/api/2/")[2]
        names = sorted(DATA_CENTER, key=lambda name: name.count("{"))
        matching = (n for n in names if re.fullmatch(n.replace("{}", "[^/]+"), path))
        if method != "GET" or (name := next(matching, None)) is None:
            self.wrong.append(f"{method} {path}: no such operation")
            return
        self.judged[name] = self.judged.get(name, 0) + 1
        parameters, properties = DATA_CENTER[name]
        self.wrong += [f"{name}: no parameter {other}" for other in query - parameters]
        if status >= 400:
            properties = {"errorMessages", "errors"}
        for entry in answer if isinstance(answer, list) else [answer]:
            if properties:
                self.wrong += [f"{name}: no property {other}" for other in entry.keys() - properties]
