"""Stores for the laws of connectors: one in memory, and a folder of this machine. Each document has a folder of its
own, with a sidecar file of its own."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import fsspec

from connectors.conform.samples import DeclaredMembers
from connectors.objects.source import Objects
from connectors.source import Playground


class ObjectsPlayground(DeclaredMembers):
    def __init__(self, url: str, members_file: Path) -> None:
        """url: an empty folder."""
        super().__init__(members_file)
        self._fs, self._root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        self._hidden = f"{self._root}-hidden"
        self._removed: dict[str, bytes] = {}
        self.environment: Mapping[str, str] = {}
        self.options: Mapping[str, Any] = {
            "url": url,
            "acl_tags": ["team"],
            "members_file": str(self.members_file),
            "sidecars": True,
        }

    async def write(self, name: str, text: str) -> str:
        self._put(_path(name), text.encode())
        return _path(name)

    async def move(self, name: str) -> None:
        """Copy the object onto itself, as stores do to change its attributes. Under another name it would be another
        object."""
        self._put(_path(name), self._get(_path(name)))

    async def remove(self, name: str) -> None:
        self._removed[name] = self._get(_path(name))
        self._fs.rm_file(f"{self._root}/{_path(name)}")

    async def restore(self, name: str) -> None:
        self._put(_path(name), self._removed.pop(name))

    async def restrict(self, name: str) -> None:
        self._put(f"{name}/.penstock.toml", b'acl = ["board"]\n')

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """truncated: the address holds nothing, as with a wrong prefix. The other troubles do not exist here."""
        is_hidden = self._fs.exists(self._hidden)
        if truncated and not is_hidden:
            self._fs.mv(self._root, self._hidden, recursive=True)
        elif not truncated and is_hidden:
            self._fs.mv(self._hidden, self._root, recursive=True)

    def _put(self, path: str, content: bytes) -> None:
        full = f"{self._root}/{path}"
        self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(full, content)

    def _get(self, path: str) -> bytes:
        content: bytes = self._fs.cat_file(f"{self._root}/{path}")
        return content


def _path(name: str) -> str:
    return f"{name}/{name}.md"


@asynccontextmanager
async def playing() -> AsyncIterator[ObjectsPlayground]:
    with tempfile.TemporaryDirectory(prefix="penstock-objects-") as folder:
        yield ObjectsPlayground(f"memory://{uuid.uuid4().hex}/docs", Path(folder, "members.toml"))


@asynccontextmanager
async def playing_with_files() -> AsyncIterator[ObjectsPlayground]:
    with tempfile.TemporaryDirectory(prefix="penstock-objects-") as folder:
        yield ObjectsPlayground(f"file://{folder}/docs", Path(folder, "members.toml"))


class FileObjects(Objects):
    """The source on a folder of this machine."""

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        return playing_with_files()
