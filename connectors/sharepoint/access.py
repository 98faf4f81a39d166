"""Converts permissions of Microsoft Graph to access sets, and reads the holders of their tags. What is uncertain grants
nothing.

https://learn.microsoft.com/en-us/graph/api/resources/permission
https://learn.microsoft.com/en-us/graph/api/resources/sharepointidentityset

Tags: ``account:ID`` (a user, by Entra's id or user principal name), ``group:ID`` (all members of a group of Entra, also
through other groups), ``owners:ID`` (a group's owners), ``site-group:SITE:NUMBER`` (a group of a site) and ``everyone``
(all users of the organisation except guests).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from connectors.sharepoint.client import GUID, Graph, Json, SiteGroups
from connectors.sharepoint.options import SharePointOptions
from connectors.source import Group, GroupPage
from connectors.tag_queue import TagQueue
from connectors.web import Answered, Denied, Missing, Rejected
from pipeline.core.errors import Misconfigured
from pipeline.runtime.tasks import gather_or_cancel

Permission = Mapping[str, Any]

EVERYONE = "everyone"

READING_ROLES = frozenset(
    {
        "read",
        "write",
        "owner",
        # Permission levels of SharePoint that Graph has no name for; each includes opening items.
        "sp.full control",
        "sp.design",
        "sp.edit",
        "sp.contribute",
        "sp.approve",
        "sp.manage hierarchy",
        "sp.read",
        "sp.view only",
    }
)
"""Roles that include reading. Others, such as ``sp.limited access``, do not."""

NO_EXPIRY = datetime(1, 1, 1, tzinfo=UTC)
"""DateTime.MinValue, by which Graph says that a permission does not expire."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How sharing that names nobody is treated; see SharePointOptions."""

    organization_links: bool = False
    anonymous_links: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """An access set, and how long it is valid."""

    tags: frozenset[str] = frozenset()
    expires_at: datetime | None = None
    """When the first of its grants expires, if any does."""


NO_ACCESS = Access()


def access_of(permissions: Iterable[Permission], site: str, sharing: Sharing, now: datetime) -> Access:
    """Return the access that the effective permissions of an item grant. site: the id of its site collection."""
    tags: set[str] = set()
    ends: list[datetime] = []
    for permission in permissions:
        granted = tags_of(permission, site, sharing)
        if not granted:
            continue
        is_limited, end = _expiry(permission)
        if is_limited and (end is None or end <= now):
            continue
        tags |= granted
        if end is not None:
            ends.append(end)
    return Access(frozenset(tags), min(ends, default=None))


def tags_of(permission: Permission, site: str, sharing: Sharing) -> frozenset[str]:
    """Return the tags of those who may read by a permission, whatever its end."""
    roles = permission.get("roles")
    if not isinstance(roles, list) or not any(str(role).lower() in READING_ROLES for role in roles):
        return frozenset()
    if permission.get("hasPassword"):
        return frozenset()
    tags = {_holder(permission.get("grantedToV2"), site)}
    named = permission.get("grantedToIdentitiesV2")
    if isinstance(named, list):
        tags |= {_holder(identity, site) for identity in named}
    link = permission.get("link")
    if isinstance(link, Mapping):
        scope = link.get("scope")
        is_open = (scope == "organization" and sharing.organization_links) or (
            scope == "anonymous" and sharing.anonymous_links
        )
        if is_open:
            tags.add(EVERYONE)
    return frozenset(tag for tag in tags if tag is not None)


def _expiry(permission: Permission) -> tuple[bool, datetime | None]:
    """Return whether a permission expires, and when; None: the time cannot be parsed."""
    text = permission.get("expirationDateTime")
    if not text:
        return False, None
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return True, None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment > NO_EXPIRY, moment if moment > NO_EXPIRY else None


def _holder(identities: object, site: str) -> str | None:
    """Return the tag of the one whom an identity set names. Applications and devices read nothing here.

    The login name decides where there is one: Graph shows the owners of a group with the id of the whole group, and
    only the login name tells them apart.
    """
    if not isinstance(identities, Mapping):
        return None
    site_user = identities.get("siteUser")
    login = str(site_user.get("loginName") or "") if isinstance(site_user, Mapping) else ""
    group, user, site_group = (_id(identities, kind) for kind in ("group", "user", "siteGroup"))
    account = f"account:{user.lower()}" if user and GUID.fullmatch(user) else None
    if _is_claim(login):
        tag = tag_of_login(login)
        return account or tag if tag is not None and tag.startswith("account:") else tag
    if group is not None:
        return f"group:{group.lower()}" if GUID.fullmatch(group) else None
    if user is not None:
        return account
    return f"site-group:{site}:{site_group}" if site_group and site_group.isdecimal() else None


def _id(identities: Mapping[str, Any], name: str) -> str | None:
    identity = identities.get(name)
    value = identity.get("id") if isinstance(identity, Mapping) else None
    return str(value) if value else None


def _is_claim(login: str) -> bool:
    """Whether a login name is a claim, and no mere name."""
    return "|" in login or login.startswith(("c:", "i:"))


_LOGIN = re.compile(r"[^|\s]{1,512}\Z")


def tag_of_login(login: str) -> str | None:
    """Return the tag for a claim, by which SharePoint names users and groups; None: it is nobody in this organisation,
    or unknown.

    The claims of guests that have no account (``urn:spo:guest``, ``urn:spo:anon``) are nobody.
    """
    kind, _, value = login.lower().partition("|")
    provider, _, name = value.partition("|")
    match kind, provider:
        case "c:0(.s", "true":
            return EVERYONE
        case "c:0-.f", "rolemanager" if name.startswith("spo-grid-all-users/"):
            return EVERYONE
        case "c:0o.c", "federateddirectoryclaimprovider":
            if GUID.fullmatch(name):
                return f"group:{name}"
            return f"owners:{name[:-2]}" if name.endswith("_o") and GUID.fullmatch(name[:-2]) else None
        case "c:0t.c", "tenant" if GUID.fullmatch(name):
            return f"group:{name}"
        case "i:0#.f", "membership" if _LOGIN.match(name) and "urn:" not in name and "urn%3a" not in name:
            return f"account:{name}"
    return None


def principal_of(user: Mapping[str, Any], user_name: str) -> str | None:
    """Return the principal of a user; None: the account is disabled, or nobody knows its name.

    user_name: the attribute; see SharePointOptions.
    """
    if user.get("accountEnabled") is not True:
        return None
    names = [user.get("userPrincipalName")]
    if user_name == "mail":
        names.insert(0, user.get("mail"))
    return next((str(name).lower() for name in names if name), None)


MAX_ACCOUNTS = 200
"""Accounts whose users are requested at once: as many requests as ten of Graph's batches hold."""
MAX_CONCURRENT_TAGS = 8
"""Tags whose holders are read at the same time: as many as the client sends requests."""


class Memberships:
    """Reads the holders of tags. A group that may not be listed has no holders, which is reported once for an instance;
    one that cannot be listed at the moment raises Retryable."""

    def __init__(
        self,
        graph: Graph,
        site_groups: SiteGroups | None,
        options: SharePointOptions,
        site_url: Callable[[str], str | None],
        report: Callable[[str, str], None],
    ) -> None:
        """site_groups: None if they are not read. site_url: returns the address of a site collection. report: called
        with the code and message of a problem."""
        self._graph = graph
        self._site_groups = site_groups
        self._user_name = options.user_name
        self._site_url = site_url
        self._report = report

    async def groups(self, tags: Collection[str]) -> AsyncGenerator[Group, None]:
        """Yield the groups of these tags, and of the tags within them."""
        async with aclosing(self.pages(TagQueue(tags))) as pages:
            async for page in pages:
                for group in page.groups:
                    yield group

    async def pages(self, queue: TagQueue) -> AsyncGenerator[GroupPage, None]:
        """Yield the groups of these tags, and of the tags within them."""
        while kind := queue.kind:
            if kind == "account":
                page = await self._accounts(queue.take(MAX_ACCOUNTS))
            else:
                groups = await gather_or_cancel(*map(self._try, queue.take(MAX_CONCURRENT_TAGS)))
                page = [group for group in groups if group is not None]
            queue.add({tag for group in page for tag in group.of})
            yield GroupPage(page, queue.cursor)

    async def _accounts(self, tags: list[str]) -> list[Group]:
        groups = []
        answers = await self._graph.users([tag.partition(":")[2] for tag in tags])
        for tag, user in zip(tags, answers, strict=True):
            if isinstance(user, Denied):
                self._report("directory", f"Entra does not show users ({user.code}): grant User.Read.All")
            elif not isinstance(user, Answered) and (name := principal_of(user, self._user_name)) is not None:
                groups.append(Group(tag, [name]))
        return groups

    async def _try(self, tag: str) -> Group | None:
        kind, _, name = tag.partition(":")
        try:
            match kind:
                case "group":
                    return Group(tag, await self._people(self._graph.transitive_members(name)))
                case "owners":
                    return Group(tag, await self._people(self._graph.owners(name)))
                case "site-group":
                    return await self._site_group(tag, name)
                case _ if tag == EVERYONE:
                    return Group(tag, await self._people(self._graph.members_of_tenant(), no_guests=True))
        except Missing:
            self._report("unknown_group", "groups that do not exist (any more) give access to nobody")
        except (Denied, Rejected) as error:
            if error.status == 401 and kind != "site-group":
                raise Misconfigured(
                    "Microsoft Graph rejects the application's tokens: check that it is enabled"
                ) from error
            self._report(*_advice(kind, error))
        except Misconfigured as error:
            if kind != "site-group":
                raise
            self._report("site_groups", str(error))
        return None

    async def _people(self, users: AsyncIterator[Json], *, no_guests: bool = False) -> set[str]:
        people: set[str] = set()
        async for user in users:
            kind = str(user.get("@odata.type", "#microsoft.graph.user"))
            if kind != "#microsoft.graph.user" or (no_guests and user.get("userType") != "Member"):
                continue
            if user.get("userPrincipalName") is None:  # Graph shows the id alone to applications without the permission
                self._report("directory", "Entra shows members of groups without their names: grant User.Read.All")
            elif (name := principal_of(user, self._user_name)) is not None:
                people.add(name)
        return people

    async def _site_group(self, tag: str, name: str) -> Group | None:
        if self._site_groups is None:
            self._report(
                "site_groups",
                "the members of site groups are not read: sharing with them gives access to nobody. They need a"
                " certificate, with which SharePoint's own API lets applications in, and site_groups = true",
            )
            return None
        site, _, number = name.partition(":")
        url = self._site_url(site)
        if url is None or not number.isdecimal():
            self._report("unknown_group", "groups of sites that are not read give access to nobody")
            return None
        claims = [str(member.get("LoginName", "")) for member in await self._site_groups.members(url, number)]
        inner = {inner for claim in claims if (inner := tag_of_login(claim)) is not None}
        return Group(tag, (), inner)


def _advice(kind: str, error: Answered) -> tuple[str, str]:
    if kind == "site-group":
        return (
            "site_groups",
            f"SharePoint does not list the members of site groups ({error.status}): they give access to nobody. Grant"
            " the application Sites.FullControl.All (or Sites.Selected with fullcontrol) of SharePoint, and use a"
            " certificate",
        )
    return "directory", f"Entra does not list the members of groups ({error.code}): grant GroupMember.Read.All"
