"""The catalogue of vendors' misbehaviour (``misbehaviour.toml``), and the switch by which a fake shows an entry of it.

Each entry is something that a service was reported to do although its documentation does not say so. The fakes are
written from the same documentation as the connectors, and would share each of its mistakes.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote_plus, urlencode

from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Outcome = Literal["tolerated", "unreadable", "closed", "set-aside", "stops"]
"""tolerated: everything is read as without the fault. unreadable: the documents keep their published text, with the
reason in the status. closed: nobody may read the documents. set-aside: parts are named in the status, and what was
published of them stays. stops: the instance reports an error, and changes nothing."""


class Fault(BaseModel):
    """One faulty answer. It replaces the answers to matching requests, or changes them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    request: str
    """A regular expression for ``METHOD /path?query``, decoded; the fields of a form count as query. ``{name}`` stands
    for the id of the document or place of that name, ``{name:0}`` for its part before the first colon or slash."""
    contains: str | None = None
    """Only answers whose body matches this, with the same placeholders."""
    query: dict[str, str] = Field(default_factory=dict)
    """Parameters of the request's query that the service replaces by these, where the request has them."""
    times: int | None = None
    """The number of faulty answers; None: all."""
    status: int | None = None
    """None: the status of the real answer."""
    headers: dict[str, str] = Field(default_factory=dict)
    body: str | None = None
    """The body, as text; None: that of the real answer."""
    drop: tuple[str, ...] = ()
    """Paths in the answer's JSON to remove, such as ``results.*.version``."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Paths in the answer's JSON to replace, with the new values."""
    null: tuple[str, ...] = ()
    """Paths in the answer's JSON to replace by null."""
    program: dict[str, Any] = Field(default_factory=dict)
    """For a program (``connectors.fakes.airbyte``): the faults to show with its command ``request``."""
    cut: bool = False
    """Whether the body ends in its middle."""


class Entry(BaseModel):
    """An entry of the catalogue."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    kind: str
    """The kind of source that it concerns, as for ``connector conform``."""
    source: str
    """The public report or page that describes it."""
    summary: str
    faults: tuple[Fault, ...]
    outcome: Outcome
    documents: tuple[str, ...] = ()
    """The documents that the outcome concerns; for ``set-aside``: those that a first crawl cannot read."""
    says: str = ""
    """A text that the status contains."""
    until_changed: bool = False
    """Whether the service states a reason that holds until a document changes: it is not read again before."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the instance besides those of the playground."""


@cache
def catalogue() -> Sequence[Entry]:
    """Return all entries. Raises ValidationError for one that is not valid."""
    raw = tomllib.loads((Path(__file__).parent / "misbehaviour.toml").read_text())
    return [Entry.model_validate(entry) for entry in raw["entry"]]


@dataclass
class Misbehaving:
    """An ASGI application that shows faults in front of a fake."""

    app: ASGIApp
    faults: list[tuple[Fault, re.Pattern[str], re.Pattern[str] | None]] = field(default_factory=list)
    shown: int = 0
    """The number of faulty answers since the last call of ``show``."""
    _left: dict[int, int] = field(default_factory=dict)

    def show(self, faults: Sequence[Fault], ids: Mapping[str, str]) -> None:
        """Show these faults from now on, instead of those before. ids: the ids of documents, by name."""
        self.shown = 0
        self.faults = [
            (fault, _pattern(fault.request, ids), _pattern(fault.contains, ids) if fault.contains else None)
            for fault in faults
        ]
        self._left = {n: fault.times for n, fault in enumerate(faults) if fault.times is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.faults:
            await self.app(scope, receive, send)
            return
        request = await _body(receive)
        form = request.decode("utf-8", "replace")
        line = unquote_plus(f"{scope['method']} {scope['path']}?{scope['query_string'].decode()}&{form}")

        async def receive_again() -> Message:
            return {"type": "http.request", "body": request, "more_body": False}

        matching = [
            (number, fault, contains)
            for number, (fault, pattern, contains) in enumerate(self.faults)
            if pattern.search(line) and self._left.get(number) != 0
        ]
        if not matching:
            await self.app(scope, receive_again, send)
            return
        answer = _Answer()
        replaced = {name: value for _, fault, _ in matching for name, value in fault.query.items()}
        pairs = parse_qsl(scope["query_string"].decode(), keep_blank_values=True)
        query = urlencode([(name, replaced.get(name, value)) for name, value in pairs])
        await self.app({**scope, "query_string": query.encode()} if replaced else scope, receive_again, answer.send)
        for number, fault, contains in matching:
            if contains is None or contains.search(answer.body.decode("utf-8", "replace")):
                if number in self._left:
                    self._left[number] -= 1
                self.shown += 1
                answer.change(fault)
        await answer.replay(send)


class _Answer:
    def __init__(self) -> None:
        self.status = 200
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    def change(self, fault: Fault) -> None:
        self.status = fault.status or self.status
        if fault.body is not None:
            self.body = fault.body.encode()
            is_json = fault.body[:1] in ("{", "[")
            self._set("content-type", "application/json" if is_json else "text/html")
        if fault.drop or fault.set or fault.null:
            document = json.loads(self.body)
            for path in fault.drop:
                _edit(document, path.split("."), None)
            for path, value in [*fault.set.items(), *((path, None) for path in fault.null)]:
                _edit(document, path.split("."), lambda value=value: value)
            self.body = json.dumps(document).encode()
        for name, value in fault.headers.items():
            self._set(name, value)
        length = len(self.body)
        if fault.cut:
            self.body = self.body[: length // 2]
            length = len(self.body)  # a proxy that cut the body off states the length of what is left
        self._set("content-length", str(length))

    def _set(self, name: str, value: str) -> None:
        self.headers = [pair for pair in self.headers if pair[0].lower() != name.lower().encode()]
        self.headers.append((name.lower().encode(), value.encode()))

    async def replay(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


def _edit(node: Any, path: Sequence[str], make: Any) -> None:
    """Replace what is at a path, or remove it where ``make`` is None. ``*`` stands for all entries."""
    first, rest = path[0], path[1:]
    if isinstance(node, list):
        keys: list[Any] = list(range(len(node))) if first == "*" else [int(first)] if first.isdigit() else []
        keys = [key for key in keys if key < len(node)]
    elif isinstance(node, dict):
        keys = list(node) if first == "*" else [first] if first in node or (make and not rest) else []
    else:
        return
    for key in reversed(keys):
        if rest:
            _edit(node[key], rest, make)
        elif make is None:
            del node[key]
        else:
            node[key] = make()


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _pattern(text: str, ids: Mapping[str, str]) -> re.Pattern[str]:
    def id_of(match: re.Match[str]) -> str:
        id_ = ids[match["name"]]
        return re.escape(re.split("[:/]", id_)[int(match["part"])] if match["part"] else id_)

    return re.compile(re.sub(r"\{(?P<name>[a-z]+)(?::(?P<part>\d))?\}", id_of, text))
