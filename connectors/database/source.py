"""Tables of databases as a source. A document is a row; its external id is the row's key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TYPE_CHECKING

from connectors.base import SmallSource
from connectors.database.options import DatabaseOptions
from connectors.database.topic import TopicTable
from connectors.portions import pages_of
from connectors.rows import Template
from connectors.source import Context, Cursor, Entry, Gone, Group, Listed, Page, Playground, Unlisted
from pipeline.core.errors import Misconfigured

if TYPE_CHECKING:
    from connectors.database.reading import Reading, SqlReading

PAGE_LISTED = 1_000
PAGE_LISTED_WITH_TEXTS = 200
"""The rows in one page of a listing."""


class Database(SmallSource):
    """A ``connectors.source.Source``."""

    Options = DatabaseOptions
    options: DatabaseOptions

    def __init__(self, options: DatabaseOptions, context: Context) -> None:
        super().__init__(options, context)
        self._template = Template(options, options.id, revision=options.revision)
        self._sql = None if options.dsn is None else self._sql_reading()
        self._reading: Reading = self._sql or TopicTable(options, context.folder, context.set_aside)

    def _sql_reading(self) -> SqlReading:
        try:
            from connectors.database.reading import SqlReading
            from connectors.database.sql import Table
        except ImportError as error:
            raise Misconfigured("dsn needs SQLAlchemy: pip install 'penstock[database]'") from error
        return SqlReading(self.options, Table(self.options, self.reads_at_once), self.blocking)

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        from connectors.database.playground import playing

        return playing()

    async def close(self) -> None:
        await super().close()
        await self._reading.close()

    async def list(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        limit = PAGE_LISTED if self.options.revision else PAGE_LISTED_WITH_TEXTS
        async for rows in self._reading.pages(self._template.listed_columns, None, limit):
            yield self._template.listed(rows)

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        after = cursor["after"] if cursor else None
        async for rows in self._reading.pages(self._template.columns, after, self.page_documents):
            entries = [entry for entry in self._template.entries(rows).values() if not isinstance(entry, Gone)]
            yield Page(entries, {"after": self._template.external_id(rows[-1])})

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        entries = await self._reading.rows(self._template.columns, external_ids, self._template.entries)
        return [entries.get(id_, Gone(id_)) for id_ in external_ids]

    async def start(self) -> Cursor | None:
        return await self._reading.start()

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        async for ids, following in self._reading.changes(cursor, self.page_documents):
            async with aclosing(pages_of(ids, self.fetch, following)) as pages:
                async for page in pages:
                    yield page

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        if self._sql is None or self.options.members_query is None:
            async for group in super().groups(tags):
                yield group
            return
        members: dict[str, set[str]] = {}
        for tag, principal in await self._sql.memberships():
            if tag is not None and principal is not None:
                name = str(principal).strip()
                members.setdefault(str(tag), set()).add(name.lower() if "@" in name else name)
        for tag, names in sorted(members.items()):
            if tags is None or tag in tags:
                yield Group(tag, sorted(names))
