"""Counts the texts that a request to a source holds, and ends it when they take too much memory.

How much a request will return is known only when it has. Whatever holds texts therefore counts them (``Document`` does
so itself), and ``connectors.portions`` repeats a request that was ended for fewer documents.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pipeline.core.errors import PenstockError

MAX_HELD_BYTES = 32 * 1024 * 1024
"""Memory of the texts of one request. Fifty ordinary documents take a hundredth of it, and a single one at most half:
4 MiB take 16 if they have a character that needs four bytes."""
_MESSAGE = "the documents of one request take too much memory"


class TooMuchText(PenstockError):
    """The documents of one request take more than MAX_HELD_BYTES, and there are several. Sources let it pass."""


class _Room:
    """The values of one request."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        """By identity: an entry that is replaced holds the same values."""
        self._bytes = 0
        self._calls = 0

    @property
    def is_exceeded(self) -> bool:
        return self._bytes > MAX_HELD_BYTES

    @property
    def fitting(self) -> int:
        """How many documents it had room for, or a few more."""
        return self._calls - 1

    def add(self, values: Iterable[object]) -> None:
        self._calls += 1
        for value in values:
            for part in value if isinstance(value, list | tuple) else (value,):
                size, counted = sys.getsizeof(part), self._sizes.get(id(part), 0)
                if size > counted:
                    self._sizes[id(part)] = size
                    self._bytes += size - counted
        if self.is_exceeded:
            raise TooMuchText(_MESSAGE)


_room: ContextVar[_Room | None] = ContextVar("room", default=None)


def hold(values: Iterable[object]) -> None:
    """Count texts, or lists of them, of a document that are held until a request is done. Raises TooMuchText if fewer
    documents are to be requested."""
    if (room := _room.get()) is not None:
        room.add(values)


@contextmanager
def insisting() -> Iterator[None]:
    """Raise TooMuchText after a body whose code has caught it, or made another error of it: a source of others may."""
    room = _room.get()
    try:
        yield
    except Exception as error:
        if room is not None and room.is_exceeded:
            raise TooMuchText(_MESSAGE) from error
        raise
    if room is not None and room.is_exceeded:
        raise TooMuchText(_MESSAGE)


@contextmanager
def bounded(*, is_divisible: bool = True) -> Iterator[_Room | None]:
    """Have what the body holds counted, and raise TooMuchText if that is too much. is_divisible: whether less could be
    requested; if not, any size will do."""
    room = _Room() if is_divisible else None
    token = _room.set(room)
    try:
        with insisting():
            yield room
    finally:
        _room.reset(token)
