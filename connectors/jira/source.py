"""Jira as a source of documents."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import ClassVar

import httpx

from connectors.access_memory import AccessMemory, Listener
from connectors.atlassian import lookback_minutes, translated_errors, verify
from connectors.errors import BadData
from connectors.file_documents import document_from_file
from connectors.files import temporary_file
from connectors.jira import content
from connectors.jira.access import Directory, Findings, browse_tag, custom_fields
from connectors.jira.changes import Event, Progress, parse, reaction
from connectors.jira.check import check
from connectors.jira.client import Cloud, DataCenter, no_such_project
from connectors.jira.content import ATTACHMENT, COMMENTS, Part
from connectors.jira.model import Attachment, Issue, Project, Rules
from connectors.jira.options import JiraOptions
from connectors.jira.site import Listing, Position, Projects, Site
from connectors.listings import ListedPage, read_listings
from connectors.portions import pages_of
from connectors.protocol import Problem
from connectors.replay import Received, require_recent
from connectors.room import TooMuchText, bounded
from connectors.set_aside import Failures, may_be_set_aside, read_isolated, reading_data
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Entry,
    Gone,
    Group,
    GroupPage,
    Listed,
    MetadataKeys,
    Page,
    Playground,
    Reaction,
    Request,
    Unlisted,
)
from connectors.tag_queue import TagQueue
from connectors.web import Forbidden, Limits, Missing, TooLarge, Web
from pipeline.core.errors import PenstockError, Retryable
from pipeline.runtime.tasks import gather_or_cancel

MAX_CONCURRENT_FILES = 3
MAX_KNOWN_ISSUES = 100_000
"""Issues whose comments and files are remembered, so that a poll does not read all files of an updated issue again."""
PROJECTS_SECONDS = 60.0
"""How long the list of projects is used for reading single documents. Access is never read from it."""
PROJECTS = "projects"
"""The name in Memory of the ids of the projects that the settings name, by key."""


_Place = tuple[Project, Position | None]
"""The listing of a project, and where its next page begins."""


@dataclass(frozen=True, slots=True)
class _Read:
    """An issue with its documents."""

    issue: Issue
    parts: Sequence[Part]


class Jira:
    """``connectors.source.Source``. The external id of an issue is its id, which it keeps when it is renamed or moved;
    those of its other documents begin with it (``content.Part``)."""

    Options: ClassVar[type[JiraOptions]] = JiraOptions
    metadata_keys: ClassVar[MetadataKeys] = {
        "kind": "keyword",
        "project": "keyword",
        "key": "keyword",
        "type": "keyword",
        "status": "keyword",
        "resolution": "keyword",
        "priority": "keyword",
        "labels": "keyword",
        "components": "keyword",
        "fix_versions": "keyword",
        "assignee": "keyword",
        "reporter": "keyword",
        "parent": "keyword",
        "comments": "number",
    }

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        """A fake Jira Cloud. ``connectors.jira.playground:JiraDataCenter`` has the other flavour."""
        from connectors.jira.playground import cloud  # lazy: production never loads the fake

        return cloud()

    def __init__(self, options: JiraOptions, context: Context, *, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        """Raises Misconfigured."""
        self._options = options
        self._context = context
        token, headers, auth = options.token.get_secret_value(), {}, None
        if options.email:
            auth = httpx.BasicAuth(options.email, token)
        else:
            headers = {"Authorization": f"Bearer {token}"}
        self._web = Web(
            options.base_url,
            headers=headers,
            auth=auth,
            also=options.media_hosts,
            name=context.name,
            limits=replace(limits, parallel=options.concurrent_requests),
        )
        self._site: Site = Cloud(self._web, options) if options.flavour == "cloud" else DataCenter(self._web, options)
        self._listener = Listener()
        self._memory = AccessMemory(context.memory, self._listener.groups)
        self._directory = Directory(self._site, options, context.set_aside, self._listener.sweep)
        self._findings = Findings()
        """Findings of the last complete listing of groups."""
        self._failures = Failures()
        self._received = Received()
        self._known: OrderedDict[str, dict[str, object]] = OrderedDict()
        """By issue: the documents besides the issue itself, and their state, as they were read or listed last."""
        self._selected: tuple[float, Projects | None] = float("-inf"), None
        through_gateway = "api.atlassian.com" in options.base_url
        self._base = options.site_url or (None if through_gateway else options.base_url)
        self._files = asyncio.Semaphore(MAX_CONCURRENT_FILES)
        self._too_large = (
            f"is larger than {options.max_attachment_bytes:,} bytes: raise max_attachment_bytes, or divide the file"
        )

    async def close(self) -> None:
        await self._site.close()

    async def check(self) -> Sequence[Problem]:
        return await check(self._site, self._directory, self._options, self._context)

    # Reading

    async def start(self) -> Cursor:
        with self._translate_errors():
            await self._projects()
            return Progress(datetime.now(UTC), {}).cursor

    async def _projects(self, *, fresh: bool = True) -> Projects:
        """Return the projects to read, and remember their ids: those of a project that is no longer visible tell which
        documents are its. fresh: do not use a list that was read before."""
        at, projects = self._selected
        if projects is not None and not fresh and time.monotonic() < at + PROJECTS_SECONDS:
            return projects
        projects = await self._site.projects()
        self._selected = time.monotonic(), projects
        if projects.named:
            before = await self._context.memory.get(PROJECTS) or {}
            if projects.named.items() - before.items():
                await self._context.memory.put(PROJECTS, {**before, **projects.named})
        return projects

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        """Read project by project in the order of their ids, and the issues of each as they were created."""
        at, position = _resume_position(cursor)
        with self._translate_errors():
            projects = await self._projects()
            failure, any_read = None, at > 0 or position is not None
            for key in projects.missing:
                self._set_aside(f"project {key}", no_such_project([key]))
            for project in projects.by_id.values():
                if int(project.id) < at:
                    continue
                following = position if int(project.id) == at else None
                while True:
                    ids: list[str] = []
                    try:
                        with bounded():
                            entries, listing = await self._read_page(project, following)
                    except TooMuchText:
                        entries, listing = [], await self._listing(project, following, full=False)
                        ids = [issue.id for issue in listing.issues]
                        for id, reason in listing.failed.items():
                            self._set_aside(f"issue {id}", reason)
                    except PenstockError as error:
                        await self._require_alive(error)
                        failure, entries, listing = error, [], None
                        self._set_aside(f"project {project.key}", error)
                    any_read |= listing is not None
                    following = listing.next if listing else None
                    place = {"project": int(project.id) + (following is None), "next": following}
                    if ids:
                        read = partial(self._read, projects=projects, select=lambda _part: True)
                        async with aclosing(pages_of(ids, read, place)) as pages:
                            async for page in pages:
                                yield page
                    else:
                        yield Page(entries, place)
                    if following is None:
                        break
            if failure is not None and not any_read:
                raise failure

    async def _read_page(self, project: Project, position: Position | None) -> tuple[list[Entry], Listing]:
        rules = await self._directory.rules(project)
        listing = await self._listing(project, position, full=True)
        failed = {**listing.failed}
        reads = await self._with_parts(listing.issues, {project.id: (project, rules)}, failed)
        for id, error in failed.items():
            self._set_aside(f"issue {id}", error)
        return await self._entries(reads, lambda part: True), listing

    async def _listing(self, project: Project, position: Position | None, *, full: bool) -> Listing:
        fields, size = custom_fields(await self._directory.rules(project)), self._options.page_size
        return await self._site.listing(project, position, fields, full=full, size=size)

    async def _with_parts(
        self,
        issues: Sequence[Issue],
        projects: Mapping[str, tuple[Project, Rules]],
        failed: dict[str, PenstockError],
    ) -> dict[str, _Read]:
        """Return issues with their documents, by id, without issues of other projects. failed: receives the errors of
        issues whose data cannot be read."""
        reads: dict[str, _Read] = {}
        for issue in issues:
            if issue.project in projects:
                try:
                    with reading_data():
                        parts = await asyncio.to_thread(content.parts, issue, *projects[issue.project], self._options)
                    reads[issue.id] = _Read(issue, parts)
                except BadData as error:
                    failed[issue.id] = error
        await self._memory.record(
            {
                part.external_id: ((*part.access.acl_tags, *part.access.required_tags), None)
                for read in reads.values()
                for part in read.parts
            }
        )
        return reads

    async def _entries(self, reads: Mapping[str, _Read], select: Callable[[Part], bool]) -> list[Entry]:
        """Read the selected documents of issues."""
        selected = [(part, read.issue) for read in reads.values() for part in read.parts if select(part)]
        entries = await gather_or_cancel(*(self._entry(part, issue) for part, issue in selected))
        ids = {part.external_id for part, _ in selected}
        for id, read in reads.items():
            self._remember(id, read.parts, ids)
        return entries

    async def _entry(self, part: Part, issue: Issue) -> Entry:
        try:
            with reading_data():
                if part.attachment is None:
                    return await asyncio.to_thread(content.document, part, issue, self._base)
                entry = await self._read_file(part, part.attachment, issue)
        except Missing:
            return Gone(part.external_id)
        except TooLarge:
            return part.unreadable("too_large", self._too_large, revision=part.revision)
        except Forbidden:
            message = "redirects to a host that is not allowed: if the host is your own, add it to media_hosts"
            return part.unreadable("forbidden_address", message, revision=part.revision)
        except PenstockError as error:
            if not may_be_set_aside(error):
                raise
            if not self._failures.fail(part.external_id, error):
                raise Retryable(str(error)) from error
            return content.unavailable(part.external_id, part, error)
        self._failures.succeed(part.external_id)
        return entry

    async def _read_file(self, part: Part, attachment: Attachment, issue: Issue) -> Entry:
        limit = self._options.max_attachment_bytes
        if attachment.size > limit:
            return part.unreadable("too_large", self._too_large, revision=part.revision)
        address = self._site.download(attachment.id, attachment.name)
        async with self._files:
            with temporary_file(self._context.folder) as path:
                await self._web.download(address, path, max_bytes=limit)
                return await document_from_file(
                    path,
                    attachment.name,
                    external_id=part.external_id,
                    acl_tags=part.access.acl_tags,
                    required_tags=part.access.required_tags,
                    revision=part.revision,
                    media_type=attachment.media_type or None,
                    source_url=content.url(issue, self._base),
                    author=attachment.author or None,
                    source_modified_at=datetime.fromisoformat(attachment.created),
                    metadata=content.file_metadata(issue, ATTACHMENT),
                )

    def _remember(self, issue: str, parts: Sequence[Part], current: Collection[str]) -> None:
        """Remember the state of the documents that ``current`` names; the others stay as they are known."""
        before = self._known.pop(issue, {})
        states = {
            part.external_id: (part.access, part.revision) if part.external_id in current else before[part.external_id]
            for part in parts
            if part.external_id != issue and (part.external_id in current or part.external_id in before)
        }
        if states:
            self._known[issue] = states
            if len(self._known) > MAX_KNOWN_ISSUES:
                self._known.popitem(last=False)

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        """Read the issues that were updated since the last poll and the overlap before it. Of their comments and files
        those are read that are new, or have another state than when they were read or listed last."""
        progress, began = Progress.from_cursor(cursor), datetime.now(UTC)
        minutes = lookback_minutes(progress.polled_at, began, self._options.overlap_minutes)
        with self._translate_errors(), self._retry_expired_cursor():
            projects = await self._projects()
            updates = await self._site.changed(projects, minutes)
            while unread := progress.unread(updates):
                for start in range(0, len(unread), self._options.page_size):
                    ids = unread[start : start + self._options.page_size]
                    progress = progress.with_read({id: updates[id] for id in ids})
                    read = partial(self._read, projects=projects, select=self._has_changed, with_parts=True)
                    async with aclosing(pages_of(ids, read, progress.cursor)) as pages:
                        async for page in pages:
                            yield page
                # An update during the search moves its issue to the end, and another one across a page's edge.
                updates = await self._site.changed(projects, minutes)
            yield Page((), progress.completed(began, updates).cursor)

    def _has_changed(self, part: Part) -> bool:
        issue = content.split_id(part.external_id) or ""
        return part.external_id == issue or self._known.get(issue, {}).get(part.external_id) != (
            part.access,
            part.revision,
        )

    async def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        with self._translate_errors(), self._retry_expired_cursor():
            async with self._memory.listing():
                projects = await self._projects()
                known = await self._context.memory.get(PROJECTS) or {}
                if projects.missing:
                    yield [
                        Unlisted(
                            part=f"project {key}",
                            reason=no_such_project([key]),
                            tag=browse_tag(known[key]) if key in known else None,
                        )
                        for key in projects.missing
                    ]
                beginnings: list[_Place] = [(project, None) for project in projects.by_id.values()]
                async with aclosing(read_listings(beginnings, self._slim_page)) as pages:
                    async for page in pages:
                        yield page

    async def _slim_page(self, place: _Place) -> ListedPage[_Place]:
        project, position = place
        try:
            entries, following = await self._listed_page(project, position)
        except PenstockError as error:
            await self._require_alive(error)
            part = Unlisted(part=f"project {project.key}", reason=str(error), tag=browse_tag(project.id))
            return ListedPage([part], failure=error)
        return ListedPage(entries, None if following is None else (project, following))

    async def _listed_page(
        self, project: Project, position: Position | None
    ) -> tuple[list[Listed | Unlisted], Position | None]:
        rules = await self._directory.rules(project)
        size, fields = self._options.sweep_page_size, custom_fields(rules)
        listing = await self._site.listing(project, position, fields, full=False, size=size)
        failed = {**listing.failed}
        reads = await self._with_parts(listing.issues, {project.id: (project, rules)}, failed)
        page: list[Listed | Unlisted] = [part.listed for read in reads.values() for part in read.parts]
        for id, read in reads.items():
            self._remember(id, read.parts, {part.external_id for part in read.parts})
        page += [
            Unlisted(part=f"issue {id} in project {project.key}", reason=str(error), is_document=True)
            for id, error in failed.items()
        ]
        return page, listing.next

    def _set_aside(self, part: str, reason: object) -> None:
        self._context.set_aside.add("listing", part, reason)

    async def _require_alive(self, error: PenstockError) -> None:
        """Raise the error unless it concerns only what was requested, and the site responds to another request."""
        if not may_be_set_aside(error):
            raise error
        await self._site.me()
        self._failures.succeed()

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        with self._translate_errors(), self._retry_expired_cursor():
            requested = set(external_ids)
            issues = dict.fromkeys(issue for id in external_ids if (issue := content.split_id(id)) is not None)
            entries = await self._read(
                list(issues),
                await self._projects(fresh=False),
                lambda part: part.external_id in requested,
                requested=requested,
            )
            answered = {entry.external_id for entry in entries}
            return [*entries, *(Gone(id) for id in requested if id not in answered)]

    async def _read(
        self,
        ids: Sequence[str],
        projects: Projects,
        select: Callable[[Part], bool],
        *,
        requested: Collection[str] | None = None,
        with_parts: bool = False,
    ) -> list[Entry]:
        """Read the selected documents of issues. An issue that fails while others are read is unreadable, and until its
        access is known nobody may read it. Raises Retryable while its failure may still pass.

        requested: the documents that were requested by name; None: all of the issues. with_parts: whether those that
        were known and do not exist any more are returned as Gone.
        """
        with bounded(is_divisible=False) if len(ids) == 1 else nullcontext():
            # The comments of an issue are read for each of its documents: there is no less to read for fewer of them.
            issues, failed, known, extra = await self._issues(ids, projects)
        if len(issues) < len(ids):
            await self._site.me()  # an account without access sees nothing either, and then nothing is gone
            self._failures.succeed()
        for issue in issues:
            self._failures.succeed(issue.id)
        passing = [error for id, error in failed.items() if not self._failures.fail(id, error)]
        if passing:
            raise Retryable(str(passing[0])) from passing[0]
        before = {id: set(self._known.get(id, ())) for id in ids}
        reads = await self._with_parts(issues, known, failed)
        entries = await self._entries(reads, select)
        if failed:
            entries += await self._unavailable(failed, known, extra, requested)
        if with_parts:
            for id in ids:
                if id not in failed:
                    current = {part.external_id for part in reads[id].parts} if id in reads else set[str]()
                    entries += [Gone(gone) for gone in sorted({id, *before[id]} - current)]
        return entries

    async def _issues(
        self, ids: Sequence[str], projects: Projects
    ) -> tuple[list[Issue], dict[str, PenstockError], dict[str, tuple[Project, Rules]], Collection[str]]:
        """Read issues with the rules of their projects. Returns the issues, the errors of those that cannot be read,
        the rules by project, and the custom fields that were read."""
        extra: Collection[str] = self._directory.known_fields()
        while True:
            issues, failed = await read_isolated(ids, partial(self._read_issues, extra))
            known: dict[str, tuple[Project, Rules]] = {}
            for id in {issue.project for issue in issues} & projects.by_id.keys():
                project = projects.by_id[id]
                try:
                    known[id] = project, await self._directory.rules(project)
                except PenstockError as error:
                    if not may_be_set_aside(error):
                        raise
                    failed |= {issue.id: error for issue in issues if issue.project == id}
            needed = self._directory.known_fields()
            if needed <= set(extra):
                return [issue for issue in issues if issue.id not in failed], failed, known, extra
            extra = needed

    async def _read_issues(self, extra: Collection[str], ids: Sequence[str], *, full: bool = True) -> Sequence[Issue]:
        return await self._site.issues(ids, extra, full=full)

    async def _unavailable(
        self,
        failed: Mapping[str, PenstockError],
        projects: Mapping[str, tuple[Project, Rules]],
        extra: Collection[str],
        requested: Collection[str] | None,
    ) -> list[Entry]:
        """Return entries for issues that cannot be read. Their documents keep their access where it can be read without
        texts; otherwise nobody may read them."""
        issues, _ = await read_isolated(list(failed), partial(self._read_issues, extra, full=False))
        parts = {
            part.external_id: part
            for read in (await self._with_parts(issues, projects, {})).values()
            for part in read.parts
        }
        ids = [*failed, *parts] if requested is None else requested
        return [
            content.unavailable(id, parts.get(id), failed[issue])
            for id in dict.fromkeys(ids)
            if (issue := content.split_id(id)) is not None and issue in failed
        ]

    # Access

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        if tags is None:
            async for page in self.group_pages(None):
                for group in page.groups:
                    yield group
            return
        with self._translate_errors():
            async for group in self._directory.groups(tags, (await self._projects()).by_id, Findings()):
                yield group

    async def group_pages(self, cursor: Cursor | None) -> AsyncIterator[GroupPage]:
        with self._translate_errors():
            projects = (await self._projects()).by_id
            if cursor is None:
                self._findings = Findings()
            queue = TagQueue(await self._all_tags(projects)) if cursor is None else TagQueue.from_cursor(cursor)
            async for page in self._directory.pages(queue, projects, self._findings, complete=True):
                yield page

    async def _all_tags(self, projects: Mapping[str, Project]) -> Collection[str]:
        tags, _ = await self._memory.tags()
        return tags | {browse_tag(id) for id in projects}

    # Events

    async def on_event(self, request: Request) -> Reaction:
        secret = self._options.webhook_secret
        is_signed = verify(request, secret.get_secret_value() if secret else None, token_allowed=True)
        event = parse(request)
        # Two equal events without a time may both be genuine, and the second may withdraw access: both are processed.
        if not (is_signed and require_recent(event.sent_at)):
            return self._with_known(event, reaction(event))
        if await self._received.has(request.body):
            return Reaction()
        result = self._with_known(event, reaction(event))
        await self._received.add(request.body)
        return result

    def _with_known(self, event: Event, result: Reaction) -> Reaction:
        """Add to a reaction what may be gone with a deleted issue or comment."""
        if event.issue is None or not event.name.endswith("_deleted"):
            return result
        prefix = f"{event.issue}/" if event.name.endswith("issue_deleted") else f"{event.issue}/{COMMENTS}/"
        known = [id for id in self._known.get(event.issue, ()) if id.startswith(prefix)]
        return Reaction(ids=[*result.ids, *known], changes=result.changes, sweep=result.sweep)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        await self._listener.run(react, self._memory, lambda: datetime.now(UTC), None)

    @contextmanager
    def _retry_expired_cursor(self) -> Iterator[None]:
        """Raise Retryable for CursorExpired, where there is no cursor from which only a part could be repeated."""
        try:
            yield
        except CursorExpired as error:
            raise Retryable(str(error)) from error

    def _translate_errors(self) -> AbstractContextManager[None]:
        return translated_errors(self._context.name, "docs/connectors/jira.md")


def _resume_position(cursor: Cursor | None) -> tuple[int, Position | None]:
    """Return the project at which a full read continues, and the position in it. Raises CursorExpired."""
    if cursor is None:
        return 0, None
    project, position = cursor.get("project"), cursor.get("next")
    if not isinstance(project, int) or not (position is None or isinstance(position, Mapping)):
        raise CursorExpired("the cursor of a full read is not in this connector's format: the full read starts again")
    return project, position
