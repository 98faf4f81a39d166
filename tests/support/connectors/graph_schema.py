"""Microsoft's published schema of Graph as a judge of every exchange with the fake."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from connectors.fakes.graph import FakeGraph
from tests.support.connectors.exchange import recorded

SCHEMA = json.loads((Path(__file__).parent / "graph_schema.json").read_text())
TYPES: Mapping[str, Mapping[str, Any]] = SCHEMA["types"]

PRIMITIVES: Mapping[str, type | tuple[type, ...]] = {
    "Edm.String": str,
    "Edm.Boolean": bool,
    "Edm.Int32": int,
    "Edm.Int64": int,
    "Edm.Double": (int, float),
    "Edm.DateTimeOffset": str,
    "Edm.Guid": str,
    "Edm.Stream": str,
    "Edm.Untyped": object,
}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
ANNOTATIONS = {"@odata.type", "@odata.etag", "@microsoft.graph.sharedChanged"}

RESPONSES = {
    ("GET", r"/sites/getAllSites"): ("site", True),
    ("GET", r"/sites/[^/]+/drives"): ("drive", True),
    ("GET", r"/sites/[^/]+/lists"): ("list", True),
    ("GET", r"/sites/[^/]+/lists/[^/]+/drive"): ("drive", False),
    ("GET", r"/sites/[^/]+/pages/[^/]+/microsoft\.graph\.sitePage"): ("sitePage", False),
    ("GET", r"/sites/[^/]+(:/.*)?"): ("site", False),
    ("GET", r"/users"): ("user", True),
    ("GET", r"/users/[^/]+"): ("user", False),
    ("GET", r"/users/[^/]+/drive"): ("drive", False),
    ("GET", r"/groups/[^/]+/(transitiveMembers|owners)"): ("directoryObject", True),
    ("GET", r"/drives/[^/]+/root/delta"): ("driveItem", True),
    ("GET", r"/drives/[^/]+/items/[^/]+"): ("driveItem", False),
    ("GET", r"/drives/[^/]+/items/[^/]+/permissions"): ("permission", True),
    ("GET", r"/drives/[^/]+/items/[^/]+/content"): (None, False),
    ("POST", r"/subscriptions"): ("subscription", False),
    ("PATCH", r"/subscriptions/[^/]+"): ("subscription", False),
    ("DELETE", r"/subscriptions/[^/]+"): (None, False),
}
"""By method and path: the type of the response, and whether it is a collection."""


def properties(name: str) -> dict[str, str]:
    """All properties of a type, with those that it inherits."""
    kind = TYPES[name]
    inherited = properties(kind["base"]) if kind.get("base") in TYPES else {}
    return {**inherited, **kind.get("properties", {})}


def violations(value: Any, type_: str, path: str = "") -> Iterator[str]:
    """Yield one line for everything in a JSON value that the type does not have."""
    if type_.startswith("Collection("):
        if not isinstance(value, list):
            yield f"{path}: is no list"
            return
        for number, entry in enumerate(value):
            yield from violations(entry, type_[11:-1], f"{path}[{number}]")
        return
    if value is None:
        return
    if type_ in PRIMITIVES:
        if not isinstance(value, PRIMITIVES[type_]) or (type_ != "Edm.Boolean" and isinstance(value, bool)):
            yield f"{path}: {type(value).__name__} instead of {type_}"
        elif type_ == "Edm.DateTimeOffset" and not TIME.fullmatch(value):
            yield f"{path}: is no time"
        return
    if "enum" in TYPES[type_]:
        if value not in TYPES[type_]["enum"]:
            yield f"{path}: {value!r} is not in {type_}"
        return
    if not isinstance(value, dict):
        yield f"{path}: is no {type_}"
        return
    declared = str(value.get("@odata.type", "")).removeprefix("#")
    known = properties(declared if declared in TYPES else type_)
    for name, entry in value.items():
        if name in known:
            yield from violations(entry, known[name], f"{path}/{name}")
        elif name not in ANNOTATIONS:
            yield f"{path}/{name}: not a property of {declared or type_}"


def selected(query: str, type_: str) -> Iterator[str]:
    for name in parse_qs(query).get("$select", [""])[0].split(","):
        if name and name not in properties(f"microsoft.graph.{type_}"):
            yield f"$select={name}: not a property of {type_}"


class Recorder:
    """Judges every exchange by the schema."""

    def __init__(self, fake: FakeGraph) -> None:
        self._fake = fake
        self.judged: dict[str, int] = {}
        self.wrong: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = await recorded(self._fake, scope, receive, send)
        if scope["type"] != "http" or not scope["path"].startswith("/v1.0/"):
            return
        path, query = scope["path"].removeprefix("/v1.0"), scope["query_string"].decode()
        if path == "/$batch":
            self._judge_batch(json.loads(exchange.request), json.loads(exchange.response))
        else:
            body = json.loads(exchange.response) if exchange.response else None
            self.judge(scope["method"], path, query, exchange.status, body)
        if scope["method"] == "POST" and path == "/subscriptions":
            self.wrong += violations(json.loads(exchange.request), "microsoft.graph.subscription", "request")

    def _judge_batch(self, request: Any, response: Any) -> None:
        by_id = {entry["id"]: entry for entry in response["responses"]}
        for entry in request["requests"]:
            path, _, query = entry["url"].partition("?")
            answer = by_id[entry["id"]]
            self.judge(entry["method"], path, query, answer["status"], answer["body"])

    def judge(self, method: str, path: str, query: str, status: int, body: Any) -> None:
        known = (
            (pattern, response)
            for (known_method, pattern), response in RESPONSES.items()
            if method == known_method and re.fullmatch(pattern, path)
        )
        if (match := next(known, None)) is None:
            self.wrong.append(f"{method} {path}: no such request")
            return
        pattern, (type_, is_collection) = match
        name = f"{method} {pattern}"
        self.judged[name] = self.judged.get(name, 0) + 1
        if status >= 400:
            if not isinstance(body, dict) or set(body) != {"error"} or "code" not in body["error"]:
                self.wrong.append(f"{name}: an error of another shape")
            return
        if type_ is None:
            return
        self.wrong += [f"{name}: {line}" for line in selected(query, type_ if type_ != "directoryObject" else "user")]
        full = f"microsoft.graph.{type_}"
        if is_collection:
            links = {key for key in body if key.startswith("@odata.")}
            if set(body) - links != {"value"}:
                self.wrong.append(f"{name}: {sorted(body)}")
            body, full = body["value"], f"Collection({full})"
        self.wrong += [f"{name}: {line}" for line in violations(body, full)]
