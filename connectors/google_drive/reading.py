"""Reads files of Drive as entries and listings, with their access, within the configured drives and folders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from connectors.access_memory import AccessMemory
from connectors.errors import BadData
from connectors.google_drive import content
from connectors.google_drive.access import NO_ACCESS, Access, AccessReader, Sharing, Vanished
from connectors.google_drive.client import FOLDER, LOCATION_FIELDS, SHORTCUT, Api, Json
from connectors.google_drive.content import Contents
from connectors.google_drive.options import GoogleDriveOptions
from connectors.google_drive.places import Links, Owners
from connectors.listings import moved_on
from connectors.set_aside import UNEXPECTED, Failures, each, name_of, reading_data
from connectors.source import Entry, Gone, Listed, Unlisted, Unreadable
from connectors.web import Denied, Missing
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.runtime.tasks import gather_or_cancel

OWN_FILES = "user"
"""Key of the account's own files, next to the ids of shared drives."""
USER_FILES = "user:"
"""Beginning of the key of the files that a user owns."""
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
        return None if self.key == OWN_FILES or self.user else self.key

    @property
    def user(self) -> str | None:
        """The user on whose behalf it is read: it holds the files that this user owns. None: the account's own."""
        return self.key.removeprefix(USER_FILES) if self.key.startswith(USER_FILES) else None


async def corpora(options: GoogleDriveOptions, api: Api, users: Sequence[str]) -> Sequence[Corpus]:
    """Return the corpora that the options select at the moment, in a stable order. Raises Misconfigured for a folder
    that is missing.

    users: those whose My Drive is read."""
    whole = {*options.drives, *(f"{USER_FILES}{user}" for user in users)}
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
                with suppress(BadData), reading_data():  # it is read by itself, where a file is below it
                    self._note(folder)
            token = moved_on(page.get("nextPageToken"), token, "Google Drive")
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
"""Files read at the same time by the full read, and again by everything else. Each is less than the client's limit, so
that an edit does not wait behind a crawl."""


NO_DRIVE = "domainPolicy"
"""The reason of a 403 for a user who may not use Drive."""
USERS_SECONDS = 60.0
"""The list of users is requested again after this time."""


class Reading:
    """Reads files with their access."""

    def __init__(
        self,
        options: GoogleDriveOptions,
        api: Api,
        contents: Contents,
        memory: AccessMemory,
        sharing: Sharing,
        now: Callable[[], datetime],
        on_hidden: Callable[[], None],
        owners: Owners,
        links: Links,
    ) -> None:
        self._options = options
        self._api = api
        self._owners = owners
        self._links = links
        self._users: Sequence[str] = ()
        self._users_expire_at = 0.0
        self._contents = contents
        self._memory = memory
        self._sharing = sharing
        self._now = now
        self._on_hidden = on_hidden
        self._slots = {bulk: asyncio.Semaphore(MAX_CONCURRENT_FILES) for bulk in (True, False)}
        self._failures = Failures()

    async def corpora(self) -> Sequence[Corpus]:
        """Return the corpora that are read at the moment. Raises Misconfigured."""
        if self._options.all_my_drives and time.monotonic() >= self._users_expire_at:
            self._users = await self._api.active_users()
            self._users_expire_at = time.monotonic() + USERS_SECONDS
        return await corpora(self._options, self._api, self._users)

    def _api_of(self, file: Json, links: Mapping[str, str]) -> Api:
        """Return the client that reads a file: that of its owner, if the My Drives of all users are read, and for the
        target of a shortcut that of the shortcut's owner."""
        user = links.get(str(file["id"]), "" if file.get("driveId") else owner_of(file))
        return self._api.acting_as(user if user in self._users else None)

    async def select(
        self, files: Sequence[Json], corpus: Corpus, tree: Tree, corpora: Sequence[Corpus], failed: dict[str, BadData]
    ) -> list[Json]:
        """Return those files of a corpus that are documents within its folders, and the files outside of all corpora to
        which shortcuts there lead. failed: receives the errors of files whose data cannot be read."""
        held: list[Json] = []
        for number, file in enumerate(files, 1):
            try:
                with reading_data():
                    if (_is_document(file) or _is_shortcut(file)) and await tree.holds(corpus, _checked(file)):
                        held.append(file)
            except BadData as error:
                failed[name_of(file, id_in, number)] = error
        documents = [file for file in held if _is_document(file)]
        if corpus.user is not None:
            await self._owners.note({str(file["id"]): corpus.user for file in documents})
        return [*documents, *await self._targets(held, corpus, corpora)]

    async def _targets(self, files: Sequence[Json], corpus: Corpus, corpora: Sequence[Corpus]) -> list[Json]:
        """Return the documents to which shortcuts among these files of a corpus lead, and which no corpus holds."""
        details = [file.get("shortcutDetails") or {} for file in files if _is_shortcut(file)]
        ids = {str(detail.get("targetId") or "") for detail in details} - {""}
        if not ids:
            return []
        api, by_key = self._api.acting_as(corpus.user), {corpus.key: corpus for corpus in corpora}
        tree = Tree(api)
        targets = []
        for target in await gather_or_cancel(*(self._file(id_, api) for id_ in sorted(ids))):
            if target is None or not _is_document(target):
                continue
            home = _corpus_of(target, by_key)
            if home is None or not await tree.holds(home, target):
                targets.append(target)
        await self._links.add({str(target["id"]): corpus.user or "" for target in targets})
        return targets

    def access_reader(self) -> AccessReader:
        return AccessReader(self._sharing, self._now, self._on_hidden)

    async def listed(
        self, files: Sequence[Json], reader: AccessReader, failed: Mapping[str, BadData]
    ) -> list[Listed | Unlisted]:
        """Return files as listing entries, without files that have been deleted. reader: of the whole listing, because
        files of one folder are on many of its pages. failed: the errors of files whose data could not be read."""
        links = await self._links.targets()
        accesses = await self._accesses(files, reader)

        def entry(read: tuple[Json, Access]) -> Listed:
            file, access = read
            return Listed(
                external_id=str(file["id"]),
                acl_tags=access.tags,
                revision=content.revision_of(file),
                read_at=reader.began,
            )

        known = [(file, access) for file, access in accesses if isinstance(access, Access)]
        shown = [(file, access) for file, access in known if access.tags or str(file["id"]) not in links]
        listed, unlisted = each(shown, entry, lambda read: read[0]["id"])
        without_access = {str(file["id"]): access for file, access in accesses if isinstance(access, BadData)}
        parts = {**failed, **without_access, **unlisted}
        return [
            *listed,
            *(Unlisted(part=f"file {id_}", reason=str(error), is_document=True) for id_, error in parts.items()),
        ]

    async def entries(self, files: Sequence[Json], *, bulk: bool = False) -> list[Entry]:
        """Return files as entries. bulk: a full read, which no user waits for. A file that fails repeatedly while
        others are read becomes unreadable, so that it does not block the others."""
        with_access = await self._accesses(files, self.access_reader())
        entries: list[Entry] = []
        failure: Retryable | None = None
        links = await self._links.targets()
        attempts = await gather_or_cancel(*(self._try(file, access, bulk, links) for file, access in with_access))
        for (file, access), entry in zip(with_access, attempts, strict=True):
            if not isinstance(entry, Retryable):
                entries.append(entry)
            elif isinstance(access, Access) and self._failures.fail(str(file["id"]), entry):
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

    async def _try(
        self, file: Json, access: Access | BadData | None, bulk: bool, links: Mapping[str, str]
    ) -> Entry | Retryable:
        id_ = str(file["id"])
        if isinstance(access, BadData):
            return _unreadable(id_, access)
        try:
            with reading_data():
                entry = await self._entry(file, access, bulk, links)
        except BadData as error:
            return _unreadable(id_, error, access or NO_ACCESS)
        except Deferred:
            raise  # the reason is not the file
        except Retryable as error:
            return error
        self._failures.succeed(id_)
        return entry

    async def fetch(self, ids: Sequence[str], corpora: Sequence[Corpus]) -> list[Entry]:
        links = await self._links.targets()
        answers = await gather_or_cancel(*(self._find_or_refused(id_, links.get(id_)) for id_ in ids))
        files = [{**file, "id": id_} for id_, file in zip(ids, answers, strict=True) if isinstance(file, dict)]
        refused = [entry for entry in answers if isinstance(entry, Unreadable)]
        missing = [id_ for id_, file in zip(ids, answers, strict=True) if file is None]
        await self._memory.forget(missing)
        return [*(Gone(id_) for id_ in missing), *refused, *await self.classify(files, corpora)]

    async def _find_or_refused(self, id_: str, reader: str | None) -> Json | Unreadable | None:
        """Return what ``_find`` returns; for a file that Google refuses to show, an entry that nobody may read, because
        nobody knows who may."""
        try:
            return await self._find(id_, reader)
        except Denied as error:
            return Unreadable(
                external_id=id_,
                code="denied",
                message=f"Google refuses to show it ({error.code or 'no code'}): check that the account may read it",
                acl_tags=(),
            )

    async def classify(self, files: Sequence[Json], corpora: Sequence[Corpus]) -> list[Entry]:
        """Return files as entries. A file in the trash, without text or outside of the corpora is gone."""
        by_key, tree, links = {corpus.key: corpus for corpus in corpora}, Tree(self._api), await self._links.targets()
        documents: list[Json] = []
        gone: list[str] = []
        failed: dict[str, BadData] = {}
        for file in files:
            try:
                with reading_data():
                    corpus, is_document = _corpus_of(_checked(file), by_key), _is_document(file)
                    is_held = (
                        corpus is not None and (is_document or _is_shortcut(file)) and await tree.holds(corpus, file)
                    )
            except BadData as error:
                failed[name_of(file, id_in)] = error
                continue
            if is_document and (is_held or str(file["id"]) in links):
                documents.append(file)
            else:
                gone.append(str(file["id"]))
            if is_held and corpus is not None:
                documents += await self._targets([file], corpus, corpora)
        if self._users:
            owners = ((str(file["id"]), owner_of(file)) for file in documents if not file.get("driveId"))
            await self._owners.note({id_: owner for id_, owner in owners if owner in self._users})
        await self._memory.forget(gone)
        unreadable = [_unreadable(id_, error) for id_, error in failed.items()]
        return [*(Gone(id_) for id_ in gone), *unreadable, *await self.entries(documents)]

    async def _find(self, id_: str, reader: str | None) -> Json | None:
        """Return a file, or None if it does not exist, or nobody on whose behalf files are read may see it.

        reader: the user on whose behalf the target of a shortcut is read; None: it is none.
        """
        if not self._users:
            return await self._file(id_, self._api)
        owner = reader or await self._owners.of(id_)
        if owner is not None and owner not in self._users:
            return None  # a file of another owner is among those of this one
        if (file := await self._file(id_, self._api.acting_as(owner))) is not None or reader is not None:
            return file
        if owner is not None:  # it may have another owner by now
            return await self._file(id_, self._api)
        for user in self._users:
            if (file := await self._file(id_, self._api.acting_as(user))) is not None:
                return file
        return None

    async def _file(self, id_: str, api: Api) -> Json | None:
        """Return a file, or None if it does not exist or the account may not see it: Google does not distinguish
        these."""
        async with self._slots[False]:
            try:
                return await api.file(id_)
            except Missing:
                return None
            except Denied as error:
                if error.code == NO_DRIVE:
                    return None
                raise

    async def _accesses(
        self, files: Sequence[Json], reader: AccessReader
    ) -> list[tuple[Json, Access | BadData | None]]:
        """Return files with their access, None for a file that has been deleted, or the error of one whose access
        cannot be read from its data: nobody may read it until it can."""
        links = await self._links.targets()

        async def access(file: Json) -> tuple[Json, Access | BadData | None]:
            try:
                with reading_data():
                    return file, await reader.access(file, self._api_of(file, links))
            except Vanished:
                return file, None
            except BadData as error:
                return file, error

        accesses = await gather_or_cancel(*(access(file) for file in files))
        await self._memory.record(
            {str(file["id"]): (read.tags, read.expires_at) for file, read in accesses if isinstance(read, Access)}
        )
        return accesses

    async def _entry(self, file: Json, access: Access | None, bulk: bool, links: Mapping[str, str]) -> Entry:
        if access is None or (not access.tags and str(file["id"]) in links):
            return Gone(str(file["id"]))
        async with self._slots[bulk]:
            try:
                return await self._contents.read(file, access, self._api_of(file, links))
            except Missing:
                return Gone(str(file["id"]))


def id_in(file: Json) -> object:
    return file["id"]


def _checked(file: Json) -> Json:
    """Return a file whose id and places are texts. Raises errors of data for any other."""
    places = [file["id"], *(file.get("parents") or ()), file.get("driveId") or ""]
    if any(not isinstance(place, str) for place in places):
        raise TypeError("an id is no text")
    return file


def _unreadable(id_: str, error: BadData, access: Access = NO_ACCESS) -> Unreadable:
    """Return the entry of a file whose data cannot be read. Without an access that is known nobody may read it."""
    message = f"{error}: it is tried again with every sweep"
    return Unreadable(external_id=id_, code=UNEXPECTED, acl_tags=access.tags, message=message)


def _is_document(file: Json) -> bool:
    return not file.get("trashed") and content.conversion(file) is not None


def _is_shortcut(file: Json) -> bool:
    return file.get("mimeType") == SHORTCUT and not file.get("trashed")


def _corpus_of(file: Json, by_key: Mapping[str, Corpus]) -> Corpus | None:
    """Return the corpus to which a file belongs; None: none that is read."""
    if drive := file.get("driveId"):
        return by_key.get(str(drive))
    return by_key.get(f"{USER_FILES}{owner_of(file)}") or by_key.get(OWN_FILES)


def owner_of(file: Json) -> str:
    """Return the address of the owner of a file outside of shared drives; empty: it is not shown."""
    return next((str(owner.get("emailAddress") or "").lower() for owner in file.get("owners") or ()), "")
