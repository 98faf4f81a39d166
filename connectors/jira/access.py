"""Access: the tags of issues and restricted comments, and the people who hold them.

An issue is readable for whom its project's permission scheme grants *Browse Projects*, and if it has a security level,
only for those of them who are members of the level. Both name people directly, by groups and roles, and by fields of
the issue, such as its reporter. A tag therefore names what grants the access, never the people whom that admits at the
moment, so that a changed scheme, role or level takes effect as soon as the holders of tags are read, whatever happens
to the issues.

``browse:P`` (the holders that the scheme of project P names), ``browse:P:FIELD=HOLDER`` (one holder by a field),
``level:P:LEVEL`` and ``level:P:LEVEL FIELD=HOLDER …`` (the members of a level, and those by fields of one issue),
``issue:ID`` (Data Center: the readers of an issue with a level), ``restriction:P:ROLE,ROLE`` (team-managed projects),
``agents:P``, ``role:P:ROLE``, ``group:ID`` and ``application:KEY``.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from connectors.atlassian import Person, has_address, principal
from connectors.errors import BadData
from connectors.jira.model import Comment, Holders, Issue, Project, Rules
from connectors.jira.options import JiraOptions
from connectors.jira.site import Site
from connectors.runner.guard import require_readable
from connectors.set_aside import Failures, SetAside, may_be_set_aside
from connectors.source import Group, GroupPage
from connectors.tag_queue import TagQueue
from pipeline.core.errors import PenstockError
from pipeline.runtime.tasks import gather_or_cancel

log = structlog.get_logger()

RULES_SECONDS = 60.0
"""How long the names of the fields in a scheme are used for further pages. Who holds what is never cached."""
MAX_CONCURRENT_TAGS = 32
"""Tags whose holders are read at the same time: more than requests are sent, so that a slow response delays few
others."""
MAX_TAG_CHARACTERS = 500
_GROUP = "group:"
_UNSEPARABLE = re.compile(r"[\s=]")


def browse_tag(project: str) -> str:
    return f"browse:{project}"


@dataclass(frozen=True, slots=True)
class Access:
    acl_tags: tuple[str, ...] = ()
    required_tags: tuple[str, ...] = ()

    def requiring(self, tags: Iterable[str] | None) -> Access:
        """Return this access for readers who hold these tags as well; None: for nobody."""
        if tags is None:
            return NOBODY
        return Access(self.acl_tags, tuple(dict.fromkeys([*self.required_tags, *tags])))


NOBODY = Access()


def access_of(issue: Issue, rules: Rules, options: JiraOptions) -> Access:
    """Return the access of an issue and of what everybody sees who sees the issue."""
    project = issue.project
    acl = [browse_tag(project)]
    acl += [f"browse:{project}:{field}={holder}" for field, holder in _holders(issue, rules.browse.fields, options)]
    required: list[str] = []
    if issue.level is not None:
        required.append(_level_tag(issue, issue.level, rules, options))
    roles = issue.restriction
    if roles is None:
        return NOBODY
    if roles:
        required.append(f"restriction:{project}:{','.join(sorted(roles))}")
    return Access(tuple(tag for tag in acl if len(tag) <= MAX_TAG_CHARACTERS), tuple(required))


def _level_tag(issue: Issue, level: str, rules: Rules, options: JiraOptions) -> str:
    """Return the tag of a security level. The holders by fields are in the tag, because a reader has to be a member by
    any of them or by the level itself. Where they do not fit they are left out, which admits fewer people."""
    if options.flavour == "data-center":
        return f"issue:{issue.id}"
    tag = f"level:{issue.project}:{level}"
    members = rules.levels.get(level, Holders())
    pairs = [f"{field}={holder}" for field, holder in _holders(issue, members.fields, options)]
    longer = " ".join([tag, *(pair for pair in pairs if not _UNSEPARABLE.search(pair.partition("=")[2]))])
    return longer if len(longer) <= MAX_TAG_CHARACTERS else tag


def _holders(issue: Issue, fields: Collection[str], options: JiraOptions) -> list[tuple[str, str]]:
    pairs: set[tuple[str, str]] = set()
    for name in fields:
        pairs |= {(name, principal(person, options)) for person in issue.people(name) if person.id or person.username}
        pairs |= {(name, f"{_GROUP}{group}") for group in issue.groups(name)}
    return sorted(pairs)


def comment_tags(comment: Comment, project: Project, rules: Rules) -> tuple[str, ...] | None:
    """Return the tags that a reader of a comment needs besides access to its issue; None: the restriction is of an
    unknown kind, and nobody may read it.

    In a service project every comment is internal that Jira does not say is public: Data Center does not say it.
    """
    tags: list[str] = []
    if comment.is_public is False or (project.is_service_desk and comment.is_public is None):
        tags.append(f"agents:{project.id}")
    if comment.visibility is not None:
        kind, value = comment.visibility.get("type"), str(comment.visibility.get("value") or "")
        identifier = str(comment.visibility.get("identifier") or "")
        if kind == "role":
            role = identifier if identifier.isdecimal() else rules.roles.get(value)
            if role is None:
                return None
            tags.append(f"role:{project.id}:{role}")
        elif kind == "group" and (identifier or value):
            tags.append(f"{_GROUP}{identifier or value}")
        else:
            return None
    return tuple(tags)


@dataclass(slots=True)
class Findings:
    """The gaps in a reading of groups, for ``check``."""

    errors: dict[str, str] = field(default_factory=dict)
    """The reasons, by what nobody holds until then."""
    without_address: set[str] = field(default_factory=set)
    """Accounts whose address is not known."""
    unread: set[str] = field(default_factory=set)
    """Keys of projects that no person, group, role or product may browse."""


class Directory:
    """The rules of projects and the holders of tags."""

    def __init__(
        self, site: Site, options: JiraOptions, set_aside: SetAside, on_new_fields: Callable[[], None]
    ) -> None:
        """on_new_fields: called when a scheme or level begins to admit people by another field of issues, so that the
        tags of issues change."""
        self._site = site
        self._options = options
        self._set_aside = set_aside
        self._on_new_fields = on_new_fields
        self._failures = Failures()
        self._rules: dict[str, tuple[float, Rules]] = {}

    async def rules(self, project: Project) -> Rules:
        """Return the rules of a project, which may have been read RULES_SECONDS ago. What cannot be read admits
        nobody."""
        at, known = self._rules.get(project.id, (float("-inf"), None))
        return known if known is not None and time.monotonic() < at + RULES_SECONDS else await self._read(project)

    async def _read(self, project: Project) -> Rules:
        _, known = self._rules.get(project.id, (0.0, None))
        rules = await self._site.rules(project)
        self._rules[project.id] = time.monotonic(), rules
        if known is not None and _fields(known) != _fields(rules):
            self._on_new_fields()
        return rules

    def known_fields(self) -> set[str]:
        """Return the custom fields by which the permissions of any project name people, as far as they were read."""
        return set[str]().union(*(custom_fields(rules) for _, rules in self._rules.values()))

    async def groups(
        self, tags: Collection[str], projects: Mapping[str, Project], findings: Findings
    ) -> AsyncIterator[Group]:
        """Yield what ``pages`` yields, for these tags."""
        async for page in self.pages(TagQueue(tags), projects, findings, complete=False):
            for group in page.groups:
                yield group

    async def pages(
        self, queue: TagQueue, projects: Mapping[str, Project], findings: Findings, *, complete: bool
    ) -> AsyncIterator[GroupPage]:
        """Yield the holders of these tags and of the tags within them. One whose holders cannot be read is left out,
        which means that it has none. Raises Retryable at the end while a failure may still pass.

        projects: by id. complete: whether these are all tags, so that all that is set aside is among them.
        """
        if queue.is_continued:  # what is left may be nothing but failures
            self._failures.succeed()
        run = _Run(self._site, self._options, self._failures, self._read, projects, findings)
        passing: PenstockError | None = None
        while batch := queue.take(MAX_CONCURRENT_TAGS):
            groups: list[Group] = []
            for tag, group in zip(batch, await gather_or_cancel(*map(run.attempt, batch)), strict=True):
                if isinstance(group, PenstockError):
                    passing = passing or group
                    queue.put_back(tag)
                elif group is not None:
                    groups.append(group)
            queue.add({tag for group in groups for tag in group.of})
            yield GroupPage(groups, queue.cursor)
        require_readable("groups", run.of_data, queue.taken - len(run.of_data))
        if complete:
            self._set_aside.replace(
                "access", {part: f"{error}; until then it admits nobody" for part, error in findings.errors.items()}
            )
        if passing is not None:
            raise passing


def custom_fields(rules: Rules) -> set[str]:
    """Return the custom fields by which the permissions of a project name people."""
    fields = rules.browse.fields.union(*(members.fields for members in rules.levels.values()))
    return {field for field in fields if field not in ("reporter", "assignee")}


def _fields(rules: Rules) -> Mapping[str, Collection[str]]:
    return {"": rules.browse.fields, **{level: members.fields for level, members in rules.levels.items()}}


class _Run:
    """One reading of groups, in which the rules of each project and the applications are read once."""

    def __init__(
        self,
        site: Site,
        options: JiraOptions,
        failures: Failures,
        rules: Callable[[Project], Awaitable[Rules]],
        projects: Mapping[str, Project],
        findings: Findings,
    ) -> None:
        """failures: of earlier readings, by tag. rules: reads the rules of a project."""
        self._site = site
        self._options = options
        self._failures = failures
        self._read_rules = rules
        self._projects = projects
        self._findings = findings
        self.of_data: list[BadData] = []
        """The errors of tags whose holders cannot be read from their data."""
        self._rules: dict[str, Rules] = {}
        self._applications: Mapping[str, Sequence[str]] | None = None
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def attempt(self, tag: str) -> Group | PenstockError | None:
        """Return the group of a tag; None: nobody holds it; an error: a failure that may still pass."""
        name = tag if tag.isprintable() and len(tag) < 200 else "a group with a long name"
        try:
            group = await self._group(tag)
        except PenstockError as error:
            if not may_be_set_aside(error):
                raise
            if isinstance(error, BadData):
                self.of_data.append(error)
            if not self._failures.fail(tag, error):
                return error
            self._findings.errors[f"holders of {name}"] = str(error)
            log.warning("access_unreadable", resource=f"holders of {name}", error=str(error))
            return None
        self._failures.succeed(tag)
        return group

    async def _group(self, tag: str) -> Group | None:
        kind, _, rest = tag.partition(":")
        if kind == "group":
            return self._of_people(tag, await self._site.members(rest))
        if kind == "application":
            return await self._application(tag, rest)
        if kind == "issue":
            readers = await self._site.readers(rest)
            return None if readers is None else self._of_people(tag, readers)
        id, _, rest = rest.partition(":")
        project = self._projects.get(id)
        if project is None:
            return None
        if kind == "role":
            people, groups = await self._site.actors(project, rest)
            return Group(tag, await self._principals_of(people), [f"{_GROUP}{group}" for group in groups])
        if kind == "restriction":
            return Group(tag, (), [f"role:{id}:{role}" for role in rest.split(",")])
        rules = await self._rules_of(project)
        if rules.unreadable is not None and kind in ("browse", "agents"):
            raise BadData(str(rules.unreadable))
        if kind == "browse":
            return _by_field(tag, rest, rules.browse) if rest else await self._held(tag, rules.browse, project)
        if kind == "agents":
            return await self._held(tag, rules.agents, project)
        if kind == "level":
            level, *pairs = rest.split(" ")
            members_of_level = rules.levels.get(level)
            if members_of_level is None:
                return None
            if not pairs:
                return await self._held(tag, members_of_level, project)
            by_fields = [group for pair in pairs if (group := _by_field(tag, pair, members_of_level)) is not None]
            members = sorted({member for group in by_fields for member in group.members})
            return Group(tag, members, [f"level:{id}:{level}", *(inner for group in by_fields for inner in group.of)])
        return None

    async def _rules_of(self, project: Project) -> Rules:
        async with self._reading[project.id]:
            if project.id not in self._rules:
                rules = self._rules[project.id] = await self._read_rules(project)
                for part, reason in rules.errors.items():
                    self._findings.errors[part] = reason
                    log.warning("access_unreadable", resource=part, error=reason)
                for kind in {kind for held in (rules.browse, *rules.levels.values()) for kind in held.unknown}:
                    part = f"holders of type {kind} in project {project.key}"
                    self._findings.errors[part] = "this version does not know that type"
            return self._rules[project.id]

    async def _held(self, tag: str, holders: Holders, project: Project) -> Group:
        """Return the group of the holders that do not depend on an issue."""
        lead = {project.lead} if holders.has_lead and project.lead else set()
        members = await self._principals_of(holders.users | lead)
        of = {f"{_GROUP}{group}" for group in holders.groups}
        of |= {f"role:{project.id}:{role}" for role in holders.roles}
        of |= {f"application:{key}" for key in holders.applications}
        if holders.has_anyone and self._options.anonymous_tag:
            of.add(self._options.anonymous_tag)
        if tag == browse_tag(project.id) and not (members or of or holders.fields):
            self._findings.unread.add(project.key)
        return Group(tag, members, sorted(of))

    async def _application(self, tag: str, key: str) -> Group:
        """Return the users of a product; of any, for an empty key."""
        async with self._reading["applications"]:
            if self._applications is None:
                self._applications = await self._site.applications()
        named = self._applications if not key else {key: self._applications.get(key, ())}
        return Group(tag, (), sorted({f"{_GROUP}{group}" for groups in named.values() for group in groups}))

    def _of_people(self, tag: str, people: Iterable[Person]) -> Group:
        return Group(tag, self._principals(people))

    async def _principals_of(self, ids: Collection[str]) -> list[str]:
        return self._principals((await self._site.people(sorted(ids))).values()) if ids else []

    def _principals(self, people: Iterable[Person]) -> list[str]:
        known = [person for person in people if person.id or person.username]
        self._findings.without_address |= {
            person.username or person.id for person in known if not has_address(person, self._options)
        }
        return sorted({principal(person, self._options) for person in known})


def _by_field(tag: str, pair: str, holders: Holders) -> Group | None:
    """Return the holder whom a field of an issue names, while the field grants the permission."""
    name, _, holder = pair.partition("=")
    if name not in holders.fields or not holder:
        return None
    return Group(tag, (), [holder]) if holder.startswith(_GROUP) else Group(tag, [holder])
