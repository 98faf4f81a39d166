"""Files as Drive shows them → entries and listings, each with its access."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

from connectors.google_drive import kinds
from connectors.google_drive.access import Access, Sharing
from connectors.google_drive.api import Api, Json
from connectors.google_drive.content import Contents
from connectors.google_drive.kept import Kept
from connectors.google_drive.scope import OWN, Corpus, Tree
from connectors.google_drive.sharing import Readers, Vanished
from connectors.source import Entry, Gone, Listed
from connectors.web import Missing

AT_ONCE = 8
"""Files read at the same time."""


class Reading:
    def __init__(
        self, api: Api, contents: Contents, kept: Kept, sharing: Sharing, now: Callable[[], datetime],
        unknown: Callable[[], None],
    ) -> None:  # fmt: skip
        self._api = api
        self._contents = contents
        self._kept = kept
        self._sharing = sharing
        self._now = now
        self._unknown = unknown
        self._places = asyncio.Semaphore(AT_ONCE)

    async def wanted(self, files: Sequence[Json], corpus: Corpus, tree: Tree) -> list[Json]:
        """Those of a corpus's files that are documents of ours."""
        return [file for file in files if _is_document(file) and await tree.holds(corpus, file)]

    async def listed(self, files: Sequence[Json]) -> list[Listed]:
        """What has vanished meanwhile is left out."""
        return [
            Listed(external_id=str(file["id"]), acl_tags=access.tags, revision=kinds.revision(file))
            for file, access in await self._accesses(files)
            if access is not None
        ]

    async def entries(self, files: Sequence[Json]) -> list[Entry]:
        found = await self._accesses(files)
        return list(await asyncio.gather(*(self._entry(file, access) for file, access in found)))

    async def fetched(self, ids: Sequence[str], corpora: Sequence[Corpus]) -> list[Entry]:
        files = await asyncio.gather(*(self._file(id_) for id_ in ids))
        missing = [id_ for id_, file in zip(ids, files, strict=True) if file is None]
        await self._kept.gone(missing)
        found = await self.judged([file for file in files if file is not None], corpora)
        return [*(Gone(id_) for id_ in missing), *found]

    async def judged(self, files: Sequence[Json], corpora: Sequence[Corpus]) -> list[Entry]:
        """What is in the trash, of no kind that has text, or outside of what is to be read is gone as well."""
        by_key, tree = {corpus.key: corpus for corpus in corpora}, Tree(self._api)
        ours: list[Json] = []
        others: list[str] = []
        for file in files:
            corpus = by_key.get(str(file.get("driveId") or OWN))
            if corpus is not None and _is_document(file) and await tree.holds(corpus, file):
                ours.append(file)
            else:
                others.append(str(file["id"]))
        await self._kept.gone(others)
        return [*(Gone(id_) for id_ in others), *await self.entries(ours)]

    async def _file(self, id_: str) -> Json | None:
        """None: there is none, or not for us; Google does not tell the one from the other."""
        async with self._places:
            try:
                return await self._api.file(id_)
            except Missing:
                return None

    async def _accesses(self, files: Sequence[Json]) -> list[tuple[Json, Access | None]]:
        """None: it has vanished."""
        readers = Readers(self._api, self._sharing, self._now, self._unknown)

        async def access(file: Json) -> tuple[Json, Access | None]:
            try:
                return file, await readers.of(file)
            except Vanished:
                return file, None

        found = await asyncio.gather(*(access(file) for file in files))
        await self._kept.met({str(file["id"]): (one.tags, one.until) for file, one in found if one is not None})
        return list(found)

    async def _entry(self, file: Json, access: Access | None) -> Entry:
        if access is None:
            return Gone(str(file["id"]))
        async with self._places:
            try:
                return await self._contents.read(file, access)
            except Missing:
                return Gone(str(file["id"]))


def _is_document(file: Json) -> bool:
    return not file.get("trashed") and kinds.how(file) is not None
