"""Groups of one connector instance, resolved (pure), and what was published of them, in Postgres.

``connector_groups`` holds the members of each principal, as the source last listed them. ``connector_principals``
holds, for every principal ever published, the digest of its published set and the stamp of that message. An empty
digest means *in doubt*: a set was, or was about to be, published and Kafka's acknowledgement is not recorded. A
principal that is in doubt is published again by any later look, whatever the source says by then.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, LiteralString

from connectors.runner.compare import is_tag
from connectors.runner.rows import Holder, keep_stamp, require_lease
from connectors.source import Cursor
from pipeline.core.identity import OWN_TAG
from pipeline.runtime.tasks import in_threads
from pipeline.stores.postgres import Connection, Pool, translated
from pipeline.stores.stored_json import from_jsonb, to_jsonb
from topics.messages import MAX_GROUPS
from topics.registry import MAX_MESSAGE_BYTES

THREADS = ThreadPoolExecutor(2, thread_name_prefix="memberships")
"""For functions of many memberships, and nothing else: asyncio's threads may be busy for minutes with somebody's large
documents, and a transaction that waits so long ends."""


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The holders of one tag, as the source last listed them."""

    tag: str
    members: tuple[str, ...]
    """Principals."""
    of: tuple[str, ...]
    """Tags whose holders hold this one too."""
    observed_at: datetime


def merge_listing(
    known: Mapping[str, GroupMembers], listed: Iterable[GroupMembers], at: datetime, requested: Collection[str] | None
) -> dict[str, GroupMembers]:
    """Return the groups after a listing that was requested at ``at``.

    requested: the tags of the listing; None for all. A complete listing removes tags that it lacks, except those of its
    earlier parts, which have its stamp; a requested tag that is not listed has no holders any more. Groups that another
    call listed later than ``at`` stay.
    """
    newer = {tag: group for tag, group in known.items() if group.observed_at > at}
    if requested is None:
        before: Mapping[str, GroupMembers] = {tag: group for tag, group in known.items() if group.observed_at >= at}
    else:
        before = known
        listed = [*(GroupMembers(tag, (), (), at) for tag in sorted(set(requested))), *listed]
    return {**before, **{group.tag: group for group in listed if group.tag not in newer}}


def tags_by_principal(groups: Mapping[str, GroupMembers]) -> dict[str, frozenset[str]]:
    """Return all tags that each principal holds. Tags that contain each other (a cycle) have the same holders."""
    upward: dict[str, list[str]] = defaultdict(list)
    direct: dict[str, set[str]] = defaultdict(set)
    for tag, group in groups.items():
        for principal in group.members:
            direct[principal].add(tag)
        for inner in group.of:
            if inner.startswith(OWN_TAG):
                direct[inner.removeprefix(OWN_TAG)].add(tag)
            else:
                upward[inner].append(tag)
    return {principal: _closure(tags, upward) for principal, tags in direct.items() if is_tag(principal)}


def _closure(tags: set[str], upward: Mapping[str, list[str]]) -> frozenset[str]:
    reachable, pending = set(tags), list(tags)
    while pending:
        for outer in upward.get(pending.pop(), ()):
            if outer not in reachable:
                reachable.add(outer)
                pending.append(outer)
    return frozenset(tag for tag in reachable if is_group(tag))


def is_group(tag: str) -> bool:
    """Whether the tag may belong to a group: ``user:NAME`` belongs to the principal NAME alone."""
    return is_tag(tag) and not tag.startswith(OWN_TAG)


def digest(tags: Collection[str]) -> bytes:
    """Return the SHA-256 of a set of tags."""
    return hashlib.sha256(json.dumps(sorted(tags), ensure_ascii=False).encode()).digest()


MAX_GROUPS_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
"""The most bytes of a principal's tags in a message, with their separators."""


def expressible(tags: frozenset[str]) -> frozenset[str]:
    """Return the tags that one message can hold: all, or the first ones of each kind. Whoever holds fewer tags reads
    less, and one principal's set stops no other one's."""
    if len(tags) <= MAX_GROUPS and _fit(tags):
        return tags
    ordered = _by_kinds_in_turn(tags)[:MAX_GROUPS]
    if _fit(ordered):
        return frozenset(ordered)
    held, size = list[str](), 0
    for tag in ordered:
        size += len(json.dumps(tag, ensure_ascii=False).encode()) + 1
        if size > MAX_GROUPS_BYTES:
            break
        held.append(tag)
    return frozenset(held)


def _fit(tags: Collection[str]) -> bool:
    """Whether the tags fit into a message, if JSON escapes each of their characters."""
    return 6 * sum(map(len, tags)) + 3 * len(tags) <= MAX_GROUPS_BYTES


def _by_kinds_in_turn(tags: Iterable[str]) -> list[str]:
    """Return the tags, the first of each kind (what is before the colon) before the second of any. Whoever restricts
    very many pages or issues takes nobody's spaces and projects."""
    ranks, ranked = Counter[str](), list[tuple[int, str]]()
    for tag in sorted(tags):
        kind = tag.partition(":")[0]
        ranked.append((ranks[kind], tag))
        ranks[kind] += 1
    return [tag for _, tag in sorted(ranked)]


IN_DOUBT = b""
"""The digest of a principal whose published set is not known."""
PRINCIPALS_PER_PAGE = 500
"""How many principals are resolved, published and recorded at once: one message of at most some kilobytes each."""


@dataclass(frozen=True, slots=True)
class PublishedSet:
    """The last published set of a principal."""

    digest: bytes
    observed_at: datetime


@dataclass(frozen=True, slots=True)
class ChangedSet:
    """A principal's full set of tags, to be published with this stamp."""

    principal: str
    tags: frozenset[str]
    observed_at: datetime


def changed_sets(
    tags_of: Mapping[str, frozenset[str]],
    published: Mapping[str, PublishedSet],
    candidates: Iterable[str],
    at: datetime,
) -> list[ChangedSet]:
    """Return the sets of these principals that differ from what was published.

    A principal that holds nothing and was never published needs no message. The stamp is that of the listing, or just
    after the last message about the principal.
    """
    changed = []
    for principal in candidates:
        tags, last = expressible(tags_of.get(principal, frozenset())), published.get(principal)
        if last is None:
            if principal in tags_of:
                changed.append(ChangedSet(principal, tags, at))
        elif last.digest != digest(tags):
            changed.append(ChangedSet(principal, tags, max(at, last.observed_at + timedelta(microseconds=1))))
    return changed


@dataclass(frozen=True, slots=True)
class Listing:
    """A complete listing of which parts have been published."""

    at: datetime
    """Its stamp."""
    cursor: Cursor
    """Where it continues."""


MAX_INTERRUPTION = timedelta(hours=2)
"""A listing that was interrupted for longer starts again: what it has read would be older than its end says. A source
imposes pauses of an hour at most (``connectors.web.limits``)."""


class MembershipTables:
    """The tables of one instance. Every write checks the lease in its own transaction and raises LeaseLost when another
    process has taken the instance over; every method raises Retryable while Postgres cannot be reached."""

    def __init__(self, pool: Pool, holder: Holder) -> None:
        self._pool = pool
        self.holder = holder

    async def all_groups(self) -> dict[str, GroupMembers]:
        with translated("connector_groups"):
            async with self._pool.connection() as connection:
                return await self._groups(connection, None)

    async def all_published(self) -> dict[str, PublishedSet]:
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                return await self._published(connection, None)

    async def documents_by_tag(self) -> dict[str, int]:
        """Return the number of published documents of each tag of theirs that a group has to give."""
        with translated("connector_items"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT tag, count(*) FROM connector_items CROSS JOIN LATERAL unnest(acl_tags || required_tags) tag"
                    " WHERE tenant = %s AND source = %s AND version IS NOT NULL AND NOT gone"
                    " AND NOT starts_with(tag, %s) GROUP BY tag",
                    [*self._instance, OWN_TAG],
                )
                return dict(await cursor.fetchall())

    async def unfinished_listing(self) -> Listing | None:
        """Return the complete listing that was interrupted, if it can continue."""
        with translated("connectors"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT groups_listing FROM connectors WHERE tenant = %s AND source = %s"
                    " AND (groups_listing ->> 'kept_at')::timestamptz > clock_timestamp() - %s",
                    [*self._instance, MAX_INTERRUPTION],
                )
                row = await cursor.fetchone()
                return (
                    None if row is None else Listing(datetime.fromisoformat(row[0]["at"]), from_jsonb(row[0]["cursor"]))
                )

    async def end_listing(self) -> None:
        """Record that the next complete listing starts from the beginning."""
        with translated("connectors"):
            async with self._pool.connection() as connection:
                await connection.execute(
                    "UPDATE connectors SET groups_listing = NULL WHERE tenant = %s AND source = %s AND epoch = %s",
                    [*self._instance, self.holder.epoch],
                )

    async def replace_groups(self, known: Mapping[str, GroupMembers], after: Mapping[str, GroupMembers]) -> None:
        """Replace the groups ``known`` by ``after``. A group with the same members keeps its row."""
        removed = [tag for tag in known if tag not in after]
        changed = [group for tag, group in after.items() if tag not in known or _members_differ(known[tag], group)]
        with translated("connector_groups"):
            async with self._pool.connection() as connection:
                await connection.execute(
                    "DELETE FROM connector_groups WHERE tenant = %s AND source = %s AND tag = ANY(%s)",
                    [*self._instance, removed],
                )
                await self._write_groups(connection, changed)
                await require_lease(connection, self.holder)  # last: a large listing must not delay the heartbeat
                await self._keep_stamp(connection, changed)

    async def merge_groups(
        self, listed: Sequence[GroupMembers], at: datetime, requested: Collection[str], cursor: Cursor | None = None
    ) -> None:
        """Apply a listing of some groups, and mark the principals whose set it changes as in doubt, in one transaction.

        cursor: where the complete listing continues of which these groups are a part. Reads the requested groups and
        those that are reachable from a changed edge, never all groups.
        """
        tags = {*requested, *(group.tag for group in listed)}
        with translated("connector_groups"):
            async with self._pool.connection() as connection:
                known = await self._groups(connection, tags)
                after = merge_listing(known, listed, at, requested)
                # An unchanged group gets its new stamp too: a complete listing that began earlier is older than this.
                changed = [group for tag, group in after.items() if group != known.get(tag)]
                await self._write_groups(connection, changed)
                affected = sorted(await self._affected(connection, known, after))
                for page in pages(affected):
                    await self._write_in_doubt(connection, await self._changed_sets(connection, page, at))
                await require_lease(connection, self.holder)  # last, as above
                await self._keep_stamp(connection, changed)
                if cursor is not None:
                    await connection.execute(
                        "UPDATE connectors SET groups_listing = jsonb_build_object('at', %s::text, 'cursor', %s::jsonb,"
                        " 'kept_at', clock_timestamp()) WHERE tenant = %s AND source = %s",
                        [at.isoformat(), to_jsonb(dict(cursor)), *self._instance],
                    )

    async def in_doubt(self, after: str, at: datetime) -> list[ChangedSet]:
        """Return the next page of principals in doubt, in order of their names, with the set that each holds now."""
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT principal FROM connector_principals WHERE tenant = %s AND source = %s AND digest = ''"
                    " AND principal > %s ORDER BY principal LIMIT %s",
                    [*self._instance, after, PRINCIPALS_PER_PAGE],
                )
                page = [row[0] for row in await cursor.fetchall()]
                return await self._changed_sets(connection, page, at)

    async def intend(self, batch: Sequence[ChangedSet]) -> None:
        """Record that these sets are about to be published: from now on their principals are in doubt."""
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self.holder)
                await self._write_in_doubt(connection, batch)

    async def confirm(self, batch: Sequence[ChangedSet]) -> None:
        """Record that Kafka has these sets. A principal that another process has marked since then stays in doubt."""
        digests = await in_threads(THREADS, lambda: [digest(changed.tags) for changed in batch])
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self.holder)
                await connection.cursor().executemany(
                    "UPDATE connector_principals SET digest = %s WHERE tenant = %s AND source = %s AND principal = %s"
                    " AND digest = '' AND observed_at = %s",
                    [
                        (published, *self._instance, changed.principal, changed.observed_at)
                        for published, changed in zip(digests, batch, strict=True)
                    ],
                )

    async def ledger(self, after: str, limit: int) -> list[tuple[str, datetime, bool]]:
        """Return the next principals that the ledger has accepted from this source, in order: (principal, stamp,
        whether it holds any group)."""
        with translated("memberships"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT principal, observed_at, holds FROM ledger_members(%s, %s, %s, %s)",
                    [*self._instance, after, limit],
                )
                return await cursor.fetchall()

    async def ledger_lacks(self, principals: Sequence[str]) -> list[str]:
        """Return the principals of which the ledger has accepted nothing."""
        with translated("memberships"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT ledger_lacks_members(%s, %s, %s)", [*self._instance, list(principals)]
                )
                return [row[0] for row in await cursor.fetchall()]

    async def published(self, principals: Sequence[str]) -> dict[str, PublishedSet]:
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                return await self._published(connection, principals)

    async def page(self, after: str, limit: int) -> list[tuple[str, PublishedSet]]:
        """Return the next published sets, in order of the principals."""
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT principal, digest, observed_at FROM connector_principals WHERE tenant = %s AND source = %s"
                    " AND principal > %s ORDER BY principal LIMIT %s",
                    [*self._instance, after, limit],
                )
                return [(principal, PublishedSet(bytes(made), at)) for principal, made, at in await cursor.fetchall()]

    async def mark_in_doubt(self, principals: Mapping[str, datetime]) -> None:
        """Mark principals that differ from the ledger as in doubt, each with the newest stamp that is known of it."""
        with translated("connector_principals"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self.holder)
                await connection.cursor().executemany(
                    "INSERT INTO connector_principals AS mine VALUES (%s, %s, %s, '', %s)"
                    " ON CONFLICT (tenant, source, principal) DO UPDATE SET digest = EXCLUDED.digest,"
                    " observed_at = greatest(mine.observed_at, EXCLUDED.observed_at)",
                    [(*self._instance, principal, at) for principal, at in principals.items()],
                )

    async def _groups(self, connection: Connection, tags: Collection[str] | None) -> dict[str, GroupMembers]:
        """tags: None reads all."""
        cursor = await connection.execute(
            "SELECT tag, members, of, observed_at FROM connector_groups WHERE tenant = %s AND source = %s"  # noqa: S608 — literals of this function
            + ("" if tags is None else " AND tag = ANY(%s)"),
            [*self._instance, *([] if tags is None else [list(tags)])],
        )
        return {tag: GroupMembers(tag, tuple(members), tuple(of), at) async for tag, members, of, at in cursor}

    async def _published(self, connection: Connection, principals: Sequence[str] | None) -> dict[str, PublishedSet]:
        """principals: None reads all."""
        cursor = await connection.execute(
            "SELECT principal, digest, observed_at FROM connector_principals WHERE tenant = %s AND source = %s"  # noqa: S608 — literals of this function
            + ("" if principals is None else " AND principal = ANY(%s)"),
            [*self._instance, *([] if principals is None else [list(principals)])],
        )
        return {principal: PublishedSet(bytes(made), at) async for principal, made, at in cursor}

    async def _affected(
        self, connection: Connection, known: Mapping[str, GroupMembers], after: Mapping[str, GroupMembers]
    ) -> set[str]:
        """Return the principals whose set may have changed: those at a changed edge, and all below a changed edge
        between groups. They are read from the new state: a path is unchanged below its first changed edge."""
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
            for group in groups.values():
                principals.update(group.members)
                principals.update(tag.removeprefix(OWN_TAG) for tag in group.of if tag.startswith(OWN_TAG))
                below.update(tag for tag in group.of if not tag.startswith(OWN_TAG) and tag not in seen)
        return principals

    async def _tags_of(self, connection: Connection, principals: Sequence[str]) -> dict[str, frozenset[str]]:
        """Return ``tags_by_principal`` of these principals, from the part of the graph that lies above them."""
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
        stamp = datetime.min  # not used by ``tags_by_principal``
        groups = {tag: GroupMembers(tag, tuple(members[tag]), tuple(of[tag]), stamp) for tag in above}
        return await in_threads(THREADS, tags_by_principal, groups)

    async def _changed_sets(self, connection: Connection, page: Sequence[str], at: datetime) -> list[ChangedSet]:
        """In a thread: five hundred people with ten thousand tags each take seconds."""
        tags_of, published = await self._tags_of(connection, page), await self._published(connection, page)
        return await in_threads(THREADS, changed_sets, tags_of, published, page, at)

    async def _containing(
        self, connection: Connection, column: Literal["members", "of"], names: Sequence[str]
    ) -> list[tuple[str, str]]:
        """Return (name, tag of a group that has the name in this column), read by the column's index."""
        condition: LiteralString = "members @> ARRAY[name]" if column == "members" else "of @> ARRAY[name]"
        cursor = await connection.execute(
            "SELECT name, tag FROM unnest(%s::text[]) name CROSS JOIN LATERAL"  # noqa: S608 — literals of this function
            f" (SELECT tag FROM connector_groups WHERE tenant = %s AND source = %s AND {condition}) holding",
            [list(names), *self._instance],
        )
        return [(name, tag) async for name, tag in cursor]

    async def _write_groups(self, connection: Connection, groups: Sequence[GroupMembers]) -> None:
        await connection.cursor().executemany(
            "INSERT INTO connector_groups VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (tenant, source, tag)"
            " DO UPDATE SET members = EXCLUDED.members, of = EXCLUDED.of, observed_at = EXCLUDED.observed_at",
            [(*self._instance, group.tag, list(group.members), list(group.of), group.observed_at) for group in groups],
        )

    async def _keep_stamp(self, connection: Connection, groups: Sequence[GroupMembers]) -> None:
        """Record the newest stamp, from which the next runner's clock continues: where that clock is behind this one,
        its listings would otherwise count as older. Call it after ``require_lease``, as for documents: another order of
        the two locks would be a deadlock."""
        if groups:
            await keep_stamp(connection, *self._instance, max(group.observed_at for group in groups))

    async def _write_in_doubt(self, connection: Connection, batch: Sequence[ChangedSet]) -> None:
        await connection.cursor().executemany(
            "INSERT INTO connector_principals VALUES (%s, %s, %s, %s, %s) ON CONFLICT (tenant, source, principal)"
            " DO UPDATE SET digest = EXCLUDED.digest, observed_at = EXCLUDED.observed_at",
            [(*self._instance, changed.principal, IN_DOUBT, changed.observed_at) for changed in batch],
        )

    @property
    def _instance(self) -> tuple[str, str]:
        return self.holder.tenant, self.holder.source


def pages(principals: Sequence[str]) -> list[Sequence[str]]:
    """Split principals into pages of PRINCIPALS_PER_PAGE at most, in order."""
    return [principals[n : n + PRINCIPALS_PER_PAGE] for n in range(0, len(principals), PRINCIPALS_PER_PAGE)]


def _members_differ(known: GroupMembers, listed: GroupMembers) -> bool:
    return (known.members, known.of) != (listed.members, listed.of)
