"""Names that every part derives alike: document ids, chunk ids, qualified tags."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from uuid import UUID, uuid5

DOCUMENTS = UUID("9f2c1c2e-6a4c-5d0b-9d8e-0a8c7a3d5b11")
"""Namespace of document ids. Never changes: ids are recomputed, not looked up."""

EVERYONE = "*"
"""The universal required tag that every caller has: Elasticsearch's terms_set matches nothing on an empty list."""

OWN_TAG = "user:"
"""``user:NAME`` is the tag that the principal NAME holds in every source of its tenant, and nobody else: no group may
be called so."""


def document_key(tenant: str, source: str, external_id: str) -> str:
    return f"{tenant}/{source}/{external_id}"


def source_of(key: bytes | None) -> bytes:
    """``tenant/source`` of a record's key, however broken the key is; of one without a source, its tenant."""
    return b"/".join((key or b"").split(b"/", 2)[:-1])


def document_id(tenant: str, source: str, external_id: str) -> UUID:
    return uuid5(DOCUMENTS, document_key(tenant, source, external_id))


def chunk_ids(document: UUID, texts: Sequence[str]) -> tuple[UUID, ...]:
    """uuid5(document, hash of exactly the embedded text, occurrence), in order. Position is no part of the id."""
    seen: dict[bytes, int] = {}
    ids = []
    for text in texts:
        digest = hashlib.sha256(text.encode()).digest()
        occurrence = seen.get(digest, 0)
        seen[digest] = occurrence + 1
        ids.append(uuid5(document, f"{digest.hex()}:{occurrence}"))
    return tuple(ids)


def qualify(source: str, tags: Iterable[str]) -> tuple[str, ...]:
    """Tags as stored: ``source/tag``. Two sources' "engineering" are two groups; a source holds no ``/``."""
    return tuple(sorted({f"{source}/{tag}" for tag in tags}))
