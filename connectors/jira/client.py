"""Jira Cloud (REST v3) and Jira Data Center (REST v2).

https://developer.atlassian.com/cloud/jira/platform/rest/v3/ and https://developer.atlassian.com/server/jira/platform/rest/.
They share most resources, and differ in paging, in the format of texts, and in how they name people and groups.
"""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

from connectors.atlassian import Person
from connectors.errors import BadData
from connectors.jira import model
from connectors.jira.content import MAX_BODY_CHARACTERS, file_names, packed, without_text
from connectors.jira.model import Comment, Holders, Issue, Json, Project, Rules, holders, is_reader, person
from connectors.jira.options import JiraOptions
from connectors.jira.site import Listing, Position, Projects
from connectors.set_aside import each, may_be_set_aside, name_of, read_accounts, read_isolated, reading_data
from connectors.source import CursorExpired
from connectors.web import Missing, Rejected, ServerFailed, TooLarge, Web
from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.runtime.tasks import gather_or_cancel

T = TypeVar("T")

LISTED_FIELDS = (
    "summary",
    "project",
    "issuetype",
    "status",
    "resolution",
    "priority",
    "labels",
    "components",
    "fixVersions",
    "parent",
    "reporter",
    "assignee",
    "updated",
    "security",
    "issuerestriction",
    "archiveddate",
    "attachment",
    "comment",
)
"""The fields on which access, revision and metadata depend."""
TEXT_FIELDS = ("description", "environment")
MAX_PAGES = 100_000
"""A listing with more pages is taken for a server's mistake that would never end."""
MAX_PROJECTS_IN_JQL = 40
"""With more projects than this a search does not name them, because they are part of the URL."""
FAILING_SECONDS = 5.0
"""Attempts at a request that Jira answers with 5xx; after them less is requested."""
MAX_COMMENTS_BYTES = MAX_BODY_CHARACTERS
"""The most bytes of the comments of an issue that are restricted in the same way, and half of those of all: no document
can hold more. Jira allows 5,000 comments of 32 kB."""
PER_PAGE = 50
"""People and projects on a page: the most that Jira returns at once."""
PEOPLE_AT_ONCE = 100
ISSUES_AT_ONCE = 50
OVERLAP_ISSUES = 5
"""Data Center: each page repeats this many issues of the one before, because deleting an issue moves the rest up."""
MAX_READERS = 1_000
"""Data Center: the most people that a search for readers returns."""
_GROUP_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@contextmanager
def parsing(name: str) -> Iterator[None]:
    """Raise ServerFailed, without any content, for a response that is not in Jira's format. What is wrong with one of
    the things that it holds is BadData (``reading_data``), which concerns that thing alone."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerFailed(
            f"{name}: a response is not in Jira's format ({type(error).__name__}); if this persists, check that"
            " base_url is the address of Jira itself"
        ) from None


def _fields(extra: Collection[str], *, full: bool) -> list[str]:
    return [*LISTED_FIELDS, *(TEXT_FIELDS if full else ()), *sorted(extra)]


def batched(ids: Iterable[str], size: int) -> Iterator[list[str]]:
    remaining = iter(ids)
    while batch := list(islice(remaining, size)):
        yield batch


class _Jira:
    """The resources that both flavours have."""

    root: str
    """The path of the REST API."""
    rendered: str | None = None
    """The expansion by which comments come as HTML; None: they have a format of their own."""

    def __init__(self, web: Web, options: JiraOptions) -> None:
        self.web = web
        self._options = options
        self._needs_comments = options.comments or options.attachments  # a comment restricts the files that it shows

    async def close(self) -> None:
        await self.web.close()

    async def _get(self, path: str, **params: Any) -> Any:
        return await self.web.json("GET", f"{self.root}/{path}", params=params, failing_seconds=FAILING_SECONDS)

    async def _pages(self, path: str, key: str, **params: Any) -> AsyncIterator[Json]:
        """Yield all entries of a list that is paged by ``startAt``. The server may reduce ``maxResults``."""
        start = 0
        for _ in range(MAX_PAGES):
            answer = await self._get(path, **params, startAt=start)
            with parsing(self.web.name):
                entries = list(answer[key])
                total = answer.get("total")
                is_last = answer["isLast"] is True if "isLast" in answer else start + len(entries) >= int(total)
            for entry in entries:
                yield entry
            start += len(entries)
            if is_last or (not entries and total is None):
                return
            if not entries:
                raise Retryable(f"{self.web.name}: a list of Jira ends before its last page")
        raise Retryable(f"{self.web.name}: a list of Jira does not end")

    async def me(self) -> Person:
        with parsing(self.web.name):
            return person(await self._get("myself"))

    # Projects

    async def projects(self) -> Projects:
        projects: dict[str, Project] = {}
        named: dict[str, str] = {}
        missing: list[str] = []
        if self._options.projects:
            for key in self._options.projects:
                try:
                    json = await self._get(f"project/{key}", expand="lead")
                except Missing:
                    missing.append(key)
                    continue
                id = self._add_project(projects, json)
                if id is None:
                    missing.append(key)
                else:
                    named[key] = id
            if not projects:
                raise Misconfigured(f"{self.web.name}: {no_such_project(missing)}")
        else:
            async for json in self._all_projects():
                self._add_project(projects, json)
        excluded = self._options.exclude_projects
        ids = sorted((id for id, project in projects.items() if project.key not in excluded), key=int)
        return Projects({id: projects[id] for id in ids}, named, missing)

    def _add_project(self, projects: dict[str, Project], json: Json) -> str | None:
        """Add a project, and return its id; None: it is archived or in the trash."""
        with parsing(self.web.name):
            if json.get("archived") is True or json.get("deleted") is True:
                return None
            project = model.project(json)
            projects[project.id] = project
            return project.id

    @abstractmethod
    def _all_projects(self) -> AsyncIterator[Json]:
        """Yield all projects that the account may browse, with their leads."""

    # Issues

    async def listing(
        self, project: Project, position: Position | None, extra: Collection[str], *, full: bool, size: int
    ) -> Listing:
        jql = f'project = "{project.key}" ORDER BY created ASC, key ASC'
        try:
            rows, following = await self._search(jql, _fields(extra, full=full), position, size)
            issues, failed = await self._complete(rows, full=full)
        except (ServerFailed, TooLarge):
            # A single issue that Jira cannot render fails every response that contains it.
            rows, following = await self._search(jql, ("project",), position, size)
            ids, unnamed = each(rows, lambda row: str(int(row["id"])), id_in)
            issues, failed = await read_isolated(ids, lambda some: self.issues(some, extra, full=full))
            failed |= unnamed
        return Listing([issue for issue in issues if issue.project == project.id], following, failed)

    @abstractmethod
    async def issues(self, ids: Sequence[str], extra: Collection[str], *, full: bool = True) -> Sequence[Issue]: ...

    @abstractmethod
    async def _search(
        self, jql: str, fields: Sequence[str], position: Position | None, size: int
    ) -> tuple[Sequence[Json], Position | None]:
        """Return one page of results, and the position of the next. Raises CursorExpired."""

    async def _complete(self, rows: Iterable[Json], *, full: bool) -> tuple[list[Issue], dict[str, PenstockError]]:
        """Parse issues, and read the comments of those of which a response holds only some; their texts only with
        ``full``."""
        issues: list[Issue] = []
        failed: dict[str, PenstockError] = {}
        for number, row in enumerate(rows, 1):
            id = name_of(row, id_in, number)
            try:
                with reading_data():
                    issue = model.issue(row)
                if self._needs_comments and issue.comments_total > len(issue.comments):
                    issue = replace(issue, comments=await self._comments(issue, full=full))
                else:
                    convert = _packed if full else partial(without_text, names=file_names(issue))
                    issue = replace(issue, comments=await _converted(issue, convert))
            except Missing:
                continue  # it was deleted meanwhile
            except PenstockError as error:
                if not may_be_set_aside(error):
                    raise
                failed[id] = error
            else:
                issues.append(issue)
        return issues, failed

    async def _comments(self, issue: Issue, *, full: bool) -> tuple[Comment, ...]:
        """Read all comments of an issue; without texts where no document can hold them. Whoever may write public
        comments does not decide about the restricted ones, which are other documents."""
        comments: dict[str, Comment] = {}
        names, ids, sizes = file_names(issue), defaultdict[Hashable, list[str]](list), Counter[Hashable]()
        too_long: set[Hashable] = set()
        pages = self._pages(f"issue/{issue.id}/comment", "comments", maxResults=PER_PAGE, expand=self.rendered)
        async for json in pages:
            with reading_data():
                comment = model.comment(json)
                restriction = comment.is_public, str(comment.visibility)
                if not full or restriction in too_long:
                    comments[comment.id] = without_text(comment, names)
                else:
                    comments[comment.id], size = packed(comment)
                    ids[restriction].append(comment.id)
                    sizes[restriction] += size
                if sizes[restriction] > MAX_COMMENTS_BYTES or sizes.total() > 2 * MAX_COMMENTS_BYTES:
                    [(longest, _)] = sizes.most_common(1)
                    del sizes[longest]
                    too_long.add(longest)
                    comments |= {id: without_text(comments[id], names) for id in ids.pop(longest)}
            await asyncio.sleep(0)
        return tuple(comments.values())

    async def changed(self, projects: Projects, minutes: int) -> Mapping[str, str]:
        """Search by a time that is relative to the server's clock: a written one is read in the time zone of the
        account's profile, and knows no seconds."""
        keys = [project.key for project in projects.by_id.values()]
        if 0 < len(keys) <= MAX_PROJECTS_IN_JQL:
            named = ", ".join(f'"{key}"' for key in keys)
            try:
                return await self._changed(projects, f'updated >= "-{minutes}m" AND project in ({named})')
            except Rejected:
                pass  # one of them cannot be searched: its listing says why
        return await self._changed(projects, f'updated >= "-{minutes}m"')

    async def _changed(self, projects: Projects, condition: str) -> Mapping[str, str]:
        jql = f"{condition} ORDER BY updated ASC"
        changed: dict[str, str] = {}
        position: Position | None = None
        for _ in range(MAX_PAGES):
            rows, position = await self._search(jql, ("updated", "project"), position, self._options.sweep_page_size)
            changes, _ = each(rows, _change, id_in)  # what cannot be read is found by sweeps
            changed |= {id: updated for id, project, updated in changes if project in projects.by_id}
            if position is None:
                return changed
        raise Retryable(f"{self.web.name}: a search of Jira does not end")

    # Access

    async def rules(self, project: Project) -> Rules:
        errors: dict[str, str] = {}

        async def part(name: str, read: AsyncIterator[T]) -> list[T]:
            try:
                return [entry async for entry in read]
            except PenstockError as error:
                if not may_be_set_aside(error) or isinstance(error, ServerFailed):
                    raise
                errors[f"{name} of project {project.key}"] = str(error)
                return []

        grants = await part("permission scheme", self._grants(project))
        levels = await part("security levels", self._levels(project))
        roles = await part("roles", self._roles(project))
        held = {"BROWSE_PROJECTS": Holders(), "SERVICEDESK_AGENT": Holders()}
        unreadable: BadData | None = None
        try:
            with reading_data():
                held = {
                    permission: holders(grant["holder"] for grant in grants if grant["permission"] == permission)
                    for permission in held
                }
        except BadData as error:
            unreadable = error
            errors[f"permission scheme of project {project.key}"] = str(error)
        return Rules(held["BROWSE_PROJECTS"], held["SERVICEDESK_AGENT"], dict(levels), dict(roles), errors, unreadable)

    async def _grants(self, project: Project) -> AsyncIterator[Json]:
        answer = await self._get(f"project/{project.id}/permissionscheme", expand="permissions,user,group,projectRole")
        with parsing(self.web.name):
            grants = list(answer["permissions"])
        for grant in grants:
            yield grant

    @abstractmethod
    def _levels(self, project: Project) -> AsyncIterator[tuple[str, Holders]]:
        """Yield the members of each security level of a project."""

    @abstractmethod
    def _roles(self, project: Project) -> AsyncIterator[tuple[str, str]]:
        """Yield the name and id of each role, where comments name roles without their ids."""

    async def applications(self) -> Mapping[str, Sequence[str]]:
        answer = await self._get("applicationrole")
        with reading_data():
            return {str(role["key"]): self._groups_of(role) for role in answer}

    @staticmethod
    def _groups_of(role: Json) -> Sequence[str]:
        return [str(name) for name in role["groups"]]

    async def readers(self, issue: str) -> Sequence[Person] | None:
        return None

    async def _members(self, **params: Any) -> Sequence[Person]:
        rows = self._pages("group/member", "values", maxResults=PER_PAGE, **params)
        members = await read_accounts(rows, lambda row: person(row) if is_reader(row) else None)
        return [member for member in members if member is not None]


def _packed(comment: Comment) -> Comment:
    return packed(comment)[0]


async def _converted(issue: Issue, convert: Callable[[Comment], Comment]) -> tuple[Comment, ...]:
    """Return the comments of an issue, each converted in a turn of its own: a text may be made to be slow to search."""
    comments = list[Comment]()
    for comment in issue.comments:
        with reading_data():
            comments.append(convert(comment))
        await asyncio.sleep(0)
    return tuple(comments)


def id_in(json: Any) -> object:
    return json["id"]


def _change(row: Json) -> tuple[str, str, str]:
    """Return the ids of an issue and of its project, and when it was updated."""
    return str(int(row["id"])), str(int(row["fields"]["project"]["id"])), str(row["fields"]["updated"])


def _reader(json: Json) -> list[Person]:
    """Return a person who can log in; nobody for any other account, and for one whose data cannot be read."""
    people, _ = each([json], lambda json: person(json) if is_reader(json) else None, lambda json: json["displayName"])
    return [reader for reader in people if reader is not None]


def no_such_project(keys: Sequence[str]) -> str:
    return (
        f"the account sees no project with the key {', '.join(keys)}: if it is archived or deleted, remove it from"
        " projects; otherwise correct the key, or let the account browse it"
    )


class Cloud(_Jira):
    """Jira Cloud. Search is paged by tokens, and holds the first 20 comments of an issue."""

    root = "rest/api/3"

    async def _all_projects(self) -> AsyncIterator[Json]:
        async for json in self._pages("project/search", "values", maxResults=PER_PAGE, expand="lead", status="live"):
            yield json

    async def _search(
        self, jql: str, fields: Sequence[str], position: Position | None, size: int
    ) -> tuple[Sequence[Json], Position | None]:
        token = (position or {}).get("token")
        try:
            answer = await self._get(
                "search/jql", jql=jql, fields=",".join(fields), maxResults=size, nextPageToken=token
            )
        except Rejected as error:
            if token is not None and error.status == 400:
                raise CursorExpired(f"{self.web.name}: Jira no longer knows the token of a page") from error
            raise
        with parsing(self.web.name):
            rows, following = list(answer["issues"]), answer.get("nextPageToken")
            if following is None and answer.get("isLast") is False:
                raise ValueError("a page that is not the last has no token")
            if following is not None and following == token:
                raise ValueError("a page follows itself")
        return rows, None if following is None else {"token": str(following)}

    async def issues(self, ids: Sequence[str], extra: Collection[str], *, full: bool = True) -> Sequence[Issue]:
        fields = _fields(extra, full=full)
        issues: list[Issue] = []
        for batch in batched(ids, ISSUES_AT_ONCE):
            body = {"issueIdsOrKeys": batch, "fields": fields}
            answer = await self.web.json(
                "POST", f"{self.root}/issue/bulkfetch", json=body, failing_seconds=FAILING_SECONDS
            )
            with parsing(self.web.name):
                rows = list(answer["issues"])
                unread = set(batch) - {str(row["id"]) for row in rows}
            # The reasons are texts for people: only the resource of an issue says for certain that it does not exist.
            for id in sorted(unread):
                try:
                    rows.append(await self._get(f"issue/{id}", fields=",".join(fields)))
                except Missing:
                    continue
            complete, failed = await self._complete(rows, full=full)
            if failed:
                raise next(iter(failed.values()))
            issues += [issue for issue in complete if issue.id in batch]
        return issues

    async def _levels(self, project: Project) -> AsyncIterator[tuple[str, Holders]]:
        try:
            scheme = await self._get(f"project/{project.id}/issuesecuritylevelscheme")
        except Missing:
            return  # the project has none
        with parsing(self.web.name):
            levels = {str(int(level["id"])): list[Json]() for level in scheme.get("levels") or ()}
            path = f"issuesecurityschemes/{int(scheme['id'])}/members"
        if not levels:
            return
        async for member in self._pages(path, "values", maxResults=PER_PAGE, expand="user,group,projectRole,field"):
            with reading_data():
                levels.setdefault(str(int(member["issueSecurityLevelId"])), []).append(member["holder"])
        for level, members in levels.items():
            with reading_data():
                held = holders(members)
            yield level, held

    async def _roles(self, project: Project) -> AsyncIterator[tuple[str, str]]:
        nothing: tuple[tuple[str, str], ...] = ()
        for role in nothing:  # comments name roles with their ids
            yield role

    async def actors(self, project: Project, role: str) -> tuple[Collection[str], Collection[str]]:
        answer = await self._get(f"project/{project.id}/role/{role}", excludeInactiveUsers="true")
        people: set[str] = set()
        groups: set[str] = set()
        with reading_data():
            for actor in answer.get("actors") or ():
                if actor["type"] == "atlassian-user-role-actor":
                    people.add(str(actor["actorUser"]["accountId"]))
                elif actor["type"] == "atlassian-group-role-actor":
                    group = actor["actorGroup"]
                    groups.add(str(group.get("groupId") or group["name"]))
        return people, groups

    async def members(self, group: str) -> Sequence[Person]:
        return await self._members(**{"groupId" if _GROUP_ID.fullmatch(group) else "groupname": group})

    @staticmethod
    def _groups_of(role: Json) -> Sequence[str]:
        return [str(group.get("groupId") or group["name"]) for group in role["groupDetails"]]

    async def people(self, ids: Collection[str]) -> Mapping[str, Person]:
        people: dict[str, Person] = {}
        for batch in batched(ids, PEOPLE_AT_ONCE):
            async for json in self._pages("user/bulk", "values", accountId=batch, maxResults=len(batch)):
                people |= {reader.id: reader for reader in _reader(json)}
        return people

    def download(self, attachment: str, name: str) -> str:
        """Return an address that redirects to the media store."""
        return f"{self.root}/attachment/content/{attachment}"


class DataCenter(_Jira):
    """Jira Data Center. Search is paged by position, and returns whole issues."""

    root = "rest/api/2"
    rendered = "renderedBody"

    async def _all_projects(self) -> AsyncIterator[Json]:
        answer = await self._get("project", expand="lead")
        with parsing(self.web.name):
            projects = list(answer)
        for json in projects:
            yield json

    async def _search(
        self, jql: str, fields: Sequence[str], position: Position | None, size: int
    ) -> tuple[Sequence[Json], Position | None]:
        start, last = int((position or {}).get("start", 0)), list((position or {}).get("last", ()))
        answer = await self._get(
            "search",
            jql=jql,
            fields=",".join(fields),
            expand="renderedFields" if "description" in fields else None,
            startAt=start - len(last),
            maxResults=size,
        )
        with parsing(self.web.name):
            rows, total = list(answer["issues"]), int(answer["total"])
            ids = [name_of(row, id_in) for row in rows]
            following = start - len(last) + len(rows)
            new = [row for row, id in zip(rows, ids, strict=True) if id not in last or id == name_of(None, id_in)]
            if following >= total:
                return new, None
            if following <= start:
                raise ValueError("a page before the last holds nothing new")
            overlap = min(OVERLAP_ISSUES, len(rows) // 4)
            return new, {"start": following, "last": ids[len(ids) - overlap :]}

    async def issues(self, ids: Sequence[str], extra: Collection[str], *, full: bool = True) -> Sequence[Issue]:
        fields = ",".join(_fields(extra, full=full))

        async def read(id: str) -> list[Json]:
            try:
                return [await self._get(f"issue/{id}", fields=fields, expand="renderedFields" if full else None)]
            except Missing:
                return []

        issues: list[Issue] = []
        for batch in batched(ids, 4):
            rows = [row for answers in await gather_or_cancel(*map(read, batch)) for row in answers]
            complete, failed = await self._complete(rows, full=full)
            if failed:
                raise next(iter(failed.values()))
            issues += complete
        return issues

    async def _levels(self, project: Project) -> AsyncIterator[tuple[str, Holders]]:
        nothing: tuple[tuple[str, Holders], ...] = ()
        for level in nothing:  # no resource shows the members of a level: see ``readers``
            yield level

    async def _roles(self, project: Project) -> AsyncIterator[tuple[str, str]]:
        answer = await self._get(f"project/{project.id}/role")
        with parsing(self.web.name):
            roles = {str(name): str(int(str(url).rpartition("/")[2])) for name, url in answer.items()}
        for pair in roles.items():
            yield pair

    async def actors(self, project: Project, role: str) -> tuple[Collection[str], Collection[str]]:
        answer = await self._get(f"project/{project.id}/role/{role}")
        people: set[str] = set()
        groups: set[str] = set()
        with reading_data():
            for actor in answer.get("actors") or ():
                if actor.get("type") == "atlassian-user-role-actor":
                    people.add(f"@{actor['name']}")
                elif actor.get("type") == "atlassian-group-role-actor":
                    groups.add(str(actor["name"]))
        return people, groups

    async def members(self, group: str) -> Sequence[Person]:
        return await self._members(groupname=group)

    async def readers(self, issue: str) -> Sequence[Person] | None:
        """Search for the people who may read an issue: ``.`` matches every name."""
        try:
            json = await self._get(f"issue/{issue}", fields="project")
            with parsing(self.web.name):
                key = str(json["key"])
            answer = await self._get("user/viewissue/search", issueKey=key, username=".", maxResults=MAX_READERS)
        except Missing:
            return None
        with parsing(self.web.name):
            rows = list(answer)
        return [reader for row in rows for reader in _reader(row)]

    async def people(self, ids: Collection[str]) -> Mapping[str, Person]:
        people: dict[str, Person] = {}
        for id in ids:
            try:
                json = await self._get("user", **{"username": id[1:]} if id.startswith("@") else {"key": id})
            except Missing:
                continue
            for reader in _reader(json):
                people[id] = reader
        return people

    def download(self, attachment: str, name: str) -> str:
        return f"secure/attachment/{attachment}/{quote(name, safe='')}"
