"""Files of Drive as entries and listings, each with its access, within the configured drives and folders.

Besides cursors, the runner's Memory stores the principals met and grants that end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from connectors.google_drive import content
from connectors.google_drive.access import Access, Readers, Sharing, Vanished
from connectors.google_drive.client import FOLDER, PLACE, Api, Json
from connectors.google_drive.content import Contents
from connectors.google_drive.options import GoogleDriveOptions
from connectors.source import Entry, Gone, Listed, Memory, Unreadable
from connectors.web import Missing
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.runtime.tasks import gather_or_cancel

OWN = "user"
"""Key of the account's own files, among the ids of shared drives."""
DEEPEST = 200
"""Folders within folders: Drive takes 100 in a shared drive (support.google.com/a/answer/7338880)."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A list of files and a log of changes of its own at Google."""

    key: str
    folders: frozenset[str] | None
    """Only what is below these; None: all."""

    @property
    def drive(self) -> str | None:
        return None if self.key == OWN else self.key


async def corpora(options: GoogleDriveOptions, api: Api) -> Sequence[Corpus]:
    """What the settings come to now, in an order that stays. Raises Misconfigured for a folder that is not there."""
    whole = set(options.drives)
    if options.all_drives:
        whole |= set(await api.drives())
    if options.my_drive:
        whole.add(OWN)
    parts: dict[str, set[str]] = {}
    for folder in options.folders:
        key = await _home_of(folder, api)
        if key not in whole:
            parts.setdefault(key, set()).add(folder)
    found = [Corpus(key, None) for key in whole] + [Corpus(key, frozenset(ids)) for key, ids in parts.items()]
    return sorted(found, key=lambda corpus: corpus.key)


async def _home_of(folder: str, api: Api) -> str:
    try:
        place = await api.file(folder, PLACE)
    except Missing as error:
        raise Misconfigured(missing_folder(folder, api)) from error
    if place.get("mimeType") != FOLDER:
        raise Misconfigured(f"folders: {folder} is no folder")
    return str(place.get("driveId") or OWN)


def missing_folder(folder: str, api: Api) -> str:
    return f"folders: {folder} is not there, or not shared with {api.email} (or the subject)"


def missing_drive(drive: str, api: Api) -> str:
    return f"drives: {drive} is not there, or {api.email} (or the subject) is no member of it: add it as Viewer"


class Tree:
    """Who is below whom, as far as was asked; good for one page or one listing."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._parents: dict[str, str | None] = {}

    async def load(self, corpus: Corpus) -> Json:
        """All folders of a corpus, many at a time. Returns the last page."""
        token: str | None = None
        while True:
            page = await self._api.files(corpus.drive, f"mimeType = '{FOLDER}'", PLACE, 1000, token)
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
        for _ in range(DEEPEST):
            if above is None or above in corpus.folders:
                return above is not None
            if above not in self._parents:
                try:
                    self._note(await self._api.file(above, PLACE))
                except Missing:  # a folder that is not shared with us: what is above it cannot be ours
                    self._parents[above] = None
            above = self._parents[above]
        return False


TAGS = "tags"
ENDING = "ending"
MOST_ENDING = 5_000
"""The soonest ends that are remembered; of a later one the sweep tells."""


class Kept:
    """Groups cannot be listed from Drive, only met on files. So the tags met are kept: those that the last two whole
    listings showed (a tag too many harms nobody; one too few, after a listing that was cut, would), and what else is
    met later."""

    def __init__(self, memory: Memory, on_new_tags: Callable[[Collection[str]], None]) -> None:
        """on_new_tags: somebody should ask who holds them."""
        self._memory = memory
        self._on_new_tags = on_new_tags
        self._lock = asyncio.Lock()
        self._tags: set[str] | None = None
        self._shown: set[str] | None = None
        """By the last whole listing; None: there was none yet."""
        self._listings: list[set[str]] = []
        self._ending: dict[str, str] | None = None

    async def _load(self) -> tuple[set[str], dict[str, str]]:
        if self._tags is None or self._ending is None:
            kept = await self._memory.get(TAGS) or {}
            self._tags = set(kept.get("tags", ()))
            self._shown = None if kept.get("shown") is None else set(kept["shown"])
            self._ending = dict(await self._memory.get(ENDING) or {})
        return self._tags, self._ending

    async def tags(self) -> tuple[frozenset[str], bool]:
        """And whether they are all there are."""
        async with self._lock:
            tags, _ = await self._load()
            return frozenset(tags), self._shown is not None

    async def met(self, found: Mapping[str, tuple[Collection[str], datetime | None]]) -> None:
        """What was just read: external id → its tags, and when the first of its grants ends."""
        async with self._lock:
            tags, ending = await self._load()
            groups = {tag for seen, _ in found.values() for tag in seen if not tag.startswith("user:")}
            for listing in self._listings:
                listing |= groups
            new = groups - tags
            if new:
                tags |= new
                await self._save_tags()
            before = dict(ending)
            for id_, (_, until) in found.items():
                ending.pop(id_, None)
                if until is not None:
                    ending[id_] = until.isoformat()
            if ending != before:
                soonest = sorted(ending.items(), key=lambda one: datetime.fromisoformat(one[1]))[:MOST_ENDING]
                self._ending = dict(soonest)
                await self._memory.put(ENDING, self._ending)
        if new:
            self._on_new_tags(new)

    @asynccontextmanager
    async def listing(self) -> AsyncIterator[None]:
        """Around a whole listing. Once it has come to its end, tags that neither it nor the one before it met exist no
        more."""
        shown: set[str] = set()
        self._listings.append(shown)
        try:
            yield
            async with self._lock:
                tags, _ = await self._load()
                wanted = shown | (self._shown or set())
                if tags != wanted or self._shown != shown:
                    self._tags, self._shown = wanted, set(shown)
                    await self._save_tags()
        finally:
            self._listings = [one for one in self._listings if one is not shown]

    async def _save_tags(self) -> None:
        shown = None if self._shown is None else sorted(self._shown)
        await self._memory.put(TAGS, {"tags": sorted(self._tags or ()), "shown": shown})

    async def due(self, now: datetime) -> list[str]:
        """Documents of which a grant has ended, and which were not read since."""
        async with self._lock:
            _, ending = await self._load()
            return [id_ for id_, end in ending.items() if datetime.fromisoformat(end) <= now]

    async def next_end(self) -> datetime | None:
        async with self._lock:
            _, ending = await self._load()
            return min((datetime.fromisoformat(end) for end in ending.values()), default=None)

    async def gone(self, external_ids: Collection[str]) -> None:
        await self.met(dict.fromkeys(external_ids, ((), None)))


AT_ONCE = 4
"""Files read at the same time by the full read, and by everything else: half each of what the client lets through, so
that an edit does not wait behind a crawl."""
HOPELESS = 3
"""As often Google may fail at one file before it is taken for the file's fault (each time after the client's own
patience)."""


class Reading:
    def __init__(
        self,
        api: Api,
        contents: Contents,
        kept: Kept,
        sharing: Sharing,
        now: Callable[[], datetime],
        unknown: Callable[[], None],
    ) -> None:
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
            Listed(external_id=str(file["id"]), acl_tags=access.tags, revision=content.revision_of(file))
            for file, access in await self._accesses(files)
            if access is not None
        ]

    async def entries(self, files: Sequence[Json], *, bulk: bool = False) -> list[Entry]:
        """bulk: nobody waits for these. One file that fails time and again while others are read is set aside, and
        harms no other."""
        found = await self._accesses(files)
        entries: list[Entry] = []
        failure: Retryable | None = None
        tried = await gather_or_cancel(*(self._tried(*one, bulk) for one in found))
        for (file, access), entry in zip(found, tried, strict=True):
            if not isinstance(entry, Retryable):
                entries.append(entry)
            elif access is not None and self._is_hopeless(str(file["id"])):
                entries.append(
                    Unreadable(
                        external_id=str(file["id"]),
                        code="unavailable",
                        acl_tags=access.tags,
                        message="Google fails whenever it is asked for it: it is tried again with every sweep",
                    )
                )
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
        files = await gather_or_cancel(*(self._file(id_) for id_ in ids))
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

        found = await gather_or_cancel(*(access(file) for file in files))
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
    return not file.get("trashed") and content.how(file) is not None
