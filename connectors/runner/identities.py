"""Publishes the members of a source's groups to ``identities.v1``, with groups within groups resolved.

Each principal whose set of groups changed is published with the full set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from datetime import datetime
from typing import Any, cast

import structlog

from connectors.clock import Clock
from connectors.protocol import Problem
from connectors.runner.compare import is_tag
from connectors.runner.membership import (
    PRINCIPALS_PER_PAGE,
    ChangedSet,
    GroupMembers,
    MembershipTables,
    PublishedSet,
    changed_sets,
    is_group,
    merge_listing,
    tags_by_principal,
)
from connectors.runner.rows import Holder
from connectors.source import Source
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from pipeline.stores.postgres import Pool
from topics.messages import IdentityChanged
from topics.registry import IDENTITIES

log = structlog.get_logger()

MAX_NAMED_TAGS = 5
"""Tags without a holder that a warning names."""


class Identities:
    """Law: only a complete response changes anything; a failure leaves every membership as it was.

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
    ) -> None:
        self._source = source
        self._producer = producer
        self._tables = MembershipTables(pool, holder)
        self._holder = holder
        self._clock = clock
        self._between_pages = between_pages
        self._applying = asyncio.Lock()
        self._invalid: list[Problem] = []
        self._unheld: list[Problem] = []
        self._held: Collection[str] | None = None
        """All tags that a principal held at the last complete listing."""
        self._reported: AbstractSet[str] = frozenset()
        """Tags without a holder of which the log has a warning."""

    @property
    def problems(self) -> list[Problem]:
        """Problems that the last listings of groups have shown."""
        return [*self._invalid, *self._unheld]

    async def read_all(self, _arguments: frozenset[str]) -> Mapping[str, Any]:
        """List all groups, and publish the principals whose set changed. Returns how many these are, and warnings about
        tags that nobody holds."""
        count = await self._read(None)
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
        listed: list[GroupMembers] = []
        groups = self._source.groups(tags)
        async with aclosing(cast("Any", groups)):
            async for group in groups:
                members, of = tuple(sorted(set(group.members))), tuple(sorted(set(group.of)))
                listed.append(GroupMembers(group.tag, members, of, at))
                self._between_pages()
        invalid_names = sum(not is_tag(name) for group in listed for name in (*group.members, *group.of))
        invalid_names += sum(not is_group(group.tag) for group in listed)
        listed = [
            GroupMembers(group.tag, _valid_names(group.members), _valid_names(group.of), at)
            for group in listed
            if is_group(group.tag)
        ]
        self._invalid = (
            []
            if not invalid_names
            else [
                Problem(
                    self._holder.source,
                    "identity_invalid",
                    f"{invalid_names} names of tags or principals are empty, longer than 500 characters, or groups"
                    " called user:…: nobody holds them; rename them at the source",
                )
            ]
        )
        async with self._applying:
            return await (self._apply_all(listed, at) if tags is None else self._apply_some(listed, at, tags))

    async def _apply_all(self, listed: Sequence[GroupMembers], at: datetime) -> int:
        """Compare every group, and every principal that was ever published."""
        known, published = await self._tables.all_groups(), await self._tables.all_published()
        # In a thread: with a million memberships this takes seconds, and other instances share the event loop.
        after, held, changed = await asyncio.to_thread(_compare, known, published, listed, at)
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

    async def _apply_some(self, listed: Sequence[GroupMembers], at: datetime, requested: Collection[str]) -> int:
        """Compare the requested groups, and publish every principal that is in doubt: those that the listing changed,
        and those that an earlier run did not finish."""
        await self._tables.merge_groups(listed, at, requested)
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


def _compare(
    known: Mapping[str, GroupMembers],
    published: Mapping[str, PublishedSet],
    listed: Sequence[GroupMembers],
    at: datetime,
) -> tuple[dict[str, GroupMembers], set[str], list[ChangedSet]]:
    """Return the groups after a complete listing, all tags that a principal holds, and the sets to publish. Pure."""
    after = merge_listing(known, listed, at, None)
    tags = tags_by_principal(after)
    held = set[str]().union(*tags.values())
    return after, held, changed_sets(tags, published, sorted(tags.keys() | published.keys()), at)


def _unheld(source: str, documents: Mapping[str, int]) -> Problem:
    """documents: the number of documents by tag that nobody holds."""
    named = ", ".join(f"{tag!r} ({count} documents)" for tag, count in list(documents.items())[:MAX_NAMED_TAGS])
    more = f" and {len(documents) - MAX_NAMED_TAGS} more" if len(documents) > MAX_NAMED_TAGS else ""
    return Problem(
        source,
        "tag_unheld",
        f"nobody holds the tag {named}{more}: the source's groups name no member of it, so it admits nobody",
    )


def _valid_names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if is_tag(name))
