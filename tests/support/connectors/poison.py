"""Poison in a service's answers: fields of some documents that hold what no client expects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

RAW = {"@huge@": "9" * 5_000, "@deep@": "[" * 3_000 + "]" * 3_000}
"""Placeholders of values that Python writes as no JSON."""
POISONS: Sequence[Any] = (
    None,
    [],
    [[17]],
    {"x": 1},
    17,
    -1.5,
    True,
    "",
    "a\x00b",
    "\ud800",
    "9999-99-99T99:99:99.000Z",
    "0001-01-01T00:00:00+14:00",
    "x" * 10_000,
    "@huge@",
    "@deep@",
)
IDENTITY = frozenset(
    {"id", "ts", "number", "key", "fileId", "thread_ts", "name", "node_id", "databaseId", "idAsString"}
)
"""The fields that name an item: with another value it is another one."""
PLACING = frozenset(
    {
        "__typename",
        "changeType",
        "content",
        "deleted",
        "driveId",
        "file",
        "folder",
        "kind",
        "mimeType",
        "package",
        "pageId",
        "parentReference",
        "parents",
        "project",
        "remoteItem",
        "removed",
        "root",
        "space",
        "spaceId",
        "status",
        "subtype",
        "text",
        "trashed",
        "type",
        "value",
    }
)
"""The fields that say where an item is, of which sort, and whether it exists: with another value the service says that
it is gone, or none of ours. (A message is a document because of its text, of which unknown parts are left out, as of
the ``content`` of a text of Jira; ``value`` is what a list of Graph holds.)"""


@dataclass
class Poisoner:
    """An ASGI application that poisons one field of each of some documents, in each answer in front of a fake."""

    app: ASGIApp
    ids: Sequence[str] = ()
    """The documents, by the id that the service has for them."""
    offset: int = 0
    """With which field and poison the first document begins; each other document has the next."""
    within: str | None = None
    """A field that items have, where ``ids`` name what holds them."""
    shown: set[str] = field(default_factory=set)
    """Each field that was poisoned, by its path, with the poison."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.ids:
            await self.app(scope, receive, send)
            return
        messages: list[Message] = []

        async def gather(message: Message) -> None:
            messages.append(message)

        await self.app(scope, receive, gather)
        body = b"".join(message.get("body", b"") for message in messages[1:])
        body = self._poisoned(body)
        headers = [(name, value) for name, value in messages[0]["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({**messages[0], "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def poison_of(self, number: int) -> Any:
        """Return the poison of one of the documents."""
        return POISONS[(self.offset * 7 + number) % len(POISONS)]

    def _items(self, document: Any, id_: str) -> Iterator[dict[str, Any]]:
        for item in _items(document, id_):
            yield from [item] if self.within is None else _having(item, self.within)

    def _poisoned(self, body: bytes) -> bytes:
        try:
            document = json.loads(body)
        except ValueError:
            return body
        for number, id_ in enumerate(self.ids):
            for item in self._items(document, id_):
                fields = [*_fields(item)]
                if not fields:
                    continue
                path, put = fields[(self.offset + number) % len(fields)]
                poison = self.poison_of(number)
                put(poison)
                self.shown.add(f"{path}: {str(poison)[:30]!r}")
        text = json.dumps(document)
        return re.sub(r'"(@[a-z]+@)"', lambda match: RAW[match[1]], text).encode()


def _items(node: Any, id_: str) -> Iterator[dict[str, Any]]:
    """Yield the innermost objects that have the id."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    inner = [item for child in children for item in _items(child, id_)]
    if inner:
        yield from inner
    elif isinstance(node, dict) and any(str(node.get(name)) == id_ for name in IDENTITY):
        yield node


def _having(node: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost objects that have a field."""
    if isinstance(node, dict) and name in node:
        yield node
    else:
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from _having(child, name)


def is_loud(poison: Any) -> bool:
    """Whether nothing can take a poison for a text, or for a field that is empty."""
    return poison in RAW if isinstance(poison, str) else bool(poison)


def _fields(item: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield the fields of an item, also those within its objects and lists, with what replaces the value of each."""
    for name in sorted(item):
        if name in IDENTITY | PLACING or name.startswith("@"):
            continue
        yield f"{prefix}{name}", lambda value, name=name: item.__setitem__(name, value)  # type: ignore[misc, attr-defined]
        value = item[name]
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                yield from _fields(inner, f"{prefix}{name}.")
