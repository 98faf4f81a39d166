"""Google Drive as a source: shared drives, folders and My Drive, through a service account; and a check of what is
missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from datetime import UTC, datetime
from typing import Any, ClassVar

import structlog

from connectors.google_drive.access import Holders, Sharing, drive_tag
from connectors.google_drive.changes import Channels, Listener
from connectors.google_drive.client import FOLDER, PLACE, Api, Json
from connectors.google_drive.content import Contents
from connectors.google_drive.options import GoogleDriveOptions
from connectors.google_drive.reading import Corpus, Kept, Reading, Tree, corpora, missing_drive, missing_folder
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
    """Raises Retryable when Google cannot be asked now."""
    try:
        await api.drive_auth.token()
        await api.start_page_token(None)
    except (Misconfigured, Answered) as error:
        yield Problem(name, "credential", str(error))
        return  # nothing else can be asked
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
            f"drives: the members of {drive} may not be listed ({error.code}), so nobody could read anything of it:"
            f" give {api.email} (or the subject) a higher role there",
        )
    return None


async def _folder(folder: str, api: Api) -> Problem | None:
    try:
        place = await api.file(folder, f"{PLACE},capabilities(canShare)")
    except Missing:
        return Problem(folder, "folder", missing_folder(folder, api))
    if place.get("mimeType") != FOLDER:
        return Problem(folder, "folder", f"folders: {folder} is no folder")
    if not place.get("driveId") and not (place.get("capabilities") or {}).get("canShare"):
        return Problem(
            folder,
            "permissions",
            f"folders: {folder} is in somebody's My Drive, where only those who may share see who may read: make"
            f" {api.email} (or the subject) an Editor of it, or nobody will find anything of it",
        )
    return None


async def _directory(options: GoogleDriveOptions, api: Api, name: str) -> AsyncIterator[Problem]:
    who = options.directory_subject or options.subject or api.email
    try:
        await api.directory_auth.token()
    except Misconfigured as error:
        yield Problem(name, "directory", f"{error}; without it nobody reads through groups (or set directory = false)")
        return
    for domain in options.domains:
        try:
            await _first(api.users(domain))
        except (Answered, Misconfigured) as error:
            yield Problem(domain, "directory", f"domains: {who} may not list the users of {domain}: {error}")
    try:
        # No group is known here; whoever may ask is told that this one does not exist.
        await _first(api.members(f"penstock-check@{who.partition('@')[2]}"))
    except Missing:
        return
    except (Answered, Misconfigured) as error:
        yield Problem(name, "directory", f"{who} may not see who is in a group (Groups > Read): {error}")


async def _first(found: AsyncIterator[Any]) -> None:
    step: Awaitable[Any] = anext(found, None)
    await step


log = structlog.get_logger()

AGAIN_SECONDS = 1.0
"""Until a listing that lost its page token begins again."""
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
        """Raises Misconfigured. now: by which grants and channels end."""
        self._options = options
        self._context = context
        self._now = now
        self._api = Api(options, context.name, limits)
        self._told: dict[str, str] = {}
        self._listener = Listener()
        self._kept = Kept(context.memory, self._listener.groups)
        self._channels = Channels(self._api, context.memory, self._now)
        self._holders = Holders(self._api, options, self._now, self._tell)
        contents = Contents(self._api, context.folder / "downloads", options.max_bytes)
        sharing = Sharing(options.anyone_tag, options.domain_links)
        self._reading = Reading(self._api, contents, self._kept, sharing, self._now, self._unknown)

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        from connectors.google_drive.playground import playing

        return playing()

    async def close(self) -> None:
        await self._api.close()

    def _tell(self, code: str, message: str) -> None:
        """Once, in the log; ``check`` shows it as well."""
        if self._told.get(code) != message:
            self._told[code] = message
            log.warning("google_drive", source=self._context.name, code=code, problem=message)

    def _unknown(self) -> None:
        self._tell(
            "permissions_hidden",
            "files whose sharing the account may not see are published for nobody: outside of shared drives it must be"
            " an Editor of them",
        )

    async def check(self) -> Sequence[Problem]:
        missing = [problem async for problem in problems(self._options, self._api, self._context.name)]
        return [*missing, *(Problem(self._context.name, code, text) for code, text in self._told.items())]

    async def _corpora(self) -> Sequence[Corpus]:
        return await corpora(self._options, self._api)

    async def _asked(self, corpus: Corpus, request: Awaitable[Json]) -> Json:
        """Of a shared drive that is not there (any more) nothing may be concluded."""
        try:
            return await request
        except Missing as error:
            raise Misconfigured(missing_drive(corpus.key, self._api)) from error

    # Everything

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        """In Google's order, one corpus after the other. Whatever moves meanwhile is in the log of changes."""
        found = list(await self._corpora())
        token: str | None = None
        if cursor is not None:
            at, token = cursor["corpus"], cursor["page"]
            if token and at not in {corpus.key for corpus in found}:
                raise CursorExpired(f"{at} is no longer among what is to be read")
            found = [corpus for corpus in found if at is not None and corpus.key >= at]
        while found:
            corpus = found.pop(0)
            following = found[0].key if found else None
            async with aclosing(self._files(corpus, self._options.page_size, token)) as pages:
                async for page, after in pages:
                    place = corpus.key if after else following
                    yield Page(await self._reading.entries(page, bulk=True), {"corpus": place, "page": after})
            token = None

    async def slim(self) -> AsyncGenerator[Sequence[Listed], None]:
        async with self._kept.listing():
            for corpus in await self._corpora():
                async with aclosing(self._files(corpus, self._options.sweep_page_size, None)) as pages:
                    try:
                        async for page, _ in pages:
                            yield await self._reading.listed(page)
                    except CursorExpired as error:  # a listing has no cursor of ours: it begins again
                        raise Retryable(f"{error}: the listing begins again", retry_after=AGAIN_SECONDS) from error

    async def _files(
        self, corpus: Corpus, size: int, token: str | None
    ) -> AsyncGenerator[tuple[list[Json], str | None], None]:
        """Pages of documents, each with the token of the one after it."""
        tree = Tree(self._api)
        if corpus.folders is not None:
            await self._asked(corpus, tree.load(corpus))
        while True:
            page = await self._asked(corpus, self._api.documents(corpus.drive, DOCUMENTS, size, token))
            token = page.get("nextPageToken")
            yield await self._reading.wanted(page.get("files", []), corpus, tree), token
            if not token:
                return

    # What changed

    async def start(self) -> Cursor:
        return {"tokens": {corpus.key: await self._log_now(corpus) for corpus in await self._corpora()}}

    async def _log_now(self, corpus: Corpus) -> str:
        return str((await self._asked(corpus, self._api.start_page_token(corpus.drive)))["startPageToken"])

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        tokens: dict[str, str] = dict(cursor["tokens"])
        found = await self._corpora()
        ended = await self._kept.due(self._now())
        for start in range(0, len(ended), self._options.page_size):
            ids = ended[start : start + self._options.page_size]
            yield Page(await self._reading.fetched(ids, found), {"tokens": dict(tokens)})
        if tokens.keys() != {corpus.key for corpus in found}:
            # A drive came or went: what is in it is found by the sweep, what happens from now on by its log.
            tokens = {corpus.key: tokens.get(corpus.key) or await self._log_now(corpus) for corpus in found}
            self._listener.sweep()
            yield Page((), {"tokens": dict(tokens)})
        for corpus in found:
            following: str | None = tokens[corpus.key]
            while following:
                page = await self._asked(corpus, self._api.changes(corpus.drive, following, self._options.page_size))
                following = page.get("nextPageToken")
                entries = await self._changed(page.get("changes", ()), found)
                token = str(following or page.get("newStartPageToken") or tokens[corpus.key])
                if entries or token != tokens[corpus.key]:
                    tokens[corpus.key] = token
                    yield Page(entries, {"tokens": dict(tokens)})

    async def _changed(self, changes: Sequence[Json], found: Sequence[Corpus]) -> list[Entry]:
        """A change says which file to look at. ``removed``: deleted, moved to another log, or no longer ours."""
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
        there = [file for id_, file in present.items() if id_ not in removed]
        return [*await self._reading.fetched(list(removed), found), *await self._reading.judged(there, found)]

    async def _folder_changed(self, folder: Json) -> None:
        """What is below it may be readable by others now, or ours no longer; its own log need not tell."""
        if folder.get("trashed") or await self._api.has_children(folder):
            self._listener.sweep()

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        return await self._reading.fetched(external_ids, await self._corpora())

    # Who

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        inner = tags is None
        if tags is None:
            tags, complete = await self._kept.tags()
            if not complete:
                async with aclosing(self.slim()) as pages:
                    async for _ in pages:
                        pass
                tags, _ = await self._kept.tags()
        async for group in self._holders.of(tags, inner=inner):
            yield group

    # Events

    async def on_event(self, request: Request) -> Reaction:
        return await self._channels.reaction(request)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        address = self._context.events_url

        async def renew() -> datetime | None:
            assert address is not None
            return await self._channels.renew(await self._corpora(), address)

        await self._listener.run(react, self._kept, self._now, renew if address else None, source=self._context.name)
