"""The members of the principals of spaces, groups and restrictions, named as the whole company knows them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence

import structlog

from connectors.confluence.model import Person, Readers, Site, group_tag, restriction_tag, space_tag
from connectors.confluence.options import ConfluenceOptions
from connectors.source import Group
from connectors.web import Denied, Missing


def principal(person: Person, options: ConfluenceOptions) -> str:
    """The e-mail address in lower case: as the settings map it, as Confluence tells it, or as Data Center's user name
    makes it in the company's domain. Else ``account:ID``, whom no other source knows."""
    for key in (person.id, person.username):
        if key and key in options.principals:
            return options.principals[key]
    if _is_address(person.email):
        return person.email.strip().lower()
    if options.email_domain and person.username:
        domain = options.email_domain.lstrip("@").lower()
        name = person.username.lower()
        if name.endswith(f"@{domain}"):
            return name
        if "@" not in name:
            return f"{name}@{domain}"
    return f"account:{person.username or person.id}"


def is_told(person: Person, options: ConfluenceOptions) -> bool:
    """Whether asking for more about this account can tell nothing new."""
    return not principal(person, options).startswith("account:")


def _is_address(email: str) -> bool:
    name, at, domain = email.strip().rpartition("@")
    return bool(name and at and domain) and not any(char.isspace() for char in email.strip())


log = structlog.get_logger()

group_of = group_tag


async def groups(
    site: Site, options: ConfluenceOptions, tags: Collection[str] | None, name: str
) -> AsyncIterator[Group]:
    """Those tags, or all, and besides them the groups that they name: a group that appears with a restriction may
    never have been listed. What cannot be read is left out, so that nobody holds it."""
    wanted = None if tags is None else set(tags)
    named: set[str] = set() if wanted is None else {one for one in wanted if one.startswith("group:")}
    for space in (await site.spaces()).values():
        tag = space_tag(space.key)
        if wanted is None or tag in wanted:
            try:
                readers = await site.readers(space)
            except (Denied, Missing) as error:
                _refused(error, name, "permissions of a space", tag)
                continue
            found = await _group(site, options, tag, readers)
            named.update(one for one in found.of if one.startswith("group:"))
            yield found
    async for content in _restricted(site, wanted):
        tag = restriction_tag(content)
        try:
            readers = await site.restriction(content)
        except (Denied, Missing) as error:
            _refused(error, name, "a restriction", tag)
            continue
        if readers:
            found = await _group(site, options, tag, readers)
            named.update(one for one in found.of if one.startswith("group:"))
            yield found
    for tag in sorted(named):
        try:
            people = await site.members(tag.removeprefix("group:"))
        except (Denied, Missing) as error:
            _refused(error, name, "members of a group", tag)
            continue
        yield await _group(site, options, tag, Readers(people))


async def _restricted(site: Site, wanted: Collection[str] | None) -> AsyncIterator[str]:
    if wanted is not None:
        for tag in sorted(wanted):
            content = tag.removeprefix("restriction:")
            if content != tag and content.isdigit():
                yield content
        return
    met: set[str] = set()
    for space in (await site.spaces()).values():
        position = None
        while True:
            found, position = await site.restricted(space, position)
            for one in found:
                if one not in met:
                    met.add(one)
                    yield one
            if position is None:
                break


async def _group(site: Site, options: ConfluenceOptions, tag: str, readers: Readers) -> Group:
    of = {group_tag(one) for one in readers.groups}
    if readers.anonymous and options.anonymous_tag:
        of.add(options.anonymous_tag)
    return Group(tag, sorted(await _principals(site, options, readers.people)), sorted(of))


async def _principals(site: Site, options: ConfluenceOptions, people: Sequence[Person]) -> set[str]:
    """Answers name people more or less fully: whoever is known by no address yet is asked for."""
    unknown = [one.id for one in people if one.id and not is_told(one, options)]
    told = await site.people(unknown, fresh=True) if unknown else {}
    return {principal(told.get(one.id, one), options) for one in people if one.id or one.username}


def _refused(error: Denied | Missing, name: str, what: str, tag: str) -> None:
    """A token that is not taken at all is no matter of one tag: nothing may be concluded from it."""
    if error.status == 401:
        raise error
    log.warning("access cannot be read: nobody holds it", connector=name, what=what, tag=tag, status=error.status)
