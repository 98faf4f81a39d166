"""Writing the audit trail: in batches beside the work, or before an answer is given (PENSTOCK_TRAIL=required)."""

from __future__ import annotations

import asyncio
import os
import platform
import pwd
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from itertools import groupby
from time import monotonic
from typing import Literal
from uuid import UUID, uuid4

import structlog
from psycopg import AsyncConnection
from psycopg.conninfo import make_conninfo

from pipeline.core.errors import Misconfigured, PenstockError, Poison, Retryable
from pipeline.core.trail import HEAD_SECONDS, MOST_DOCUMENTS, NO_KEY, Decision, Head, Keys, Record, Sealed, seal
from pipeline.ledger import trail as table
from pipeline.runtime.settings import Settings, TrailSettings
from pipeline.runtime.tasks import cancel_and_wait, time_limit
from pipeline.stores.postgres import Connection, translated

log = structlog.get_logger()

Outcome = Literal["written", "lost", "refused"]
Count = Callable[[Outcome, int], None]

FLUSH_SECONDS = 0.2
"""How long records are collected before they are written, in mode ``on``. A process that is killed loses these, and
those of the commit that is under way."""
BATCH = 200
MOST_WAITING = 10_000
"""The most records that wait while Postgres is away. Further ones are lost, counted, and noted in the trail."""
STATEMENT_SECONDS = 5.0
LOCK_SECONDS = 1.0
"""How long an attempt waits for a record's place, or a head's number, that another open transaction holds."""
ATTEMPT_SECONDS = 15.0
"""The time limit of one attempt. Postgres does not end a commit that waits for the disk or a synchronous standby, and
behind a proxy that holds the connection nothing else would."""
WRITE_SECONDS = 30.0
"""The time limit of all attempts together. After it, the request that waits for its record is refused."""
HELD_SECONDS = 30.0
"""The pause before the next attempt at a head whose number was held. Records are written meanwhile."""
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 5.0
"""How long a process that ends still tries to write what waits."""


def keys_of(settings: TrailSettings) -> Keys:
    key = settings.key.get_secret_value() if settings.key is not None else None
    return Keys(key, [secret.get_secret_value() or None for secret in settings.previous_keys])


@dataclass(slots=True)
class _Waiting:
    record: Record
    committed: asyncio.Future[None] | None
    """None: nobody waits for it."""


class _Chain:
    """The state of this process's chain."""

    def __init__(self, day: date) -> None:
        self.id: UUID = uuid4()
        self.day = day
        self.last: Sealed | None = None
        """The last record that is committed."""
        self.headed = 0
        self.headed_at = float("-inf")

    def held(self) -> None:
        self.headed_at = monotonic() - HEAD_SECONDS + HELD_SECONDS
        log.error("trail_head_held", chain=str(self.id), says="an open transaction holds the next head's number")

    @property
    def is_loose(self) -> bool:
        return self.last is not None and self.last.number > self.headed

    def covered_by(self, head: Head) -> None:
        self.headed, self.headed_at = head.count, monotonic()
        # Collected logs are the copy outside of the database that `penstock trail verify --noted` needs.
        log.info("trail_head", number=head.number, mac=head.mac.hex())


class Trail:
    """One writer a process; ``open_trail`` makes one. Safe to share between tasks of one event loop."""

    def __init__(self, settings: Settings, name: str, *, count: Count = lambda outcome, records: None) -> None:
        """name: of the process, for people."""
        self.mode = settings.trail
        self._dsn = settings.postgres.dsn.get_secret_value()
        self._keys = keys_of(settings.trail_keys)
        self._process = f"{name}@{platform.node()}:{os.getpid()}"
        self._count = count
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._lost, self._noting = 0, 0
        """The lost records that no record mentions yet, and those that are mentioned by a record that is not written
        yet."""
        self._closing = False
        self._chain: _Chain | None = None
        self._sealed: list[Sealed] = []
        """Sealed records that an attempt failed to write, in mode ``on``."""
        self._connection: Connection | None = None
        self._writing: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._sealed)

    @property
    def oldest_seconds(self) -> float:
        """The age of the oldest record that is not written yet."""
        first = self._sealed[0].record if self._sealed else self._waiting[0].record if self._waiting else None
        return 0.0 if first is None else max(0.0, (datetime.now(UTC) - first.at).total_seconds())

    async def write(self, record: Record) -> None:
        """Write a record. In mode ``required`` it is committed when this returns. Raises Retryable if that is not
        possible, or takes longer than WRITE_SECONDS; the record may be committed all the same."""
        if self.mode != "required":
            self.offer(record)
            return
        for part in record.parts:
            await self._write_now(part)

    async def _write_now(self, record: Record) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._count("refused", 1)
            raise Retryable("the audit trail cannot be written", service="postgres")
        committed = asyncio.get_running_loop().create_future()
        self._put(_Waiting(record, committed))
        try:
            async with time_limit(WRITE_SECONDS, "the audit trail"):
                await committed
        except Retryable:
            self._count("refused", 1)
            raise

    def offer(self, record: Record) -> None:
        """Have a record written soon, in any mode, without waiting for it. It may be lost."""
        if self.mode == "off":
            return
        for part in record.parts:
            if self.waiting >= MOST_WAITING:
                self._lose(1)
            else:
                self._put(_Waiting(part, None))

    def _put(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self._wake.set()

    def _lose(self, records: int) -> None:
        if not self._lost:
            log.error("trail_lost", says="records of the audit trail are lost: they cannot be written fast enough")
        self._lost += records
        self._count("lost", records)

    def start(self) -> None:
        if self.mode != "off":
            if self._keys.newest is None:
                log.warning(
                    "trail_without_key",
                    says="set PENSTOCK_TRAIL_KEY: without it, anyone who may write the tables can forge records",
                )
            self._writing = asyncio.create_task(self._write(), name="trail")

    async def aclose(self) -> None:
        """Write the waiting records, and a last head."""
        if self._writing is None:
            return
        self._closing = True
        self._wake.set()
        await asyncio.wait({self._writing}, timeout=CLOSE_SECONDS)
        await cancel_and_wait([self._writing])
        if self.waiting:
            self._lose(self.waiting)
            log.error("trail_lost_at_end", records=self.waiting)
            self._fail(list(self._waiting), Retryable("the audit trail is closed", service="postgres"))
        await self._disconnect()

    async def _write(self) -> None:
        while not (self._closing and not self.waiting):
            try:
                async with asyncio.timeout(HEAD_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                await self._attempt_head()
                continue
            if self.mode == "on" and not self._closing and len(self._waiting) < BATCH:
                await asyncio.sleep(FLUSH_SECONDS)
            self._wake.clear()
            while self.waiting:
                if not await self._attempt():
                    if self._closing and self.mode == "required":
                        return
                    await asyncio.sleep(RETRY_SECONDS)
        await self._attempt_head()

    async def _attempt(self) -> bool:
        """Try to write one batch, and return whether it is written."""
        batch = self._next_batch() if not self._sealed else []
        try:
            async with time_limit(ATTEMPT_SECONDS, "the audit trail"):
                await self._commit([waiting.record for waiting in batch])
        except PenstockError as error:
            log.warning("trail_not_written", reason=str(error)[:200])
            await self._disconnect()
            if self.mode == "required":  # the requests are refused; whether the records were committed is not known
                self._sealed, self._chain = [], None
                self._lost += self._noting
                self._fail(batch, error)
            else:
                self._seal_again()
            return False
        for waiting in batch:
            if waiting.committed is not None and not waiting.committed.done():
                waiting.committed.set_result(None)
        return True

    def _next_batch(self) -> list[_Waiting]:
        """Take the next records: few enough, with the documents that they name, for one statement."""
        batch, documents = list[_Waiting](), 0
        while self._waiting and len(batch) < BATCH and documents < MOST_DOCUMENTS:
            batch.append(self._waiting.popleft())
            documents += len(batch[-1].record.documents)
        return batch

    def _fail(self, batch: Sequence[_Waiting], error: PenstockError) -> None:
        for waiting in batch:
            if waiting.committed is None:
                self._lose(1)
            elif not waiting.committed.done():
                waiting.committed.set_exception(Retryable("the audit trail cannot be written", service="postgres"))

    async def _commit(self, records: list[Record]) -> None:
        """Write these records, after those in ``_sealed``. After a PenstockError, ``_sealed`` has the records that are
        not known to be written."""
        if records:
            self._noting = 0
        if self._lost and records:
            now = datetime.now(UTC)
            records.insert(0, Record(now, self._process, "service", "trail.lost", object=f"records:{self._lost}"))
            self._noting, self._lost = self._lost, 0
        for record in records:
            self._sealed.append(self._seal(record))
        at_once = BATCH
        while self._sealed:
            sealed = list(next(groupby(self._sealed, key=lambda sealed: sealed.chain))[1])[:at_once]
            try:
                await self._insert(sealed)
            except table.PlaceTaken as error:
                log.error("trail_place_taken", chain=str(sealed[0].chain), reason=str(error))
                self._seal_again()
                continue
            except Poison:
                if self.mode == "required":  # its request is refused, and the others of its batch
                    raise
                if len(sealed) == 1:
                    del self._sealed[0]
                    self._lose(1)
                at_once = 1  # so that the others are written
                self._seal_again()
                continue
            del self._sealed[: len(sealed)]
            self._count("written", len(sealed))

    def _seal_again(self) -> None:
        """Seal the records that were not written again, in a new chain: somebody who knows the id of a chain may add
        its next records before us, or lock their places as long as a transaction is open. Records that were committed
        without an answer are then in the trail twice."""
        records = [sealed.record for sealed in self._sealed]
        self._sealed = []
        for record in records:
            before = self._sealed[-1] if self._sealed else None
            self._sealed.append(self._seal_after(before, record))

    def _seal(self, record: Record) -> Sealed:
        return self._seal_after(self._sealed[-1] if self._sealed else self._chain.last if self._chain else None, record)

    def _seal_after(self, before: Sealed | None, record: Record) -> Sealed:
        if before is not None and before.record.day != record.day:
            before = None
        chain, number, previous = (uuid4(), 0, b"") if before is None else (before.chain, before.number, before.mac)
        return seal(self._keys, record, chain, number + 1, self._process, previous)

    async def _insert(self, sealed: Sequence[Sealed]) -> None:
        """Insert records of one chain."""
        last = sealed[-1]
        chain = self._chain
        if chain is None or chain.id != last.chain:
            await self._head()
            chain = self._chain = _Chain(last.record.day)
            chain.id = last.chain
        with translated("the audit trail"):
            connection = await self._connected()
            if monotonic() - chain.headed_at < HEAD_SECONDS:
                await table.add(connection, sealed)
                chain.last = last
                return
            if chain.last is None:
                await table.prepare(connection, last.record.day)
            async with connection.transaction():
                await table.add(connection, sealed)
                head = await self._next_head(connection, last)
            chain.last = last
            chain.covered_by(head) if head is not None else chain.held()

    async def _next_head(self, connection: Connection, last: Sealed) -> Head | None:
        """Add the next head. None: another transaction holds its number. The records are written all the same, and
        their head follows later."""
        try:
            return await table.add_head(connection, self._keys, datetime.now(UTC), last)
        except table.HeadLocked:
            return None

    async def _attempt_head(self) -> None:
        try:
            async with time_limit(ATTEMPT_SECONDS, "the audit trail"):
                await self._head()
        except PenstockError as error:
            log.warning("trail_not_written", reason=str(error)[:200])
            await self._disconnect()

    async def _head(self) -> None:
        """Add a head, if the last one does not cover the whole chain."""
        chain = self._chain
        if chain is None or not chain.is_loose:
            return
        assert chain.last is not None
        with translated("the audit trail"):
            connection = await self._connected()
            async with connection.transaction():
                head = await self._next_head(connection, chain.last)
            chain.covered_by(head) if head is not None else chain.held()

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = await connect(self._dsn)
        return self._connection

    async def _disconnect(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


async def connect(dsn: str) -> Connection:
    """Open a connection of the trail's own: it does not wait for one of the pool, and may record what was refused while
    the ledger is fenced. Raises psycopg.Error."""
    timeout = f"-c statement_timeout={int(1000 * STATEMENT_SECONDS)} -c lock_timeout={int(1000 * LOCK_SECONDS)}"
    alone = make_conninfo(
        dsn, application_name="penstock trail", connect_timeout=5, tcp_user_timeout=10_000, options=timeout
    )
    return await AsyncConnection.connect(alone, autocommit=True)


@asynccontextmanager
async def open_trail(
    settings: Settings, name: str, *, count: Count = lambda outcome, records: None
) -> AsyncIterator[Trail]:
    """Open a trail. At the end, waiting records are written before it closes."""
    trail = Trail(settings, name, count=count)
    trail.start()
    try:
        yield trail
    finally:
        await trail.aclose()


def access(principals: Sequence[str], tags: Sequence[str]) -> tuple[str, ...]:
    """Return the access under which a command acts, from its options --as and --tag."""
    return (*(f"user:{principal}" for principal in principals), *(f"tag:{tag}" for tag in tags))


def recorded(
    action: str,
    *,
    tenant: str = "",
    access: Sequence[str] = (),
    object: str = "",
    documents: Sequence[UUID] = (),
    decision: Decision = "allowed",
    reason: str = "",
) -> Record:
    """A record of the present action of the operator who runs a command."""
    return Record(
        datetime.now(UTC),
        operating_user(),
        "command",
        action,
        tenant,
        tuple(access),
        object,
        tuple(documents),
        decision,
        reason,
    )


def operating_user() -> str:
    """Return the user's name according to the system. USER and LOGNAME are not read, because anybody can set them."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user often has no name
        return f"uid {os.getuid()}"


async def check_key(settings: Settings) -> None:
    """Check the key, for a command that is about to add records one by one. Raises as ``record_now`` does."""
    keys = keys_of(settings.trail_keys)
    if settings.trail != "off" and keys.newest is None:
        with translated("the audit trail"):
            async with await connect(settings.postgres.dsn.get_secret_value()) as connection:
                await _check_key(connection, keys)


async def _check_key(connection: Connection, keys: Keys) -> None:
    if keys.newest is None:
        newest = await table.newest_head(connection)
        if newest is not None and newest.key_id != NO_KEY:
            raise Misconfigured(
                "the audit trail is written with a key, and PENSTOCK_TRAIL_KEY is not set here: set it as it is set for"
                " the query service"
            )


async def record_now(settings: Settings, name: str, record: Record) -> None:
    """Write and commit one record, for a command. Raises PenstockError, also if other processes write with a key and
    none is set here: `penstock trail verify` would report a record without a key as long as it is retained."""
    if settings.trail == "off":
        return
    keys = keys_of(settings.trail_keys)
    process, chain, sealed = f"{name}@{platform.node()}:{os.getpid()}", uuid4(), list[Sealed]()
    for number, part in enumerate(record.parts, start=1):
        sealed.append(seal(keys, part, chain, number, process, sealed[-1].mac if sealed else b""))
    with translated("the audit trail"):
        async with await connect(settings.postgres.dsn.get_secret_value()) as connection:
            await _check_key(connection, keys)
            await table.prepare(connection, record.day)
            async with connection.transaction():
                await table.add(connection, sealed)
                try:
                    await table.add_head(connection, keys, datetime.now(UTC), sealed[-1])
                except table.HeadLocked as error:
                    log.error("trail_head_held", chain=str(chain), says=str(error))
