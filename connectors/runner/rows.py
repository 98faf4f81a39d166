"""The state of an instance's documents as last published, in Postgres: written in one transaction with its cursors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID

from psycopg.rows import args_row
from psycopg.types.json import Jsonb

from connectors.runner.compare import Event, Row
from connectors.source import Cursor
from pipeline.core.errors import PenstockError
from pipeline.core.identity import document_id
from pipeline.core.publication import PublicationKind
from pipeline.stores.postgres import Connection, Pool, translated
from pipeline.stores.stored_json import to_jsonb
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

PAGE = 1_000
"""Rows read or written at once."""
_BEFORE_ALL = UUID(int=0)
_KINDS: dict[type[Event], PublicationKind] = {
    DocumentUpserted: "content",
    AccessChanged: "access",
    DocumentDeleted: "deletion",
}


async def keep_stamp(connection: Connection, tenant: str, source: str, stamp: datetime) -> None:
    """Part of the transaction: the source's clock goes on after this stamp (observed_at), also in the next process."""
    await connection.execute(
        "INSERT INTO connector_sources AS mine VALUES (%s, %s, %s) ON CONFLICT (tenant, source)"
        " DO UPDATE SET observed_at = greatest(mine.observed_at, EXCLUDED.observed_at)",
        [tenant, source, stamp],
    )


class LeaseLost(PenstockError):
    """Another runner has taken the instance over."""


class Withdrawn(Exception):
    """An operator has withdrawn a document since its row was read."""


class Removed(LeaseLost):
    """An operator has removed the instance."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The instance that rows belong to, and the epoch of the runner that may write them: the last one to take over."""

    tenant: str
    source: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class LedgerDocument:
    """A living document as the ledger has it. Tags are qualified by the source; ``has_letter`` says that an event of it
    waits as a dead letter."""

    external_id: str
    version: int
    access_observed_at: datetime | None
    acl_tags: tuple[str, ...]
    required_tags: tuple[str, ...]
    has_letter: bool


@dataclass(frozen=True, slots=True)
class SweepRow:
    """The part of a document's row that the end of a sweep reads."""

    external_id: str
    is_published: bool
    is_unchanged: bool
    """Whether the row was not written since the sweep began."""
    acl_tags: Sequence[str] = ()


_COLUMNS: LiteralString = (
    "external_id, version, fingerprint, revision, acl_tags, required_tags, problem_code, problem_message,"
    " content_at, access_at, gone, in_doubt_since"
)
_READ: LiteralString = f"{_COLUMNS}, withdrawn_at IS NOT NULL, unlisted_since IS NOT NULL"
"""The columns that are read. A runner never writes ``withdrawn_at``, which belongs to the operator."""


class Rows:
    """The rows of one instance.

    Law: ``intend`` and ``save`` write all their rows and the cursor, or nothing, and only while the lease is held:
    neither commits after another runner has taken the instance over. Every method raises Retryable while Postgres is
    away; those that write raise LeaseLost.
    """

    def __init__(self, pool: Pool, holder: Holder) -> None:
        self._pool = pool
        self.holder = holder

    async def now(self) -> datetime:
        """Return the time by Postgres' clock, which orders sweeps and writes."""
        return (await self._all("SELECT clock_timestamp()"))[0][0]  # type: ignore[no-any-return]

    async def last_stamp(self) -> datetime | None:
        """Return the newest observed_at that may have been sent, or None."""
        rows = await self._all("SELECT observed_at FROM connector_sources WHERE tenant = %s AND source = %s", *self._me)
        return rows[0][0] if rows else None

    async def find(self, ids: Collection[str]) -> dict[str, Row]:
        """Return the rows of these documents, by external id."""
        with translated("connector_items"):
            async with self._pool.connection() as connection, connection.cursor(row_factory=args_row(_row)) as cursor:
                await cursor.execute(
                    f"SELECT {_READ} FROM connector_items WHERE tenant = %s AND source = %s AND external_id = ANY(%s)",  # noqa: S608 — constants of this module
                    [*self._me, list(ids)],
                )
                return {row.external_id: row async for row in cursor}

    async def intend(self, rows: Sequence[Row], stamp: datetime, events: Collection[Event] = ()) -> None:
        """Record that events for these rows are about to be handed to Kafka: their documents are in doubt until
        ``save``, and the events are remembered until both stores have them.

        stamp: the newest observed_at among the events. A version of Penstock that does not know ``in_doubt_since``
        reads such a row as published and to be published again. Raises Withdrawn, and records nothing, if an operator
        has withdrawn one of the documents whose content is to be sent: where this machine's clock is ahead of the
        operator's, the content would be newer than the delete.
        """
        recorded = {(document_id(*self._me, event.external_id), _KINDS[type(event)]): event for event in events}
        with translated("connector_items"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self.holder)
                await keep_stamp(connection, *self._me, stamp)
                cursor = await connection.execute(
                    """
                    INSERT INTO connector_items (tenant, source, scope, external_id, version, in_doubt_since)
                    SELECT %s, %s, '', given.external_id, given.version, %s
                    FROM unnest(%s::text[], %s::bigint[]) AS given (external_id, version)
                    ON CONFLICT (tenant, source, external_id) DO UPDATE SET
                        version = EXCLUDED.version, in_doubt_since = EXCLUDED.in_doubt_since, fingerprint = NULL,
                        gone = false
                    RETURNING external_id, withdrawn_at IS NOT NULL
                    """,
                    [*self._me, stamp, [row.external_id for row in rows], [row.version or 0 for row in rows]],
                )
                withdrawn = {name for name, is_withdrawn in await cursor.fetchall() if is_withdrawn}
                if any(isinstance(event, DocumentUpserted) and event.external_id in withdrawn for event in events):
                    raise Withdrawn
                await connection.execute(
                    "INSERT INTO connector_publications AS mine"
                    " (tenant, source, document_id, kind, observed_at, version)"
                    " SELECT %s, %s, given.* FROM unnest(%s::uuid[], %s::text[], %s::timestamptz[], %s::bigint[])"
                    " AS given (document_id, kind, observed_at, version)"
                    " ON CONFLICT (tenant, source, document_id, kind) DO UPDATE SET"
                    " observed_at = greatest(mine.observed_at, EXCLUDED.observed_at),"
                    " version = greatest(mine.version, EXCLUDED.version)",
                    [
                        *self._me,
                        [id_ for id_, _ in recorded],
                        [kind for _, kind in recorded],
                        [event.observed_at for event in recorded.values()],
                        [event.version if isinstance(event, DocumentUpserted) else None for event in recorded.values()],
                    ],
                )

    async def in_doubt(self, limit: int) -> list[str]:
        """Return documents of which an event may have been sent and was never confirmed.

        Documents that only the ledger knows are not among them: a sweep handles them, because it alone deletes.
        """
        rows = await self._all(
            "SELECT external_id FROM connector_items WHERE tenant = %s AND source = %s"
            " AND in_doubt_since IS NOT NULL AND swept_at > '-infinity' LIMIT %s",
            *self._me,
            limit,
        )
        return [row[0] for row in rows]

    async def save(
        self, rows: Iterable[Row], stamp: datetime, *, full: Cursor | None = None, changes: Cursor | None = None
    ) -> None:
        """Write rows, and the cursor that they lead up to. stamp: the newest observed_at among them. Documents that
        were marked as in doubt since then (`penstock recover`) stay in doubt."""
        with translated("connector_items"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self.holder)
                await connection.cursor().executemany(
                    f"""
                    INSERT INTO connector_items AS mine (tenant, source, scope, {_COLUMNS})
                    VALUES (%s, %s, '', %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
                    ON CONFLICT (tenant, source, external_id) DO UPDATE SET
                        version = CASE WHEN mine.in_doubt_since > %s THEN greatest(mine.version, EXCLUDED.version)
                            ELSE EXCLUDED.version END,
                        fingerprint = EXCLUDED.fingerprint, revision = EXCLUDED.revision,
                        acl_tags = EXCLUDED.acl_tags, required_tags = EXCLUDED.required_tags,
                        problem_code = EXCLUDED.problem_code, problem_message = EXCLUDED.problem_message,
                        content_at = EXCLUDED.content_at, access_at = EXCLUDED.access_at,
                        gone = CASE WHEN mine.in_doubt_since > %s THEN false ELSE EXCLUDED.gone END,
                        in_doubt_since = CASE WHEN mine.in_doubt_since > %s THEN mine.in_doubt_since
                            ELSE EXCLUDED.in_doubt_since END,
                        swept_at = EXCLUDED.swept_at, unlisted_since = NULL
                    """,  # noqa: S608 — constants of this module
                    [(*self._me, *_values(row), stamp, stamp, stamp) for row in rows],
                )
                await keep_stamp(connection, *self._me, stamp)
                if full is not None or changes is not None:
                    moved = await connection.execute(
                        "UPDATE connectors SET full_cursor = coalesce(%s, full_cursor),"
                        " changes_cursor = coalesce(%s, changes_cursor)"
                        " WHERE tenant = %s AND source = %s AND epoch = %s",
                        [_json(full), _json(changes), *self._me, self.holder.epoch],
                    )
                    if not moved.rowcount:
                        raise LeaseLost(f"connector {self.holder.source} is run by another process now")

    async def problems(self) -> dict[str, int]:
        """Count the documents that cannot be published as they are, by problem code."""
        rows = await self._all(
            "SELECT problem_code, count(*) FROM connector_items WHERE tenant = %s AND source = %s"
            " AND problem_code IS NOT NULL GROUP BY problem_code ORDER BY problem_code",
            *self._me,
        )
        return {code: int(n) for code, n in rows}

    async def sweep_page(self, since: datetime, after: str) -> list[SweepRow]:
        """Return the next rows for the end of a sweep that began at ``since``, by external id. Rows of documents whose
        delete was published, and that have no problem, are left out."""
        with translated("connector_items"):
            async with self._pool.connection() as connection, connection.cursor(row_factory=args_row(SweepRow)) as cur:
                await cur.execute(
                    "SELECT external_id, version IS NOT NULL AND NOT gone, swept_at < %s, acl_tags FROM connector_items"
                    " WHERE tenant = %s AND source = %s AND external_id > %s"
                    " AND (NOT gone OR version IS NULL OR problem_code IS NOT NULL) ORDER BY external_id LIMIT %s",
                    [since, *self._me, after, PAGE],
                )
                return await cur.fetchall()

    async def mark_unlisted(self, ids: Sequence[str], since: datetime) -> None:
        """Mark published documents that a sweep lacks and may not delete; ``since`` is when it began. They lose the
        mark when they are listed or read again; those that have it already are not written."""
        await self._write(
            "UPDATE connector_items SET unlisted_since = %s WHERE tenant = %s AND source = %s AND external_id = ANY(%s)"
            " AND swept_at < %s AND unlisted_since IS NULL",
            since,
            *self._me,
            list(ids),
            since,
        )

    async def forget_unpublished(self, ids: Sequence[str], since: datetime) -> None:
        """Delete the problems of documents that are gone, were never published, and were not written since then."""
        await self._write(
            "DELETE FROM connector_items WHERE tenant = %s AND source = %s AND external_id = ANY(%s)"
            " AND version IS NULL AND withdrawn_at IS NULL AND swept_at < %s",
            *self._me,
            list(ids),
            since,
        )
        await self._write(
            "UPDATE connector_items SET problem_code = NULL, problem_message = NULL"
            " WHERE tenant = %s AND source = %s AND external_id = ANY(%s) AND gone AND swept_at < %s",
            *self._me,
            list(ids),
            since,
        )

    # The ledger, as far as a connector may read it

    async def ledger(self, after: str, limit: int) -> list[tuple[UUID, LedgerDocument]]:
        """Return the next living documents of this source, by id. after: an id, or "" for the first page."""
        rows = await self._all(
            "SELECT id, external_id, version, access_observed_at, coalesce(acl_tags, '{}'),"
            " coalesce(required_tags, '{}'), has_letter FROM ledger_documents(%s, %s, %s, %s)",
            *self._me,
            UUID(after) if after else _BEFORE_ALL,
            limit,
        )
        return [
            (id_, LedgerDocument(name, version, at, tuple(acl), tuple(required), has_letter))
            for id_, name, version, at, acl, required, has_letter in rows
        ]

    async def ledger_letters(self, ids: Sequence[UUID]) -> dict[UUID, datetime]:
        """Return when the newest dead letter of each document arrived, for those that have one."""
        return dict(await self._all("SELECT id, at FROM ledger_letters(%s)", list(ids)))

    async def ledger_lacks(self, ids: Sequence[UUID]) -> list[UUID]:
        """Return the documents that are not alive in the ledger, and of which no event waits as a dead letter."""
        return [row[0] for row in await self._all("SELECT ledger_lacks(%s)", list(ids))]

    async def handled(self) -> dict[str, datetime]:
        """Return a time for each stage: everything that was sent before it has been handled."""
        return dict(await self._all("SELECT stage, until FROM handled"))

    async def page(self, after: str, limit: int) -> list[Row]:
        """Return the next rows in the order of their external ids."""
        with translated("connector_items"):
            async with self._pool.connection() as connection, connection.cursor(row_factory=args_row(_row)) as cursor:
                await cursor.execute(
                    f"SELECT {_READ} FROM connector_items WHERE tenant = %s AND source = %s AND external_id > %s"  # noqa: S608 — constants of this module
                    " ORDER BY external_id LIMIT %s",
                    [*self._me, after, limit],
                )
                return await cursor.fetchall()

    async def mark_in_doubt(self, differences: Mapping[str, tuple[int, str]], stamp: datetime) -> None:
        """Mark documents that differ from the ledger as in doubt. One that is in doubt already stays so since then, and
        is published above the ledger's version, too.

        differences: external id → (its version in the ledger, the kind of the difference). A document without a row
        gets one that counts as unlisted: the next sweep fetches it.
        """
        values = [(name, version, kind) for name, (version, kind) in differences.items()]
        with translated("connector_items"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self.holder)
                await keep_stamp(connection, *self._me, stamp)
                await connection.execute(
                    """
                    INSERT INTO connector_items AS mine
                        (tenant, source, scope, external_id, version, swept_at, in_doubt_since, difference,
                         difference_at)
                    SELECT %s, %s, '', given.external_id, given.version, '-infinity', %s, given.kind, clock_timestamp()
                    FROM unnest(%s::text[], %s::bigint[], %s::text[]) given (external_id, version, kind)
                    ON CONFLICT (tenant, source, external_id) DO UPDATE SET
                        version = greatest(mine.version, EXCLUDED.version), fingerprint = NULL, gone = false,
                        in_doubt_since = coalesce(mine.in_doubt_since, EXCLUDED.in_doubt_since),
                        difference = EXCLUDED.difference, difference_at = EXCLUDED.difference_at
                    """,
                    [*self._me, stamp, *(list(column) for column in zip(*values, strict=True))],
                )

    @property
    def _me(self) -> tuple[str, str]:
        return self.holder.tenant, self.holder.source

    async def _all(self, statement: LiteralString, *parameters: object) -> list[tuple[Any, ...]]:
        with translated("connector_items"):
            async with self._pool.connection() as connection:
                return await (await connection.execute(statement, parameters)).fetchall()

    async def _write(self, statement: LiteralString, *parameters: object) -> None:
        with translated("connector_items"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self.holder)
                await connection.execute(statement, parameters)


async def require_lease(connection: Connection, holder: Holder) -> None:
    """Raise LeaseLost if another runner has taken over. A takeover waits until the transaction has ended, so that this
    runner writes nothing after it."""
    cursor = await connection.execute(
        "SELECT 1 FROM connectors WHERE tenant = %s AND source = %s AND epoch = %s FOR NO KEY UPDATE",
        [holder.tenant, holder.source, holder.epoch],
    )
    if await cursor.fetchone() is None:
        raise LeaseLost(f"connector {holder.source} is run by another process now")


def _row(
    external_id: str,
    version: int | None,
    fingerprint: bytes | None,
    revision: str | None,
    acl_tags: Sequence[str],
    required_tags: Sequence[str],
    problem_code: str | None,
    problem_message: str | None,
    content_at: datetime | None,
    access_at: datetime | None,
    gone: bool,
    in_doubt_since: datetime | None,
    is_withdrawn: bool,
    is_unlisted: bool,
) -> Row:
    return Row(
        external_id=external_id,
        version=version,
        fingerprint=fingerprint,
        revision=revision,
        acl_tags=tuple(acl_tags),
        required_tags=tuple(required_tags),
        problem_code=problem_code,
        problem_message=problem_message,
        content_at=content_at,
        access_at=access_at,
        gone=gone,
        in_doubt_since=in_doubt_since,
        is_withdrawn=is_withdrawn,
        is_unlisted=is_unlisted,
    )


def _values(row: Row) -> tuple[object, ...]:
    return (
        row.external_id,
        row.version,
        row.fingerprint,
        row.revision,
        list(row.acl_tags),
        list(row.required_tags),
        row.problem_code,
        row.problem_message,
        row.content_at,
        row.access_at,
        row.gone,
        row.in_doubt_since,
    )


def _json(cursor: Cursor | None) -> Jsonb | None:
    return None if cursor is None else to_jsonb(dict(cursor))
