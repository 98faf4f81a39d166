"""Tracks which offset of each partition may be committed: the end of the *done prefix*, in whatever order records are
finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


@dataclass(slots=True, eq=False)
class Token:
    """A record in flight. It belongs to the assignment under which it was read; later assignments ignore it."""

    offset: int
    stamp: object = None
    """An object of the caller, who gets it back with the done prefix."""
    done: bool = False


class Progress(Generic[P]):
    """The records in flight, by partition.

    Law: ``committable`` is never beyond a record that was read and is not done. Closing a partition drops its records,
    and records that arrive while it is closed are not tracked: its next owner reads them.
    """

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
        """Track a record; returns None when its partition is closed."""
        pending = self._pending.get(partition)
        if pending is None:
            return None
        token = Token(offset, stamp)
        pending.append(token)
        return token

    def finished(self, partition: P, token: Token) -> list[Token]:
        """Mark a record as done; returns the records by which the done prefix has grown, in offset order."""
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
        """The offset to commit, which is that of the next record to read; None while the done prefix is empty."""
        last = self._last.get(partition)
        return None if last is None else last.offset + 1

    def last(self, partition: P) -> Token | None:
        """The last record of the done prefix; None while it is empty."""
        return self._last.get(partition)

    def in_flight(self, partition: P | None = None) -> int:
        """The number of records that were read and are not in a done prefix yet. partition: None counts all."""
        if partition is not None:
            return len(self._pending.get(partition, ()))
        return sum(len(pending) for pending in self._pending.values())
