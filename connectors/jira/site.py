"""The operations that the connector needs of a Jira, independent of its flavour."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from connectors.atlassian import Person
from connectors.jira.model import Issue, Project, Rules
from pipeline.core.errors import PenstockError

Position = Mapping[str, Any]
"""The position at which a listing continues."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One page of a project's issues, and the position of the next (None: this was the last)."""

    issues: Sequence[Issue]
    next: Position | None
    failed: Mapping[str, PenstockError] = field(default_factory=dict)
    """The errors of issues that could not be read, by id."""


@dataclass(frozen=True, slots=True)
class Projects:
    """The projects to read, by id."""

    by_id: Mapping[str, Project]
    named: Mapping[str, str] = field(default_factory=dict)
    """The ids of those that the settings name, by the key in the settings, which may be a former one."""
    missing: Sequence[str] = ()
    """The keys of those that the settings name and the account does not see."""


class Site(Protocol):
    """One Jira. Raises the errors of ``connectors.web``, CursorExpired, and ServerFailed for a response that does not
    have the API's format."""

    async def close(self) -> None: ...

    async def me(self) -> Person:
        """Return the connector's own account."""
        ...

    async def projects(self) -> Projects:
        """Return the projects that the settings select."""
        ...

    async def listing(
        self, project: Project, position: Position | None, extra: Collection[str], *, full: bool, size: int
    ) -> Listing:
        """Return one page of a project's issues with all of their comments, in the order in which they were created;
        with ``full`` including descriptions. extra: ids of custom fields to read as well."""
        ...

    async def issues(self, ids: Sequence[str], extra: Collection[str], *, full: bool = True) -> Sequence[Issue]:
        """Return the issues with these ids that exist, of any project, with all of their comments."""
        ...

    async def changed(self, projects: Projects, minutes: int) -> Mapping[str, str]:
        """Return the ids of the issues that were updated in the last ``minutes``, as far as Jira's search knows them,
        with the time of the update, the oldest first."""
        ...

    async def rules(self, project: Project) -> Rules:
        """Return who may browse a project; what the account may not see is in ``errors``."""
        ...

    async def actors(self, project: Project, role: str) -> tuple[Collection[str], Collection[str]]:
        """Return the ids of the people in a role of a project, and its groups."""
        ...

    async def members(self, group: str) -> Sequence[Person]:
        """Return the active members of a group."""
        ...

    async def applications(self) -> Mapping[str, Sequence[str]]:
        """Return the groups whose members may use each product."""
        ...

    async def readers(self, issue: str) -> Sequence[Person] | None:
        """Data Center: return the people who may read an issue; None: it does not exist."""
        ...

    async def people(self, ids: Collection[str]) -> Mapping[str, Person]:
        """Return the active people with these ids, which are account ids (Cloud), or keys of users, or ``@`` and the
        name of a user (Data Center)."""
        ...

    def download(self, attachment: str, name: str) -> str:
        """Return the address of an attachment's content, relative to the base address."""
        ...
