"""How far changes were read. Pure.

Search knows times by the minute and lags behind, so every poll looks back over the one before, and the cursor keeps
what it saw there. Only lengths of time are used: whose clock is right does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from connectors.confluence.model import Changed
from connectors.source import Cursor, CursorExpired

MAX_SEEN = 20_000
"""More than this is no longer kept: some is read again, and found to be unchanged."""
LONGEST_MINUTES = 30 * 24 * 60
"""Who was away for longer sweeps instead."""


@dataclass(frozen=True, slots=True)
class Progress:
    at: datetime
    """When the last complete poll began, by our clock."""
    seen: Mapping[str, str]
    """Content id → mark of its version, of what that poll saw and what this one has read."""
    trash: frozenset[str]

    @classmethod
    def of(cls, cursor: Cursor) -> Progress:
        """Raises CursorExpired for what we never wrote."""
        try:
            at = datetime.fromisoformat(cursor["at"])
            seen = {str(key): str(value) for key, value in cursor["seen"].items()}
            return cls(at if at.tzinfo else at.replace(tzinfo=UTC), seen, frozenset(map(str, cursor["trash"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorExpired("the cursor of changes is none of ours: everything is looked at again") from error

    @property
    def cursor(self) -> Cursor:
        return {"at": self.at.isoformat(), "seen": dict(self.seen), "trash": sorted(self.trash)}

    def minutes(self, now: datetime, overlap: int) -> int:
        """How far back to search. Raises CursorExpired."""
        found = math.ceil(max(0.0, (now - self.at).total_seconds()) / 60) + overlap
        if found > LONGEST_MINUTES:
            raise CursorExpired("changes were not read for a month: everything is looked at again")
        return found

    def new(self, changed: Iterable[Changed]) -> list[Changed]:
        return [one for one in changed if self.seen.get(one.id) != one.mark]

    def read(self, some: Iterable[Changed]) -> Progress:
        return Progress(self.at, {**self.seen, **{one.id: one.mark for one in some}}, self.trash)

    def thrown_away(self, trash: Collection[str]) -> Progress:
        return Progress(self.at, self.seen, frozenset(trash))

    def done(self, at: datetime, found: Sequence[Changed]) -> Progress:
        """After a poll that began at ``at`` and whose last search gave ``found``, all of which is read."""
        return Progress(at, {one.id: one.mark for one in found[-MAX_SEEN:]}, self.trash)


def by_document(changed: Sequence[Changed], size: int) -> Iterable[tuple[list[str], list[Changed]]]:
    """Some document ids at a time, with all the changes that reading these documents settles."""
    grouped: dict[str, list[Changed]] = {}
    for one in changed:
        grouped.setdefault(one.document, []).append(one)
    ids = list(grouped)
    for start in range(0, len(ids), size):
        some = ids[start : start + size]
        yield some, [one for id_ in some for one in grouped[id_]]
