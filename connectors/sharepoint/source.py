"""SharePoint and OneDrive as a source, read by an application through Microsoft Graph, and a check of what the
application lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from datetime import UTC, datetime
from functools import partial
from typing import ClassVar

import structlog

from connectors.access_memory import AccessMemory, Listener
from connectors.errors import BadData
from connectors.listings import ListedPage, moved_on, read_listings
from connectors.portions import pages_of
from connectors.protocol import Problem
from connectors.set_aside import Failures, each
from connectors.sharepoint.access import EVERYONE, Access, Memberships
from connectors.sharepoint.changes import Subscriptions
from connectors.sharepoint.client import Credential, Graph, Json, SiteGroups, misconfiguration
from connectors.sharepoint.content import Contents
from connectors.sharepoint.options import SharePointOptions
from connectors.sharepoint.reading import (
    Drive,
    Drives,
    Reading,
    Tree,
    external_id,
    id_in,
    is_folder,
    parent_of,
    unlisted,
    unreadable_site,
)
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Entry,
    Gone,
    Group,
    GroupPage,
    Listed,
    MetadataKeys,
    Page,
    Playground,
    Reaction,
    Request,
    Unlisted,
)
from connectors.tag_queue import TagQueue
from connectors.web import Answered, Denied, Limits, Missing, Rejected, ServerFailed
from pipeline.core.errors import Misconfigured, Retryable

log = structlog.get_logger()

RELIST_SECONDS = 1.0
"""Delay before a listing whose link has expired begins again."""

_Place = tuple[Drive, Tree, str | None]
"""A drive, the folders of its listing so far, and the link of a page."""


def utc_now() -> datetime:
    return datetime.now(UTC)


class SharePoint:
    """``connectors.source.Source``. A document is a file or a page; its external id is ``DRIVE:ITEM``, the ids of its
    library and of the item."""

    Options: ClassVar[type[SharePointOptions]] = SharePointOptions
    metadata_keys: ClassVar[MetadataKeys] = {
        "site": "keyword",
        "mime_type": "keyword",
        "drive_id": "keyword",
        "folder_id": "keyword",
    }

    def __init__(
        self,
        options: SharePointOptions,
        context: Context,
        *,
        now: Callable[[], datetime] = utc_now,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> None:
        """Raises Misconfigured. now: the clock by which grants and subscriptions expire."""
        self._options = options
        self._context = context
        self._now = now
        credential = Credential(options)
        self._graph = Graph(options, credential, context.name, limits)
        self._site_groups = (
            SiteGroups(options, credential, context.name, limits)
            if options.site_groups and credential.is_certificate
            else None
        )
        self._reported: dict[str, str] = {}
        self._listener = Listener()
        self._memory = AccessMemory(context.memory, self._listener.groups)
        self._subscriptions = Subscriptions(self._graph, context.memory, now)
        self._failures = Failures()
        self._drives = Drives(self._graph, options, context.memory, self._failures, self._report)
        contents = Contents(self._graph, context.folder / "downloads", options.max_bytes)
        self._reading = Reading(self._graph, contents, self._memory, options, now, self._report, context.set_aside)
        self._memberships = Memberships(self._graph, self._site_groups, options, self._drives.site_url, self._report)
        self._unlisted: dict[str, Unlisted] = {}
        """Drives whose log could not be read, by their id."""
        self._folders: dict[str, tuple[str | None, bool, Access | None]] = {}
        """By external id, as folders were last seen: the parent, whether it has permissions of its own, and the access;
        None if only a listing has shown the folder."""

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        from connectors.sharepoint.playground import playing

        return playing()

    async def close(self) -> None:
        await self._graph.close()
        if self._site_groups is not None:
            await self._site_groups.close()

    def _report(self, code: str, message: str) -> None:
        """Log a problem once; ``check`` shows it as well."""
        if self._reported.get(code) != message:
            self._reported[code] = message
            log.warning("sharepoint_problem_reported", source=self._context.name, code=code, problem=message)

    async def check(self) -> Sequence[Problem]:
        name = self._context.name
        try:
            await self._graph.auth.token()
            drives = await self._drives.selected(fresh=True)
            await self._graph.delta_now(drives[0].id)
            async with aclosing(self._memberships.groups([EVERYONE])) as groups:
                async for _ in groups:
                    break
            await self._check_site_groups(drives)
        except (Misconfigured, Answered) as error:
            self._report("credential", str(error))
        return [Problem(name, code.partition(":")[0], text) for code, text in self._reported.items()]

    async def _check_site_groups(self, drives: Sequence[Drive]) -> None:
        """Read a group of the first site, if the root of its library is shared with one."""
        [permissions] = await self._graph.permissions(drives[0].id, ["root"])
        if isinstance(permissions, Answered):
            raise permissions
        for permission in permissions:
            group = ((permission.get("grantedToV2") or {}).get("siteGroup") or {}).get("id")
            if group is not None:
                tag = f"site-group:{drives[0].collection}:{group}"
                async with aclosing(self._memberships.groups([tag])) as groups:
                    async for _ in groups:
                        break
                return

    # Full read and listing

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        """Yield all documents in the order of Graph's log, one drive after the other. Items that change meanwhile are
        in the log of changes."""
        remaining = list(await self._drives.selected(fresh=True))
        link: str | None = None
        if cursor is not None:
            at, link = cursor["drive"], cursor["link"]
            if link and at not in {drive.id for drive in remaining}:
                raise CursorExpired("the library that was being read is no longer selected")
            remaining = [drive for drive in remaining if at is not None and drive.id >= at]
        while remaining:
            drive = remaining.pop(0)
            following = remaining[0].id if remaining else None
            tree = Tree()
            while True:
                began = datetime.now(UTC)
                items, link, failed = await self._items(drive, tree, link, self._options.page_size)
                for name, error in failed.items():
                    self._context.set_aside.add("listing", f"item {name} of library {drive.id}", error)
                read = partial(self._reading.entries, drive=drive, tree=tree, bulk=True)
                place = {"drive": drive.id if link else following, "link": link}
                async with aclosing(pages_of(items, read, place, began=began)) as pages:
                    async for page in pages:
                        yield page
                if not link:
                    break

    async def slim(self) -> AsyncGenerator[Sequence[Listed | Unlisted], None]:
        began, known = datetime.now(UTC), defaultdict[str, dict[str, Access]](dict)

        async def read(place: _Place) -> ListedPage[_Place]:
            drive, tree, link = place
            try:
                items, following, failed = await self._items(drive, tree, link, self._options.sweep_page_size)
            except CursorExpired as error:  # a listing has no cursor: it begins again
                raise Retryable(f"{error}: the listing starts again", retry_after=RELIST_SECONDS) from error
            entries = await self._reading.listed(items, drive, tree, known[drive.id], began, failed)
            return ListedPage(entries, (drive, tree, following) if following else None)

        self._context.set_aside.replace("access", {})
        async with self._memory.listing() as listing:
            drives = await self._drives.selected(fresh=True)
            beginnings: list[_Place] = [(drive, Tree(), None) for drive in drives]
            async with aclosing(read_listings(beginnings, read)) as pages:
                async for page in pages:
                    yield page
            logs = [self._unlisted[drive.id] for drive in drives if drive.id in self._unlisted]
            parts = [*self._drives.unlisted.values(), *logs]
            listing.lacks_parts = bool(parts)
            yield parts

    async def _items(
        self, drive: Drive, tree: Tree, link: str | None, size: int
    ) -> tuple[list[Json], str | None, dict[str, BadData]]:
        """Return the documents of a page of a drive, the link of the next page, and the errors of items whose data
        cannot be read; none if the drive cannot be read. A page without documents is no end: only a page without a link
        is.

        tree: the folders that the pages before have shown; those of this page are added.
        """
        page = await self._page(drive, link, size)
        if page is None:
            return [], None, {}

        def note(item: Json) -> Json:
            tree.note(item)
            if is_folder(item):
                # A folder that has moved since it was last seen must still be noticed by ``changes``.
                key = external_id(drive.id, str(item["id"]))
                self._folders.setdefault(key, (parent_of(item), "shared" in item, None))
            return item

        items, failed = each(page.get("value", []), note, id_in)
        return self._reading.select(items, drive, failed), page.get("@odata.nextLink"), failed

    async def _page(self, drive: Drive, link: str | None, size: int) -> Json | None:
        """Return a page of a drive's log; None if the drive cannot be read: it is set aside, and the others are
        read."""
        try:
            page = await self._graph.delta(drive.id, link, size)
            moved_on(page.get("@odata.nextLink"), link, "Microsoft Graph")
        except (Missing, Denied, Rejected, ServerFailed) as error:
            self._set_aside(drive, error)
            return None
        self._failures.succeed(drive.id)
        self._unlisted.pop(drive.id, None)
        return page

    # Changes

    async def start(self) -> Cursor:
        links: dict[str, str] = {}
        for drive in await self._drives.selected(fresh=True):
            if (link := await self._now_link(drive)) is not None:
                links[drive.id] = link
        return {"links": links}

    async def _now_link(self, drive: Drive) -> str | None:
        try:
            return await self._graph.delta_now(drive.id)
        except (Missing, Denied, Rejected, ServerFailed) as error:
            self._set_aside(drive, error)
            return None

    def _set_aside(self, drive: Drive, error: Answered | ServerFailed) -> None:
        """Record that a drive cannot be read. Raises Misconfigured if nothing can be read, and an error again that may
        not be the drive's."""
        if isinstance(error, ServerFailed):
            if not self._failures.fail(drive.id, error):
                raise error
        elif (advice := misconfiguration(error)) is not None:
            raise Misconfigured(advice) from error
        reason = unreadable_site(f"a library of {drive.site_url}", error)
        self._report(f"drive:{drive.id}", reason)
        self._unlisted[drive.id] = unlisted(drive.site_url, drive.id, error, reason)

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        links: dict[str, str] = dict(cursor["links"])
        selected = {drive.id: drive for drive in await self._drives.selected()}
        expired = await self._memory.expired(self._now())
        for start in range(0, len(expired), self._options.page_size):
            ids = expired[start : start + self._options.page_size]
            read = partial(self._reading.fetch, drives=selected, refused=self._drives.unlisted)
            async with aclosing(pages_of(ids, read, {"links": dict(links)})) as pages:
                async for expired_page in pages:
                    yield expired_page
        if links.keys() != selected.keys():
            # A library was added, removed or can be read again: a sweep finds its documents, and its log the changes
            # from now on.
            known = {id_: links.get(id_) or await self._now_link(drive) for id_, drive in selected.items()}
            before, links = links, {id_: link for id_, link in known.items() if link is not None}
            if links.keys() != before.keys():
                self._listener.sweep()
                yield Page((), {"links": dict(links)})
        for id_ in sorted(links):
            following: str | None = links[id_]
            while following:
                began = datetime.now(UTC)
                page = await self._page(selected[id_], following, self._options.page_size)
                if page is None:
                    break
                following = page.get("@odata.nextLink")
                items, link = page.get("value", []), str(following or page.get("@odata.deltaLink") or links[id_])
                if items or link != links[id_]:
                    links[id_] = link
                    changed = partial(self._changed, drive=selected[id_])
                    async with aclosing(pages_of(items, changed, {"links": dict(links)}, began=began)) as pages:
                        async for changed_page in pages:
                            yield changed_page

    async def _changed(self, items: Sequence[Json], drive: Drive) -> list[Entry]:
        """Return the entries of changed items. Graph shows the folders above a changed item, too, and of a deleted item
        little more than its id."""
        named, failed = each(items, lambda item: (str(item["id"]), {**item}), id_in)
        last = dict(named)
        deleted = [id_ for id_, item in last.items() if item.get("deleted") is not None]
        present = self._reading.select(list(last.values()), drive, failed)
        shown = {str(item["id"]) for item in present} | failed.keys()
        folders = [item for item in last.values() if is_folder(item)]
        if any(self._folders.pop(external_id(drive.id, id_), None) for id_ in deleted):
            self._listener.sweep()  # what was below a deleted folder need not be named
        await self._compare_folders(folders, drive)
        # A file that is no document may have been one before it was renamed.
        gone = [external_id(drive.id, id_) for id_, item in last.items() if id_ not in shown and not is_folder(item)]
        await self._memory.forget(gone)
        # Those whose data cannot be read here are read by their ids.
        by_id = [external_id(drive.id, id_) for id_ in failed if id_ in last]
        read = await self._reading.fetch(by_id, {drive.id: drive}, self._drives.unlisted) if by_id else []
        return [*(Gone(id_) for id_ in gone), *read, *await self._reading.entries(present, drive, Tree())]

    async def _compare_folders(self, folders: Sequence[Json], drive: Drive) -> None:
        """Request a sweep if a folder was moved or shared with others: the log of changes does not name what is below
        it, and marks neither every change of sharing (OneDrive/onedrive-api-docs issues 1248 and 1670) nor one of a
        folder (microsoftgraph/msgraph-sdk-java issue 2548)."""
        accesses = await self._reading.folder_access(folders, drive)
        for folder in folders:
            if (access := accesses.get(str(folder["id"]))) is None:
                continue
            key = external_id(drive.id, str(folder["id"]))
            place = parent_of(folder), "shared" in folder
            before = self._folders.get(key)
            is_changed = before is not None and (before[:2] != place or before[2] not in (None, access))
            if is_changed or "@microsoft.graph.sharedChanged" in folder:
                self._listener.sweep()
            self._folders[key] = *place, access

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        drives = {drive.id: drive for drive in await self._drives.selected()}
        return await self._reading.fetch(external_ids, drives, self._drives.unlisted)

    # Memberships

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        pages = self.group_pages(None) if tags is None else self._group_pages(TagQueue(tags))
        async for page in pages:
            for group in page.groups:
                yield group

    async def group_pages(self, cursor: Cursor | None) -> AsyncIterator[GroupPage]:
        queue = TagQueue(await self._memory.all_tags(self.slim)) if cursor is None else TagQueue.from_cursor(cursor)
        async for page in self._group_pages(queue):
            yield page

    async def _group_pages(self, queue: TagQueue) -> AsyncIterator[GroupPage]:
        await self._drives.selected()  # the addresses of sites, whose groups are read
        async for page in self._memberships.pages(queue):
            yield page

    # Events

    async def on_event(self, request: Request) -> Reaction:
        reaction, renew = await self._subscriptions.reaction(request)
        if renew:
            self._listener.renew_now()
        return reaction

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        address = self._context.events_url

        async def renew() -> datetime | None:
            assert address is not None
            try:
                return await self._subscriptions.renew(await self._drives.selected(), address)
            except (Retryable, Misconfigured, Answered) as error:  # polling continues in any case
                self._report("subscription", str(error))
                return None

        await self._listener.run(react, self._memory, self._now, renew if address else None)
