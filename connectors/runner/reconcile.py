"""Compares what was published with the ledger, and stores the differences in ``connector_differences`` between runs.

The comparison itself publishes nothing: it marks documents and principals as in doubt, and the next look at the source
publishes them as they are then. Law: nothing is marked that may merely be on its way, and a document that only the
ledger knows is deleted by a sweep alone, under the same conditions as any other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import blake2b
from time import monotonic
from typing import Any, Literal, get_args
from uuid import UUID

import structlog

from connectors.clock import Clock
from connectors.protocol import Problem
from connectors.runner.compare import Row, is_storable_id
from connectors.runner.identities import Identities
from connectors.runner.membership import IN_DOUBT, MembershipTables, PublishedSet
from connectors.runner.publish import Publisher
from connectors.runner.rows import Accepted, Holder, Rows, require_lease
from connectors.runner.state import State
from pipeline.core.identity import document_id, qualify
from pipeline.stores.postgres import Connection, Pool, translated

Key = tuple[Literal["document", "principal"], str]


@dataclass(frozen=True, slots=True)
class Remembered:
    """A document or principal that differed."""

    published: bytes
    """Digest of what had been published of it."""
    seen_at: datetime
    """When it was first seen to differ while that was published, by Postgres' clock."""
    repaired_at: datetime | None = None
    """When it was last marked to be published again."""


class Differences:
    """Of one instance. Law: a process that is killed at any moment leaves what an earlier comparison saw, and never the
    word that something was repaired that was not. Methods raise Retryable while Postgres is away; those that write
    raise LeaseLost."""

    def __init__(self, pool: Pool, holder: Holder) -> None:
        self._pool = pool
        self._holder = holder

    async def load(self) -> dict[Key, Remembered]:
        with translated("connector_differences"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT subject, name, published, seen_at, repaired_at FROM connector_differences"
                    " WHERE tenant = %s AND source = %s",
                    self._me,
                )
                return {
                    (subject, name): Remembered(bytes(published), seen_at, repaired_at)
                    async for subject, name, published, seen_at, repaired_at in cursor
                }

    async def save(self, found: Mapping[Key, Remembered], gone: Collection[Key]) -> None:
        """Write what was found, and forget what is gone."""
        columns = zip(*((*key, one.published, one.seen_at) for key, one in found.items()), strict=True)
        with translated("connector_differences"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self._holder)
                if found:
                    await connection.execute(
                        "INSERT INTO connector_differences AS mine (tenant, source, subject, name, published, seen_at)"
                        " SELECT %s, %s, * FROM unnest(%s::text[], %s::text[], %s::bytea[], %s::timestamptz[])"
                        " ON CONFLICT (tenant, source, subject, name) DO UPDATE SET"
                        " published = EXCLUDED.published, seen_at = EXCLUDED.seen_at",
                        [*self._me, *(list(column) for column in columns)],
                    )
                await self._of(connection, "DELETE FROM connector_differences mine", gone)

    async def repaired(self, keys: Collection[Key]) -> None:
        """These were marked to be published again."""
        with translated("connector_differences"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self._holder)
                await self._of(
                    connection, "UPDATE connector_differences mine SET repaired_at = clock_timestamp()", keys
                )

    async def _of(self, connection: Connection, statement: str, keys: Collection[Key]) -> None:
        await connection.execute(
            f"{statement} {'USING' if statement.startswith('DELETE') else 'FROM'}"
            " unnest(%s::text[], %s::text[]) given (subject, name) WHERE mine.tenant = %s AND mine.source = %s"
            " AND mine.subject = given.subject AND mine.name = given.name".encode(),
            [[subject for subject, _ in keys], [name for _, name in keys], *self._me],
        )

    @property
    def _me(self) -> tuple[str, str]:
        return self._holder.tenant, self._holder.source


log = structlog.get_logger()

Kind = Literal["unknown", "newer", "not_deleted", "not_accepted", "member_unknown", "member_not_accepted"]
"""unknown: alive in the ledger, and no row says that it was published. newer: the ledger has a version or access that
was never published. not_deleted, not_accepted: the ledger lacks what Kafka has acknowledged. member_unknown and
member_not_accepted: the same of a principal's groups."""
KINDS: tuple[Kind, ...] = get_args(Kind)
CERTAIN: frozenset[Kind] = frozenset({"unknown", "newer", "member_unknown"})
"""An intent is recorded before anything is sent, so what the ledger has and no row knows is not on its way. The others
count once they were seen twice, and everything that was sent before the first time has been handled."""
FIRST: tuple[Kind, ...] = (
    "member_unknown",
    "newer",
    "not_deleted",
    "member_not_accepted",
    "not_accepted",
    "unknown",
)
"""In this order they are repaired: what may show too much comes first."""

PAGE = 500
"""Rows of one step."""
REST = 4
"""Times as long as a page took nothing is read after it: a comparison takes a fifth of one connection at most."""
MOST_REST_SECONDS = 60.0
"""A page during which the process was suspended took hours: that is no load."""
MOST = 1_000
"""Differences repaired after one comparison: a sweep reads so many documents by name in about a minute."""
MOST_NOTED = 20_000
"""Differences that one comparison remembers, some megabytes, of documents and of principals, certain and uncertain ones
each: a backlog that is only on its way must not hide what is certain. The next comparison finds the rest."""
AGAIN = timedelta(days=1)
"""What a repair did not mend is tried again so often, and reported meanwhile: a source whose versions went backwards,
or an event that the pipeline refuses, would be published for ever."""


def difference(row: Row | None, accepted: Accepted, source: str, letter_at: datetime | None = None) -> Kind | None:
    """How a living document differs from what was published last. A row that is in doubt does not: it is published
    again anyway. letter_at: when the newest dead letter came of a document whose delete was published. Pure."""
    if row is None:
        return "unknown"
    if row.is_in_doubt:
        return None
    if row.gone:  # a letter that came before the delete is another event's: the delete itself was lost
        return None if _is_later(letter_at, row.content_at) else "not_deleted"
    if row.version is None:
        return "unknown"
    if accepted.version > row.version:
        return "newer"
    has_same_access = (accepted.acl_tags, accepted.required_tags) == (
        qualify(source, row.acl_tags),
        qualify(source, row.required_tags),
    )
    if accepted.version == row.version and has_same_access:
        return None
    if accepted.version == row.version and _is_later(accepted.access_observed_at, row.access_at):
        return "newer"
    return None if accepted.has_letter else "not_accepted"


def member_difference(published: PublishedSet | None, observed_at: datetime, *, holds: bool) -> Kind | None:
    """The same of a principal's groups. holds: the ledger has at least one. Pure."""
    if published is None:
        return "member_unknown" if holds else None
    if published.digest == IN_DOUBT:
        return None
    if observed_at > published.observed_at:
        return "member_unknown"
    return "member_not_accepted" if observed_at < published.observed_at else None


def _is_later(one: datetime | None, other: datetime | None) -> bool:
    return one is not None and (other is None or one > other)


@dataclass(frozen=True, slots=True)
class Difference:
    kind: Kind
    published: bytes
    """Digest of all that a row says was published: while it stays the same, nothing more was sent."""
    version: int = 0
    """The ledger's, of a document."""
    observed_at: datetime | None = None
    """The ledger's stamp, of a principal."""
    has_row: bool = True
    has_letter: bool = False
    """An event of the document waits as a dead letter."""


@dataclass(slots=True)
class Found:
    """By one comparison."""

    documents: int = 0
    principals: int = 0
    differences: dict[Key, Difference] = field(default_factory=dict)

    _noted: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def note(self, key: Key, difference: Difference) -> None:
        sort = key[0], difference.kind in CERTAIN
        if self._noted[sort] < MOST_NOTED:
            self._noted[sort] += 1
            self.differences[key] = difference


class LedgerDocuments:
    """Compares the published documents of one source with the ledger, page by page. Each method reads one page into
    ``found`` and returns where the next page begins; None after the last one. Raises Retryable."""

    def __init__(self, rows: Rows, is_compared: Callable[[str], bool] = is_storable_id) -> None:
        """is_compared: whether the source answers for the document with this external id."""
        self._rows = rows
        self._is_compared = is_compared

    async def living(self, after: str, found: Found) -> str | None:
        """Documents that are alive in the ledger, which is read before the rows: a row that is written meanwhile is
        newer."""
        page = await self._rows.ledger(after, PAGE)
        rows = await self._rows.find([accepted.external_id for _, accepted in page])
        letters = await self._letters(page, rows)
        for id_, accepted in page:
            row = rows.get(accepted.external_id)
            kind = difference(row, accepted, self._rows.holder.source, letters.get(id_))
            if kind is not None and self._is_compared(accepted.external_id):
                found.note(
                    ("document", accepted.external_id),
                    Difference(
                        kind,
                        _published(row),
                        accepted.version,
                        has_row=row is not None,
                        has_letter=accepted.has_letter,
                    ),
                )
        found.documents += len(page)
        return str(page[-1][0]) if len(page) == PAGE else None

    async def published(self, after: str, found: Found) -> str | None:
        """Documents that were published and are not alive in the ledger."""
        page = await self._rows.page(after, PAGE)
        holder = self._rows.holder
        published = {
            document_id(holder.tenant, holder.source, row.external_id): row
            for row in page
            if row.is_published and not row.is_in_doubt and self._is_compared(row.external_id)
        }
        for id_ in await self._rows.ledger_lacks(list(published)):
            row = published[id_]
            found.note(("document", row.external_id), Difference("not_accepted", _published(row), row.version or 0))
        return page[-1].external_id if len(page) == PAGE else None

    async def _letters(self, page: Sequence[tuple[UUID, Accepted]], rows: Mapping[str, Row]) -> Mapping[UUID, datetime]:
        """When the newest dead letters of documents came whose deletes were published."""
        deleted = [
            id_
            for id_, accepted in page
            if accepted.has_letter and (row := rows.get(accepted.external_id)) is not None and row.gone
        ]
        return await self._rows.ledger_letters(deleted) if deleted else {}


async def all_pages(
    read_page: Callable[[str, Found], Awaitable[str | None]], found: Found, between_pages: Callable[[], None]
) -> None:
    """Read every page, and leave Postgres to others for most of the time."""
    after: str | None = ""
    while after is not None:
        began = monotonic()
        after = await read_page(after, found)
        between_pages()
        await asyncio.sleep(min(REST * (monotonic() - began), MOST_REST_SECONDS))


class Reconcile:
    """Of one instance. Methods raise Retryable while Postgres is away, and LeaseLost."""

    def __init__(
        self,
        pool: Pool,
        state: State,
        publisher: Publisher,
        identities: Identities,
        clock: Clock,
        *,
        between_pages: Callable[[], None],
        look_again: Callable[[Collection[str], bool], None],
    ) -> None:
        """look_again: is told which documents to fetch by name now, and whether to list groups."""
        self._state = state
        self._publisher = publisher
        self._identities = identities
        self._rows = publisher.rows
        self._tables = MembershipTables(pool, self._rows.holder)
        self._remembered = Differences(pool, self._rows.holder)
        self._clock = clock
        self._between_pages = between_pages
        self._look_again = look_again
        self.counts: Counter[Kind] = Counter()
        """Differences that were repaired since somebody last took them away."""
        self.problems: list[Problem] = []

    async def run(self, _words: frozenset[str]) -> Mapping[str, Any]:
        """One comparison of everything that this instance published, and of everything that the ledger has of it."""
        handled = await self._rows.handled()
        found = Found()
        documents = LedgerDocuments(self._rows)
        for read_page in (documents.living, documents.published, self._members, self._sets_alone):
            await all_pages(read_page, found, self._between_pages)
        now = await self._rows.now()
        remembered = await self._remember(found, now)
        certain = _certain(found, remembered, handled)
        standing = await self._repair(certain, remembered, now)
        kinds = Counter(one.kind for one in certain.values())
        told = {kind: kinds[kind] for kind in KINDS if kinds[kind]}
        self.problems = (
            []
            if not standing
            else [
                Problem(
                    self._rows.holder.source,
                    "ledger_differs",
                    f"{standing} documents or people's groups differ from the ledger although they were published again"
                    ": see docs/runbooks/reconciliation.md",
                )
            ]
        )
        compared: dict[str, Any] = {"documents": found.documents, "principals": found.principals}
        await self._state.reconciled(compared | {"found": told, "standing": standing})
        return compared | dict(told)

    async def _remember(self, found: Found, now: datetime) -> dict[Key, Remembered]:
        """Since when each difference is seen, and when it was last repaired. What is none any more is remembered for
        as long as it must not be repaired again."""
        before = await self._remembered.load()
        after = {key: remembered_since(one, before.get(key), now) for key, one in found.differences.items()}
        kept = {key: one for key, one in before.items() if key not in after and not may_repair(one, now)}
        changed = {key: one for key, one in after.items() if before.get(key) != one}
        await self._remembered.save(changed, before.keys() - after.keys() - kept.keys())
        return after

    async def _repair(
        self, certain: Mapping[Key, Difference], remembered: Mapping[Key, Remembered], now: datetime
    ) -> int:
        """Mark what is to be published again; returns how many differences an earlier repair did not mend."""
        new = [key for key in certain if may_repair(remembered[key], now)]
        new.sort(key=lambda key: FIRST.index(certain[key].kind))
        repairing = {key: certain[key] for key in new[:MOST]}
        documents = {name: one for (what, name), one in repairing.items() if what == "document"}
        principals = {name: one for (what, name), one in repairing.items() if what == "principal"}
        if documents:
            versions = {name: (one.version, str(one.kind)) for name, one in documents.items()}
            await self._publisher.mark_in_doubt(versions, self._clock.stamp)
        if principals:
            stamp = self._clock.stamp()
            await self._identities.mark_in_doubt({name: one.observed_at or stamp for name, one in principals.items()})
        await self._remembered.repaired(repairing)  # after the marks: what is said to be repaired waits for a day
        for one in repairing.values():
            self.counts[one.kind] += 1
            log.warning("reconciliation_difference", source=self._rows.holder.source, kind=one.kind)
        if repairing:
            self._look_again([name for name, one in documents.items() if one.has_row], bool(principals))
        return len(certain) - len(new)

    # Each step reads one page and returns where the next one begins; None: that was the last.

    async def _members(self, after: str, found: Found) -> str | None:
        if not after and not await self._tables.page("", 1):
            return None  # it has never published anybody's groups: those in the ledger are somebody else's
        page = await self._tables.ledger(after, PAGE)
        published = await self._tables.published([principal for principal, _, _ in page])
        for principal, observed_at, holds in page:
            one = published.get(principal)
            if (kind := member_difference(one, observed_at, holds=holds)) is not None:
                found.note(("principal", principal), Difference(kind, _digest(one), observed_at=observed_at))
        found.principals += len(page)
        return page[-1][0] if len(page) == PAGE else None

    async def _sets_alone(self, after: str, found: Found) -> str | None:
        page = await self._tables.page(after, PAGE)
        certain = {principal: one for principal, one in page if one.digest != IN_DOUBT}
        for principal in await self._tables.ledger_lacks(list(certain)):
            one = certain[principal]
            note = Difference("member_not_accepted", _digest(one), observed_at=one.observed_at)
            found.note(("principal", principal), note)
        return page[-1][0] if len(page) == PAGE else None


def _certain(
    found: Found, remembered: Mapping[Key, Remembered], handled: Mapping[str, datetime]
) -> dict[Key, Difference]:
    """What cannot be merely on its way."""
    certain = {}
    for key, one in found.differences.items():
        until = handled.get("detect" if key[0] == "document" else "identities")
        if one.kind in CERTAIN or (until is not None and remembered[key].seen_at < until):
            certain[key] = one
    return certain


def remembered_since(one: Difference, before: Remembered | None, now: datetime) -> Remembered:
    """A difference of this comparison, with what earlier ones remember of it while nothing more was published."""
    is_same = before is not None and before.published == one.published
    return Remembered(
        one.published, before.seen_at if before and is_same else now, before.repaired_at if before else None
    )


def may_repair(one: Remembered, now: datetime) -> bool:
    """Whether it was not repaired within AGAIN."""
    return one.repaired_at is None or now - one.repaired_at >= AGAIN


def _published(row: Row | None) -> bytes:
    return _digest(None if row is None else (row.version, row.gone, row.acl_tags, row.required_tags))


def _digest(published: object) -> bytes:
    return blake2b(repr(published).encode("utf-8", "surrogatepass"), digest_size=16).digest()
