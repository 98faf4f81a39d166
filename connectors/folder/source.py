"""Folders of a machine as a declared source, with the listing, rules and reading of the folder connector."""

from __future__ import annotations

import asyncio
import os
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from connectors.base import ReadersOptions, SmallSource
from connectors.folder.connector import Hints, outermost
from connectors.folder.content import entry_of, read, revision_of
from connectors.folder.identity import Identities
from connectors.folder.options import FolderOptions
from connectors.folder.walk import Candidate, Walk, is_within, root_problem
from connectors.listings import each_entry
from connectors.paths import PATH_KEYS
from connectors.portions import pages_of
from connectors.protocol import Problem
from connectors.set_aside import each
from connectors.source import (
    Context,
    Cursor,
    Entry,
    Gone,
    Listed,
    MetadataKeys,
    Page,
    Playground,
    Reaction,
    Unlisted,
)
from pipeline.core.errors import Misconfigured, Retryable

PAGE_LISTED = 1_000
OVERLAP_NS = 4_000_000_000
"""Nanoseconds. File systems count time in steps of up to 2 s (FAT), and a network mount has a clock of its own."""
MAX_PROBLEMS = 100
"""As many problems are reported by ``check``."""
LISTEN_SECONDS = 3_600.0


class FolderSettings(ReadersOptions):
    """acl_tags and required_tags hold for every file for which no ``.penstock.toml`` says otherwise."""

    paths: list[Path] = Field(min_length=1)
    """The folders and files to read."""
    page_files: int = Field(50, ge=1, le=500)
    """The number of files in one page of a full read."""


@dataclass(frozen=True, slots=True)
class _File:
    id: str
    root: str
    candidate: Candidate


class Folder(SmallSource):
    """A ``connectors.source.Source``. A document is a file; it stays the same when it is moved on its disk."""

    Options = FolderSettings
    metadata_keys: ClassVar[MetadataKeys] = PATH_KEYS
    reads_at_once = 1
    """The bytes of a file are in memory while it is read."""
    blocking_threads = 8
    """Each of its activities reads or lists in one: reading a file may take minutes, and a mount whose server is away
    does not answer at all."""
    options: FolderSettings

    def __init__(self, options: FolderSettings, context: Context) -> None:
        super().__init__(options, context)
        self._rules = FolderOptions(acl_tags=options.acl_tags, required_tags=options.required_tags)
        self._resolved: list[str] | None = None
        self._ids = Identities(context.folder / "files.sqlite")

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        from connectors.folder.playground import playing

        return playing()

    async def close(self) -> None:
        self._ids.close()
        await super().close()

    def _roots(self) -> list[str]:
        """Return the roots without links. Blocks, and where a mount's server is away without end."""
        if self._resolved is not None:
            return self._resolved
        roots = outermost(os.path.realpath(path) for path in self.options.paths)
        if not any(map(root_problem, roots)):  # links in a root that is away cannot be followed yet
            self._resolved = roots
        return roots

    async def check(self) -> Sequence[Problem]:
        """Return roots and files that cannot be read, invalid rules, and folders that nobody may read."""
        try:
            await self.blocking(self.options.members_by_tag)
        except Misconfigured as error:
            return [Problem(str(self.options.members_file), "members", str(error))]
        roots = await self.blocking(self._roots)
        problems = [problem for root in roots if (problem := await self.blocking(root_problem, root))]
        for root in roots if not problems else ():
            problems += await self.blocking(_problems, Walk(root, [root], self._rules))
        return problems

    async def start(self) -> Cursor:
        return {"since_ns": time.time_ns() - OVERLAP_NS}

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        ids = sorted(file.id for file in await self.blocking(self._files))
        start = bisect_right(ids, cursor["after"]) if cursor else 0
        for at in range(start, len(ids), self.options.page_files):
            batch = ids[at : at + self.options.page_files]
            async with aclosing(pages_of(batch, self.fetch, {"after": batch[-1]})) as pages:
                async for page in pages:
                    yield page

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        """Yield files whose inode has changed since. Deleted files, and files of a folder that was moved here, are left
        to ``listen`` and to the sweep."""
        now = await self.start()
        files = await self.blocking(self._files)
        ids = sorted(file.id for file in files if file.candidate.stat.st_ctime_ns >= cursor["since_ns"])
        for at in range(0, len(ids), self.options.page_files):
            batch = ids[at : at + self.options.page_files]
            following = now if at + len(batch) == len(ids) else cursor
            async with aclosing(pages_of(batch, self.fetch, following)) as pages:
                async for page in pages:
                    yield page

    def _listed(self, candidate: Candidate) -> Listed:
        return Listed(
            external_id=self._ids.of(candidate.path, candidate.stat),
            acl_tags=candidate.acl_tags,
            required_tags=candidate.required_tags,
            revision=revision_of(candidate),
        )

    async def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        roots, missing = await self.blocking(self._roots), list[tuple[str, Retryable]]()
        walks = self._walks(roots, missing)
        while walk := await self.blocking(next, walks, None):
            entries = iter(walk.candidates())
            while batch := await self.blocking(lambda entries=entries: list(islice(entries, PAGE_LISTED))):  # type: ignore[misc]
                files = [entry for entry in batch if isinstance(entry, Candidate)]
                present = await self.blocking(walk.access_now, files)
                candidates = (candidate for candidate in present if isinstance(candidate, Candidate))
                yield each_entry(candidates, self._listed, lambda candidate: candidate.path)
            if unlisted := [*walk.unreadable, *walk.broken]:
                raise Misconfigured(
                    f"{unlisted[0]} cannot be listed, or its .penstock.toml is invalid: see `penstock connector check`"
                )
        # A prefix without a slash: a root may be a file. What has moved between roots is read before it counts as gone.
        if missing:
            has_others = await self.blocking(self._knows_others, roots)
            yield [
                Unlisted(part=f"folder {root}", reason=str(error), id_prefix=None if has_others else root)
                for root, error in missing
            ]

    def _knows_others(self, roots: Sequence[str]) -> bool:
        """Whether a file is known that is in none of the roots: one that is away, whose links cannot be followed, may
        have another path."""
        return any(not any(is_within(path, root) for root in roots) for path in self._ids.paths())

    async def read(self, external_id: str) -> Entry:
        return await self.blocking(self._entry, external_id)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        """Report changes that the operating system notices. Scans find the rest."""
        async with Hints(await self.blocking(self._roots)) as hints:
            while True:
                targets = await hints.next(asyncio.Event(), LISTEN_SECONDS)
                paths = [target for _, target in targets or ()]
                ids = [self._ids.id_at(path) for path in paths]
                is_everything = targets is None or None in ids
                await react(Reaction(ids=[id_ for id_ in ids if id_], changes=is_everything, sweep=is_everything))

    def _walk(self, root: str, target: str) -> Walk:
        """Raises Retryable for a root that cannot be read, and for an empty one: it is more often not mounted."""
        if problem := root_problem(root):
            raise Retryable(str(problem))
        if os.path.isdir(root) and not os.listdir(root):
            raise Retryable(f"{root} is empty: check that it is mounted; nothing is deleted")
        return Walk(root, [target], self._rules)

    def _walks(self, roots: Sequence[str], missing: list[tuple[str, Retryable]]) -> Iterator[Walk]:
        """Begin to walk one root after the other. Blocks. Those that cannot be listed are added to ``missing``; raises
        Retryable if none can."""
        for root in roots:
            try:
                walk = self._walk(root, root)
            except Retryable as error:
                missing.append((root, error))
            else:
                yield walk
        if len(missing) == len(roots):
            raise missing[0][1]

    def _files(self) -> list[_File]:
        """Return all files but those whose names cannot be read, and those of roots that cannot be listed, which the
        listing shows: a sweep finds them later. Raises Retryable if no root can be listed."""
        files = list[_File]()
        for walk in self._walks(self._roots(), []):
            candidates = (entry for entry in walk.candidates() if isinstance(entry, Candidate))
            files += each(candidates, partial(self._file, walk.root), lambda candidate: candidate.path)[0]
        return files

    def _file(self, root: str, candidate: Candidate) -> _File:
        return _File(self._ids.of(candidate.path, candidate.stat), root, candidate)

    def _entry(self, id_: str) -> Entry:
        path = self._ids.path_of(id_)
        roots = self._roots()
        root = next((root for root in roots if is_within(path, root)), None)
        if root is None:
            if problem := next(filter(None, map(root_problem, roots)), None):
                raise Retryable(str(problem))  # it may be the root of this file, whose links cannot be followed
            return Gone(id_)
        walk = self._walk(root, path)
        entries = walk.candidates()
        candidate = next((entry for entry in entries if isinstance(entry, Candidate) and entry.path == path), None)
        if candidate is not None:
            return self._read(id_, root, candidate)
        if walk.unreadable or walk.broken:
            raise Misconfigured(
                f"{path} cannot be read, or a .penstock.toml above it is invalid: see `penstock connector check`"
            )
        moved = None
        if not os.path.lexists(path):
            # One that has moved to a root that cannot be listed is published again from there.
            moved = next((file for file in self._files() if file.id == id_), None)
        return self._read(id_, moved.root, moved.candidate) if moved else Gone(id_)

    def _read(self, id_: str, root: str, candidate: Candidate) -> Entry:
        file = read(candidate.path, candidate.stat)
        return entry_of(file, candidate, root, id_, revision=revision_of(candidate))


def _problems(walk: Walk) -> list[Problem]:
    return list(islice((entry for entry in walk.candidates() if isinstance(entry, Problem)), MAX_PROBLEMS))
