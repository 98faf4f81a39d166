"""What a source answered against what was published last: what has to be published now. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from connectors.clock import version_at
from connectors.extraction.result import OF_THE_MACHINE
from connectors.source import Document, Entry, Gone, Listed, Unreadable
from topics.messages import MAX_TAGS, AccessChanged, DocumentDeleted, DocumentUpserted, Tag

Event = DocumentUpserted | AccessChanged | DocumentDeleted
Outcome = Literal["upserted", "access", "deleted", "unchanged", "late", "unreadable", "invalid"]

MAX_ID_BYTES = 2_000
"""Postgres indexes rows of up to 2,700 bytes, tenant and source among them."""
MAX_REVISION = 1_000
MAX_MESSAGE = 2_000

_TAG = TypeAdapter(Tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A document as last published (``connector_items``). ``version`` None: never. ``fingerprint`` None: publish it
    again. ``gone``: its delete was published. ``in_doubt_since``: the newest stamp of an event that was handed to Kafka
    and not confirmed; what was published last is unknown then, and ``version`` is the highest that may have been."""

    external_id: str
    version: int | None = None
    fingerprint: bytes | None = None
    revision: str | None = None
    acl_tags: tuple[str, ...] = ()
    required_tags: tuple[str, ...] = ()
    problem_code: str | None = None
    problem_message: str | None = None
    content_at: datetime | None = None
    access_at: datetime | None = None
    gone: bool = False
    in_doubt_since: datetime | None = None
    is_withdrawn: bool = False
    """An operator withdrew it: the source is taken to have it no longer, whatever it answers."""
    is_unlisted: bool = False
    """A sweep that came to its end lacked it, and was held back from deleting it."""

    @property
    def is_in_doubt(self) -> bool:
        return self.in_doubt_since is not None

    @property
    def is_published(self) -> bool:
        """Perhaps only: see ``is_in_doubt``."""
        return self.is_in_doubt or (self.version is not None and not self.gone)


@dataclass(frozen=True, slots=True)
class Decision:
    """``row`` None: nothing can be kept of it (an id that no table takes)."""

    outcome: Outcome
    row: Row | None
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Whose document it is, and when the source was asked."""

    tenant: str
    source: str
    at: datetime
    """Stamped before the source was asked."""


def decide(row: Row | None, entry: Entry, seen: Seen) -> Decision:
    """What follows from an entry. An answer to a question older than what the row knows is late: it tells nothing. A
    row that is in doubt differs from every answer: whatever the source says is published."""
    if not is_storable_id(entry.external_id):
        return Decision("invalid", None)
    known = row or Row(external_id=entry.external_id)
    if any(stamp is not None and seen.at < stamp for stamp in (known.content_at, known.in_doubt_since)):
        return Decision("late", known)
    if known.is_withdrawn:
        return _gone(known, seen)
    match entry:
        case Gone():
            return _gone(known, seen)
        case Unreadable():
            return _unreadable(known, entry, entry.code, entry.message, seen)
        case Document():
            return _document(known, entry, seen)


def listed(row: Row, entry: Listed, seen: Seen) -> Decision:
    """What follows from a listing for a document that was read before: its access. One that is in doubt stays so until
    it is fetched."""
    if row.in_doubt_since is not None and seen.at < row.in_doubt_since:
        return Decision("late", row)
    moved, events = _access(row, entry.acl_tags, entry.required_tags, seen)
    if row.is_in_doubt:
        moved = replace(moved, in_doubt_since=seen.at)
    return Decision("access" if events else "unchanged", moved, events)


def is_stale(row: Row | None, entry: Listed, *, is_mended: bool = True) -> bool:
    """Whether a listed document has to be fetched: unknown, in doubt, deleted before, or another revision. is_mended:
    this machine lacks nothing now, so what one could not read for a fault of its own is tried again."""
    if row is None or row.is_in_doubt:
        return True
    if row.is_withdrawn:
        return row.is_published
    if row.problem_code is None and (row.gone or row.version is None or row.fingerprint is None):
        return True
    if row.problem_code in OF_THE_MACHINE and is_mended:
        return True
    if entry.revision is None:  # else nothing tells whether the reason still holds
        return row.problem_code is not None and row.problem_code not in OF_THE_MACHINE
    return clipped(entry.revision) != row.revision


def _gone(row: Row, seen: Seen) -> Decision:
    gone = replace(
        row,
        gone=True,
        fingerprint=None,
        revision=None,
        problem_code=None,
        problem_message=None,
        content_at=seen.at,
        access_at=seen.at,
        in_doubt_since=None,
    )
    if not row.is_published:
        return Decision("unchanged", gone)
    event = DocumentDeleted(
        tenant=seen.tenant,
        source=seen.source,
        external_id=row.external_id,
        observed_at=seen.at,
        version=row.version or 0,
    )
    return Decision("deleted", gone, [event])


def _unreadable(row: Row, entry: Document | Unreadable, code: str, message: str, seen: Seen) -> Decision:
    """What was published of it stays, under the access that holds now. (After a delete nothing was.)"""
    row, events = _access(row, entry.acl_tags, entry.required_tags, seen)
    row = replace(
        row,
        problem_code=one_line(code)[:100],
        problem_message=one_line(message),
        revision=clipped(entry.revision),
        content_at=seen.at,
        in_doubt_since=None,
    )
    return Decision("invalid" if isinstance(entry, Document) else "unreadable", row, list(events))


def _document(row: Row, entry: Document, seen: Seen) -> Decision:
    acl, required = access_of(entry.acl_tags, entry.required_tags)
    if entry.version is not None and row.is_published and not row.is_in_doubt and entry.version < (row.version or 0):
        # By the source's own word this is older than what was published; the ledger would ignore it.
        row, access = _access(row, acl, required, seen)
        return Decision("access" if access else "late", row, access)
    if _is_access_late(row, seen):
        acl, required = row.acl_tags, row.required_tags
    version = version_at(seen.at, row.version) if entry.version is None else entry.version
    try:
        event = DocumentUpserted(
            tenant=seen.tenant,
            source=seen.source,
            external_id=entry.external_id,
            observed_at=seen.at,
            version=version,
            title=entry.title,
            content=entry.content,
            media_type=entry.media_type,
            acl_tags=list(acl),
            required_tags=list(required),
            source_url=entry.source_url,
            author=entry.author,
            source_modified_at=entry.source_modified_at,
            metadata=dict(entry.metadata),
        )
    except ValidationError as error:
        return _unreadable(row, entry, "invalid", why(error), seen)
    digest = fingerprint(event)
    moved, access = _access(row, acl, required, seen)
    read = replace(
        moved,
        fingerprint=digest,
        revision=clipped(entry.revision),
        content_at=seen.at,
        problem_code=None,
        problem_message=None,
        gone=False,
        in_doubt_since=None,
    )
    if row.is_published and not row.is_in_doubt and row.fingerprint == digest:
        return Decision("access" if access else "unchanged", read, access)
    return Decision("upserted", replace(read, version=event.version), [*access, event])


def _access(row: Row, acl_tags: Collection[str], required_tags: Collection[str], seen: Seen) -> tuple[Row, list[Event]]:
    """The row under the access given, and the event that says so if it is published already with another one."""
    if _is_access_late(row, seen):
        return row, []
    acl, required = access_of(acl_tags, required_tags)
    moved = replace(row, acl_tags=acl, required_tags=required, access_at=seen.at)
    is_known = not row.is_in_doubt and (row.acl_tags, row.required_tags) == (acl, required)
    if not row.is_published or is_known:
        return moved, []
    event = AccessChanged(
        tenant=seen.tenant,
        source=seen.source,
        external_id=row.external_id,
        observed_at=seen.at,
        acl_tags=list(acl),
        required_tags=list(required),
    )
    return moved, [event]


def _is_access_late(row: Row, seen: Seen) -> bool:
    """What the row says of access is newer than the answer, and certain."""
    return not row.is_in_doubt and row.access_at is not None and seen.at < row.access_at


def access_of(acl_tags: Collection[str], required_tags: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sorted and unique. A required tag that cannot be said shuts everybody out; so do too many of either kind: what
    cannot be expressed is denied. A tag of acl_tags that cannot be said only admits nobody."""
    acl = tuple(sorted({tag for tag in acl_tags if is_tag(tag)}))
    required = tuple(sorted(set(required_tags)))
    if len(acl) > MAX_TAGS or len(required) > MAX_TAGS or not all(is_tag(tag) for tag in required):
        return (), ()
    return acl, required


def is_tag(tag: str) -> bool:
    try:
        _TAG.validate_python(tag, strict=True)
        tag.encode()
    except (ValidationError, UnicodeEncodeError):
        return False
    return True


def is_storable_id(external_id: str) -> bool:
    try:
        return 0 < len(external_id.encode()) <= MAX_ID_BYTES and "\x00" not in external_id
    except UnicodeEncodeError:
        return False


def clipped(revision: str | None) -> str | None:
    """As the table can hold it; a long one as its hash."""
    if revision is None:
        return None
    if len(revision) <= MAX_REVISION and revision.isprintable():
        return revision
    return hashlib.sha256(revision.encode("utf-8", "backslashreplace")).hexdigest()


def one_line(text: str) -> str:
    safe = "".join(char if char.isprintable() else " " for char in text.encode("utf-8", "replace").decode())
    return safe[:MAX_MESSAGE]


def why(error: ValidationError) -> str:
    """What is wrong with which field, without its value."""
    found = error.errors(include_input=False, include_url=False, include_context=False)
    problems = [f"{'.'.join(str(part) for part in one['loc'][:1])} {one['msg']}" for one in found]
    return "cannot be published: " + "; ".join(dict.fromkeys(problems))


def fingerprint(event: DocumentUpserted) -> bytes:
    """SHA-256 of everything but access, version and stamps."""
    fields = [
        event.title,
        event.content,
        event.media_type,
        event.source_url,
        event.author,
        event.source_modified_at and event.source_modified_at.timestamp(),
        event.metadata,
    ]
    return hashlib.sha256(json.dumps(fields, sort_keys=True, ensure_ascii=False).encode()).digest()
