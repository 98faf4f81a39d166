"""The contract of a source of documents.

A source reports what exists *now*; it never publishes. The runner takes a stamp before each request, compares the
response with what was published last, records which documents it is about to publish, publishes what differs, waits for
Kafka, and only then stores the cursor. A source may therefore be read twice from the same place, may return the same
thing twice, and may be killed at any moment.

Events are hints: they say what to read again, never its content. Sweeps (``slim``) are authoritative.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from pydantic import BaseModel

from connectors.errors import BadEntry
from connectors.protocol import Problem
from connectors.room import hold
from connectors.set_aside import SetAside
from pipeline.core.errors import PenstockError
from pipeline.core.metadata_keys import KeyType
from topics.messages import Metadata

if TYPE_CHECKING:
    from pipeline.stores.postgres import (
        Pool,
    )  # not at run time: who writes a source need not install a database's client

MetadataKeys = Mapping[str, KeyType]
"""Keys of metadata, with their types."""
Cursor = Mapping[str, Any]
"""How far a source was read: a small JSON object, which the source alone interprets."""


class _Field(NamedTuple):
    """A field whose type is checked when a source makes an entry: a wrong one would fail far from the source's code."""

    name: str
    types: frozenset[type]
    """Types that need no further look: an entry is checked in half a microsecond."""
    allows: Callable[[Any], bool]
    """Whether a value of another type will do."""
    expected: str

    def of(self, name: str) -> _Field:
        return self._replace(name=name)


def _is_collection(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping)


_TEXT = _Field("", frozenset({str}), lambda value: isinstance(value, str), "text")
_TEXT_OR_NONE = _Field("", frozenset({str, type(None)}), lambda value: isinstance(value, str), "text, or None")
_TEXTS = _Field("", frozenset({list, tuple, set, frozenset}), _is_collection, "a list of texts")
_TIME = _Field(
    "",
    frozenset({type(None)}),
    lambda value: isinstance(value, datetime) and value.tzinfo is not None,
    "a datetime with a time zone",
)
_NUMBER = _Field("", frozenset({int, type(None)}), lambda _: False, "a whole number, or None")
_METADATA = _Field("", frozenset({dict}), lambda value: isinstance(value, Mapping), "a dictionary")

_NAMED = (_TEXT.of("external_id"), _TIME.of("read_at"))
_LISTED = (*_NAMED, _TEXTS.of("acl_tags"), _TEXTS.of("required_tags"), _TEXT_OR_NONE.of("revision"))
_DOCUMENT = (*_LISTED, _NUMBER.of("version"), _METADATA.of("metadata"))
_UNREADABLE = (*_LISTED, _TEXT.of("code"), _TEXT.of("message"))
_GROUP = (_TEXT.of("tag"), _TEXTS.of("members"), _TEXTS.of("of"))
_REACTION = (_TEXTS.of("ids"), _TEXTS.of("groups"))


def _check(entry: object, fields: Sequence[_Field]) -> None:
    """Raise BadEntry, which names the field and what to return, if a field has another type than it is declared
    with. What only spoils this one document (a title that is no text, a tag that is none) is published as a problem of
    the document instead, or admits nobody."""
    for name, types, allows, expected in fields:
        value = getattr(entry, name)
        if type(value) not in types and not allows(value):
            kind = "None" if value is None else type(value).__name__
            raise BadEntry(f"{name} of {type(entry).__name__} is {kind}: return {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A complete document as the source has it now, with its access read at the same time.

    The principal P alone holds the tag ``user:P``, which needs no listing. Every other tag is a group of this source,
    whose members ``groups`` lists. Access that is not known for certain is left empty, so that nobody may read it.
    """

    external_id: str
    """Stays the same for the life of the document, however it is renamed or moved."""
    title: str
    content: str
    media_type: str = "text/plain"
    acl_tags: Collection[str]
    """A reader needs at least one of these; if it is empty, nobody may read the document."""
    required_tags: Collection[str] = ()
    """A reader also needs all of these."""
    version: int | None = None
    """The source's own version, if it has one that grows with every change; with None the runner issues one."""
    revision: str | None = None
    """Identifies the state of the content, as in ``slim``; None if the source has nothing of the kind."""
    source_url: str | None = None
    author: str | None = None
    source_modified_at: datetime | None = None
    metadata: Metadata = field(default_factory=dict)
    read_at: datetime | None = None
    """When the source began to read it, if that was before the request; None: after the request."""

    def __post_init__(self) -> None:
        _check(self, _DOCUMENT)
        hold((self.title, self.content, *self.metadata.values()))


@dataclass(frozen=True, slots=True)
class Gone:
    """The source says for certain that the document does not exist (any more), or is not ours to read."""

    external_id: str
    read_at: datetime | None = None
    """As in ``Document``."""

    def __post_init__(self) -> None:
        _check(self, _NAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A document exists, but its text cannot be read. What was published of it stays, under this access."""

    external_id: str
    code: str
    """A bounded label, e.g. ``too_large``, ``encrypted``, ``needs_ocr``."""
    message: str
    """The problem and what to do about it, for the document's owner; without content."""
    acl_tags: Collection[str]
    required_tags: Collection[str] = ()
    revision: str | None = None
    read_at: datetime | None = None
    """As in ``Document``."""

    def __post_init__(self) -> None:
        _check(self, _UNREADABLE)


Entry = Document | Gone | Unreadable


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries, and the cursor from which reading continues after them; None: it continues where it did before
    them, because a later page has the cursor."""

    entries: Sequence[Entry]
    cursor: Cursor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A document in a listing, without its text."""

    external_id: str
    acl_tags: Collection[str]
    required_tags: Collection[str] = ()
    revision: str | None = None
    """Equal to ``Document.revision`` as long as the content, title and metadata are the same."""
    read_at: datetime | None = None
    """As in ``Document``."""

    def __post_init__(self) -> None:
        _check(self, _LISTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlisted:
    """A part of the source that a listing could not read. Nothing in it counts as deleted; the next listing tries it
    again."""

    part: str
    """Its kind and name, such as ``space ENG``."""
    reason: str
    """The problem and what to do about it; without content."""
    tag: str | None = None
    """A tag in ``acl_tags`` of every document of the part; None: any document may belong to it."""
    id_prefix: str | None = None
    """How the external ids of the part's documents begin, and no others, instead of a tag."""
    is_closed: bool = False
    """True if nobody knows who may read the part, which ``id_prefix`` names: nobody may, until it is listed again."""
    is_document: bool = False
    """Whether the part is a single document. It is fetched by name, which shows whether it still exists."""


@dataclass(frozen=True, slots=True)
class Group:
    """All holders of one tag of this source."""

    tag: str
    members: Collection[str]
    """Principals, by their company-wide name: the e-mail address in lower case, if there is one."""
    of: Collection[str] = ()
    """Tags whose holders hold this one, too (groups within groups; the groups that a restriction names)."""

    def __post_init__(self) -> None:
        _check(self, _GROUP)


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Some tags, each with all of its holders, and the cursor after them; None: a listing cannot continue there."""

    groups: Sequence[Group]
    cursor: Cursor | None


@dataclass(frozen=True, slots=True)
class Request:
    """A request that a source has sent to Penstock. Header names are in lower case."""

    headers: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes
    """The body as received: signatures cover these bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """The reaction to an event, and the response to it, which is sent before the reaction begins."""

    ids: Collection[str] = ()
    """Documents to fetch again now."""
    groups: Collection[str] = ()
    """Tags whose members to list again now."""
    changes: bool = False
    """Whether to read changes now."""
    sweep: bool = False
    """Whether to sweep now, because the access of many documents may have changed."""
    status: int = 200
    answer: bytes = b""
    media_type: str = "text/plain"

    def __post_init__(self) -> None:
        _check(self, _REACTION)


class Refused(PenstockError):
    """An event does not prove its origin (signature, token, age). It is answered with 401, and counted."""


class CursorExpired(PenstockError):
    """The source no longer knows the cursor. A full read starts again, without publishing unchanged documents again;
    reading changes continues from now, after a sweep."""


CREDENTIAL = "credential"
"""Name in a source's memory of a credential that replaces one of the settings. A check uses and replaces it, too."""


class Memory(Protocol):
    """Small JSON values that a source stores between runs in addition to cursors, such as push channels and when they
    expire. They are in Postgres."""

    async def get(self, name: str) -> Any | None: ...

    async def put(self, name: str, value: Any | None) -> None:
        """Store a value; None deletes it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The values and services that the runner provides to a source."""

    name: str
    """The instance's name in the settings file, and the ``source`` of every message."""
    tenant: str
    memory: Memory
    folder: Path
    """The instance's own folder on disk; it survives restarts but may be lost."""
    events_url: str | None = None
    """The address for the source's events, as seen from outside; None if there is none and the source is only polled.
    """
    set_aside: SetAside = field(default_factory=SetAside)
    """Where the source records the parts that it cannot read, for operators."""
    postgres: Pool | None = None
    """For sources that store documents themselves (uploads) and have a table of them. Sources that read another system
    store their few values in ``memory``."""


class Source(Protocol):
    """One instance of a connector. All methods but ``full`` and ``changes`` may run concurrently.

    Every method raises Retryable (or its subclass Deferred) when the source cannot respond now, and Misconfigured when
    only a person can help (a token without the scope, a wrong address). The content of a page is read after the page
    was requested: nothing is read ahead, and no access is reused from an earlier page. Where a source can only read
    everything at once, or access belongs to many pages of a listing, ``read_at`` says when it began to.

    A class may have ``metadata_keys: ClassVar[MetadataKeys]``: the keys of its documents' metadata that people filter
    by, which ``penstock metadata adopt KIND`` declares.
    """

    Options: ClassVar[type[BaseModel]]
    """The model of its settings, with ``extra="forbid"``. Secrets are SecretStr fields, filled from the environment."""

    def __init__(self, options: Any, context: Context) -> None: ...

    async def close(self) -> None: ...

    async def check(self) -> Sequence[Problem]:
        """Return one problem for each thing that is missing (scope, token, address, permission). Changes nothing."""
        ...

    async def start(self) -> Cursor | None:
        """Return the cursor from which ``changes`` sees everything that happens after this call; None if the source has
        no log of changes: each poll is then a sweep, and ``changes`` is not called."""
        ...

    def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        """Read all documents, in an order that concurrent changes do not disturb, from the beginning or from a page's
        cursor. Raises CursorExpired."""
        ...

    def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        """Read every document that has changed since the cursor at least once; ends when there is no more. Raises
        CursorExpired."""
        ...

    def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        """List everything that ``full`` would read, and nothing else, without text. A source that cannot list a part
        (a space, a channel) to the end yields ``Unlisted`` for it, and raises if that is all: a listing that ends is
        otherwise complete."""
        ...

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        """Read these documents (at most 50) as they are now, each once, in any order. It lets TooMuchText of
        ``Document`` pass, which says that they take too much memory: fewer of them are then requested."""
        ...

    def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        """List all tags and their holders, or only these tags. A requested tag that is not yielded has no holders; a
        complete listing that lacks a tag takes it from everybody."""
        ...

    async def on_event(self, request: Request) -> Reaction:
        """Return the reaction to an event within a second, from the request alone if possible. Raises Refused."""
        ...

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        """Follow events that have to be fetched (a socket), and keep push channels alive, until cancelled. Returns at
        once if the source has nothing of the kind."""
        ...


@runtime_checkable
class PagedGroups(Protocol):
    """A source whose groups are read page by page: what a page shows is published before the listing ends, and a
    listing that was interrupted continues."""

    def group_pages(self, cursor: Cursor | None) -> AsyncIterator[GroupPage]:
        """List all tags and their holders, from the beginning or from a page's cursor: together as complete as
        ``groups``. Raises CursorExpired."""
        ...


class Playground(Protocol):
    """A test environment for the contract suite (``penstock connector conform``): a fake of the service, or a separate
    part of a real one. ``name`` is the suite's name of a document; texts are a few paragraphs.

    A playground whose source sends metadata that can change alone also has ``relabel(name)``, which changes the
    metadata of a document and neither its title nor its text.

    A playground whose events are not signed by a header also has ``forged(request)``, which returns the request without
    what proves its origin.

    A playground whose documents are in Penstock's own Postgres also has ``placed(tenant, source, postgres)``, which is
    called first.
    """

    options: Mapping[str, Any]
    """The instance's settings, as in the file. One page holds three documents at most, where that can be set."""
    environment: Mapping[str, str]
    """Secrets, by variable."""
    inside: str
    """A principal who may read what is written."""
    outside: str
    """A principal who may not."""

    async def write(self, name: str, text: str) -> str:
        """Create or change a document that ``inside`` may read. Returns its external id."""
        ...

    async def move(self, name: str) -> None:
        """Rename or move it; it remains the same document."""
        ...

    async def remove(self, name: str) -> None: ...

    async def restore(self, name: str) -> None:
        """Restore a removed document as it was."""
        ...

    async def restrict(self, name: str) -> None:
        """Withdraw it from ``inside``, at a parent if the source inherits; the text is untouched."""
        ...

    async def leave(self) -> None:
        """``inside`` loses the membership by which it reads what ``write`` makes."""
        ...

    def sent(self) -> Sequence[Request]:
        """Return the signed events that the source would have sent since the last call; empty if it has no events."""
        ...

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """Make the service misbehave.

        throttled, failing: this many next requests are answered with 429 (and Retry-After 0 or 1), or with 500.
        truncated: listings end early, as if they were complete, until the next call. expired: all cursors issued so far
        are no longer known.
        """
        ...


Playing = Callable[[], AbstractAsyncContextManager[Playground]]
"""A connector class may have ``playground: ClassVar[Playing]``; without one, conform cannot prove its laws."""
