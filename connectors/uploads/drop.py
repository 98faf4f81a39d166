"""The drop folder: files put into it are handed in when they are complete."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import Any

import structlog

from connectors.folder.options import FolderOptions
from connectors.folder.walk import Candidate, Walk, root_problem
from connectors.protocol import Problem, printable
from connectors.uploads.intake import Busy, Desk
from connectors.uploads.options import UploadsOptions
from connectors.uploads.store import Incoming, QuotaReached, TooLarge, Uploaded, Words
from pipeline.core.errors import Retryable

log = structlog.get_logger()

REASON = ".reason.txt"
PART = 1024 * 1024
FULL_SECONDS = 60.0

Looks = tuple[int, int, int]
"""Size, time of change in ns, inode."""


class Drop:
    """A file's external id is its path within the folder. Who reads it says the nearest ``.penstock.toml``, else the
    options; a file that nobody may read is not taken. One that vanishes from the folder is not deleted: it was handed
    in."""

    def __init__(self, options: UploadsOptions, desk: Desk) -> None:
        assert options.folder is not None
        self._options, self._desk = options, desk
        self._root = os.path.realpath(options.folder)
        self._policy = FolderOptions(acl_tags=tuple(options.acl_tags), required_tags=tuple(options.required_tags))
        self._still: dict[str, tuple[Looks, float]] = {}
        """How a file looked, and since when it has looked so (on monotonic())."""
        self._taken: dict[str, tuple[Looks, tuple[str, ...], tuple[str, ...]]] = {}
        self._told: set[Problem] = set()
        self._full_until = float("-inf")
        """When files are tried again (on monotonic()), after a quota was reached."""

    def check(self) -> list[Problem]:
        if problem := root_problem(self._root):
            return [problem]
        return [entry for entry in self._listed() if isinstance(entry, Problem)]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.look()
            except Retryable as error:
                log.warning("drop_folder_waits", reason=str(error))
            await asyncio.sleep(self._options.scan_seconds)

    async def look(self) -> None:
        """Once. Raises Retryable."""
        if problem := await asyncio.to_thread(root_problem, self._root):
            self._tell([problem])
            return
        entries = await asyncio.to_thread(self._listed)
        self._tell(entry for entry in entries if isinstance(entry, Problem))
        there = [entry for entry in entries if isinstance(entry, Candidate) and entry.acl_tags]
        for gone in self._still.keys() - {one.path for one in there}:
            del self._still[gone]
            self._taken.pop(gone, None)
        if monotonic() < self._full_until:
            there = [one for one in there if self._taken.get(one.path) == _seen(one)]
        for one in there:
            if self._is_complete(one) and self._taken.get(one.path) != _seen(one):
                await self._take(one)
        await self._move([one for one in there if self._taken.get(one.path) == _seen(one)])

    def _listed(self) -> list[Candidate | Problem]:
        return list(Walk(self._root, self._root, self._policy).candidates())

    def _is_complete(self, one: Candidate) -> bool:
        looks = _looks(one.stat)
        before = self._still.get(one.path)
        if before is None or before[0] != looks:
            self._still[one.path] = (looks, monotonic())
            return False
        return monotonic() - before[1] >= self._options.settle_seconds

    async def _take(self, one: Candidate) -> None:
        name = os.path.relpath(one.path, self._root)
        words = Words(
            file_name=printable(os.path.basename(one.path)),
            media_type=None,
            title=None,
            acl_tags=one.acl_tags,
            required_tags=one.required_tags,
            metadata={"path": name},
        )
        if await self._was_deleted(name, one):
            self._taken[one.path] = _seen(one)
            return
        try:
            with self._desk.writing() as file:
                if not await asyncio.to_thread(_copied, one, file):
                    del self._still[one.path]  # it changed meanwhile: wait until it stands still again
                    return
                await self._desk.hand_in(file, words, external_id=name)
        except QuotaReached as error:
            self._tell([Problem(self._root, "quota", str(error))])
            self._full_until = monotonic() + FULL_SECONDS
            return
        except Busy:
            return
        except TooLarge:
            reason = f"is larger than {self._desk.max_bytes:,} bytes: split it"
            self._tell([Problem(one.path, "too_large", reason)])
            await self._put_aside(one, self._options.failed, reason)
        except OSError as error:
            self._tell([Problem(one.path, "io_error", f"cannot be read ({error.strerror})")])
            return
        self._taken[one.path] = _seen(one)

    async def _was_deleted(self, name: str, one: Candidate) -> bool:
        """By its owner, since it was put here: that it still lies here does not bring it back."""
        rows = await self._desk.table.named([name])
        return any(row.deleted_at and row.deleted_at.timestamp() > one.stat.st_ctime for row in rows)

    async def _move(self, taken: list[Candidate]) -> None:
        """Those that have been read, where they belong. Also after a restart: what was handed in is recognised."""
        if not taken or (self._options.done is None and self._options.failed is None):
            return
        names = {os.path.relpath(one.path, self._root): one for one in taken}
        for row in await self._desk.table.named(names):
            one = names[row.external_id]
            if _is_read(row) and one.stat.st_size == row.size:
                aside = self._options.failed if row.problem_code else self._options.done
                await self._put_aside(one, aside, row.problem if row.problem_code else None)

    async def _put_aside(self, one: Candidate, folder: Path | None, reason: str | None) -> None:
        if folder is not None:
            try:
                await asyncio.to_thread(_moved, one, folder, os.path.relpath(one.path, self._root), reason)
            except OSError as error:
                self._tell([Problem(one.path, "io_error", f"cannot be moved to {folder} ({error.strerror})")])

    def _tell(self, problems: Iterable[Problem]) -> None:
        """Each once, in the log; ``penstock connector check`` shows those that stand."""
        for problem in problems:
            if problem not in self._told:
                self._told.add(problem)
                log.warning("drop_folder_problem", code=problem.code, path=problem.path, problem=problem.message)


def _is_read(row: Uploaded) -> bool:
    return row.extracted_at is not None and row.deleted_at is None


def _looks(stat: os.stat_result) -> Looks:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _seen(one: Candidate) -> tuple[Any, ...]:
    return _looks(one.stat), one.acl_tags, one.required_tags


def _copied(one: Candidate, file: Incoming) -> bool:
    """False: it changed meanwhile. Links and pipes that took its place are not followed. Raises OSError, TooLarge."""
    descriptor = os.open(one.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as source:
        if _looks(os.fstat(descriptor)) != _looks(one.stat):
            return False
        while part := source.read(PART):
            file.write(part)
        return _looks(os.fstat(descriptor)) == _looks(one.stat)


def _moved(one: Candidate, folder: Path, name: str, reason: str | None) -> None:
    """What lies there under that name already is replaced: it is an older one of the same name."""
    if _looks(os.lstat(one.path)) != _looks(one.stat):
        return
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(one.path, target)
    if reason is not None:
        target.with_name(target.name + REASON).write_text(f"{printable(target.name)} {reason}\n")
