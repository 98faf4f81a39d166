"""Access: the repositories that are read, their collaborators, and the e-mail addresses of people.

An address comes from the settings, from the company's identity provider (SAML), or from the addresses that a member of
an organisation has confirmed in a domain that the organisation has proved to own. The address of a public profile is
never used: a person chooses it among all addresses that they ever confirmed, of any domain, so that it would let them
choose the principal that they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from connectors.github.client import Api, Json
from connectors.github.content import organization_tag, tag
from connectors.github.options import GitHubOptions
from connectors.github.queries import PROBED_REPOSITORIES, Repository, following, nodes, repositories_of
from connectors.github.queries import repository_named as find_named
from connectors.source import Group
from connectors.web import Denied, ServerFailed
from pipeline.core.errors import Misconfigured, Retryable

_COLLABORATORS = """
query($ids: [ID!]!) { nodes(ids: $ids) { ... on Repository {
  id databaseId collaborators(affiliation: ALL, first: 100) { pageInfo { hasNextPage endCursor } nodes { login } }
} } }
"""
_MORE_COLLABORATORS = """
query($id: ID!, $after: String) { node(id: $id) { ... on Repository {
  collaborators(affiliation: ALL, first: 100, after: $after) { pageInfo { hasNextPage endCursor } nodes { login } }
} } }
"""
_MEMBERS = """
query($organization: String!, $after: String) { organization(login: $organization) { databaseId
  membersWithRole(first: 100, after: $after) { pageInfo { hasNextPage endCursor } nodes {
    login organizationVerifiedDomainEmails(login: $organization)
  } }
} }
"""
_IDENTITIES = """
query($organization: String!, $after: String) { organization(login: $organization) { samlIdentityProvider {
  externalIdentities(first: 100, after: $after) { pageInfo { hasNextPage endCursor } nodes {
    user { login } samlIdentity { nameId }
  } }
} } }
"""
_HIDDEN = ("NOT_FOUND", "FORBIDDEN", "INSUFFICIENT_SCOPES")
"""Errors that say that the credential may not see people."""


@dataclass(slots=True)
class Organization:
    """The people of an organisation by login in lower case, each with their addresses, which may be none."""

    id: int | None = None
    members: dict[str, frozenset[str]] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)
    """The addresses that the identity provider names, by login."""


@dataclass(slots=True)
class Findings:
    """The gaps in a reading of all groups, for ``check``."""

    without_address: set[str] = field(default_factory=set)
    """Logins that may read a repository and have no address, so that they are nobody."""
    hidden: set[str] = field(default_factory=set)
    """Repositories whose collaborators the credential may not see."""
    hidden_members: set[str] = field(default_factory=set)
    """Organisations whose members the credential may not see."""


def addresses(login: str, people: Mapping[str, str], organizations: Iterable[Organization]) -> frozenset[str]:
    """Return the principals of a person; empty: nobody. ``people`` is from the settings."""
    login = login.lower()
    if login in people:
        return frozenset({people[login]})
    known = list(organizations)
    if identities := frozenset(org.identities[login] for org in known if login in org.identities):
        return identities
    return frozenset[str]().union(*(org.members.get(login, frozenset()) for org in known))


def _address(text: object) -> str | None:
    """Return an address in lower case, or None: an identity provider may name people by something else."""
    name, at, domain = text.strip().lower().partition("@") if isinstance(text, str) else ("", "", "")
    return f"{name}@{domain}" if name and at and "." in domain and not any(map(str.isspace, name + domain)) else None


class Directory:
    """The repositories and people. Every method raises the errors of ``Api``, with Denied as Misconfigured."""

    def __init__(self, api: Api, options: GitHubOptions) -> None:
        self._api = api
        self._options = options
        self.known: dict[int, Repository] = {}
        """The repositories that the last listing selected."""
        self.closed: dict[str, tuple[int | None, Denied | ServerFailed]] = {}
        """Repositories that refuse the credential since then, or whose listing always fails, with their numbers, where
        these are known, and the errors."""

    def set_aside(self, repository: str, error: Denied | ServerFailed) -> None:
        """Record that one repository cannot be read. Raises the error again when the credential itself is not valid
        (401), from which nothing follows about this repository."""
        if isinstance(error, Denied) and error.status == 401:
            raise error
        number = next((place.id for place in self.known.values() if place.name == repository), None)
        self.closed[repository] = number, error

    async def repositories(self) -> list[Repository]:
        """List the selected repositories, in the order of their numbers. A named repository that was renamed or
        transferred is found by its former name. Raises Misconfigured when the settings select none that exist."""
        matches: dict[int, Repository] = {}
        self.closed = {}
        for owner in self._options.owners:
            async for page in repositories_of(self._api, owner):
                matches |= {place.id: place for place in page if self._options.is_selected(place.name)}
        for name in self._options.named:
            place = await self._find(name)
            if place is not None and not self._options.is_excluded(place.name):
                matches[place.id] = place
        matches = {id: place for id, place in sorted(matches.items()) if not place.is_disabled}
        if not matches:
            raise Misconfigured("the credential sees no repository that the settings select: correct them, or grant it")
        self.known = matches
        return list(matches.values())

    async def missing(self) -> list[str]:
        """Return the named repositories that the credential does not see."""
        return [name for name in self._options.named if await self._find(name) is None]

    async def _find(self, name: str) -> Repository | None:
        try:
            return await find_named(self._api, name)
        except Denied as error:
            self.set_aside(name, error)
            return None

    async def node(self, id: int) -> str | None:
        """Return the id by which GraphQL finds a repository; None: there is none that the credential sees."""
        if id in self.known:
            return self.known[id].node
        answer = await self._api.repository(id)
        return None if answer is None else str(answer["node_id"])

    def is_selected(self, repository: Repository) -> bool:
        if repository.is_disabled or self._options.is_excluded(repository.name):
            return False
        return repository.id in self.known or self._options.is_selected(repository.name)

    # People

    async def groups(self, tags: Collection[str] | None, findings: Findings) -> AsyncIterator[Group]:
        """Yield the holders of these tags, or of all. A tag whose holders are hidden is left out: nobody holds it."""
        for name in self._options.public_acl_tags:
            if name in self._options.members and (tags is None or name in tags):
                yield Group(name, [principal.strip().lower() for principal in self._options.members[name]])
        places = [
            place
            for place in await self.repositories()
            if tags is None or tag(place.id) in tags or _internal_tag(place) in tags
        ]
        people = await asyncio.to_thread(self._options.addresses)
        organizations: dict[str, Organization] = {}
        for login in sorted({place.organization for place in places if place.organization is not None}):
            organizations[login] = await self._organization(login, findings)
        known = list(organizations.values())
        for start in range(0, len(places), PROBED_REPOSITORIES):
            batch = places[start : start + PROBED_REPOSITORIES]
            collaborators = await self._collaborators(batch)
            for place in batch:
                logins = collaborators.get(place.id)
                if logins is None:  # REST shows them to some Apps that GraphQL refuses
                    logins = await self._collaborators_of_name(place)
                if logins is None:
                    findings.hidden.add(place.name)
                elif tags is None or tag(place.id) in tags:
                    yield Group(tag(place.id), _principals(logins, people, known, findings))
        internal = {own for place in places if (own := _internal_tag(place)) is not None}
        for name in sorted(internal):
            if tags is None or name in tags:
                [organization] = [org for org in known if org.id is not None and organization_tag(org.id) == name] or [
                    Organization()
                ]
                yield Group(name, _principals(organization.members, people, known, findings))

    async def _collaborators(self, places: Sequence[Repository]) -> Mapping[int, list[str]]:
        """Return the logins of everybody who may read each repository, without those repositories for which the
        credential may not see it."""
        data, _ = await self._query(_COLLABORATORS, {"ids": [place.node for place in places]})
        logins: dict[int, list[str]] = {}
        for json in nodes(data):
            if not json or json.get("collaborators") is None:
                continue
            rows, after = nodes(json["collaborators"]), following(json["collaborators"])
            while after is not None:
                more, _ = await self._query(_MORE_COLLABORATORS, {"id": json["id"], "after": after})
                page = (more.get("node") or {}).get("collaborators")
                rows += nodes(page)
                after = following(page, after)
            logins[int(json["databaseId"])] = [str(row["login"]) for row in rows]
        return logins

    async def _collaborators_of_name(self, place: Repository) -> list[str] | None:
        """Return what REST shows, which names a repository by its name. Raises Retryable if it has another name then:
        these may be the collaborators of another repository, which has the former name now."""
        logins = await self._api.collaborators(place.name)
        current = None if logins is None else await self._api.repository(place.id)
        if current is not None and str(current["full_name"]).lower() != place.name.lower():
            raise Retryable(f"{place.name} was renamed while its collaborators were read")
        return None if current is None else logins

    async def _organization(self, login: str, findings: Findings) -> Organization:
        organization = Organization()
        async for json in self._pages(_MEMBERS, login, "membersWithRole"):
            if json is None:
                findings.hidden_members.add(login)
                return organization
            organization.id = json["databaseId"]
            for member in nodes(json["membersWithRole"]):
                emails = frozenset(filter(None, map(_address, member["organizationVerifiedDomainEmails"])))
                organization.members[str(member["login"]).lower()] = emails
        async for json in self._pages(_IDENTITIES, login, "samlIdentityProvider", "externalIdentities"):
            if json is None:
                break  # there is no identity provider, or only owners may see it
            for row in nodes(json["samlIdentityProvider"]["externalIdentities"]):
                name, user = _address((row.get("samlIdentity") or {}).get("nameId")), row.get("user")
                if user is not None and name is not None:
                    organization.identities[str(user["login"]).lower()] = name
        return organization

    async def _pages(self, text: str, organization: str, *path: str) -> AsyncIterator[Json | None]:
        """Yield the organisation page by page of the connection at the end of ``path``; None if it is hidden."""
        after: str | None = None
        while True:
            data, _ = await self._query(text, {"organization": organization, "after": after})
            json = connection = data.get("organization")
            for name in path:
                connection = (connection or {}).get(name)
            if connection is None:
                yield None
                return
            yield json
            if (after := following(connection, after)) is None:
                return

    async def _query(self, text: str, variables: Json) -> tuple[Json, frozenset[str]]:
        try:
            return await self._api.query(text, variables, tolerated=_HIDDEN)
        except Denied as error:
            raise Misconfigured(f"{error}: check that the token is valid") from error


def _internal_tag(place: Repository) -> str | None:
    if place.visibility != "INTERNAL" or place.organization_id is None:
        return None
    return organization_tag(place.organization_id)


def _principals(
    logins: Iterable[str], people: Mapping[str, str], organizations: Sequence[Organization], findings: Findings
) -> list[str]:
    principals: set[str] = set()
    for login in logins:
        own = addresses(login, people, organizations)
        if not own:
            findings.without_address.add(login.lower())
        principals |= own
    return sorted(principals)
