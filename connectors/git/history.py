"""Reads a commit's files, the changes between two commits and each file's last author, and assigns external ids that
follow renames.

A file's id is the path at which it was first seen; a rename does not change it. Only ids that differ from the current
path are stored. A path that is created again after it was deleted is the same document again. The last authors come
from a walk over the whole history, and later over new commits only."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal

from connectors.git.client import LOCAL_SECONDS, Mirror
from pipeline.core.errors import Misconfigured, Retryable

MAX_DELETED = 2_000
"""Deleted paths of renamed files whose ids are remembered, in case the path is created again."""
_MAX_PATH_BYTES = 1_800
"""Longest path that is an id, of the 2,000 bytes that an external id may have (connectors.runner.compare)."""

ChangeKind = Literal["added", "modified", "deleted", "renamed"]


@dataclass(frozen=True, slots=True)
class Change:
    """A file that differs between two commits."""

    kind: ChangeKind
    path: str
    """The path; bytes that are not UTF-8 are surrogates (``os.fsdecode``)."""
    old: str | None = None
    """The former path of a renamed file."""


@dataclass(frozen=True, slots=True)
class Ids:
    """The external ids of a commit's files. commit None: the empty tree."""

    commit: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    """By path: ids that are not ``default_id(path)``."""
    deleted: Mapping[str, str] = field(default_factory=dict)
    """By path: such ids of deleted paths, the newest last."""

    def id_of(self, path: str) -> str:
        return self.renamed.get(path) or default_id(path)

    def last_id_of(self, path: str) -> str:
        """Return the id of a path, or the one that it had before it was deleted."""
        return self.renamed.get(path) or self.deleted.get(path) or default_id(path)

    def to_json(self) -> dict[str, Any]:
        """Return the ids as JSON values; ``_escape`` encodes paths that JSON cannot represent."""
        return {
            "commit": self.commit,
            "other": {_escape(path): name for path, name in self.renamed.items()},
            "left": [[_escape(path), name] for path, name in self.deleted.items()],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Ids:
        return cls(
            stored["commit"],
            {_unescape(path): name for path, name in stored["other"].items()},
            {_unescape(path): name for path, name in stored["left"]},
        )


def default_id(path: str) -> str:
    """Return the id of a file that was never renamed: its path, with a hash if it is too long or not UTF-8."""
    name = printable_path(path)
    if len(name.encode()) <= _MAX_PATH_BYTES and name == path:
        return name
    beginning = name.encode()[:_MAX_PATH_BYTES].decode("utf-8", "ignore")
    return f"{beginning}…{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}"


def printable_path(path: str) -> str:
    """Return a path with bytes that are not UTF-8 written as ``\\xff``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def advance_ids(ids: Ids, changes: Iterable[Change], commit: str, live: Container[str]) -> Ids:
    """Return the ids after changes that lead from ``ids.commit`` to ``commit``. live: the paths of that commit's tree.

    Law: two paths of one tree never have one id.
    """
    changes = list(changes)
    renamed, deleted = dict(ids.renamed), dict(ids.deleted)
    moved: dict[str, str] = {}
    for change in changes:  # all removals before all additions: two files may have exchanged their paths
        if change.kind == "renamed" and change.old is not None:
            before = renamed.pop(change.old, None)
            moved[change.path] = default_id(change.old) if before is None else before
        elif change.kind == "deleted":
            deleted.pop(change.path, None)
            if (name := renamed.pop(change.path, None)) is not None:
                deleted[change.path] = name
    for path, name in moved.items():
        deleted.pop(path, None)
        if name != default_id(path):
            renamed[path] = name
    used = set(renamed.values())
    sources = {change.old for change in changes}
    # A file that was rewritten while its former text moved to another path is a new document.
    fresh = {change.path for change in changes if change.kind == "added"} | {
        change.path for change in changes if change.kind == "modified" and change.path in sources
    }
    for path in sorted(fresh):
        default = default_id(path)
        candidates = [deleted.pop(path, default), default, f"{default}@{commit[:12]}"]
        free = [
            name
            for name in candidates
            if name not in used and not (name != default and _is_default_id(name, live, renamed))
        ]
        name = free[0] if free else f"{default}@{commit}"
        if name != default:
            renamed[path] = name
            used.add(name)
    return Ids(commit, renamed, dict(list(deleted.items())[-MAX_DELETED:]))


def _is_default_id(name: str, live: Container[str], renamed: Mapping[str, str]) -> bool:
    """Whether the file at this path has it as its id."""
    return name in live and name not in renamed


def rebuild_ids(ids: Ids, commit: str, live: Collection[str]) -> Ids:
    """Return the ids of a commit that does not descend from ``ids.commit``: a path that still exists has the same
    id."""
    renamed = {path: name for path, name in ids.renamed.items() if path in live}
    used = set(renamed.values())
    conflicting = [Change("added", path) for path in live if path not in renamed and default_id(path) in used]
    return advance_ids(Ids(commit, renamed, ids.deleted), conflicting, commit, live)


def _escape(path: str) -> str:
    """Write surrogates, which Postgres does not accept, as U+0001 and their byte; U+0001 itself likewise."""
    escaped = path.replace("\x01", "\x0101")
    return "".join(f"\x01{ord(char) - 0xDC00:02x}" if "\udc80" <= char <= "\udcff" else char for char in escaped)


def _unescape(text: str) -> str:
    first, *others = text.split("\x01")
    return first + "".join(_byte(int(part[:2], 16)) + part[2:] for part in others)


def _byte(value: int) -> str:
    return chr(value) if value < 0x80 else chr(0xDC00 + value)


_MEAN_RECORD_BYTES, _MIN_LISTING_BYTES = 260, 1024**2
"""The most bytes of a commit's listing for each of ``max_files``, 60 of which are not the path's. Trees that contain
one another make gigabytes of paths of a few kilobytes."""
MAX_WALKED = 20_000_000
"""Records of git's log that are read for last changes. Linux has about five million."""
RENAMES_SECONDS = 60.0
"""Time to find files that were moved and edited; 2,000 of 9 KB that have nothing in common take 16 s of processor."""
_FILE = re.compile(rb"100(?:644|755|664) blob ([0-9a-f]+) +(\d+)\t(.+)", re.DOTALL)
"""A regular file. Links (120000) and submodules (160000) are not followed."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a commit."""

    blob: str
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Snapshot:
    """A commit's tree."""

    commit: str | None
    branch: str
    files: Mapping[str, File]
    """By path: every regular file."""
    documents: Mapping[str, str]
    """By external id, in its order: the paths of the files that are documents."""
    ids: Ids
    last_changes: Mapping[str, LastChange] = field(default_factory=dict)
    """By path."""

    @cached_property
    def order(self) -> list[str]:
        return list(self.documents)


async def files(mirror: Mirror, commit: str) -> dict[str, File]:
    """Return a commit's regular files by path. Raises Misconfigured (too many) and Retryable."""
    by_path: dict[str, File] = {}
    entries = listing_bytes = 0
    max_bytes = max(_MIN_LISTING_BYTES, mirror.max_files * _MEAN_RECORD_BYTES)

    def fits() -> bool:
        return entries <= mirror.max_files and listing_bytes <= max_bytes

    def consume(record: bytes) -> bool:
        nonlocal entries, listing_bytes
        entries += 1  # links and submodules too: trees that contain one another hold any number of them
        listing_bytes += len(record)
        if match := _FILE.fullmatch(record):
            by_path[os.fsdecode(match[3])] = File(match[1].decode(), int(match[2]))
        return fits()

    await mirror.read_records(consume, "ls-tree", "-r", "-l", "-z", "--full-tree", commit)
    if not fits():
        raise Misconfigured(
            f"the repository has more than {mirror.max_files:,} files, or very long paths: raise max_files, or connect"
            " a smaller one"
        )
    return by_path


async def changes(mirror: Mirror, old: str | None, new: str) -> list[Change]:
    """Return the changes from one commit to another, including those of submodules and links. old None: the empty tree.
    Raises Misconfigured and Retryable.

    To find files that were moved and edited, git compares each file that is new with each that is gone. A commit for
    which that takes too much time or memory is read again, and only moved files that are otherwise equal are found:
    whoever pushes it must not stop the reading of the repository.
    """
    if old is None:
        return [Change("added", path) for path in await files(mirror, new)]
    try:
        return await _differences(mirror, old, new, "--find-renames", "--break-rewrites", seconds=RENAMES_SECONDS)
    except (Misconfigured, Retryable):
        return await _differences(mirror, old, new, "--find-renames=100%")


async def _differences(
    mirror: Mirror, old: str, new: str, *finding: str, seconds: float = LOCAL_SECONDS
) -> list[Change]:
    fields: list[bytes] = []

    def consume(record: bytes) -> bool:
        fields.append(record)
        return True

    await mirror.read_records(
        consume,
        "diff-tree",
        "-r",
        "-z",
        "--no-commit-id",
        "--name-status",
        *finding,
        "--no-rename-empty",
        "--no-ext-diff",
        old,
        new,
        seconds=seconds,
    )
    differences, position = [], 0
    while position < len(fields):
        status, path = fields[position][:1], os.fsdecode(fields[position + 1])
        position += 2
        if status == b"R":
            differences.append(Change("renamed", os.fsdecode(fields[position]), path))
            position += 1
        elif status in (b"A", b"D"):
            differences.append(Change("added" if status == b"A" else "deleted", path))
        else:
            differences.append(Change("modified", path))
    return differences


_MARK = b"\x02"
_FORMAT = "--format=%x02%ct%x00%aN"
"""The time of a commit and the name of its author."""


@dataclass(frozen=True, slots=True)
class LastChange:
    """The last commit that changed a file."""

    author: str | None
    at: datetime | None


@dataclass(slots=True)
class History:
    """The last change of each file, as of a commit. A merge changes only the files that its branches changed."""

    commit: str | None = None
    last_changes: dict[str, LastChange] = field(default_factory=dict)

    async def advance(self, mirror: Mirror, commit: str, paths: Collection[str]) -> None:
        """Update ``last_changes`` to a commit's tree. Raises Retryable."""
        if commit == self.commit:
            return
        known = self.commit is not None and await mirror.is_ancestor(self.commit, commit)
        last_changes = dict(self.last_changes) if known else {}
        commits = f"{self.commit}..{commit}" if known else commit
        expected = frozenset(paths)
        if not expected:
            self.commit, self.last_changes = commit, {}
            return
        # New commits are walked completely; the whole history only until the last commit of every file is known.
        walk = _Walk(expected, to_end=known)
        await mirror.read_records(
            walk.consume,
            "log",
            "-z",
            _FORMAT,
            "--name-only",
            "--no-renames",
            "--no-ext-diff",
            "--no-show-signature",
            commits,
            "--",
        )
        for path, last_change in walk.fresh.items():
            before = last_changes.get(path)
            # A merged commit may be older than those of the branch: the newest counts, as in a walk over everything.
            if before is None or before.at is None or (last_change.at is not None and last_change.at >= before.at):
                last_changes[path] = last_change
        self.commit = commit
        self.last_changes = {path: last_changes[path] for path in expected if path in last_changes}


class _Walk:
    """Collects the last change of each expected path from git's log, and of no other: a history of some kilobytes can
    name any number of files. Ends after MAX_WALKED records; what it has not seen by then has no last change."""

    def __init__(self, expected: frozenset[str], *, to_end: bool) -> None:
        """to_end: whether to go on when the last change of every expected path is known."""
        self.fresh: dict[str, LastChange] = {}
        self._expected = expected
        self._to_end = to_end
        self._left = MAX_WALKED
        self._last_change = LastChange(None, None)
        self._stamp = b""

    def consume(self, record: bytes) -> bool:
        """Read a record: a commit is its time, its author and then its paths, the first of them after a line end."""
        if record.startswith(_MARK):
            self._stamp = record[1:]
        elif self._stamp:
            self._last_change, self._stamp = LastChange(_name(record), _time(self._stamp)), b""
        else:
            path = os.fsdecode(record.removeprefix(b"\n"))
            if path in self._expected:
                self.fresh.setdefault(path, self._last_change)
                if not self._to_end and len(self.fresh) == len(self._expected):
                    return False
        self._left -= 1
        return self._left > 0


def _name(raw: bytes) -> str | None:
    name = " ".join("".join(char if char.isprintable() else " " for char in raw.decode("utf-8", "replace")).split())
    return name[:200] or None


def _time(stamp: bytes) -> datetime | None:
    """Return a commit's time, or None if it is out of range: git accepts any number."""
    try:
        at = datetime.fromtimestamp(int(stamp), UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return at if 1970 <= at.year < 9999 else None
