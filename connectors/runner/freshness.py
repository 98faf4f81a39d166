"""Up to which time an instance's source is complete in both stores, as certificates of searches report it.

A complete listing shows everything that the source had when it began. The source is complete up to that time once the
ledger and both stores have what was published by the time that it ended. Whether they have is read from the ledger's
own state and never derived from Kafka's offsets: an event that Kafka lost holds the time back until it is published
again (docs/adr/0084-freshness-certificates.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Literal, LiteralString

import structlog

from connectors.runner.activity import is_cancelled
from connectors.runner.rows import Holder, LeaseLost
from pipeline.core.errors import Retryable
from pipeline.stores.postgres import Connection, Pool, translated

log = structlog.get_logger()

CHECK_SECONDS = 2.0
"""Pause between two looks at what is still to be applied."""
REST_FACTOR = 20
"""The pause after a look, as a multiple of the look's duration: looks use a twentieth of one connection at most."""
MAX_REST_SECONDS = 60.0
MAX_FORGOTTEN = 1_000
"""Publications that one statement looks at, the oldest first."""


@dataclass(slots=True)
class Listing:
    """A complete listing of documents or of groups that has ended."""

    began: datetime
    """By the slower of this machine's clock and that of Postgres: a clock that is ahead makes no claim newer than it
    is."""
    has_revisions: bool = True
    """True if it shows changed contents, and not only which documents there are and who may read them."""
    ended: datetime | None = None
    """By the clock of Postgres, at the first look after its end."""


@dataclass(frozen=True, slots=True)
class _State:
    """The state of the instance in the tables, as of one look."""

    now: datetime
    tracked_since: datetime
    is_equal: bool
    generation: str | None
    reopened_at: datetime | None
    active: str | None
    oldest: datetime | None
    """When the oldest publication that is not applied was recorded."""
    is_in_doubt: bool
    has_gaps: bool


_STATE: LiteralString = """
    SELECT clock_timestamp(), f.tracked_since, f.equal_at IS NOT NULL, f.generation, f.reopened_at, active_generation(),
        (SELECT min(since) FROM connector_publications p WHERE p.tenant = f.tenant AND p.source = f.source),
        EXISTS (SELECT FROM connector_items i WHERE i.tenant = f.tenant AND i.source = f.source
            AND i.in_doubt_since IS NOT NULL),
        EXISTS (SELECT FROM connector_items i WHERE i.tenant = f.tenant AND i.source = f.source
            AND i.problem_code IS NOT NULL)
    FROM connector_freshness f WHERE f.tenant = %s AND f.source = %s AND f.epoch = %s
"""


class Freshness:
    """Records up to which time the source is complete. Law: a recorded time is true. It is only ever too early.

    Methods raise Retryable while Postgres cannot be reached, and LeaseLost when another runner has taken over.
    """

    def __init__(self, pool: Pool, holder: Holder, *, every_seconds: float) -> None:
        """every_seconds: the longest time between two complete listings."""
        self._pool = pool
        self._holder = holder
        self._every = every_seconds
        self._listings: dict[Literal["documents", "groups"], list[Listing]] = {"documents": [], "groups": []}
        """Those that are not applied yet: at most the oldest and the newest of each sort."""

    async def begin(self) -> None:
        """Record that this runner publishes from now on. If the runner before it did not record its publications, a
        comparison with the ledger has to come first."""
        with translated("connector_freshness"):
            async with self._pool.connection() as connection:
                await connection.execute(
                    "INSERT INTO connector_freshness AS f (tenant, source, epoch, tracked_since, every_seconds)"
                    " VALUES (%s, %s, %s, clock_timestamp(), %s) ON CONFLICT (tenant, source) DO UPDATE SET"
                    " tracked_since = CASE WHEN f.epoch = EXCLUDED.epoch - 1 THEN f.tracked_since"
                    " ELSE EXCLUDED.tracked_since END,"
                    " equal_at = CASE WHEN f.epoch = EXCLUDED.epoch - 1 THEN f.equal_at END,"
                    " epoch = EXCLUDED.epoch, every_seconds = EXCLUDED.every_seconds"
                    " WHERE f.epoch < EXCLUDED.epoch",
                    [*self._me, self._every],
                )

    async def now(self) -> datetime:
        """The beginning of a listing that is about to begin."""
        with translated("connector_freshness"):
            async with self._pool.connection() as connection:
                [[now]] = await (await connection.execute("SELECT clock_timestamp()")).fetchall()
        began: datetime = min(datetime.now(UTC), now)
        return began

    def listed(self, sort: Literal["documents", "groups"], listing: Listing) -> None:
        """Note that a complete listing has ended and that everything it showed was published."""
        self._listings[sort][1:] = [listing]

    async def equals_ledger(self, handled: datetime | None) -> None:
        """Note that a comparison has found the ledger equal to what was published. handled: everything that was sent
        before had been handled when the comparison began."""
        if handled is not None:
            with translated("connector_freshness"):
                async with self._pool.connection() as connection:
                    await self._update(
                        connection, "equal_at = clock_timestamp()", "equal_at IS NULL AND tracked_since < %s", handled
                    )

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while not is_cancelled():
            began = monotonic()
            try:
                await self.look()
            except Retryable as error:
                log.warning("freshness_not_recorded", source=self._holder.source, reason=str(error)[:200])
            await asyncio.sleep(min(MAX_REST_SECONDS, max(CHECK_SECONDS, REST_FACTOR * (monotonic() - began))))

        raise asyncio.CancelledError

    async def look(self) -> None:
        """Forget what is applied, and record the listings of which everything is."""
        with translated("connector_freshness"):
            async with self._pool.connection() as connection:
                await self._forget_applied(connection)
                cursor = await connection.execute(_STATE, [*self._me])
                row = await cursor.fetchone()
                if row is None:
                    raise LeaseLost(f"connector {self._holder.source} is run by another process now")
                state = _State(*row)
                for waiting in self._listings.values():
                    for listing in waiting:
                        listing.ended = listing.ended or state.now
                await self._look_at_documents(connection, state)
                await self._look_at_groups(connection)

    async def _forget_applied(self, connection: Connection) -> None:
        count = MAX_FORGOTTEN
        while count == MAX_FORGOTTEN:
            cursor = await connection.execute(
                "SELECT forget_applied_publications(%s, %s, %s)",
                [self._holder.tenant, self._holder.source, MAX_FORGOTTEN],
            )
            row = await cursor.fetchone()
            await connection.commit()
            count = row[0] if row else 0

    async def _look_at_documents(self, connection: Connection, state: _State) -> None:
        waiting = self._listings["documents"]
        if not waiting:
            return
        newest = waiting[-1].began
        await self._update(connection, "listed_at = %s", "coalesce(listed_at < %s, true)", newest, newest)
        while waiting and await self._has_applied(connection, waiting[0], state):
            began, exact = waiting[0].began, waiting[0].has_revisions
            await self._update(
                connection,
                "access_until = greatest(access_until, %s),"
                " complete_until = CASE WHEN %s THEN greatest(complete_until, %s) ELSE complete_until END,"
                " generation = %s, has_gaps = %s, reopened_at = NULL",
                "reopened_at IS NOT DISTINCT FROM %s",
                *(began, exact, began, state.active, state.has_gaps),
                state.reopened_at,
            )
            waiting.pop(0)

    async def _has_applied(self, connection: Connection, listing: Listing, state: _State) -> bool:
        """Whether both stores have everything that was published before the listing ended."""
        ended = listing.ended
        if ended is None or state.active is None or state.is_in_doubt or not state.is_equal:
            return False
        if state.oldest is not None and state.oldest <= ended:
            return False
        if state.generation == state.active and state.reopened_at is None:
            return True
        # Publications that were applied before may not be in these stores.
        if state.reopened_at is not None and state.reopened_at >= ended:
            return False
        return await _ask(connection, "SELECT source_is_settled(%s, %s, %s)", [*self._instance, ended])

    async def _look_at_groups(self, connection: Connection) -> None:
        waiting = self._listings["groups"]
        if waiting and await _ask(connection, "SELECT members_are_applied(%s, %s)", self._instance):
            began = max(listing.began for listing in waiting)
            await self._update(connection, "groups_until = greatest(groups_until, %s)", "true", began)
            waiting.clear()

    async def _update(
        self, connection: Connection, assignments: LiteralString, condition: LiteralString, *parameters: object
    ) -> None:
        """parameters: of the assignments, then of the condition."""
        first = assignments.count("%s")
        await connection.execute(
            f"UPDATE connector_freshness SET {assignments} WHERE tenant = %s AND source = %s AND epoch = %s"  # noqa: S608 — callers pass literals
            f" AND {condition}",
            [*parameters[:first], *self._me, *parameters[first:]],
        )

    @property
    def _instance(self) -> tuple[str, str]:
        return self._holder.tenant, self._holder.source

    @property
    def _me(self) -> tuple[str, str, int]:
        return self._holder.tenant, self._holder.source, self._holder.epoch


async def _ask(connection: Connection, question: Any, parameters: Sequence[object]) -> bool:
    row = await (await connection.execute(question, parameters)).fetchone()
    return bool(row and row[0])
