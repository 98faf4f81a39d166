"""The state of the fake Jira: its people, projects and issues, the actions of its users, and who may see what."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

FIRST_ID = 10_000


@dataclass
class User:
    account_id: str
    """The account id (Cloud) or the user key (Data Center)."""
    name: str
    email: str
    display: str
    shows_email: bool = True
    is_active: bool = True
    account_type: Literal["atlassian", "app", "customer"] = "atlassian"
    is_admin: bool = False


@dataclass
class Group:
    id: str
    name: str
    members: set[str] = field(default_factory=set)
    """Account ids."""


@dataclass(frozen=True)
class Grant:
    """A permission and its holder, or a member of a security level."""

    type: str
    parameter: str = ""
    """The account id of a user, the name of a group, the id of a role or custom field, the key of a product."""
    permission: str = "BROWSE_PROJECTS"


@dataclass
class Level:
    id: str
    name: str
    members: list[Grant] = field(default_factory=list)


@dataclass
class Project:
    id: str
    key: str
    name: str
    lead: str
    type: Literal["software", "service_desk"] = "software"
    grants: list[Grant] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    security_scheme: str = ""
    roles: dict[str, set[str]] = field(default_factory=dict)
    """By role id: account ids, and names of groups after ``%``."""
    is_archived: bool = False


@dataclass
class Comment:
    id: str
    author: str
    body: Any
    created: datetime
    updated: datetime
    visibility: tuple[Literal["role", "group"], str] | None = None
    """To a role, by its id, or a group, by its name."""
    is_internal: bool = False
    """Whether customers of a service project do not see it."""


@dataclass
class Attachment:
    id: str
    name: str
    data: bytes
    media_type: str
    author: str
    created: datetime


@dataclass
class Issue:
    id: str
    number: int
    project: str
    """The id of its project."""
    summary: str
    description: Any
    reporter: str | None
    created: datetime
    updated: datetime
    assignee: str | None = None
    status: str = "To Do"
    level: str | None = None
    restricted_to: tuple[str, ...] = ()
    """Team-managed projects: ids of roles."""
    labels: list[str] = field(default_factory=list)
    custom: dict[str, Any] = field(default_factory=dict)
    """Custom fields, by id: names of users or groups."""
    comments: list[Comment] = field(default_factory=list)
    attachments: list[Attachment] = field(default_factory=list)
    archived: datetime | None = None


@dataclass(frozen=True)
class Event:
    name: str
    at: datetime
    issue: Issue | None = None
    comment: Comment | None = None
    attachment: Attachment | None = None


class State:
    """Everything in one Jira. ``now`` follows the clock and is shifted by ``advance``."""

    def __init__(self, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._shift = timedelta()
        self.users: dict[str, User] = {}
        self.groups: dict[str, Group] = {}
        """By name."""
        self.projects: dict[str, Project] = {}
        self.roles: dict[str, str] = {}
        """Names by id: all projects have the same roles."""
        self.applications: dict[str, set[str]] = {}
        """Names of groups by key of a product."""
        self.issues: dict[str, Issue] = {}
        self.events: list[Event] = []
        self._next = FIRST_ID

    def now(self) -> datetime:
        return self._clock() + self._shift

    def advance(self, **parts: float) -> None:
        self._shift += timedelta(**parts)

    def _id(self) -> str:
        self._next += 1
        return str(self._next)

    # Set-up

    def add_user(self, name: str, **fields: Any) -> User:
        user = User(f"712020:{name}", name, f"{name.capitalize()}@Example.com", name.capitalize(), **fields)
        self.users[user.account_id] = user
        return user

    def add_group(self, name: str, *members: User) -> Group:
        id = str(uuid.uuid5(uuid.NAMESPACE_URL, name))
        group = self.groups[name] = Group(id, name, {member.account_id for member in members})
        return group

    def add_role(self, name: str) -> str:
        id = self._id()
        self.roles[id] = name
        return id

    def add_project(self, key: str, *grants: Grant, **fields: Any) -> Project:
        lead = next(iter(self.users))
        project = Project(self._id(), key, f"Project {key}", lead, grants=list(grants), **fields)
        self.projects[project.id] = project
        return project

    def add_level(self, project: Project, name: str, *members: Grant) -> Level:
        project.security_scheme = project.security_scheme or self._id()
        level = Level(self._id(), name, list(members))
        project.levels.append(level)
        return level

    # Actions

    def add_issue(self, project: Project, summary: str, description: Any = "", **fields: Any) -> Issue:
        now = self.now()
        values = {"reporter": next(iter(self.users)), **fields}
        issue = Issue(
            self._id(), self._number(project), project.id, summary, description, created=now, updated=now, **values
        )
        self.issues[issue.id] = issue
        self._emit("jira:issue_created", issue)
        return issue

    def _number(self, project: Project) -> int:
        return 1 + max((issue.number for issue in self.issues.values() if issue.project == project.id), default=0)

    def key(self, issue: Issue) -> str:
        return f"{self.projects[issue.project].key}-{issue.number}"

    def edit(self, issue: Issue, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(issue, name, value)
        self._touch(issue)
        self._emit("jira:issue_updated", issue)

    def move(self, issue: Issue, project: Project) -> None:
        issue.number = 1 + max(
            (other.number for other in self.issues.values() if other.project == project.id), default=0
        )
        self.edit(issue, project=project.id)

    def delete(self, issue: Issue) -> Issue:
        self._emit("jira:issue_deleted", issue)
        return self.issues.pop(issue.id)

    def restore(self, issue: Issue) -> None:
        """Undo a deletion, as an app or a backup does: neither the id nor ``updated`` changes."""
        self.issues[issue.id] = issue
        self._emit("jira:issue_created", issue)

    def comment(self, issue: Issue, body: Any, author: User | None = None, **fields: Any) -> Comment:
        now = self.now()
        name = author.account_id if author else next(iter(self.users))
        comment = Comment(self._id(), name, body, now, now, **fields)
        issue.comments.append(comment)
        self._touch(issue)
        self._emit("comment_created", issue, comment=comment)
        return comment

    def edit_comment(self, issue: Issue, comment: Comment, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(comment, name, value)
        comment.updated = self.now()
        self._touch(issue)
        self._emit("comment_updated", issue, comment=comment)

    def delete_comment(self, issue: Issue, comment: Comment) -> None:
        """Delete a comment, which leaves the issue's ``updated`` as it is."""
        issue.comments.remove(comment)
        self._emit("comment_deleted", issue, comment=comment)

    def attach(self, issue: Issue, name: str, data: bytes, media_type: str = "text/plain") -> Attachment:
        attachment = Attachment(self._id(), name, data, media_type, next(iter(self.users)), self.now())
        issue.attachments.append(attachment)
        self._touch(issue)
        self._emit("attachment_created", None, attachment=attachment)
        return attachment

    def _touch(self, issue: Issue) -> None:
        issue.updated = max(self.now(), issue.updated + timedelta(milliseconds=1))

    def _emit(self, name: str, issue: Issue | None, **parts: Any) -> None:
        self.events.append(Event(name, self.now(), issue, **parts))

    # Who may see what

    def may_see_project(self, user: User, project: Project) -> bool:
        return any(
            self.holds(user, grant, project, None, may_depend=True)
            for grant in project.grants
            if grant.permission == "BROWSE_PROJECTS"
        )

    def may_see(self, user: User, issue: Issue) -> bool:
        project = self.projects[issue.project]
        if not any(
            grant.permission == "BROWSE_PROJECTS" and self.holds(user, grant, project, issue)
            for grant in project.grants
        ):
            return False
        if issue.restricted_to and not any(
            self.holds(user, Grant("projectRole", role), project, issue) for role in issue.restricted_to
        ):
            return False
        levels = [level for level in project.levels if level.id == issue.level]
        return all(any(self.holds(user, grant, project, issue) for grant in level.members) for level in levels)

    def may_see_comment(self, user: User, issue: Issue, comment: Comment) -> bool:
        if comment.visibility is None:
            return True
        kind, name = comment.visibility
        holder = Grant("projectRole" if kind == "role" else "group", name)
        return self.holds(user, holder, self.projects[issue.project], issue)

    def holds(
        self, user: User, grant: Grant, project: Project, issue: Issue | None, *, may_depend: bool = False
    ) -> bool:
        """may_depend: whether a holder by a field of an issue counts without an issue."""
        match grant.type:
            case "anyone":
                return True
            case "user":
                return grant.parameter == user.account_id
            case "group":
                return user.account_id in self.groups[grant.parameter].members
            case "projectRole":
                actors = project.roles.get(grant.parameter, set())
                return user.account_id in actors or any(
                    user.account_id in self.groups[actor[1:]].members for actor in actors if actor.startswith("%")
                )
            case "applicationRole":
                named = [grant.parameter] if grant.parameter else list(self.applications)
                groups = {group for key in named for group in self.applications.get(key, ())}
                return any(user.account_id in self.groups[group].members for group in groups)
            case "projectLead":
                return project.lead == user.account_id
            case "reporter" | "assignee" | "userCustomField" | "groupCustomField" if issue is None:
                return may_depend
            case "reporter":
                return issue is not None and issue.reporter == user.account_id
            case "assignee":
                return issue is not None and issue.assignee == user.account_id
            case "userCustomField":
                return issue is not None and user.account_id in _names(issue.custom.get(grant.parameter))
            case "groupCustomField":
                names = _names(issue.custom.get(grant.parameter) if issue else None)
                return any(user.account_id in self.groups[name].members for name in names)
        return False


def _names(value: Any) -> Iterable[str]:
    return value if isinstance(value, list) else [value] if value else []
