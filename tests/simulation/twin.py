"""Each statement and each bulk on the real server and on the model of it, and their results compared.

The product's stages run on this as on any pool. A statement that does something else than its model fails here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import numpy as np
from elasticsearch import AsyncElasticsearch
from psycopg.rows import dict_row

from pipeline.stores.postgres import Pool
from tests.simulation import database
from tests.simulation.database import Database, Nobody, text_of
from tests.simulation.keyword_store import Index, operations_of
from tests.simulation.statements import find

STORY_BEGINS = datetime(2020, 1, 1, tzinfo=UTC)
"""Events are of that time; whatever is much later was stamped by a server, and is not compared."""
COUNTED = ("UPDATE chunks_g1", "UPDATE connector", "WITH held", "WITH stamped", "INSERT INTO connector_items")
"""Statements whose number of rows decides something."""


class TwinPool:
    """Stands where the product's pool stands."""

    def __init__(self, real: Pool, model: Database, between: Callable[[], Awaitable[None]]) -> None:
        self._real = real
        self._model = model
        self._between = between
        self.compared: Counter[str] = Counter()
        """By the beginning of the statement's text."""

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[TwinConnection]:
        await self._between()  # outside of every transaction, something newer may be accepted
        mine = database.Pool(self._model, Nobody(), find)
        async with self._real.connection() as real, mine.connection() as model:
            yield TwinConnection(real, model, self.compared)


class TwinConnection:
    """Two connections as one."""

    def __init__(self, real: Any, model: database.Connection, compared: Counter[str]) -> None:
        self._real = real
        self._model = model
        self._compared = compared

    async def execute(self, statement: Any, parameters: Any = None) -> TwinCursor:
        return await self.cursor().execute(statement, parameters)

    def cursor(self, *, row_factory: Any = None) -> TwinCursor:
        return TwinCursor(self._real.cursor(), self._model, self._compared, row_factory)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        async with self._real.transaction():
            await _follow_the_server(self._real.cursor(), self._model)
            async with self._model.transaction():
                yield

    @asynccontextmanager
    async def pipeline(self) -> AsyncIterator[None]:
        yield  # one after another: there is nothing to compare before a statement has ended

    async def commit(self) -> None:
        await self._real.commit()
        await self._model.commit()


class TwinSession:
    """Two connections that commit each statement and keep their session's locks."""

    def __init__(self, real: Any, pool: TwinPool) -> None:
        self._real = real
        self._model = database.Pool(pool._model, Nobody(), find).session()
        self._compared = pool.compared

    async def execute(self, statement: Any, parameters: Any = None) -> TwinCursor:
        return await TwinCursor(self._real.cursor(), self._model, self._compared, None).execute(statement, parameters)

    async def close(self) -> None:
        await self._real.close()
        await self._model.close()


async def _follow_the_server(cursor: Any, model: database.Connection | database.Session) -> None:
    """Set the model's clock to the server's ``now()`` of this transaction: what is due in one must be due in both."""
    await cursor.execute("SELECT now()")
    (now,) = await cursor.fetchone()
    model._database.now = lambda: now


class TwinCursor:
    """The real rows, after the model's were found to be the same."""

    def __init__(
        self, real: Any, model: database.Connection | database.Session, compared: Counter[str], row_factory: Any
    ) -> None:
        self._real = real
        self._model = model
        self._compared = compared
        self._make = database.maker_of(row_factory)
        self._maps = row_factory is dict_row
        self._names: list[str] = []
        self._rows: list[Any] = []
        self._results: list[list[Any]] = []
        self.rowcount = 0

    async def __aenter__(self) -> TwinCursor:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def execute(self, statement: Any, parameters: Any = None) -> TwinCursor:
        await _follow_the_server(self._real, self._model)
        await self._real.execute(statement, parameters)
        self._rows = await self._real.fetchall() if self._real.description else []
        self._names = [column.name for column in self._real.description or ()]
        self.rowcount = self._real.rowcount
        rows, count = await self._model.run(statement, [parameters])
        self._compare(text_of(statement), rows, count)
        return self

    async def executemany(self, statement: Any, parameters: Iterable[Any], *, returning: bool = False) -> None:
        several = list(parameters)
        await _follow_the_server(self._real, self._model)
        if returning:
            model = database.Cursor(self._model)
            await self._real.executemany(statement, several, returning=True)
            await model.executemany(statement, several, returning=True)
            more = bool(several)
            while more:
                self._results.append(await self._real.fetchall())
                self._compare_rows(text_of(statement), self._results[-1], await model.fetchall())
                more = bool(self._real.nextset()) and bool(model.nextset())
            self.nextset()
            return
        await self._real.executemany(statement, several)
        self.rowcount = self._real.rowcount
        _, count = await self._model.run(statement, several)
        self._compare(text_of(statement), [], count)

    def nextset(self) -> bool | None:
        if not self._results:
            return None
        self._rows = self._results.pop(0)
        return True

    def _compare_rows(self, text: str, real: Sequence[Any], rows: Sequence[Any]) -> str:
        flat = " ".join(text.split())
        self._compared[flat[:60]] += 1
        model = [self._ordered(row) if isinstance(row, dict) else row for row in rows]
        assert _plain(real) == _plain(model), f"the model differs: {flat}\n{_plain(real)}\n{_plain(model)}"
        return flat

    def _ordered(self, row: dict[str, Any]) -> tuple[Any, ...]:
        """The model's row in the order of the server's columns, where those have names to go by."""
        by_name = set(self._names) == set(row)
        return tuple(row[name] for name in self._names) if by_name else tuple(row.values())

    def _compare(self, text: str, rows: Sequence[Any], count: int) -> None:
        flat = self._compare_rows(text, self._rows, rows)
        if flat.startswith(COUNTED):
            assert self.rowcount == count, f"the model changes {count} rows instead of {self.rowcount}: {flat}"

    async def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return [self._made(row) for row in rows]

    async def fetchone(self) -> Any | None:
        return self._made(self._rows.pop(0)) if self._rows else None

    async def __aiter__(self) -> AsyncIterator[Any]:
        for row in await self.fetchall():
            yield row

    def _made(self, row: Any) -> Any:
        if self._maps:
            return dict(zip(self._names, row, strict=True))
        return row if self._make is None else self._make(*row)


def _plain(rows: Sequence[Any]) -> list[str]:
    """Rows as texts that are equal where the product cannot tell the rows apart: in no order, and sets as sets."""
    return sorted(repr(_value(row)) for row in rows)


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        return "stamped by a server" if value > STORY_BEGINS + timedelta(days=365) else value.astimezone(UTC)
    if isinstance(value, bytes | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return sorted((key, _value(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        if value and all(isinstance(inner, UUID) for inner in value):
            return sorted(value)  # claimed ids are a set: UNION returns them in any order
        return [_value(inner) for inner in value]
    return value


class TwinElasticsearch:
    """Stands where the product's client stands: each bulk on the real server and on the model."""

    def __init__(self, real: AsyncElasticsearch, model: Index, now: Callable[[], float]) -> None:
        self._real = real
        self._model = model
        self._now = now
        self.indices = real.indices
        self.operations = 0

    async def bulk(self, *, operations: Sequence[bytes], **options: Any) -> Any:
        answer = await self._real.bulk(operations=operations, **options)
        expected = [self._model.apply(*operation, self._now()) for operation in operations_of(operations)]
        for item, model in zip(answer["items"], expected, strict=True):
            self.operations += 1
            (real,) = item.values()
            assert real["status"] == model["status"], f"the model answers {model} instead of {real}"
            assert real.get("result") == model.get("result"), f"the model answers {model} instead of {real}"
        return answer
