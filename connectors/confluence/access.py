"""The members of the principals of spaces, groups and restrictions, named as the whole company knows them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import structlog

from connectors.atlassian import Person, has_address, principal
from connectors.confluence.model import Position, Readers, Site, Space, group_tag, restriction_tag, space_tag
from connectors.confluence.options import ConfluenceOptions
from connectors.errors import BadData
from connectors.runner.guard import require_readable
from connectors.set_aside import Failures, SetAside, may_be_set_aside
from connectors.source import Cursor, CursorExpired, Group, GroupPage
from pipeline.core.errors import PenstockError
from pipeline.runtime.tasks import gather_or_cancel

T = TypeVar("T")
log = structlog.get_logger()
MAX_CONCURRENT_READS = 32
"""Tags whose holders, and spaces whose restrictions, are read at the same time: more than requests are sent, so that a
slow response delays few others."""


class GroupReader:
    """Reads the holders of tags. A tag whose holders cannot be read is left out, which means that it has none."""

    def __init__(self, site: Site, options: ConfluenceOptions, set_aside: SetAside) -> None:
        self._site = site
        self._options = options
        self._set_aside = set_aside
        self._failures = Failures()
        self._unreadable: dict[str, str] = {}
        """The reasons, by what the last complete listing could not read."""
        self._known: Collection[str] = ()
        """The groups of the last complete listing."""

    def some(self, tags: Collection[str]) -> AsyncIterator[GroupPage]:
        """Yield the holders of these tags, and of each group that they name: a group in a restriction may never have
        been listed. Raises Retryable at the end while a failure may still pass."""
        return self._pages(_Work(sorted(set(tags)), {}), {})

    async def pages(self, cursor: Cursor | None) -> AsyncIterator[GroupPage]:
        """Yield the holders of all tags, in pages. The cursor of a page holds what is still to be read, and what could
        not be read and may be later. Raises as ``some`` does, and CursorExpired."""
        if cursor is None:
            self._unreadable = {}
            spaces = list(await self._site.spaces())
            work = _Work([space_tag(key) for key in spaces], dict.fromkeys(spaces))
        else:
            work = _Work.from_cursor(cursor)
        known = set[str]()
        async for page in self._pages(work, self._unreadable):
            known.update(group.tag for group in page.groups if _is_group(group.tag))
            yield page
        self._known = known if cursor is None else {*self._known, *known}
        self._set_aside.replace("access", self._unreadable)

    async def _pages(self, work: _Work, unreadable: dict[str, str]) -> AsyncIterator[GroupPage]:
        run = _Run(self._failures, unreadable)
        spaces = await self._site.spaces()
        if work.read:  # what is left may be nothing but failures
            self._failures.succeed()
        named = dict.fromkeys(tag for tag in work.tags if _is_group(tag))
        work.tags = [tag for tag in work.tags if tag not in named]
        read = set[str]()

        def page(groups: Sequence[Group]) -> GroupPage:
            tags_of = (tag for group in groups for tag in group.of)
            named.update(dict.fromkeys(tag for tag in tags_of if _is_group(tag) and tag not in read))
            tags, listings = [*work.tags, *named, *run.failed_tags], work.listings | dict.fromkeys(run.failed_listings)
            work.read += len(groups)
            return GroupPage(groups, {"tags": tags, "listings": listings, "read": work.read})

        async def members(tags: Sequence[str]) -> AsyncIterator[GroupPage]:
            for tag in tags:
                named.pop(tag, None)
            for start in range(0, len(tags), MAX_CONCURRENT_READS):
                batch, work.tags = tags[start : start + MAX_CONCURRENT_READS], [*tags[start + MAX_CONCURRENT_READS :]]
                read.update(batch)
                yield page(await self._read([self._members(tag, n) for n, tag in enumerate(batch, start)], run))

        while work.tags:
            batch, work.tags = work.tags[:MAX_CONCURRENT_READS], work.tags[MAX_CONCURRENT_READS:]
            yield page(await self._read([self._holders(tag, spaces) for tag in batch], run))
        if self._known:  # what a new group may read is known as soon as what other groups may
            async for groups in members(sorted(named.keys() - set(self._known))):
                yield groups
        seen: set[str] = set()
        while work.listings:
            listed = await self._restricted(work, spaces, run)
            restrictions = [
                _Holders(
                    restriction_tag(id_), f"the view restriction of {id_}", partial(self._restriction, id_, readers)
                )
                for id_, readers in listed.items()
                if id_ not in seen
            ]
            seen.update(listed)
            for start in range(0, max(1, len(restrictions)), MAX_CONCURRENT_READS):
                work.tags = [holders.tag for holders in restrictions[start + MAX_CONCURRENT_READS :]]
                yield page(await self._read(restrictions[start : start + MAX_CONCURRENT_READS], run))
        async for groups in members(sorted(named)):
            yield groups
        run.finish(work.read)

    def _holders(self, tag: str, spaces: Mapping[str, Space]) -> _Holders | None:
        """Return the holders of a space or a restriction; None: there is no such space, or nothing else to read."""
        kind, _, name = tag.partition(":")
        if kind == "space" and name in spaces:
            return _Holders(tag, f"who may view space {name}", partial(self._site.readers, spaces[name]))
        if kind == "restriction" and name.isdigit():
            return _Holders(tag, f"the view restriction of {name}", partial(self._restriction, name, None))
        return None

    def _members(self, tag: str, number: int) -> _Holders:
        name = tag.removeprefix("group:")
        label = f"members of group {name}" if name.isprintable() and len(name) < 200 else f"members of group {number}"

        async def read() -> Readers:
            return Readers(await self._site.members(name))

        return _Holders(tag, label, read)

    async def _read(self, requests: Sequence[_Holders | None], run: _Run) -> list[Group]:
        """Return the holders of these tags, read at the same time. A restriction that names nobody is left out."""

        async def group(request: _Holders) -> Group | None:
            readers = await run.read(request.name, request.read, tag=request.tag)
            return None if readers is None else await _group(self._site, self._options, request.tag, readers)

        read = await gather_or_cancel(*(group(request) for request in requests if request is not None))
        return [
            group
            for group in read
            if group is not None and (group.members or group.of or not group.tag.startswith("restriction:"))
        ]

    async def _restriction(self, content_id: str, included: Readers | None) -> Readers:
        return included if included is not None else await self._site.restriction(content_id)

    async def _restricted(self, work: _Work, spaces: Mapping[str, Space], run: _Run) -> Mapping[str, Readers | None]:
        """Return the next ids of restricted contents of MAX_CONCURRENT_READS spaces, each with its readers where the
        listing includes all of them."""

        async def page(key: str, position: Position | None) -> tuple[Mapping[str, Readers | None], Position | None]:
            if key not in spaces:
                return {}, None
            read = partial(self._site.restrictions, spaces[key], position)
            return await run.read(f"view restrictions of space {key}", read, listing=key) or ({}, None)

        batch = dict(islice(work.listings.items(), MAX_CONCURRENT_READS))
        pages = await gather_or_cancel(*(page(key, position) for key, position in batch.items()))
        following = dict(zip(batch, (position for _, position in pages), strict=True))
        work.listings = {
            key: position for key, position in (work.listings | following).items() if key not in batch or position
        }
        return {id_: readers for listed, _ in pages for id_, readers in listed.items()}


@dataclass(slots=True)
class _Work:
    """The tags and listings that are still to be read: the content of a cursor."""

    tags: list[str]
    listings: dict[str, Position | None]
    """Where the listing of restrictions continues, by the key of its space; None: at its beginning."""
    read: int = 0
    """The number of groups that were read so far."""

    @classmethod
    def from_cursor(cls, cursor: Cursor) -> _Work:
        """Raises CursorExpired for a cursor in another format."""
        try:
            tags, listings = list(map(str, cursor["tags"])), cursor["listings"].items()
            return cls(tags, {str(key): position for key, position in listings}, int(cursor["read"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CursorExpired("the cursor of groups is not in this connector's format: all are read again") from error


def _is_group(tag: str) -> bool:
    return tag.startswith("group:")


@dataclass(frozen=True, slots=True)
class _Holders:
    """The holders of a tag, to be read. name: what the status calls them."""

    tag: str
    name: str
    read: Callable[[], Awaitable[Readers]]


class _Run:
    """One reading of groups: what could not be read, and the first failure that may pass."""

    def __init__(self, failures: Failures, unreadable: dict[str, str]) -> None:
        """unreadable: receives the reasons, by what nobody may read until then."""
        self._failures = failures
        self._unreadable = unreadable
        self._passing: PenstockError | None = None
        self._of_data: list[BadData] = []
        self.failed_tags: list[str] = []
        """Tags that could not be read, and may be later."""
        self.failed_listings: list[str] = []
        """Spaces of which the same is true."""

    async def read(
        self, name: str, request: Callable[[], Awaitable[T]], *, tag: str | None = None, listing: str | None = None
    ) -> T | None:
        """Return the response, or None after a failure of this request alone. tag, listing: what is then still to be
        read."""
        try:
            response = await request()
        except PenstockError as error:
            if not may_be_set_aside(error):
                raise
            if isinstance(error, BadData):
                self._of_data.append(error)
            if self._failures.fail(name, error):
                self._unreadable[name] = f"{error}; until then it admits nobody"
                log.warning("access_unreadable", resource=name, error=str(error))
            else:
                self._passing = self._passing or error
                self.failed_tags += [] if tag is None else [tag]
                self.failed_listings += [] if listing is None else [listing]
            return None
        self._failures.succeed(name)
        return response

    def finish(self, read: int) -> None:
        """read: the number of groups that were read, also before an interruption."""
        require_readable("groups", self._of_data, read)
        if self._passing is not None:
            raise self._passing


async def _group(site: Site, options: ConfluenceOptions, tag: str, readers: Readers) -> Group:
    parents = {group_tag(name) for name in readers.groups}
    if readers.anonymous and options.anonymous_tag:
        parents.add(options.anonymous_tag)
    if readers.licensed and options.licensed_tag:
        parents.add(options.licensed_tag)
    return Group(tag, sorted(await _principals(site, options, readers.people)), sorted(parents))


async def _principals(site: Site, options: ConfluenceOptions, people: Sequence[Person]) -> set[str]:
    """Return the principals of people. Responses describe people more or less fully, so those without an address are
    requested once more."""
    unknown = [person.id for person in people if person.id and not has_address(person, options)]
    complete = await site.people(unknown, fresh=True) if unknown else {}
    return {principal(complete.get(person.id, person), options) for person in people if person.id or person.username}
