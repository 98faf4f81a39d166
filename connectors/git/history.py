"""Who touched a file last, and when: one walk over the history, then only over what is new."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime

from connectors.git.mirror import Mirror

_MARK = b"\x02"
_FORMAT = "--format=%x02%ct%x00%aN"
"""When it was committed, and by whom it was written."""


@dataclass(frozen=True, slots=True)
class Touch:
    author: str | None
    at: datetime | None


@dataclass(slots=True)
class History:
    """Of the newest commit that was asked for. A merge touches only what its branches touched."""

    commit: str | None = None
    touches: dict[str, Touch] = field(default_factory=dict)

    async def advance(self, mirror: Mirror, commit: str, paths: Collection[str]) -> None:
        """So that ``touches`` holds for that commit's tree. Raises Retryable."""
        if commit == self.commit:
            return
        known = self.commit is not None and await mirror.leads_to(self.commit, commit)
        touches = dict(self.touches) if known else {}
        span = f"{self.commit}..{commit}" if known else commit
        # A span is walked to its end; everything only as far as there are files whose last commit is not found.
        walk = _Walk(None if known else set(paths))
        await mirror.each(
            walk.see, "log", "-z", _FORMAT, "--name-only", "--no-renames", "--no-ext-diff", "--no-show-signature", span,
            "--",
        )  # fmt: skip
        for path, touch in walk.fresh.items():
            before = touches.get(path)
            # What a merge brings may be older than what it was merged with: the newest counts, as in a whole walk.
            if before is None or before.at is None or (touch.at is not None and touch.at >= before.at):
                touches[path] = touch
        self.commit, self.touches = commit, touches


class _Walk:
    def __init__(self, sought: set[str] | None) -> None:
        self.fresh: dict[str, Touch] = {}
        self._sought = sought
        self._touch = Touch(None, None)
        self._stamp = b""

    def see(self, record: bytes) -> bool:
        """A commit is its time, its author, and then its paths, the first of them after a line end."""
        if record.startswith(_MARK):
            self._stamp = record[1:]
        elif self._stamp:
            self._touch, self._stamp = Touch(_name(record), _time(self._stamp)), b""
        else:
            path = os.fsdecode(record.removeprefix(b"\n"))
            self.fresh.setdefault(path, self._touch)
            if self._sought is not None:
                self._sought.discard(path)
                return bool(self._sought)
        return True


def _name(raw: bytes) -> str | None:
    name = " ".join("".join(char if char.isprintable() else " " for char in raw.decode("utf-8", "replace")).split())
    return name[:200] or None


def _time(stamp: bytes) -> datetime | None:
    """None for what no calendar of ours knows: git lets a committer write any number."""
    try:
        at = datetime.fromtimestamp(int(stamp), UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return at if 1970 <= at.year < 9999 else None
