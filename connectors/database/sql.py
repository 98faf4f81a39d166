"""Reads the rows of a table, or of a query, by SQL: each page in a short transaction of its own that writes nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

from connectors.database.options import DatabaseOptions
from connectors.rows import PAGE_BYTES, TOO_LARGE, Key, NoValue, Row, bounded, size_of
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.retry import classify_sqlstate
from pipeline.stores.postgres import refused
from topics.messages import MAX_CONTENT_BYTES

T = TypeVar("T")

CONNECT_SECONDS = 10
POOL_RECYCLE_SECONDS = 1_800
"""Firewalls forget connections that rest for longer."""
KEEPALIVE: dict[str, Any] = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "application_name": "penstock",
    "prepare_threshold": None,  # a pooler may give each transaction another session
}
"""Arguments of psycopg. A server that is gone without a word is noticed after a minute."""
TIMES = ("date", "time", "timetz", "timestamp", "timestamptz", "interval")
"""Types of Postgres with values that Python's do not have."""
FIRST_TIME, LAST_TIME = "0001-01-03", "9999-12-29"
"""The calendar of Python in any time zone, as literals that Postgres reads as the column's type."""


class Table:
    """The rows that the options name. All methods block, and raise Retryable while the database cannot respond and
    Misconfigured where only an operator can help. Messages never quote values of rows."""

    def __init__(self, options: DatabaseOptions, connections: int) -> None:
        """connections: the most at once."""
        assert options.dsn is not None
        self._options = options
        self._engine = _engine(options.dsn.get_secret_value(), connections)
        self._dialect = self._engine.dialect.name

    def close(self) -> None:
        self._engine.dispose()

    def page(self, columns: Sequence[str], after: Key | None, limit: int) -> tuple[list[Row], bool]:
        """Return the first rows whose key is greater, by key, and whether the last of them was read only to compare
        its key: there may be more of them. Rows without a key are left out. The page ends early, and has at least two
        rows, where they are large."""
        source = self._source(columns)
        keys = [source.c[name] for name in self._options.id]
        statement = sa.select(source).where(*(key.is_not(None) for key in keys)).order_by(*keys).limit(limit + 1)
        if after is not None:
            statement = statement.where(_greater(keys, after))
        rows, is_cut = self._read(statement, PAGE_BYTES)
        return rows, is_cut or len(rows) > limit

    def with_keys(self, columns: Sequence[str], keys: Sequence[Key], use: Callable[[Iterable[Row]], T]) -> T:
        """Return what ``use`` makes of the rows with these keys, which arrive in any order."""
        if not keys:
            return use(())
        source = self._source(columns)
        names = self._options.id
        same = [
            sa.and_(*(source.c[name] == _value(value) for name, value in zip(names, key, strict=True))) for key in keys
        ]
        with self._every(sa.select(source).where(sa.or_(*same))) as rows:
            return use(rows)

    def changed_page(self, columns: Sequence[str], since: datetime | None, after: Key | None, limit: int) -> list[Row]:
        """Return the first rows that changed after ``since``, by that time and key. after: the last row's time and key
        of the page before."""
        assert self._options.changed is not None
        source = self._source([*columns, self._options.changed])
        changed, keys = source.c[self._options.changed], [source.c[name] for name in self._options.id]
        statement = sa.select(source).where(*(key.is_not(None) for key in keys), *self._is_time(changed))
        if after is not None:
            statement = statement.where(_greater([changed, *keys], after))
        elif since is not None:
            statement = statement.where(changed > _value(since))
        return self._rows(statement.order_by(changed, *keys).limit(limit))

    def newest_change(self) -> Any:
        """Return the latest value of the column ``changed``, or None."""
        assert self._options.changed is not None
        changed = self._source([self._options.changed]).c[self._options.changed]
        statement = sa.select(sa.func.max(changed).label("newest"))
        newest = self._rows(statement)[0]["newest"]
        if isinstance(newest, NoValue):
            newest = self._rows(statement.where(*self._is_time(changed)))[0]["newest"]
        return newest

    def memberships(self) -> list[tuple[Any, Any]]:
        """Return the rows of ``members_query``: tag and principal."""
        assert self._options.members_query is not None
        source = _subquery(self._options.members_query, ["tag", "principal"])
        return [(row["tag"], row["principal"]) for row in self._rows(sa.select(source))]

    def _is_time(self, changed: sa.ColumnElement[Any]) -> list[sa.ColumnElement[bool]]:
        """Return the conditions under which a time of change can be continued from. Rows with another one are left to
        listings."""
        if self._dialect != "postgresql":
            return [changed.is_not(None)]
        return [changed >= _value(FIRST_TIME), changed <= _value(LAST_TIME)]

    def _source(self, columns: Sequence[str]) -> sa.FromClause:
        names = list(dict.fromkeys(columns))
        if self._options.query is not None:
            return _subquery(self._options.query, names)
        schema, _, table = str(self._options.table).rpartition(".")
        return sa.table(table, *map(sa.column, names), schema=schema or None)

    def _rows(self, statement: sa.Select[Any]) -> list[Row]:
        return self._read(statement)[0]

    def _read(self, statement: sa.Select[Any], most_bytes: float = math.inf) -> tuple[list[Row], bool]:
        """Return rows, and whether some are left out: those after the first one that follows so many bytes."""
        rows: list[Row] = []
        size = 0
        with self._every(statement) as every:
            for row in every:
                rows.append(row)
                if size > most_bytes:
                    return rows, True
                size += size_of(rows[-1])
        return rows, False

    @contextmanager
    def _every(self, statement: sa.Select[Any]) -> Iterator[Iterator[Row]]:
        with self._connection() as connection, closing(self._one_by_one(connection, statement)) as rows:
            yield (bounded(row, self._options.id) for row in rows)

    def _one_by_one(
        self, connection: Connection, statement: sa.Select[Any]
    ) -> Generator[Mapping[str, Any], None, None]:
        """Yield rows as they arrive. Drivers would otherwise hold all of them before they return the first."""
        if self._engine.dialect.driver == "psycopg":
            yield from _streamed(connection, statement)
        else:
            # Others than psycopg request as many rows of Postgres at a time; the rest read what was sent.
            most = 16 if self._dialect == "postgresql" else 1
            reading = connection.execution_options(stream_results=True, max_row_buffer=most)
            with reading.execute(statement) as result:
                yield from map(dict, result.mappings())

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        try:
            connection = self._engine.connect()
        except NoConnectionFree as error:
            raise Retryable("no connection to the database became free in time") from error
        except DBAPIError as error:
            raise _unconnected(error) from error
        try:
            with connection:
                if self._dialect == "postgresql":
                    connection = connection.execution_options(postgresql_readonly=True)
                    milliseconds = int(self._options.timeout_seconds * 1_000)
                    connection.execute(sa.text(f"SET LOCAL statement_timeout = {milliseconds}"))
                yield connection
        except DBAPIError as error:
            raise _failed(error) from error


def _engine(dsn: str, connections: int) -> Engine:
    """Raises Misconfigured, without the address, which may hold a password."""
    try:
        url = sa.make_url(re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", dsn))
        is_psycopg = url.drivername == "postgresql+psycopg"
        arguments = {name: value for name, value in KEEPALIVE.items() if is_psycopg and name not in url.query}
        engine = sa.create_engine(
            url,
            pool_size=connections,
            max_overflow=0,
            pool_pre_ping=True,
            pool_recycle=POOL_RECYCLE_SECONDS,
            connect_args=arguments,
            hide_parameters=True,
        )
        if is_psycopg:
            sa.event.listen(engine, "connect", lambda connection, _: _read_any_value(connection))
        return engine
    except NoSuchModuleError as error:
        raise Misconfigured("dsn: SQLAlchemy knows no such database: install its dialect, or correct dsn") from error
    except ImportError as error:
        raise Misconfigured(f"dsn: the driver {error.name} is not installed: pip install it") from error
    except (ArgumentError, ValueError, TypeError) as error:
        raise Misconfigured("dsn: write an address such as postgresql://user:password@host/database") from error


def _streamed(connection: Connection, statement: sa.Select[Any]) -> Generator[Mapping[str, Any], None, None]:
    """Yield rows by psycopg itself: SQLAlchemy reads them with a cursor of the server, one request for each few."""
    import psycopg
    from psycopg.rows import dict_row

    compiled = statement.compile(dialect=connection.dialect)
    driver: Any = connection.connection.driver_connection
    try:
        with (
            driver.cursor(row_factory=dict_row) as cursor,
            closing(cursor.stream(str(compiled), compiled.params)) as rows,
        ):
            yield from rows
    except psycopg.Error as error:
        raise DBAPIError.instance(
            None, None, error, psycopg.Error, hide_parameters=True, connection_invalidated=driver.closed
        ) from error


def _read_any_value(connection: Any) -> None:
    """Let a value that Python refuses concern its own row: psycopg's readers would end the reading of all."""
    from psycopg import DataError
    from psycopg.types import datetime as times
    from psycopg.types.json import set_json_loads

    def of_any_time(loader: Any) -> Any:
        class Loader(loader):  # type: ignore[misc]
            def load(self, data: Any) -> Any:
                try:
                    return super().load(data)
                except (DataError, OverflowError):
                    return NoValue("holds a time that cannot be read, such as infinity or one beyond the year 9999")

        return Loader

    set_json_loads(_json, connection)
    for name in TIMES:
        for form in ("", "Binary"):
            loader = getattr(times, f"{name.capitalize()}{form}Loader")
            connection.adapters.register_loader(name, of_any_time(loader))


def _json(text: str | bytes) -> Any:
    """Return the value of a column of JSON, unless it is nested a thousand times or has a number of 5,000 digits, or is
    so long that it would take a gigabyte."""
    if len(text) > MAX_CONTENT_BYTES:
        return TOO_LARGE
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return NoValue("holds JSON that cannot be read: it is nested too deeply, or has a number of too many digits")


def _subquery(query: str, columns: Sequence[str]) -> sa.FromClause:
    # A colon before a word would be a parameter, as in to_char(at, 'HH24:MI').
    text = re.sub(r"(?<![:\w\\]):(?=\w)", r"\\:", query.strip().rstrip(";"))
    return sa.text(f"{text}\n").columns(*map(sa.column, columns)).subquery("penstock_rows")


def _value(value: Any) -> Any:
    """Return a parameter whose type the driver chooses. SQLAlchemy would cast a text, with which Postgres compares no
    UUID."""
    return sa.bindparam(None, value, type_=sa.types.NullType())


def _greater(columns: Sequence[sa.ColumnElement[object]], values: Key) -> sa.ColumnElement[bool]:
    """Return the comparison of several columns, in their order, which not every database can write as one of rows."""
    column, value = columns[0], values[0]
    greater: sa.ColumnElement[bool] = column > _value(value)
    if len(columns) == 1:
        return greater
    rest = _greater(columns[1:], values[1:])
    return sa.and_(column >= _value(value), sa.or_(greater, rest))


def _unconnected(error: DBAPIError) -> Misconfigured | Retryable:
    reason = str(error.orig).strip()
    if refused(reason):
        line = reason.splitlines()[-1].rpartition("FATAL:")[2].strip()
        return Misconfigured(f"the database refuses the connection ({line}): check dsn")
    return Retryable(f"the database cannot be reached ({type(error.orig).__name__}): check that dsn names its address")


def _failed(error: DBAPIError) -> Misconfigured | Retryable:
    name, code = type(error.orig).__name__, getattr(error.orig, "sqlstate", None)
    if error.connection_invalidated:
        return Retryable(f"the database closed the connection ({name})")
    if code is None:
        number = next((arg for arg in getattr(error.orig, "args", ()) if isinstance(arg, int)), None)
        summary = f"{name} {number}" if number is not None else name
        if isinstance(error, sa.exc.ProgrammingError) or getattr(error.orig, "sqlite_errorname", "") == "SQLITE_ERROR":
            return Misconfigured(f"the database refuses the statement ({summary}): check table, query and columns")
        return Retryable(f"the database does not respond ({summary})")
    if code == "57014":
        return Retryable(
            "a statement took longer than timeout_seconds: make an index on the columns of id, and of changed, or raise"
            " it"
        )
    if code == "25006":
        return Misconfigured("the query writes: only one that reads is executed")
    match classify_sqlstate(code):
        case "misconfigured":
            # The message of a refused statement names tables, columns and words of the query, never values of rows.
            line = getattr(getattr(error.orig, "diag", None), "message_primary", None) or name
            return Misconfigured(f"the database refuses the statement ({code}): {line}")
        case "poison":
            return Misconfigured(f"the query fails for some row ({name}, {code}): make it convert every row")
        case _:
            return Retryable(f"the database does not respond ({name}, {code})")
