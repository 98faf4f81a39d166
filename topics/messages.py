"""The messages of the wire contract, version 1.

Every message is one JSON object (the Kafka value); its type and time travel in CloudEvents headers (``topics.codec``).
Fields that this version does not know are ignored, so that an older worker reads a newer producer's messages.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, field_validator

MAX_CONTENT_BYTES = 4 * 1024 * 1024
"""Largest ``content`` in UTF-8 bytes. Kafka's ``max.message.bytes`` (topics.registry) leaves room for JSON escapes."""

MAX_TAGS = 1_000
INT64_MAX = 2**63 - 1

Segment = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^/\x00]+$")]
"""A part of the Kafka key that may not hold ``/``: a tenant or a source."""
ExternalId = Annotated[str, StringConstraints(min_length=1, max_length=2_000, pattern=r"^[^\x00]+$")]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]
Version = Annotated[int, Field(ge=0, le=INT64_MAX)]
Scalar = str | int | float | bool


def _sorted_unique(tags: list[str]) -> list[str]:
    return sorted(set(tags))


class Message(BaseModel):
    """What every message carries.

    ``observed_at`` is stamped *before* the source was read and grows per source: it orders deletes and access changes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=False)

    tenant: Segment
    source: Segment
    observed_at: AwareDatetime

    @property
    def key(self) -> str:
        raise NotImplementedError


class DocumentMessage(Message):
    external_id: ExternalId

    @property
    def key(self) -> str:
        """The Kafka key ``tenant/source/external_id``: one document's events meet in one partition, in order."""
        return f"{self.tenant}/{self.source}/{self.external_id}"


class Access(BaseModel):
    """Who may read: a caller needs *any* of ``acl_tags`` and *all* of ``required_tags``. Empty ``acl_tags``: nobody."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    acl_tags: Annotated[list[Tag], Field(max_length=MAX_TAGS)]
    required_tags: Annotated[list[Tag], Field(max_length=MAX_TAGS)] = []

    _unique = field_validator("acl_tags", "required_tags")(_sorted_unique)


class DocumentUpserted(DocumentMessage):
    """A document as its source now has it, whole.

    ``version`` grows per document: the source's own where it has one that grows, else the connector's
    max(last + 1, nanoseconds now), so that a restored old file counts as newer.
    """

    kind: Literal["document.upserted.v1"] = "document.upserted.v1"
    version: Version
    title: Annotated[str, StringConstraints(max_length=4_000)]
    content: str
    media_type: Annotated[str, StringConstraints(max_length=200)] = "text/plain"
    acl_tags: Annotated[list[Tag], Field(max_length=MAX_TAGS)]
    required_tags: Annotated[list[Tag], Field(max_length=MAX_TAGS)] = []
    source_url: Annotated[str, StringConstraints(max_length=8_000)] | None = None
    author: Annotated[str, StringConstraints(max_length=1_000)] | None = None
    source_modified_at: AwareDatetime | None = None
    metadata: dict[str, Scalar | list[Scalar] | None] = {}

    _unique = field_validator("acl_tags", "required_tags")(_sorted_unique)

    @field_validator("content", "title")
    @classmethod
    def _storable(cls, text: str) -> str:
        """Refuse what no store can hold: lone surrogates, and content past the limit."""
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ValueError("holds a lone surrogate, which is not Unicode text") from error
        if size > MAX_CONTENT_BYTES:
            raise ValueError(f"is {size} bytes, the limit is {MAX_CONTENT_BYTES}")
        return text


class DocumentDeleted(DocumentMessage):
    """The source no longer has the document. ``observed_at`` is the floor below which upserts are ignored."""

    kind: Literal["document.deleted.v1"] = "document.deleted.v1"
    version: Version = 0


class AccessChanged(DocumentMessage):
    """The document's full access, content unchanged. Ordered by ``observed_at`` alone."""

    kind: Literal["document.access-changed.v1"] = "document.access-changed.v1"
    acl_tags: Annotated[list[Tag], Field(max_length=MAX_TAGS)]
    required_tags: Annotated[list[Tag], Field(max_length=MAX_TAGS)] = []

    _unique = field_validator("acl_tags", "required_tags")(_sorted_unique)


class IdentityChanged(Message):
    """A principal's *full* set of groups in one source."""

    kind: Literal["identity.changed.v1"] = "identity.changed.v1"
    principal: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    groups: Annotated[list[Tag], Field(max_length=100_000)]

    _unique = field_validator("groups")(_sorted_unique)

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.source}/{self.principal}"


class IndexHint(DocumentMessage):
    """Wakes a sink: the ledger holds something newer for this document and generation. Carries no content."""

    kind: Literal["index.hint.v1"] = "index.hint.v1"
    document_id: str
    generation: str


class DocumentIndexed(DocumentMessage):
    """Both stores return the document as of ``seq`` (or no longer return it). For other teams' caches."""

    kind: Literal["document.indexed.v1"] = "document.indexed.v1"
    document_id: str
    seq: int
    version: int | None = None
    state: Literal["searchable", "partial", "retired"]
    generation: str
    chunks: int = 0


AnyMessage = DocumentUpserted | DocumentDeleted | AccessChanged | IdentityChanged | IndexHint | DocumentIndexed
MESSAGES: dict[str, type[AnyMessage]] = {
    cls.model_fields["kind"].default: cls
    for cls in (DocumentUpserted, DocumentDeleted, AccessChanged, IdentityChanged, IndexHint, DocumentIndexed)
}
"""Type name (the CloudEvents ``ce_type`` without its prefix) → class."""
