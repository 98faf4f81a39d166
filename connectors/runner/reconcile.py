"""Compares what was published with the ledger, and stores the differences in ``connector_differences`` between runs.

The comparison itself publishes nothing: it marks documents and principals as in doubt, and the next read of the source
publishes them as they are then. Law: a difference that may only be a message on its way is not marked, and a document
that only the ledger knows is deleted by a sweep alone, under the same conditions as any other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
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
from connectors.runner.rows import Holder, LedgerDocument, Rows, require_lease
from connectors.runner.state import State
from pipeline.core.identity import document_id, qualify
from pipeline.stores.postgres import Connection, Pool, translated

Key = tuple[Literal["document", "principal"], str]


@dataclass(frozen=True, slots=True)
class StoredDifference:
    """A document or principal that differed in an earlier comparison."""

    published: bytes
    """Digest of its published state then."""
    seen_at: datetime
    """When it was first seen to differ in that state, by Postgres' clock."""
    repaired_at: datetime | None = None
    """When it was last marked to be published again."""


class Differences:
    """The stored differences of one instance.

    Law: a process that is killed at any moment leaves the differences of an earlier comparison, and never records a
    repair that was not made. Methods raise Retryable while Postgres cannot be reached; those that write raise
    LeaseLost.
    """

    def __init__(self, pool: Pool, holder: Holder) -> None:
        self._pool = pool
        self._holder = holder

    async def load(self) -> dict[Key, StoredDifference]:
        with translated("connector_differences"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT subject, name, published, seen_at, repaired_at FROM connector_differences"
                    " WHERE tenant = %s AND source = %s",
                    self._me,
                )
                return {
                    (subject, name): StoredDifference(bytes(published), seen_at, repaired_at)
                    async for subject, name, published, seen_at, repaired_at in cursor
                }

    async def save(self, differences: Mapping[Key, StoredDifference], removed: Collection[Key]) -> None:
        """Write differences, and delete removed ones."""
        rows = ((*key, stored.published, stored.seen_at) for key, stored in differences.items())
        columns = zip(*rows, strict=True)
        with translated("connector_differences"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self._holder)
                if differences:
                    await connection.execute(
                        "INSERT INTO connector_differences AS mine (tenant, source, subject, name, published, seen_at)"
                        " SELECT %s, %s, * FROM unnest(%s::text[], %s::text[], %s::bytea[], %s::timestamptz[])"
                        " ON CONFLICT (tenant, source, subject, name) DO UPDATE SET"
                        " published = EXCLUDED.published, seen_at = EXCLUDED.seen_at",
                        [*self._me, *(list(column) for column in columns)],
                    )
                await self._execute(connection, "DELETE FROM connector_differences mine", removed)

    async def mark_repaired(self, keys: Collection[Key]) -> None:
        """Record that these documents and principals were marked to be published again."""
        with translated("connector_differences"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self._holder)
                await self._execute(
                    connection, "UPDATE connector_differences mine SET repaired_at = clock_timestamp()", keys
                )

    async def _execute(self, connection: Connection, statement: str, keys: Collection[Key]) -> None:
        """Run a DELETE or UPDATE of ``connector_differences mine`` on the rows of these keys."""
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
"""unknown: alive in the ledger, but no row says that it was published. newer: the ledger has a version or access that
was never published. not_deleted, not_accepted: the ledger lacks what Kafka has acknowledged. member_unknown and
member_not_accepted: the same for a principal's groups."""
KINDS: tuple[Kind, ...] = get_args(Kind)
CERTAIN: frozenset[Kind] = frozenset({"unknown", "newer", "member_unknown"})
"""Kinds that count at once: an intent is recorded before anything is sent, so what the ledger has and no row knows is
not on its way. The other kinds count when they are seen twice, and when everything that was sent before the first time
has been handled."""
REPAIR_ORDER: tuple[Kind, ...] = (
    "member_unknown",
    "newer",
    "not_deleted",
    "member_not_accepted",
    "not_accepted",
    "unknown",
)
"""The order of repairs: differences that may show too much come first."""

PAGE = 500
"""Rows that are compared at once."""
REST_FACTOR = 4
"""The pause after a page, as a multiple of the page's duration: a comparison uses a fifth of one connection at most."""
MAX_REST_SECONDS = 60.0
"""The longest pause after a page: one that took hours because the process was suspended was no load."""
MAX_REPAIRS = 1_000
"""Differences repaired after one comparison: a sweep fetches so many documents by name in about a minute."""
MAX_DIFFERENCES = 20_000
"""Differences that one comparison holds in memory, some megabytes: for documents and for principals, certain and
uncertain, so many each. A backlog on its way thus does not hide a certain difference. The next comparison finds the
rest."""
REPAIR_INTERVAL = timedelta(days=1)
"""How often a difference that a repair did not remove is repaired again; it is reported meanwhile. A source whose
versions went backwards, or an event that the pipeline refuses, would otherwise be published for ever."""


def document_difference(
    row: Row | None, accepted: LedgerDocument, source: str, letter_at: datetime | None = None
) -> Kind | None:
    """Return how a living document of the ledger differs from what was published last; None if it does not. Pure.

    A row in doubt never differs, because it is published again anyway. letter_at: when the newest dead letter of a
    document arrived whose delete was published.
    """
    if row is None:
        return "unknown"
    if row.is_in_doubt:
        return None
    if row.gone:  # a letter from before the delete belongs to another event: the delete itself was lost
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
    """Return how a principal's groups in the ledger differ from what was published last. Pure.

    holds: whether the ledger has at least one group.
    """
    if published is None:
        return "member_unknown" if holds else None
    if published.digest == IN_DOUBT:
        return None
    if observed_at > published.observed_at:
        return "member_unknown"
    return "member_not_accepted" if observed_at < published.observed_at else None


def _is_later(moment: datetime | None, other: datetime | None) -> bool:
    return moment is not None and (other is None or moment > other)


@dataclass(frozen=True, slots=True)
class Difference:
    """A document or principal that differs from the ledger."""

    kind: Kind
    published: bytes
    """Digest of the published state: while it stays the same, nothing more was sent."""
    version: int = 0
    """The ledger's version of a document."""
    observed_at: datetime | None = None
    """The ledger's stamp of a document's access, or of a principal."""
    has_row: bool = True
    has_letter: bool = False
    """Whether an event of the document waits as a dead letter."""


@dataclass(slots=True)
class LedgerComparison:
    """The result of one comparison: how much was compared, and what differs."""

    documents: int = 0
    principals: int = 0
    differences: dict[Key, Difference] = field(default_factory=dict)

    _counts: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def add(self, key: Key, difference: Difference) -> None:
        """Add a difference, unless there are MAX_DIFFERENCES of its sort."""
        sort = key[0], difference.kind in CERTAIN
        if self._counts[sort] < MAX_DIFFERENCES:
            self._counts[sort] += 1
            self.differences[key] = difference


class DocumentComparison:
    """Compares the published documents of one source with the ledger.

    Each method compares one page, adds the differences to a comparison, and returns where the next page begins, or None
    after the last one. Methods raise Retryable while Postgres cannot be reached.
    """

    def __init__(self, rows: Rows, is_compared: Callable[[str], bool] = is_storable_id) -> None:
        """is_compared: whether the source answers for the document with this external id; by default for every id that
        a connector can publish."""
        self._rows = rows
        self._is_compared = is_compared

    async def compare_ledger(self, after: str, comparison: LedgerComparison) -> str | None:
        """Compare living documents of the ledger. They are read before the rows: a row that is written meanwhile is
        newer."""
        page = await self._rows.ledger(after, PAGE)
        rows = await self._rows.find([accepted.external_id for _, accepted in page])
        letters = await self._letters(page, rows)
        for id_, accepted in page:
            row = rows.get(accepted.external_id)
            kind = document_difference(row, accepted, self._rows.holder.source, letters.get(id_))
            if kind is not None and self._is_compared(accepted.external_id):
                difference = Difference(
                    kind,
                    _row_digest(row),
                    accepted.version,
                    accepted.access_observed_at,
                    has_row=row is not None,
                    has_letter=accepted.has_letter,
                )
                comparison.add(("document", accepted.external_id), difference)
        comparison.documents += len(page)
        return str(page[-1][0]) if len(page) == PAGE else None

    async def compare_rows(self, after: str, comparison: LedgerComparison) -> str | None:
        """Find documents that were published and are not alive in the ledger."""
        page = await self._rows.page(after, PAGE)
        holder = self._rows.holder
        published = {
            document_id(holder.tenant, holder.source, row.external_id): row
            for row in page
            if row.is_published and not row.is_in_doubt and self._is_compared(row.external_id)
        }
        for id_ in await self._rows.ledger_lacks(list(published)):
            row = published[id_]
            difference = Difference("not_accepted", _row_digest(row), row.version or 0)
            comparison.add(("document", row.external_id), difference)
        return page[-1].external_id if len(page) == PAGE else None

    async def _letters(
        self, page: Sequence[tuple[UUID, LedgerDocument]], rows: Mapping[str, Row]
    ) -> Mapping[UUID, datetime]:
        """Return when the newest dead letters arrived of documents whose deletes were published."""
        deleted = [
            id_
            for id_, accepted in page
            if accepted.has_letter and (row := rows.get(accepted.external_id)) is not None and row.gone
        ]
        return await self._rows.ledger_letters(deleted) if deleted else {}


async def compare_all(
    compare_page: Callable[[str, LedgerComparison], Awaitable[str | None]],
    comparison: LedgerComparison,
    between_pages: Callable[[], None],
) -> None:
    """Compare all pages, and leave Postgres to others for most of the time."""
    after: str | None = ""
    while after is not None:
        began = monotonic()
        after = await compare_page(after, comparison)
        between_pages()
        await asyncio.sleep(min(REST_FACTOR * (monotonic() - began), MAX_REST_SECONDS))


async def nothing_more(_handled: datetime | None) -> None:
    """Do nothing after a comparison without any difference."""


class Reconcile:
    """Compares one instance with the ledger, and repairs it. Methods raise Retryable while Postgres cannot be reached,
    and LeaseLost."""

    def __init__(
        self,
        pool: Pool,
        state: State,
        publisher: Publisher,
        identities: Identities,
        clock: Clock,
        *,
        between_pages: Callable[[], None],
        read_again: Callable[[Collection[str], bool], None],
        on_equal: Callable[[datetime | None], Awaitable[None]] = nothing_more,
    ) -> None:
        """between_pages: raises Paused while the instance is paused. read_again: called with the documents to fetch
        now, and whether to list groups. on_equal: called after a comparison without any difference, with the time
        before which everything sent had been handled when it began."""
        self._state = state
        self._publisher = publisher
        self._identities = identities
        self._rows = publisher.rows
        self._tables = MembershipTables(pool, self._rows.holder)
        self._stored = Differences(pool, self._rows.holder)
        self._clock = clock
        self._between_pages = between_pages
        self._read_again = read_again
        self._on_equal = on_equal
        self.counts: Counter[Kind] = Counter()
        """Repaired differences, since the caller last cleared them."""
        self.problems: list[Problem] = []

    async def run(self, _arguments: frozenset[str]) -> Mapping[str, Any]:
        """Compare everything that this instance published with everything that the ledger has of it. Returns how much
        was compared, and the certain differences by kind."""
        handled = await self._rows.handled()
        comparison = LedgerComparison()
        documents = DocumentComparison(self._rows)
        for compare_page in (
            documents.compare_ledger,
            documents.compare_rows,
            self._compare_ledger_members,
            self._compare_published_sets,
        ):
            await compare_all(compare_page, comparison, self._between_pages)
        if not comparison.differences:
            await self._on_equal(handled.get("detect"))
        now = await self._rows.now()
        stored = await self._store(comparison, now)
        certain = _certain(comparison, stored, handled)
        standing = await self._repair(certain, stored, now)
        counts = Counter(difference.kind for difference in certain.values())
        by_kind = {kind: counts[kind] for kind in KINDS if counts[kind]}
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
        compared: dict[str, Any] = {"documents": comparison.documents, "principals": comparison.principals}
        await self._state.save_reconciliation(compared | {"found": by_kind, "standing": standing})
        return compared | dict(by_kind)

    async def _store(self, comparison: LedgerComparison, now: datetime) -> dict[Key, StoredDifference]:
        """Store the differences, with when each was first seen and last repaired, and return them.

        One that has disappeared stays stored for as long as it must not be repaired again.
        """
        before = await self._stored.load()
        after = {
            key: stored_difference(difference, before.get(key), now)
            for key, difference in comparison.differences.items()
        }
        retained = {key for key, stored in before.items() if key not in after and not may_repair(stored, now)}
        changed = {key: stored for key, stored in after.items() if before.get(key) != stored}
        await self._stored.save(changed, before.keys() - after.keys() - retained)
        return after

    async def _repair(
        self, certain: Mapping[Key, Difference], stored: Mapping[Key, StoredDifference], now: datetime
    ) -> int:
        """Mark what is to be published again; returns how many differences an earlier repair did not remove."""
        new = [key for key in certain if may_repair(stored[key], now)]
        new.sort(key=lambda key: REPAIR_ORDER.index(certain[key].kind))
        repairing = {key: certain[key] for key in new[:MAX_REPAIRS]}
        documents = {name: difference for (subject, name), difference in repairing.items() if subject == "document"}
        principals = {name: difference for (subject, name), difference in repairing.items() if subject == "principal"}
        if documents:
            follow_ledger(self._clock, documents.values())
            versions = {name: (difference.version, str(difference.kind)) for name, difference in documents.items()}
            await self._publisher.mark_in_doubt(versions, self._clock.stamp)
        if principals:
            stamp = self._clock.stamp()
            stamps = {name: difference.observed_at or stamp for name, difference in principals.items()}
            await self._identities.mark_in_doubt(stamps)
        await self._stored.mark_repaired(repairing)  # after the marks: no repair follows within REPAIR_INTERVAL
        for difference in repairing.values():
            self.counts[difference.kind] += 1
            log.warning("publication_differs", source=self._rows.holder.source, kind=difference.kind)
        if repairing:
            self._read_again([name for name, difference in documents.items() if difference.has_row], bool(principals))
        return len(certain) - len(new)

    # Each of these compares one page and returns where the next one begins, or None after the last.

    async def _compare_ledger_members(self, after: str, comparison: LedgerComparison) -> str | None:
        """Compare principals of the ledger with their published sets."""
        if not after and not await self._tables.page("", 1):
            return None  # this instance has never published groups: those in the ledger come from another producer
        page = await self._tables.ledger(after, PAGE)
        published = await self._tables.published([principal for principal, _, _ in page])
        for principal, observed_at, holds in page:
            last = published.get(principal)
            if (kind := member_difference(last, observed_at, holds=holds)) is not None:
                comparison.add(("principal", principal), Difference(kind, _set_digest(last), observed_at=observed_at))
        comparison.principals += len(page)
        return page[-1][0] if len(page) == PAGE else None

    async def _compare_published_sets(self, after: str, comparison: LedgerComparison) -> str | None:
        """Find published sets of which the ledger has accepted nothing."""
        page = await self._tables.page(after, PAGE)
        certain = {principal: published for principal, published in page if published.digest != IN_DOUBT}
        for principal in await self._tables.ledger_lacks(list(certain)):
            published = certain[principal]
            difference = Difference("member_not_accepted", _set_digest(published), observed_at=published.observed_at)
            comparison.add(("principal", principal), difference)
        return page[-1][0] if len(page) == PAGE else None


def follow_ledger(clock: Clock, differences: Iterable[Difference]) -> None:
    """Let the clock go on after the stamps that the ledger has of these documents. They may be of a process whose clock
    was ahead, and which nobody remembers after a failover of Postgres: what is published again would count as older."""
    for difference in differences:
        clock.follow(difference.observed_at)


def _certain(
    comparison: LedgerComparison, stored: Mapping[Key, StoredDifference], handled: Mapping[str, datetime]
) -> dict[Key, Difference]:
    """Return the differences that cannot be messages on their way."""
    certain = {}
    for key, difference in comparison.differences.items():
        until = handled.get("detect" if key[0] == "document" else "identities")
        if difference.kind in CERTAIN or (until is not None and stored[key].seen_at < until):
            certain[key] = difference
    return certain


def stored_difference(difference: Difference, before: StoredDifference | None, now: datetime) -> StoredDifference:
    """Return a difference to store, with what an earlier comparison has stored of it."""
    is_same = before is not None and before.published == difference.published
    return StoredDifference(
        difference.published, before.seen_at if before and is_same else now, before.repaired_at if before else None
    )


def may_repair(stored: StoredDifference, now: datetime) -> bool:
    """Return True if the last repair is at least REPAIR_INTERVAL ago."""
    return stored.repaired_at is None or now - stored.repaired_at >= REPAIR_INTERVAL


def _row_digest(row: Row | None) -> bytes:
    return _digest(None if row is None else (row.version, row.gone, row.acl_tags, row.required_tags))


def _set_digest(published: PublishedSet | None) -> bytes:
    return _digest(None if published is None else (published.digest, published.observed_at))


def _digest(state: object) -> bytes:
    return blake2b(repr(state).encode("utf-8", "surrogatepass"), digest_size=16).digest()
