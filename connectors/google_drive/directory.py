"""Who holds a tag: members of groups and users of domains from the Admin SDK, members of shared drives from Drive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from datetime import datetime

from connectors.google_drive.access import Sharing, tag_of
from connectors.google_drive.api import Api, Json
from connectors.google_drive.options import GoogleDriveOptions
from connectors.source import Group
from connectors.together import together
from connectors.web import Denied, Missing
from pipeline.core.errors import Misconfigured

AT_ONCE = 8
"""Groups asked for at the same time."""
_INACTIVE = frozenset({"SUSPENDED", "ARCHIVED"})


class Holders:
    """Whoever cannot be listed holds nothing, and that is told once an instance; what cannot be listed *now* raises."""

    def __init__(
        self, api: Api, options: GoogleDriveOptions, now: Callable[[], datetime], tell: Callable[[str, str], None]
    ) -> None:
        """tell: (code, message) of what somebody should look at."""
        self._api = api
        self._options = options
        self._sharing = Sharing(options.anyone_tag, options.domain_links)
        self._now = now
        self._tell = tell

    async def of(self, tags: Collection[str], *, inner: bool) -> AsyncIterator[Group]:
        """inner: also the groups that these are made of."""
        waiting, met = sorted(tags, reverse=True), set(tags)
        while waiting:
            some, waiting = waiting[-AT_ONCE:], waiting[:-AT_ONCE]
            for group in await together(self._group(tag) for tag in reversed(some)):
                if group is None:
                    continue
                yield group
                if inner:
                    more = {tag for tag in group.of if not tag.startswith("user:")} - met
                    met |= more
                    waiting += sorted(more, reverse=True)

    async def _group(self, tag: str) -> Group | None:
        kind, _, name = tag.partition(":")
        try:
            if kind == "drive":
                return await self._drive(tag, name)
            if kind == "domain":
                return await self._domain(tag, name)
            if kind == "group":
                return await self._members(tag, name)
        except Missing:
            self._tell("unknown_group", f"{kind}s that Google does not know, or not to us: nobody reads through them")
        except Denied as error:
            self._tell("directory", f"Google does not say who is in {kind}s ({error.code}): {_needs(self._options)}")
        except Misconfigured as error:
            if kind == "drive":
                raise
            self._tell("directory", str(error))
        return None

    async def _drive(self, tag: str, drive: str) -> Group:
        held = await self._api.permissions(drive)
        tags = {found for one in held if (found := tag_of(one, self._sharing, self._now())) is not None}
        people = {found.removeprefix("user:") for found in tags if found.startswith("user:")}
        return Group(tag, people, {found for found in tags if not found.startswith("user:")})

    async def _domain(self, tag: str, domain: str) -> Group | None:
        if domain not in self._options.domains:
            self._tell(
                "domain", "something is shared with a domain that is not among `domains`: nobody reads through it"
            )
            return None
        people = {
            str(one["primaryEmail"]).lower()
            async for one in self._api.users(domain)
            if not one.get("suspended") and not one.get("archived") and one.get("primaryEmail")
        }
        return Group(tag, people)

    async def _members(self, tag: str, address: str) -> Group | None:
        if not self._options.directory:
            self._tell("directory", "groups are not asked for (directory = false): nobody reads through them")
            return None
        people: set[str] = set()
        everybody = False
        async for one in self._api.members(address):
            everybody |= one.get("type") == "CUSTOMER"
            if _is_person(one):
                people.add(str(one["email"]).lower())
        # All users of the company, whom the list does not name: those of its domains that we may list are among them.
        return Group(tag, people, [f"domain:{domain}" for domain in self._options.domains] if everybody else ())


def _is_person(member: Json) -> bool:
    return bool(member.get("email")) and member.get("type") != "GROUP" and member.get("status") not in _INACTIVE


def _needs(options: GoogleDriveOptions) -> str:
    who = options.directory_subject or options.subject or "the service account"
    return f"{who} needs an administrator role with the privilege Groups > Read"
