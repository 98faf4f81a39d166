"""The offset of each partition that may be committed: only the *done prefix*, whatever order work finishes in."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


@dataclass(slots=True, eq=False)
class Token:
    """One record on its way. Belongs to the assignment it arrived under: later ones ignore it."""

    offset: int
    stamp: object = None
    """Whatever the caller wants back with the done prefix."""
    done: bool = False


class Progress(Generic[P]):
    """Law: ``committable`` never passes a record that arrived and is not done; a partition that was revoked forgets
    everything, and what arrives for it while it is closed is not tracked (the broker will send it again)."""

    def __init__(self) -> None:
        self._pending: dict[P, deque[Token]] = {}
        self._last: dict[P, Token] = {}

    def open(self, partitions: Iterable[P]) -> None:
        for partition in partitions:
            self._pending[partition] = deque()
            self._last.pop(partition, None)

    def close(self, partitions: Iterable[P]) -> None:
        for partition in partitions:
            self._pending.pop(partition, None)
            self._last.pop(partition, None)

    def arrived(self, partition: P, offset: int, stamp: object = None) -> Token | None:
        """Track a record; None when its partition is not ours now."""
        pending = self._pending.get(partition)
        if pending is None:
            return None
        token = Token(offset, stamp)
        pending.append(token)
        return token

    def finished(self, partition: P, token: Token) -> list[Token]:
        """Mark a record done; returns the records that the done prefix grew by, in offset order."""
        token.done = True
        pending = self._pending.get(partition)
        if not pending:
            return []
        grown = []
        while pending and pending[0].done:
            grown.append(pending.popleft())
        if grown:
            self._last[partition] = grown[-1]
        return grown

    def committable(self, partition: P) -> int | None:
        """The offset to commit (that of the next record to read), None while nothing is done."""
        last = self._last.get(partition)
        return None if last is None else last.offset + 1

    def last(self, partition: P) -> Token | None:
        """The last record of the done prefix, None while nothing is done."""
        return self._last.get(partition)

    def in_flight(self, partition: P | None = None) -> int:
        """Records that arrived and are not part of a done prefix yet."""
        if partition is not None:
            return len(self._pending.get(partition, ()))
        return sum(len(pending) for pending in self._pending.values())
