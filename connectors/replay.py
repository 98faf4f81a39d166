"""Refuses events that are replayed by an attacker, and drops events that a source sends twice.

An event is a hint to read the source now, so a second one changes nothing and costs one request. Only the body proves
an event's age, because the signature covers nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from connectors.source import Memory, Refused

WINDOW = timedelta(minutes=5)
"""As Slack's own. Older events are refused; the next poll finds their changes."""
REMEMBERED = 1_000
"""Events whose digests are stored."""
_NAME = "events"


def require_recent(sent: Any) -> bool:
    """Whether a body says when it was sent (milliseconds since 1970, or ISO 8601). Raises Refused when that is not
    within WINDOW of now."""
    at = _moment(sent)
    if at is None:
        return False
    age = datetime.now(UTC) - at
    if abs(age) > WINDOW:
        raise Refused(
            f"an event is {age.total_seconds():.0f} s old by the clock of its source, at most"
            f" {WINDOW.total_seconds():.0f} are taken: it was sent again, or the two clocks differ"
        )
    return True


def _moment(sent: Any) -> datetime | None:
    try:
        if isinstance(sent, str):
            at = datetime.fromisoformat(sent)
            return at if at.tzinfo else at.replace(tzinfo=UTC)
        if isinstance(sent, int | float) and not isinstance(sent, bool):
            return datetime.fromtimestamp(sent / 1000, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise Refused("an event's time is invalid") from error
    return None


class Received:
    """Remembers the last REMEMBERED genuine events by digests of their bodies, for sources whose events all differ.

    memory: storage that survives a restart and a takeover by another process; None: they are held in this process only.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory
        self._digests: dict[str, None] | None = None if memory else {}
        self._lock = asyncio.Lock()
        self._waiting: dict[str, None] = {}
        """Digests of events that wait for being stored."""

    async def has(self, body: bytes) -> bool:
        return _digest(body) in await self._known()

    async def add(self, body: bytes) -> None:
        """Remember an event. Call it once the reaction is known: an event that failed shall be accepted again. Events
        that arrive while others are stored are stored together: each write replaces all digests."""
        digest = _digest(body)
        self._waiting[digest] = None
        try:
            async with self._lock:
                if digest in self._waiting:
                    await self._store([*self._waiting])
        finally:
            self._waiting.pop(digest, None)

    async def _store(self, added: Sequence[str]) -> None:
        known = await self._known()
        if self._memory is not None:
            await self._memory.put(_NAME, [*dict.fromkeys([*known, *added])][-REMEMBERED:])
        for digest in added:
            if digest in self._waiting:  # the others were given up meanwhile
                known[digest] = None
                del self._waiting[digest]
        while len(known) > REMEMBERED:  # one event costs one step: a copy of all digests was a fifth of its time
            del known[next(iter(known))]

    async def _known(self) -> dict[str, None]:
        if self._digests is None:
            assert self._memory is not None
            self._digests = dict.fromkeys(await self._memory.get(_NAME) or [])
        return self._digests


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]
