"""Postgres: the pool, the migrations, and what a generation's chunk table looks like."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from importlib.resources import files
from time import monotonic
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from pgvector import Vector
from pgvector.psycopg import register_vector_async
from psycopg import AsyncConnection, DataError, sql
from psycopg.abc import RV, Buffer, PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import PipelineStatus
from psycopg.rows import TupleRow
from psycopg.types.datetime import DateLoader, TimestamptzLoader
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from pipeline.core.errors import Deferred, Fenced, Misconfigured, Poison, Retryable
from pipeline.core.fence import Use
from pipeline.core.model import Generation
from pipeline.core.retry import classify_sqlstate
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores import fence

T = TypeVar("T")

EARLIEST = datetime(1, 1, 2, tzinfo=UTC)
LATEST = datetime(9999, 12, 30, tzinfo=UTC)


class _BoundedTimestamptz(TimestamptzLoader):
    """Reads infinity, and times that Python cannot express, as ``EARLIEST`` or ``LATEST``: a row with such a time must
    not keep its readers from all other rows."""

    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except DataError:
            return EARLIEST if _is_early(data) else LATEST


class _BoundedDate(DateLoader):
    def load(self, data: Buffer) -> date:
        try:
            return super().load(data)
        except DataError:
            return (EARLIEST if _is_early(data) else LATEST).date()


def _is_early(data: Buffer) -> bool:
    text = bytes(data)
    return text.startswith(b"-") or text.endswith(b"BC")


psycopg.adapters.register_loader("timestamptz", _BoundedTimestamptz)
psycopg.adapters.register_loader("date", _BoundedDate)

MINIMUM_PGVECTOR = (0, 8, 4)
"""Below it, concurrent insert and vacuum can corrupt an HNSW index."""

LOCK_TIMEOUT_MS = 500
LOCK_PAUSE_SECONDS = 1.0
LOCK_ATTEMPTS = 80
"""How long a migration waits for a table at a time (searches wait behind it, and give up after 1.5 s), and how often:
two minutes in all."""

MIGRATIONS_LOCK = 7_300_001
GENERATIONS_LOCK = 7_300_002
"""Held while generations change, for workers of versions before migration 0059, which share it."""
SWEEPER_LOCK = 7_300_003
BUILD_LOCK = 7_300_004
"""Held by the one command that builds a generation, for as long as it runs."""
AUDIT_LOCK = 7_300_005
"""Held by the one worker that is reading a page for the background audit."""
VITALS_LOCK = 7_300_006
"""Held by the one worker that measures the state of the whole system."""
GRAPH_LOCK = 7_300_007
"""Held by the one worker that moves rows into the graphs and builds them."""
INDEX_LOCK = 7_300_008
"""Held by the one worker that compares a page of the ledger with a keyword index that changed."""
EVAL_LOCK = 7_300_009
"""Held by the one query service that decides whether a run of the evaluation is due."""
CANARY_LOCK = 7_300_010
"""Held by the one process that publishes canaries: two would overwrite each other's."""
WEBHOOKS_LOCK = 7_300_011
"""Held by the one connectors worker that sends webhooks."""
CALIBRATION_LOCK = 7_300_012
"""Held by the one worker that calibrates the floors of relevance."""
RETENTION_LOCK = 7_300_038
"""Held by the one worker that erases rows whose retention has passed."""

_KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000}
"""A server that vanishes silently is given up after 30 s (libpq's names; the last one in milliseconds)."""
_SERVER_KEEPALIVE = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=4"
"""For the server: the locks of a client that vanishes silently are released after 30 s, not after two hours."""

FENCE_SECONDS = 2.0
"""How long a check of the fence on a connection holds. Its server's timeline cannot change while the connection is
open, unless a pooler stands between."""
PREPARED_SECONDS = 10.0
"""How long a connection for queries keeps its prepared statements. Planning costs as much as running most statements of
a search, but a plan for an empty table is wrong for a large one, and nothing renews it before Postgres has analysed the
table. Workers fill tables that were empty: they keep theirs for FENCE_SECONDS."""

CONNECT_SECONDS = 30
"""How long a pool waits for a new connection. It makes three at a time: a server that accepts and does not answer would
keep it from any other for two minutes, which is psycopg's limit."""
SILENT_SECONDS = 30.0
"""How much longer than a statement may take a connection of the pool waits for a result."""

Connection = AsyncConnection[TupleRow]
Pool = AsyncConnectionPool[Connection]


_RETURNS: set[asyncio.Future[None]] = set()


async def _shielded(returning: Coroutine[Any, Any, None]) -> None:
    """Finish returning a connection even if the caller is cancelled."""
    task = asyncio.ensure_future(returning)
    _RETURNS.add(task)  # the loop itself holds tasks weakly
    task.add_done_callback(_RETURNS.discard)
    await asyncio.shield(task)


class _Heard(AsyncConnection[TupleRow]):
    """A connection that is given up when it waits for longer than a statement may take.

    The server ends its statements in time, and TCP notices when it has vanished. A server or a pooler that hangs while
    its kernel confirms every packet does neither: its client would wait for ever, and so would the tasks of the pool
    that make new connections."""

    longest_wait_seconds: float | None = None
    """None: without limit."""

    async def wait(self, gen: PQGen[RV], *arguments: Any, **options: Any) -> RV:
        if arguments or options:  # a wait with a limit of its own, or for notifications
            return await super().wait(gen, *arguments, **options)
        try:
            async with asyncio.timeout(self.longest_wait_seconds):
                return await super().wait(gen)
        except TimeoutError as error:
            self.pgconn.finish()  # and not close: the pool then replaces its idle ones too, which are as silent
            raise psycopg.OperationalError(f"no result within {self.longest_wait_seconds:g} s") from error


class _Pool(AsyncConnectionPool[Connection]):
    """A pool that replaces psycopg's behaviour in four cases.

    When one connection is returned dead, the idle ones are replaced too: after a cut all are dead, and each would cost
    a breaker's trial its turn (minutes, as trials come ever later; psycopg's own check before handing one out waits as
    long, 1 + 2 + 4 … seconds for each dead one). One that its user has closed says nothing of the others.

    A caller that is cancelled while it returns a connection has returned it all the same: psycopg's own handling of a
    cancelled return loses the connection, and the pool counts it for ever.

    A pipeline that is cancelled while it ends stays switched on (psycopg 3.3, about one in a hundred), and the next
    one's statements would go unanswered until something is fetched. Such a connection is closed before it would be
    handed out; earlier, while the cancelled caller still unwinds, psycopg's generators would meet a closed one.

    No connection to a server on which the ledger was not accepted is handed out: callers get Fenced until it is.
    psycopg discards a connection's prepared statements at each ROLLBACK, so that the check of a connection for queries
    ends with one only every PREPARED_SECONDS."""

    def __init__(self, conninfo: str, *, use: Use, on_fence: Callable[[bool], None], **options: Any) -> None:
        """on_fence: called at every check of the fence, with whether the ledger is refused."""
        super().__init__(conninfo, **options)
        self._use: Use = use
        self._on_fence = on_fence
        self._checked_at: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()
        self._discarded_at: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()
        """When the prepared statements of each connection were discarded."""

    async def getconn(self, timeout: float | None = None) -> Connection:
        while (conn := await super().getconn(timeout)).pgconn.pipeline_status != PipelineStatus.OFF:
            await conn.close()
            await _shielded(super().putconn(conn))
        if monotonic() - self._checked_at.get(conn, float("-inf")) > FENCE_SECONDS:
            try:
                await self._check_fence(conn)
            except BaseException:
                await self.putconn(conn)
                raise
        return conn

    async def _check_fence(self, conn: Connection) -> None:
        try:
            await fence.require(conn, self._use)
        except Fenced:
            self._on_fence(True)
            raise
        now = monotonic()
        if self._use == "queries" and now - self._discarded_at.get(conn, float("-inf")) < PREPARED_SECONDS:
            await conn.commit()
        else:
            await conn.rollback()
            self._discarded_at[conn] = now
        self._on_fence(False)
        self._checked_at[conn] = now

    async def putconn(self, conn: Connection) -> None:
        await _shielded(self._return(conn))

    async def _return(self, conn: Connection) -> None:
        dead = conn.broken
        await super().putconn(conn)
        if dead and not self.closed:
            await self.drain()


_ONE_PROCESS = "-c max_parallel_workers_per_gather=0"
"""The statements of a search take milliseconds, and a second process takes the processor of another search. To have
some, the planner also read all documents of a million chunks, for a caller who may read a thousandth: 67 ms, not 6."""


@asynccontextmanager
async def open_pool(
    settings: PostgresSettings,
    use: Use = "intake",
    *,
    on_fence: Callable[[bool], None] = lambda refused: None,
    schema: str | None = None,
) -> AsyncIterator[Pool]:
    """A pool whose connections know vectors and carry timeouts. Taking one raises Fenced while the ledger must not be
    used for this; on_fence is called with the result of each check. schema: where tables are looked for first; Postgres
    passes over one that the login may not use. Raises Misconfigured when migrations have not run."""
    timeout_ms = int(settings.statement_timeout_seconds * 1000)
    pool = _Pool(
        settings.dsn.get_secret_value(),
        use=use,
        on_fence=on_fence,
        min_size=1,
        max_size=settings.pool_max_size,
        open=False,
        connection_class=_Heard,
        configure=partial(_configure, longest_wait_seconds=settings.statement_timeout_seconds + SILENT_SECONDS),
        kwargs={
            **_KEEPALIVE,
            "connect_timeout": CONNECT_SECONDS,
            "options": f"-c statement_timeout={timeout_ms} -c idle_in_transaction_session_timeout=60000 -c jit=off"
            f" {_ONE_PROCESS if use == 'queries' else ''} {_SERVER_KEEPALIVE}"
            f" {f'-c search_path={schema},public' if schema else ''}",
            "application_name": f"penstock {use}",
        },
    )
    try:
        with translated(_address(settings)):
            await require_migrated(settings)
            await pool.open(wait=True, timeout=30)
        yield pool
    finally:
        await pool.close()


async def connect_alone(settings: PostgresSettings, name: str, *, within_seconds: int = 10) -> Connection:
    """Open a separate connection without time limit, each statement its own transaction. Its locks are released, and a
    server that vanishes is given up, after half a minute. name: the name that Postgres shows. within_seconds: the time
    to connect. Raises psycopg.Error."""
    dsn = settings.dsn.get_secret_value()
    options = f"{conninfo_to_dict(dsn).get('options') or ''} -c jit=off {_SERVER_KEEPALIVE}"
    alone = make_conninfo(
        dsn, **_KEEPALIVE, application_name=f"penstock {name}", connect_timeout=within_seconds, options=options
    )
    return await AsyncConnection.connect(alone, autocommit=True)


@asynccontextmanager
async def unlimited(settings: PostgresSettings, name: str) -> AsyncIterator[Connection]:
    """A separate connection without time limit, each statement its own transaction. name: the name that Postgres
    shows. Raises Retryable, Misconfigured; Fenced while the stores must not follow the ledger."""
    with translated(name):
        async with await connect_alone(settings, name) as connection:
            await fence.require(connection, "stores")
            await register_vector_async(connection)
            yield connection


async def permit_long(connection: Connection) -> None:
    """Let the statements of the connection's transaction take as long as they need; the connection itself waits without
    limit from then on."""
    await connection.execute("SET LOCAL statement_timeout = 0")
    if isinstance(connection, _Heard):
        connection.longest_wait_seconds = None


def _address(settings: PostgresSettings) -> str:
    """Where Postgres is, for people: never with the password."""
    parts = conninfo_to_dict(settings.dsn.get_secret_value())
    where = f"{parts.get('host', 'localhost')}:{parts.get('port', 5432)}"
    return f"Postgres at {where} (`penstock up` starts a local one; PENSTOCK_POSTGRES_DSN names another)"


async def _configure(connection: Connection, *, longest_wait_seconds: float) -> None:
    if isinstance(connection, _Heard):
        connection.longest_wait_seconds = longest_wait_seconds
    await register_vector_async(connection)
    await connection.commit()


async def require_migrated(settings: PostgresSettings) -> None:
    """Raises Misconfigured when this version's migrations have not all run, or when a newer version's have removed
    something that this one uses. Additions of newer ones do not matter."""
    async with await connect_alone(settings, "start") as connection:
        row = await (await connection.execute("SELECT to_regclass('public.schema_migrations')::text")).fetchone()
        applied: dict[str, str | None] = {}
        if row and row[0]:
            # As JSON: the column is missing where the last version to migrate did not have it yet.
            cursor = await connection.execute("SELECT name, to_jsonb(m) ->> 'needs' FROM schema_migrations m")
            applied = dict(await cursor.fetchall())
        if why := refusal([migration.name for migration in migrations()], applied):
            raise Misconfigured(why)


class translated:
    """``with translated("Postgres"):`` turns psycopg's errors into our kinds, by SQLSTATE."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, PoolTimeout):
            raise Retryable(f"{self.what}: no connection became free in time", service="postgres") from error
        if not isinstance(error, psycopg.Error):
            return
        code = error.sqlstate
        if code is None and (why := refused(str(error))):
            raise Misconfigured(f"{self.what}: {why}", service="postgres") from error
        summary = f"{self.what}: {type(error).__name__}" + (f" ({code})" if code else "")
        if code is None:  # the client's own: no server, or a value that it cannot send
            world = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        match ("retry" if world else "poison") if code is None else classify_sqlstate(code):
            case "poison":
                raise Poison("postgres_refused", summary) from error
            case "misconfigured":
                raise Misconfigured(f"{summary}: {str(error).splitlines()[0]}", service="postgres") from error
            case "deferred":
                raise Deferred(summary, service="postgres") from error
            case _:
                raise Retryable(summary, service="postgres") from error


async def migrate(settings: PostgresSettings) -> list[str]:
    """Run the migrations that have not run yet, each in one transaction; returns their names. Safe to run twice, also
    at the same time, and while the version before is at work. Raises Misconfigured when pgvector is missing or older
    than MINIMUM_PGVECTOR, or the database is not in UTF-8, Retryable when a table stays locked."""
    done = []
    with translated("migrate"):
        async with await connect_alone(settings, "migrate") as connection:
            _check_encoding(connection)
            await _check_pgvector(connection)
            await connection.execute("SELECT pg_advisory_lock(%s)", [MIGRATIONS_LOCK])
            await connection.execute(
                "CREATE TABLE IF NOT EXISTS schema_migrations"
                " (name text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
            )
            await _add_needs(connection)
            cursor = await connection.execute("SELECT name FROM schema_migrations")
            applied = {name for (name,) in await cursor.fetchall()}
            for migration in migrations():
                if migration.name not in applied:
                    await _apply(connection, migration)
                    done.append(migration.name)
            # The version before, taken back for a while, makes tables as it knows them.
            await _change(connection, "of chunk tables", ("SELECT complete_chunk_tables()", None))
            await _change(connection, "of bound logins", ("SELECT conceal_restored_texts()", None))
    return done


async def divide_rows(settings: PostgresSettings) -> list[str]:
    """Divide rows by tenant in the server itself (migration 0041), a table at a time: each is locked for a moment.
    Repeats are harmless. Returns lines that say what was done, or why it was not. Raises Retryable when a table stays
    locked."""
    notices: list[str] = []
    divided = 0
    with translated("dividing rows by tenant"):
        async with await connect_alone(settings, "migrate") as connection:
            connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
            while now := await _divide_table(connection):
                divided += now
    return [*notices, *([f"rows are divided by tenant in {divided} tables more"] if divided else [])]


async def _divide_table(connection: Connection) -> int:
    async def divide() -> int:
        cursor = await connection.execute("SELECT divide_rows(1)")
        [[divided]] = await cursor.fetchall()
        return int(divided)

    return await _when_unlocked(
        divide, "rows cannot be divided by tenant: something holds a table (pg_stat_activity says what, by xact_start)"
    )


async def _when_unlocked(change: Callable[[], Awaitable[T]], refusal: str) -> T:
    """Make a change that waits briefly for its locks, and try again where it did not get them. Every later query on a
    table waits behind whatever waits for its lock. Raises Retryable with this message when a table stays locked."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            return await change()
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            await asyncio.sleep(LOCK_PAUSE_SECONDS)
    raise Retryable(refusal, service="postgres")


async def _add_needs(connection: Connection) -> None:
    """Add the column ``needs``, which databases of the first versions lack. Its presence is checked first: ADD COLUMN
    takes an exclusive lock even where there is nothing to add, and so waits for a backup to end."""
    cursor = await connection.execute(
        "SELECT FROM pg_attribute"
        " WHERE attrelid = 'schema_migrations'::regclass AND attname = 'needs' AND NOT attisdropped"
    )
    if await cursor.fetchone() is None:
        await _change(connection, "schema_migrations", ("ALTER TABLE schema_migrations ADD COLUMN needs text", None))


async def _apply(connection: Connection, migration: Migration) -> None:
    done = "INSERT INTO schema_migrations (name, needs) VALUES (%s, %s)"
    await _change(connection, migration.name, (migration.statements, None), (done, [migration.name, migration.needs]))


async def _change(connection: Connection, name: str, *statements: tuple[str, Sequence[str | None] | None]) -> None:
    """Run statements (each with its parameters) in one transaction."""

    async def change() -> None:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}".encode())
            for statement, parameters in statements:
                await connection.execute(statement.encode(), parameters)

    await _when_unlocked(
        change,
        f"migration {name} cannot have a table for itself: something holds it (pg_stat_activity says what, by"
        " xact_start). Nothing is changed; run it again when that has ended",
    )


def _check_encoding(connection: Connection) -> None:
    """Workers cannot store their texts in another encoding, and that of a database cannot be changed."""
    name, encoding = connection.info.dbname, connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise Misconfigured(
            f"the database {name} has the encoding {encoding}: create one with UTF8"
            f" (CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8')"
        )


async def _check_pgvector(connection: Connection) -> None:
    cursor = await connection.execute("SELECT default_version FROM pg_available_extensions WHERE name = 'vector'")
    row = await cursor.fetchone()
    if row is None:
        raise Misconfigured("Postgres has no pgvector: install pgvector 0.8.4 or newer on the server")
    version = tuple(int(part) for part in re.findall(r"\d+", str(row[0]))[:3])
    if version < MINIMUM_PGVECTOR:
        raise Misconfigured(f"pgvector {row[0]} can corrupt its index under load: upgrade the server to 0.8.4 or newer")


MOST_INDEXED_BITS = 8_192
"""The longest sketch that is held in an index: with a tenant's name it fits into the 2,704 bytes of an entry."""


def document_index(generation: Generation) -> str:
    """The name of the chunk table's index of documents."""
    return f"{generation.chunk_table}_document"


async def create_chunk_table(connection: Connection, generation: Generation) -> None:
    """The generation's chunk table, without its graph (``stores.graph``). Repeats are harmless.

    access_id is a hint for filtering and deliberately not indexed: where a page has room, changing it is a HOT update
    that leaves the graph alone. A row without a sketch or a tenant was written by a worker of an older version. The
    index of documents holds what a sketched scan reads (docs/adr/0127).
    """
    table = sql.Identifier(generation.chunk_table)
    vector = sql.SQL(f"{generation.vector_type}({generation.dimensions})")
    bits = sql.SQL(f", sketch bit({generation.sketch_bits})" if generation.sketched else "")
    await connection.execute(
        sql.SQL(
            """
            CREATE TABLE IF NOT EXISTS {table} (
                id          uuid PRIMARY KEY,
                document_id uuid NOT NULL,
                access_id   bigint NOT NULL,
                created_at  timestamptz NOT NULL DEFAULT now(),
                text        text NOT NULL,
                embedding   {vector} NOT NULL,
                in_graph    boolean NOT NULL DEFAULT true,
                tenant      text
                {bits}
            ) WITH (fillfactor = 90)
            """
        ).format(table=table, vector=vector, bits=bits)
    )
    holds = generation.sketched and generation.sketch_bits <= MOST_INDEXED_BITS
    await connection.execute(
        sql.SQL("CREATE INDEX IF NOT EXISTS {name} ON {table} (document_id){held}").format(
            name=sql.Identifier(document_index(generation)),
            table=table,
            held=sql.SQL(" INCLUDE (id, tenant, sketch)" if holds else ""),
        )
    )
    await connection.execute("SELECT divide_as_documents(to_regclass(%s))", [f'"{generation.chunk_table}"'])
    await connection.execute("SELECT prepare_probes(%s, %s)", [generation.name, generation.dimensions])
    if generation.graph_of_sketches:
        await _record_rotation(connection, generation)
    await connection.execute(  # "is this very text embedded already?" (eight bytes a row)
        sql.SQL("CREATE INDEX IF NOT EXISTS {name} ON {table} (hashtextextended(text, 0))").format(
            name=sql.Identifier(f"{generation.chunk_table}_text"), table=table
        )
    )


async def _record_rotation(connection: Connection, generation: Generation) -> None:
    """Record what ``readers.nearest`` needs to make sketches (migration 0114). Repeats are harmless."""
    from pipeline.core.sketch import rotation  # here: most processes need no numpy

    bits = generation.sketch_bits
    signs, orders, mixers = rotation(bits)
    await connection.execute(  # vectors as text: a setup's connection does not know their type
        "INSERT INTO sketch_rotations (bits, signs, orders, mixers)"
        " VALUES (%s, %s::real[], %s::integer[], %s::text[]::vector[]) ON CONFLICT DO NOTHING",
        [bits, signs.ravel().tolist(), (orders + 1).ravel().tolist(), [Vector(row).to_text() for row in mixers]],
    )


async def point_readers_at(connection: Connection, generation: Generation) -> None:
    """Make ``readers.chunks`` show this generation (migration 0019 says what it looks like)."""
    await connection.execute("SELECT point_readers_at(%s, %s)", [generation.chunk_table, generation.name])


_REFUSALS = (
    (
        r"certificate verify failed",
        "its certificate is not trusted, or has expired: set sslrootcert in PENSTOCK_POSTGRES_DSN to the authority"
        " that signed it",
    ),
    (
        r"server certificate for .* does not match host name",
        "its certificate is for another host: use the name in the certificate in PENSTOCK_POSTGRES_DSN",
    ),
    (
        r"root certificate file .* does not exist",
        "sslrootcert in PENSTOCK_POSTGRES_DSN names a file that does not exist",
    ),
    (
        r"could not (load|read|open|stat).*(certificate|private key)|private key file .* (has|must)"
        r"|certificate does not match private key|certificate present, but not private key",
        "sslcert or sslkey in PENSTOCK_POSTGRES_DSN cannot be used: both in PEM, the key for its owner's eyes alone",
    ),
    (
        r"requires a valid client certificate|certificate authentication failed"
        r"|alert (certificate|unknown ca|bad cert)",
        "it requires a client certificate for this user: set sslcert and sslkey in PENSTOCK_POSTGRES_DSN",
    ),
    (
        r"server does not support SSL",
        "it does not use TLS: change sslmode in PENSTOCK_POSTGRES_DSN, or enable TLS on the server",
    ),
    (
        r"no pg_hba\.conf entry .*no encryption",
        "it requires TLS for this user: add sslmode=verify-full&sslrootcert=FILE to PENSTOCK_POSTGRES_DSN",
    ),
    (r"no pg_hba\.conf entry", "its pg_hba.conf does not allow this user from this address"),
    (
        r"(password|SCRAM|SASL) authentication failed|no password supplied",
        "it refuses the login: check PENSTOCK_POSTGRES_USERNAME and _PASSWORD, or PENSTOCK_POSTGRES_DSN",
    ),
    (
        r"role .* (does not exist|is not permitted to log in)",
        "the user does not exist: check PENSTOCK_POSTGRES_USERNAME",
    ),
    (r"permission denied for database", "the user may not use this database: run deploy/roles/postgres/1-roles.sql"),
)
"""Patterns of the errors with which libpq and the server refuse a client (without SQLSTATE), and what helps. The first
match counts."""


def refused(text: str) -> str | None:
    """Why Postgres does not let us in, where only other settings help; None when it is for another reason."""
    return next((why for pattern, why in _REFUSALS if re.search(pattern, text)), None)


_NEEDS = re.compile(r"^-- needs: (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Migration:
    name: str
    statements: str
    needs: str | None
    """The migration that a program must know to work with the schema after this one. None: it only adds."""


def migration(name: str, statements: str) -> Migration:
    needs = _NEEDS.search(statements)
    return Migration(name, statements, needs.group(1) if needs else None)


def migrations() -> list[Migration]:
    """All migrations of this version, in their order."""
    folder = files("pipeline.stores") / "migrations"
    return sorted(
        (migration(f.name.removesuffix(".sql"), f.read_text()) for f in folder.iterdir() if f.name.endswith(".sql")),
        key=lambda migration: migration.name,
    )


def refusal(known: Collection[str], applied: Mapping[str, str | None]) -> str | None:
    """Why a program must not work on a database, in one line; None: it may.

    known: the migrations that it brings. applied: name → ``needs`` of those that the database has.
    """
    if missing := sorted(set(known) - applied.keys()):
        return f"the database lacks migration {missing[0]}: run `penstock migrate`"
    for name, needs in sorted(applied.items()):
        if name not in known and needs is not None and needs not in known:
            return (
                f"a newer version has taken away what this one uses (migration {name} needs {needs}): run that version,"
                " or restore the backup that was made before it (docs/upgrade.md)"
            )
    return None
