"""Blobs of a repository as documents."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from connectors.extract import EXTRACTOR
from connectors.extraction import Extracted, extract_file
from connectors.extraction import Unreadable as NoText
from connectors.git.client import LOCAL_SECONDS, GitFailed, Mirror, Running
from connectors.git.history import File, Snapshot, Touch, shown
from connectors.git.options import Access, GitOptions
from connectors.source import Document, Entry, Unreadable
from pipeline.core.errors import Retryable

_PIECE = 256 * 1024


def revision(path: str, file: File, options: GitOptions, branch: str) -> str:
    """The blob, and all else of which title, content, address and metadata are made."""
    rest = [shown(path), source_url(path, options, branch), EXTRACTOR]
    return f"{file.blob}-{hashlib.sha256(json.dumps(rest).encode()).hexdigest()[:16]}"


def source_url(path: str, options: GitOptions, branch: str) -> str | None:
    if options.source_url is None:
        return None
    address = options.source_url.format(path=quote(os.fsencode(path)), branch=quote(branch))
    return address if len(address) <= 8_000 else None


class Reader:
    def __init__(self, mirror: Mirror, options: GitOptions, folder: Path) -> None:
        """folder: for files that are being read; there is none in it between two calls."""
        self._mirror = mirror
        self._options = options
        self._folder = folder

    async def entries(
        self, tree: Snapshot, wanted: Sequence[tuple[str, str]], access: Access, touches: Mapping[str, Touch]
    ) -> list[Entry]:
        """wanted: (external id, path). Raises Retryable."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="read-", dir=self._folder) as name:
            fits = [path for _, path in wanted if tree.files[path].size <= self._options.max_file_bytes]
            blobs = {tree.files[path].blob for path in fits}
            await self._write(Path(name), sorted(blobs))
            return [
                await self._entry(tree, external_id, path, Path(name) / tree.files[path].blob, access, touches)
                for external_id, path in wanted
            ]

    async def _entry(
        self, tree: Snapshot, external_id: str, path: str, blob: Path, access: Access, touches: Mapping[str, Touch]
    ) -> Entry:
        file, where = tree.files[path], shown(path)
        acl_tags, required_tags = access.of(path)
        revised = revision(path, file, self._options, tree.branch)
        name = where.rpartition("/")[2]
        try:
            found = await self._text(file, blob, name)
        except NoText as error:
            return Unreadable(
                external_id=external_id,
                code=error.code,
                message=str(error),
                acl_tags=acl_tags,
                required_tags=required_tags,
                revision=revised,
            )
        touch = touches.get(path, Touch(None, None))
        ending = name.rpartition(".")[2].lower() if "." in name.lstrip(".") else ""
        return Document(
            external_id=external_id,
            title=(found.title or name)[:4_000],
            content=found.text,
            media_type=found.media_type,
            acl_tags=acl_tags,
            required_tags=required_tags,
            revision=revised,
            source_url=source_url(path, self._options, tree.branch),
            author=touch.author or found.author,
            source_modified_at=touch.at,
            metadata={"path": where, "size": file.size, "extension": ending[:200], **found.metadata},
        )

    async def _text(self, file: File, blob: Path, name: str) -> Extracted:
        limit = self._options.max_file_bytes
        if file.size > limit:
            raise NoText("too_large", f"is {file.size:,} bytes, max_file_bytes is {limit:,}")
        return await extract_file(blob, name)

    async def _write(self, folder: Path, blobs: Sequence[str]) -> None:
        """Each into a file of its name. The names are hexadecimal: no path of a repository becomes one of ours."""
        if not blobs:
            return
        asked = "".join(f"{blob}\n" for blob in blobs).encode()
        try:
            async with self._mirror.git.running("cat-file", "--batch", input=asked, seconds=LOCAL_SECONDS) as git:
                for blob in blobs:
                    await _one(git, folder / blob, blob)
        except GitFailed as error:
            raise self._mirror.damaged(error) from error


async def _one(git: Running, to: Path, blob: str) -> None:
    header = (await git.stdout.readline()).decode("ascii", "replace").split()
    if len(header) != 3 or header[:2] != [blob, "blob"]:
        raise Retryable(f"git cat-file: object {blob} is missing from our copy: it is asked for again")
    left = int(header[2])
    with to.open("wb") as file:
        while left:
            piece = await git.stdout.read(min(left, _PIECE))
            if not piece:
                raise Retryable(f"git cat-file: object {blob} ended early")
            file.write(piece)
            left -= len(piece)
    await git.stdout.readexactly(1)
