"""Signatures of records: an Ed25519 signature in a header proves which producer published a record, because Kafka does
not tell a consumer which login wrote it.

The signature covers the topic, the header ``ce_type`` (it decides how the value is read), the key and the value, so
that it is not valid for another record or topic. The other headers are not covered, because nothing depends on them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from topics.codec import Headers, header_map
from topics.registry import COPARTITIONED

HEADER = "penstock-signature"
"""``v1:KEY_ID:SIGNATURE``, the signature in Base64. Of a repeated header the last one counts, as for all headers."""
VERSION = "v1"
CONTEXT = b"penstock-signature-v1"
ABSENT = b"-"
"""Stands for the digest of a key or value that the record does not have."""
KEY_ID_DIGITS = 32
_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
"""The field and the curve -x² + y² = 1 + d x² y² of Ed25519 (RFC 8032, section 5.1)."""


class NotAKey(Exception):
    """A text is not an Ed25519 key in PEM. One line says why, without quoting it."""


def signing_input(topic: str, ce_type: bytes, key: bytes | None, value: bytes | None) -> bytes:
    """Return the bytes that are signed: five lines, joined by newlines, without one at the end.

    topic: its full name, with the prefix.
    """
    return b"\n".join((CONTEXT, topic.encode(), ce_type, _digest(key), _digest(value)))


def _digest(part: bytes | None) -> bytes:
    """Return the digest of a key or value. A missing one differs from an empty one: a record without a value is a
    tombstone."""
    return ABSENT if part is None else hashlib.sha256(part).hexdigest().encode()


def key_id(public_key: bytes) -> str:
    """Return the id of a public key: the first digits of the SHA-256 of its 32 bytes, in hexadecimal."""
    return hashlib.sha256(public_key).hexdigest()[:KEY_ID_DIGITS]


class Signer:
    """Signs with one private key. Safe to share between tasks."""

    def __init__(self, pem: bytes) -> None:
        """pem: the private key, as PKCS #8 without a password. Raises NotAKey."""
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:  # a TypeError: it has a password
            raise NotAKey("not an Ed25519 private key in PEM (PKCS #8, without a password)") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise NotAKey("a private key of another kind than Ed25519")
        self._key = key
        self.key_id = key_id(key.public_key().public_bytes_raw())

    def headers(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> Headers:
        """Return the record's headers with the signature after them. topic: its full name."""
        signed = signing_input(topic, header_map(headers).get("ce_type") or b"", key, value)
        signature = base64.b64encode(self._key.sign(signed)).decode()
        return [*headers, (HEADER, f"{VERSION}:{self.key_id}:{signature}".encode())]


@dataclass(frozen=True, slots=True)
class Signature:
    """The content of the header, which is not verified yet."""

    key_id: str
    signature: bytes


def read_signature(headers: Headers) -> Signature | None:
    """Return the signature of a record, or None if it has none that this version can read."""
    try:
        version, name, signature = (header_map(headers).get(HEADER) or b"").decode("ascii").split(":")
        decoded = base64.b64decode(signature, validate=True)
    except (ValueError, binascii.Error):  # a UnicodeDecodeError is a ValueError
        return None
    return Signature(name, decoded) if version == VERSION else None


def is_valid(
    public_key: bytes,
    signature: bytes,
    topics: Sequence[str],
    key: bytes | None,
    value: bytes | None,
    headers: Headers,
) -> bool:
    """Whether the key signed this record for any of these topics (full names)."""
    verifying = Ed25519PublicKey.from_public_bytes(public_key)
    ce_type = header_map(headers).get("ce_type") or b""
    for topic in topics:
        try:
            verifying.verify(signature, signing_input(topic, ce_type, key, value))
        except InvalidSignature:
            continue
        return True
    return False


def signed_for(topic: str) -> tuple[str, ...]:
    """Return the topics for which a record on ``topic`` (its full name) may have been signed: this one, and for a
    backfill topic the live one, because detect moves bad live records there (docs/adr/0037-floods-by-source.md)."""
    for live, backfill in COPARTITIONED:
        if topic.endswith(backfill.name):
            return topic, topic.removesuffix(backfill.name) + live.name
    return (topic,)


def new_private_key() -> bytes:
    """Return a new private key in PEM (PKCS #8, without a password)."""
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_key_of(pem: bytes) -> bytes:
    """Return the 32 bytes of the public key in a PEM that holds a public or a private key. Raises NotAKey."""
    if b"PRIVATE" in pem:
        Signer(pem)
        private = serialization.load_pem_private_key(pem, password=None)
        assert isinstance(private, Ed25519PrivateKey)
        return private.public_key().public_bytes_raw()
    try:
        key = serialization.load_pem_public_key(pem)
    except ValueError as error:
        raise NotAKey("not an Ed25519 public key in PEM") from error
    if not isinstance(key, Ed25519PublicKey):
        raise NotAKey("a public key of another kind than Ed25519")
    public = key.public_bytes_raw()
    if _has_low_order(public):
        raise NotAKey("a degenerate Ed25519 public key, for which anybody can make signatures: create a new pair")
    return public


def _has_low_order(public_key: bytes) -> bool:
    """Whether the point is one of the eight whose order divides 8. Such a key has no private key, and accepts made-up
    signatures of any record. y is 1 for order 1, -1 for order 2 and 0 for order 4; doubling a point of order 8 gives
    y = 0, so that y² = -x², which with the curve's equation is d y⁴ + 2 y² = 1."""
    y = int.from_bytes(public_key, "little") & (2**255 - 1)
    return y * (y**2 - 1) * (_D * y**4 + 2 * y**2 - 1) % _P == 0
