"""Originals, each once, named by the SHA-256 of its content."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class Original:
    sha256: str
    size: int


class TooLarge(Exception):
    """More bytes came than may."""


class Store:
    """Law: a name that stands in it holds all of its content, on disk; nobody but this process' user may read it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"

    def prepare(self) -> None:
        """Raises OSError."""
        self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self._incoming.iterdir():  # of a process that was killed
            left.unlink(missing_ok=True)

    def path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256

    def writing(self, max_bytes: int) -> Incoming:
        return Incoming(self, self._incoming, max_bytes)

    def remove(self, sha256: str) -> None:
        self.path(sha256).unlink(missing_ok=True)

    def names(self) -> set[str]:
        return {path.name for path in self._folder.glob("[0-9a-f][0-9a-f]/*")}


class Incoming:
    """A file on its way in: ``write`` its parts, then ``keep`` it. Left without that, nothing stays of it."""

    def __init__(self, store: Store, folder: Path, max_bytes: int) -> None:
        self._store, self.max_bytes = store, max_bytes
        descriptor, name = tempfile.mkstemp(dir=folder)  # for its user alone
        self._file, self._path = os.fdopen(descriptor, "wb"), Path(name)
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, part: bytes) -> None:
        """Raises TooLarge, OSError (a full disk)."""
        self.size += len(part)
        if self.size > self.max_bytes:
            raise TooLarge
        self._hash.update(part)
        self._file.write(part)

    def keep(self) -> Original:
        self._file.flush()
        os.fsync(self._file.fileno())
        original = Original(self._hash.hexdigest(), self.size)
        target = self._store.path(original.sha256)
        target.parent.mkdir(exist_ok=True, mode=0o700)
        self._path.replace(target)
        return original

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
