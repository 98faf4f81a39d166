"""A git source over a real repository on this machine, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from connectors.git.options import GitOptions
from connectors.git.playground import Clone
from connectors.git.source import Git
from connectors.source import Context, Document, Entry, Gone, Page


class Kept:
    """A Memory that a restart survives, through JSON."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def get(self, name: str) -> Any | None:
        return self.values.get(name)

    async def put(self, name: str, value: Any | None) -> None:
        self.values[name] = value


class Repository:
    """Clone to push from, and sources that read it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = Clone(folder / "work", folder / "remote.git")
        self.memory = Kept()
        self.options: dict[str, Any] = {
            "url": f"file://{folder}/remote.git",
            "acl_tags": ["team"],
            "members": {"team": ["ada@example.com"]},
        }

    def source(self, *, folder: str = "state", **options: Any) -> Git:
        """As after a restart; with another folder as after its loss."""
        context = Context(name="code", tenant="t", memory=self.memory, folder=self.folder / folder)
        return Git(GitOptions(**(self.options | options)), context)

    def push(self, files: Mapping[str, str | bytes | None] | None = None, message: str = "A change") -> str:
        """None deletes."""
        for path, content in (files or {}).items():
            if content is None:
                (self.work.folder / path).unlink()
            else:
                self.work.write(path, content)
        return self.work.push(message)

    def move(self, old: str, new: str) -> None:
        target = self.work.folder / new
        target.parent.mkdir(parents=True, exist_ok=True)
        (self.work.folder / old).rename(target)


async def pages(source: Git, cursor: Mapping[str, Any] | None = None) -> list[Page]:
    return [page async for page in source.full(cursor)]


async def listed(source: Git) -> dict[str, str | None]:
    return {entry.external_id: entry.revision async for batch in source.slim() for entry in batch}


def texts(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the texts of documents; ``gone`` for those that are gone, and the code of those that cannot be read."""
    return {
        external_id: entry.content if isinstance(entry, Document) else "gone" if isinstance(entry, Gone) else entry.code
        for external_id, entry in entries.items()
    }
