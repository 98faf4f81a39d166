"""External ids that follow renames: pure.

A file's id is the path at which it was first seen; it keeps it when git says that it was renamed. Only the paths whose
id is another than they are remembered. A path that comes back after it was deleted is the same document again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_LEFT = 2_000
"""Deleted renamed paths that are remembered, in case that they come back."""
_LONGEST = 1_800
"""Of the 2,000 bytes that an external id may have (connectors.runner.compare)."""

ChangeKind = Literal["added", "modified", "deleted", "renamed"]


@dataclass(frozen=True, slots=True)
class Change:
    kind: ChangeKind
    path: str
    """With whatever bytes were no UTF-8 as surrogates (``os.fsdecode``)."""
    old: str | None = None
    """Of a rename: where it was."""


@dataclass(frozen=True, slots=True)
class Ids:
    """commit: for which tree this holds; None: the empty one."""

    commit: str | None = None
    other: Mapping[str, str] = field(default_factory=dict)
    """path → id, of files whose id is not ``own(path)``."""
    left: Mapping[str, str] = field(default_factory=dict)
    """The same of paths that are no more; the newest last."""

    def of(self, path: str) -> str:
        return self.other.get(path) or own(path)

    def was(self, path: str) -> str:
        """The id of a path, or the one that it had before it was deleted."""
        return self.other.get(path) or self.left.get(path) or own(path)

    def kept(self) -> dict[str, Any]:
        """As JSON. Paths and ids that JSON cannot carry are escaped by ``loaded``'s inverse."""
        return {
            "commit": self.commit,
            "other": {_out(path): name for path, name in self.other.items()},
            "left": [[_out(path), name] for path, name in self.left.items()],
        }

    @classmethod
    def loaded(cls, kept: Mapping[str, Any]) -> Ids:
        return cls(
            kept["commit"],
            {_in(path): name for path, name in kept["other"].items()},
            {_in(path): name for path, name in kept["left"]},
        )


def own(path: str) -> str:
    """The id of a file that was never renamed: its path; with a hash, where it is too long, or no UTF-8."""
    name = shown(path)
    if len(name.encode()) <= _LONGEST and name == path:
        return name
    beginning = name.encode()[:_LONGEST].decode("utf-8", "ignore")
    return f"{beginning}…{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}"


def shown(path: str) -> str:
    """Bytes that are no UTF-8 as ``\\xff``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def advanced(ids: Ids, changes: Iterable[Change], commit: str, live: Container[str]) -> Ids:
    """After changes that lead from ``ids.commit`` to ``commit``. live: the paths of that commit's tree.

    Law: two paths of one tree never have one id.
    """
    changes = list(changes)
    other, left = dict(ids.other), dict(ids.left)
    moved: dict[str, str] = {}
    for change in changes:  # all that goes before all that comes: two files may have changed places
        if change.kind == "renamed" and change.old is not None:
            before = other.pop(change.old, None)
            moved[change.path] = own(change.old) if before is None else before
        elif change.kind == "deleted":
            left.pop(change.path, None)
            if (name := other.pop(change.path, None)) is not None:
                left[change.path] = name
    for path, name in moved.items():
        left.pop(path, None)
        if name != own(path):
            other[path] = name
    held = set(other.values())
    sources = {change.old for change in changes}
    # A file that was rewritten while its text went on elsewhere (a new README beside the old one) is a new one.
    fresh = {change.path for change in changes if change.kind == "added"} | {
        change.path for change in changes if change.kind == "modified" and change.path in sources
    }
    for path in sorted(fresh):
        wished = [left.pop(path, own(path)), own(path), f"{own(path)}@{commit[:12]}"]
        free = [name for name in wished if name not in held and not (name != own(path) and _is_own(name, live, other))]
        name = free[0] if free else f"{own(path)}@{commit}"
        if name != own(path):
            other[path] = name
            held.add(name)
    return Ids(commit, other, dict(list(left.items())[-MAX_LEFT:]))


def _is_own(name: str, live: Container[str], other: Mapping[str, str]) -> bool:
    """Whether a file of that name has it as its id."""
    return name in live and name not in other


def refounded(ids: Ids, commit: str, live: Collection[str]) -> Ids:
    """Where nothing leads from ``ids.commit`` to ``commit`` any more: what is called as before keeps its id."""
    other = {path: name for path, name in ids.other.items() if path in live}
    held = set(other.values())
    doubled = [Change("added", path) for path in live if path not in other and own(path) in held]
    return advanced(Ids(commit, other, ids.left), doubled, commit, live)


def _out(path: str) -> str:
    """Surrogates, which Postgres does not take, as U+0001 and their byte; U+0001 itself likewise."""
    escaped = path.replace("\x01", "\x0101")
    return "".join(f"\x01{ord(char) - 0xDC00:02x}" if "\udc80" <= char <= "\udcff" else char for char in escaped)


def _in(text: str) -> str:
    first, *others = text.split("\x01")
    return first + "".join(_byte(int(part[:2], 16)) + part[2:] for part in others)


def _byte(value: int) -> str:
    return chr(value) if value < 0x80 else chr(0xDC00 + value)
