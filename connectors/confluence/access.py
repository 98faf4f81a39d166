"""The members of the principals of spaces, groups and restrictions, named as the whole company knows them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence

import structlog

from connectors.confluence.model import Person, Readers, Site, group_tag, restriction_tag, space_tag
from connectors.confluence.options import ConfluenceOptions
from connectors.source import Group
from connectors.web import Denied, Missing


def principal(person: Person, options: ConfluenceOptions) -> str:
    """Return the person's e-mail address in lower case: from the settings, from Confluence, or from Data Center's user
    name in the company's domain. Without one it is ``account:ID``, which no other source knows."""
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


def has_address(person: Person, options: ConfluenceOptions) -> bool:
    """True when the account's address is known, so that requesting the account again adds nothing."""
    return not principal(person, options).startswith("account:")


def _is_address(email: str) -> bool:
    name, at, domain = email.strip().rpartition("@")
    return bool(name and at and domain) and not any(char.isspace() for char in email.strip())


log = structlog.get_logger()


async def groups(
    site: Site, options: ConfluenceOptions, tags: Collection[str] | None, name: str
) -> AsyncIterator[Group]:
    """Yield the holders of these tags, or of all, and of each group that they name: a group in a restriction may never
    have been listed. A tag whose holders cannot be read is left out, which means that it has none."""
    selected = None if tags is None else set(tags)
    named: set[str] = set() if selected is None else {tag for tag in selected if tag.startswith("group:")}
    for space in (await site.spaces()).values():
        tag = space_tag(space.key)
        if selected is None or tag in selected:
            try:
                readers = await site.readers(space)
            except (Denied, Missing) as error:
                _log_unreadable(error, name, "space permissions", tag)
                continue
            group = await _group(site, options, tag, readers)
            named.update(parent for parent in group.of if parent.startswith("group:"))
            yield group
    async for content_id in _restricted(site, selected):
        tag = restriction_tag(content_id)
        try:
            readers = await site.restriction(content_id)
        except (Denied, Missing) as error:
            _log_unreadable(error, name, "restriction", tag)
            continue
        if readers:
            group = await _group(site, options, tag, readers)
            named.update(parent for parent in group.of if parent.startswith("group:"))
            yield group
    for tag in sorted(named):
        try:
            people = await site.members(tag.removeprefix("group:"))
        except (Denied, Missing) as error:
            _log_unreadable(error, name, "group members", tag)
            continue
        yield await _group(site, options, tag, Readers(people))


async def _restricted(site: Site, selected: Collection[str] | None) -> AsyncIterator[str]:
    if selected is not None:
        for tag in sorted(selected):
            content_id = tag.removeprefix("restriction:")
            if content_id != tag and content_id.isdigit():
                yield content_id
        return
    seen: set[str] = set()
    for space in (await site.spaces()).values():
        position = None
        while True:
            ids, position = await site.restricted_ids(space, position)
            for content_id in ids:
                if content_id not in seen:
                    seen.add(content_id)
                    yield content_id
            if position is None:
                break


async def _group(site: Site, options: ConfluenceOptions, tag: str, readers: Readers) -> Group:
    parents = {group_tag(name) for name in readers.groups}
    if readers.anonymous and options.anonymous_tag:
        parents.add(options.anonymous_tag)
    return Group(tag, sorted(await _principals(site, options, readers.people)), sorted(parents))


async def _principals(site: Site, options: ConfluenceOptions, people: Sequence[Person]) -> set[str]:
    """Return the principals of people. Responses describe people more or less fully, so those without an address are
    requested once more."""
    unknown = [person.id for person in people if person.id and not has_address(person, options)]
    complete = await site.people(unknown, fresh=True) if unknown else {}
    return {principal(complete.get(person.id, person), options) for person in people if person.id or person.username}


def _log_unreadable(error: Denied | Missing, name: str, resource: str, tag: str) -> None:
    """Log that a tag has no holders because they cannot be read. Raises the error again when the token itself was
    refused (401), from which nothing follows about this tag."""
    if error.status == 401:
        raise error
    log.warning("access_unreadable", connector=name, resource=resource, tag=tag, status=error.status)
