"""The drop folder: files put into it are uploaded when they are complete."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import structlog

from connectors.folder.access import is_skipped
from connectors.folder.content import open_without_links
from connectors.folder.options import FolderOptions
from connectors.folder.walk import Candidate, Walk, is_within, root_problem
from connectors.protocol import Problem, printable
from connectors.uploads.intake import Busy, Intake
from connectors.uploads.options import UploadsOptions
from connectors.uploads.store import Incoming, Properties, QuotaReached, TooLarge, Upload
from pipeline.core.errors import Retryable
from pipeline.runtime.tasks import in_threads

log = structlog.get_logger()

REASON_SUFFIX = ".reason.txt"
PART_BYTES = 1024 * 1024
QUOTA_RETRY_SECONDS = 60.0

Stamp = tuple[int, int, int]
"""A file's size in bytes, modification time in ns and inode."""


class Drop:
    """Uploads the files of the drop folder. A file's external id is its path within the folder. Its access set comes
    from the nearest ``.penstock.toml`` or else the options; a file without one is not uploaded. A file that disappears
    from the folder stays uploaded."""

    def __init__(self, options: UploadsOptions, intake: Intake) -> None:
        assert options.folder is not None
        self._options, self._intake = options, intake
        self._root = ""
        """The folder without links, once it was scanned."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drop")
        """Its own: a mount whose server is away does not answer."""
        self._policy = FolderOptions(acl_tags=tuple(options.acl_tags), required_tags=tuple(options.required_tags))
        self._stable_since: dict[str, tuple[Stamp, float]] = {}
        """By path: a file's stamp, and since when it has been the same (by ``monotonic()``)."""
        self._uploaded: dict[str, tuple[Stamp, tuple[str, ...], tuple[str, ...]]] = {}
        self._reported: set[Problem] = set()
        self._quota_retry_at = float("-inf")
        """When uploads are retried after a quota was reached (by ``monotonic()``)."""

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check(self) -> list[Problem]:
        if problem := self._problem():
            return [problem]
        return [entry for entry in self._listed() if isinstance(entry, Problem)]

    async def run(self) -> None:
        """Scan the folder until cancelled."""
        while True:
            try:
                await self.scan()
            except Retryable as error:
                log.warning("drop_folder_delayed", reason=str(error))
            await asyncio.sleep(self._options.scan_seconds)

    async def scan(self) -> None:
        """Scan the folder once. Raises Retryable."""
        if problem := await in_threads(self._thread, self._problem):
            self._report([problem])
            return
        entries = await in_threads(self._thread, self._listed)
        self._report(entry for entry in entries if isinstance(entry, Problem))
        candidates = [entry for entry in entries if isinstance(entry, Candidate) and entry.acl_tags]
        for path in self._stable_since.keys() - {candidate.path for candidate in candidates}:
            del self._stable_since[path]
            self._uploaded.pop(path, None)
        if monotonic() < self._quota_retry_at:
            candidates = [candidate for candidate in candidates if self._is_uploaded(candidate)]
        for candidate in candidates:
            if self._is_complete(candidate) and not self._is_uploaded(candidate):
                await self._upload(candidate)
        await self._move_read([candidate for candidate in candidates if self._is_uploaded(candidate)])

    def _problem(self) -> Problem | None:
        assert self._options.folder is not None
        self._root = os.path.realpath(self._options.folder)
        return root_problem(self._root) or self._problem_within()

    def _problem_within(self) -> Problem | None:
        """Return which folder of ours leads into the drop folder by way of a link, in either's path. Its files would be
        uploaded again, without end where each upload adds one."""
        ours = {"done": self._options.done, "failed": self._options.failed, "store": self._intake.store.folder}
        for name, path in ours.items():
            if path is None:
                continue
            target = os.path.realpath(path)
            if is_within(target, self._root) and not is_skipped(target, self._root):
                reason = f"{name} leads inside it, so its files would be uploaded again: choose another folder"
                return Problem(self._root, "folders", reason)
        return None

    def _is_uploaded(self, candidate: Candidate) -> bool:
        return self._uploaded.get(candidate.path) == _state(candidate)

    def _listed(self) -> list[Candidate | Problem]:
        return list(Walk(self._root, [self._root], self._policy).candidates())

    def _is_complete(self, candidate: Candidate) -> bool:
        stamp = _stamp(candidate.stat)
        before = self._stable_since.get(candidate.path)
        if before is None or before[0] != stamp:
            self._stable_since[candidate.path] = (stamp, monotonic())
            return False
        return monotonic() - before[1] >= self._options.settle_seconds

    async def _upload(self, candidate: Candidate) -> None:
        name = os.path.relpath(candidate.path, self._root)
        properties = Properties(
            file_name=printable(os.path.basename(candidate.path)),
            media_type=None,
            title=None,
            acl_tags=candidate.acl_tags,
            required_tags=candidate.required_tags,
            metadata={"path": name},
        )
        if await self._was_deleted(name, candidate):
            self._uploaded[candidate.path] = _state(candidate)
            return
        try:
            with self._intake.writing() as file:
                if not await in_threads(self._thread, _copy, candidate, file):
                    del self._stable_since[candidate.path]  # it has changed: wait until it is stable again
                    return
                await self._intake.add(file, properties, external_id=name)
        except QuotaReached as error:
            self._report([Problem(self._root, "quota", str(error))])
            self._quota_retry_at = monotonic() + QUOTA_RETRY_SECONDS
            return
        except Busy:
            return
        except TooLarge:
            reason = f"is larger than {self._intake.max_bytes:,} bytes: split it"
            self._report([Problem(candidate.path, "too_large", reason)])
            await self._move(candidate, self._options.failed, reason)
        except OSError as error:
            self._report([Problem(candidate.path, "io_error", f"cannot be read ({error.strerror})")])
            return
        self._uploaded[candidate.path] = _state(candidate)

    async def _was_deleted(self, name: str, candidate: Candidate) -> bool:
        """Whether its owner deleted the upload after the file was put here: then the file is not uploaded again."""
        rows = await self._intake.table.by_external_ids([name])
        return any(row.deleted_at and row.deleted_at.timestamp() > candidate.stat.st_ctime for row in rows)

    async def _move_read(self, uploaded: list[Candidate]) -> None:
        """Move files that have been read to ``done`` or ``failed``, including those uploaded before a restart."""
        if not uploaded or (self._options.done is None and self._options.failed is None):
            return
        names = {os.path.relpath(candidate.path, self._root): candidate for candidate in uploaded}
        for row in await self._intake.table.by_external_ids(names):
            candidate = names[row.external_id]
            if _is_read(row) and candidate.stat.st_size == row.size:
                folder = self._options.failed if row.problem_code else self._options.done
                await self._move(candidate, folder, row.problem if row.problem_code else None)

    async def _move(self, candidate: Candidate, folder: Path | None, reason: str | None) -> None:
        if folder is not None:
            try:
                await in_threads(
                    self._thread, _move_file, candidate, folder, os.path.relpath(candidate.path, self._root), reason
                )
            except OSError as error:
                self._report([Problem(candidate.path, "io_error", f"cannot be moved to {folder} ({error.strerror})")])

    def _report(self, problems: Iterable[Problem]) -> None:
        """Log each problem once. ``penstock connector check`` shows the current ones."""
        for problem in problems:
            if problem not in self._reported:
                self._reported.add(problem)
                log.warning(
                    "drop_folder_problem_reported", code=problem.code, path=problem.path, problem=problem.message
                )


def _is_read(row: Upload) -> bool:
    return row.extracted_at is not None and row.deleted_at is None


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _state(candidate: Candidate) -> tuple[Any, ...]:
    return _stamp(candidate.stat), candidate.acl_tags, candidate.required_tags


def _copy(candidate: Candidate, file: Incoming) -> bool:
    """Copy a file, or return False if it has changed. A link or pipe in its place is not followed. Raises OSError and
    TooLarge."""
    descriptor = open_without_links(candidate.path)
    with open(descriptor, "rb") as source:
        if _stamp(os.fstat(descriptor)) != _stamp(candidate.stat):
            return False
        while part := source.read(PART_BYTES):
            file.write(part)
        return _stamp(os.fstat(descriptor)) == _stamp(candidate.stat)


def _move_file(candidate: Candidate, folder: Path, name: str, reason: str | None) -> None:
    """Move a file unless it has changed. An older file of the same name in the target folder is replaced."""
    if _stamp(os.lstat(candidate.path)) != _stamp(candidate.stat):
        return
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(candidate.path, target)
    if reason is not None:
        target.with_name(target.name + REASON_SUFFIX).write_text(f"{printable(target.name)} {reason}\n")
