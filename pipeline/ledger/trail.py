"""The trail in Postgres: adding records, searching them, and checking all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any, LiteralString
from uuid import UUID

from psycopg import sql
from psycopg.errors import LockNotAvailable, UniqueViolation

from pipeline.core.errors import Retryable
from pipeline.core.trail import Day, Finding, Head, Heads, Keys, Record, Sealed, seal_head
from pipeline.stores.postgres import Connection

MOST_ATTEMPTS = 100
"""The most attempts to add one head. Each failed one means that another process has added a head."""
ROWS_AT_ONCE = 500
"""Records in memory during a check; a hostile one has 4 MB (migration 0051)."""
_COLUMNS: LiteralString = (
    "chain, number, at, tenant, actor, credential, access, action, object, documents, decision, reason, address,"
    " request, process, key_id, mac"
)
_OF_DAY = sql.SQL("SELECT {columns} FROM trail.records WHERE day = %s ORDER BY day, chain, number").format(
    columns=sql.SQL(_COLUMNS)
)
_HEADS = sql.SQL("SELECT number, at, day, chain, count, digest, key_id, mac FROM trail.heads ORDER BY number")


class PlaceTaken(Retryable):
    """Another record has this place in its chain, or an open transaction locks it. A writer cannot see which, because
    every login may add records."""


class HeadLocked(Retryable):
    """An open transaction locks the number of the next head."""


async def add(connection: Connection, records: Sequence[Sealed]) -> None:
    """Add all of these records or none, in one statement. Raises PlaceTaken, psycopg.Error."""
    row = sql.SQL("(%s, %s, %s, %s, %s, %s, %s, %s::text[], %s, %s, %s::uuid[], %s, %s, %s, %s, %s, %s, %s)")
    statement = sql.SQL("INSERT INTO trail.records (day, {columns}) VALUES {rows}").format(
        columns=sql.SQL(_COLUMNS), rows=sql.SQL(", ").join([row] * len(records))
    )
    values = [value for sealed in records for value in _values(sealed)]
    try:
        await connection.execute(statement, values)
    except (UniqueViolation, LockNotAvailable) as error:
        raise PlaceTaken("another record has this place in the audit trail", service="postgres") from error


async def prepare(connection: Connection, day: date) -> None:
    """Create the partition for records of this day, which is today or close to it. Raises psycopg.Error."""
    cursor = await connection.execute("SELECT to_regclass(%s) IS NULL", [f"trail.records_{day:%Y%m%d}"])
    if (await cursor.fetchone() or [False])[0]:
        await connection.execute("SELECT trail.prepare()")


async def add_head(connection: Connection, keys: Keys, at: datetime, last: Sealed) -> Head:
    """Add a head, which records that at the time ``at`` the chain ended with the record ``last``. The caller's
    transaction can go on after a failure. Raises HeadLocked, psycopg.Error."""
    for attempt in range(1, MOST_ATTEMPTS + 1):
        newest = await newest_head(connection)
        number, previous = (1, b"") if newest is None else (newest.number + 1, newest.mac)
        head = Head(number, at.astimezone(UTC), last.record.day, last.chain, last.number, last.mac, keys.id)
        head = seal_head(keys, head, previous)
        try:
            async with connection.transaction():
                await connection.execute(
                    "INSERT INTO trail.heads (number, at, day, chain, count, digest, key_id, mac)"
                    " VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
                    [head.number, head.at, head.day, head.chain, head.count, head.digest, head.key_id, head.mac],
                )
        except UniqueViolation:  # another process has added this number meanwhile
            if attempt == MOST_ATTEMPTS:
                raise
        except LockNotAvailable as error:
            raise HeadLocked("an open transaction holds the audit trail's next head", service="postgres") from error
        else:
            return head
    raise AssertionError


def _values(sealed: Sealed) -> list[Any]:
    record = sealed.record
    return [
        record.day,
        sealed.chain,
        sealed.number,
        record.at,
        record.tenant,
        record.actor,
        record.credential,
        list(record.access),
        record.action,
        record.object,
        list(record.documents),
        record.decision,
        record.reason,
        record.address,
        record.request,
        sealed.process,
        sealed.key_id,
        sealed.mac,
    ]


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """A selection of records; None and empty match any."""

    document: UUID | None = None
    """The document that was shown, or requested without success."""
    person: str | None = None
    """The person who did it, or on whose access it was done."""
    names: Sequence[str] = ()
    """The names that ``Keys.names`` gives the person: also matches the records about that person."""
    tenant: str | None = None
    action: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    after: str | None = None
    """The last record of the page before, as ``place_of`` writes it."""

    def where(self) -> tuple[sql.Composable, dict[str, Any]]:
        """A condition and its parameters. Raises ValueError for an ``after`` that is no place."""
        conditions: list[LiteralString] = []
        selection: dict[str, Any] = {}
        if self.document is not None:
            conditions.append("(documents @> ARRAY[%(document)s::uuid] OR object = %(document_named)s)")
            selection |= {"document": self.document, "document_named": f"document:{self.document}"}
        if self.person is not None:
            conditions.append(
                "(actor = %(person)s OR access @> ARRAY[%(user)s::text] OR object <> '' AND object = ANY(%(names)s))"
            )
            selection |= {"person": self.person, "user": f"user:{self.person}", "names": list(self.names)}
        if self.tenant is not None:
            conditions.append("tenant = %(tenant)s")
            selection["tenant"] = self.tenant
        if self.action is not None:
            conditions.append("action = %(action)s")
            selection["action"] = self.action
        if self.since is not None:  # the day besides: partitions that cannot hold any are not looked at
            conditions.append("at >= %(since)s AND day >= %(first_day)s")
            selection |= {"since": self.since, "first_day": self.since.astimezone(UTC).date()}
        if self.until is not None:
            conditions.append("at < %(until)s AND day <= %(last_day)s")
            selection |= {"until": self.until, "last_day": self.until.astimezone(UTC).date()}
        if self.after is not None:
            at, chain, number = _place(self.after)
            conditions.append(
                "day <= %(after_day)s AND (at < %(after_at)s OR at = %(after_at)s"
                " AND (chain, number) > (%(after_chain)s, %(after_number)s))"
            )
            selection |= {"after_at": at, "after_day": at.date(), "after_chain": chain, "after_number": number}
        return sql.SQL(" AND ").join(map(sql.SQL, conditions)) if conditions else sql.SQL("true"), selection


def place_of(sealed: Sealed) -> str:
    """The position of a record, for the next page."""
    return f"{sealed.record.at.isoformat()}_{sealed.chain}_{sealed.number}"


def _place(text: str) -> tuple[datetime, UUID, int]:
    at, chain, number = text.split("_")
    return datetime.fromisoformat(at).astimezone(UTC), UUID(chain), int(number)


async def page(connection: Connection, chosen: RecordFilter, limit: int) -> list[Sealed]:
    """At most ``limit`` matching records, the newest first. Raises ValueError, psycopg.Error."""
    condition, selection = chosen.where()
    cursor = await connection.execute(
        sql.SQL(
            "SELECT {columns} FROM trail.records WHERE {condition} ORDER BY at DESC, chain, number LIMIT %(limit)s"
        ).format(columns=sql.SQL(_COLUMNS), condition=condition),
        selection | {"limit": limit},
    )
    return [_sealed(row) for row in await cursor.fetchall()]


async def days(connection: Connection) -> list[date]:
    """The days that have a partition by its name, or a record, in order. Whoever may create a partition chooses its
    name: in one that is named after another day, no check would read the records. Raises psycopg.Error."""
    cursor = await connection.execute(
        "SELECT to_date(right(c.relname, 8), 'YYYYMMDD') FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent = 'trail.records'::regclass AND c.relname ~ '^records_[0-9]{8}$' ORDER BY 1"
    )
    named = [day for (day,) in await cursor.fetchall()]
    cursor = await connection.execute(
        sql.SQL("SELECT DISTINCT day FROM trail.records WHERE {}").format(_between(named))
    )
    return sorted({*named, *(day for (day,) in await cursor.fetchall())})


def _between(named: Sequence[date]) -> sql.Composable:
    """The condition that a day is not one of these, which are in order. With ranges of constants, Postgres locks only
    the partitions that hold such days: those of all days would in a few years fill the server's table of locks."""
    if not named:
        return sql.SQL("true")
    ranges = [sql.SQL("day < {} OR day >= {} + 1").format(sql.Literal(named[0]), sql.Literal(named[-1]))]
    for before, after in pairwise(named):
        if after - before > timedelta(1):
            ranges.append(sql.SQL("day >= {} + 1 AND day < {}").format(sql.Literal(before), sql.Literal(after)))
    return sql.SQL(" OR ").join(ranges)


async def of_day(connection: Connection, day: date) -> AsyncIterator[Sealed]:
    """The records of a day in the order that a check needs. The caller holds a transaction. Raises psycopg.Error."""
    async with connection.cursor("trail") as cursor:
        cursor.itersize = ROWS_AT_ONCE
        await cursor.execute(_OF_DAY, [day])
        async for row in cursor:
            yield _sealed(row)


async def heads(connection: Connection) -> AsyncIterator[Head]:
    """All heads, in order. The caller holds a transaction. Raises psycopg.Error."""
    async with connection.cursor("heads") as cursor:
        cursor.itersize = ROWS_AT_ONCE
        await cursor.execute(_HEADS)
        async for row in cursor:
            yield _as_head(row)


async def newest_head(connection: Connection) -> Head | None:
    """The head with the highest number; None: there is none. Raises psycopg.Error."""
    cursor = await connection.execute(_HEADS + sql.SQL(" DESC LIMIT 1"))
    row = await cursor.fetchone()
    return _as_head(row) if row else None


MOST_FINDINGS = 1_000


@dataclass(slots=True)
class TrailReport:
    """The result of a check: how much was read, and what was wrong."""

    records: int = 0
    heads: int = 0
    findings: list[Finding] = field(default_factory=list)
    """The first MOST_FINDINGS: whoever may add records may add millions that are not right."""
    more: int = 0
    """The number of further findings."""

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            if len(self.findings) < MOST_FINDINGS:
                self.findings.append(finding)
            else:
                self.more += 1


async def examine(
    connection: Connection,
    keys: Keys,
    *,
    retention_days: float,
    since: datetime | None,
    noted: Collection[tuple[int, bytes]],
) -> TrailReport:
    """Read the whole trail and check it. retention_days: the age in days up to which records must exist; 0: all must.
    since: check only records of this day and later. noted: numbers and codes of heads that were stored outside of
    Postgres. Raises psycopg.Error."""
    now = datetime.now(UTC)
    first = since.astimezone(UTC).date() if since else date.min
    report, known = TrailReport(), Heads(keys, oldest=_oldest(retention_days), noted=noted)
    async with connection.transaction():  # before the records, of which more may be added meanwhile
        async for head in heads(connection):
            report.add(known.head(head))
    report.add(known.end())
    report.heads = known.count
    present = await days(connection)
    for day in sorted(known.of.keys() - {*present}):
        if day >= max(first, _oldest(retention_days) or date.min):
            report.add([Finding("day-removed", day.isoformat())])
    for day in present:
        if day >= first:
            checked = Day(keys, day, known.of.pop(day, {}), now)
            async with connection.transaction():
                async for sealed in of_day(connection, day):
                    report.add(checked.record(sealed))
            if checked.records or day >= (_oldest(retention_days) or date.min):  # else its age took it meanwhile
                report.add(checked.end())
            report.records += checked.records
    return report


def _oldest(retention_days: float) -> date | None:
    """The oldest day whose records must exist now; None: those of all days. A check takes hours, and retention goes on
    meanwhile."""
    return (datetime.now(UTC) - timedelta(days=retention_days)).date() if retention_days else None


def _as_head(row: Sequence[Any]) -> Head:
    number, at, day, chain, count, digest, key_id, mac = row
    return Head(number, at.astimezone(UTC), day, chain, count, bytes(digest), key_id, bytes(mac))


def _sealed(row: Sequence[Any]) -> Sealed:
    (
        chain,
        number,
        at,
        tenant,
        actor,
        credential,
        access,
        action,
        object_,
        documents,
        decision,
        reason,
        address,
        request,
        process,
        key_id,
        mac,
    ) = row
    record = Record(
        at,
        actor,
        credential,
        action,
        tenant,
        tuple(map(str, access)),  # one from before migration 0051 may hold no text
        object_,
        tuple(documents),
        decision,
        reason,
        address,
        request,
    )
    return Sealed(record, chain, number, process, key_id, bytes(mac))


def as_json(sealed: Sealed) -> dict[str, Any]:
    """A record as JSON, without its authentication code."""
    record = sealed.record
    return {
        "at": record.at.isoformat(),
        "tenant": record.tenant,
        "actor": record.actor,
        "credential": record.credential,
        "access": list(record.access),
        "action": record.action,
        "object": record.object or None,
        "documents": [str(id_) for id_ in record.documents],
        "decision": record.decision,
        "reason": record.reason or None,
        "address": record.address or None,
        "request": record.request or None,
        "process": sealed.process,
        "chain": str(sealed.chain),
        "number": sealed.number,
    }
