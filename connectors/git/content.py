"""Reads blobs of a repository as documents."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from connectors.extract import EXTRACTOR
from connectors.extraction import Extracted, extract_file
from connectors.extraction import Unreadable as NoText
from connectors.git.client import LOCAL_SECONDS, GitFailed, Mirror, RunningGit
from connectors.git.history import File, LastChange, Snapshot, printable_path
from connectors.git.options import Access, GitOptions
from connectors.paths import path_metadata
from connectors.source import Document, Entry, Unreadable
from pipeline.core.errors import Retryable

_PIECE_BYTES = 256 * 1024


def revision(path: str, file: File, options: GitOptions, branch: str) -> str:
    """Return a value that changes with the blob and everything else that title, content, address and metadata depend
    on."""
    rest = [printable_path(path), source_url(path, options, branch), EXTRACTOR]
    return f"{file.blob}-{hashlib.sha256(json.dumps(rest).encode()).hexdigest()[:16]}"


def source_url(path: str, options: GitOptions, branch: str) -> str | None:
    if options.source_url is None:
        return None
    address = options.source_url.format(path=quote(os.fsencode(path)), branch=quote(branch))
    return address if len(address) <= 8_000 else None


class Reader:
    """Reads files of a snapshot as entries."""

    def __init__(self, mirror: Mirror, options: GitOptions, folder: Path) -> None:
        """folder: holds files while they are read."""
        self._mirror = mirror
        self._options = options
        self._folder = folder

    async def entries(self, tree: Snapshot, files: Sequence[tuple[str, str]], access: Access) -> list[Entry]:
        """Return files as entries. files: (external id, path). Raises Retryable."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(prefix="read-", dir=self._folder) as name:
                fits = [path for _, path in files if tree.files[path].size <= self._options.max_file_bytes]
                blobs = {tree.files[path].blob for path in fits}
                await self._write(Path(name), sorted(blobs))
                return [
                    await self._entry(tree, external_id, path, Path(name) / tree.files[path].blob, access)
                    for external_id, path in files
                ]
        except FileNotFoundError as error:  # a sweep removes the mirror of a wiki that is no longer listed
            raise Retryable("the mirror was removed while it was read: it will be made again") from error

    async def _entry(self, tree: Snapshot, external_id: str, path: str, blob: Path, access: Access) -> Entry:
        file, shown_path = tree.files[path], printable_path(path)
        acl_tags, required_tags = access.tags_of(path)
        current_revision = revision(path, file, self._options, tree.branch)
        name = shown_path.rpartition("/")[2]
        try:
            extracted = await self._text(file, blob, name)
        except NoText as error:
            return Unreadable(
                external_id=external_id,
                code=error.code,
                message=str(error),
                acl_tags=acl_tags,
                required_tags=required_tags,
                revision=current_revision,
            )
        last_change = tree.last_changes.get(path, LastChange(None, None))
        return Document(
            external_id=external_id,
            title=(extracted.title or name)[:4_000],
            content=extracted.text,
            media_type=extracted.media_type,
            acl_tags=acl_tags,
            required_tags=required_tags,
            revision=current_revision,
            source_url=source_url(path, self._options, tree.branch),
            author=last_change.author or extracted.author,
            source_modified_at=last_change.at,
            metadata={**path_metadata(shown_path, file.size), **extracted.metadata},
        )

    async def _text(self, file: File, blob: Path, name: str) -> Extracted:
        limit = self._options.max_file_bytes
        if file.size > limit:
            raise NoText("too_large", f"is {file.size:,} bytes, max_file_bytes is {limit:,}")
        return await extract_file(blob, name)

    async def _write(self, folder: Path, blobs: Sequence[str]) -> None:
        """Write each blob into a file named after it. The names are hexadecimal: no path of a repository becomes a
        local one."""
        if not blobs:
            return
        requests = "".join(f"{blob}\n" for blob in blobs).encode()
        try:
            async with self._mirror.git.running("cat-file", "--batch", input=requests, seconds=LOCAL_SECONDS) as git:
                for blob in blobs:
                    await _copy_blob(git, folder / blob, blob)
        except GitFailed as error:
            raise self._mirror.local_error(error) from error


async def _copy_blob(git: RunningGit, to: Path, blob: str) -> None:
    header = (await git.stdout.readline()).decode("ascii", "replace").split()
    if len(header) != 3 or header[:2] != [blob, "blob"]:
        raise Retryable(f"git cat-file: object {blob} is missing from the mirror: it will be requested again")
    remaining = int(header[2])
    with to.open("wb") as file:
        while remaining:
            piece = await git.stdout.read(min(remaining, _PIECE_BYTES))
            if not piece:
                raise Retryable(f"git cat-file: object {blob} ended early")
            file.write(piece)
            remaining -= len(piece)
    await git.stdout.readexactly(1)
