"""The tags whose holders a listing of groups still has to read, where groups name further groups."""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

from connectors.source import Cursor, CursorExpired


class TagQueue:
    """Law: each tag is taken once, however often it is added; one that is put back is taken again from the cursor."""

    def __init__(self, tags: Collection[str]) -> None:
        self._waiting = sorted(tags)
        self._taken: list[str] = []
        self._put_back: list[str] = []
        self._known = set(tags)
        self.is_continued = False
        """Whether the holders of some tags were read before."""

    @classmethod
    def from_cursor(cls, cursor: Cursor) -> TagQueue:
        """Raises CursorExpired for a cursor in another format."""
        try:
            queue = cls(list(map(str, cursor["waiting"])))
            queue._taken = list(map(str, cursor["taken"]))
        except (KeyError, TypeError) as error:
            raise CursorExpired("the cursor of groups is not in this connector's format: all are read") from error
        queue._known.update(queue._taken)
        queue.is_continued = not set(queue._taken) <= set(queue._waiting)
        return queue

    @property
    def taken(self) -> int:
        """The number of tags that were taken so far."""
        return len(self._taken)

    @property
    def cursor(self) -> Cursor:
        return {"waiting": [*self._waiting, *self._put_back], "taken": self._taken.copy()}

    @property
    def kind(self) -> str:
        """The kind of the next tag, such as ``group``; empty: there is none."""
        return _kind(self._waiting[0]) if self._waiting else ""

    def add(self, tags: Collection[str]) -> None:
        """Add the tags that are not known yet."""
        self._waiting += sorted(set(tags) - self._known)
        self._known.update(tags)

    def take(self, number: int) -> list[str]:
        """Return the next tags: at most ``number``, and all of one kind."""
        kind = self.kind
        taken = list(takewhile(lambda tag: _kind(tag) == kind, self._waiting[:number]))
        self._waiting = self._waiting[len(taken) :]
        self._taken += taken
        return taken

    def put_back(self, tag: str) -> None:
        """Leave a tag that could not be read to the listing that continues from the cursor."""
        self._put_back.append(tag)


def _kind(tag: str) -> str:
    return tag.partition(":")[0]
