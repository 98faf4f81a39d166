"""Google Drive as a source: shared drives, folders and My Drive, read through a service account, and a check of what
the account lacks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

import structlog

from connectors.access_memory import AccessMemory, Listener
from connectors.errors import BadData
from connectors.google_drive.access import Memberships, Sharing, drive_tag
from connectors.google_drive.changes import Channels
from connectors.google_drive.client import FOLDER, LOCATION_FIELDS, Api, Json
from connectors.google_drive.content import Contents
from connectors.google_drive.options import GoogleDriveOptions
from connectors.google_drive.places import Links, Owners
from connectors.google_drive.reading import NO_DRIVE, Corpus, Reading, Tree, missing_drive, missing_folder, owner_of
from connectors.listings import ListedPage, moved_on, read_listings
from connectors.portions import pages_of
from connectors.protocol import Problem
from connectors.set_aside import reading_data
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Entry,
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
from connectors.web import Answered, Denied, Limits, Missing
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.runtime.tasks import gather_or_cancel


async def problems(options: GoogleDriveOptions, api: Api, name: str) -> AsyncIterator[Problem]:
    """Check the account, drives, folders and directory. Raises Retryable during an outage of Google."""
    try:
        await api.drive_auth.token()
        await api.start_page_token(None)
    except (Misconfigured, Answered) as error:
        yield Problem(name, "credential", str(error))
        return  # nothing else can be checked
    for drive in options.drives:
        if problem := await _drive(drive, api):
            yield problem
    if options.all_drives and not await api.drives():
        yield Problem(name, "drive", f"all_drives: {api.email} (or the subject) is a member of no shared drive")
    for folder in options.folders:
        if problem := await _folder(folder, api):
            yield problem
    if options.all_my_drives and (problem := await _users(api, name)):
        yield problem
    if options.directory:
        async for problem in _directory(options, api, name):
            yield problem


async def _drive(drive: str, api: Api) -> Problem | None:
    try:
        await api.drive(drive)
        await api.permissions(drive)
    except Missing:
        return Problem(drive, "drive", missing_drive(drive, api))
    except Denied as error:
        return Problem(
            drive,
            "permissions",
            f"drives: the members of {drive} may not be listed ({error.code}), so nobody may read its documents:"
            f" give {api.email} (or the subject) a higher role there",
        )
    return None


async def _folder(folder: str, api: Api) -> Problem | None:
    try:
        place = await api.file(folder, f"{LOCATION_FIELDS},capabilities(canShare)")
    except Missing:
        return Problem(folder, "folder", missing_folder(folder, api))
    if place.get("mimeType") != FOLDER:
        return Problem(folder, "folder", f"folders: {folder} is not a folder: name one, or remove it")
    if not place.get("driveId") and not (place.get("capabilities") or {}).get("canShare"):
        return Problem(
            folder,
            "permissions",
            f"folders: {folder} is in a My Drive, where only accounts that may share a file see who may read it: make"
            f" {api.email} (or the subject) an Editor of it; until then nobody may read its documents",
        )
    return None


async def _users(api: Api, name: str) -> Problem | None:
    try:
        users = await api.active_users()
        if not users:
            return Problem(name, "users", "all_my_drives: the directory lists no active user: correct domains")
        await api.acting_as(users[0]).start_page_token(None)
    except (Answered, Misconfigured) as error:
        return None if _has_no_drive(error) else Problem(name, "users", f"all_my_drives: {error}")
    return None


async def _directory(options: GoogleDriveOptions, api: Api, name: str) -> AsyncIterator[Problem]:
    account = options.directory_subject or options.subject or api.email
    try:
        await api.directory_auth.token()
    except Misconfigured as error:
        yield Problem(name, "directory", f"{error}; without it groups give access to nobody (or set directory = false)")
        return
    for domain in options.domains:
        try:
            await _first(api.users(domain))
        except (Answered, Misconfigured) as error:
            yield Problem(domain, "directory", f"domains: {account} may not list the users of {domain}: {error}")
    try:
        # No group is known here: an account that may list members gets the response that this one does not exist.
        await _first(api.members(f"penstock-check@{account.partition('@')[2]}"))
    except Missing:
        return
    except (Answered, Misconfigured) as error:
        yield Problem(name, "directory", f"{account} may not list the members of a group (Groups > Read): {error}")


async def _first(entries: AsyncIterator[Any]) -> None:
    """Request the first page of a listing."""
    step: Awaitable[Any] = anext(entries, None)
    await step


log = structlog.get_logger()

RELIST_SECONDS = 1.0
"""Delay before a listing whose page token has expired begins again."""
DOCUMENTS = f"trashed = false and mimeType != '{FOLDER}'"
OWNED = f"'me' in owners and {DOCUMENTS}"
LOGS_AT_ONCE = 8
"""Logs of changes of which a page is requested at the same time: those of thousands of users are short."""


_Place = tuple[Corpus, Tree | None, str | None]
"""A corpus, the folders of its listing once they are read, and the token of a page."""


def _has_no_drive(error: Exception) -> bool:
    return isinstance(error, Denied) and error.code == NO_DRIVE


def utc_now() -> datetime:
    return datetime.now(UTC)


class GoogleDrive:
    """``connectors.source.Source``. A document is a file; its external id is the file's id."""

    Options: ClassVar[type[GoogleDriveOptions]] = GoogleDriveOptions
    metadata_keys: ClassVar[MetadataKeys] = {"mime_type": "keyword", "drive_id": "keyword", "folder_id": "keyword"}

    def __init__(
        self,
        options: GoogleDriveOptions,
        context: Context,
        *,
        now: Callable[[], datetime] = utc_now,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> None:
        """Raises Misconfigured. now: the clock by which grants and channels expire."""
        self._options = options
        self._context = context
        self._now = now
        self._api = Api(options, context.name, limits)
        self._reported: dict[str, str] = {}
        self._listener = Listener()
        self._memory = AccessMemory(context.memory, self._listener.groups)
        self._channels = Channels(self._api, context.memory, self._now)
        self._memberships = Memberships(self._api, options, self._now, self._report)
        self._owners = Owners(context.folder / "owners.json")
        self._links = Links(context.memory)
        self._reading = Reading(
            options,
            self._api,
            Contents(context.folder / "downloads", options.max_bytes),
            self._memory,
            Sharing(options.anyone_tag, options.domain_links),
            self._now,
            self._report_hidden,
            self._owners,
            self._links,
        )

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        from connectors.google_drive.playground import playing

        return playing()

    async def close(self) -> None:
        await self._api.close()

    def _report(self, code: str, message: str) -> None:
        """Log a problem once; ``check`` shows it as well."""
        if self._reported.get(code) != message:
            self._reported[code] = message
            log.warning("google_drive_problem_reported", source=self._context.name, code=code, problem=message)

    def _report_hidden(self) -> None:
        self._report(
            "permissions_hidden",
            "files whose sharing the account may not see are readable by nobody: outside of shared drives it must be an"
            " Editor of them",
        )

    async def check(self) -> Sequence[Problem]:
        missing = [problem async for problem in problems(self._options, self._api, self._context.name)]
        return [*missing, *(Problem(self._context.name, code, text) for code, text in self._reported.items())]

    async def _corpora(self) -> Sequence[Corpus]:
        return await self._reading.corpora()

    async def _require_drive(self, corpus: Corpus, request: Awaitable[Json]) -> Json:
        """Await a request for a corpus. Raises Misconfigured if the shared drive is missing: that does not mean that
        its documents are deleted."""
        try:
            return await request
        except Missing as error:
            raise Misconfigured(missing_drive(corpus.key, self._api)) from error

    # Full read and listing

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        """Yield all documents in Google's order, one corpus after the other. Files that move meanwhile are in the log
        of changes."""
        selected = await self._corpora()
        remaining = list(selected)
        token: str | None = None
        if cursor is not None:
            at, token = cursor["corpus"], cursor["page"]
            if token and at not in {corpus.key for corpus in remaining}:
                raise CursorExpired(f"{at} is no longer configured")
            remaining = [corpus for corpus in remaining if at is not None and corpus.key >= at]
        while remaining:
            corpus = remaining.pop(0)
            following = remaining[0].key if remaining else None
            read = partial(self._reading.entries, bulk=True)
            async with aclosing(self._files(corpus, selected, self._options.page_size, token)) as listing:
                try:
                    began = datetime.now(UTC)
                    async for files, after, failed in listing:
                        for name, error in failed.items():
                            self._context.set_aside.add("listing", f"file {name}", error)
                        place = {"corpus": corpus.key if after else following, "page": after}
                        async with aclosing(pages_of(files, read, place, began=began)) as pages:
                            async for page in pages:
                                yield page
                        began = datetime.now(UTC)
                except (Denied, Misconfigured) as refused:
                    self._skip(corpus, refused)
                    self._context.set_aside.add("listing", f"My Drive of {corpus.user}", refused)
                    yield Page((), {"corpus": following, "page": None})
            token = None

    async def slim(self) -> AsyncGenerator[Sequence[Listed | Unlisted], None]:
        owners: dict[str, str] = {}
        reader = self._reading.access_reader()
        async with self._memory.listing() as memory:
            self._links.begin()
            selected = await self._corpora()

            async def read(place: _Place) -> ListedPage[_Place]:
                corpus, tree, token = place
                try:
                    tree = tree or await self._tree(corpus)
                    size = self._options.sweep_page_size
                    files, following, failed = await self._page(corpus, selected, tree, size, token)
                    entries = await self._reading.listed(files, reader, failed)
                except CursorExpired as error:  # a listing has no cursor: it begins again
                    raise Retryable(f"{error}: the listing starts again", retry_after=RELIST_SECONDS) from error
                except (Denied, Misconfigured) as error:
                    self._skip(corpus, error)
                    memory.lacks_parts = True
                    part = Unlisted(part=f"My Drive of {corpus.user}", reason=str(error), tag=f"user:{corpus.user}")
                    return ListedPage([] if _has_no_drive(error) else [part], failure=error)
                if corpus.user is not None:
                    owners.update({str(file["id"]): corpus.user for file in files})
                return ListedPage(entries, (corpus, tree, following) if following else None)

            beginnings: list[_Place] = [(corpus, None, None) for corpus in selected]
            async with aclosing(read_listings(beginnings, read)) as pages:
                async for page in pages:
                    yield page
            await self._links.end()
            if self._options.all_my_drives:
                await self._owners.replace(owners)

    def _skip(self, corpus: Corpus, error: Denied | Misconfigured) -> None:
        """Raise an error again that does not concern the My Drive of one user alone."""
        if corpus.user is None:
            raise error
        if _has_no_drive(error):
            self._report("no_drive", "users who may not use Drive have no documents: this is no problem if intended")
        else:
            self._report("user", f"My Drives that cannot be read are set aside: {error}")

    async def _files(
        self, corpus: Corpus, selected: Sequence[Corpus], size: int, token: str | None
    ) -> AsyncGenerator[tuple[list[Json], str | None, dict[str, BadData]], None]:
        """Yield pages of documents, each with the token of the next page, and the errors of files whose data cannot be
        read."""
        tree = await self._tree(corpus)
        while True:
            files, token, failed = await self._page(corpus, selected, tree, size, token)
            yield files, token, failed
            if not token:
                return

    async def _tree(self, corpus: Corpus) -> Tree:
        tree = Tree(self._api.acting_as(corpus.user))
        if corpus.folders is not None:
            await self._require_drive(corpus, tree.load(corpus))
        return tree

    async def _page(
        self, corpus: Corpus, selected: Sequence[Corpus], tree: Tree, size: int, token: str | None
    ) -> tuple[list[Json], str | None, dict[str, BadData]]:
        """Return the documents of a page of a corpus, the token of the next page, and the errors of files whose data
        cannot be read."""
        api, query = self._api.acting_as(corpus.user), OWNED if corpus.user else DOCUMENTS
        page = await self._require_drive(corpus, api.documents(corpus.drive, query, size, token))
        failed: dict[str, BadData] = {}
        files = await self._reading.select(page.get("files", []), corpus, tree, selected, failed)
        return files, moved_on(page.get("nextPageToken"), token, "Google Drive"), failed

    # Changes

    async def start(self) -> Cursor:
        return {"tokens": await self._logs_now(await self._corpora())}

    async def _log_now(self, corpus: Corpus) -> str:
        """Return the present end of a log; empty for a user's that cannot be read."""
        request = self._api.acting_as(corpus.user).start_page_token(corpus.drive)
        try:
            return str((await self._require_drive(corpus, request))["startPageToken"])
        except (Denied, Misconfigured) as error:
            self._skip(corpus, error)
            return ""

    async def _logs_now(self, corpora: Sequence[Corpus]) -> dict[str, str]:
        tokens: dict[str, str] = {}
        for start in range(0, len(corpora), LOGS_AT_ONCE):
            batch = corpora[start : start + LOGS_AT_ONCE]
            ends = await gather_or_cancel(*map(self._log_now, batch))
            tokens |= {corpus.key: token for corpus, token in zip(batch, ends, strict=True)}
        return tokens

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        tokens: dict[str, str] = dict(cursor["tokens"])
        selected = await self._corpora()
        expired = await self._memory.expired(self._now())
        for start in range(0, len(expired), self._options.page_size):
            ids = expired[start : start + self._options.page_size]
            read = partial(self._reading.fetch, corpora=selected)
            async with aclosing(pages_of(ids, read, {"tokens": dict(tokens)})) as pages:
                async for page in pages:
                    yield page
        unread = [corpus for corpus in selected if not tokens.get(corpus.key)]
        began = await self._logs_now(unread)
        known = {corpus.key: tokens.get(corpus.key) or began[corpus.key] for corpus in selected}
        if tokens.keys() != known.keys() or any(began.values()):
            # A drive was added or removed: a sweep finds its files, and its log the changes from now on.
            tokens = known
            self._listener.sweep()
            yield Page((), {"tokens": dict(tokens)})
        for start in range(0, len(selected), LOGS_AT_ONCE):
            batch = [corpus for corpus in selected[start : start + LOGS_AT_ONCE] if tokens[corpus.key]]
            while batch:
                size = max(1, self._options.page_size // len(batch))
                read_at = datetime.now(UTC)
                logs = await gather_or_cancel(*(self._log(corpus, tokens[corpus.key], size) for corpus in batch))
                changes: list[tuple[Corpus, Json]] = []
                before = dict(tokens)
                for corpus, log in zip(batch, logs, strict=True):
                    changes += [(corpus, change) for change in log.get("changes", ())]
                    following = log.get("nextPageToken") or log.get("newStartPageToken")
                    tokens[corpus.key] = str(following or tokens[corpus.key])
                if changes or tokens != before:
                    changed = partial(self._changed, selected=selected)
                    async with aclosing(pages_of(changes, changed, {"tokens": dict(tokens)}, began=read_at)) as pages:
                        async for page in pages:
                            yield page
                batch = [corpus for corpus, log in zip(batch, logs, strict=True) if log.get("nextPageToken")]

    async def _log(self, corpus: Corpus, token: str, size: int) -> Json:
        """Return a page of a log of changes; an empty one for a user whose log cannot be read now."""
        try:
            return await self._require_drive(
                corpus, self._api.acting_as(corpus.user).changes(corpus.drive, token, size)
            )
        except (Denied, Misconfigured) as error:
            self._skip(corpus, error)
            return {}

    async def _changed(self, changes: Sequence[tuple[Corpus, Json]], selected: Sequence[Corpus]) -> list[Entry]:
        """Return the entries of changes of several corpora, by which a file may be in more than one."""
        entries: dict[str, Entry] = {}
        for corpus, some in groupby(changes, key=itemgetter(0)):
            read = await self._changed_in(corpus, [change for _, change in some], selected)
            entries |= {entry.external_id: entry for entry in read}
        return list(entries.values())

    async def _changed_in(self, corpus: Corpus, changes: Sequence[Json], selected: Sequence[Corpus]) -> list[Entry]:
        """Return the entries of changed files. ``removed`` means deleted, moved to another corpus, or no longer
        shared."""
        removed: dict[str, None] = {}
        present: dict[str, Json] = {}
        for change in changes:
            if change.get("changeType") == "drive":
                self._listener.groups([drive_tag(str(change["driveId"]))])
                self._listener.sweep()
                continue
            id_, file = str(change["fileId"]), change.get("file")
            try:
                with reading_data():
                    if corpus.user is not None and not await self._is_owned(id_, file, corpus.user):
                        continue
                    if change.get("removed") or file is None:
                        removed[id_] = None
                    elif file.get("mimeType") == FOLDER:
                        await self._folder_changed(file, self._api.acting_as(corpus.user))
                    else:
                        present[id_] = {**file, "id": id_}
            except BadData:
                removed[id_] = None  # it is read by its id
        current = [file for id_, file in present.items() if id_ not in removed]
        return [*await self._reading.fetch(list(removed), selected), *await self._reading.classify(current, selected)]

    async def _is_owned(self, id_: str, file: Json | None, user: str) -> bool:
        """Whether a user owns a file of their log of changes, or did so far. The log also names what others share with
        the user, which is in the logs of these."""
        return (file is not None and owner_of(file) == user) or await self._owners.of(id_) == user

    async def _folder_changed(self, folder: Json, api: Api) -> None:
        """Request a sweep: files below a changed folder may have other access or leave the corpus, and the log of
        changes need not name them."""
        if folder.get("trashed") or await api.has_children(folder):
            self._listener.sweep()

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        return await self._reading.fetch(external_ids, await self._corpora())

    # Memberships

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        pages = self.group_pages(None) if tags is None else self._memberships.pages(TagQueue(tags), nested=False)
        async for page in pages:
            for group in page.groups:
                yield group

    async def group_pages(self, cursor: Cursor | None) -> AsyncIterator[GroupPage]:
        queue = TagQueue(await self._memory.all_tags(self.slim)) if cursor is None else TagQueue.from_cursor(cursor)
        async for page in self._memberships.pages(queue, nested=True):
            yield page

    # Events

    async def on_event(self, request: Request) -> Reaction:
        return await self._channels.reaction(request)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        address = self._context.events_url

        async def renew() -> datetime | None:
            assert address is not None
            try:
                return await self._channels.renew(await self._corpora(), address)
            except (Retryable, Misconfigured, Answered) as error:  # polling continues in any case
                name = self._context.name
                log.warning("google_drive_problem_reported", source=name, code="channel", problem=str(error))
                return None

        await self._listener.run(react, self._memory, self._now, renew if address else None)
