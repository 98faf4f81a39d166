"""Publishes the members of a source's groups to ``identities.v1``, with groups within groups resolved.

Each principal whose set of groups changed is published with the full set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from datetime import datetime
from time import monotonic
from typing import Any

import structlog

from connectors.clock import Clock
from connectors.errors import BadData
from connectors.protocol import Problem, printable
from connectors.runner.compare import is_tag
from connectors.runner.guard import require_readable
from connectors.runner.isolate import groups_one_by_one, guarded
from connectors.runner.membership import (
    PRINCIPALS_PER_PAGE,
    THREADS,
    ChangedSet,
    GroupMembers,
    MembershipTables,
    PublishedSet,
    changed_sets,
    expressible,
    is_group,
    merge_listing,
    tags_by_principal,
)
from connectors.runner.rows import Holder
from connectors.source import Cursor, CursorExpired, Group, PagedGroups, Source
from pipeline.core.errors import Retryable
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from pipeline.runtime.tasks import in_threads
from pipeline.stores.postgres import Pool
from topics.messages import MAX_GROUPS, IdentityChanged
from topics.registry import IDENTITIES

log = structlog.get_logger()

PART_SECONDS = 15.0
"""A complete listing that takes longer is published in parts, one after so much time: each part costs a message for
every principal that it changes."""
MAX_NAMED_TAGS = 5
"""Tags without a holder that a warning names."""
MAX_TAG_CHARACTERS = 200
"""So much of a tag is shown."""


class Identities:
    """Law: only complete responses change anything; a failure leaves every membership that was not read as it was.
    Where the reason is the data of one group, nobody holds that group until they can be read, and all others are read.

    A long listing is published part by part (``source.PagedGroups``) and continues after an interruption. What it lacks
    is taken from everybody at its end.

    The stamps of one principal grow, so that the last published set counts. A set that is not known to be published is
    published again by the next run, even if the source is by then as it was before (``MembershipTables``).
    """

    def __init__(
        self,
        source: Source,
        producer: Producer,
        pool: Pool,
        holder: Holder,
        clock: Clock,
        *,
        between_pages: Callable[[], None],
        part_seconds: float = PART_SECONDS,
    ) -> None:
        self._source = source
        self._part_seconds = part_seconds
        self._producer = producer
        self._tables = MembershipTables(pool, holder)
        self._holder = holder
        self._clock = clock
        self._between_pages = between_pages
        self._applying = asyncio.Lock()
        self._invalid: list[Problem] = []
        self._unreadable: dict[str, str] = {}
        """Why the holders of a tag cannot be read from their data, by tag."""
        self._unlisted: str | None = None
        """Why the groups were read by their tags and not by a listing."""
        self._unheld: list[Problem] = []
        self._cut: list[Problem] = []
        self._held: Collection[str] | None = None
        """All tags that a principal held at the last complete listing."""
        self._is_resumed = False
        self._reported: AbstractSet[str] = frozenset()
        """Tags without a holder of which the log has a warning."""

    @property
    def problems(self) -> list[Problem]:
        """Problems that the last listings of groups have shown."""
        unreadable = [
            Problem(
                self._holder.source,
                "group_unreadable",
                f"the holders of {printable(tag[:MAX_TAG_CHARACTERS])!r} cannot be read, so nobody holds it: {reason}",
            )
            for tag, reason in sorted(self._unreadable.items())[:MAX_NAMED_TAGS]
        ]
        if self._unlisted is not None:
            message = f"groups cannot be listed, so only those with known tags are read, one by one: {self._unlisted}"
            unreadable.append(Problem(self._holder.source, "groups_unlisted", message))
        return [*self._invalid, *self._cut, *unreadable, *self._unheld]

    @property
    def is_complete(self) -> bool:
        """Whether the holders of all tags could be read."""
        return not self._unreadable and self._unlisted is None

    @property
    def is_resumed(self) -> bool:
        """Whether the last complete listing continued one that was interrupted."""
        return self._is_resumed

    async def read_all(self, _arguments: frozenset[str]) -> Mapping[str, Any]:
        """List all groups, and publish the principals whose set changed. Returns how many these are, and warnings about
        tags that nobody holds."""
        count = await (self._read_parts(self._source) if isinstance(self._source, PagedGroups) else self._read(None))
        return {"identities": count, "warnings": [problem.message for problem in self._unheld]}

    async def read_some(self, tags: frozenset[str]) -> Mapping[str, Any]:
        """List the groups with these tags, and publish the principals whose set changed."""
        return {"identities": await self._read(tags)} if tags else {}

    async def mark_in_doubt(self, principals: Mapping[str, datetime]) -> None:
        """Mark principals that differ from the ledger as in doubt (``MembershipTables.mark_in_doubt``).

        This waits for a listing that is being published, which would remove the mark.
        """
        async with self._applying:
            await self._tables.mark_in_doubt(principals)

    async def _read(self, tags: Collection[str] | None) -> int:
        at = self._clock.stamp()
        listed = _Listed(at)
        try:
            async with aclosing(guarded(self._source.groups(tags))) as groups:
                async for group in groups:
                    listed.add([group])
                    self._between_pages()
        except BadData as error:
            return await self._read_one_by_one(tags, error)
        if tags is None:
            self._unlisted = None
        return await self._apply(listed, at, tags, {})

    async def _read_one_by_one(self, tags: Collection[str] | None, error: BadData) -> int:
        """Read groups by their tags, after the data of one of them could not be read. Nobody holds that one. Raises
        Misconfigured if nearly all are like that, and then no membership changes: the reason is no single group."""
        at = self._clock.stamp()
        listed = _Listed(at)
        known = await self._known_tags() if tags is None else tags
        if tags is None:
            self._unlisted = str(error)
        groups, failed = await groups_one_by_one(self._source, known)
        require_readable("groups", failed.values(), len(groups))
        listed.add(groups)
        return await self._apply(listed, at, None if tags is None else {*tags, *failed}, failed)

    async def _apply(
        self, listed: _Listed, at: datetime, tags: Collection[str] | None, failed: Mapping[str, object]
    ) -> int:
        self._note_unreadable(failed, tags)
        self._report(listed)
        async with self._applying:
            return await (
                self._apply_all(listed.groups, at) if tags is None else self._apply_some(listed.groups, at, tags)
            )

    async def _known_tags(self) -> set[str]:
        """Return the tags of all groups that were listed so far, and of all published documents."""
        return {*await self._tables.all_groups(), *await self._tables.documents_by_tag()}

    def _note_unreadable(self, failed: Mapping[str, object], tags: Collection[str] | None) -> None:
        """failed: the errors by tag. tags: those that were requested; None: all."""
        for tag in [*self._unreadable] if tags is None else tags:
            if tag not in failed:
                self._unreadable.pop(tag, None)
        for tag, error in failed.items():
            if tag not in self._unreadable:
                name = printable(tag[:MAX_TAG_CHARACTERS])
                log.warning("access_unreadable", resource=f"holders of {name}", error=str(error))
            self._unreadable[tag] = str(error)

    async def _read_parts(self, source: PagedGroups) -> int:
        """List all groups, from where the last listing was interrupted, and publish them part by part."""
        unfinished = await self._tables.unfinished_listing()
        self._is_resumed = unfinished is not None
        at, cursor = (self._clock.stamp(), None) if unfinished is None else (unfinished.at, unfinished.cursor)
        listed, count, part_began, in_parts = _Listed(at), 0, monotonic(), unfinished is not None
        try:
            async with aclosing(guarded(source.group_pages(cursor))) as pages:
                async for page in pages:
                    listed.add(page.groups)
                    if page.cursor is not None and monotonic() - part_began >= self._part_seconds:
                        part = listed.take()
                        async with self._applying:
                            count += await self._apply_some(part, at, [group.tag for group in part], page.cursor)
                        part_began, in_parts = monotonic(), True
                    self._between_pages()
        except CursorExpired as error:
            await self._tables.end_listing()
            raise Retryable(str(error)) from error
        except BadData as error:
            await self._tables.end_listing()
            return count + await self._read_one_by_one(None, error)
        self._unlisted = None
        self._note_unreadable({}, None)
        self._report(listed)
        async with self._applying:
            count += await self._apply_all(listed.take(), at)
        if in_parts:
            await self._tables.end_listing()
        return count

    def _report(self, listed: _Listed) -> None:
        self._invalid = (
            []
            if not listed.invalid_names
            else [
                Problem(
                    self._holder.source,
                    "identity_invalid",
                    f"{listed.invalid_names} names of tags or principals are empty, longer than 500 characters, or"
                    " groups called user:…: nobody holds them; rename them at the source",
                )
            ]
        )

    async def _apply_all(self, listed: Sequence[GroupMembers], at: datetime) -> int:
        """Compare every group, and every principal that was ever published."""
        known, published = await self._tables.all_groups(), await self._tables.all_published()
        # In a thread: with a million memberships this takes seconds, and other instances share the event loop.
        after, held, changed, cut = await in_threads(THREADS, _compare, known, published, listed, at)
        self._cut = [] if not cut else [_too_many_tags(self._holder.source, cut)]
        await self._tables.replace_groups(known, after)  # before publishing: needed after a crash
        for start in range(0, len(changed), PRINCIPALS_PER_PAGE):
            await self._publish(changed[start : start + PRINCIPALS_PER_PAGE])
        self._held = held
        await self.find_unheld()
        return len(changed)

    async def find_unheld(self) -> None:
        """Find the tags of published documents that no principal holds by the groups of this source, once these have
        been listed."""
        if self._held is None:
            return
        documents = await self._tables.documents_by_tag()
        unheld = {tag: documents[tag] for tag in sorted(documents.keys() - self._held)}
        if not unheld.keys() <= self._reported:
            log.warning("connector_tags_unheld", source=self._holder.source, tags=len(unheld))
        self._reported = unheld.keys()
        self._unheld = [_unheld(self._holder.source, unheld)] if unheld else []

    async def _apply_some(
        self, listed: Sequence[GroupMembers], at: datetime, requested: Collection[str], cursor: Cursor | None = None
    ) -> int:
        """Compare the requested groups, and publish every principal that is in doubt: those that the listing changed,
        and those that an earlier run did not finish. cursor: where the listing continues of which this is a part."""
        await self._tables.merge_groups(listed, at, requested, cursor)
        count, after = 0, ""
        while batch := await self._tables.in_doubt(after, at):
            await self._publish(batch)
            count, after = count + len(batch), batch[-1].principal
        return count

    async def _publish(self, batch: Sequence[ChangedSet]) -> None:
        """Law: a set is recorded as published only when Kafka has it; from before it is sent until then its principal
        is in doubt. The lease is checked before anything is sent."""
        await self._tables.intend(batch)
        await deliver(self._producer.send(IDENTITIES, self._message(changed)) for changed in batch)
        await self._tables.confirm(batch)

    def _message(self, changed: ChangedSet) -> IdentityChanged:
        return IdentityChanged(
            tenant=self._holder.tenant,
            source=self._holder.source,
            principal=changed.principal,
            groups=sorted(changed.tags),
            observed_at=changed.observed_at,
        )


class _Listed:
    """The groups of a listing, without names that nobody can hold."""

    def __init__(self, at: datetime) -> None:
        self._at = at
        self.groups: list[GroupMembers] = []
        self.invalid_names = 0

    def add(self, groups: Iterable[Group]) -> None:
        for group in groups:
            members, of = _distinct(group.members), _distinct(group.of)
            self.invalid_names += sum(not is_tag(name) for name in (*members, *of)) + (not is_group(group.tag))
            if is_group(group.tag):
                self.groups.append(GroupMembers(group.tag, _valid_names(members), _valid_names(of), self._at))

    def take(self) -> list[GroupMembers]:
        """Return the groups that were added since the last call."""
        groups, self.groups = self.groups, []
        return groups


def _compare(
    known: Mapping[str, GroupMembers],
    published: Mapping[str, PublishedSet],
    listed: Sequence[GroupMembers],
    at: datetime,
) -> tuple[dict[str, GroupMembers], set[str], list[ChangedSet], int]:
    """Return the groups after a complete listing, all tags that a principal holds, the sets to publish, and the number
    of principals who hold more tags than a message can. Pure."""
    after = merge_listing(known, listed, at, None)
    tags = tags_by_principal(after)
    held = set[str]().union(*tags.values())
    fitting = {principal: expressible(of_one) for principal, of_one in tags.items()}
    cut = sum(len(fitting[principal]) < len(of_one) for principal, of_one in tags.items())
    return after, held, changed_sets(fitting, published, sorted(tags.keys() | published.keys()), at), cut


def _too_many_tags(source: str, principals: int) -> Problem:
    return Problem(
        source,
        "identity_too_large",
        f"{principals} people hold more than {MAX_GROUPS:,} tags, or more than a message can hold: they hold only the"
        " first ones of each kind; restrict fewer documents one by one",
    )


def _unheld(source: str, documents: Mapping[str, int]) -> Problem:
    """documents: the number of documents by tag that nobody holds."""
    named = ", ".join(f"{tag!r} ({count} documents)" for tag, count in list(documents.items())[:MAX_NAMED_TAGS])
    more = f" and {len(documents) - MAX_NAMED_TAGS} more" if len(documents) > MAX_NAMED_TAGS else ""
    return Problem(
        source,
        "tag_unheld",
        f"nobody holds the tag {named}{more}: the source's groups name no member of it, so it admits nobody",
    )


def _distinct(names: Collection[str]) -> list[str]:
    """Return the names sorted and unique. Those that are no text count as one invalid name each."""
    texts = sorted({name for name in names if isinstance(name, str)})
    return [*texts, *("" for name in names if not isinstance(name, str))]


def _valid_names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if is_tag(name))
