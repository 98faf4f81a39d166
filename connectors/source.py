"""What a source of documents must be able to do to be connected.

A source tells what is there *now*; it never publishes. The runner stamps the time before it asks, compares the answer
with what was published last, records which documents it is about to publish, publishes what differs, waits for Kafka,
and only then keeps the cursor. So a source may be asked the same thing twice, may answer the same thing twice, and may
be killed at any moment.

Events are hints: they say what to read again, never what it says. Sweeps (``slim``) are the truth.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from connectors.protocol import Problem
from pipeline.core.errors import PenstockError
from pipeline.stores.postgres import Pool
from topics.messages import Metadata

Cursor = Mapping[str, Any]
"""How far a source was read, in its own words: a small JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document as the source has it now, whole, with its access read at the same time.

    A tag ``user:P`` is held by the principal P alone, without being told. Every other tag is a group of this source,
    whose members ``groups`` tells. Access that is not known for certain is empty: nobody.
    """

    external_id: str
    """Stays the same as long as it is the same document, whatever it is called and wherever it is moved."""
    title: str
    content: str
    media_type: str = "text/plain"
    acl_tags: Collection[str]
    """A reader needs any of these; empty: nobody."""
    required_tags: Collection[str] = ()
    """A reader needs all of these besides."""
    version: int | None = None
    """The source's own where it has one that grows with every change; None: the runner issues one."""
    revision: str | None = None
    """Tells one state of its content from another, as ``slim`` does without reading it. None: cannot tell."""
    source_url: str | None = None
    author: str | None = None
    source_modified_at: datetime | None = None
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gone:
    """The source answers for certain that there is no such document (any more), or that not ours to read."""

    external_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A document is there, but its text cannot be had. What was published of it stays, under the access given here."""

    external_id: str
    code: str
    """A bounded label, e.g. ``too_large``, ``encrypted``, ``needs_ocr``."""
    message: str
    """What and what to do, for its owner; without content."""
    acl_tags: Collection[str]
    required_tags: Collection[str] = ()
    revision: str | None = None


Entry = Document | Gone | Unreadable


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries, and the cursor with which reading goes on after them."""

    entries: Sequence[Entry]
    cursor: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A document as a listing shows it: no text."""

    external_id: str
    acl_tags: Collection[str]
    required_tags: Collection[str] = ()
    revision: str | None = None
    """Equal to ``Document.revision`` as long as the content, title and metadata are the same."""


@dataclass(frozen=True, slots=True)
class Group:
    """Who holds a tag of this source: all of them."""

    tag: str
    members: Collection[str]
    """Principals, by the name they have in the whole company: the e-mail address in lower case where there is one."""
    of: Collection[str] = ()
    """Tags whose holders hold this one too (groups within groups; the groups that a restriction names)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a source has sent us. Header names are in lower case."""

    headers: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes
    """As it came over the wire: signatures are over these bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """What an event makes us do. It is answered before any of it is done."""

    ids: Collection[str] = ()
    """Documents to fetch again now."""
    groups: Collection[str] = ()
    """Tags whose members to list again now."""
    changes: bool = False
    """Whether to ask for changes now."""
    sweep: bool = False
    """Whether to sweep now: access of many documents may have moved."""
    status: int = 200
    answer: bytes = b""
    media_type: str = "text/plain"


class Refused(PenstockError):
    """An event that does not prove where it comes from (signature, token, age). Answered with 401, and counted."""


class CursorExpired(PenstockError):
    """The source no longer knows the cursor. A full read starts again (what is unchanged is not published again);
    changes go on from now, after a sweep."""


class Memory(Protocol):
    """What a source keeps between runs besides cursors (push channels and when they end), in Postgres. Small JSON."""

    async def get(self, name: str) -> Any | None: ...

    async def put(self, name: str, value: Any | None) -> None:
        """None forgets it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a source is given by those who run it."""

    name: str
    """Of this instance, in the settings file and in ``source`` of every message."""
    tenant: str
    memory: Memory
    folder: Path
    """Its own, on disk; it survives restarts but may be lost."""
    events_url: str | None = None
    """Where the source's events reach us, as seen from outside; None: they do not, and polling has to do."""
    postgres: Pool | None = None
    """For what is itself a place of documents (uploads) and keeps a table of them. Whoever reads one elsewhere has
    ``memory`` for what little it must keep."""


class Source(Protocol):
    """One instance of a connector. All methods but ``full`` and ``changes`` may run at the same time.

    Every method raises Retryable (also Deferred) when the source cannot answer now, and Misconfigured when only a
    person can help (a token without the scope, a wrong address). What a page holds was read after the page was asked
    for: nothing is read ahead, and no access is remembered from an earlier page.
    """

    Options: ClassVar[type[BaseModel]]
    """Its settings; ``extra="forbid"``. Secrets are SecretStr fields, filled from the environment."""

    def __init__(self, options: Any, context: Context) -> None: ...

    async def close(self) -> None: ...

    async def check(self) -> Sequence[Problem]:
        """What exactly is missing (scope, token, address, permission), one problem each. Changes nothing."""
        ...

    async def start(self) -> Cursor:
        """The cursor of ``changes`` from which everything that happens after this call will be seen."""
        ...

    def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        """Everything, in an order that survives changes meanwhile; from the beginning or from a page's cursor.
        Raises CursorExpired."""
        ...

    def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        """What changed since, at least once each; ends when there is no more. Raises CursorExpired."""
        ...

    def slim(self) -> AsyncIterator[Sequence[Listed]]:
        """Everything that ``full`` would read, and nothing else, without text. Who cannot list it to its end raises: a
        listing that ends is complete."""
        ...

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        """These documents (at most 50) as they are now, each once, in any order."""
        ...

    def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        """All tags and who holds them, or these tags only. A tag that was asked for and is not yielded has no holders;
        a complete listing that lacks a tag takes it from everybody."""
        ...

    async def on_event(self, request: Request) -> Reaction:
        """Answers within a second, from the request alone where that is possible. Raises Refused."""
        ...

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        """Follow events that we have to fetch (a socket), and keep push channels alive, until cancelled. Returns at
        once where there is nothing of the kind."""
        ...


class Playground(Protocol):
    """A source for the contract suite (``penstock connector conform``) to play with: a fake of the service, or a real
    one in a corner of its own. ``name`` is the suite's name of a document; texts are a few paragraphs.

    One whose documents live in our own Postgres has ``placed(tenant, source, postgres)`` besides, called first."""

    options: Mapping[str, Any]
    """The instance's settings, as in the file. One page holds three documents at most, where that can be set."""
    environment: Mapping[str, str]
    """Secrets, by variable."""
    inside: str
    """A principal who may read what is written."""
    outside: str
    """One who may not."""

    async def write(self, name: str, text: str) -> str:
        """Create or change a document that ``inside`` may read. Returns its external id."""
        ...

    async def move(self, name: str) -> None:
        """Rename it, or put it elsewhere; the same document still."""
        ...

    async def remove(self, name: str) -> None: ...

    async def restore(self, name: str) -> None:
        """Bring back what was removed, as it was."""
        ...

    async def restrict(self, name: str) -> None:
        """Withdraw it from ``inside``, at a parent if the source inherits; the text is untouched."""
        ...

    async def leave(self) -> None:
        """``inside`` loses the membership by which it reads what ``write`` makes."""
        ...

    def sent(self) -> Sequence[Request]:
        """The events that the source would have sent us since the last call, signed; empty: it knows none."""
        ...

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """throttled: the next n requests answer 429 with Retry-After 0 or 1; failing: 500. truncated: listings end
        early as if that were all, until told otherwise. expired: cursors given so far are no longer known."""
        ...


Playing = Callable[[], AbstractAsyncContextManager[Playground]]
"""A connector class may have ``playground: ClassVar[Playing]``; without one, conform cannot prove its laws."""
