"""Groups of the source → ``identities.v1``: for everybody whose set of tags changed, the full set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any, cast

from connectors.clock import Clock
from connectors.protocol import Problem
from connectors.runner.compare import is_tag
from connectors.runner.membership import Held, digest, holders, merged
from connectors.runner.rows import Holder, LeaseLost
from connectors.source import Source
from pipeline.kafka import deliver
from pipeline.stores.postgres import Pool, translated
from topics.messages import IdentityChanged
from topics.producer import Producer
from topics.registry import IDENTITIES

BATCH = 500
"""Principals published and written at once."""

Published = dict[str, tuple[bytes, datetime]]
"""principal → digest of its tags, observed_at."""


class Identities:
    """Law: only a complete answer changes anything; a failure leaves every membership as it was. Stamps of one
    principal grow, so that what is published last counts."""

    def __init__(
        self, source: Source, producer: Producer, pool: Pool, holder: Holder, clock: Clock,
        *, between_pages: Callable[[], None],
    ) -> None:  # fmt: skip
        self._source = source
        self._producer = producer
        self._pool = pool
        self._holder = holder
        self._clock = clock
        self._between_pages = between_pages
        self._applying = asyncio.Lock()
        self.problems: list[Problem] = []

    async def all(self, _words: frozenset[str]) -> Mapping[str, Any]:
        return {"identities": await self._read(None)}

    async def some(self, tags: frozenset[str]) -> Mapping[str, Any]:
        return {"identities": await self._read(tags)} if tags else {}

    async def _read(self, tags: Collection[str] | None) -> int:
        at = self._clock.stamp()
        listed: list[Held] = []
        groups = self._source.groups(tags)
        async with aclosing(cast("Any", groups)):
            async for group in groups:
                listed.append(Held(group.tag, tuple(sorted(set(group.members))), tuple(sorted(set(group.of))), at))
                self._between_pages()
        unsayable = sum(not is_tag(one) for held in listed for one in (held.tag, *held.members, *held.of))
        listed = [Held(held.tag, _sayable(held.members), _sayable(held.of), at) for held in listed if is_tag(held.tag)]
        self.problems = [] if not unsayable else [
            Problem(
                self._holder.source, "identity_invalid",
                f"{unsayable} names of tags or principals are empty or longer than 500 characters: nobody holds them",
            )
        ]  # fmt: skip
        async with self._applying:
            return await self._apply(listed, at, tags)

    async def _apply(self, listed: Sequence[Held], at: datetime, asked: Collection[str] | None) -> int:
        known, published = await self._known()
        after = merged(known, listed, at, asked)
        await self._keep(
            known, after, every=asked is not None
        )  # first: whoever goes on after a crash goes on from here
        now = holders(after)
        changed = [
            (principal, now.get(principal, frozenset()))
            for principal in sorted(now.keys() | published.keys())
            if published.get(principal, (b"",))[0] != digest(now.get(principal, frozenset()))
        ]
        for start in range(0, len(changed), BATCH):
            batch = [
                (principal, tags, _later(at, published.get(principal)))
                for principal, tags in changed[start : start + BATCH]
            ]
            await deliver(self._producer.send(IDENTITIES, self._message(*one)) for one in batch)
            await self._written(batch)
        return len(changed)

    def _message(self, principal: str, tags: Collection[str], at: datetime) -> IdentityChanged:
        return IdentityChanged(
            tenant=self._holder.tenant, source=self._holder.source, principal=principal, groups=sorted(tags),
            observed_at=at,
        )  # fmt: skip

    async def _known(self) -> tuple[dict[str, Held], Published]:
        with translated("connector_groups"):
            async with self._pool.connection() as connection:
                rows = await (
                    await connection.execute(
                        "SELECT tag, members, of, observed_at FROM connector_groups WHERE tenant = %s AND source = %s",
                        self._me,
                    )
                ).fetchall()
                known = {tag: Held(tag, tuple(members), tuple(of), at) for tag, members, of, at in rows}
                rows = await (
                    await connection.execute(
                        "SELECT principal, digest, observed_at FROM connector_principals"
                        " WHERE tenant = %s AND source = %s",
                        self._me,
                    )
                ).fetchall()
                return known, {principal: (bytes(made), at) for principal, made, at in rows}

    async def _written(self, batch: Sequence[tuple[str, Collection[str], datetime]]) -> None:
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                await connection.cursor().executemany(
                    "INSERT INTO connector_principals VALUES (%s, %s, %s, %s, %s)"
                    " ON CONFLICT (tenant, source, principal) DO UPDATE"
                    " SET digest = EXCLUDED.digest, observed_at = EXCLUDED.observed_at",
                    [(*self._me, principal, digest(tags), at) for principal, tags, at in batch],
                )

    async def _keep(self, known: Mapping[str, Held], after: Mapping[str, Held], *, every: bool) -> None:
        """every: also those whose holders are as they were (their stamp outdates a listing that is still under way)."""
        gone = [tag for tag in known if tag not in after]
        moved = [held for tag, held in after.items() if _differs(known.get(tag), held, every=every)]
        with translated("connector_groups"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT 1 FROM connectors WHERE tenant = %s AND source = %s AND epoch = %s",
                    [*self._me, self._holder.epoch],
                )
                if await cursor.fetchone() is None:
                    raise LeaseLost(f"connector {self._holder.source} is run by another process now")
                await connection.execute(
                    "DELETE FROM connector_groups WHERE tenant = %s AND source = %s AND tag = ANY(%s)",
                    [*self._me, gone],
                )
                await connection.cursor().executemany(
                    "INSERT INTO connector_groups VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (tenant, source, tag)"
                    " DO UPDATE SET members = EXCLUDED.members, of = EXCLUDED.of, observed_at = EXCLUDED.observed_at",
                    [(*self._me, held.tag, list(held.members), list(held.of), held.observed_at) for held in moved],
                )

    @property
    def _me(self) -> tuple[str, str]:
        return self._holder.tenant, self._holder.source


def _sayable(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if is_tag(name))


def _later(at: datetime, published: tuple[bytes, datetime] | None) -> datetime:
    """The stamp of the listing; just after the last message about this principal if another listing, asked for later,
    has been published before."""
    return at if published is None else max(at, published[1] + timedelta(microseconds=1))


def _differs(known: Held | None, held: Held, *, every: bool) -> bool:
    if known is None or every:
        return known != held
    return (known.members, known.of) != (held.members, held.of)
