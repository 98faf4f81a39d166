"""Reads items of drives as entries and listings, with their access, and which drives the options select."""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from connectors.access_memory import AccessMemory
from connectors.errors import BadData
from connectors.set_aside import UNEXPECTED, Failures, SetAside, each, reading_data
from connectors.sharepoint import content
from connectors.sharepoint.access import NO_ACCESS, Access, Sharing, access_of
from connectors.sharepoint.client import Graph, Json, misconfiguration
from connectors.sharepoint.content import Contents
from connectors.sharepoint.options import SharePointOptions
from connectors.source import Entry, Gone, Listed, Memory, Unlisted, Unreadable
from connectors.web import Answered, Denied, Missing, Rejected, ServerFailed
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.runtime.tasks import gather_or_cancel

SITES = "sites"
"""Name in the source's memory: ``Sites``."""
Sites = dict[str, list[dict[str, Any]]]
"""The fields of drives by the name of their site."""
DRIVES_SECONDS = 300.0
"""The list of drives is read again after so long. Access is never read from it."""
HELD_RECORDS = "/preservationholdlibrary"
"""The end of the address of the library in which SharePoint keeps what users have deleted, for as long as the law asks.
Graph lists it among the libraries of a site (learn.microsoft.com/purview/retention-policies-sharepoint)."""


@dataclass(frozen=True, slots=True)
class Drive:
    """A library of a site, or a user's OneDrive: Graph has one listing and one log of changes for each."""

    id: str
    site: str
    """The id of the site, ``host,site collection,web``."""
    site_url: str
    has_pages: bool = False
    """It holds the pages of its site."""

    @property
    def collection(self) -> str:
        """The id of the site collection, within which the numbers of site groups are unique."""
        parts = self.site.split(",")
        return parts[1].lower() if len(parts) > 1 else self.site.lower()


class Drives:
    """The drives that the options select at the moment. A site that cannot be read is reported and set aside."""

    def __init__(
        self,
        graph: Graph,
        options: SharePointOptions,
        memory: Memory,
        failures: Failures,
        report: Callable[[str, str], None],
    ) -> None:
        """memory: holds the drives of each site, as they were read last. report: called with the code and message of a
        problem."""
        self._graph = graph
        self._options = options
        self._memory = memory
        self._report = report
        self._lock = asyncio.Lock()
        self._drives: tuple[Drive, ...] = ()
        self._known: list[Drive] = []
        """The drives, and those of sites that cannot be read at the moment."""
        self._read_at = float("-inf")
        self._failures = failures
        self.unlisted: dict[str, Unlisted] = {}
        """The parts of the sites that could not be read, by the id of the drive, or by the site's name."""

    def site_url(self, collection: str) -> str | None:
        return next((drive.site_url for drive in self._known if drive.collection == collection), None)

    async def selected(self, *, fresh: bool = False) -> tuple[Drive, ...]:
        """Return the drives in a stable order. fresh: do not use a list that was read before. Raises Misconfigured if
        there is none."""
        async with self._lock:
            if fresh or time.monotonic() > self._read_at + DRIVES_SECONDS:
                stored: Sites = await self._memory.get(SITES) or {}
                self.unlisted, sites = {}, Sites()
                drives = {drive.id: drive async for drive in self._read(stored, sites)}
                self._known = [Drive(**drive) for of_site in sites.values() for drive in of_site]
                if sites != stored:
                    await self._memory.put(SITES, sites)
                self._drives = tuple(sorted(drives.values(), key=lambda drive: drive.id))
                self._read_at = time.monotonic()
            if not self._drives:
                raise Misconfigured("no site and no OneDrive can be read: penstock connector check names the reasons")
            return self._drives

    async def _read(self, stored: Sites, sites: Sites) -> AsyncIterator[Drive]:
        """Yield the drives, and add them to ``sites``. stored: the same when they were read last."""
        failed: dict[str, Answered | ServerFailed] = {}
        async for name, site_drives in self._sites():
            try:
                drives = [drive async for drive in site_drives]
            except (Missing, Denied, Rejected, ServerFailed) as error:
                failed[name] = error
                continue
            self._failures.succeed(name)
            sites[name] = [asdict(drive) for drive in drives]
            for drive in drives:
                yield drive
        is_any_read = bool(sites)
        for name, failure in failed.items():
            if not is_any_read and isinstance(failure, Answered) and (advice := misconfiguration(failure)):
                raise Misconfigured(advice) from failure
            if isinstance(failure, ServerFailed) and not self._failures.fail(name, failure):
                raise failure
            reason = unreadable_site(name, failure)
            self._report(f"site:{name}", reason)
            sites[name] = stored.get(name, [])
            # A site that was never read has no documents: nothing begins with its name.
            for id_ in [drive["id"] for drive in sites[name]] or [name]:
                self.unlisted[id_] = unlisted(name, id_, failure, reason)

    async def _sites(self) -> AsyncIterator[tuple[str, AsyncIterator[Drive]]]:
        for address in self._options.sites:
            yield address, self._named_site(address)
        for user in self._options.onedrives:
            yield user, self._onedrive(user)
        if not (self._options.all_sites or self._options.all_onedrives):
            return
        async for site in self._graph.all_sites():
            is_personal = site.get("isPersonalSite") is True
            if self._options.all_onedrives if is_personal else self._options.all_sites:
                yield str(site.get("webUrl")), self._drives_of(site, personal=is_personal)

    async def _named_site(self, address: str) -> AsyncIterator[Drive]:
        async for drive in self._drives_of(await self._graph.site(address), personal=False):
            yield drive

    async def _drives_of(self, site: Json, *, personal: bool) -> AsyncIterator[Drive]:
        id_, url = str(site["id"]), str(site.get("webUrl") or "")
        async for drive in self._graph.drives(id_):
            if not unquote(urlsplit(str(drive.get("webUrl") or "")).path).lower().endswith(HELD_RECORDS):
                yield Drive(str(drive["id"]), id_, url)
        if self._options.pages and not personal:
            pages = await self._graph.pages_drive(id_)
            if pages is not None:
                yield Drive(str(pages["id"]), id_, url, has_pages=True)

    async def _onedrive(self, user: str) -> AsyncIterator[Drive]:
        drive = await self._graph.onedrive(user)
        ids = drive.get("sharePointIds") or {}
        url = str(ids.get("siteUrl") or "")
        yield Drive(str(drive["id"]), f"{urlsplit(url).netloc},{ids.get('siteId')},{ids.get('webId')}", url)


def unreadable_site(name: str, error: Answered | ServerFailed) -> str:
    """Return one line about a site or OneDrive that cannot be read."""
    if isinstance(error, ServerFailed):
        return f"{name} cannot be listed: {error}"
    if error.status == 423:
        return f"{name} is locked or archived: its documents are hidden until it is unlocked"
    if isinstance(error, Missing):
        return f"{name} does not exist, or the application may not read it (Sites.Selected has to be granted for it)"
    return f"{name} cannot be read ({error.status}, {error.code}): grant Sites.Read.All, or Sites.Selected for it"


def unlisted(site: str, drive: str, error: Answered | ServerFailed, reason: str) -> Unlisted:
    """Return a drive that cannot be listed. Where Microsoft refuses it, nobody may read its documents."""
    return Unlisted(
        part=f"library {drive} of {site}" if drive != site else site,
        reason=reason,
        id_prefix=external_id(drive, ""),
        is_closed=isinstance(error, Answered),
    )


def id_in(item: Json) -> object:
    return item["id"]


def _id(item: Json) -> str:
    """Return the id of an item. Raises an error of data if it is no text."""
    if not isinstance(item["id"], str):
        raise TypeError("an id is no text")
    return str(item["id"])


def unreadable(id_: str, error: BadData, access: Access = NO_ACCESS) -> Unreadable:
    """Return the entry of an item whose data cannot be read. Without an access that is known nobody may read it."""
    message = f"{error}: it is tried again with every sweep"
    return Unreadable(external_id=id_, code=UNEXPECTED, acl_tags=access.tags, message=message)


def external_id(drive: str, item: str) -> str:
    return f"{drive}:{item}"


class Tree:
    """Folders of a drive, as far as a listing has shown them: their parents, and which have permissions of their
    own."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[str | None, bool]] = {}
        self.shows_roots = False
        """Whether the listing shows where permissions begin: the root of a drive then has the facet ``shared``."""

    def note(self, item: Json) -> None:
        if not is_folder(item):
            return
        self._folders[str(item["id"])] = parent_of(item), "shared" in item
        if "root" in item and "shared" in item:
            self.shows_roots = True

    def access_root(self, item: Json) -> str:
        """Return the id of the item whose permissions this item has: itself, or the nearest folder above that has
        permissions of its own. A folder that the listing has not shown is returned itself, because Graph returns the
        inherited permissions of every item."""
        id_, parent, is_unique = str(item["id"]), parent_of(item), "shared" in item
        while not is_unique and parent is not None:
            id_ = parent
            parent, is_unique = self._folders.get(id_, (None, True))
        return id_


def is_folder(item: Json) -> bool:
    return item.get("deleted") is None and ("folder" in item or "root" in item)


def parent_of(item: Json) -> str | None:
    parent = (item.get("parentReference") or {}).get("id")
    return str(parent) if parent else None


UNREADABLE = "its site or library cannot be read, and nobody may read it until then"
MAX_CONCURRENT_FILES = 4
"""Files read at the same time by the full read, and again by everything else. Each is half of the client's limit, so
that an edit does not wait behind a crawl."""
MAX_FAILURES = 3
"""Failures of Microsoft at one file (each after the client's own retries) before the file is taken to be the reason."""


class Reading:
    """Reads items with their access."""

    def __init__(
        self,
        graph: Graph,
        contents: Contents,
        memory: AccessMemory,
        options: SharePointOptions,
        now: Callable[[], datetime],
        report: Callable[[str, str], None],
        set_aside: SetAside,
    ) -> None:
        self._graph = graph
        self._set_aside = set_aside
        self._contents = contents
        self._memory = memory
        self._by_hierarchy = options.permissions == "hierarchy"
        self._sharing = Sharing(options.organization_links, options.anonymous_links)
        self._now = now
        self._report = report
        self._slots = {bulk: asyncio.Semaphore(MAX_CONCURRENT_FILES) for bulk in (True, False)}
        self._files_read = 0
        self._failing: dict[str, tuple[int, int]] = {}
        """By external id: the failures in a row, and ``_files_read`` at the first."""

    def select(self, items: Sequence[Json], drive: Drive, failed: dict[str, BadData]) -> list[Json]:
        """Return those items that are documents, each as it was shown last. failed: receives the errors of items whose
        data cannot be read."""
        last, unnamed = each(items, lambda item: (_id(item), item), id_in)

        def document(item: Json) -> Json | None:
            parent_of(item)
            return item if content.type_of(item, is_pages_library=drive.has_pages) is not None else None

        documents, unreadable = each(dict(last).values(), document, id_in)
        failed |= unnamed | unreadable
        return [item for item in documents if item is not None]

    async def listed(
        self,
        items: Sequence[Json],
        drive: Drive,
        tree: Tree,
        known: dict[str, Access],
        began: datetime,
        failed: Mapping[str, BadData],
    ) -> list[Listed | Unlisted]:
        """Return items as listing entries, without items that have been deleted. failed: the errors of items whose data
        could not be read.

        known: the access of those folders of the drive that have permissions of their own, as the listing has read it
        since it began; what is read here is added.
        """
        accesses = await self._accesses(items, drive, tree, known)

        def entry(item: Json) -> Listed:
            return Listed(
                external_id=external_id(drive.id, _id(item)),
                acl_tags=accesses[_id(item)].tags,
                revision=content.revision_of(item, drive.id),
                read_at=began if self._uses_hierarchy(tree) else None,
            )

        listed, unlisted = each((item for item in items if _id(item) in accesses), entry, id_in)
        parts = {**failed, **unlisted}
        return [
            *listed,
            *(
                Unlisted(part=f"item {id_} of library {drive.id}", reason=str(error), is_document=True)
                for id_, error in parts.items()
            ),
        ]

    async def entries(self, items: Sequence[Json], drive: Drive, tree: Tree, *, bulk: bool = False) -> list[Entry]:
        """Return items as entries. bulk: a full read, which no user waits for. A file that fails repeatedly while
        others are read becomes unreadable, so that it does not block the others."""
        accesses = await self._accesses(items, drive, tree, {})
        attempts = await gather_or_cancel(
            *(self._try(item, drive, accesses.get(str(item["id"])), bulk) for item in items)
        )
        entries: list[Entry] = []
        failure: Retryable | None = None
        for item, entry in zip(items, attempts, strict=True):
            id_ = external_id(drive.id, str(item["id"]))
            if not isinstance(entry, Retryable):
                entries.append(entry)
            elif self._has_failed_repeatedly(id_):
                entries.append(
                    Unreadable(
                        external_id=id_,
                        code="unavailable",
                        acl_tags=accesses.get(str(item["id"]), NO_ACCESS).tags,
                        message="every request for it fails at Microsoft: it is retried with every sweep",
                    )
                )
            else:
                failure = entry
        if failure is not None:
            raise failure
        return entries

    async def _try(self, item: Json, drive: Drive, access: Access | None, bulk: bool) -> Entry | Retryable:
        id_ = external_id(drive.id, str(item["id"]))
        kind = content.type_of(item, is_pages_library=drive.has_pages)
        if access is None or kind is None:
            return Gone(id_)
        try:
            with reading_data():
                async with self._slots[bulk]:
                    entry = await self._contents.read(item, id_, drive.id, drive.site, kind, access)
        except BadData as error:
            return unreadable(id_, error, access)
        except Missing:
            return Gone(id_)
        except Deferred:
            raise  # the reason is not the file
        except Retryable as error:
            times, since = self._failing.get(id_, (0, self._files_read))
            self._failing[id_] = times + 1, since
            return error
        self._files_read += 1
        self._failing.pop(id_, None)
        return entry

    def _has_failed_repeatedly(self, id_: str) -> bool:
        times, since = self._failing[id_]
        return times >= MAX_FAILURES and self._files_read > since

    async def folder_access(self, items: Sequence[Json], drive: Drive) -> Mapping[str, Access]:
        """Return the access of folders by id, without folders that have been deleted."""
        return await self._read_accesses([str(item["id"]) for item in items], drive)

    async def fetch(
        self, external_ids: Sequence[str], drives: Mapping[str, Drive], refused: Collection[str]
    ) -> list[Entry]:
        """Read documents by their external ids. refused: the ids of drives whose site cannot be read."""
        entries: list[Entry] = []
        items: dict[str, list[Json]] = {}
        shown = await gather_or_cancel(*(self._item(id_) for id_ in external_ids))
        for id_, item in zip(external_ids, shown, strict=True):
            drive, failed = drives.get(id_.partition(":")[0]), dict[str, BadData]()
            if isinstance(item, dict):
                item = {**item, "id": id_.partition(":")[2]}
            if isinstance(item, dict) and drive is not None and self.select([item], drive, failed):
                items.setdefault(drive.id, []).append(item)
            elif failed:
                entries.append(unreadable(id_, next(iter(failed.values()))))
            elif isinstance(item, dict) and id_.partition(":")[0] in refused:
                entries.append(Unreadable(external_id=id_, code="denied", message=UNREADABLE, acl_tags=()))
            else:
                entries.append(item if isinstance(item, Unreadable) else Gone(id_))
        await self._memory.forget([entry.external_id for entry in entries])
        for key, some in items.items():
            entries += await self.entries(some, drives[key], Tree())
        return entries

    async def _item(self, id_: str) -> Json | Unreadable | None:
        """Return an item; None if it does not exist. Nobody may read one of a site that is locked, or that the
        application may not read any more: what was published of it stays until the site can be read again."""
        drive, _, item = id_.partition(":")
        try:
            async with self._slots[False]:
                return await self._graph.item(drive, item)
        except Missing:
            return None
        except (Denied, Rejected) as error:
            if error.status == 401:
                raise
            code = "locked" if error.status == 423 else "denied"
            message = f"{UNREADABLE} ({error.status}, {error.code})"
            return Unreadable(external_id=id_, code=code, message=message, acl_tags=())

    def _uses_hierarchy(self, tree: Tree) -> bool:
        return self._by_hierarchy and tree.shows_roots

    async def _accesses(
        self, items: Sequence[Json], drive: Drive, tree: Tree, known: dict[str, Access]
    ) -> dict[str, Access]:
        """Return the access of items by id, without items that have been deleted. known: see ``listed``."""
        by_hierarchy = self._uses_hierarchy(tree)
        roots = {str(item["id"]): tree.access_root(item) if by_hierarchy else str(item["id"]) for item in items}
        read = await self._read_accesses(sorted(set(roots.values()) - known.keys()), drive)
        if by_hierarchy:
            known.update(read)
        of_root = ChainMap(read, known)
        accesses = {
            id_: of_root.get(root, NO_ACCESS)  # a folder above that was deleted meanwhile: the item is read again soon
            for id_, root in roots.items()
            if root in of_root or root != id_
        }
        await self._memory.record(
            {external_id(drive.id, id_): (access.tags, access.expires_at) for id_, access in accesses.items()}
        )
        return accesses

    async def _read_accesses(self, ids: Sequence[str], drive: Drive) -> dict[str, Access]:
        answers = await self._graph.permissions(drive.id, ids)
        accesses: dict[str, Access] = {}
        for id_, permissions in zip(ids, answers, strict=True):
            if isinstance(permissions, Missing):
                continue
            if isinstance(permissions, Answered):
                self._report(
                    "permissions",
                    f"Microsoft Graph does not show permissions ({permissions.code}): nobody may"
                    " read these documents; grant Sites.Read.All",
                )
                accesses[id_] = NO_ACCESS
            else:
                try:
                    with reading_data():
                        accesses[id_] = access_of(permissions, drive.collection, self._sharing, self._now())
                except BadData as error:  # nobody knows who may read it, and nobody may
                    accesses[id_] = NO_ACCESS
                    self._set_aside.add("access", f"permissions of {external_id(drive.id, id_)}", error)
        return accesses
