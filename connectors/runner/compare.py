"""Decides what to publish: compares the response of a source with what was published last. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from connectors.clock import version_at
from connectors.extraction.result import MACHINE_CODES
from connectors.source import Document, Entry, Gone, Listed, Unreadable
from topics.messages import MAX_TAGS, AccessChanged, DocumentDeleted, DocumentUpserted, Tag

Event = DocumentUpserted | AccessChanged | DocumentDeleted
Outcome = Literal["upserted", "access", "deleted", "unchanged", "late", "unreadable", "invalid"]

MAX_ID_BYTES = 2_000
"""Postgres indexes rows of up to 2,700 bytes, tenant and source among them."""
MAX_REVISION_CHARACTERS = 1_000
MAX_MESSAGE_CHARACTERS = 2_000

MAX_COMPARED_TAGS = 10 * MAX_TAGS
"""Tags that are looked into: a million, which a row of a table may have, take a second, and nothing else runs."""

_TAG = TypeAdapter(Tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A document as last published (``connector_items``).

    ``version`` is None if it was never published, ``fingerprint`` is None if it has to be published again, and ``gone``
    says that its delete was published. ``in_doubt_since`` is the newest stamp of an event that was handed to Kafka and
    not confirmed: what was published last is then unknown, and ``version`` is the highest that may have been published.
    """

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
    """An operator withdrew it: it counts as deleted at the source, whatever the source responds."""
    is_unlisted: bool = False
    """A completed sweep did not list it, and was not allowed to delete it."""

    @property
    def is_in_doubt(self) -> bool:
        return self.in_doubt_since is not None

    @property
    def is_published(self) -> bool:
        """True if it is published; a document that is in doubt counts as published."""
        return self.is_in_doubt or (self.version is not None and not self.gone)


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a comparison, the row to store and the events to publish.

    ``row`` is None if the external id cannot be stored.
    """

    outcome: Outcome
    row: Row | None
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The tenant and source of a document, and when the source was read."""

    tenant: str
    source: str
    at: datetime
    """Stamped before the request to the source."""


def decide(row: Row | None, entry: Entry, observation: Observation, digest: bytes | None = None) -> Decision:
    """Compare an entry with its row.

    digest: the fingerprint of a document, for a source that has one of its own; None: that of its event.

    The response to a request that is older than the row's state is late and changes nothing. A row in doubt differs
    from every entry, so that whatever the source says is published.
    """
    if not is_storable_id(entry.external_id):
        return Decision("invalid", None)
    known = row or Row(external_id=entry.external_id)
    if any(stamp is not None and observation.at < stamp for stamp in (known.content_at, known.in_doubt_since)):
        return Decision("late", known)
    if known.is_withdrawn:
        return _delete(known, observation)
    match entry:
        case Gone():
            return _delete(known, observation)
        case Unreadable():
            return _unreadable(known, entry, entry.code, entry.message, observation)
        case Document():
            return _document(known, entry, observation, digest)


def decide_access(row: Row, entry: Listed, observation: Observation) -> Decision:
    """Compare the access in a listing with the row of a known document. A document in doubt stays in doubt until it is
    fetched."""
    if row.in_doubt_since is not None and observation.at < row.in_doubt_since:
        return Decision("late", row)
    updated, events = _access(row, entry.acl_tags, entry.required_tags, observation)
    if row.is_in_doubt:
        updated = replace(updated, in_doubt_since=observation.at)
    return Decision("access" if events else "unchanged", updated, events)


def is_stale(row: Row | None, entry: Listed, *, can_extract: bool = True) -> bool:
    """Whether a listed document has to be fetched: it is unknown, in doubt, deleted before, or has another revision.

    can_extract: files can be read on this machine now, so documents that failed because of the machine are tried again.
    """
    if row is None or row.is_in_doubt:
        return True
    if row.is_withdrawn:
        return row.is_published
    if row.problem_code is None and (row.gone or row.version is None or row.fingerprint is None):
        return True
    if row.problem_code in MACHINE_CODES and can_extract:
        return True
    if entry.revision is None:  # without a revision only another attempt shows whether the reason still holds
        return row.problem_code is not None and row.problem_code not in MACHINE_CODES
    return clip_revision(entry.revision) != row.revision


def _delete(row: Row, observation: Observation) -> Decision:
    gone = replace(
        row,
        gone=True,
        fingerprint=None,
        revision=None,
        problem_code=None,
        problem_message=None,
        content_at=observation.at,
        access_at=observation.at,
        in_doubt_since=None,
    )
    if not row.is_published:
        return Decision("unchanged", gone)
    event = DocumentDeleted(
        tenant=observation.tenant,
        source=observation.source,
        external_id=row.external_id,
        observed_at=observation.at,
        version=row.version or 0,
    )
    return Decision("deleted", gone, [event])


def _unreadable(row: Row, entry: Document | Unreadable, code: str, message: str, observation: Observation) -> Decision:
    """Keep the published content, if there is any, under the current access."""
    row, events = _access(row, entry.acl_tags, entry.required_tags, observation)
    row = replace(
        row,
        problem_code=one_line(code)[:100],
        problem_message=one_line(message),
        revision=clip_revision(entry.revision),
        content_at=observation.at,
        in_doubt_since=None,
    )
    return Decision("invalid" if isinstance(entry, Document) else "unreadable", row, list(events))


def _document(row: Row, entry: Document, observation: Observation, digest: bytes | None) -> Decision:
    acl, required = access_of(entry.acl_tags, entry.required_tags)
    if entry.version is not None and row.is_published and not row.is_in_doubt and entry.version < (row.version or 0):
        # The source's own version is older than the published one; the ledger would ignore it.
        row, access = _access(row, acl, required, observation)
        return Decision("access" if access else "late", row, access)
    if _is_access_late(row, observation):
        acl, required = row.acl_tags, row.required_tags
    version = version_at(observation.at, row.version) if entry.version is None else entry.version
    try:
        event = DocumentUpserted(
            tenant=observation.tenant,
            source=observation.source,
            external_id=entry.external_id,
            observed_at=observation.at,
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
        return _unreadable(row, entry, "invalid", explain_validation(error), observation)
    digest = digest or fingerprint(event)
    updated, access = _access(row, acl, required, observation)
    is_same = row.is_published and not row.is_in_doubt and row.fingerprint == digest
    read = replace(
        updated,
        version=row.version if is_same else event.version,
        fingerprint=digest,
        revision=clip_revision(entry.revision),
        content_at=observation.at,
        problem_code=None,
        problem_message=None,
        gone=False,
        in_doubt_since=None,
    )
    if is_same:
        return Decision("access" if access else "unchanged", read, access)
    return Decision("upserted", read, [*access, event])


def _access(
    row: Row, acl_tags: Collection[str], required_tags: Collection[str], observation: Observation
) -> tuple[Row, list[Event]]:
    """Return the row with this access, and an event if the document is published with another access."""
    if _is_access_late(row, observation):
        return row, []
    acl, required = access_of(acl_tags, required_tags)
    updated = replace(row, acl_tags=acl, required_tags=required, access_at=observation.at)
    is_known = not row.is_in_doubt and (row.acl_tags, row.required_tags) == (acl, required)
    if not row.is_published or is_known:
        return updated, []
    event = AccessChanged(
        tenant=observation.tenant,
        source=observation.source,
        external_id=row.external_id,
        observed_at=observation.at,
        acl_tags=list(acl),
        required_tags=list(required),
    )
    return updated, [event]


def _is_access_late(row: Row, observation: Observation) -> bool:
    """Whether the row's access is certain and newer than the response."""
    return not row.is_in_doubt and row.access_at is not None and observation.at < row.access_at


def access_of(acl_tags: Collection[str], required_tags: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tags sorted and unique.

    An invalid required tag, or too many tags of either kind, deny everybody: access that cannot be expressed is denied.
    An invalid tag of acl_tags admits nobody and is dropped.
    """
    if max(len(acl_tags), len(required_tags)) > MAX_COMPARED_TAGS:
        return (), ()
    acl = tuple(sorted({tag for tag in acl_tags if is_tag(tag)}))
    if not all(map(is_tag, required_tags)):
        return (), ()
    required = tuple(sorted(set(required_tags)))
    return (acl, required) if max(len(acl), len(required)) <= MAX_TAGS else ((), ())


def is_tag(tag: str) -> bool:
    """Whether a message can carry the tag."""
    return isinstance(tag, str) and _is_tag(tag)


@lru_cache(maxsize=4096)
def _is_tag(tag: str) -> bool:
    """Cached, because the same few tags come with every document."""
    try:
        _TAG.validate_python(tag, strict=True)
        tag.encode()
    except (ValidationError, UnicodeEncodeError):
        return False
    return True


def is_storable_id(external_id: str) -> bool:
    """Whether ``connector_items`` can hold the id."""
    try:
        return 0 < len(external_id.encode()) <= MAX_ID_BYTES and "\x00" not in external_id
    except UnicodeEncodeError:
        return False


def clip_revision(revision: str | None) -> str | None:
    """Return the revision as the table can hold it: one that is long or not printable as its SHA-256."""
    if revision is None:
        return None
    if len(revision) <= MAX_REVISION_CHARACTERS and revision.isprintable():
        return revision
    return hashlib.sha256(revision.encode("utf-8", "backslashreplace")).hexdigest()


def one_line(text: str) -> str:
    """Replace characters that cannot be printed, and cut the text to MAX_MESSAGE_CHARACTERS."""
    safe = "".join(char if char.isprintable() else " " for char in text.encode("utf-8", "replace").decode())
    return safe[:MAX_MESSAGE_CHARACTERS]


def explain_validation(error: ValidationError) -> str:
    """Name the invalid fields and why they are invalid, without their values."""
    details = error.errors(include_input=False, include_url=False, include_context=False)
    problems = [f"{'.'.join(str(part) for part in detail['loc'][:1])} {detail['msg']}" for detail in details]
    return "cannot be published: " + "; ".join(dict.fromkeys(problems))


def fingerprint(event: DocumentUpserted) -> bytes:
    """Return the SHA-256 of everything but access, version and stamps."""
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
