"""Remembers on whose behalf files are read that the account itself does not see, and the targets of shortcuts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

from connectors.source import Memory

LINKS = "links"


class Owners:
    """The owner of each file of a user's My Drive, by the file's id: a response about a file that one user may not see
    is the same as about one that does not exist.

    Those of the last complete listing are also in a file. Where that is lost, such files are requested on behalf of
    each user in turn.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, str] | None = None
        self._before: Mapping[str, str] = {}
        """The owners before the last complete listing: it may lack files that are still to be requested."""
        self._lock = asyncio.Lock()

    async def _load(self) -> dict[str, str]:
        async with self._lock:
            if self._known is None:
                self._known = await asyncio.to_thread(self._read)
            return self._known

    def _read(self) -> dict[str, str]:
        try:
            stored = json.loads(self._file.read_text())
            return {id_: user for user, ids in stored.items() for id_ in ids}
        except (OSError, ValueError, AttributeError):
            return {}

    def _write(self, owners: Mapping[str, str]) -> None:
        files: dict[str, list[str]] = {}
        for id_, user in owners.items():
            files.setdefault(user, []).append(id_)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(files))
        os.replace(part, self._file)

    async def of(self, id_: str) -> str | None:
        return (await self._load()).get(id_) or self._before.get(id_)

    async def note(self, owners: Mapping[str, str]) -> None:
        """Record the owners of files that were just read."""
        (await self._load()).update(owners)

    async def replace(self, listed: Mapping[str, str]) -> None:
        """Replace what was known after a complete listing."""
        self._before, self._known = await self._load(), dict(listed)
        await asyncio.to_thread(self._write, listed)


class Links:
    """The files that are read only because a shortcut leads to them, each with the user on whose behalf; ``""``: none.
    One is forgotten when a complete listing shows no shortcut to it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._targets: dict[str, str] | None = None
        self._listed: dict[str, str] | None = None
        """Those of the listing that is under way."""
        self._lock = asyncio.Lock()

    async def targets(self) -> Mapping[str, str]:
        async with self._lock:
            return dict(await self._load())

    async def _load(self) -> dict[str, str]:
        if self._targets is None:
            self._targets = dict(await self._memory.get(LINKS) or {})
        return self._targets

    async def add(self, targets: Mapping[str, str]) -> None:
        async with self._lock:
            known = await self._load()
            if self._listed is not None:
                self._listed.update(targets)
            if not targets.keys() <= known.keys():
                known.update(targets)
                await self._memory.put(LINKS, known)

    def begin(self) -> None:
        """A complete listing begins."""
        self._listed = {}

    async def end(self) -> None:
        """The listing is complete."""
        async with self._lock:
            if self._listed is not None and self._listed != await self._load():
                self._targets = self._listed
                await self._memory.put(LINKS, self._targets or None)
            self._listed = None
