"""Withdrawal without the source: publishes deletes and empty sets of groups for an operator.

A withdrawn document counts as deleted at its source, whatever the source responds (``runner.compare.decide``): its row
says so before anything is sent, so that no later read publishes it again. No process runs a removed connector until it
is resumed; then it reads everything again (docs/adr/0048-erasure.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString
from uuid import UUID

from connectors.clock import TOLERANCE, Clock
from connectors.runner.rows import keep_stamp
from pipeline.core.errors import Misconfigured, PenstockError
from pipeline.core.fold import MAX_AHEAD
from pipeline.core.identity import INGESTED
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from pipeline.stores.postgres import Pool, translated
from topics.messages import DocumentDeleted, IdentityChanged
from topics.registry import DOCUMENTS_LIVE, IDENTITIES

PAGE = 500
"""The source of `penstock ingest` and `watch`, which has no runner, and no rows of deleted documents."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much there is to withdraw, or was withdrawn."""

    documents: int
    principals: int


class Withdrawal:
    """The withdrawal of one source. Every method raises Retryable while Postgres or Kafka is away; what was withdrawn
    by then stays withdrawn, and a repeated call does the rest."""

    def __init__(self, pool: Pool, producer: Producer | None, tenant: str, source: str) -> None:
        """producer: required by the methods that withdraw; None for the others."""
        self._pool = pool
        self._producer = producer
        self.tenant, self.source = tenant, source

    async def extent(self) -> Extent:
        """Count the documents that are alive in the ledger or published, and the principals with groups."""
        [(documents, principals)] = await self._all(
            "SELECT (SELECT count(*) FROM (SELECT external_id FROM documents WHERE tenant = %(tenant)s"  # noqa: S608 — constants of this module
            " AND source = %(source)s AND deleted_at IS NULL AND version IS NOT NULL"
            f" UNION SELECT external_id FROM connector_items WHERE {_PUBLISHED}) d),"
            " (SELECT count(*) FROM (SELECT principal FROM memberships WHERE tenant = %(tenant)s"
            " AND source = %(source)s AND groups <> '{}' UNION SELECT principal FROM connector_principals"
            " WHERE tenant = %(tenant)s AND source = %(source)s) p)"
        )
        return Extent(documents, principals)

    async def remove(self) -> None:
        """Stop all runners: after this call none publishes anything until the connector is resumed. What a runner has
        sent before is stamped earlier than what is withdrawn afterwards."""
        await self._all(
            "UPDATE connectors SET removed_at = coalesce(removed_at, clock_timestamp()), epoch = epoch + 1,"
            " seen_at = NULL, worker = NULL, address = NULL WHERE tenant = %(tenant)s AND source = %(source)s"
        )

    async def whole(self) -> Extent:
        """Withdraw everything that the source has published. Call ``remove`` first."""
        clock = await self._clock()
        begun = clock.stamp()
        documents = 0
        after = ""
        while page := await self._all(
            f"SELECT external_id, version FROM connector_items WHERE {_PUBLISHED} AND external_id > %(after)s"  # noqa: S608 — constants of this module
            " ORDER BY external_id LIMIT %(page)s",
            after=after,
        ):
            after = page[-1][0]
            documents += await self._delete(page, clock)
        last = UUID(int=0)  # a row that was gone before does not prove that the ledger has the delete
        while page := await self._all(
            "SELECT l.id, l.external_id, l.version, i.external_id IS NOT NULL"
            " FROM ledger_documents(%(tenant)s, %(source)s, %(last)s, %(page)s) l LEFT JOIN connector_items i"
            " ON i.tenant = %(tenant)s AND i.source = %(source)s AND i.external_id = l.external_id AND i.gone"
            " AND i.content_at >= %(begun)s ORDER BY l.id",
            last=last,
            begun=begun,
        ):
            last = page[-1][0]
            documents += await self._delete(
                [(name, version) for _, name, version, is_sent in page if not is_sent], clock
            )
        principals = await self._members(clock)
        await self._all(
            "UPDATE connectors SET changes_cursor = NULL, full_cursor = NULL, full_state = 'due', loaded_at = NULL,"
            " groups_listing = NULL, guard = NULL, activities = '{}', problems = '[]', reconciliation = NULL"
            " WHERE tenant = %(tenant)s AND source = %(source)s"
        )
        for table in ("connector_groups", "connector_principals", "connector_memory"):
            await self._all(f"DELETE FROM {table} WHERE tenant = %(tenant)s AND source = %(source)s")  # noqa: S608 — names listed here
        if self.source == INGESTED:
            await self._all("DELETE FROM connector_items WHERE tenant = %(tenant)s AND source = %(source)s AND gone")
        return Extent(documents, principals)

    async def documents(self, external_ids: Sequence[str]) -> datetime:
        """Withdraw these documents, whether they are known or not. Returns the deletes' observed_at."""
        await self._all(
            "INSERT INTO connector_items AS mine (tenant, source, scope, external_id, version, withdrawn_at,"
            " in_doubt_since) SELECT %(tenant)s, %(source)s, '', name, 0, clock_timestamp(), clock_timestamp()"
            " FROM unnest(%(names)s::text[]) name WHERE %(source)s = %(ingested)s"
            " OR EXISTS (SELECT FROM connectors WHERE tenant = %(tenant)s AND source = %(source)s)"
            " ON CONFLICT (tenant, source, external_id) DO UPDATE SET fingerprint = NULL, stat = NULL, gone = false,"
            " withdrawn_at = clock_timestamp(),"
            " in_doubt_since = greatest(mine.in_doubt_since, EXCLUDED.in_doubt_since)",
            names=list(external_ids),
        )
        # A runner that did not see these rows publishes nothing of them from now on (``Rows.intend``).
        clock = await self._clock(external_ids)
        versions = dict(
            await self._all(
                "SELECT external_id, version FROM connector_items WHERE tenant = %(tenant)s AND source = %(source)s"
                " AND external_id = ANY(%(names)s)",
                names=list(external_ids),
            )
        )
        await self._delete([(name, versions.get(name)) for name in external_ids], clock)
        return clock.last

    async def undo(self, external_ids: Sequence[str]) -> int:
        """Permit the source to publish these documents again, which its next read does. Returns how many of them were
        withdrawn."""
        if self.source == INGESTED:
            statement: LiteralString = "DELETE FROM connector_items"
        else:
            statement = "UPDATE connector_items SET withdrawn_at = NULL, fingerprint = NULL, revision = NULL"
        restored = await self._all(
            f"{statement} WHERE tenant = %(tenant)s AND source = %(source)s AND external_id = ANY(%(names)s)"
            " AND withdrawn_at IS NOT NULL RETURNING 1",
            names=list(external_ids),
        )
        return len(restored)

    async def principals(self, names: Sequence[str]) -> datetime:
        """Publish that these principals hold no groups in this source. Returns the stamp."""
        clock = await self._clock([])
        await self._empty(names, clock)
        return clock.last

    async def _members(self, clock: Clock) -> int:
        count, after = 0, ""
        while page := await self._all(
            "SELECT principal FROM (SELECT principal FROM connector_principals WHERE tenant = %(tenant)s"
            " AND source = %(source)s AND principal > %(after)s UNION SELECT principal FROM memberships WHERE"
            " tenant = %(tenant)s AND source = %(source)s AND principal > %(after)s AND groups <> '{}') both_"
            " ORDER BY principal LIMIT %(page)s",
            after=after,
        ):
            after = page[-1][0]
            await self._empty([principal for (principal,) in page], clock)
            count += len(page)
        return count

    async def _empty(self, principals: Iterable[str], clock: Clock) -> None:
        assert self._producer is not None
        stamp = clock.stamp()
        await self._stamped(stamp)
        await deliver(
            self._producer.send(
                IDENTITIES,
                IdentityChanged(
                    tenant=self.tenant, source=self.source, principal=principal, groups=[], observed_at=stamp
                ),
            )
            for principal in principals
        )

    async def _delete(self, page: Sequence[tuple[str, int | None]], clock: Clock) -> int:
        """Publish the deletes of these documents (external id, version), then record them in their rows."""
        if not page:
            return 0
        assert self._producer is not None
        stamp = clock.stamp()
        await self._stamped(stamp)
        await deliver(
            self._producer.send(
                DOCUMENTS_LIVE,
                DocumentDeleted(
                    tenant=self.tenant, source=self.source, external_id=name, version=version or 0, observed_at=stamp
                ),
            )
            for name, version in page
        )
        # Not where a runner has read something later: it is published, and the next read withdraws it.
        await self._all(
            "UPDATE connector_items SET gone = true, fingerprint = NULL, revision = NULL, stat = NULL,"
            " problem_code = NULL, problem_message = NULL, content_at = %(stamp)s, access_at = %(stamp)s,"
            " in_doubt_since = NULL WHERE tenant = %(tenant)s AND source = %(source)s AND external_id = ANY(%(names)s)"
            " AND coalesce(in_doubt_since <= %(stamp)s, true) AND coalesce(content_at <= %(stamp)s, true)",
            stamp=stamp,
            names=[name for name, _ in page],
        )
        return len(page)

    async def _clock(self, external_ids: Sequence[str] | None = None) -> Clock:
        """A clock whose stamps are later than what the source has sent, and than what the ledger has of these documents
        (None: of all), also of a process whose clock is ahead. It waits where that is close to what is refused. Raises
        Misconfigured where this machine's clock is so far behind that it would wait for long."""
        [(sent, *accepted)] = await self._all(
            "SELECT (SELECT observed_at FROM connector_sources WHERE tenant = %(tenant)s AND source = %(source)s),"
            " (SELECT max(observed_at) FROM documents WHERE tenant = %(tenant)s AND source = %(source)s"
            " AND (%(names)s::text[] IS NULL OR external_id = ANY(%(names)s))),"
            " (SELECT max(observed_at) FROM memberships WHERE tenant = %(tenant)s AND source = %(source)s)",
            names=None if external_ids is None else list(external_ids),
        )
        now = datetime.now(UTC)
        if sent is not None and sent > now + MAX_AHEAD:
            sent = now + TOLERANCE  # nothing that was sent by such a clock was accepted, and no delete of it would be
        clock = Clock(None)
        for moment in (sent, *accepted):
            clock.follow(moment)
        if (ahead := clock.last - now - TOLERANCE) > MAX_AHEAD:
            raise Misconfigured(
                f"this machine's clock is behind: the ledger has a change of {clock.last:%Y-%m-%d %H:%M:%S} UTC;"
                " set the clock, and withdraw again"
            )
        if ahead > timedelta():
            await asyncio.sleep(ahead.total_seconds())
        return clock

    async def _stamped(self, stamp: datetime) -> None:
        """Record the stamp before anything is sent, so that the next process's stamps are later."""
        with translated("withdrawal"):
            async with self._pool.connection() as connection:
                await keep_stamp(connection, self.tenant, self.source, stamp)

    async def _all(self, statement: LiteralString, **parameters: Any) -> list[tuple[Any, ...]]:
        values = {"tenant": self.tenant, "source": self.source, "page": PAGE, "ingested": INGESTED, **parameters}
        with translated("withdrawal"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(statement, values)
                return await cursor.fetchall() if cursor.description else []


_PUBLISHED: LiteralString = """
    tenant = %(tenant)s AND source = %(source)s AND (in_doubt_since IS NOT NULL OR (version IS NOT NULL AND NOT gone))
"""


async def tenant_of(pool: Pool, source: str, tenant: str | None) -> str:
    """Return the tenant of the connector with that name. Raises PenstockError unless exactly one tenant has it."""
    with translated("connectors"):
        async with pool.connection() as connection:
            cursor = await connection.execute(
                "SELECT tenant FROM connectors WHERE source = %(source)s AND (%(tenant)s::text IS NULL OR"
                " tenant = %(tenant)s) UNION SELECT tenant FROM connector_sources WHERE source = %(source)s"
                " AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s) ORDER BY 1",
                {"source": source, "tenant": tenant},
            )
            tenants = [name for (name,) in await cursor.fetchall()]
    if not tenants:
        raise PenstockError(
            f"no connector {source!r} has ever run{'' if tenant is None else f' for tenant {tenant!r}'}"
        )
    if len(tenants) > 1:
        raise PenstockError(f"several tenants have a source {source!r}: name one by --tenant ({', '.join(tenants)})")
    return str(tenants[0])


async def sources_of(pool: Pool, tenant: str) -> list[str]:
    """Return every source of which a tenant has or had documents, groups or a connector."""
    with translated("withdrawal"):
        async with pool.connection() as connection:
            cursor = await connection.execute(
                """
                WITH RECURSIVE named (source) AS (
                    (SELECT source FROM documents WHERE tenant = %(tenant)s ORDER BY source LIMIT 1)
                    UNION ALL
                    SELECT (SELECT d.source FROM documents d WHERE d.tenant = %(tenant)s AND d.source > n.source
                            ORDER BY d.source LIMIT 1)
                    FROM named n WHERE n.source IS NOT NULL
                )
                SELECT source FROM named WHERE source IS NOT NULL
                UNION SELECT source FROM connectors WHERE tenant = %(tenant)s
                UNION SELECT source FROM connector_sources WHERE tenant = %(tenant)s
                UNION SELECT source FROM memberships WHERE tenant = %(tenant)s
                ORDER BY 1
                """,
                {"tenant": tenant},
            )
            return [source for (source,) in await cursor.fetchall()]
