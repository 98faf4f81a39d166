"""Defaults for sources: with them, ``list`` and ``read`` suffice. Inheriting from them is optional: the contract is
``connectors.source.Source``."""

from __future__ import annotations

import asyncio
import tomllib
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

from pydantic import BaseModel, ConfigDict, SecretStr

from connectors.portions import pages_of
from connectors.protocol import Problem
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Document,
    Entry,
    Gone,
    Group,
    Listed,
    MetadataKeys,
    Page,
    Reaction,
    Refused,
    Request,
    Unlisted,
    Unreadable,
)
from connectors.web import Denied, Missing, Web
from pipeline.core.errors import Misconfigured
from pipeline.core.identity import OWN_TAG
from pipeline.runtime.tasks import gather_or_cancel, in_threads

P = ParamSpec("P")
T = TypeVar("T")


class StrictOptions(BaseModel):
    """Settings of a source; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WebOptions(StrictOptions):
    """Settings of a source that reads over HTTP."""

    url: str
    """The address of the service, to which the paths of requests are appended."""
    token: SecretStr | None = None
    """Sent with every request as ``Authorization: Bearer``, if it is set."""


class TagsOptions(StrictOptions):
    """Settings that name the tags of readers."""

    acl_tags: tuple[str, ...] = ()
    """A reader needs any of these tags. Empty: nobody may read."""
    required_tags: tuple[str, ...] = ()
    """Tags that every reader must hold as well."""


class ReadersOptions(TagsOptions):
    """Settings of a source that does not know who may read its documents: they name the readers."""

    members: Mapping[str, list[str]] = {}
    """Principals by tag. A tag ``user:NAME`` belongs to the principal NAME alone, and is not listed here."""
    members_file: Path | None = None
    """A TOML file of principals by tag, read anew every time; it takes precedence over ``members``."""

    def members_by_tag(self) -> dict[str, list[str]]:
        """Return the principals of each tag. Blocks. Raises Misconfigured."""
        members = dict(self.members)
        if self.members_file is None:
            return members
        try:
            more = tomllib.loads(self.members_file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise Misconfigured(f"{self.members_file} cannot be read ({type(error).__name__})") from error
        if not all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in more.values()):
            raise Misconfigured(f'{self.members_file}: write tag = ["principal", …]')
        return members | more


class SmallSource:
    """A source for which ``list`` and ``read`` suffice.

    ``full`` reads what ``list`` lists, ``slim`` is ``list``, and ``fetch`` calls ``read``. A subclass overrides what
    its service does better: ``full`` where a page of the listing contains texts, ``start`` and ``changes`` where there
    is a log of changes (without one, each poll is a sweep), ``groups`` where the service has groups (the default are
    the members that ``ReadersOptions`` name), ``on_event`` and ``listen`` where it sends events.
    """

    Options: ClassVar[type[BaseModel]] = StrictOptions
    metadata_keys: ClassVar[MetadataKeys] = {}
    """The keys of the documents' metadata that people filter by, which ``penstock metadata adopt KIND`` declares."""
    web: Web
    """Set by sources that read over HTTP; closed with the source."""
    page_documents: int = 20
    """The number of documents in one page of ``full``: at most 50."""
    reads_at_once: int = 4
    """The number of calls of ``read`` that run concurrently within one ``fetch``."""
    blocking_threads: int | None = None
    """The number of threads of ``blocking``. None: one for each concurrent ``read``."""

    def __init__(self, options: Any, context: Context) -> None:
        self.options, self.context = options, context
        self._threads: ThreadPoolExecutor | None = None

    async def close(self) -> None:
        if (web := getattr(self, "web", None)) is not None:
            await web.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def list(self) -> AsyncIterator[Sequence[Listed | Document | Unreadable | Unlisted]]:
        """List all documents, in any order, and Unlisted for a part that cannot be listed; ends only when the listing
        is otherwise complete. Of a Document, only what Listed has is used: neither its title nor its content. Each
        yielded page was requested from the service after the page before it was yielded."""
        raise NotImplementedError("a source implements list and read, or overrides slim, full and fetch")

    async def read(self, external_id: str) -> Entry:
        """Read one document as it is now, with the access and revision that ``list`` shows. Gone, or Missing raised:
        the source says that it does not exist."""
        raise NotImplementedError("a source implements list and read, or overrides slim, full and fetch")

    async def blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that blocks, such as one of a vendor's SDK, in one of ``blocking_threads`` threads. Set the
        SDK's own timeout: a thread that waits cannot be ended."""
        if self._threads is None:
            threads = self.blocking_threads or self.reads_at_once
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix=self.context.name)
        return await in_threads(self._threads, function, *args, **kwargs)  # which counts texts, too (connectors.room)

    async def check(self) -> Sequence[Problem]:
        """Check that ``start`` succeeds; that the first listed document can be read, and shows the same access and
        revision; and that somebody holds the tags of the first page."""
        try:
            await self.start()
            if type(self).list is SmallSource.list:
                return []
            return await self._check_first_page()
        except (Denied, Missing, Misconfigured) as error:
            return [self._problem("denied" if isinstance(error, Denied) else "refused", str(error))]

    async def _check_first_page(self) -> Sequence[Problem]:
        async with aclosing(cast("Any", self.slim())) as pages:
            first: Sequence[Listed | Unlisted] = await anext(pages, ())
        page = [entry for entry in first if isinstance(entry, Listed)]
        if not page:
            return []
        tags = [tag for listed in page for tag in (*listed.acl_tags, *listed.required_tags)]
        if odd := next((type(tag).__name__ for tag in tags if not isinstance(tag, str)), None):
            return [self._problem("no_tag", f"a tag that list shows is {odd}: return text, or leave it out")]
        problems = []
        [entry] = await self.fetch([page[0].external_id])
        if not isinstance(entry, Gone) and (difference := _difference(page[0], entry)):
            problems.append(
                self._problem(
                    "listed_differently",
                    f"list shows another {difference} of the document {entry.external_id!r} than read: it would be"
                    " published again and again; return the same in both",
                )
            )
        if any(listed.revision is None for listed in page) and type(self).changes is SmallSource.changes:
            problems.append(
                self._problem("no_revision", "list shows no revision, and there are no changes: edits are not noticed")
            )
        if not any(listed.acl_tags for listed in page):
            problems.append(
                self._problem(
                    "nobody", f"nobody may read {page[0].external_id!r} and what is listed with it: set acl_tags"
                )
            )
        holders = "members or members_file" if isinstance(self.options, ReadersOptions) else "groups"
        held = {group.tag async for group in self.groups() if group.members or group.of}
        for tag in sorted(set(tags) - held):
            if not tag.startswith(OWN_TAG):
                problems.append(self._problem("nobody", f"nobody holds the tag {tag!r}: name its holders in {holders}"))
        return problems

    def _problem(self, code: str, message: str) -> Problem:
        return Problem(self.context.name, code, message)

    async def start(self) -> Cursor | None:
        return None

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        """Read what ``list`` lists, in the order of the ids, of which all are in memory."""
        ids: Any = []
        async with aclosing(cast("Any", self.slim())) as pages:
            async for page in pages:
                ids += [entry.external_id for entry in page if isinstance(entry, Listed)]
        ids = sorted(set(ids))
        start = bisect_right(ids, cursor["after"]) if cursor else 0
        for at in range(start, len(ids), self.page_documents):
            batch = ids[at : at + self.page_documents]
            async with aclosing(pages_of(batch, self.fetch, {"after": batch[-1]})) as portions:
                async for page in portions:
                    yield page

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        """Never called while ``start`` returns None."""
        nothing: tuple[Page, ...] = ()
        for page in nothing:
            yield page
        raise CursorExpired("the source has no log of changes any more")

    async def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        async with aclosing(cast("Any", self.list())) as pages:
            async for page in pages:
                yield [_without_text(entry) for entry in page]

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        at_once = asyncio.Semaphore(self.reads_at_once)

        async def entry(external_id: str) -> Entry:
            async with at_once:
                return await self._read_entry(external_id)

        return await gather_or_cancel(*map(entry, external_ids))

    async def _read_entry(self, external_id: str) -> Entry:
        try:
            return await self.read(external_id)
        except Missing:
            return Gone(external_id)

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        """Yield the members that the options name, if they are ReadersOptions."""
        members: Mapping[str, Sequence[str]] = {}
        if isinstance(self.options, ReadersOptions):
            members = await self.blocking(self.options.members_by_tag)
        for tag, names in sorted(members.items()):
            if tags is None or tag in tags:
                yield Group(tag, names)

    async def on_event(self, request: Request) -> Reaction:
        raise Refused("this connector accepts no events")

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        return None


class WebSource(SmallSource):
    """A ``SmallSource`` with the options ``url`` and ``token``, which reads over HTTP with ``web``."""

    Options: ClassVar[type[BaseModel]] = WebOptions

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        token = options.token.get_secret_value() if options.token else None
        self.web = Web(options.url, headers={"Authorization": f"Bearer {token}"} if token else {}, name=context.name)


def _without_text(entry: Listed | Document | Unreadable | Unlisted) -> Listed | Unlisted:
    if isinstance(entry, Listed | Unlisted):
        return entry
    return Listed(
        external_id=entry.external_id,
        acl_tags=entry.acl_tags,
        required_tags=entry.required_tags,
        revision=entry.revision,
        read_at=entry.read_at,
    )


def _difference(listed: Listed, entry: Document | Unreadable) -> str | None:
    """Name the first attribute in which a listing and a read of the same document differ, or None."""
    for name in ("acl_tags", "required_tags"):
        if set(getattr(listed, name)) != set(getattr(entry, name)):
            return name
    return "revision" if listed.revision != entry.revision else None
