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
from connectors.source import Entry, Gone, Listed, Unreadable
from connectors.together import together
from connectors.web import Missing
from pipeline.core.errors import Deferred, Retryable

AT_ONCE = 4
"""Files read at the same time by the full read, and by everything else: half each of what the client lets through, so
that an edit does not wait behind a crawl."""
HOPELESS = 3
"""As often Google may fail at one file before it is taken for the file's fault (each time after the client's own
patience)."""


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
        self._places = {bulk: asyncio.Semaphore(AT_ONCE) for bulk in (True, False)}
        self._read = 0
        self._failing: dict[str, tuple[int, int]] = {}
        """External id → how often in a row it could not be read, and ``_read`` when that began."""

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

    async def entries(self, files: Sequence[Json], *, bulk: bool = False) -> list[Entry]:
        """bulk: nobody waits for these. One file that fails time and again while others are read is set aside, and
        harms no other."""
        found = await self._accesses(files)
        entries: list[Entry] = []
        failure: Retryable | None = None
        tried = await together(self._tried(*one, bulk) for one in found)
        for (file, access), entry in zip(found, tried, strict=True):
            if not isinstance(entry, Retryable):
                entries.append(entry)
            elif access is not None and self._is_hopeless(str(file["id"])):
                entries.append(
                    Unreadable(
                        external_id=str(file["id"]), code="unavailable", acl_tags=access.tags,
                        message="Google fails whenever it is asked for it: it is tried again with every sweep",
                    )
                )  # fmt: skip
            else:
                failure = entry
        if failure is not None:
            raise failure
        return entries

    async def _tried(self, file: Json, access: Access | None, bulk: bool) -> Entry | Retryable:
        id_ = str(file["id"])
        try:
            entry = await self._entry(file, access, bulk)
        except Deferred:
            raise  # that says nothing about the file
        except Retryable as error:
            times, since = self._failing.get(id_, (0, self._read))
            self._failing[id_] = times + 1, since
            return error
        self._read += 1
        self._failing.pop(id_, None)
        return entry

    def _is_hopeless(self, id_: str) -> bool:
        times, since = self._failing[id_]
        return times >= HOPELESS and self._read > since

    async def fetched(self, ids: Sequence[str], corpora: Sequence[Corpus]) -> list[Entry]:
        files = await together(self._file(id_) for id_ in ids)
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
        async with self._places[False]:
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

        found = await together(access(file) for file in files)
        await self._kept.met({str(file["id"]): (one.tags, one.until) for file, one in found if one is not None})
        return found

    async def _entry(self, file: Json, access: Access | None, bulk: bool) -> Entry:
        if access is None:
            return Gone(str(file["id"]))
        async with self._places[bulk]:
            try:
                return await self._contents.read(file, access)
            except Missing:
                return Gone(str(file["id"]))


def _is_document(file: Json) -> bool:
    return not file.get("trashed") and kinds.how(file) is not None
