"""Tables of databases as a source. A document is a row; its external id is the row's key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from connectors.base import SmallSource
from connectors.database.options import DatabaseOptions
from connectors.database.rows import Key, Row, Template, key_of
from connectors.protocol import Problem
from connectors.source import Context, Cursor, Entry, Gone, Group, Listed, Page, Playground, Unlisted
from pipeline.core.errors import Misconfigured

if TYPE_CHECKING:
    from connectors.database.sql import Table

PAGE_LISTED = 1_000
PAGE_LISTED_WITH_TEXTS = 200
"""The rows in one page of a listing."""
MAX_AHEAD = timedelta(days=1)
"""A time of change further in the future is no time to continue from."""


class Database(SmallSource):
    """A ``connectors.source.Source``."""

    Options = DatabaseOptions
    options: DatabaseOptions

    def __init__(self, options: DatabaseOptions, context: Context) -> None:
        super().__init__(options, context)
        self._template = Template(options)
        self._table = _table(options, self.reads_at_once)
        self._key_types: tuple[type, ...] | None = None

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        from connectors.database.playground import playing

        return playing()

    async def close(self) -> None:
        await super().close()
        self._table.close()

    async def check(self) -> Sequence[Problem]:
        problems = [*await super().check()]
        if not self.options.acl and not self.options.acl_tags:
            problems.append(self._problem("nobody", "nobody may read a row: write acl or acl_tags"))
        return problems

    async def list(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        limit = PAGE_LISTED if self.options.revision else PAGE_LISTED_WITH_TEXTS
        async for rows in self._pages(self._template.listed_columns, None, limit):
            yield self._template.listed(rows)

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        after = await self._key(cursor["after"]) if cursor else None
        async for rows in self._pages(self._template.columns, after, self.page_documents):
            entries = [entry for entry in self._template.entries(rows).values() if not isinstance(entry, Gone)]
            yield Page(entries, {"after": self._template.external_id(rows[-1])})

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        keys = [key for id_ in external_ids if (key := await self._key(id_)) is not None]
        rows = await self.blocking(self._table.with_keys, self._template.columns, keys)
        entries = self._template.entries(rows)
        return [entries.get(id_, Gone(id_)) for id_ in external_ids]

    async def start(self) -> Cursor | None:
        if self.options.changed is None:
            return None
        newest = await self.blocking(self._table.newest_change)
        return {"since": None if newest is None else _no_later_than_now(self._moment(newest)).isoformat()}

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        since = datetime.fromisoformat(cursor["since"]) if cursor["since"] else None
        start = since - timedelta(seconds=self.options.overlap_seconds) if since else None
        after: Key | None = None
        while rows := await self.blocking(self._table.changed_page, self.options.id, start, after, self.page_documents):
            moment = self._moment(rows[-1][str(self.options.changed)])
            after = (moment, *self._template.key(rows[-1]))
            reached = _no_later_than_now(moment)
            since = reached if since is None else max(since, reached)
            ids = dict.fromkeys(map(self._template.external_id, rows))
            yield Page(await self.fetch([*ids]), {"since": since.isoformat()})

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        if self.options.members_query is None:
            async for group in super().groups(tags):
                yield group
            return
        members: dict[str, set[str]] = {}
        for tag, principal in await self.blocking(self._table.memberships):
            if tag is not None and principal is not None:
                name = str(principal).strip()
                members.setdefault(str(tag), set()).add(name.lower() if "@" in name else name)
        for tag, names in sorted(members.items()):
            if tags is None or tag in tags:
                yield Group(tag, sorted(names))

    async def _pages(self, columns: Sequence[str], after: Key | None, limit: int) -> AsyncIterator[Sequence[Row]]:
        """Yield all rows after a key, by key. All rows with one key are in one page, up to two of them."""
        while rows := await self.blocking(self._table.page, columns, after, limit + 1):
            last, key = self._template.external_id(rows[:limit][-1]), self._template.key(rows[:limit][-1])
            yield [*rows[:limit], *(row for row in rows[limit:] if self._template.external_id(row) == last)]
            if len(rows) <= limit:
                return
            after = key

    async def _key(self, external_id: str) -> Key | None:
        """Return the key of an external id, or None if no such row can exist."""
        if self._key_types is None:
            rows = await self.blocking(self._table.page, self.options.id, None, 1)
            if not rows:
                return None
            self._template.external_id(rows[0])  # raises for other types
            self._key_types = tuple(map(type, self._template.key(rows[0])))
        return key_of(external_id, self._key_types)

    def _moment(self, value: object) -> datetime:
        if not isinstance(value, datetime):
            raise Misconfigured(f"changed: the column {self.options.changed} has to hold times with date and hour")
        return value


def _table(options: DatabaseOptions, connections: int) -> Table:
    try:
        from connectors.database.sql import Table
    except ImportError as error:
        raise Misconfigured("the kind database needs SQLAlchemy: pip install 'penstock[database]'") from error
    return Table(options, connections)


def _no_later_than_now(moment: datetime) -> datetime:
    latest = datetime.now(UTC) + MAX_AHEAD
    return min(moment, latest if moment.tzinfo else latest.replace(tzinfo=None))
