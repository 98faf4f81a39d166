"""The members of the principals of spaces, groups and restrictions, named as the whole company knows them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

import structlog

from connectors.atlassian import Person, has_address, principal
from connectors.confluence.model import Position, Readers, Site, group_tag, restriction_tag, space_tag
from connectors.confluence.options import ConfluenceOptions
from connectors.set_aside import Failures, SetAside, may_be_set_aside
from connectors.source import Group
from pipeline.core.errors import PenstockError

T = TypeVar("T")
log = structlog.get_logger()


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
        for space in (await self._site.spaces()).values():
            tag = space_tag(space.key)
            if selected is None or tag in selected:
                async for readers in run.read(f"who may view space {space.key}", partial(self._site.readers, space)):
                    group = await _group(self._site, self._options, tag, readers)
                    named.update(parent for parent in group.of if parent.startswith("group:"))
                    yield group
        async for content_id, included in self._restricted(selected, run):
            restriction = partial(self._restriction, content_id, included)
            async for readers in run.read(f"the view restriction of {content_id}", restriction):
                if readers:
                    group = await _group(self._site, self._options, restriction_tag(content_id), readers)
                    named.update(parent for parent in group.of if parent.startswith("group:"))
                    yield group
        for number, tag in enumerate(sorted(named)):
            name = tag.removeprefix("group:")
            label = (
                f"members of group {name}" if name.isprintable() and len(name) < 200 else f"members of group {number}"
            )
            async for people in run.read(label, partial(self._site.members, name)):
                yield await _group(self._site, self._options, tag, Readers(people))
        run.finish()
        if selected is None:
            self._set_aside.replace("access", run.unreadable)

    async def _restriction(self, content_id: str, included: Readers | None) -> Readers:
        return included if included is not None else await self._site.restriction(content_id)

    async def _restricted(
        self, selected: Collection[str] | None, run: _Run
    ) -> AsyncIterator[tuple[str, Readers | None]]:
        """Yield the ids of restricted contents, each with its readers where the listing includes all of them."""
        if selected is not None:
            for tag in sorted(selected):
                content_id = tag.removeprefix("restriction:")
                if content_id != tag and content_id.isdigit():
                    yield content_id, None
            return
        seen: set[str] = set()
        for space in (await self._site.spaces()).values():
            position: Position | None = None
            following = True
            while following:
                following = False
                page = partial(self._site.restrictions, space, position)
                async for listed, position in run.read(f"view restrictions of space {space.key}", page):
                    following = position is not None
                    for content_id, readers in listed.items():
                        if content_id not in seen:
                            seen.add(content_id)
                            yield content_id, readers


class _Run:
    """One reading of groups: what could not be read, and the first failure that may pass."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._passing: PenstockError | None = None
        self.unreadable: dict[str, str] = {}
        """The reasons, by what nobody may read until then."""

    async def read(self, name: str, request: Callable[[], Awaitable[T]]) -> AsyncIterator[T]:
        """Yield the response, or nothing after a failure of this request alone."""
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
            return
        self._failures.succeed(name)
        yield response

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
