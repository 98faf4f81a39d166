"""Reads files of Drive as entries and listings, with their access, within the configured drives and folders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from connectors.access_memory import AccessMemory
from connectors.google_drive import content
from connectors.google_drive.access import Access, AccessReader, Sharing, Vanished
from connectors.google_drive.client import FOLDER, LOCATION_FIELDS, Api, Json
from connectors.google_drive.content import Contents
from connectors.google_drive.options import GoogleDriveOptions
from connectors.set_aside import Failures
from connectors.source import Entry, Gone, Listed, Unreadable
from connectors.web import Missing
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.runtime.tasks import gather_or_cancel

OWN_FILES = "user"
"""Key of the account's own files, next to the ids of shared drives."""
MAX_DEPTH = 200
"""Folders within folders: Drive allows 100 in a shared drive (support.google.com/a/answer/7338880)."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A set of files for which Google has one listing and one log of changes: a shared drive, or the account's
    files."""

    key: str
    folders: frozenset[str] | None
    """Only files below these folders are read; None: all."""

    @property
    def drive(self) -> str | None:
        return None if self.key == OWN_FILES else self.key


async def corpora(options: GoogleDriveOptions, api: Api) -> Sequence[Corpus]:
    """Return the corpora that the options select at the moment, in a stable order. Raises Misconfigured for a folder
    that is missing."""
    whole = set(options.drives)
    if options.all_drives:
        whole |= set(await api.drives())
    if options.my_drive:
        whole.add(OWN_FILES)
    parts: dict[str, set[str]] = {}
    for folder in options.folders:
        key = await _corpus_key(folder, api)
        if key not in whole:
            parts.setdefault(key, set()).add(folder)
    selected = [Corpus(key, None) for key in whole] + [Corpus(key, frozenset(ids)) for key, ids in parts.items()]
    return sorted(selected, key=lambda corpus: corpus.key)


async def _corpus_key(folder: str, api: Api) -> str:
    try:
        place = await api.file(folder, LOCATION_FIELDS)
    except Missing as error:
        raise Misconfigured(missing_folder(folder, api)) from error
    if place.get("mimeType") != FOLDER:
        raise Misconfigured(f"folders: {folder} is not a folder: name one, or remove it")
    return str(place.get("driveId") or OWN_FILES)


def missing_folder(folder: str, api: Api) -> str:
    return f"folders: {folder} does not exist, or is not shared with {api.email} (or the subject)"


def missing_drive(drive: str, api: Api) -> str:
    return f"drives: {drive} does not exist, or {api.email} (or the subject) is not a member of it: add it as Viewer"


class Tree:
    """The parents of folders, as far as they have been read. Used for one page or one listing."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._parents: dict[str, str | None] = {}

    async def load(self, corpus: Corpus) -> Json:
        """Read all folders of a corpus, page by page. Returns the last page."""
        token: str | None = None
        while True:
            page = await self._api.files(corpus.drive, f"mimeType = '{FOLDER}'", LOCATION_FIELDS, 1000, token)
            for folder in page.get("files", []):
                self._note(folder)
            token = page.get("nextPageToken")
            if not token:
                return page

    def _note(self, item: Json) -> None:
        parents = item.get("parents") or ()
        self._parents[str(item["id"])] = str(parents[0]) if parents else None

    async def holds(self, corpus: Corpus, item: Json) -> bool:
        """Whether an item of this corpus is within its folders."""
        if corpus.folders is None:
            return True
        parents = item.get("parents") or ()
        above = str(parents[0]) if parents else None
        for _ in range(MAX_DEPTH):
            if above is None or above in corpus.folders:
                return above is not None
            if above not in self._parents:
                try:
                    self._note(await self._api.file(above, LOCATION_FIELDS))
                except Missing:  # a folder that the account may not see: no configured folder can be above it
                    self._parents[above] = None
            above = self._parents[above]
        return False


MAX_CONCURRENT_FILES = 4
"""Files read at the same time by the full read, and again by everything else. Each is half of the client's limit, so
that an edit does not wait behind a crawl."""


class Reading:
    """Reads files with their access."""

    def __init__(
        self,
        api: Api,
        contents: Contents,
        memory: AccessMemory,
        sharing: Sharing,
        now: Callable[[], datetime],
        on_hidden: Callable[[], None],
    ) -> None:
        self._api = api
        self._contents = contents
        self._memory = memory
        self._sharing = sharing
        self._now = now
        self._on_hidden = on_hidden
        self._slots = {bulk: asyncio.Semaphore(MAX_CONCURRENT_FILES) for bulk in (True, False)}
        self._failures = Failures()

    async def select(self, files: Sequence[Json], corpus: Corpus, tree: Tree) -> list[Json]:
        """Return those files of a corpus that are documents within its folders."""
        return [file for file in files if _is_document(file) and await tree.holds(corpus, file)]

    async def listed(self, files: Sequence[Json]) -> list[Listed]:
        """Return files as listing entries, without files that have been deleted."""
        return [
            Listed(external_id=str(file["id"]), acl_tags=access.tags, revision=content.revision_of(file))
            for file, access in await self._accesses(files)
            if access is not None
        ]

    async def entries(self, files: Sequence[Json], *, bulk: bool = False) -> list[Entry]:
        """Return files as entries. bulk: a full read, which no user waits for. A file that fails repeatedly while
        others are read becomes unreadable, so that it does not block the others."""
        with_access = await self._accesses(files)
        entries: list[Entry] = []
        failure: Retryable | None = None
        attempts = await gather_or_cancel(*(self._try(file, access, bulk) for file, access in with_access))
        for (file, access), entry in zip(with_access, attempts, strict=True):
            if not isinstance(entry, Retryable):
                entries.append(entry)
            elif access is not None and self._failures.fail(str(file["id"]), entry):
                entries.append(
                    Unreadable(
                        external_id=str(file["id"]),
                        code="unavailable",
                        acl_tags=access.tags,
                        message="every request for it fails at Google: it is retried with every sweep",
                    )
                )
            else:
                failure = entry
        if failure is not None:
            raise failure
        return entries

    async def _try(self, file: Json, access: Access | None, bulk: bool) -> Entry | Retryable:
        id_ = str(file["id"])
        try:
            entry = await self._entry(file, access, bulk)
        except Deferred:
            raise  # the reason is not the file
        except Retryable as error:
            return error
        self._failures.succeed(id_)
        return entry

    async def fetch(self, ids: Sequence[str], corpora: Sequence[Corpus]) -> list[Entry]:
        files = await gather_or_cancel(*(self._file(id_) for id_ in ids))
        missing = [id_ for id_, file in zip(ids, files, strict=True) if file is None]
        await self._memory.forget(missing)
        entries = await self.classify([file for file in files if file is not None], corpora)
        return [*(Gone(id_) for id_ in missing), *entries]

    async def classify(self, files: Sequence[Json], corpora: Sequence[Corpus]) -> list[Entry]:
        """Return files as entries. A file in the trash, without text or outside of the corpora is gone."""
        by_key, tree = {corpus.key: corpus for corpus in corpora}, Tree(self._api)
        documents: list[Json] = []
        gone: list[str] = []
        for file in files:
            corpus = by_key.get(str(file.get("driveId") or OWN_FILES))
            if corpus is not None and _is_document(file) and await tree.holds(corpus, file):
                documents.append(file)
            else:
                gone.append(str(file["id"]))
        await self._memory.forget(gone)
        return [*(Gone(id_) for id_ in gone), *await self.entries(documents)]

    async def _file(self, id_: str) -> Json | None:
        """Return a file, or None if it does not exist or the account may not see it: Google does not distinguish
        these."""
        async with self._slots[False]:
            try:
                return await self._api.file(id_)
            except Missing:
                return None

    async def _accesses(self, files: Sequence[Json]) -> list[tuple[Json, Access | None]]:
        """Return files with their access, or None for a file that has been deleted."""
        reader = AccessReader(self._api, self._sharing, self._now, self._on_hidden)

        async def access(file: Json) -> tuple[Json, Access | None]:
            try:
                return file, await reader.access(file)
            except Vanished:
                return file, None

        accesses = await gather_or_cancel(*(access(file) for file in files))
        await self._memory.record(
            {str(file["id"]): (access.tags, access.expires_at) for file, access in accesses if access is not None}
        )
        return accesses

    async def _entry(self, file: Json, access: Access | None, bulk: bool) -> Entry:
        if access is None:
            return Gone(str(file["id"]))
        async with self._slots[bulk]:
            try:
                return await self._contents.read(file, access)
            except Missing:
                return Gone(str(file["id"]))


def _is_document(file: Json) -> bool:
    return not file.get("trashed") and content.conversion(file) is not None
