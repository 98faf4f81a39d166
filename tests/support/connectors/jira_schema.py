"""Atlassian's published description of Jira Data Center as a judge of every exchange with the fake.

The names that it gives to parameters and properties are here (version 10.3.24, jira_software_dc_10003_swagger.v3.json).
It leaves out what its own examples show: the type and lead of a project, and the type of a role's actor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from connectors.fakes.jira import FakeJira
from tests.support.connectors.exchange import recorded

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


class Recorder:
    """Judges every exchange."""

    def __init__(self, fake: FakeJira) -> None:
        self._fake = fake
        self.judged: dict[str, int] = {}
        self.wrong: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = await recorded(self._fake, scope, receive, send)
        if scope["type"] != "http" or "/rest/api/" not in scope["path"]:
            return
        query = {name for name, _ in parse_qsl(scope["query_string"].decode())}
        answer = json.loads(exchange.response) if exchange.response and exchange.status != 401 else None
        self._judge(scope["method"], scope["path"], query, exchange.status, answer)

    def _judge(self, method: str, path: str, query: set[str], status: int, answer: Any) -> None:
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
