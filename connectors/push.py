"""Registrations for push notifications, as the sources of two vendors keep them: each has a secret and an end, and is
renewed before it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import ClassVar, Generic, TypeVar

from connectors.source import Memory

RENEWAL_SHARE = 0.2
"""A registration whose lifetime is short is renewed when this share of it remains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A registration as it is stored in Memory; times in ISO 8601. Only a digest of its secret is stored, so that
    nobody who reads the table can send notifications in the vendor's name."""

    renew_before: ClassVar[timedelta]
    """The time before its end at which one with a long lifetime is renewed."""
    id: str
    address: str
    digest: str
    opened: str
    expires: str

    @property
    def end(self) -> datetime:
        return datetime.fromisoformat(self.expires)

    @property
    def renewal(self) -> datetime:
        opened = datetime.fromisoformat(self.opened)
        return self.end - min(self.renew_before, (self.end - opened) * RENEWAL_SHARE)


R = TypeVar("R", bound=Registration)


class Registrations(Generic[R]):
    """The registrations that a source has opened."""

    def __init__(self, kind: type[R], memory: Memory, name: str) -> None:
        """name: in the source's memory."""
        self._kind = kind
        self._memory = memory
        self._name = name

    async def load(self) -> list[R]:
        return [self._kind(**fields) for fields in await self._memory.get(self._name) or []]

    async def save(self, registrations: Sequence[R]) -> None:
        await self._memory.put(self._name, [asdict(entry) for entry in registrations] or None)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def is_authentic(secret: str, known: Registration | None, now: datetime) -> bool:
    """Return whether a notification with this secret belongs to a known registration that has not ended."""
    matches = hmac.compare_digest(digest(secret), known.digest if known else digest(""))
    return known is not None and matches and known.end > now
