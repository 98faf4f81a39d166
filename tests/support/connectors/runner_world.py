"""A world of documents, and a source that reads it as the runner's tests want."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from connectors.protocol import Problem
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Document,
    Entry,
    Gone,
    Group,
    Listed,
    Page,
    Reaction,
    Request,
    Unreadable,
)

PAGE = 3


@dataclass
class World:
    """Documents as a service has them, what happened to them in order, and what its next answers are to be."""

    documents: dict[str, Document | Unreadable] = field(default_factory=dict)
    groups: dict[str, tuple[set[str], set[str]]] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    errors: dict[str, list[Exception]] = field(default_factory=lambda: defaultdict(list))
    """method → what it raises next"""
    truncated: int | None = None
    """Listings end after so many documents."""
    expired_before: int = 0
    """Cursors given before so much history are not known any more."""
    has_log: bool = True
    """Whether the service has a log of changes."""
    full_expires_at: set[int] = field(default_factory=set)
    reads: list[tuple[str, datetime]] = field(default_factory=list)
    """(method, when a page was asked for)"""
    before: Callable[[str, int], Awaitable[None]] | None = None
    """Called with the method and the page's number before each page is read."""
    fetched: Counter[str] = field(default_factory=Counter)
    listening: Callable[[Reaction], Awaitable[None]] | None = None
    closed: int = 0

    def write(self, id_: str, text: str = "text", **fields: Any) -> None:
        given = {"acl_tags": ["staff"], "revision": uuid.uuid4().hex, **fields}
        self.documents[id_] = Document(external_id=id_, title=id_, content=text, **given)
        self.history.append(id_)

    def fill(self, count: int) -> None:
        for n in range(count):
            self.write(f"d{n:03}")

    def silently(self, id_: str, **fields: Any) -> None:
        """A change that no feed tells of."""
        self.documents[id_] = replace(self.documents[id_], **fields)

    def remove(self, id_: str) -> None:
        del self.documents[id_]
        self.history.append(id_)


class WorldSource:
    Options = BaseModel

    def __init__(self, world: World, context: Context) -> None:
        self.world = world
        self.context = context

    async def close(self) -> None:
        self.world.closed += 1

    async def check(self) -> Sequence[Problem]:
        return []

    async def start(self) -> Cursor | None:
        await self._record_read("start", 0)
        return {"at": len(self.world.history)} if self.world.has_log else None

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        last, number = (cursor or {}).get("after", ""), 0
        while True:
            await self._record_read("full", number)
            if number in self.world.full_expires_at and last:
                self.world.full_expires_at.discard(number)
                raise CursorExpired("the cursor of the full read is not known any more")
            ids = sorted(id_ for id_ in self.world.documents if id_ > last)[:PAGE]
            if not ids:
                return
            last, number = ids[-1], number + 1
            yield Page([self.world.documents[id_] for id_ in ids], {"after": last})

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        at, number = int(cursor["at"]), 0
        if at < self.world.expired_before:
            raise CursorExpired("the cursor of changes is not known any more")
        while at < len(self.world.history):
            await self._record_read("changes", number)
            ids = self.world.history[at : at + PAGE]
            at, number = at + len(ids), number + 1
            yield Page([self._entry(id_) for id_ in dict.fromkeys(ids)], {"at": at})

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        ids = sorted(self.world.documents)
        if self.world.truncated is not None:
            ids = ids[: self.world.truncated]
        for number, start in enumerate(range(0, len(ids), PAGE)):
            await self._record_read("slim", number)
            yield [
                Listed(
                    external_id=id_,
                    acl_tags=self.world.documents[id_].acl_tags,
                    required_tags=self.world.documents[id_].required_tags,
                    revision=self.world.documents[id_].revision,
                )
                for id_ in ids[start : start + PAGE]
                if id_ in self.world.documents
            ]

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        assert 0 < len(external_ids) <= 50
        await self._record_read("fetch", 0)
        self.world.fetched.update(external_ids)
        return [self._entry(id_) for id_ in external_ids]

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        await self._record_read("groups", 0)
        for number, (tag, (members, of)) in enumerate(sorted(self.world.groups.items())):
            if tags is None or tag in tags:
                await self._record_read("group", number)
                yield Group(tag, set(members), set(of))

    async def on_event(self, request: Request) -> Reaction:
        return Reaction(ids=json.loads(request.body))

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        self.world.listening = react
        await asyncio.Event().wait()

    def _entry(self, id_: str) -> Entry:
        return self.world.documents.get(id_) or Gone(id_)

    async def _record_read(self, method: str, number: int) -> None:
        self.world.reads.append((method, datetime.now(UTC)))
        if self.world.errors[method]:
            raise self.world.errors[method].pop(0)
        if self.world.before is not None:
            await self.world.before(method, number)
