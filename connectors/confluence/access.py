"""The members of the principals of spaces, groups and restrictions, named as the whole company knows them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from connectors.atlassian import Person, has_address, principal
from connectors.confluence.model import Position, Readers, Site, group_tag, restriction_tag, space_tag
from connectors.confluence.options import ConfluenceOptions
from connectors.set_aside import Failures, SetAside, may_be_set_aside
from connectors.source import Group
from pipeline.core.errors import PenstockError
from pipeline.runtime.tasks import gather_or_cancel

T = TypeVar("T")
log = structlog.get_logger()
MAX_CONCURRENT_TAGS = 8
"""Tags whose holders are read at the same time: as many as the client sends requests."""


class GroupReader:
    """Reads the holders of tags. A tag whose holders cannot be read is left out, which means that it has none."""

    def __init__(self, site: Site, options: ConfluenceOptions, set_aside: SetAside) -> None:
        self._site = site
        self._options = options
        self._set_aside = set_aside
        self._failures = Failures()

    async def groups(self, tags: Collection[str] | None) -> AsyncIterator[Group]:
        """Yield the holders of these tags, or of all, and of each group that they name: a group in a restriction may
        never have been listed. Raises Retryable at the end while a failure may still pass."""
        run = _Run(self._failures)
        selected = None if tags is None else set(tags)
        named: set[str] = set() if selected is None else {tag for tag in selected if tag.startswith("group:")}
        spaces = [
            _Holders(space_tag(space.key), f"who may view space {space.key}", partial(self._site.readers, space))
            for space in (await self._site.spaces()).values()
            if selected is None or space_tag(space.key) in selected
        ]
        async for group in self._read(spaces, run):
            named.update(parent for parent in group.of if parent.startswith("group:"))
            yield group
        async for listed in self._restricted(selected, run):
            restrictions = [
                _Holders(
                    restriction_tag(id_), f"the view restriction of {id_}", partial(self._restriction, id_, readers)
                )
                for id_, readers in listed.items()
            ]
            async for group in self._read(restrictions, run):
                named.update(parent for parent in group.of if parent.startswith("group:"))
                if group.members or group.of:
                    yield group
        async for group in self._read([self._members(tag, n) for n, tag in enumerate(sorted(named))], run):
            yield group
        run.finish()
        if selected is None:
            self._set_aside.replace("access", run.unreadable)

    def _members(self, tag: str, number: int) -> _Holders:
        name = tag.removeprefix("group:")
        label = f"members of group {name}" if name.isprintable() and len(name) < 200 else f"members of group {number}"

        async def read() -> Readers:
            return Readers(await self._site.members(name))

        return _Holders(tag, label, read)

    async def _read(self, requests: Sequence[_Holders], run: _Run) -> AsyncIterator[Group]:
        """Yield the holders of these tags, of which MAX_CONCURRENT_TAGS are read at the same time."""

        async def group(request: _Holders) -> Group | None:
            readers = await run.read(request.name, request.read)
            return None if readers is None else await _group(self._site, self._options, request.tag, readers)

        for start in range(0, len(requests), MAX_CONCURRENT_TAGS):
            for read in await gather_or_cancel(*map(group, requests[start : start + MAX_CONCURRENT_TAGS])):
                if read is not None:
                    yield read

    async def _restriction(self, content_id: str, included: Readers | None) -> Readers:
        return included if included is not None else await self._site.restriction(content_id)

    async def _restricted(
        self, selected: Collection[str] | None, run: _Run
    ) -> AsyncIterator[Mapping[str, Readers | None]]:
        """Yield the ids of restricted contents, each with its readers where the listing includes all of them."""
        if selected is not None:
            ids = (tag.removeprefix("restriction:") for tag in sorted(selected) if tag.startswith("restriction:"))
            yield dict.fromkeys(id_ for id_ in ids if id_.isdigit())
            return
        seen: set[str] = set()
        for space in (await self._site.spaces()).values():
            position: Position | None = None
            following = True
            while following:
                page = partial(self._site.restrictions, space, position)
                answer = await run.read(f"view restrictions of space {space.key}", page)
                listed, position = answer or ({}, None)
                following = position is not None
                yield {id_: readers for id_, readers in listed.items() if id_ not in seen}
                seen.update(listed)


@dataclass(frozen=True, slots=True)
class _Holders:
    """The holders of a tag, to be read. name: what the status calls them."""

    tag: str
    name: str
    read: Callable[[], Awaitable[Readers]]


class _Run:
    """One reading of groups: what could not be read, and the first failure that may pass."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._passing: PenstockError | None = None
        self.unreadable: dict[str, str] = {}
        """The reasons, by what nobody may read until then."""

    async def read(self, name: str, request: Callable[[], Awaitable[T]]) -> T | None:
        """Return the response, or None after a failure of this request alone."""
        try:
            response = await request()
        except PenstockError as error:
            if not may_be_set_aside(error):
                raise
            if self._failures.fail(name, error):
                self.unreadable[name] = f"{error}; until then it admits nobody"
                log.warning("access_unreadable", resource=name, error=str(error))
            else:
                self._passing = self._passing or error
            return None
        self._failures.succeed(name)
        return response

    def finish(self) -> None:
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
