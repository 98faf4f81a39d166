"""The messages of the wire contract, version 1.

Every message is one JSON object (the Kafka value); its type and time travel in CloudEvents headers (``topics.codec``).
Fields that this version does not know are ignored, so that an older worker reads a newer producer's messages.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    field_validator,
)

MAX_CONTENT_BYTES = 4 * 1024 * 1024
"""Largest ``content`` in UTF-8 bytes. Kafka's ``max.message.bytes`` (topics.registry) leaves room for JSON escapes."""

MAX_METADATA_BYTES = 64 * 1024
"""Largest ``metadata``, written as JSON in UTF-8."""
MAX_TAGS = 1_000
INT64_MAX = 2**63 - 1


def _storable(text: str) -> str:
    """Refuse what is no Unicode text. U+0000, which no store can hold, carries no meaning and is dropped."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds a lone surrogate, which is not Unicode text") from error
    return text.replace("\x00", "")


def _rfc3339(moment: object) -> object:
    """No bare numbers: whether they are seconds or milliseconds would be a guess."""
    if isinstance(moment, datetime) or (isinstance(moment, str) and re.match(r"\d{4}-\d\d-\d\d[Tt ]", moment)):
        return moment
    raise ValueError("is no RFC 3339 time with an offset, such as 2026-01-31T08:30:00Z")


def _to_utc(moment: datetime) -> datetime:
    if not 1 < moment.year < 9999:  # the edges of the calendar overflow in some time zone
        raise ValueError("is outside the years 2 to 9998")
    return moment.astimezone(UTC)


Segment = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^/\x00]+$")]
"""A part of the Kafka key that may not hold ``/``: a tenant or a source."""
ExternalId = Annotated[str, StringConstraints(min_length=1, max_length=2_000, pattern=r"^[^\x00]+$")]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]
Text = Annotated[str, AfterValidator(_storable)]
Instant = Annotated[AwareDatetime, BeforeValidator(_rfc3339), AfterValidator(_to_utc)]
"""RFC 3339 with an offset, in UTC once read; microseconds count, finer digits are cut."""
Version = Annotated[
    int,
    Field(ge=0, le=INT64_MAX),
    # Decimal strings are for languages without 64-bit integers; nanoseconds do not fit in a double.
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": INT64_MAX},
                              {"type": "string", "pattern": "^[0-9]{1,19}$"}]}),
]  # fmt: skip
AclTags = Annotated[list[Tag], Field(max_length=MAX_TAGS)]
RequiredTags = Annotated[list[Tag], Field(max_length=MAX_TAGS)]
Scalar = Text | int | float | bool
Metadata = dict[str, Scalar | list[Scalar] | None]


def _sorted_unique(tags: list[str]) -> list[str]:
    return sorted(set(tags))


class Message(BaseModel):
    """What every message carries.

    ``observed_at`` is stamped *before* the source was read and grows per source: it orders deletes and access changes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    tenant: Segment
    """Whose documents these are. No query crosses tenants."""
    source: Segment
    """Which connector instance speaks, e.g. ``wiki``. Tags are its own: equal names in
    two sources are two groups. A principal is one person in all sources of a tenant."""
    observed_at: Instant
    """When the source was *about to be* read. Grows per source."""


class DocumentMessage(Message):
    external_id: ExternalId
    """The document's name at its source; stays the same as long as it is the same document."""

    @property
    def key(self) -> str:
        """The Kafka key ``tenant/source/external_id``: one document's events meet in one partition, in order."""
        return f"{self.tenant}/{self.source}/{self.external_id}"


class DocumentUpserted(DocumentMessage):
    """A document as its source now has it, whole.

    ``version`` grows per document: the source's own where it has one that grows, else the connector's
    max(last + 1, nanoseconds now), so that a restored old file counts as newer.
    """

    kind: ClassVar[Literal["document.upserted.v1"]] = "document.upserted.v1"
    version: Version
    """Grows with every change of this document; a decimal string is taken too."""
    title: Annotated[Text, StringConstraints(max_length=4_000)]
    content: Text
    """The whole text, at most 4 MiB in UTF-8."""
    media_type: Annotated[Text, StringConstraints(max_length=200)] = "text/plain"
    """Of ``content`` as sent: chooses how it is cut (text/markdown, text/html, text/x-python, text/csv …)."""
    acl_tags: AclTags
    """A reader needs any of these. Empty: nobody reads it."""
    required_tags: RequiredTags = []
    """A reader needs all of these besides: one for each inherited restriction."""
    source_url: Annotated[Text, StringConstraints(max_length=8_000)] | None = None
    """Where a person opens it."""
    author: Annotated[Text, StringConstraints(max_length=1_000)] | None = None
    source_modified_at: Instant | None = None
    """When it was changed, as the source says. Freshness is measured from here."""
    metadata: Metadata = {}
    """Flat: text, numbers, booleans, null, or lists of these. Searchable by exact value; 64 KiB of JSON at most."""

    _unique = field_validator("acl_tags", "required_tags")(_sorted_unique)

    @field_validator("content")
    @classmethod
    def _fits(cls, text: str) -> str:
        size = len(text.encode())
        if size > MAX_CONTENT_BYTES:
            raise ValueError(f"is {size} bytes, the limit is {MAX_CONTENT_BYTES}")
        return text

    @field_validator("metadata", mode="before")
    @classmethod
    def _flat(cls, metadata: object) -> object:
        values = metadata.values() if isinstance(metadata, Mapping) else ()
        if any(isinstance(one, Mapping | list | None) for value in values if isinstance(value, list) for one in value):
            raise ValueError("is not flat: a list may hold text, numbers and booleans")
        if any(isinstance(value, Mapping) for value in values):
            raise ValueError("is not flat: a value may be text, a number, a boolean, null, or a list of these")
        return metadata

    @field_validator("metadata")
    @classmethod
    def _portable(cls, metadata: Metadata) -> Metadata:
        """Names and numbers that JSON carries and both stores can hold."""
        for name, value in metadata.items():
            if not 1 <= len(name) <= 200 or "\x00" in name:
                raise ValueError("holds a name that is empty, longer than 200 characters or has U+0000 in it")
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, int) and abs(one) > INT64_MAX:
                    raise ValueError("holds a number beyond 64 bits")
                if isinstance(one, float) and not math.isfinite(one):
                    raise ValueError("holds a number that is infinite or none")
        size = len(_storable(json.dumps(metadata, ensure_ascii=False)).encode())
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"is {size} bytes of JSON, the limit is {MAX_METADATA_BYTES}")
        return metadata


class DocumentDeleted(DocumentMessage):
    """The source no longer has the document. ``observed_at`` is the floor below which upserts are ignored."""

    kind: ClassVar[Literal["document.deleted.v1"]] = "document.deleted.v1"
    version: Version = 0
    """The last one known, or 0."""


class AccessChanged(DocumentMessage):
    """The document's full access, content unchanged. Ordered by ``observed_at`` alone."""

    kind: ClassVar[Literal["document.access-changed.v1"]] = "document.access-changed.v1"
    acl_tags: AclTags
    """A reader needs any of these. Empty: nobody reads it, from now on."""
    required_tags: RequiredTags = []
    """A reader needs all of these besides. What is left out here no longer applies."""

    _unique = field_validator("acl_tags", "required_tags")(_sorted_unique)


class IdentityChanged(Message):
    """A principal's *full* set of groups in one source."""

    kind: ClassVar[Literal["identity.changed.v1"]] = "identity.changed.v1"
    principal: Tag
    """A person or service account, as the source names it."""
    groups: Annotated[list[Tag], Field(max_length=100_000)]
    """All tags that this principal holds in this source; empty when it left. (Never send a tombstone instead.)"""

    _unique = field_validator("groups")(_sorted_unique)

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.source}/{self.principal}"


class IndexHint(DocumentMessage):
    """Wakes a sink: the ledger holds something newer for this document and generation. Carries no content."""

    kind: ClassVar[Literal["index.hint.v1"]] = "index.hint.v1"
    document_id: str
    generation: str


class DocumentIndexed(DocumentMessage):
    """Both stores return the document as of ``seq`` (or no longer return it). For other teams' caches."""

    kind: ClassVar[Literal["document.indexed.v1"]] = "document.indexed.v1"
    document_id: str
    """A UUID, derived from tenant, source and external_id; the same in both stores."""
    seq: int
    """Grows with every accepted change: of two announcements of a document the higher one is the newer."""
    version: int | None = None
    """The source's version that is now searchable."""
    state: Literal["searchable", "partial", "retired", "revoked"]
    """searchable: both stores return all of it; partial: but for chunks that cannot be embedded; retired: deleted, or
    nobody may read it; revoked: somebody who could read it no longer may. The last two are sent as soon as they are
    accepted, before the stores follow: drop what you hold."""
    """partial: some chunks cannot be embedded, the rest is found. retired: deleted, or readable by nobody."""
    generation: str
    chunks: int = 0
    """How many stand in each store."""


AnyMessage = DocumentUpserted | DocumentDeleted | AccessChanged | IdentityChanged | IndexHint | DocumentIndexed
MESSAGES: dict[str, type[AnyMessage]] = {
    cls.kind: cls
    for cls in (DocumentUpserted, DocumentDeleted, AccessChanged, IdentityChanged, IndexHint, DocumentIndexed)
}
"""Type name (the CloudEvents ``ce_type`` without its prefix) → class."""
