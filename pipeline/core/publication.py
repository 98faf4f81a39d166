"""Publications: the changes that a producer published, and the token that names them in a request.

A search that carries a token waits until the caller can see these changes in both stores (docs/consistency.md).
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from struct import Struct
from typing import Literal, get_args
from uuid import UUID

PublicationKind = Literal["content", "access", "deletion"]
KINDS: tuple[PublicationKind, ...] = get_args(PublicationKind)
MAX_PUBLICATIONS = 10_000
"""The most documents that one token names; it is then 333 kB long, and a request may have 1 MB."""
DEFAULT_WAIT_SECONDS, MAX_WAIT_SECONDS = 10.0, 30.0
"""How long a request waits for the changes of a token."""
VERSION = "1."
"""The beginning of every token. Another form of token begins with another number."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_ENTRY = Struct(">B16sq")
MAX_TOKEN_CHARACTERS = len(VERSION) + -(-MAX_PUBLICATIONS * _ENTRY.size * 4 // 3)


@dataclass(frozen=True, slots=True)
class Publication:
    """A published change of one document."""

    document_id: UUID
    kind: PublicationKind
    at: int
    """The version of the content; of a deletion and of an access change, the time of observation in microseconds since
    1970."""


def content(document: UUID, version: int) -> Publication:
    return Publication(document, "content", version)


def access(document: UUID, observed_at: datetime) -> Publication:
    return Publication(document, "access", _microseconds(observed_at))


def deletion(document: UUID, observed_at: datetime) -> Publication:
    return Publication(document, "deletion", _microseconds(observed_at))


def is_reached(
    publication: Publication,
    *,
    version: int | None,
    access_observed_at: datetime | None,
    deleted_floor: datetime | None,
) -> bool:
    """Whether the ledger has accepted the change, or a newer one of its kind. The arguments are the document's row."""
    match publication.kind:
        case "content":
            return version is not None and version >= publication.at
        case "access":
            return access_observed_at is not None and _microseconds(access_observed_at) >= publication.at
        case "deletion":
            return deleted_floor is not None and _microseconds(deleted_floor) >= publication.at


def token(publications: Iterable[Publication]) -> str:
    """Write a token; of several changes of one kind of a document it names the newest. Raises ValueError if there are
    more than MAX_PUBLICATIONS."""
    newest: dict[tuple[UUID, PublicationKind], int] = {}
    for publication in publications:
        key = publication.document_id, publication.kind
        newest[key] = max(publication.at, newest.get(key, publication.at))
    if len(newest) > MAX_PUBLICATIONS:
        raise ValueError(f"{len(newest)} changes: one token names at most {MAX_PUBLICATIONS}")
    packed = b"".join(_ENTRY.pack(KINDS.index(kind), id_.bytes, at) for (id_, kind), at in newest.items())
    return VERSION + urlsafe_b64encode(packed).rstrip(b"=").decode()


def publications_of(text: str) -> tuple[Publication, ...]:
    """Read a token, which takes 35 ms for the largest one. Raises ValueError for one that was not written by
    ``token``."""
    return tuple(Publication(UUID(bytes=id_), KINDS[kind], at) for kind, id_, at in _ENTRY.iter_unpack(_unpacked(text)))


def check(text: str) -> None:
    """Raise ValueError for a token that was not written by ``token``; a millisecond for the largest one."""
    _unpacked(text)


def _unpacked(text: str) -> bytes:
    if not text.startswith(VERSION) or not text.isascii() or len(text) > MAX_TOKEN_CHARACTERS:
        raise ValueError("is no token of a publication")
    encoded = text.removeprefix(VERSION)
    try:
        packed = urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except binascii.Error as error:
        raise ValueError("is no token of a publication") from error
    if len(packed) % _ENTRY.size or max(packed[:: _ENTRY.size], default=0) >= len(KINDS):
        raise ValueError("is no token of a publication, or only a part of one")
    return packed


def _microseconds(time: datetime) -> int:
    return (time - _EPOCH) // _MICROSECOND
