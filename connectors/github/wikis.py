"""Wikis of GitHub: each is a git repository, ``OWNER/NAME.wiki.git``, whose pages have the access of its repository.

docs.github.com/communities/documenting-your-project-with-wikis. A wiki exists once it has a page, and no request but
git's says whether it does.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote

from pydantic import SecretStr

from connectors.git.client import Room, size
from connectors.git.options import DEFAULT_EXCLUDE, GitOptions
from connectors.git.source import Git
from connectors.github import queries
from connectors.github.access import Directory
from connectors.github.client import Api
from connectors.github.content import acl_tags, wiki_prefix
from connectors.github.options import GitHubOptions
from connectors.github.queries import Repository
from connectors.protocol import Problem
from connectors.set_aside import Failures
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Document,
    Entry,
    Gone,
    Listed,
    Memory,
    Page,
    Unlisted,
    Unreadable,
)
from connectors.web import Denied
from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Retryable
from pipeline.runtime.tasks import gather_or_cancel

T = TypeVar("T")
EXCLUDE = (*DEFAULT_EXCLUDE, "_Sidebar.*", "_Footer.*", "_Header.*")
"""Files of a wiki that are no pages: what is shown around each page."""
ENDINGS = (
    *("md", "mkd", "mkdn", "mdown", "markdown", "mediawiki", "wiki", "creole", "textile"),
    *("asciidoc", "adoc", "asc", "rst", "rest", "org", "rdoc", "pod"),
)
"""The endings of pages, whose names are their titles (github.com/gollum/gollum). Other files were uploaded."""
PROBED_AT_ONCE = 8
MAX_PROBED_BY_CHECK = 20
MAX_FILES = 20_000
"""The most files of a wiki. GitHub advises 5,000."""
MAX_HELD = 200_000
"""The most files of all wikis whose paths stay in memory between two readings."""


class Wikis:
    """The wikis of repositories, read with git. One that cannot be read is set aside by itself: nothing in it counts as
    deleted. Every method raises Retryable, and the errors of ``Api``."""

    def __init__(
        self, api: Api, options: GitHubOptions, context: Context, directory: Directory, failures: Failures
    ) -> None:
        self._api = api
        self._options = options
        self._context = context
        self._directory = directory
        self._failures = failures
        self._folder = context.folder / "wikis"
        self._sources: dict[int, tuple[GitOptions, Git]] = {}
        """By the number of the repository, in the order of their last use; with other options (a token expires) one is
        made anew."""
        self._exists: dict[int, bool] = {}
        """By the number of the repository: whether its wiki has a page, where that was tried."""
        self._errors: dict[int, PenstockError] = {}
        """By the number of the repository: the last error for which its wiki was set aside."""

    def expect(self, repository: int) -> None:
        """Record that a wiki has a page, of which an event was received."""
        self._exists[repository] = True

    async def existing(self, places: Sequence[Repository], *, again: bool) -> list[Repository]:
        """Return the repositories with a wiki that has a page. A wiki that cannot be read for another reason is one of
        them. again: whether to try also where there was none."""
        enabled = [place for place in places if place.has_wiki]

        async def probe(place: Repository) -> None:
            source = await self._source(place)
            try:
                self._exists[place.id] = await source.newest() is not None
            except (Misconfigured, Retryable):
                self._exists[place.id] = True

        await _concurrently(
            probe, [p for p in enabled if not self._exists.get(p.id) and (again or p.id not in self._exists)]
        )
        return [place for place in enabled if self._exists.get(place.id)]

    async def start(self, places: Sequence[Repository]) -> dict[str, Cursor]:
        """Return the cursors from which ``changes`` begins, by the number of the repository. A wiki that cannot be read
        has none: all of it is read when it can."""
        cursors = {}

        async def newest(place: Repository) -> None:
            source = await self._source(place)
            if (cursor := await self._isolated(place, source.newest())) is not None:
                cursors[str(place.id)] = cursor

        await _concurrently(newest, await self.existing(places, again=True))
        return cursors

    async def read_page(self, place: Repository, after: str | None) -> tuple[list[Entry], str | None] | None:
        """Return some pages after an id of git's, and the id after which to continue, None where there are no more;
        None: the wiki is set aside."""

        async def read() -> tuple[list[Entry], str | None]:
            source = await self._source(place)
            async with aclosing(cast("Any", source.full(None if after is None else {"after": after}))) as pages:
                page: Page | None = await anext(pages, None)
            if page is None or page.cursor is None:
                return [], None
            return await self._entries(place, page.entries), str(page.cursor["after"])

        return await self._isolated(place, read())

    async def slim(self, places: Sequence[Repository]) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        """List the pages of all wikis, and remove the mirrors of others."""
        await asyncio.to_thread(self._remove_others, {place.id for place in places if place.has_wiki})
        for place in await self.existing(places, again=True):
            pages = self._listed(place)
            while page := await self._isolated(place, anext(pages, [])):
                yield page
            if page is None:
                reason = str(self._errors[place.id])
                yield [Unlisted(part=f"wiki of {place.name}", reason=reason, id_prefix=wiki_prefix(place.id))]

    async def changes(
        self, places: Sequence[Repository], cursors: Mapping[str, Cursor]
    ) -> AsyncIterator[tuple[list[Entry], Mapping[str, Cursor]]]:
        """Yield what was changed in the wikis that are known, with the cursors after it. A sweep finds new wikis."""
        present = {str(place.id): place for place in places if place.has_wiki}
        cursors = {number: cursor for number, cursor in cursors.items() if number in present}
        for number, place in present.items():
            if number not in cursors and not self._exists.get(place.id):
                continue
            changes = self._changed(place, cursors.get(number))
            while (read := await self._isolated(place, anext(changes, None))) is not None:
                entries, cursor = read
                cursors = {**cursors, number: cursor}
                yield entries, cursors

    async def fetch(self, repository: int, pages: Sequence[str]) -> list[Entry]:
        """Read pages of a repository's wiki by git's ids. Those of a wiki that was never read are gone."""
        node = await self._directory.node(repository) if "wikis" in self._options.kinds else None
        place = None if node is None else await self._current(node)
        if place is None or not self._directory.is_selected(place):
            return [Gone(wiki_prefix(repository) + page) for page in pages]

        async def read() -> list[Entry]:
            source = await self._source(place)
            is_there = await source.newest() is not None
            entries = await source.fetch(pages) if is_there else [Gone(page) for page in pages]
            return await self._entries(place, entries)

        if (entries := await self._isolated(place, read())) is not None:
            return entries
        return [
            Unreadable(
                external_id=wiki_prefix(repository) + page,
                code="unavailable",
                message=f"{self._errors[repository]}: it is tried again with every sweep",
                acl_tags=acl_tags(place, self._options.public_acl_tags),
            )
            for page in pages
        ]

    async def check(self) -> list[Problem]:
        if shutil.which("git") is None:
            return [Problem("kinds", "missing", "git, which reads wikis, is not on PATH: install it (2.35 or newer)")]
        places = [place for place in self._directory.known.values() if place.has_wiki][:MAX_PROBED_BY_CHECK]
        if not places or await self.existing(places, again=True):
            return []
        message = f"none of {len(places)} wikis can be read: grant the credential Contents: read, if they have pages"
        return [Problem("kinds", "permission", message)]

    async def _listed(self, place: Repository) -> AsyncIterator[list[Listed | Unlisted]]:
        async for page in (await self._source(place)).slim():
            current = await self._still(place)
            if current is None:
                return
            tags, prefix = acl_tags(current, self._options.public_acl_tags), wiki_prefix(place.id)
            yield [
                replace(entry, part=f"{entry.part} of the wiki of {current.name}")
                if isinstance(entry, Unlisted)
                else replace(entry, external_id=prefix + entry.external_id, acl_tags=tags)
                for entry in page
            ]

    async def _changed(self, place: Repository, cursor: Cursor | None) -> AsyncIterator[tuple[list[Entry], Cursor]]:
        """Yield what was changed since the cursor, and the cursor after it. None: everything. If the history was
        replaced by another, everything is read; a sweep finds what is gone."""
        source = await self._source(place)
        if cursor is not None and await source.newest() == cursor:
            return
        begin: Cursor = {"commit": None} if cursor is None else cursor
        try:
            async for page in source.changes(begin):
                yield await self._entries(place, page.entries), page.cursor or begin
        except CursorExpired:
            newest = await source.start()
            async for page in source.full(None):
                yield await self._entries(place, page.entries), begin
            yield [], newest

    async def _isolated(self, place: Repository, reading: Awaitable[T]) -> T | None:
        """Return what was read of a wiki, or None if it is set aside: only a person can help, or it fails while other
        things can be read. Raises Retryable."""
        name = wiki_prefix(place.id)
        try:
            result = await reading
        except Misconfigured as error:
            self._errors[place.id] = error
            return None
        except Denied as error:
            self._directory.set_aside(place.name, error)
            self._errors[place.id] = error
            return None
        except Retryable as error:
            if isinstance(error, Deferred) or not self._failures.fail(name, error):
                raise
            self._errors[place.id] = error
            return None
        finally:
            self._forget_unused()
        self._failures.succeed(name)
        return result

    def _forget_unused(self) -> None:
        """Keep to MAX_HELD, beginning with the wikis that were not used for longest."""
        sources = [source for _, source in self._sources.values()]
        held = sum(source.held for source in sources)
        for source in sources:
            if held <= MAX_HELD:
                return
            held -= source.held
            source.forget()

    async def _source(self, place: Repository) -> Git:
        name = f"{self._options.website}/{place.name}"
        options = GitOptions(
            url=f"{name}.wiki.git",
            token=SecretStr(await self._api.token()),
            ca_file=self._options.ca_file,
            max_files=MAX_FILES,
            exclude=list(EXCLUDE),
            source_url=f"{name}/wiki/{{path}}",
        )
        made = self._sources.pop(place.id, None)
        if made is None or made[0] != options:
            folder, memory = self._folder / str(place.id), WikiMemory(self._context.memory, place.id)
            room = Room(lambda: self._options.max_wikis_bytes - self._taken(folder), "max_wikis_bytes")
            made = options, Git(options, replace(self._context, folder=folder, memory=memory), room)
        self._sources[place.id] = made
        return made[1]

    def _taken(self, by_others_than: Path) -> int:
        """Return the bytes on disk of the mirrors, except one. Blocks."""
        return sum(size(folder) for folder in self._folder.iterdir() if folder != by_others_than)

    async def _entries(self, place: Repository, entries: Sequence[Entry]) -> list[Entry]:
        """Return git's entries as those of a wiki, with the access that its repository has now."""
        current = await self._still(place)
        if current is None:
            return [Gone(wiki_prefix(place.id) + entry.external_id) for entry in entries]
        return [entry_of(current, entry, self._options) for entry in entries]

    async def _current(self, node: str) -> Repository | None:
        """Return a repository as it is now; None: there is none that the credential sees, or its wiki is off."""
        current = await queries.repository(self._api, node)
        return current if current is not None and current.has_wiki and not current.is_disabled else None

    async def _still(self, place: Repository) -> Repository | None:
        """Return a repository as it is now, after its wiki was read by its name. Raises Retryable if it has another
        name: what was read may be of another repository, which has the former name now, and other readers."""
        current = await self._current(place.node)
        if current is not None and current.name != place.name:
            raise Retryable(f"{place.name} was renamed while its wiki was read: it is read again by its new name")
        return current

    def _remove_others(self, repositories: Collection[int]) -> None:
        """Remove the mirrors of wikis that are no longer read. Blocks."""
        for id in self._sources.keys() - repositories:
            self._sources.pop(id, None)
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            if folder.name not in map(str, repositories):
                shutil.rmtree(folder, ignore_errors=True)


async def _concurrently(act: Callable[[Repository], Awaitable[None]], places: Sequence[Repository]) -> None:
    """Do the same for several repositories, for PROBED_AT_ONCE of them at a time."""
    at_once = asyncio.Semaphore(PROBED_AT_ONCE)

    async def limited(place: Repository) -> None:
        async with at_once:
            await act(place)

    await gather_or_cancel(*map(limited, places))


class WikiMemory:
    """The memory of one wiki, within that of the instance."""

    def __init__(self, memory: Memory, repository: int) -> None:
        self._memory = memory
        self._prefix = f"wiki:{repository}:"

    async def get(self, name: str) -> Any | None:
        return await self._memory.get(self._prefix + name)

    async def put(self, name: str, value: Any | None) -> None:
        await self._memory.put(self._prefix + name, value)


def entry_of(place: Repository, entry: Entry, options: GitHubOptions) -> Entry:
    """Return an entry of git as one of a repository's wiki."""
    id = wiki_prefix(place.id) + entry.external_id
    if isinstance(entry, Gone):
        return Gone(id)
    tags = acl_tags(place, options.public_acl_tags)
    if not isinstance(entry, Document):
        return replace(entry, external_id=id, acl_tags=tags)
    title, address = _page(entry)
    metadata: Mapping[str, str] = {"kind": "wiki page", "repository": place.name}
    return replace(
        entry,
        external_id=id,
        title=f"{title} · {place.name} wiki",
        acl_tags=tags,
        source_url=f"{options.website}/{place.name}/wiki/{address}",
        metadata=dict(metadata),
    )


def _page(entry: Document) -> tuple[str, str]:
    """Return the title of a file of a wiki, and its address below ``/wiki/``: folders are not part of a page's."""
    path = str(entry.metadata["path"])
    name, _, ending = path.rpartition("/")[2].rpartition(".")
    if name and ending.lower() in ENDINGS:
        return " ".join(name.replace("-", " ").split()) or name, quote(name, safe="")
    return entry.title, quote(path)
