"""A commit's files, and what changed between two commits, out of git's own words."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from connectors.git.ids import Change, Ids
from connectors.git.mirror import Mirror
from pipeline.core.errors import Misconfigured

MAX_FILES = 2_000_000
_FILE = re.compile(rb"100(?:644|755|664) blob ([0-9a-f]+) +(\d+)\t(.+)", re.DOTALL)
"""Links (120000) and submodules (160000) are no files: neither is followed."""
_PICTURES_AND_SO_ON = frozenset({
    "png", "jpg", "jpeg", "gif", "bmp", "ico", "icns", "tif", "tiff", "webp", "heic", "psd", "ai", "eps", "mp3",
    "mp4", "m4a", "mov", "avi", "mkv", "webm", "wav", "ogg", "flac", "ttf", "otf", "woff", "woff2", "eot", "zip",
    "gz", "tgz", "bz2", "xz", "zst", "7z", "rar", "tar", "jar", "war", "ear", "whl", "egg", "so", "dll", "dylib",
    "exe", "bin", "o", "a", "obj", "lib", "class", "pyc", "pyo", "wasm", "dex", "apk", "aab", "ipa", "dmg", "iso",
    "img", "deb", "rpm", "msi", "pdb", "db", "sqlite", "sqlite3", "mdb", "parquet", "avro", "orc", "npy", "npz",
    "pkl", "pt", "pth", "onnx", "h5", "safetensors", "gguf", "keystore", "jks", "p12", "pfx", "der", "mo", "pack",
    "idx",
})  # fmt: skip
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
        see, "diff-tree", "-r", "-z", "--no-commit-id", "--name-status", "--find-renames", "--break-rewrites",
        "--no-rename-empty", "--no-ext-diff", old, new,
    )  # fmt: skip
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
