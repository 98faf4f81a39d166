"""Members of the source's groups become messages in ``identities.v1``, with groups within groups resolved.

Each principal whose set of groups changed is published with the full set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any, cast

from connectors.clock import Clock
from connectors.protocol import Problem
from connectors.runner.compare import is_tag
from connectors.runner.membership import (
    PRINCIPALS_PER_PAGE,
    Held,
    MembershipTables,
    NewSet,
    Published,
    holders,
    is_group,
    merged,
    new_sets,
)
from connectors.runner.rows import Holder
from connectors.source import Source
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from pipeline.stores.postgres import Pool
from topics.messages import IdentityChanged
from topics.registry import IDENTITIES


class Identities:
    """Law: only a complete answer changes anything; a failure leaves every membership as it was. Stamps of one
    principal grow, so that what is published last counts. Whatever is not known to be published is published again by
    the next look, even when the source is by then as it was before (``membership_tables``)."""

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
        self.problems: list[Problem] = []

    async def all(self, _words: frozenset[str]) -> Mapping[str, Any]:
        return {"identities": await self._read(None)}

    async def some(self, tags: frozenset[str]) -> Mapping[str, Any]:
        return {"identities": await self._read(tags)} if tags else {}

    async def doubt(self, principals: Mapping[str, datetime]) -> None:
        """Mark principals that differ from the ledger as in doubt (``MembershipTables.doubt``), when nobody is between
        reading what was published and publishing: that would take the mark away."""
        async with self._applying:
            await self._tables.doubt(principals)

    async def _read(self, tags: Collection[str] | None) -> int:
        at = self._clock.stamp()
        listed: list[Held] = []
        groups = self._source.groups(tags)
        async with aclosing(cast("Any", groups)):
            async for group in groups:
                listed.append(Held(group.tag, tuple(sorted(set(group.members))), tuple(sorted(set(group.of))), at))
                self._between_pages()
        unsayable = sum(not is_tag(one) for held in listed for one in (*held.members, *held.of))
        unsayable += sum(not is_group(held.tag) for held in listed)
        listed = [
            Held(held.tag, _sayable(held.members), _sayable(held.of), at) for held in listed if is_group(held.tag)
        ]
        self.problems = (
            []
            if not unsayable
            else [
                Problem(
                    self._holder.source,
                    "identity_invalid",
                    f"{unsayable} names of tags or principals are empty, longer than 500 characters, or groups called"
                    " user:…: nobody holds them",
                )
            ]
        )
        async with self._applying:
            return await (self._apply_all(listed, at) if tags is None else self._apply_some(listed, at, tags))

    async def _apply_all(self, listed: Sequence[Held], at: datetime) -> int:
        """Look at every group and every principal that was ever published."""
        known, published = await self._tables.all_groups(), await self._tables.all_published()
        # In a thread: with a million memberships this takes seconds, and other instances share the event loop.
        after, changed = await asyncio.to_thread(_outcome, known, published, listed, at)
        await self._tables.replace_groups(known, after)  # before publishing: whoever goes on after a crash has them
        for start in range(0, len(changed), PRINCIPALS_PER_PAGE):
            await self._publish(changed[start : start + PRINCIPALS_PER_PAGE])
        return len(changed)

    async def _apply_some(self, listed: Sequence[Held], at: datetime, asked: Collection[str]) -> int:
        """Look at the groups that were asked for, and at every principal that is in doubt: those that the listing
        changed, and those that an earlier look did not finish."""
        await self._tables.merge_groups(listed, at, asked)
        count, after = 0, ""
        while batch := await self._tables.in_doubt(after, at):
            await self._publish(batch)
            count, after = count + len(batch), batch[-1].principal
        return count

    async def _publish(self, batch: Sequence[NewSet]) -> None:
        """Law: a set is recorded as published only when Kafka has it; from before it is sent until then its principal
        is in doubt. The lease is checked before anything is sent."""
        await self._tables.intend(batch)
        await deliver(self._producer.send(IDENTITIES, self._message(one)) for one in batch)
        await self._tables.confirm(batch)

    def _message(self, one: NewSet) -> IdentityChanged:
        return IdentityChanged(
            tenant=self._holder.tenant,
            source=self._holder.source,
            principal=one.principal,
            groups=sorted(one.tags),
            observed_at=one.observed_at,
        )


def _outcome(
    known: Mapping[str, Held], published: Mapping[str, Published], listed: Sequence[Held], at: datetime
) -> tuple[dict[str, Held], list[NewSet]]:
    """The groups after a complete listing, and what has to be published. Pure."""
    after = merged(known, listed, at, None)
    held = holders(after)
    return after, new_sets(held, published, sorted(held.keys() | published.keys()), at)


def _sayable(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if is_tag(name))
