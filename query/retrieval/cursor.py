"""Cursors: where a search continues.

A cursor holds digests of the passages that were returned, and of the search that it belongs to; nothing is stored. The
next page is what the same search finds now, without them. So a page never repeats a passage and omits none that still
matches, whatever changed in between, and access is decided for each page anew. Only the order across pages follows the
changes. A cursor that somebody wrote by hand omits passages and can show nothing more.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from uuid import UUID

from query.model import BadQuery, Result

MAX_PAGED = 1_000
"""The most passages that the pages of one search return together."""
_VERSION = b"\x01"
_SEARCH_BYTES, _CHUNK_BYTES = 8, 5
"""Two of a thousand passages have the same digest once in two million searches."""
MAX_CHARACTERS = 4 * (3 + _SEARCH_BYTES + 4 * MAX_PAGED * _CHUNK_BYTES) // 3 + 4
"""A passage may consist of three chunks, and stand for another that says the same."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The passages that earlier pages returned, as digests of their chunks."""

    search: bytes
    chunks: frozenset[bytes] = frozenset()
    results: int = 0
    """How many passages that were."""

    def shows(self, chunk: UUID) -> bool:
        """Whether an earlier page returned this chunk."""
        return _digest(chunk) in self.chunks

    def after(self, results: Sequence[Result]) -> Cursor:
        """The cursor after another page."""
        shown = {id_ for result in results for id_ in (*result.chunk_ids, *(also.chunk_id for also in result.also))}
        return Cursor(self.search, self.chunks | {_digest(chunk) for chunk in shown}, self.results + len(results))

    def __str__(self) -> str:
        data = _VERSION + self.search + self.results.to_bytes(2, "big") + b"".join(sorted(self.chunks))
        return urlsafe_b64encode(data).decode().rstrip("=")


def _digest(chunk: UUID) -> bytes:
    return blake2b(chunk.bytes, digest_size=_CHUNK_BYTES).digest()


def search_digest(parts: Collection[object]) -> bytes:
    """A digest of what must be the same on all pages of a search."""
    return blake2b(repr(tuple(parts)).encode("utf-8", "surrogatepass"), digest_size=_SEARCH_BYTES).digest()


def read(text: str | None, search: bytes) -> Cursor:
    """The cursor that a client sent; None: the first page. Raises BadQuery unless it belongs to this search."""
    if text is None:
        return Cursor(search)
    cursor = parse(text)
    if cursor.search != search:
        raise BadQuery("the cursor belongs to another search: repeat its query, mode, sort and filters with it")
    return cursor


def parse(text: str) -> Cursor:
    """A cursor of any search. Raises BadQuery for anything else."""
    try:
        data = urlsafe_b64decode(text[: MAX_CHARACTERS + 1] + "=" * (-len(text) % 4))
    except (ValueError, binascii.Error):
        data = b""
    head = 1 + _SEARCH_BYTES + 2
    whole = len(text) <= MAX_CHARACTERS and len(data) >= head and not (len(data) - head) % _CHUNK_BYTES
    if not whole or data[:1] != _VERSION:
        raise BadQuery("the cursor is not one that a search returned: begin again without it")
    chunks = frozenset(data[at : at + _CHUNK_BYTES] for at in range(head, len(data), _CHUNK_BYTES))
    return Cursor(data[1 : 1 + _SEARCH_BYTES], chunks, int.from_bytes(data[1 + _SEARCH_BYTES : head], "big"))
