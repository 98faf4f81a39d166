"""The messages of the wire contract, version 1.

Every message is one JSON object (the Kafka value); its type and time travel in CloudEvents headers (``topics.codec``).
Fields that this version does not know are ignored, so that an older worker reads a newer producer's messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

from topics.fields import INT64_MAX as INT64_MAX
from topics.fields import MAX_GROUPS as MAX_GROUPS
from topics.fields import MAX_TAGS as MAX_TAGS
from topics.fields import AclTags, ExternalId, Instant, Member, RequiredTags, Text, Version, sorted_unique, storable
from topics.fields import Metadata as Metadata
from topics.fields import Scalar as Scalar
from topics.fields import Segment as Segment
from topics.fields import Tag as Tag

MAX_CONTENT_BYTES = 4 * 1024 * 1024
"""Largest ``content`` in UTF-8 bytes. Kafka's ``max.message.bytes`` (topics.registry) leaves room for JSON escapes."""

MAX_METADATA_BYTES = 64 * 1024
"""Largest ``metadata``, written as JSON in UTF-8."""
MAX_PAIRS = 100
"""Pairs of question and answer in one message."""
MAX_PAIR_BYTES = 64 * 1024
"""The largest pair of question and answer, in UTF-8."""
MAX_PAIRS_BYTES = 1024 * 1024
"""All pairs of a message together, in UTF-8."""


class Message(BaseModel):
    """The fields of every message.

    ``observed_at`` is stamped *before* the source was read and grows per source: it orders deletes and access changes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True, use_attribute_docstrings=True)

    tenant: Segment
    """Whose documents these are. No query crosses tenants."""
    source: Segment
    """The connector instance that publishes, e.g. ``wiki``. Tags belong to their source: equal names in
    two sources are two groups. A principal is one person in all sources of a tenant."""
    observed_at: Instant
    """When the source was *about to be* read. Grows per source."""


class DocumentMessage(Message):
    external_id: ExternalId
    """The document's id at its source; it stays the same for the life of the document."""

    @property
    def key(self) -> str:
        """The Kafka key ``tenant/source/external_id``: one document's events are in one partition, in order."""
        return f"{self.tenant}/{self.source}/{self.external_id}"


class DocumentUpserted(DocumentMessage):
    """A complete document as its source now has it.

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
    """The type of ``content``; decides how it is chunked (text/markdown, text/html, text/x-python, text/csv …)."""
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

    _unique = field_validator("acl_tags", "required_tags")(sorted_unique)

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
        lists = [value for value in values if isinstance(value, list)]
        if len(values) + sum(map(len, lists)) > MAX_METADATA_BYTES // 2:  # before each is looked into
            raise ValueError(f"has too many values for {MAX_METADATA_BYTES} bytes of JSON, which is the limit")
        if any(isinstance(item, Mapping | list | None) for items in lists for item in items):
            raise ValueError("is not flat: a list may hold text, numbers and booleans")
        if any(isinstance(value, Mapping) for value in values):
            raise ValueError("is not flat: a value may be text, a number, a boolean, null, or a list of these")
        return metadata

    @field_validator("metadata")
    @classmethod
    def _portable(cls, metadata: Metadata) -> Metadata:
        """Refuse names and numbers that JSON or a store cannot hold."""
        for name, value in metadata.items():
            if not 1 <= len(name) <= 200 or "\x00" in name:
                raise ValueError("holds a name that is empty, longer than 200 characters or has U+0000 in it")
            for scalar in value if isinstance(value, list) else [value]:
                if isinstance(scalar, int) and abs(scalar) > INT64_MAX:
                    raise ValueError("holds a number beyond 64 bits")
                if isinstance(scalar, float) and not math.isfinite(scalar):
                    raise ValueError("holds a number that is infinite or none")
        size = len(storable(json.dumps(metadata, ensure_ascii=False)).encode())
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"is {size} bytes of JSON, the limit is {MAX_METADATA_BYTES}")
        return metadata


class DocumentDeleted(DocumentMessage):
    """The source no longer has the document. ``observed_at`` is the floor below which upserts are ignored."""

    kind: ClassVar[Literal["document.deleted.v1"]] = "document.deleted.v1"
    version: Version = 0
    """The last known version, or 0."""


class AccessChanged(DocumentMessage):
    """The document's full access, content unchanged. Ordered by ``observed_at`` alone."""

    kind: ClassVar[Literal["document.access-changed.v1"]] = "document.access-changed.v1"
    acl_tags: AclTags
    """A reader needs any of these. Empty: nobody reads it, from now on."""
    required_tags: RequiredTags = []
    """A reader needs all of these besides. What is left out here no longer applies."""

    _unique = field_validator("acl_tags", "required_tags")(sorted_unique)


class IdentityChanged(Message):
    """A principal's *full* set of groups in one source."""

    kind: ClassVar[Literal["identity.changed.v1"]] = "identity.changed.v1"
    principal: Tag
    """A person or service account, as the source names it."""
    groups: Annotated[list[Tag], Field(max_length=MAX_GROUPS)]
    """All tags that this principal holds in this source; empty when it left. (Never send a tombstone instead.)"""

    _unique = field_validator("groups")(sorted_unique)

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
    generation: str
    chunks: int = 0
    """How many stand in each store."""


class ConflictChanged(Message):
    """Two passages contradict or repeat each other, or no longer do. It carries no text, which is read with the access
    of that moment. ``source`` is that of a document whose change caused it."""

    kind: ClassVar[Literal["conflict.changed.v1"]] = "conflict.changed.v1"
    conflict_id: UUID
    state: Literal["open", "ended"]
    """ended: a passage was changed or deleted, or nobody may read both any more."""
    difference: Literal["number", "date", "version", "unit", "name", "negation", "duplicate", "outdated"]
    """The values that differ in otherwise equal statements; or duplicate, or outdated: a copy of an older edition."""
    documents: Annotated[list[UUID], Field(min_length=2, max_length=2)]
    passages: Annotated[list[UUID], Field(min_length=2, max_length=2)]
    """The ids of their chunks."""

    @property
    def key(self) -> str:
        """The Kafka key ``tenant/conflict_id``: the events of one conflict stay in order."""
        return f"{self.tenant}/{self.conflict_id}"


class AnswerInvalidated(Message):
    """A standing question whose answer no longer holds. It carries no text, no name and no id of a document: its asker
    reads the answer, with the access of that moment. ``source`` is always ``standing``."""

    kind: ClassVar[Literal["answer.invalidated.v1"]] = "answer.invalidated.v1"
    question_id: UUID
    change: Literal["changed", "deleted", "unreadable", "new"]
    """The passages behind the sentences were changed, deleted, or may no longer be read by the asker; new: a passage
    that the answer would be made from."""
    sentences: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=10_000)]
    """Numbers of the sentences concerned, from 1."""
    asked_at: Instant
    """When the answer was given. An event about an earlier answer than the one that you show has no meaning."""

    @property
    def key(self) -> str:
        """The Kafka key ``tenant/question_id``: the events of one question stay in order."""
        return f"{self.tenant}/{self.question_id}"


class Pair(BaseModel):
    """A question and its answer."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True, use_attribute_docstrings=True)

    question: Annotated[Text, StringConstraints(min_length=1)]
    answer: Text
    """Question and answer: 64 KiB together in UTF-8."""
    asked_at: Instant
    """When it was asked. The same for the same pair, however often it is sent."""
    id: Annotated[Text, StringConstraints(max_length=500)] | None = None
    """The sender's own name for it, kept and not interpreted."""
    answer_id: UUID | None = None
    """The id that ``POST /v1/answers`` gave to the answer. An answer without it is not part of the context of later
    questions, because the documents that it was made from are not known."""

    @field_validator("answer")
    @classmethod
    def _fits(cls, answer: str, info: ValidationInfo) -> str:
        size = len(answer.encode()) + len(info.data.get("question", "").encode())
        if size > MAX_PAIR_BYTES:
            raise ValueError(f"is {size} bytes with its question, the limit is {MAX_PAIR_BYTES}")
        return answer


class ConversationMessage(Message):
    member: Member
    """Whose conversation it is: nobody else ever reads it. The principal's name, as in ``identity.changed.v1``."""

    @property
    def key(self) -> str:
        """The Kafka key ``tenant/member``: what one member said and what was forgotten of it stay in order."""
        return f"{self.tenant}/{self.member}"


class ConversationRecorded(ConversationMessage):
    """Questions that a member asked, with their answers. A pair that is sent again is one pair still."""

    kind: ClassVar[Literal["conversation.recorded.v1"]] = "conversation.recorded.v1"
    conversation: Tag
    """The conversation's name at its source."""
    pairs: Annotated[list[Pair], Field(min_length=1, max_length=MAX_PAIRS)]
    """In any order; 1 MiB together in UTF-8."""

    @field_validator("pairs")
    @classmethod
    def _all_fit(cls, pairs: list[Pair]) -> list[Pair]:
        size = sum(len(pair.question.encode()) + len(pair.answer.encode()) for pair in pairs)
        if size > MAX_PAIRS_BYTES:
            raise ValueError(f"are {size} bytes together, the limit is {MAX_PAIRS_BYTES}")
        return pairs


class ConversationForgotten(ConversationMessage):
    """Remove what a member said, observed until now: text, chunks and vectors. It does not come back by a replay."""

    kind: ClassVar[Literal["conversation.forgotten.v1"]] = "conversation.forgotten.v1"
    conversation: Tag | None = None
    """One conversation of this source; null: everything of the member, from every source of the tenant."""


AnyMessage = (
    DocumentUpserted
    | DocumentDeleted
    | AccessChanged
    | IdentityChanged
    | IndexHint
    | DocumentIndexed
    | ConflictChanged
    | AnswerInvalidated
    | ConversationRecorded
    | ConversationForgotten
)
MESSAGES: dict[str, type[AnyMessage]] = {
    cls.kind: cls
    for cls in (
        DocumentUpserted,
        DocumentDeleted,
        AccessChanged,
        IdentityChanged,
        IndexHint,
        DocumentIndexed,
        ConflictChanged,
        AnswerInvalidated,
        ConversationRecorded,
        ConversationForgotten,
    )
}
"""Type name (the CloudEvents ``ce_type`` without its prefix) → class."""
