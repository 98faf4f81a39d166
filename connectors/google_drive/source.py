"""Google Drive as a source: shared drives, folders and My Drive, read through a service account, and a check of what
the account lacks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from datetime import UTC, datetime
from typing import Any, ClassVar

import structlog

from connectors.access_memory import AccessMemory, Listener
from connectors.google_drive.access import Memberships, Sharing, drive_tag
from connectors.google_drive.changes import Channels
from connectors.google_drive.client import FOLDER, LOCATION_FIELDS, Api, Json
from connectors.google_drive.content import Contents
from connectors.google_drive.options import GoogleDriveOptions
from connectors.google_drive.reading import Corpus, Reading, Tree, corpora, missing_drive, missing_folder
from connectors.protocol import Problem
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Entry,
    Group,
    Listed,
    Page,
    Playground,
    Reaction,
    Request,
)
from connectors.web import Answered, Denied, Limits, Missing
from pipeline.core.errors import Misconfigured, Retryable


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


def utc_now() -> datetime:
    return datetime.now(UTC)


class GoogleDrive:
    """``connectors.source.Source``. A document is a file; its external id is the file's id."""

    Options: ClassVar[type[GoogleDriveOptions]] = GoogleDriveOptions

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
        contents = Contents(self._api, context.folder / "downloads", options.max_bytes)
        sharing = Sharing(options.anyone_tag, options.domain_links)
        self._reading = Reading(self._api, contents, self._memory, sharing, self._now, self._report_hidden)

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
        return await corpora(self._options, self._api)

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
        remaining = list(await self._corpora())
        token: str | None = None
        if cursor is not None:
            at, token = cursor["corpus"], cursor["page"]
            if token and at not in {corpus.key for corpus in remaining}:
                raise CursorExpired(f"{at} is no longer configured")
            remaining = [corpus for corpus in remaining if at is not None and corpus.key >= at]
        while remaining:
            corpus = remaining.pop(0)
            following = remaining[0].key if remaining else None
            async with aclosing(self._files(corpus, self._options.page_size, token)) as pages:
                async for page, after in pages:
                    place = corpus.key if after else following
                    yield Page(await self._reading.entries(page, bulk=True), {"corpus": place, "page": after})
            token = None

    async def slim(self) -> AsyncGenerator[Sequence[Listed], None]:
        async with self._memory.listing():
            for corpus in await self._corpora():
                async with aclosing(self._files(corpus, self._options.sweep_page_size, None)) as pages:
                    try:
                        async for page, _ in pages:
                            yield await self._reading.listed(page)
                    except CursorExpired as error:  # a listing has no cursor: it begins again
                        raise Retryable(f"{error}: the listing starts again", retry_after=RELIST_SECONDS) from error

    async def _files(
        self, corpus: Corpus, size: int, token: str | None
    ) -> AsyncGenerator[tuple[list[Json], str | None], None]:
        """Yield pages of documents, each with the token of the next page."""
        tree = Tree(self._api)
        if corpus.folders is not None:
            await self._require_drive(corpus, tree.load(corpus))
        while True:
            page = await self._require_drive(corpus, self._api.documents(corpus.drive, DOCUMENTS, size, token))
            token = page.get("nextPageToken")
            yield await self._reading.select(page.get("files", []), corpus, tree), token
            if not token:
                return

    # Changes

    async def start(self) -> Cursor:
        return {"tokens": {corpus.key: await self._log_now(corpus) for corpus in await self._corpora()}}

    async def _log_now(self, corpus: Corpus) -> str:
        return str((await self._require_drive(corpus, self._api.start_page_token(corpus.drive)))["startPageToken"])

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        tokens: dict[str, str] = dict(cursor["tokens"])
        selected = await self._corpora()
        expired = await self._memory.expired(self._now())
        for start in range(0, len(expired), self._options.page_size):
            ids = expired[start : start + self._options.page_size]
            yield Page(await self._reading.fetch(ids, selected), {"tokens": dict(tokens)})
        if tokens.keys() != {corpus.key for corpus in selected}:
            # A drive was added or removed: a sweep finds its files, and its log the changes from now on.
            tokens = {corpus.key: tokens.get(corpus.key) or await self._log_now(corpus) for corpus in selected}
            self._listener.sweep()
            yield Page((), {"tokens": dict(tokens)})
        for corpus in selected:
            following: str | None = tokens[corpus.key]
            while following:
                page = await self._require_drive(
                    corpus, self._api.changes(corpus.drive, following, self._options.page_size)
                )
                following = page.get("nextPageToken")
                entries = await self._changed(page.get("changes", ()), selected)
                token = str(following or page.get("newStartPageToken") or tokens[corpus.key])
                if entries or token != tokens[corpus.key]:
                    tokens[corpus.key] = token
                    yield Page(entries, {"tokens": dict(tokens)})

    async def _changed(self, changes: Sequence[Json], selected: Sequence[Corpus]) -> list[Entry]:
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
            if change.get("removed") or file is None:
                removed[id_] = None
            elif file.get("mimeType") == FOLDER:
                await self._folder_changed(file)
            else:
                present[id_] = file
        current = [file for id_, file in present.items() if id_ not in removed]
        return [*await self._reading.fetch(list(removed), selected), *await self._reading.classify(current, selected)]

    async def _folder_changed(self, folder: Json) -> None:
        """Request a sweep: files below a changed folder may have other access or leave the corpus, and the log of
        changes need not name them."""
        if folder.get("trashed") or await self._api.has_children(folder):
            self._listener.sweep()

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        return await self._reading.fetch(external_ids, await self._corpora())

    # Memberships

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        nested = tags is None
        if tags is None:
            tags, complete = await self._memory.tags()
            if not complete:
                async with aclosing(self.slim()) as pages:
                    async for _ in pages:
                        pass
                tags, _ = await self._memory.tags()
        async for group in self._memberships.groups(tags, nested=nested):
            yield group

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
