"""Groups of one connector instance, resolved (pure), and what was published of them, in Postgres.

``connector_groups`` holds the members of each principal, as the source last listed them. ``connector_principals``
holds, for every principal ever published, the digest of its published set and the stamp of that message. An empty
digest means *in doubt*: a set was, or was about to be, published and Kafka's acknowledgement is not recorded. A
principal that is in doubt is published again by any later look, whatever the source says by then.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, LiteralString

from connectors.checkpoint import keep_stamp
from connectors.runner.compare import is_tag
from connectors.runner.rows import Holder, require_lease
from pipeline.core.identity import OWN_TAG
from pipeline.stores.postgres import Connection, Pool, translated


@dataclass(frozen=True, slots=True)
class Held:
    """Who holds one tag, as the source last said."""

    tag: str
    members: tuple[str, ...]
    of: tuple[str, ...]
    observed_at: datetime


def merged(
    known: Mapping[str, Held], listed: Iterable[Held], at: datetime, asked: Collection[str] | None
) -> dict[str, Held]:
    """After a listing that was asked for at ``at``. asked: its tags; None: all of them. A complete listing takes away
    tags that it lacks; a tag that was asked for and is not listed has no holders any more. What was listed later than
    ``at`` by another call stays."""
    after = dict(known)
    if asked is None:
        after = {tag: held for tag, held in known.items() if held.observed_at > at}
        kept = set(after)
    else:
        listed = [*(Held(tag, (), (), at) for tag in sorted(set(asked))), *listed]
        kept = {tag for tag, held in known.items() if held.observed_at > at}
    return after | {held.tag: held for held in listed if held.tag not in kept}


def holders(groups: Mapping[str, Held]) -> dict[str, frozenset[str]]:
    """principal → all tags that it holds. Cycles are tolerated: tags that hold each other have the same holders."""
    upward: dict[str, list[str]] = defaultdict(list)
    direct: dict[str, set[str]] = defaultdict(set)
    for tag, held in groups.items():
        for principal in held.members:
            direct[principal].add(tag)
        for inner in held.of:
            if inner.startswith(OWN_TAG):
                direct[inner.removeprefix(OWN_TAG)].add(tag)
            else:
                upward[inner].append(tag)
    return {principal: _closure(tags, upward) for principal, tags in direct.items() if is_tag(principal)}


def _closure(tags: set[str], upward: Mapping[str, list[str]]) -> frozenset[str]:
    found, pending = set(tags), list(tags)
    while pending:
        for outer in upward.get(pending.pop(), ()):
            if outer not in found:
                found.add(outer)
                pending.append(outer)
    return frozenset(tag for tag in found if is_group(tag))


def is_group(tag: str) -> bool:
    """Whether the tag may be a group's: ``user:NAME`` is NAME's alone."""
    return is_tag(tag) and not tag.startswith(OWN_TAG)


def digest(tags: Collection[str]) -> bytes:
    """SHA-256 of the set."""
    return hashlib.sha256(json.dumps(sorted(tags), ensure_ascii=False).encode()).digest()


IN_DOUBT = b""
"""The digest of a principal whose published set is not known."""
PRINCIPALS_PER_PAGE = 500
"""How many principals are resolved, published and recorded at once: one message of at most some kilobytes each."""


@dataclass(frozen=True, slots=True)
class Published:
    """What is recorded of the last message about a principal."""

    digest: bytes
    observed_at: datetime


@dataclass(frozen=True, slots=True)
class NewSet:
    """A principal's full set of tags, to be published with this stamp."""

    principal: str
    tags: frozenset[str]
    observed_at: datetime


def new_sets(
    held: Mapping[str, frozenset[str]], published: Mapping[str, Published], candidates: Iterable[str], at: datetime
) -> list[NewSet]:
    """The sets that differ from what was published, of these principals. A principal that holds nothing and was never
    published needs no message. A stamp is that of the listing, or just after the last message about the principal."""
    changed = []
    for principal in candidates:
        tags, last = held.get(principal, frozenset()), published.get(principal)
        if last is None:
            if principal in held:
                changed.append(NewSet(principal, tags, at))
        elif last.digest != digest(tags):
            changed.append(NewSet(principal, tags, max(at, last.observed_at + timedelta(microseconds=1))))
    return changed


class MembershipTables:
    """The tables of one instance. Every write checks the lease in its own transaction and raises LeaseLost when another
    process has taken the instance over; every method raises Retryable while Postgres is away."""

    def __init__(self, pool: Pool, holder: Holder) -> None:
        self._pool = pool
        self.holder = holder

    async def all_groups(self) -> dict[str, Held]:
        with translated("connector_groups"):
            async with self._pool.connection() as connection:
                return await self._groups(connection, None)

    async def all_published(self) -> dict[str, Published]:
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                return await self._published(connection, None)

    async def replace_groups(self, known: Mapping[str, Held], after: Mapping[str, Held]) -> None:
        """Make the table say ``after`` where it says ``known``. A group with the same holders keeps its row."""
        gone = [tag for tag in known if tag not in after]
        moved = [held for tag, held in after.items() if tag not in known or _holders_differ(known[tag], held)]
        with translated("connector_groups"):
            async with self._pool.connection() as connection:
                await connection.execute(
                    "DELETE FROM connector_groups WHERE tenant = %s AND source = %s AND tag = ANY(%s)",
                    [*self._instance, gone],
                )
                await self._write_groups(connection, moved)
                await require_lease(connection, self.holder)  # late: a large listing must not hold up the heartbeat
                await self._keep_stamp(connection, moved)

    async def merge_groups(self, listed: Sequence[Held], at: datetime, asked: Collection[str]) -> None:
        """Apply a listing of some groups, and mark the principals whose set it changes as in doubt, in one transaction.

        Reads the groups that were asked for and what is reachable from a changed edge, never all groups."""
        tags = {*asked, *(held.tag for held in listed)}
        with translated("connector_groups"):
            async with self._pool.connection() as connection:
                known = await self._groups(connection, tags)
                after = merged(known, listed, at, asked)
                # An unchanged group gets its new stamp too: a complete listing that began earlier is older than this.
                moved = [held for tag, held in after.items() if held != known.get(tag)]
                await self._write_groups(connection, moved)
                affected = sorted(await self._affected(connection, known, after))
                for page in pages(affected):
                    held = await self._held(connection, page)
                    published = await self._published(connection, page)
                    await self._mark_in_doubt(connection, new_sets(held, published, page, at))
                await require_lease(connection, self.holder)  # late, as above
                await self._keep_stamp(connection, moved)

    async def in_doubt(self, after: str, at: datetime) -> list[NewSet]:
        """The next page of principals in doubt, in order of their names, with the set that each holds now."""
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT principal FROM connector_principals WHERE tenant = %s AND source = %s AND digest = ''"
                    " AND principal > %s ORDER BY principal LIMIT %s",
                    [*self._instance, after, PRINCIPALS_PER_PAGE],
                )
                page = [row[0] for row in await cursor.fetchall()]
                held = await self._held(connection, page)
                return new_sets(held, await self._published(connection, page), page, at)

    async def intend(self, batch: Sequence[NewSet]) -> None:
        """Record that these sets are about to be published: from now on their principals are in doubt."""
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self.holder)
                await self._mark_in_doubt(connection, batch)

    async def confirm(self, batch: Sequence[NewSet]) -> None:
        """Record that Kafka has these sets. A principal that another process has marked since then stays in doubt."""
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self.holder)
                await connection.cursor().executemany(
                    "UPDATE connector_principals SET digest = %s WHERE tenant = %s AND source = %s AND principal = %s"
                    " AND digest = '' AND observed_at = %s",
                    [(digest(one.tags), *self._instance, one.principal, one.observed_at) for one in batch],
                )

    async def ledger(self, after: str, limit: int) -> list[tuple[str, datetime, bool]]:
        """(principal, stamp, whether it holds any group) of what the ledger has accepted of this source, in order."""
        with translated("memberships"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT principal, observed_at, holds FROM ledger_members(%s, %s, %s, %s)",
                    [*self._instance, after, limit],
                )
                return await cursor.fetchall()

    async def ledger_lacks(self, principals: Sequence[str]) -> list[str]:
        """Those of which the ledger has accepted nothing."""
        with translated("memberships"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT ledger_lacks_members(%s, %s, %s)", [*self._instance, list(principals)]
                )
                return [row[0] for row in await cursor.fetchall()]

    async def published(self, principals: Sequence[str]) -> dict[str, Published]:
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                return await self._published(connection, principals)

    async def page(self, after: str, limit: int) -> list[tuple[str, Published]]:
        """What was published, in order of the principals."""
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT principal, digest, observed_at FROM connector_principals WHERE tenant = %s AND source = %s"
                    " AND principal > %s ORDER BY principal LIMIT %s",
                    [*self._instance, after, limit],
                )
                return [(principal, Published(bytes(made), at)) for principal, made, at in await cursor.fetchall()]

    async def doubt(self, principals: Mapping[str, datetime]) -> None:
        """Principals that differ from the ledger, each with the newest stamp known of it: in doubt from now on."""
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self.holder)
                await connection.cursor().executemany(
                    "INSERT INTO connector_principals AS mine VALUES (%s, %s, %s, '', %s)"
                    " ON CONFLICT (tenant, source, principal) DO UPDATE SET digest = EXCLUDED.digest,"
                    " observed_at = greatest(mine.observed_at, EXCLUDED.observed_at)",
                    [(*self._instance, principal, at) for principal, at in principals.items()],
                )

    async def _groups(self, connection: Connection, tags: Collection[str] | None) -> dict[str, Held]:
        """tags None: all."""
        cursor = await connection.execute(
            "SELECT tag, members, of, observed_at FROM connector_groups WHERE tenant = %s AND source = %s"  # noqa: S608 — literals of this function
            + ("" if tags is None else " AND tag = ANY(%s)"),
            [*self._instance, *([] if tags is None else [list(tags)])],
        )
        return {tag: Held(tag, tuple(members), tuple(of), at) async for tag, members, of, at in cursor}

    async def _published(self, connection: Connection, principals: Sequence[str] | None) -> dict[str, Published]:
        """principals None: all."""
        cursor = await connection.execute(
            "SELECT principal, digest, observed_at FROM connector_principals WHERE tenant = %s AND source = %s"  # noqa: S608 — literals of this function
            + ("" if principals is None else " AND principal = ANY(%s)"),
            [*self._instance, *([] if principals is None else [list(principals)])],
        )
        return {principal: Published(bytes(made), at) async for principal, made, at in cursor}

    async def _affected(self, connection: Connection, known: Mapping[str, Held], after: Mapping[str, Held]) -> set[str]:
        """The principals whose set may have changed: those at a changed edge, and all below a changed edge between
        groups. What is below is read from the new state: a path's part below its first changed edge is unchanged."""
        principals: set[str] = set()
        inner: set[str] = set()
        for tag in known.keys() | after.keys():
            old, new = known.get(tag), after.get(tag)
            principals |= set(old.members if old else ()) ^ set(new.members if new else ())
            inner |= set(old.of if old else ()) ^ set(new.of if new else ())
        principals |= {tag.removeprefix(OWN_TAG) for tag in inner if tag.startswith(OWN_TAG)}
        seen: set[str] = set()
        below = {tag for tag in inner if not tag.startswith(OWN_TAG)}
        while below:
            seen |= below
            groups = await self._groups(connection, below)
            below = set()
            for held in groups.values():
                principals.update(held.members)
                principals.update(tag.removeprefix(OWN_TAG) for tag in held.of if tag.startswith(OWN_TAG))
                below.update(tag for tag in held.of if not tag.startswith(OWN_TAG) and tag not in seen)
        return principals

    async def _held(self, connection: Connection, principals: Sequence[str]) -> dict[str, frozenset[str]]:
        """``membership.holders`` of these principals, from the part of the graph that lies above them."""
        members: dict[str, list[str]] = defaultdict(list)
        of: dict[str, list[str]] = defaultdict(list)
        for principal, tag in await self._containing(connection, "members", principals):
            members[tag].append(principal)
        level: set[str] = set(members) | {OWN_TAG + principal for principal in principals}
        above: set[str] = set(members)
        while level:
            outer = set()
            for inner, tag in await self._containing(connection, "of", sorted(level)):
                of[tag].append(inner)
                outer.add(tag)
            level = outer - above
            above |= outer
        stamp = datetime.min  # of no importance to ``holders``
        return holders({tag: Held(tag, tuple(members[tag]), tuple(of[tag]), stamp) for tag in above})

    async def _containing(
        self, connection: Connection, column: Literal["members", "of"], names: Sequence[str]
    ) -> list[tuple[str, str]]:
        """(name, tag of a group that has the name in this column). Read by the column's index."""
        condition: LiteralString = "members @> ARRAY[name]" if column == "members" else "of @> ARRAY[name]"
        cursor = await connection.execute(
            "SELECT name, tag FROM unnest(%s::text[]) name CROSS JOIN LATERAL"  # noqa: S608 — literals of this function
            f" (SELECT tag FROM connector_groups WHERE tenant = %s AND source = %s AND {condition}) holding",
            [list(names), *self._instance],
        )
        return [(name, tag) async for name, tag in cursor]

    async def _write_groups(self, connection: Connection, groups: Sequence[Held]) -> None:
        await connection.cursor().executemany(
            "INSERT INTO connector_groups VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (tenant, source, tag)"
            " DO UPDATE SET members = EXCLUDED.members, of = EXCLUDED.of, observed_at = EXCLUDED.observed_at",
            [(*self._instance, held.tag, list(held.members), list(held.of), held.observed_at) for held in groups],
        )

    async def _keep_stamp(self, connection: Connection, groups: Sequence[Held]) -> None:
        """The next runner's clock goes on after these stamps, or where it is behind this one's its listings would count
        as older. After ``require_lease``, as documents are written: two orders of locks are a deadlock."""
        if groups:
            await keep_stamp(connection, *self._instance, max(held.observed_at for held in groups))

    async def _mark_in_doubt(self, connection: Connection, batch: Sequence[NewSet]) -> None:
        await connection.cursor().executemany(
            "INSERT INTO connector_principals VALUES (%s, %s, %s, %s, %s) ON CONFLICT (tenant, source, principal)"
            " DO UPDATE SET digest = EXCLUDED.digest, observed_at = EXCLUDED.observed_at",
            [(*self._instance, one.principal, IN_DOUBT, one.observed_at) for one in batch],
        )

    @property
    def _instance(self) -> tuple[str, str]:
        return self.holder.tenant, self.holder.source


def pages(principals: Sequence[str]) -> list[Sequence[str]]:
    """In order, PRINCIPALS_PER_PAGE at most each."""
    return [principals[n : n + PRINCIPALS_PER_PAGE] for n in range(0, len(principals), PRINCIPALS_PER_PAGE)]


def _holders_differ(known: Held, held: Held) -> bool:
    return (known.members, known.of) != (held.members, held.of)
