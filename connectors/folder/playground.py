"""A folder for the laws of connectors. Every document has a folder of its own, with a ``.penstock.toml`` of its own."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from connectors.conform.samples import DeclaredMembers


class FolderPlayground(DeclaredMembers):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "members.toml")
        self.root, self._hidden = folder / "docs", folder / "hidden"
        self.root.mkdir()
        (self.root / "moved").mkdir()
        self._paths: dict[str, Path] = {}
        self._ids: dict[str, str] = {}
        self._removed: dict[str, str] = {}
        self.environment: Mapping[str, str] = {}
        self.options: Mapping[str, Any] = {
            "paths": [str(self.root)],
            "acl_tags": ["team"],
            "members_file": str(self.members_file),
            "page_files": 3,
        }

    async def write(self, name: str, text: str) -> str:
        path = self._paths.setdefault(name, self.root / name / f"{name}.md")
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_name(f".{name}.fresh")
        fresh.write_text(text)
        fresh.replace(path)  # as editors save
        return self._ids.setdefault(name, str(path.resolve()))

    async def move(self, name: str) -> None:
        self._paths[name] = self._paths[name].rename(self.root / "moved" / f"{name}, renamed.md")

    async def relabel(self, name: str) -> None:
        """Move it to another folder, under its name."""
        self._paths[name] = self._paths[name].rename(self.root / "moved" / self._paths[name].name)

    async def remove(self, name: str) -> None:
        self._removed[name] = self._paths[name].read_text()
        self._paths[name].unlink()

    async def restore(self, name: str) -> None:
        await self.write(name, self._removed.pop(name))

    async def restrict(self, name: str) -> None:
        (self._paths[name].parent / ".penstock.toml").write_text('acl = ["board"]\n')

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """truncated: the folder looks as if it were not mounted. The other troubles do not exist here."""
        if truncated and self.root.exists():
            self.root.rename(self._hidden)
            self.root.mkdir()
        elif not truncated and self._hidden.exists():
            self.root.rmdir()
            self._hidden.rename(self.root)


@asynccontextmanager
async def playing() -> AsyncIterator[FolderPlayground]:
    with tempfile.TemporaryDirectory(prefix="penstock-folder-") as folder:
        yield FolderPlayground(Path(folder))
