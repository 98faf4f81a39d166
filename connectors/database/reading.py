"""Ways to read the rows of a table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeVar

from connectors.database.options import DatabaseOptions
from connectors.database.sql import Table
from connectors.rows import Key, Row, external_id, key_of
from connectors.source import Cursor
from pipeline.core.errors import Misconfigured

T = TypeVar("T")
MAX_AHEAD = timedelta(days=1)
"""A time of change further in the future is no time to continue from."""


class Reading(Protocol):
    """Law: what is returned was read, or known to be unchanged, after it was requested. All methods raise Retryable and
    Misconfigured."""

    def pages(self, columns: Sequence[str], after: str | None, limit: int) -> AsyncIterator[Sequence[Row]]:
        """Yield all rows after an external id, in an order that changes do not disturb. Of several rows with one id, at
        least two are in one page, the last one."""
        ...

    async def rows(self, columns: Sequence[str], ids: Sequence[str], use: Callable[[Iterable[Row]], T]) -> T:
        """Return what ``use``, which is called in a thread, makes of the rows with these external ids: they are in
        memory one at a time."""
        ...

    async def start(self) -> Cursor | None:
        """Return the cursor of changes from now on; None if changes are not known."""
        ...

    def changes(self, cursor: Cursor, limit: int) -> AsyncIterator[tuple[Sequence[str], Cursor]]:
        """Yield the ids of rows that changed since a cursor, and the cursor after them. Raises CursorExpired."""
        ...

    async def close(self) -> None: ...


class SqlReading:
    """Reads by SQL. Changes are known by a column of times."""

    def __init__(self, options: DatabaseOptions, table: Table, blocking: Callable[..., Awaitable[Any]]) -> None:
        """blocking: calls a function in a thread."""
        self._options = options
        self._table = table
        self._blocking = blocking
        self._key_types: tuple[type, ...] | None = None

    async def close(self) -> None:
        self._table.close()

    async def pages(self, columns: Sequence[str], after: str | None, limit: int) -> AsyncIterator[Sequence[Row]]:
        key = None if after is None else await self._key(after)
        has_more, requested = True, limit
        while has_more:
            rows, has_more = await self._blocking(self._table.page, columns, key, requested)
            page, following = (rows[:-1], rows[-1:]) if has_more else (rows, [])
            if not page:
                return
            # Rows that are requested and left out cost as much: MySQL sends them, and others sort them for each page.
            requested = min(limit, max(2, 2 * len(page)))
            key = self._key_of_row(page[-1])
            last = external_id(key)
            yield [*page, *(row for row in following if external_id(self._key_of_row(row)) == last)]

    async def rows(self, columns: Sequence[str], ids: Sequence[str], use: Callable[[Iterable[Row]], T]) -> T:
        keys = [key for id_ in ids if (key := await self._key(id_)) is not None]
        used: T = await self._blocking(self._table.with_keys, columns, keys, use)
        return used

    async def start(self) -> Cursor | None:
        if self._options.changed is None:
            return None
        newest = await self._blocking(self._table.newest_change)
        return {"since": None if newest is None else _no_later_than_now(self._moment(newest)).isoformat()}

    async def changes(self, cursor: Cursor, limit: int) -> AsyncIterator[tuple[Sequence[str], Cursor]]:
        since = datetime.fromisoformat(cursor["since"]) if cursor["since"] else None
        start = since - timedelta(seconds=self._options.overlap_seconds) if since else None
        after: Key | None = None
        while rows := await self._blocking(self._table.changed_page, self._options.id, start, after, limit):
            moment = self._moment(rows[-1][str(self._options.changed)])
            after = (moment, *self._key_of_row(rows[-1]))
            reached = _no_later_than_now(moment)
            since = reached if since is None else max(since, reached)
            yield [*dict.fromkeys(external_id(self._key_of_row(row)) for row in rows)], {"since": since.isoformat()}

    async def memberships(self) -> Sequence[tuple[Any, Any]]:
        """Return the rows of ``members_query``: tag and principal."""
        rows: Sequence[tuple[Any, Any]] = await self._blocking(self._table.memberships)
        return rows

    def _key_of_row(self, row: Row) -> Key:
        return tuple(row[column] for column in self._options.id)

    async def _key(self, id_: str) -> Key | None:
        """Return the key of an external id, or None if no such row can exist."""
        if self._key_types is None:
            rows, _ = await self._blocking(self._table.page, self._options.id, None, 1)
            if not rows:
                return None
            key = self._key_of_row(rows[0])
            external_id(key)  # raises for other types
            self._key_types = tuple(map(type, key))
        return key_of(id_, self._key_types)

    def _moment(self, value: object) -> datetime:
        if not isinstance(value, datetime):
            raise Misconfigured(f"changed: the column {self._options.changed} has to hold times with date and hour")
        return value


def _no_later_than_now(moment: datetime) -> datetime:
    latest = datetime.now(UTC) + MAX_AHEAD
    return min(moment, latest if moment.tzinfo else latest.replace(tzinfo=None))
