"""Confluence as a source of documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import UTC, datetime
from typing import ClassVar

import httpx

from connectors.confluence import checking, documents, events, memberships
from connectors.confluence.api import Api
from connectors.confluence.attachments import Files
from connectors.confluence.cloud import Cloud
from connectors.confluence.cursors import Progress, by_document
from connectors.confluence.data_center import DataCenter
from connectors.confluence.model import Content, Kind, Names, Site, Space, restriction_tag, space_tag
from connectors.confluence.options import ConfluenceOptions
from connectors.protocol import Problem
from connectors.replay import Received, require_recent
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Entry,
    Gone,
    Group,
    Listed,
    Page,
    Playground,
    Reaction,
    Request,
)
from connectors.web import Denied, Forbidden, Missing, Rejected, TooLarge, Web
from pipeline.core.errors import Misconfigured, PenstockError, Retryable

FETCH = 50
FILES_AT_ONCE = 3
FEW_BELOW = 40
"""As many documents below a page are read again at once; more than that, and everything is swept."""
ANSWER_SECONDS = 0.7


class Confluence:
    """Pages and blog posts with their comments, and attachments, of Cloud or Data Center."""

    Options: ClassVar[type[ConfluenceOptions]] = ConfluenceOptions

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        """Cloud; ``connectors.confluence.playground:ConfluenceDataCenter`` plays the other flavour."""
        from connectors.confluence.playground import cloud  # the fake is loaded for that alone

        return cloud()

    def __init__(self, options: ConfluenceOptions, context: Context) -> None:
        self._options = options
        self._context = context
        token, headers, auth = options.token.get_secret_value(), {}, None
        if options.flavour == "cloud" and options.email:
            auth = httpx.BasicAuth(options.email, token)
        else:
            headers = {"Authorization": f"Bearer {token}"}
        web = Web(options.base_url, headers=headers, auth=auth, also=options.media_hosts, name=context.name)
        api = Api(web)
        self._site: Site = Cloud(api, options) if options.flavour == "cloud" else DataCenter(api, options)
        self._files = Files(
            web, context.folder, cloud=options.flavour == "cloud", max_bytes=options.max_attachment_bytes
        )
        self._names = Names()
        self._received = Received()
        through_gateway = "api.atlassian.com" in options.base_url
        self._base = options.site_url or (None if through_gateway else options.base_url)

    async def close(self) -> None:
        await self._site.close()

    async def check(self) -> Sequence[Problem]:
        return await checking.check(self._site, self._options, self._context)

    # Reading

    async def start(self) -> Cursor:
        with self._told(), self._whole():
            await self._site.spaces()
            now = datetime.now(UTC)
            return Progress(now, {}, frozenset(await self._site.trashed())).cursor

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        with self._told():
            units = _units(await self._site.spaces(), self._site.kinds())
            at, position = _resumed(units, cursor)
            while at < len(units):
                space, kind = units[at]
                listing = await self._site.listing(space, kind, position, full=True)
                entries = await self._entries(listing.found)
                position = listing.next
                at += position is None
                yield Page(entries, _cursor(units, at, position))

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        progress, began = Progress.of(cursor), datetime.now(UTC)
        minutes = progress.minutes(began, self._options.overlap_minutes)
        with self._told(), self._whole():
            found = await self._site.changed(minutes)
            while new := progress.new(found):
                for ids, changes in by_document(new, min(self._options.page_size, FETCH)):
                    entries = await self._fetched(ids)
                    progress = progress.read(changes)
                    yield Page(entries, progress.cursor)
                # What moved to the end of the search meanwhile has pushed something else across a page's edge.
                found = await self._site.changed(minutes)
            trash = await self._site.trashed()
            if thrown := sorted(set(trash) - progress.trash):
                entries = [one for start in range(0, len(thrown), FETCH)
                           for one in await self._fetched(thrown[start : start + FETCH])]  # fmt: skip
            else:
                entries = []
            yield Page(entries, progress.thrown_away(trash).done(began, found).cursor)

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        with self._told(), self._whole():
            for space, kind in _units(await self._site.spaces(), self._site.kinds()):
                position = None
                while True:
                    listing = await self._site.listing(space, kind, position, full=False)
                    yield [_listed(one) for one in listing.found if one.is_readable]
                    if (position := listing.next) is None:
                        break

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        with self._told(), self._whole():
            return await self._fetched(external_ids)

    async def _fetched(self, ids: Sequence[str]) -> list[Entry]:
        asked = list(dict.fromkeys(ids))
        found = {one.id: one for one in await self._site.get([one for one in asked if _is_id(one)])}
        entries = await self._entries([found[one] for one in asked if one in found])
        told = {entry.external_id for entry in entries}
        if missing := [one for one in asked if one not in told]:
            await self._site.me()  # who is no longer let in sees nothing either, and nothing is gone for that
        return [*entries, *(Gone(one) for one in missing)]

    async def _entries(self, found: Sequence[Content]) -> list[Entry]:
        readable = [one for one in found if one.is_readable]
        people = {id_ for one in readable for id_ in documents.mentioned(one)} - set(self._names.known)
        if people:
            self._names.keep(await self._site.people(sorted(people)))
        gate = asyncio.Semaphore(FILES_AT_ONCE)
        return list(await asyncio.gather(*(self._entry(one, gate) for one in readable)))

    async def _entry(self, one: Content, gate: asyncio.Semaphore) -> Entry:
        async with gate:
            if one.kind == "attachment":
                return await self._files.read(one, self._names.known, self._base)
            return await asyncio.to_thread(documents.page, one, self._names.known, self._base)

    # Access

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        with self._told(), self._whole():
            async for group in memberships.groups(self._site, self._options, tags, self._context.name):
                yield group

    # Events

    async def on_event(self, request: Request) -> Reaction:
        secret = self._options.webhook_secret
        is_signed = events.verify(
            request, secret.get_secret_value() if secret else None, token_allowed=self._options.flavour == "cloud"
        )
        event = events.parse(request)
        # Without a time two events may be equal and both be true, and the second may withdraw access: both are taken.
        if not (is_signed and require_recent(event.sent)):
            return await self._reaction(event)
        if await self._received.has(request.body):
            return Reaction()
        reaction = await self._reaction(event)
        await self._received.add(request.body)
        return reaction

    async def _reaction(self, event: events.Event) -> Reaction:
        verb, ids = event.verb, event.ids
        match event.noun:
            case "page" if verb in ("permissions_updated", "moved"):
                return await self._below(ids)
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
                return Reaction(ids=ids, sweep=True)  # its attachments go and come with it, its children move
            case "comment":
                return Reaction(ids=(event.container,) if event.container else (), changes=not event.container)
            case "attachment":
                return Reaction(ids=ids, changes=not ids)
            case "space" if "permissions" in verb:
                return Reaction(groups=(space_tag(event.name),)) if event.name else Reaction(sweep=True)
            case "space" if verb in ("removed", "deleted", "created", "updated", "archived", "restored"):
                return Reaction(sweep=True)
            case "group":
                return Reaction(groups=(memberships.group_of(event.name),)) if event.name else Reaction()
            case _:
                return Reaction()

    async def _below(self, ids: Sequence[str]) -> Reaction:
        """A page whose restrictions or place changed: all that stands below it inherits that."""
        tags = tuple(restriction_tag(one) for one in ids)
        found = list(ids)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                for one in ids:
                    below = await self._site.below(one, FEW_BELOW)
                    if below is None:
                        return Reaction(ids=ids, groups=tags, sweep=True)
                    found += below
        except (PenstockError, TimeoutError):
            return Reaction(ids=ids, groups=tags, sweep=True)
        return Reaction(ids=tuple(dict.fromkeys(found)), groups=tags, sweep=not ids)

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        """Confluence calls us; there is nothing to follow."""

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What has no cursor to start again from is asked again as a whole."""
        try:
            yield
        except CursorExpired as error:
            raise Retryable(str(error)) from error

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What the client says of an answer, as what follows from it: nothing here is repaired by trying again."""
        try:
            yield
        except Denied as error:
            advice = "is the token valid, and has it the scopes that docs/connectors/confluence.md names?"
            raise Misconfigured(f"{error}; {advice}") from error
        except Missing as error:
            raise Misconfigured(f"{error}; {checking.address_advice(self._options)}") from error
        except (Forbidden, Rejected) as error:
            raise Misconfigured(f"{error}; penstock connector check {self._context.name} tells more") from error
        except TooLarge as error:
            raise Retryable(f"{error}; a smaller page_size makes answers smaller") from error


def _units(spaces: Mapping[str, Space], kinds: Sequence[Kind]) -> list[tuple[Space, Kind]]:
    return [(space, kind) for _, space in sorted(spaces.items()) for kind in kinds]


def _cursor(units: Sequence[tuple[Space, Kind]], at: int, position: Mapping[str, object] | None) -> Cursor:
    if at == len(units):
        return {"done": True}
    space, kind = units[at]
    return {"space": space.key, "kind": kind, "next": position}


def _resumed(units: Sequence[tuple[Space, Kind]], cursor: Cursor | None) -> tuple[int, Mapping[str, object] | None]:
    """Where reading goes on. A space that is gone meanwhile is followed by the next."""
    if cursor is None:
        return 0, None
    if cursor.get("done"):
        return len(units), None
    key, kind, position = cursor.get("space"), cursor.get("kind"), cursor.get("next")
    if not isinstance(key, str) or not (position is None or isinstance(position, Mapping)):
        raise CursorExpired("the cursor of a full read is none of ours: it starts again")
    for at, (space, one) in enumerate(units):
        if (space.key, one) == (key, kind):
            return at, position
        if space.key > key:
            return at, None
    return len(units), None


def _listed(one: Content) -> Listed:
    acl, required = one.tags
    return Listed(external_id=one.id, acl_tags=acl, required_tags=required, revision=one.revision)


def _is_id(text: str) -> bool:
    return text.removeprefix("att").isdigit()
