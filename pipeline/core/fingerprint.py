"""Hashes that decide whether anything changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime


def content_hash(text: str) -> bytes:
    """SHA-256 of the normalised text (32 bytes)."""
    return hashlib.sha256(text.encode()).digest()


def meta_hash(
    *,
    title: str,
    source_url: str | None,
    author: str | None,
    media_type: str,
    source_modified_at: datetime | None,
    metadata: Mapping[str, object],
) -> bytes:
    """SHA-256 of everything about a document that is neither content nor access (32 bytes)."""
    fields = [title, source_url, author, media_type, source_modified_at and source_modified_at.timestamp(), metadata]
    return hashlib.sha256(json.dumps(fields, sort_keys=True, ensure_ascii=False).encode()).digest()


def access_digest(acl_tags: Sequence[str], required_tags: Sequence[str]) -> bytes:
    """SHA-256 of both lists of qualified tags, which are sorted and unique (32 bytes)."""
    return hashlib.sha256(json.dumps([acl_tags, required_tags], ensure_ascii=False).encode()).digest()


def keyword_hash(*fields: object) -> int:
    """What a keyword entry was made of, as a signed 64-bit number (Postgres bigint)."""
    digest = hashlib.blake2b(
        json.dumps(fields, sort_keys=True, ensure_ascii=False, default=str).encode(), digest_size=8
    )
    return int.from_bytes(digest.digest(), "big", signed=True)
