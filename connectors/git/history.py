"""A commit's files, what changed between two commits, who last changed each file, and external ids that follow renames.

A file's id is the path at which it was first seen; it stays when git reports a rename. Only paths whose id differs from
them are stored. A path that comes back after it was deleted is the same document again. The last authors come from one
walk over the history, then only over what is new.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal

from connectors.git.client import Mirror
from pipeline.core.errors import Misconfigured

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


MAX_FILES = 2_000_000
_FILE = re.compile(rb"100(?:644|755|664) blob ([0-9a-f]+) +(\d+)\t(.+)", re.DOTALL)
"""Links (120000) and submodules (160000) are no files: neither is followed."""
_PICTURES_AND_SO_ON = frozenset(
    {
        "png",
        "jpg",
        "jpeg",
        "gif",
        "bmp",
        "ico",
        "icns",
        "tif",
        "tiff",
        "webp",
        "heic",
        "psd",
        "ai",
        "eps",
        "mp3",
        "mp4",
        "m4a",
        "mov",
        "avi",
        "mkv",
        "webm",
        "wav",
        "ogg",
        "flac",
        "ttf",
        "otf",
        "woff",
        "woff2",
        "eot",
        "zip",
        "gz",
        "tgz",
        "bz2",
        "xz",
        "zst",
        "7z",
        "rar",
        "tar",
        "jar",
        "war",
        "ear",
        "whl",
        "egg",
        "so",
        "dll",
        "dylib",
        "exe",
        "bin",
        "o",
        "a",
        "obj",
        "lib",
        "class",
        "pyc",
        "pyo",
        "wasm",
        "dex",
        "apk",
        "aab",
        "ipa",
        "dmg",
        "iso",
        "img",
        "deb",
        "rpm",
        "msi",
        "pdb",
        "db",
        "sqlite",
        "sqlite3",
        "mdb",
        "parquet",
        "avro",
        "orc",
        "npy",
        "npz",
        "pkl",
        "pt",
        "pth",
        "onnx",
        "h5",
        "safetensors",
        "gguf",
        "keystore",
        "jks",
        "p12",
        "pfx",
        "der",
        "mo",
        "pack",
        "idx",
    }
)
"""Endings of what holds no text to index. Of what is binary without saying so, reading finds out."""


@dataclass(frozen=True, slots=True)
class File:
    blob: str
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Snapshot:
    """A commit's tree. files: every regular file, whether it is taken or not."""

    commit: str | None
    branch: str
    files: Mapping[str, File]
    taken: Mapping[str, str]
    """external id → path, in the order of the ids: of what is indexed."""
    ids: Ids

    @cached_property
    def order(self) -> list[str]:
        return list(self.taken)


def is_taken(path: str, file: File) -> bool:
    """Whether a file may hold text at all."""
    ending = path.rpartition("/")[2].rpartition(".")[2].lower()
    return file.size > 0 and ending not in _PICTURES_AND_SO_ON


async def files(mirror: Mirror, commit: str) -> dict[str, File]:
    """Raises Misconfigured (too many), Retryable."""
    found: dict[str, File] = {}

    def see(record: bytes) -> bool:
        if match := _FILE.fullmatch(record):
            found[os.fsdecode(match[3])] = File(match[1].decode(), int(match[2]))
        return len(found) <= MAX_FILES

    await mirror.each(see, "ls-tree", "-r", "-l", "-z", "--full-tree", commit)
    if len(found) > MAX_FILES:
        raise Misconfigured(f"the repository holds more than {MAX_FILES:,} files: connect a smaller one")
    return found


async def changes(mirror: Mirror, old: str | None, new: str) -> list[Change]:
    """From one tree to the other; old None: from the empty one. Submodules and links are among them."""
    if old is None:
        return [Change("added", path) for path in await files(mirror, new)]
    fields: list[bytes] = []

    def see(record: bytes) -> bool:
        fields.append(record)
        return True

    await mirror.each(
        see,
        "diff-tree",
        "-r",
        "-z",
        "--no-commit-id",
        "--name-status",
        "--find-renames",
        "--break-rewrites",
        "--no-rename-empty",
        "--no-ext-diff",
        old,
        new,
    )
    found, position = [], 0
    while position < len(fields):
        status, path = fields[position][:1], os.fsdecode(fields[position + 1])
        position += 2
        if status == b"R":
            found.append(Change("renamed", os.fsdecode(fields[position]), path))
            position += 1
        elif status in (b"A", b"D"):
            found.append(Change("added" if status == b"A" else "deleted", path))
        else:
            found.append(Change("modified", path))
    return found


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
            walk.see,
            "log",
            "-z",
            _FORMAT,
            "--name-only",
            "--no-renames",
            "--no-ext-diff",
            "--no-show-signature",
            span,
            "--",
        )
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
