"""GitHub as a source: issues, pull requests, discussions and wikis of repositories, and a check of its credential."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Literal

from connectors.errors import BadData
from connectors.github import events, queries
from connectors.github.access import Directory, Findings
from connectors.github.client import Api, Json
from connectors.github.content import (
    SINGULAR,
    acl_tags,
    document,
    external_id,
    listed,
    number_in,
    organization_tag,
    split_id,
    split_wiki_id,
    tag,
    too_large,
)
from connectors.github.options import GitHubOptions, Kind
from connectors.github.queries import PROBED_REPOSITORIES, PROBED_UPDATES, Repository
from connectors.github.wikis import Wikis
from connectors.portions import pages_of
from connectors.protocol import Problem, some
from connectors.replay import Received
from connectors.set_aside import Failures, code_of, each, name_of, read_isolated, reading_data
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Entry,
    Gone,
    Group,
    Listed,
    MetadataKeys,
    Page,
    Playground,
    Reaction,
    Request,
    Unlisted,
    Unreadable,
)
from connectors.web import Answered, Denied, Forbidden, Limits, ServerFailed, TooLarge
from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.runtime.tasks import gather_or_cancel

READ_AT_ONCE = 10
"""Documents that one request reads by number: GitHub ends a request that takes longer than ten seconds."""
COMPLETED_AT_ONCE = 4
"""Documents of which all comments are in memory at the same time."""
UPDATES_PER_PAGE = 50


class GitHub:
    """``connectors.source.Source``. A document's external id is ``REPOSITORY/NUMBER``, with the repository's numeric
    id; issues, pull requests and discussions of a repository share their numbers. A page of a wiki is
    ``REPOSITORY/wiki/PATH``, with the path at which it was first seen."""

    Options: ClassVar[type[GitHubOptions]] = GitHubOptions
    metadata_keys: ClassVar[MetadataKeys] = {
        "kind": "keyword",
        "repository": "keyword",
        "number": "number",
        "state": "keyword",
        "labels": "keyword",
        "milestone": "keyword",
        "category": "keyword",
        "answered": "boolean",
        "comments": "number",
    }

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        """A fake GitHub, for ``penstock connector conform github``."""
        from connectors.github.playground import playing  # lazy: production never loads the fake

        return playing()

    def __init__(self, options: GitHubOptions, context: Context, *, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        """Raises Misconfigured."""
        self._options = options
        self._context = context
        self._api = Api(options, context.name, limits)
        self._directory = Directory(self._api, options)
        self._received = Received(context.memory)
        self._failures = Failures()
        self._completing = asyncio.Semaphore(COMPLETED_AT_ONCE)
        self._wikis = Wikis(self._api, options, context, self._directory, self._failures)

    async def close(self) -> None:
        await self._api.close()

    # Reading

    async def start(self) -> Cursor:
        with self._translated():
            places = await self._directory.repositories()
            cursor: dict[str, Any] = {"at": datetime.now(UTC).isoformat()}
            if self._reads_wikis:
                cursor["wikis"] = await self._wikis.start(places)
            return cursor

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        """Read repository by repository in the order of their numbers, and each kind by the time of creation. A
        repository that is taken away meanwhile ends early, and the sweep handles it."""
        at = _position(cursor)
        with self._translated():
            places = await self._repositories()
            units: list[tuple[Repository, Kind | Literal["wikis"]]] = [*self._units(places)]
            if self._reads_wikis:
                units += [(place, "wikis") for place in await self._wikis.existing(places, again=False)]
            for place, kind in sorted(units, key=lambda unit: (unit[0].id, unit[1])):
                if (place.id, kind) < at[:2]:
                    continue
                after = at[2] if (place.id, kind) == at[:2] else None
                while True:
                    if kind == "wikis":
                        read = await self._wikis.read_page(place, after)
                    else:
                        read = await self._read_page(place, kind, after)
                    if read is None:
                        break
                    entries, after = read
                    done = after is None
                    # A space sorts behind the name of the kind: this unit is done, and no other is skipped.
                    yield Page(entries, {"repository": place.id, "kind": f"{kind} " if done else kind, "after": after})
                    if done:
                        break

    async def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        with self._translated():
            try:
                places = await self._repositories()
                units = self._units(places)
                for place, kind in units:
                    after: str | None = None
                    while True:
                        size = self._options.sweep_page_size
                        page = await self._page(place, kind, "Listed", size, after)
                        if page is None:
                            break
                        current, items, after = page
                        yield self._listed(current, kind, items)
                        if after is None:
                            break
                if self._reads_wikis:
                    async for pages in self._wikis.slim(places):
                        yield pages
                closed = self._directory.closed
                refused = {name: error for name, (_, error) in closed.items() if isinstance(error, Denied)}
                if refused and {place.name for place, _ in units} <= refused.keys():
                    raise Misconfigured(
                        f"{some(refused)} refuse the credential: grant it access, or name them in exclude"
                        f" ({next(iter(refused.values()))})"
                    )
                yield [
                    Unlisted(
                        part=f"repository {name}",
                        reason=f"{error}: grant it access, or name it in exclude" if name in refused else str(error),
                        tag=None if number is None else tag(number),
                    )
                    for name, (number, error) in closed.items()
                ]
            except CursorExpired as error:  # a listing has no cursor: it begins again
                raise Retryable(f"{error}: the listing begins again") from error

    def _listed(self, place: Repository, kind: Kind, items: Sequence[Json]) -> list[Listed | Unlisted]:
        made, failed = each(items, lambda item: listed(place, item, self._options.public_acl_tags), number_in)
        parts = [
            Unlisted(part=f"{SINGULAR[kind]} {name} of {place.name}", reason=str(error), is_document=True)
            for name, error in failed.items()
        ]
        return [*made, *parts]

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        """Read the documents that were updated since the cursor's ``at`` minus the overlap. ``began`` and ``after``
        belong to an interrupted poll."""
        try:
            at = datetime.fromisoformat(cursor["at"])
            began = datetime.fromisoformat(cursor["began"]) if "began" in cursor else datetime.now(UTC)
            done = int(cursor.get("after", 0))
            wikis: Mapping[str, Any] = {"wikis": dict(cursor.get("wikis", {}))} if self._reads_wikis else {}
        except (KeyError, TypeError, ValueError) as error:
            raise CursorExpired("this cursor of changes was written by another version of the connector") from error
        since = at - timedelta(seconds=self._options.overlap_seconds)
        with self._translated():
            every = await self._repositories()
            places = [place for place in every if place.id > done]
            for start in range(0, len(places), PROBED_REPOSITORIES):
                batch = places[start : start + PROBED_REPOSITORIES]
                newest = await self._newest(batch)
                for place in batch:
                    numbers = await self._updated(place, newest.get(place.id, {}), since)
                    size = self._options.page_size
                    for first in range(0, len(numbers), size):
                        ids = [external_id(place.id, number) for number in numbers[first : first + size]]
                        last = place.id if first + size >= len(numbers) else done
                        progress = {"at": at.isoformat(), "began": began.isoformat(), "after": last}
                        async with aclosing(pages_of(ids, self._read, {**progress, **wikis})) as pages:
                            async for page in pages:
                                yield page
                    done = place.id
            if self._reads_wikis:
                progress = {"at": at.isoformat(), "began": began.isoformat(), "after": done}
                async for entries, following in self._wikis.changes(every, wikis["wikis"]):
                    wikis = {"wikis": following}
                    yield Page(entries, {**progress, **wikis})
            yield Page((), {"at": began.isoformat(), **wikis})

    @property
    def _reads_wikis(self) -> bool:
        return "wikis" in self._options.kinds

    async def _page(
        self,
        place: Repository,
        kind: Kind,
        detail: queries.Detail,
        size: int,
        after: str | None,
        order: queries.Order = "CREATED_AT",
    ) -> tuple[Repository, list[Json], str | None] | None:
        """Return a page as ``queries.documents``. Where GitHub fails to answer, less is requested, down to a single
        document. A repository that refuses the credential, or whose listing always fails, is set aside: it has no page,
        and the listing is not complete. Raises ServerFailed."""
        while True:
            try:
                page = await queries.documents(self._api, place, kind, detail, size, after, order)
            except Denied as error:
                self._directory.set_aside(place.name, error)
                return None
            except ServerFailed as error:
                if size > 1:
                    size //= 2
                    continue
                if detail == "Read" or not self._failures.fail(place.name, error):
                    raise
                self._directory.set_aside(place.name, error)
                return None
            self._failures.succeed()
            return page

    async def _read_page(
        self, place: Repository, kind: Kind, after: str | None
    ) -> tuple[list[Entry], str | None] | None:
        """Return the entries of a page, and the cursor of the next one; None: the repository has no page. A document
        that GitHub fails to read is listed, which says what follows it, and read by itself."""
        try:
            page = await self._page(place, kind, "Read", self._options.page_size, after)
            if page is None:
                return None
            current, items, following = page
            return await self._entries(current, [(name_of(item, number_in), kind, item) for item in items]), following
        except ServerFailed:
            page = await self._page(place, kind, "Listed", 1, after)
        if page is None:
            return None
        _, items, following = page
        ids, failed = each(items, lambda item: external_id(place.id, int(item["number"])), number_in)
        for name, error in failed.items():
            self._context.set_aside.add("listing", f"{SINGULAR[kind]} {name} of {place.name}", error)
        return await self._read(ids), following

    async def _newest(self, places: Sequence[Repository]) -> Mapping[int, Mapping[Kind, list[Json]]]:
        """Return what ``queries.updates`` returns, without repositories that always fail: a sweep finds their
        changes."""
        by_node = {place.node: place for place in places}

        async def read(ids: Sequence[str]) -> list[tuple[int, Mapping[Kind, list[Json]]]]:
            return list((await queries.updates(self._api, [by_node[id] for id in ids])).items())

        newest, errors = await read_isolated(list(by_node), read)
        if newest:
            self._failures.succeed()
        for node, error in errors.items():
            if not isinstance(error, ServerFailed) or not self._failures.fail(by_node[node].name, error):
                raise error
        return dict(newest)

    async def _updated(self, place: Repository, newest: Mapping[Kind, Sequence[Json]], since: datetime) -> list[int]:
        """Return the numbers of the documents that were updated since then. ``newest`` are the newest of each kind."""
        numbers: set[int] = set()
        for kind in self._kinds(place):
            items, after, more = newest.get(kind, ()), None, len(newest.get(kind, ())) >= PROBED_UPDATES
            while True:
                dated, failed = each(
                    items, lambda item: (int(item["number"]), datetime.fromisoformat(item["updatedAt"])), number_in
                )
                numbers |= {number for number, at in dated if at >= since}
                numbers |= {int(name) for name in failed if name.isdecimal()}  # they may have changed
                if not more or any(at < since for _, at in dated):
                    break
                page = await self._page(place, kind, "Listed", UPDATES_PER_PAGE, after, "UPDATED_AT")
                if page is None:
                    break
                _, items, after = page
                more = after is not None
        return sorted(numbers)

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        with self._translated():
            return await self._read(external_ids)

    async def _read(self, external_ids: Sequence[str]) -> list[Entry]:
        entries: list[Entry] = []
        numbers: dict[int, list[int]] = defaultdict(list)
        pages: dict[int, list[str]] = defaultdict(list)
        for id in dict.fromkeys(external_ids):
            if (page := split_wiki_id(id)) is not None:
                pages[page[0]].append(page[1])
            elif (parts := split_id(id)) is not None:
                numbers[parts[0]].append(parts[1])
            else:
                entries.append(Gone(id))
        for repository, names in pages.items():
            entries += await self._wikis.fetch(repository, names)
        for repository, expected in numbers.items():
            try:
                node = await self._directory.node(repository)
                if node is None:
                    entries += [Gone(external_id(repository, number)) for number in expected]
                    continue
                read: list[Entry] = []
                for start in range(0, len(expected), READ_AT_ONCE):
                    read += await self._read_numbers(repository, node, expected[start : start + READ_AT_ONCE])
            except Denied as error:
                if error.status == 401:
                    raise
                read = [self._refused(repository, number, error) for number in expected]
            entries += read
        return entries

    def _refused(self, repository: int, number: int, error: Denied) -> Unreadable:
        """Return the entry of a document of a repository that refuses the credential: it may well exist."""
        place = self._directory.known.get(repository)
        return Unreadable(
            external_id=external_id(repository, number),
            code="denied",
            message=f"{error}: let the credential read the repository, or exclude it",
            acl_tags=(tag(repository),) if place is None else acl_tags(place, self._options.public_acl_tags),
        )

    async def _read_numbers(self, repository: int, node: str, numbers: Sequence[int]) -> list[Entry]:
        """Read documents of a repository. One that GitHub always fails to read becomes unreadable."""

        async def read(names: Sequence[str]) -> list[Entry]:
            batch = [int(name) for name in names]
            with reading_data():
                answer = await queries.numbered(self._api, node, batch)
            if answer is None or not self._directory.is_selected(answer[0]):
                return [Gone(external_id(repository, number)) for number in batch]
            place, items = answer
            shown = {n: item for n, item in items.items() if item[0] in self._kinds(place)}
            gone = [Gone(external_id(repository, number)) for number in batch if number not in shown]
            return [*gone, *await self._entries(place, [(str(n), *item) for n, item in shown.items()])]

        entries, errors = await read_isolated([str(number) for number in numbers], read)
        for entry in entries:
            self._failures.succeed(entry.external_id)
        for name, error in errors.items():
            id, place = external_id(repository, int(name)), self._directory.known.get(repository)
            if not isinstance(error, BadData | ServerFailed) or place is None or not self._failures.fail(id, error):
                raise error
            entries.append(self._unavailable(place, int(name), error))
        return entries

    def _unavailable(self, place: Repository, number: int, error: PenstockError) -> Unreadable:
        return Unreadable(
            external_id=external_id(place.id, number),
            code=code_of(error),
            message=f"{error}: it is tried again with every sweep",
            acl_tags=acl_tags(place, self._options.public_acl_tags),
        )

    async def _entries(self, place: Repository, items: Sequence[tuple[str, Kind, Json]]) -> list[Entry]:
        """Return documents. One whose data cannot be read keeps the access of its repository.

        items: with the name of each, which is its number unless its data do not say it."""
        entries = await gather_or_cancel(*(self._entry(place, *item) for item in items))
        return [entry for entry in entries if entry is not None]

    async def _entry(self, place: Repository, name: str, kind: Kind, item: Json) -> Entry | None:
        try:
            with reading_data():
                try:
                    async with self._completing:
                        complete = await queries.complete(self._api, kind, item)
                        return document(kind, place, complete, self._options.public_acl_tags)
                except queries.TooMuchText:
                    return too_large(kind, place, item, self._options.public_acl_tags)
        except BadData as error:
            if not name.isdecimal():
                self._context.set_aside.add("listing", f"{SINGULAR[kind]} {name} of {place.name}", error)
                return None
            return self._unavailable(place, int(name), error)

    async def _repositories(self) -> list[Repository]:
        places = await self._directory.repositories()
        self._failures.succeed()  # GitHub responds: what fails now does so for a reason of its own
        return places

    def _kinds(self, place: Repository) -> list[Kind]:
        kinds: list[Kind] = [kind for kind in self._options.kinds if kind != "wikis"]
        return sorted(kind for kind in kinds if kind != "discussions" or place.has_discussions)

    def _units(self, places: Sequence[Repository]) -> list[tuple[Repository, Kind]]:
        return [(place, kind) for place in places for kind in self._kinds(place)]

    # Access and events

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        with self._translated():
            async for group in self._directory.groups(tags, Findings()):
                yield group

    async def on_event(self, request: Request) -> Reaction:
        body = events.verified(request, self._options.webhook_secret)
        event = request.headers.get("x-github-event", "")
        received = (
            event.encode("utf-8", "replace") + b"\n" + request.body
        )  # no signature covers what the event is called
        if events.is_recognisable(event) and await self._received.has(received):
            return Reaction()
        places = self._directory.known
        if (repository := events.wiki(event, body)) is not None:
            self._wikis.expect(repository)
        reaction = events.reaction(event, body, places.keys())
        internal = {
            organization_tag(place.organization_id)
            for place in places.values()
            if place.visibility == "INTERNAL" and place.organization_id is not None
        }
        if event == "organization" and internal:
            return Reaction(groups=(*reaction.groups, *sorted(internal)))
        if events.is_recognisable(event):
            await self._received.add(received)
        return reaction

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        """Return at once: GitHub sends its events to ``on_event``."""

    # Check

    async def check(self) -> Sequence[Problem]:
        findings = Findings()
        name = self._context.name
        try:
            with self._translated():
                missing = await self._directory.missing()
                async for _ in self._directory.groups(None, findings):
                    pass
        except Misconfigured as error:
            return [Problem(name, "refused", str(error))]
        problems = [
            Problem(
                "repositories",
                "missing",
                f"there is no repository {repository} that the credential sees: correct the name, or grant it",
            )
            for repository in missing
        ]
        if findings.hidden:
            problems.append(
                Problem(
                    "collaborators",
                    "permission",
                    f"the collaborators of {some(findings.hidden)} are hidden from the credential, so nobody may read"
                    " their documents: use an App, or the token of an account that may push there",
                )
            )
        problems += [
            Problem(
                organization,
                "permission",
                f"the members of {organization} are hidden from the credential, so that only the addresses in people"
                " are known: grant it Members: read of the organisation",
            )
            for organization in sorted(findings.hidden_members)
        ]
        if count := len(findings.without_address):
            problems.append(
                Problem(
                    "people",
                    "nobody",
                    f"{count} logins have no known e-mail address and read nothing ({some(findings.without_address)}):"
                    " name their addresses in people or people_file, or ignore accounts of machines",
                )
            )
        for unheld in self._options.public_acl_tags:
            if unheld not in self._options.members and not unheld.startswith("user:"):
                problems.append(Problem("members", "nobody", f"nobody holds the tag {unheld!r}: name them in members"))
        if self._reads_wikis:
            problems += await self._wikis.check()
        secret = self._options.webhook_secret
        if self._context.events_url is not None and (secret is None or not secret.get_secret_value().strip()):
            problems.append(
                Problem(
                    "webhook_secret",
                    "webhook_secret",
                    "it is not set, so every event is refused: set it here and in the webhook's settings",
                )
            )
        return problems

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the client's errors as Misconfigured, since trying again repairs none of them, and TooLarge as
        Retryable."""
        name = self._context.name
        try:
            yield
        except Answered as error:
            raise Misconfigured(f"{error}; run penstock connector check {name} for details") from error
        except Forbidden as error:
            raise Misconfigured(f"{error}; check api_url") from error
        except TooLarge as error:
            raise Retryable(f"{error}; a smaller page_size makes answers smaller") from error


def _position(cursor: Cursor | None) -> tuple[int, str, str | None]:
    """Return the repository, kind and place after which a full read continues. Raises CursorExpired."""
    if cursor is None:
        return 0, "", None
    repository, kind, after = cursor.get("repository"), cursor.get("kind"), cursor.get("after")
    if not isinstance(repository, int) or not isinstance(kind, str) or not (after is None or isinstance(after, str)):
        raise CursorExpired("this cursor of a full read was written by another version of the connector")
    return repository, kind, after
