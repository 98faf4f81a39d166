"""The published documents of folders, in Postgres: one row of ``connector_items`` for each document."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import args_row
from psycopg.types.json import Jsonb

from connectors.runner.compare import Row
from connectors.runner.rows import keep_stamp
from pipeline.stores.postgres import Pool, translated

Stat = dict[str, int]
PAGE = 1_000
"""Rows read at once."""


@dataclass(frozen=True, slots=True)
class Item:
    """The row of a file, and how the file looked when it was read; ``stat`` None: read it again."""

    row: Row
    stat: Stat | None = None


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A document whose row was last written before a given moment."""

    row: Row
    scope: str


@dataclass(frozen=True, slots=True)
class Intent:
    """An event that is about to be sent."""

    external_id: str
    version: int | None
    """None for an access change, which carries no version."""
    observed_at: datetime


_COLUMNS = (
    "external_id, version, fingerprint, stat, acl_tags, required_tags, problem_code, problem_message, in_doubt_since"
)


class Checkpoint:
    """Law: after ``save`` returns, a restart knows it. Every method raises Retryable while Postgres is away."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def now(self) -> datetime:
        """Return the time of Postgres's clock, which identifies a sweep."""
        row = await self._one("SELECT clock_timestamp()")
        assert isinstance(row, datetime)
        return row

    async def observed_at(self, tenant: str, source: str) -> datetime | None:
        """Return the newest observed_at that may have been published."""
        stamp = await self._one(
            "SELECT observed_at FROM connector_sources WHERE tenant = %s AND source = %s", tenant, source
        )
        return stamp if isinstance(stamp, datetime) else None

    async def listed(self, tenant: str, source: str, scope: str, ids: Collection[str]) -> dict[str, Item]:
        """Return the rows of documents that a sweep of the scope has listed, by external id. The scope answers for them
        from now on, unless an outer scope does; rows of which that is so already are not written."""
        with translated("checkpoint"):
            async with self.pool.connection() as connection, connection.cursor(row_factory=args_row(_item)) as cursor:
                await cursor.execute(
                    f"""
                    WITH taken_over AS (
                        UPDATE connector_items SET scope = %(scope)s
                        WHERE tenant = %(tenant)s AND source = %(source)s AND external_id = ANY(%(ids)s)
                            AND scope <> %(scope)s AND (scope = '' OR NOT starts_with(%(scope)s, scope || '/'))
                    )
                    SELECT {_COLUMNS}, gone, withdrawn_at IS NOT NULL AS is_withdrawn FROM connector_items
                    WHERE tenant = %(tenant)s AND source = %(source)s AND external_id = ANY(%(ids)s)
                    """.encode(),  # noqa: S608 — constants of this module
                    {"scope": scope, "tenant": tenant, "source": source, "ids": list(ids)},
                )
                return {item.row.external_id: item async for item in cursor}

    async def intend(self, tenant: str, source: str, scope: str, intents: Sequence[Intent]) -> set[str]:
        """Mark the documents as in doubt before their events are sent: the next scan publishes them again, until
        ``save`` or ``remove`` confirms them. Their stamps are stored for the clock of the next process. Returns the
        documents that an operator has withdrawn: the next scan deletes those that are in doubt."""
        newest: dict[str, Intent] = {}
        for intent in intents:
            known = newest.get(intent.external_id)
            versions = [i.version for i in (known, intent) if i is not None and i.version is not None]
            stamp = max(i.observed_at for i in (known, intent) if i is not None)
            newest[intent.external_id] = Intent(intent.external_id, max(versions, default=None), stamp)
        with translated("checkpoint"):
            async with self.pool.connection() as connection:
                cursor = await connection.execute(
                    """
                    INSERT INTO connector_items AS mine (tenant, source, scope, external_id, version, in_doubt_since)
                    SELECT %s, %s, %s, * FROM unnest(%s::text[], %s::bigint[], %s::timestamptz[])
                    ON CONFLICT (tenant, source, external_id) DO UPDATE SET
                        version = greatest(mine.version, EXCLUDED.version), fingerprint = NULL, stat = NULL,
                        gone = false, in_doubt_since = greatest(mine.in_doubt_since, EXCLUDED.in_doubt_since)
                    RETURNING external_id, withdrawn_at IS NOT NULL
                    """,
                    [
                        tenant,
                        source,
                        scope,
                        [intent.external_id for intent in newest.values()],
                        [intent.version for intent in newest.values()],
                        [intent.observed_at for intent in newest.values()],
                    ],
                )
                withdrawn = {name for name, is_withdrawn in await cursor.fetchall() if is_withdrawn}
                await keep_stamp(connection, tenant, source, max(intent.observed_at for intent in newest.values()))
        return withdrawn

    async def save(self, tenant: str, source: str, scope: str, items: Sequence[tuple[Item, datetime | None]]) -> None:
        """Write rows, each with the stamp of its event; None if nothing had to be published.

        A row that another process has put in doubt later, or written with a newer version, stays as it is."""
        with translated("checkpoint"):
            async with self.pool.connection() as connection, connection.cursor() as cursor:
                await cursor.executemany(
                    f"""
                    INSERT INTO connector_items AS mine (tenant, source, scope, {_COLUMNS})
                    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, NULL)
                    ON CONFLICT (tenant, source, external_id) DO UPDATE SET
                        version = EXCLUDED.version, fingerprint = EXCLUDED.fingerprint, stat = EXCLUDED.stat,
                        acl_tags = EXCLUDED.acl_tags, required_tags = EXCLUDED.required_tags,
                        problem_code = EXCLUDED.problem_code, problem_message = EXCLUDED.problem_message,
                        swept_at = EXCLUDED.swept_at, in_doubt_since = NULL
                    WHERE (mine.version IS NULL OR mine.version <= EXCLUDED.version)
                        AND (mine.in_doubt_since IS NULL OR mine.in_doubt_since <= %s)
                    """.encode(),  # noqa: S608 — constants of this module
                    [
                        (
                            tenant,
                            source,
                            scope,
                            item.row.external_id,
                            item.row.version,
                            item.row.fingerprint,
                            None if item.stat is None else Jsonb(item.stat),
                            list(item.row.acl_tags),
                            list(item.row.required_tags),
                            item.row.problem_code,
                            item.row.problem_message,
                            observed_at,
                        )
                        for item, observed_at in items
                    ],
                )

    async def remove(self, tenant: str, source: str, deleted: Sequence[tuple[str, datetime]]) -> None:
        """Remove the rows of documents whose deletes are confirmed, unless they are in doubt since a later stamp. The
        row of a withdrawn document stays, or its file would be published again."""
        confirmed = (
            "tenant = %s AND source = %s AND external_id = %s AND (in_doubt_since IS NULL OR in_doubt_since <= %s)"
        )
        with translated("checkpoint"):
            async with self.pool.connection() as connection, connection.cursor() as cursor:
                keys = [(tenant, source, external_id, observed_at) for external_id, observed_at in deleted]
                await cursor.executemany(
                    f"DELETE FROM connector_items WHERE withdrawn_at IS NULL AND {confirmed}".encode(),  # noqa: S608 — literals of this function
                    keys,
                )
                await cursor.executemany(
                    "UPDATE connector_items SET gone = true, in_doubt_since = NULL, content_at = %s"  # noqa: S608 — literals of this function
                    f" WHERE withdrawn_at IS NOT NULL AND {confirmed}".encode(),
                    [(key[-1], *key) for key in keys],
                )

    async def forget(self, tenant: str, source: str, ids: Sequence[str]) -> None:
        """Have these published again by the next sweep, under versions that go on growing."""
        await self._do(
            "UPDATE connector_items SET fingerprint = NULL, stat = NULL"
            " WHERE tenant = %s AND source = %s AND external_id = ANY(%s)",
            tenant,
            source,
            list(ids),
        )

    async def count(self, tenant: str, source: str, root: str) -> int:
        """Return the number of published documents at or under a root."""
        count = await self._one(
            "SELECT count(*) FROM connector_items WHERE tenant = %s AND source = %s AND version IS NOT NULL"
            " AND (NOT gone OR in_doubt_since IS NOT NULL)"
            " AND (external_id = %s OR external_id >= %s AND external_id < %s)",
            tenant,
            source,
            *_range(root),
        )
        assert isinstance(count, int)
        return count

    async def unwritten(
        self, tenant: str, source: str, root: str, since: datetime
    ) -> AsyncIterator[Sequence[Unwritten]]:
        """Yield rows at or under a root that have not been written since then, page by page, by external id, without
        rows of documents whose delete was published."""
        last = ""
        while True:
            with translated("checkpoint"):
                async with (
                    self.pool.connection() as connection,
                    connection.cursor(row_factory=args_row(_unwritten)) as cursor,
                ):
                    await cursor.execute(
                        "SELECT external_id, scope, version, gone, in_doubt_since, withdrawn_at IS NOT NULL"
                        " FROM connector_items WHERE tenant = %s AND source = %s"
                        " AND (NOT gone OR in_doubt_since IS NOT NULL)"
                        " AND (external_id = %s OR external_id >= %s AND external_id < %s) AND swept_at < %s"
                        " AND external_id > %s ORDER BY external_id LIMIT %s",
                        [tenant, source, *_range(root), since, last, PAGE],
                    )
                    page = await cursor.fetchall()
            yield page
            if len(page) < PAGE:
                return
            last = page[-1].row.external_id

    async def _one(self, statement: str, *parameters: object) -> object:
        with translated("checkpoint"):
            async with self.pool.connection() as connection:
                row = await (await connection.execute(statement.encode(), parameters)).fetchone()
                return row[0] if row else None

    async def _do(self, statement: str, *parameters: object) -> None:
        with translated("checkpoint"):
            async with self.pool.connection() as connection:
                await connection.execute(statement.encode(), parameters)


def _range(root: str) -> tuple[str, str, str]:
    """Return (the root, first, last) of all external ids at or under a root: "0" follows "/" in the C collation."""
    folder = root.rstrip("/")
    return root, f"{folder}/", f"{folder}0"


def _item(
    external_id: str,
    version: int | None,
    fingerprint: bytes | None,
    stat: Stat | None,
    acl_tags: Sequence[str] | None,
    required_tags: Sequence[str] | None,
    problem_code: str | None,
    problem_message: str | None,
    in_doubt_since: datetime | None,
    gone: bool,
    is_withdrawn: bool,
) -> Item:
    row = Row(
        external_id=external_id,
        version=version,
        fingerprint=fingerprint,
        acl_tags=tuple(acl_tags or ()),
        required_tags=tuple(required_tags or ()),
        problem_code=problem_code,
        problem_message=problem_message,
        in_doubt_since=in_doubt_since,
        gone=gone,
        is_withdrawn=is_withdrawn,
    )
    return Item(row, stat)


def _unwritten(
    external_id: str,
    scope: str,
    version: int | None,
    gone: bool,
    in_doubt_since: datetime | None,
    is_withdrawn: bool,
) -> Unwritten:
    row = Row(
        external_id=external_id, version=version, gone=gone, in_doubt_since=in_doubt_since, is_withdrawn=is_withdrawn
    )
    return Unwritten(row, scope)
