"""Stores for the laws of connectors: one in memory, a folder of this machine, and a fake S3. Each document has a folder
of its own, with a sidecar file of its own."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import fsspec

from connectors.conform.samples import DeclaredMembers
from connectors.fakes.misbehaviour import Misbehaving
from connectors.fakes.s3 import BUCKET, KEY, SECRET, FakeS3, Stored
from connectors.objects.source import Objects
from connectors.source import Playground
from pipeline.runtime.http_server import served


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


class S3Playground(DeclaredMembers):
    """The objects ``NAME/NAME.md`` below ``docs`` in the bucket of a fake S3."""

    def __init__(self, fake: FakeS3, url: str, members_file: Path, misbehaving: Misbehaving) -> None:
        super().__init__(members_file)
        self.fake, self.misbehaving = fake, misbehaving
        self._removed: dict[str, Stored] = {}
        self._hidden: dict[str, Stored] = {}
        self.environment: Mapping[str, str] = {"S3_KEY": KEY, "S3_SECRET": SECRET}
        self.options: Mapping[str, Any] = {
            "url": f"s3://{BUCKET}/docs",
            "key": {"env": "S3_KEY"},
            "secret": {"env": "S3_SECRET"},
            "settings": {"endpoint_url": url, "config_kwargs": {"retries": {"max_attempts": 1}}},
            "acl_tags": ["team"],
            "members_file": str(self.members_file),
            "sidecars": True,
        }

    async def write(self, name: str, text: str) -> str:
        self.fake.put(f"docs/{_path(name)}", text.encode())
        return _path(name)

    async def move(self, name: str) -> None:
        """Copy the object onto itself, as stores do to change its attributes."""
        self.fake.put(f"docs/{_path(name)}", self.fake.objects[f"docs/{_path(name)}"].content)

    async def remove(self, name: str) -> None:
        self._removed[name] = self.fake.objects.pop(f"docs/{_path(name)}")

    async def restore(self, name: str) -> None:
        self.fake.objects[f"docs/{_path(name)}"] = self._removed.pop(name)

    async def restrict(self, name: str) -> None:
        self.fake.put(f"docs/{name}/.penstock.toml", b'acl = ["board"]\n')

    async def add_places(self) -> Mapping[str, str]:
        """Add nothing: the entries name objects by their keys."""
        return {}

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """truncated: the address holds nothing, as with a wrong prefix."""
        self.fake.throttled, self.fake.failing = throttled, failing
        if truncated != bool(self._hidden):
            self.fake.objects, self._hidden = self._hidden, self.fake.objects


@asynccontextmanager
async def playing_with_s3() -> AsyncIterator[S3Playground]:
    fake = FakeS3(page=3)
    misbehaving = Misbehaving(fake)
    with tempfile.TemporaryDirectory(prefix="penstock-objects-") as folder:
        async with served(misbehaving) as url:
            yield S3Playground(fake, url, Path(folder, "members.toml"), misbehaving)


class S3Objects(Objects):
    """The source on a fake S3."""

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        return playing_with_s3()


class FileObjects(Objects):
    """The source on a folder of this machine."""

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        return playing_with_files()
