"""Identifiers and hashes that all parts must derive in the same way: document ids, chunk ids, qualified tags."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID, uuid5

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DOCUMENTS = UUID("9f2c1c2e-6a4c-5d0b-9d8e-0a8c7a3d5b11")
"""The namespace of document ids. It must never change, because ids are computed and not looked up."""

EVERYONE = "*"
"""The universal required tag that every caller has: Elasticsearch's terms_set matches nothing on an empty list."""

INGESTED = "folder"
"""The source of `penstock ingest` and `watch`; no connector may have this name."""
OWN_TAG = "user:"
"""The prefix of the tag ``user:NAME``, which the principal NAME has in every source of its tenant. Nobody else has it,
so no group may have such a name."""


def document_key(tenant: str, source: str, external_id: str) -> str:
    return f"{tenant}/{source}/{external_id}"


def source_of(key: bytes | None) -> bytes:
    """The part ``tenant/source`` of a record's key, or the tenant where the key has no source. Never fails, because the
    key may be invalid."""
    return b"/".join((key or b"").split(b"/", 2)[:-1])


def document_id(tenant: str, source: str, external_id: str) -> UUID:
    return uuid5(DOCUMENTS, document_key(tenant, source, external_id))


def chunk_ids(document: UUID, texts: Sequence[str], title: str = "") -> tuple[UUID, ...]:
    """The ids of a document's chunks, in order: uuid5(document, hash of what is embedded, occurrence of that). The
    position is no part of an id, so that a chunk keeps its id when others are inserted before it.

    title: the one that the chunks are embedded with (``pipeline.core.titles``). It is separated by a character that no
    text contains.
    """
    seen: dict[bytes, int] = {}
    ids = []
    for text in texts:
        digest = hashlib.sha256((f"{title}\0{text}" if title else text).encode()).digest()
        occurrence = seen.get(digest, 0)
        seen[digest] = occurrence + 1
        ids.append(uuid5(document, f"{digest.hex()}:{occurrence}"))
    return tuple(ids)


def qualify(source: str, tags: Iterable[str]) -> tuple[str, ...]:
    """Tags as they are stored: ``source/tag``, sorted and unique. Groups of the same name in two sources are different
    groups. A source's name contains no ``/``."""
    return tuple(sorted({f"{source}/{tag}" for tag in tags}))


def content_hash(text: str) -> bytes:
    """SHA-256 of the normalised text (32 bytes)."""
    return hashlib.sha256(text.encode()).digest()


def meta_hash(document_fields: DataclassInstance) -> bytes:
    """SHA-256 of a document's metadata: all of it that is neither content nor access (32 bytes).

    Fields of the dataclass without a default are hashed in their order. Fields with a default were added later, and are
    hashed by name, only where they have another value: then documents without them keep their hash, and are not written
    again.
    """
    values: list[object] = []
    later: dict[str, object] = {}
    for f in fields(document_fields):
        value = getattr(document_fields, f.name)
        plain = value.timestamp() if isinstance(value, datetime) else value
        if f.default is MISSING:
            values.append(plain)
        elif value != f.default:
            later[f.name] = plain
    if later:
        values.append(later)
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=False).encode()).digest()


def access_digest(acl_tags: Sequence[str], required_tags: Sequence[str]) -> bytes:
    """SHA-256 of both lists of qualified tags, which are sorted and unique (32 bytes)."""
    return hashlib.sha256(json.dumps([acl_tags, required_tags], ensure_ascii=False).encode()).digest()


def keyword_hash(*fields: object) -> int:
    """A hash of the fields of a keyword entry, as a signed 64-bit number (Postgres bigint)."""
    digest = hashlib.blake2b(
        json.dumps(fields, sort_keys=True, ensure_ascii=False, default=str).encode(), digest_size=8
    )
    return int.from_bytes(digest.digest(), "big", signed=True)
