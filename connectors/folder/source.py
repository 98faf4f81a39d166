"""Folders of a machine as a source under the runner: the listing, rules and reading of the folder connector."""

from __future__ import annotations

import asyncio
import os
import time
import tomllib
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import Field

from connectors.base import SmallSource, StrictOptions
from connectors.folder.connector import Hints, outermost
from connectors.folder.content import entry_of, read, revision_of
from connectors.folder.identity import Identities
from connectors.folder.options import FolderOptions
from connectors.folder.walk import Candidate, Walk, is_within, root_problem
from connectors.protocol import Problem
from connectors.source import (
    Context,
    Cursor,
    Entry,
    Gone,
    Group,
    Listed,
    Page,
    Playground,
    Reaction,
)
from pipeline.core.errors import Misconfigured, Retryable

LISTED = 1_000
OVERLAP_NS = 4_000_000_000
"""File systems count time in steps of up to 2 s (FAT), and a network mount's clock is another one."""
SHOWN = 100
LISTEN_SECONDS = 3_600.0


class FolderSettings(StrictOptions):
    """acl_tags, required_tags: for every file of which no ``.penstock.toml`` says otherwise."""

    paths: list[Path] = Field(min_length=1)
    acl_tags: tuple[str, ...] = ()
    required_tags: tuple[str, ...] = ()
    members: Mapping[str, list[str]] = {}
    """tag → principals."""
    members_file: Path | None = None
    """A TOML file that says the same, read anew every time."""
    page_files: int = Field(50, ge=1, le=500)


@dataclass(frozen=True, slots=True)
class _File:
    id: str
    root: str
    candidate: Candidate


class Folder(SmallSource):
    """``connectors.source.Source``. A document is a file; it stays the same when it is moved on its disk."""

    Options = FolderSettings
    options: FolderSettings

    def __init__(self, options: FolderSettings, context: Context) -> None:
        super().__init__(options, context)
        self._rules = FolderOptions(acl_tags=options.acl_tags, required_tags=options.required_tags)
        self._roots = outermost(os.path.realpath(path) for path in options.paths)
        self._ids = Identities(context.folder / "files.sqlite")

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        from connectors.folder.playground import playing

        return playing()

    async def close(self) -> None:
        self._ids.close()

    async def check(self) -> Sequence[Problem]:
        """Roots and files that cannot be read, rules that cannot be obeyed, places that nobody may read."""
        try:
            self._members()
        except Misconfigured as error:
            return [Problem(str(self.options.members_file), "members", str(error))]
        found = [problem for root in self._roots if (problem := await asyncio.to_thread(root_problem, root))]
        for root in self._roots if not found else ():
            found += await asyncio.to_thread(_problems, Walk(root, root, self._rules))
        return found

    async def start(self) -> Cursor:
        return {"since_ns": time.time_ns() - OVERLAP_NS}

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        ids = sorted(one.id for one in await asyncio.to_thread(self._files))
        start = bisect_right(ids, cursor["after"]) if cursor else 0
        for at in range(start, len(ids), self.options.page_files):
            page = ids[at : at + self.options.page_files]
            yield Page(await self.fetch(page), {"after": page[-1]})

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        """Files whose inode has changed since. What is gone, or came with a folder that was moved here, the watch and
        the sweep find."""
        now = await self.start()
        files = await asyncio.to_thread(self._files)
        ids = sorted(one.id for one in files if one.candidate.stat.st_ctime_ns >= cursor["since_ns"])
        for at in range(0, len(ids), self.options.page_files):
            page = ids[at : at + self.options.page_files]
            yield Page(await self.fetch(page), now if at + len(page) == len(ids) else cursor)

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        for root in self._roots:
            walk = await asyncio.to_thread(self._walk, root, root)
            found = iter(walk.candidates())
            while batch := await asyncio.to_thread(lambda found=found: list(islice(found, LISTED))):  # type: ignore[misc]
                files = [one for one in batch if isinstance(one, Candidate)]
                yield [
                    Listed(
                        external_id=self._ids.of(one.path, one.stat),
                        acl_tags=one.acl_tags,
                        required_tags=one.required_tags,
                        revision=revision_of(one),
                    )
                    for one in await asyncio.to_thread(walk.access_now, files)
                ]
            if lost := [*walk.unreadable, *walk.broken]:
                raise Misconfigured(f"{lost[0]} cannot be listed, or its .penstock.toml not obeyed: `check` says why")

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        return await asyncio.to_thread(lambda: [self._entry(id_) for id_ in external_ids])

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        for tag, members in sorted((await asyncio.to_thread(self._members)).items()):
            yield Group(tag, members)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        """What the operating system says has changed. Scans find the rest."""
        async with Hints(self._roots) as hints:
            while True:
                targets = await hints.next(asyncio.Event(), LISTEN_SECONDS)
                paths = [target for _, target in targets or ()]
                known = [(path, self._ids.id_at(path)) for path in paths]
                everything = targets is None or any(id_ is None for _, id_ in known)
                await react(Reaction(ids=[id_ for _, id_ in known if id_], changes=everything, sweep=everything))

    def _walk(self, root: str, target: str) -> Walk:
        """Raises Retryable where nothing is known: an empty folder is more often one that is not mounted."""
        if problem := root_problem(root):
            raise Retryable(str(problem))
        if os.path.isdir(root) and not os.listdir(root):
            raise Retryable(f"{root} is empty: is it mounted? Nothing is deleted for that")
        return Walk(root, target, self._rules)

    def _files(self) -> list[_File]:
        return [
            _File(self._ids.of(one.path, one.stat), root, one)
            for root in self._roots
            for one in self._walk(root, root).candidates()
            if isinstance(one, Candidate)
        ]

    def _entry(self, id_: str) -> Entry:
        path = self._ids.path_of(id_)
        root = next((root for root in self._roots if is_within(path, root)), None)
        if root is None:
            return Gone(id_)
        walk = self._walk(root, path)
        candidate = next((one for one in walk.candidates() if isinstance(one, Candidate) and one.path == path), None)
        if candidate is not None:
            return self._read(id_, root, candidate)
        if walk.unreadable or walk.broken:
            raise Misconfigured(f"{path} cannot be read, or a .penstock.toml above it not obeyed: `check` says why")
        moved = next((one for one in self._files() if one.id == id_), None) if not os.path.lexists(path) else None
        return self._read(id_, moved.root, moved.candidate) if moved else Gone(id_)

    def _read(self, id_: str, root: str, candidate: Candidate) -> Entry:
        file = read(candidate.path, candidate.stat)
        return entry_of(file, candidate, root, id_, revision=revision_of(candidate))

    def _members(self) -> dict[str, list[str]]:
        """Raises Misconfigured."""
        found = dict(self.options.members)
        if self.options.members_file is None:
            return found
        try:
            said = tomllib.loads(self.options.members_file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise Misconfigured(f"{self.options.members_file} cannot be read ({type(error).__name__})") from error
        if not all(isinstance(one, list) and all(isinstance(p, str) for p in one) for one in said.values()):
            raise Misconfigured(f'{self.options.members_file}: write tag = ["principal", …]')
        return found | said


def _problems(walk: Walk) -> list[Problem]:
    return list(islice((one for one in walk.candidates() if isinstance(one, Problem)), SHOWN))
