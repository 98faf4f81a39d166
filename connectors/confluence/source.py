"""Confluence as a source of documents, and a check that tries each thing that reading needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import ClassVar, TypeVar

import httpx
import structlog

from connectors.atlassian import lookback_minutes, principal, translated_errors, verify
from connectors.confluence import content
from connectors.confluence.access import GroupReader
from connectors.confluence.changes import Event, Progress, batches_by_document, parse
from connectors.confluence.client import Api, ChangesMissed, batched, missing_spaces, no_such_space
from connectors.confluence.cloud import Cloud
from connectors.confluence.content import Files
from connectors.confluence.data_center import DataCenter
from connectors.confluence.model import (
    Change,
    Content,
    Kind,
    Listing,
    NameCache,
    Position,
    Readers,
    Site,
    Space,
    group_tag,
    restriction_tag,
    space_tag,
)
from connectors.confluence.oauth import AtlassianToken
from connectors.confluence.options import ConfluenceOptions
from connectors.listings import ListedPage, read_listings
from connectors.portions import pages_of
from connectors.protocol import Problem
from connectors.replay import Received, require_recent
from connectors.room import TooMuchText, bounded
from connectors.set_aside import Failures, each, may_be_set_aside, read_isolated, reading_data
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
from connectors.strangers import Strangers
from connectors.web import Answered, Denied, Forbidden, Limits, Missing, ServerFailed, Web
from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.runtime.tasks import gather_or_cancel

T = TypeVar("T")
log = structlog.get_logger()
SETTING_BY_PROBLEM_CODE = {
    "address": "base_url",
    "refused": "base_url",
    "settings": "spaces",
    "no_spaces": "spaces",
    "nobody": "spaces",
    "events_unsigned": "webhook_secret",
    "addresses_hidden": "principals",
    "licensed": "licensed_tag",
}
"""The setting that corrects a problem, by the problem's code. Every other problem belongs to ``token``."""
MAX_CHECKED_SPACES = 20
"""The check reads the permissions of this many spaces; a site may have thousands."""


def address_advice(options: ConfluenceOptions) -> str:
    if options.flavour == "cloud" and not options.base_url.endswith("/wiki"):
        return f"base_url {options.base_url} lacks /wiki at its end"
    return f"is base_url {options.base_url} the address of Confluence itself, and flavour = {options.flavour} right?"


async def check(site: Site, options: ConfluenceOptions, context: Context) -> Sequence[Problem]:
    return await _Check(site, options, context).run()


class _Check:
    def __init__(self, site: Site, options: ConfluenceOptions, context: Context) -> None:
        self._site, self._options, self._context = site, options, context
        self._problems: list[Problem] = []

    async def run(self) -> Sequence[Problem]:
        options = self._options
        if self._context.events_url and options.webhook_secret is None:
            self._add("events_unsigned", "webhook_secret is not set: every event is refused, only polling works")
        me = await self._try("the account itself", "read:user:confluence", "a valid token", self._site.me)
        if me is None and any(problem.code in ("token", "address") for problem in self._problems):
            return self._problems
        spaces = await self._try("spaces", "read:space:confluence", "“View” of the spaces", self._site.spaces)
        if spaces is None:
            return self._problems
        if missing := missing_spaces(options, spaces):
            self._add("settings", no_such_space(missing))
        if not spaces:
            self._add("no_spaces", "the account sees no space at all: let it view the spaces to be read")
        if me is not None and me.id:
            await self._addresses(me.id)
        groups: set[str] = set()
        for space in list(spaces.values())[:MAX_CHECKED_SPACES]:
            groups |= await self._space(space)
        if spaces:
            await self._reading(next(iter(spaces.values())))
        for group in sorted(groups)[:1]:
            await self._try(
                "members of groups",
                "read:group:confluence and read:user:confluence",
                "“Can use” and, for large groups, browsing users",
                partial(self._site.members, group),
            )
        return self._problems

    async def _space(self, space: Space) -> set[str]:
        resource = f"who may read space {space.key}"
        readers: Readers | None = await self._try(
            resource,
            "read:space.permission:confluence (or read:space:confluence)",
            "“Admin” of that space, and Confluence 9.1 or later",
            lambda: self._site.readers(space),
        )
        if readers is None:
            return set()
        everybody = readers.licensed or (readers.anonymous and self._options.anonymous_tag)
        if readers.licensed and not self._options.licensed_tag:
            self._add(
                "licensed",
                f"space {space.key}: all licensed users may view it, and which ones these are is not known: set"
                " licensed_tag to the tag of the group of all of them (group:ID), or its documents are found by fewer",
            )
        elif not readers.people and not readers.groups and not everybody:
            self._add(
                "nobody",
                f"space {space.key}: no person and no group may view it, so its documents are found by nobody: grant"
                " the permission in Confluence, or exclude the space",
            )
        return set(readers.groups)

    async def _reading(self, space: Space) -> None:
        search = "search:confluence (granular: read:content-details:confluence)"
        await self._try("search", search, "“View” of the spaces", lambda: self._site.recent_changes(5))
        content = "read:page:confluence, read:content.metadata:confluence, " + search
        listing = await self._try(
            f"pages of space {space.key}",
            content,
            "“View” of the space",
            lambda: self._site.listing(space, "page", None, full=False),
        )
        if listing is None or not listing.contents:
            return
        first = listing.contents[0].id
        await self._try(
            "view restrictions",
            "read:content.restriction:confluence",
            "“View” of the page",
            lambda: self._site.restriction(first),
        )
        pages: Sequence[Content] | None = await self._try(
            "a page with its comments",
            "read:comment:confluence, read:attachment:confluence",
            "“View” of the page",
            lambda: self._site.get([first]),
        )
        if pages and pages[0].required_tags is None:
            self._add("access_unknown", f"the readers of page {first} cannot be determined: nobody would find it")

    async def _addresses(self, me: str) -> None:
        scope = "read:user:confluence"
        people = await self._try("names of people", scope, "“Can use”", lambda: self._site.people([me], fresh=True))
        if people and principal(people[me], self._options).startswith("account:"):
            self._add(
                "addresses_hidden",
                "Confluence does not return people's e-mail addresses: they are known as account:ID, which matches"
                " nobody elsewhere; set principals"
                + (" or email_domain" if self._options.flavour == "data-center" else ""),
            )

    async def _try(self, resource: str, scope: str, permission: str, read: Callable[[], Awaitable[T]]) -> T | None:
        """Return the response, or None after a failure that was added to the problems. Retryable is passed on, because
        during an outage the check cannot say whether anything is missing."""
        cloud = self._options.flavour == "cloud"
        try:
            return await read()
        except Denied as error:
            if error.status == 401 and not cloud:
                self._add(
                    "token",
                    "the personal access token was refused (401): check that it is complete and has not expired",
                )
            elif error.status == 401 and resource == "the account itself":
                advice = (
                    "check that email and token belong to the same account, and that base_url fits the kind of token"
                )
                self._add("token", f"the token was refused (401), or lacks the scope {scope}: {advice}")
            else:
                needed = f"the scope {scope}" if cloud else f"the permission {permission}"
                self._add(
                    "scope" if cloud else "permission", f"{resource} cannot be read ({error.status}): give it {needed}"
                )
        except Missing as error:
            if resource == "the account itself":
                self._add("address", f"there is no Confluence ({error.status}): {address_advice(self._options)}")
            else:
                needed = f"needs {permission}" if not cloud else f"needs {permission} and {scope}"
                self._add("missing", f"{resource} cannot be read ({error.status}): that {needed}")
        except (Misconfigured, CursorExpired) as error:
            self._add("settings", str(error))
        except Forbidden as error:
            self._add("address", f"{error}: {address_advice(self._options)}")
        except Answered as error:
            self._add("refused", f"{resource} cannot be read ({error.status}): {address_advice(self._options)}")
        return None

    def _add(self, code: str, message: str) -> None:
        if not any(problem.code == code == "token" for problem in self._problems):
            self._problems.append(Problem(SETTING_BY_PROBLEM_CODE.get(code, "token"), code, message))


FETCH_BATCH_DOCUMENTS = 50
MAX_CONCURRENT_FILES = 3
PEOPLE_AT_ONCE = 250
STRANGERS_IN_AN_HOUR = {"cloud": 100_000, "data-center": 1_000}
"""Data Center takes a request for each person, Cloud one for PEOPLE_AT_ONCE."""
MAX_REFETCHED_DESCENDANTS = 40
"""After a page's restrictions change, up to this many documents below it are read again; beyond it a sweep runs."""
EVENT_TIMEOUT_SECONDS = 0.7
"""``on_event`` must answer within one second; this leaves the rest for the response."""


_Place = tuple[Space, Kind, Position | None]
"""The listing of one kind in a space, and where its next page begins."""


class Confluence:
    """Pages and blog posts with their comments, and attachments, of Cloud or Data Center."""

    Options: ClassVar[type[ConfluenceOptions]] = ConfluenceOptions
    metadata_keys: ClassVar[MetadataKeys] = {"space": "keyword", "type": "keyword", "labels": "keyword"}

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        """A fake Confluence Cloud. ``connectors.confluence.playground:ConfluenceDataCenter`` has the other flavour."""
        from connectors.confluence.playground import cloud  # lazy: production never loads the fake

        return cloud()

    def __init__(self, options: ConfluenceOptions, context: Context, *, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        self._options = options
        self._context = context
        self._oauth: AtlassianToken | None = None
        headers: dict[str, str] = {}
        auth: httpx.Auth | None = None
        if options.client_id and options.client_secret and options.refresh_token:
            auth = self._oauth = AtlassianToken(
                context.memory,
                url=options.oauth_url,
                client_id=options.client_id,
                client_secret=options.client_secret.get_secret_value(),
                refresh_token=options.refresh_token.get_secret_value(),
                name=context.name,
                limits=limits,
            )
        elif options.token and options.flavour == "cloud" and options.email:
            auth = httpx.BasicAuth(options.email, options.token.get_secret_value())
        elif options.token:
            headers = {"Authorization": f"Bearer {options.token.get_secret_value()}"}
        web = Web(
            options.base_url,
            headers=headers,
            auth=auth,
            also=options.media_hosts,
            name=context.name,
            limits=replace(limits, parallel=options.concurrent_requests),
        )
        api = Api(web, cloud=options.flavour == "cloud")
        self._site: Site = Cloud(api, options) if options.flavour == "cloud" else DataCenter(api, options)
        self._files = Files(
            web, context.folder, cloud=options.flavour == "cloud", max_bytes=options.max_attachment_bytes
        )
        self._group_reader = GroupReader(self._site, options, context.set_aside)
        self._failures = Failures()
        self._names = NameCache()
        self._strangers = Strangers(STRANGERS_IN_AN_HOUR[options.flavour])
        self._received = Received()
        through_gateway = "api.atlassian.com" in options.base_url
        self._base = options.site_url or (None if through_gateway else options.base_url)

    async def close(self) -> None:
        await self._site.close()
        if self._oauth is not None:
            await self._oauth.close()

    async def check(self) -> Sequence[Problem]:
        return await check(self._site, self._options, self._context)

    # Reading

    async def start(self) -> Cursor:
        with self._translate_errors(), self._retry_expired_cursor():
            await self._site.spaces()
            now = datetime.now(UTC)
            return Progress(now, {}, await self._trash(frozenset())).cursor

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        with self._translate_errors():
            spaces = await self._site.spaces()
            units = _units(spaces, self._site.kinds())
            at, position = _resume_position(units, cursor)
            failure, any_read = None, at > 0 or position is not None
            for key in missing_spaces(self._options, spaces):
                self._set_aside(f"space {key}", no_such_space([key]))
            while at < len(units):
                space, kind = units[at]
                ids: list[str] = []
                try:
                    with bounded():
                        entries, listing = await self._read_page(space, kind, position)
                except TooMuchText:
                    entries, listing = [], await self._site.listing(space, kind, position, full=False)
                    ids = [item.id for item in listing.contents if item.is_readable]
                except PenstockError as error:
                    await self._require_alive(error)
                    failure, entries, listing = error, [], None
                    self._set_aside(f"{kind}s of space {space.key}", error)
                any_read |= listing is not None
                for name, reason in (listing.failed if listing else {}).items():
                    self._set_aside(f"{kind} {name} in space {space.key}", reason)
                position = listing.next if listing else None
                at += position is None
                if failure is not None and at == len(units) and not any_read:
                    raise failure
                cursor = _cursor(units, at, position)
                if not ids:
                    yield Page(entries, cursor)
                    continue
                async with aclosing(pages_of(ids, self._read, cursor)) as pages:
                    async for page in pages:
                        yield page

    async def _read_page(self, space: Space, kind: Kind, position: Position | None) -> tuple[list[Entry], Listing]:
        """Read one page of a listing. Where it fails, list it without texts and read its documents one by one."""
        try:
            listing = await self._site.listing(space, kind, position, full=True)
            return await self._entries(listing.contents), listing
        except PenstockError as error:
            if not may_be_set_aside(error):
                raise
        listing = await self._site.listing(space, kind, position, full=False)
        return await self._read([item.id for item in listing.contents if item.is_readable]), listing

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        progress, began = Progress.from_cursor(cursor), datetime.now(UTC)
        minutes = lookback_minutes(progress.polled_at, began, self._options.overlap_minutes)
        with self._translate_errors(), self._retry_expired_cursor():
            changed = await self._recent_changes(minutes)
            while unread := progress.unread(changed):
                for ids, changes in batches_by_document(unread, min(self._options.page_size, FETCH_BATCH_DOCUMENTS)):
                    progress = progress.with_read(changes)
                    async with aclosing(pages_of(ids, self._read, progress.cursor)) as pages:
                        async for page in pages:
                            yield page
                # A change during the search moves its document to the end, and another one across a page's edge.
                changed = await self._recent_changes(minutes)
            trash = await self._trash(progress.trash)
            if newly_trashed := sorted(trash - progress.trash):
                for start in range(0, len(newly_trashed), FETCH_BATCH_DOCUMENTS):
                    batch = newly_trashed[start : start + FETCH_BATCH_DOCUMENTS]
                    async with aclosing(pages_of(batch, self._read, progress.cursor)) as pages:
                        async for page in pages:
                            yield page
            yield Page((), progress.with_trash(trash).completed(began, changed).cursor)

    async def _recent_changes(self, minutes: int) -> Sequence[Change]:
        """Raises ChangesMissed when the search fails again and again while other requests succeed."""
        try:
            changes = await self._site.recent_changes(minutes)
        except ServerFailed as error:
            await self._require_alive(error)
            if self._failures.fail("changes", error):
                raise ChangesMissed(f"{error}: everything is compared instead of reading changes") from error
            raise
        self._failures.succeed("changes")
        return changes

    async def _trash(self, before: frozenset[str]) -> frozenset[str]:
        """Return the ids in the trash, or ``before`` where it cannot be listed: sweeps find what was deleted."""
        try:
            trash = frozenset(await self._site.trashed())
        except PenstockError as error:
            await self._require_alive(error)
            self._context.set_aside.replace("trash", {"the trash": f"{error}; deleted pages are found by sweeps alone"})
            return before
        self._context.set_aside.replace("trash", {})
        return trash

    async def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        with self._translate_errors(), self._retry_expired_cursor():
            spaces = await self._site.spaces()
            if missing := missing_spaces(self._options, spaces):
                yield [
                    Unlisted(part=f"space {key}", reason=no_such_space([key]), tag=space_tag(key)) for key in missing
                ]
            beginnings: list[_Place] = [(space, kind, None) for space, kind in _units(spaces, self._site.kinds())]
            async with aclosing(read_listings(beginnings, self._slim_page)) as pages:
                async for page in pages:
                    yield page

    async def _slim_page(self, place: _Place) -> ListedPage[_Place]:
        space, kind, position = place
        try:
            listing = await self._site.listing(space, kind, position, full=False)
        except PenstockError as error:
            await self._require_alive(error)
            return ListedPage([_unlisted(f"{kind}s of space {space.key}", error, space)], failure=error)
        listed, failed = each((item for item in listing.contents if item.is_readable), _listed, lambda item: item.id)
        entries: list[Listed | Unlisted] = [
            *listed,
            *(
                Unlisted(part=f"{kind} {name} in space {space.key}", reason=str(error), is_document=True)
                for name, error in {**listing.failed, **failed}.items()
            ),
        ]
        return ListedPage(entries, None if listing.next is None else (space, kind, listing.next))

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
            return await self._read(external_ids)

    async def _read(self, ids: Sequence[str]) -> list[Entry]:
        """Read documents by id. One that fails while others are read is unreadable, and until its access is known
        nobody may read it. Raises Retryable while its failure may still pass."""
        requested = list(dict.fromkeys(ids))
        contents, failed = await read_isolated([id_ for id_ in requested if _is_id(id_)], self._site.get)
        by_id = {item.id: item for item in contents}
        entries = await self._entries([by_id[id_] for id_ in requested if id_ in by_id and by_id[id_].space])
        answered = {entry.external_id for entry in entries} | failed.keys()
        answered |= {item.id for item in contents if not item.space}
        if failed or answered < set(requested):
            await self._site.me()  # an account without access sees nothing either, and then nothing is gone
            self._failures.succeed()
        for item in contents:
            self._failures.succeed(item.id)
        passing = [error for id_, error in failed.items() if not self._failures.fail(id_, error)]
        if passing:
            raise Retryable(str(passing[0])) from passing[0]
        return [
            *entries,
            *(await self._unavailable(failed) if failed else ()),
            *(Gone(id_) for id_ in requested if id_ not in answered),
        ]

    async def _unavailable(self, failed: Mapping[str, PenstockError]) -> list[Entry]:
        """Return entries for documents that cannot be read. They keep their access where it can be read without text;
        otherwise nobody may read them."""
        contents, _ = await read_isolated(list(failed), partial(self._site.get, bodies=False))
        known = {item.id: item for item in contents if item.space and item.required_tags is not None}
        return [content.unavailable(id_, known.get(id_), error) for id_, error in failed.items()]

    async def _entries(self, contents: Sequence[Content]) -> list[Entry]:
        readable = [item for item in contents if item.is_readable]
        # What fails here fails again below.
        named, _ = await asyncio.to_thread(each, readable, content.people_ids, lambda item: item.id)
        try:
            await self._read_names(set[str]().union(*named))
        except PenstockError as error:
            if not may_be_set_aside(error):
                raise
            log.warning("confluence_names_unreadable", connector=self._context.name, error=str(error))
        gate = asyncio.Semaphore(MAX_CONCURRENT_FILES)
        return await gather_or_cancel(*(self._entry(item, gate) for item in readable))

    async def _read_names(self, people: Collection[str]) -> None:
        for batch in batched(sorted(id_ for id_ in people if id_ not in self._names.known), PEOPLE_AT_ONCE):
            if requested := [id_ for id_ in batch if self._strangers.may_be_known(id_)]:
                known = await self._site.people(requested)
                self._names.add(known)
                self._strangers.add(id_ for id_ in requested if id_ not in known)

    async def _entry(self, item: Content, gate: asyncio.Semaphore) -> Entry:
        async with gate:
            try:
                with reading_data():
                    if item.kind != "attachment":
                        return await asyncio.to_thread(content.page, item, self._names.known, self._base)
                    entry = await self._files.read(item, self._names.known, self._base)
            except PenstockError as error:
                if not may_be_set_aside(error):
                    raise
                if not self._failures.fail(f"file {item.id}", error):
                    raise Retryable(str(error)) from error
                return content.unavailable(item.id, item, error)
            self._failures.succeed(f"file {item.id}")
            return entry

    # Access

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        pages = self._group_reader.pages(None) if tags is None else self._group_reader.some(tags)
        with self._translate_errors(), self._retry_expired_cursor():
            async for page in pages:
                for group in page.groups:
                    yield group

    async def group_pages(self, cursor: Cursor | None) -> AsyncIterator[GroupPage]:
        with self._translate_errors():
            async for page in self._group_reader.pages(cursor):
                yield page

    # Events

    async def on_event(self, request: Request) -> Reaction:
        secret = self._options.webhook_secret
        is_signed = verify(
            request, secret.get_secret_value() if secret else None, token_allowed=self._options.flavour == "cloud"
        )
        event = parse(request)
        # Two equal events without a time may both be genuine, and the second may withdraw access: both are processed.
        if not (is_signed and require_recent(event.sent_at)):
            return await self._reaction(event)
        # What happened may be stated in a header, which no signature covers.
        received = f"{event.noun} {event.verb}\n".encode("utf-8", "replace") + request.body
        if await self._received.has(received):
            return Reaction()
        reaction = await self._reaction(event)
        await self._received.add(received)
        return reaction

    async def _reaction(self, event: Event) -> Reaction:
        verb, ids = event.verb, event.ids
        match event.noun:
            case "page" if verb in ("permissions_updated", "moved"):
                return await self._inherited_access(ids)
            case "page" if verb in (
                "created",
                "updated",
                "initialized",
                "snapshotted",
                "published",
                "started",
                "copied",
            ):
                return Reaction(ids=ids, changes=not ids)
            case "page" if verb in ("trashed", "removed", "deleted", "restored", "archived", "unarchived"):
                return Reaction(ids=ids, sweep=True)  # its attachments share its fate, and its children move
            case "comment":
                return Reaction(ids=(event.container,) if event.container else (), changes=not event.container)
            case "attachment":
                return Reaction(ids=ids, changes=not ids)
            case "space" if "permissions" in verb:
                return Reaction(groups=(space_tag(event.name),)) if event.name else Reaction(sweep=True)
            case "space" if verb in ("removed", "deleted", "created", "updated", "archived", "restored"):
                return Reaction(sweep=True)
            case "group":
                return Reaction(groups=(group_tag(event.name),)) if event.name else Reaction()
            case _:
                return Reaction()

    async def _inherited_access(self, ids: Sequence[str]) -> Reaction:
        """React to a page whose restrictions or position changed: everything below it inherits the change."""
        tags = tuple(restriction_tag(id_) for id_ in ids)
        affected = list(ids)
        try:
            async with asyncio.timeout(EVENT_TIMEOUT_SECONDS):
                for id_ in ids:
                    descendants = await self._site.descendants(id_, MAX_REFETCHED_DESCENDANTS)
                    if descendants is None:
                        return Reaction(ids=ids, groups=tags, sweep=True)
                    affected += descendants
        except (PenstockError, TimeoutError):
            return Reaction(ids=ids, groups=tags, sweep=True)
        return Reaction(ids=tuple(dict.fromkeys(affected)), groups=tags, sweep=not ids)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        """Return at once: Confluence sends its events to ``on_event``."""

    @contextmanager
    def _retry_expired_cursor(self) -> Iterator[None]:
        """Raise Retryable for CursorExpired, where there is no cursor from which only a part could be repeated."""
        try:
            yield
        except ChangesMissed:
            raise
        except CursorExpired as error:
            raise Retryable(str(error)) from error

    def _translate_errors(self) -> AbstractContextManager[None]:
        return translated_errors(self._context.name, "docs/connectors/confluence.md")


def _units(spaces: Mapping[str, Space], kinds: Sequence[Kind]) -> list[tuple[Space, Kind]]:
    return [(space, kind) for _, space in sorted(spaces.items()) for kind in kinds]


def _cursor(units: Sequence[tuple[Space, Kind]], at: int, position: Mapping[str, object] | None) -> Cursor:
    if at == len(units):
        return {"done": True}
    space, kind = units[at]
    return {"space": space.key, "kind": kind, "next": position}


def _resume_position(
    units: Sequence[tuple[Space, Kind]], cursor: Cursor | None
) -> tuple[int, Mapping[str, object] | None]:
    """Return the index of the unit to read next, and the position in it. A space that no longer exists is skipped.
    Raises CursorExpired."""
    if cursor is None:
        return 0, None
    if cursor.get("done"):
        return len(units), None
    key, kind, position = cursor.get("space"), cursor.get("kind"), cursor.get("next")
    if not isinstance(key, str) or not (position is None or isinstance(position, Mapping)):
        raise CursorExpired("the cursor of a full read is not in this connector's format: the full read starts again")
    for at, (space, unit_kind) in enumerate(units):
        if (space.key, unit_kind) == (key, kind):
            return at, position
        if space.key > key:
            return at, None
    return len(units), None


def _unlisted(part: str, error: PenstockError, space: Space) -> Unlisted:
    return Unlisted(part=part, reason=str(error), tag=space_tag(space.key))


def _listed(item: Content) -> Listed:
    acl, required_tags = item.tags
    return Listed(external_id=item.id, acl_tags=acl, required_tags=required_tags, revision=item.revision)


def _is_id(text: str) -> bool:
    return text.removeprefix("att").isdigit()
