"""Postgres in memory, as far as the product relies on it: transactions, row locks, READ COMMITTED, and lost tails.

A statement sees what was committed when it began and its own transaction's writes. A write takes the row's lock and
keeps it until the end. What the product's statements do is in ``statements``; nothing here knows their text.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from types import CoroutineType
from typing import Any, Protocol

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

Key = tuple[Any, ...]
Row = Mapping[str, Any]
LOCK_SECONDS = 30.0
"""The product's statement_timeout."""


class Caller(Protocol):
    """The process that a connection belongs to."""

    async def reach(self, service: str, doing: str) -> None:
        """Take the time that a request takes; raises when the service cannot be reached, or the process is dead."""
        ...

    async def answered(self, service: str, doing: str) -> None:
        """Raises when the answer is lost."""
        ...


class Nobody:
    """A caller whose requests take no time and always succeed."""

    async def reach(self, _service: str, _doing: str) -> None:
        return None

    async def answered(self, _service: str, _doing: str) -> None:
        return None


class Database:
    """The committed rows."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.now = now
        self.tables: defaultdict[str, dict[Key, Row]] = defaultdict(dict)
        self.sequences: defaultdict[str, int] = defaultdict(int)
        self.commits: list[tuple[datetime, list[tuple[str, Key, Row | None]]]] = []
        """When, and what each row was before."""
        self.on_commit: list[Callable[[Transaction], None]] = []
        self.session_locks: dict[Key, Session] = {}
        """Advisory locks of sessions, by their numbers."""
        self._owners: dict[tuple[str, Key], Transaction] = {}
        self._waiting: defaultdict[tuple[str, Key], deque[asyncio.Future[None]]] = defaultdict(deque)

    def draw(self, sequence: str) -> int:
        """The next number: never given back, whatever becomes of the transaction."""
        self.sequences[sequence] += 1
        return self.sequences[sequence]

    def lose_tail(self, commits: int) -> int:
        """Forget the newest commits, as a failover to a standby that lagged does. Returns how many those were."""
        lost = self.commits[len(self.commits) - commits :] if commits else []
        for _, changes in reversed(lost):
            for table, key, before in reversed(changes):
                if before is None:
                    self.tables[table].pop(key, None)
                else:
                    self.tables[table][key] = before
        del self.commits[len(self.commits) - len(lost) :]
        return len(lost)

    def _commit(self, transaction: Transaction) -> None:
        changes: list[tuple[str, Key, Row | None]] = []
        for (table, key), row in transaction.writes.items():
            rows = self.tables[table]
            changes.append((table, key, rows.get(key)))
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row
        if changes:
            self.commits.append((self.now(), changes))
        for callback in self.on_commit:
            callback(transaction)

    def _release(self, transaction: Transaction) -> None:
        for place in transaction.locks:
            if self._owners.get(place) is transaction:
                del self._owners[place]
                waiting = self._waiting.pop(place, ())
                for future in waiting:
                    if not future.done():
                        future.set_result(None)


class Transaction:
    """One transaction of one connection. Statements' implementations read and write through it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.began = database.now()
        self.writes: dict[tuple[str, Key], Row | None] = {}
        self.locks: dict[tuple[str, Key], None] = {}
        self.notes: dict[str, Any] = {}
        self.is_over = False
        """Rolled back, also while a statement of it waits."""

    def get(self, table: str, *key: Any) -> Row | None:
        """The row as this transaction sees it now."""
        place = (table, key)
        if place in self.writes:
            return self.writes[place]
        return self.database.tables[table].get(key)

    def rows(self, table: str) -> Iterator[tuple[Key, Row]]:
        """Every row as this transaction sees it now, in the order of their keys' insertion."""
        if not self.writes:
            yield from list(self.database.tables[table].items())
            return
        own = {key: row for (of, key), row in self.writes.items() if of == table}
        for key, row in self.database.tables[table].items():
            if key not in own:
                yield key, row
        for key, mine in own.items():
            if mine is not None:
                yield key, mine

    async def lock(self, table: str, *key: Any) -> Row | None:
        """Take the row's lock, waiting while another transaction has it; returns the row as it is then."""
        place = (table, key)
        database = self.database
        while (owner := database._owners.get(place)) is not None and owner is not self:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            database._waiting[place].append(future)
            try:
                async with asyncio.timeout(LOCK_SECONDS):
                    await future
            except TimeoutError:
                raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout") from None
        if self.is_over:
            raise psycopg.OperationalError("the connection is lost")
        database._owners[place] = self
        self.locks[place] = None
        return self.get(table, *key)

    def try_lock(self, table: str, *key: Any) -> bool:
        """Take the row's lock unless another transaction has it."""
        place = (table, key)
        if self.database._owners.get(place, self) is not self:
            return False
        self.database._owners[place] = self
        self.locks[place] = None
        return True

    async def put(self, table: str, row: Row | None, *key: Any) -> None:
        """Write a row, or delete it."""
        await self.lock(table, *key)
        self.writes[table, key] = row

    def now(self) -> datetime:
        """``clock_timestamp()``."""
        return self.database.now()


Statement = Callable[[Transaction, Any], Any]
"""An implementation: (transaction, parameters) → rows, or a coroutine of them."""


class Cursor:
    """The result of a statement."""

    def __init__(self, connection: Connection | Session, make: Callable[..., Any] | None = None) -> None:
        self._connection = connection
        self._make = make
        self._rows: deque[Any] = deque()
        self._results: deque[list[Any]] = deque()
        self.rowcount = 0

    async def __aenter__(self) -> Cursor:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def execute(self, statement: Any, parameters: Any = None) -> Cursor:
        rows, self.rowcount = await self._connection.run(statement, [parameters])
        self._rows = deque(rows)
        return self

    async def executemany(self, statement: Any, parameters: Iterable[Any], *, returning: bool = False) -> None:
        if not returning:
            _, self.rowcount = await self._connection.run(statement, list(parameters))
            return
        for values in parameters:  # a result for each
            rows, self.rowcount = await self._connection.run(statement, [values])
            self._results.append(rows)
        self.nextset()

    def nextset(self) -> bool | None:
        """Go on to the next result of several."""
        if not self._results:
            return None
        self._rows = deque(self._results.popleft())
        return True

    async def fetchall(self) -> list[Any]:
        rows, self._rows = list(self._rows), deque()
        return [self._made(row) for row in rows]

    async def fetchone(self) -> Any | None:
        return self._made(self._rows.popleft()) if self._rows else None

    async def __aiter__(self) -> AsyncIterator[Any]:
        for row in await self.fetchall():
            yield row

    def _made(self, row: Any) -> Any:
        if self._make is None or not isinstance(row, dict):
            return row
        return self._make(**row)


class Connection:
    """The part of psycopg that the product uses."""

    def __init__(self, database: Database, caller: Caller, statements: Callable[[str], Statement]) -> None:
        self._database = database
        self._caller = caller
        self._statements = statements
        self._transaction: Transaction | None = None
        self._depth = 0

    def belongs_to(self, session: Session) -> None:
        self._transaction = Transaction(self._database)
        self._transaction.notes["session"] = session

    async def execute(self, statement: Any, parameters: Any = None) -> Cursor:
        return await Cursor(self).execute(statement, parameters)

    def cursor(self, *, row_factory: Any = None) -> Cursor:
        return Cursor(self, maker_of(row_factory))

    async def run(self, statement: Any, parameters: Sequence[Any]) -> tuple[list[Any], int]:
        """Execute a statement once for each of the parameters; returns the last one's rows, and how many in all."""
        text = text_of(statement)
        implementation = self._statements(text)
        await self._caller.reach("postgres", text)
        if self._transaction is None:
            self._transaction = Transaction(self._database)
        rows: Any = []
        count = 0
        for values in parameters:
            rows = implementation(self._transaction, values)
            if type(rows) is CoroutineType:
                rows = await rows
            rows = rows or []
            count += rows if isinstance(rows, int) else len(rows)
        return ([] if isinstance(rows, int) else list(rows)), count

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        if self._transaction is not None or self._depth:  # a savepoint: the outer one decides
            yield
            return
        self._depth += 1
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._depth -= 1
        await self.commit()

    @asynccontextmanager
    async def pipeline(self) -> AsyncIterator[None]:
        yield

    async def commit(self) -> None:
        transaction = self._transaction
        if transaction is None:
            return
        try:
            await self._caller.reach("postgres", "COMMIT")
        except BaseException:
            self.abandon()
            raise
        self._transaction = None
        self._database._commit(transaction)
        self._database._release(transaction)
        await self._caller.answered("postgres", "COMMIT")

    def abandon(self) -> None:
        """Roll back."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.is_over = True
            self._database._release(transaction)


class Session:
    """A connection of its own that commits each statement, and holds what it has locked until it is closed or lost."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._database = pool.database
        self.lost = False

    async def execute(self, statement: Any, parameters: Any = None) -> Cursor:
        return await Cursor(self).execute(statement, parameters)

    async def run(self, statement: Any, parameters: Sequence[Any]) -> tuple[list[Any], int]:
        """As ``Connection.run``."""
        async with self._pool.connection() as connection:
            if self.lost:
                raise psycopg.OperationalError("the connection is lost")
            connection.belongs_to(self)
            return await connection.run(statement, parameters)

    async def close(self) -> None:
        self.lose()

    def lose(self) -> None:
        """The server ends it; who holds it learns of that by the next statement."""
        self.lost = True
        held = self._pool.database.session_locks
        for key in [key for key, session in held.items() if session is self]:
            del held[key]


class Lent:
    """A connection while somebody of the pool's process has it."""

    def __init__(self, used: set[Connection], connection: Connection) -> None:
        self._used = used
        self._connection = connection

    async def __aenter__(self) -> Connection:
        self._used.add(self._connection)
        return self._connection

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._used.discard(self._connection)
        if kind is not None:
            self._connection.abandon()
        else:
            await self._connection.commit()


class Pool:
    """One process's connections."""

    def __init__(self, database: Database, caller: Caller, statements: Callable[[str], Statement]) -> None:
        self.database = database
        self._caller = caller
        self._statements = statements
        self._used: set[Connection] = set()
        self.sessions: list[Session] = []

    def connection(self) -> Lent:
        return Lent(self._used, Connection(self.database, self._caller, self._statements))

    def cut(self) -> None:
        """The process is gone: the server rolls back what it had begun."""
        for connection in self._used:
            connection.abandon()
        self.end_sessions()

    def session(self) -> Session:
        session = Session(self)
        self.sessions.append(session)
        return session

    def end_sessions(self) -> None:
        """As a server or a gateway on the way to it ends them."""
        for session in self.sessions:
            session.lose()
        self.sessions.clear()


def text_of(statement: Any) -> str:
    if isinstance(statement, str):
        return statement
    if isinstance(statement, bytes):
        return statement.decode()
    if isinstance(statement, sql.Composed):
        return "".join(text_of(part) for part in statement)
    if isinstance(statement, sql.Identifier):
        return str(statement._obj[0])
    return str(statement._obj)


def maker_of(row_factory: Any) -> Callable[..., Any] | None:
    """The function behind psycopg's ``args_row`` or ``class_row``: its rows are dicts, as ``dict_row``'s are."""
    if row_factory is None or row_factory is dict_row:
        return None
    cells = [cell.cell_contents for cell in row_factory.__closure__ or ()]
    return next(cell for cell in cells if callable(cell))
