"""The producers that may publish, and for which tenants and sources. Pure: the caller passes the time.

A pattern is ``tenant/source``; in both parts ``*`` matches any characters, or none. A canary's source
(``pipeline.core.canary``) is matched only by a pattern whose source has the prefix of canaries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pipeline.core.canary import is_canary
from pipeline.core.errors import Poison
from pipeline.core.patterns import matches

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
"""The names that a producer may have."""

CODES = ("unsigned", "unknown_key", "key_not_in_force", "bad_signature", "not_allowed")
"""Why a record is refused."""


class Unauthorised(Poison):
    """The record is not signed by an enrolled producer that may publish it. The message quotes no content."""


@dataclass(frozen=True, slots=True)
class Term:
    """The time during which a producer or a key is in force."""

    since: datetime
    until: datetime | None

    def holds(self, now: datetime) -> bool:
        return self.since <= now and (self.until is None or now < self.until)


@dataclass(frozen=True, slots=True)
class Producer:
    """An enrolled producer."""

    name: str
    allow: tuple[str, ...]
    """The patterns of what it may publish for."""
    term: Term


@dataclass(frozen=True, slots=True)
class Key:
    """A public key of a producer."""

    key_id: str
    producer: str
    public_key: bytes
    term: Term


@dataclass(frozen=True, slots=True)
class Registry:
    """All producers by name, and all keys by key id."""

    producers: Mapping[str, Producer]
    keys: Mapping[str, Key]

    def key(self, key_id: str, now: datetime) -> Key:
        """The key with this id. Raises Unauthorised when there is none, or it is not in force."""
        key = self.keys.get(key_id)
        if key is None:
            raise Unauthorised("unknown_key", "it is signed with a key that no producer is enrolled with")
        if not key.term.holds(now) or not self.producers[key.producer].term.holds(now):
            raise Unauthorised(
                "key_not_in_force", f"it is signed with a key of {key.producer} that has expired or was removed"
            )
        return key

    def authorise(self, producer: str, tenant: str, source: str) -> None:
        """Check that a producer may publish for this tenant and source. Raises Unauthorised."""
        if not is_allowed(self.producers[producer].allow, tenant, source):
            raise Unauthorised("not_allowed", f"{producer} may not publish for this tenant and source")

    def authorise_key(self, producer: str, source: str, error: Exception) -> None:
        """Check that a producer may publish under the key of a record that cannot be read. source: the key's
        ``tenant/source``, or its tenant alone. error: why it cannot be read. Raises Unauthorised."""
        tenant, slash, name = source.partition("/")
        allow = self.producers[producer].allow
        if not (
            is_allowed(allow, tenant, name) if slash else any(_matches_tenant(pattern, tenant) for pattern in allow)
        ):
            raise Unauthorised("not_allowed", f"{producer} may not publish under this key: {error}") from error

    def authorise_tenant(self, producer: str, tenant: str) -> None:
        """Check that a producer may publish for all sources of a tenant. Raises Unauthorised."""
        if not any(
            _parts(pattern)[1] == "*" for pattern in self.producers[producer].allow if _matches_tenant(pattern, tenant)
        ):
            raise Unauthorised("not_allowed", f"{producer} may not publish for all sources of this tenant")


def is_pattern(pattern: str) -> bool:
    tenant, slash, source = pattern.partition("/")
    return bool(tenant and slash and source) and "/" not in source and "\x00" not in pattern


def is_allowed(allow: Sequence[str], tenant: str, source: str) -> bool:
    return any(
        matches(_parts(pattern)[1], source) and is_canary(source) <= is_canary(_parts(pattern)[1])
        for pattern in allow
        if _matches_tenant(pattern, tenant)
    )


def _parts(pattern: str) -> tuple[str, str]:
    tenant, _, source = pattern.partition("/")
    return tenant, source


def _matches_tenant(pattern: str, tenant: str) -> bool:
    return matches(_parts(pattern)[0], tenant)
