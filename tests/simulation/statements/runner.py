"""``connectors.runner.state`` and ``connectors.runner.state``, and what all models of connectors use.

Statements that name their columns are read for them, so that a new column needs no change here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import psycopg

from tests.simulation.database import Row, Session, Transaction
from tests.simulation.statements.registry import changed, statement

NEVER = datetime.min.replace(tzinfo=UTC)
"""'-infinity'"""
SOURCES, ITEMS, HOLDERS = "connector_sources", "connector_items", "connectors"
GROUPS, PRINCIPALS, DIFFERENCES = "connector_groups", "connector_principals", "connector_differences"
MEMORY = "connector_memory"

NEW_ITEM: Row = {
    "version": None,
    "fingerprint": None,
    "revision": None,
    "acl_tags": [],
    "required_tags": [],
    "problem_code": None,
    "problem_message": None,
    "content_at": None,
    "access_at": None,
    "gone": False,
    "in_doubt_since": None,
    "difference": None,
    "withdrawn_at": None,
    "unlisted_since": None,
}
NEW_HOLDER: Row = {
    "epoch": 1,
    "changes_cursor": None,
    "full_cursor": None,
    "full_state": "due",
    "loaded_at": None,
    "activities": {},
    "paused": False,
    "reconciliation": None,
    "comparisons": 0,
}


def greatest(*given: Any) -> Any:
    """As SQL has it: of those that are not NULL."""
    return max((item for item in given if item is not None), default=None)


def read(names: Sequence[str], id_: str, row: Row) -> Row:
    """A row of ``connector_items`` as these columns, of which some only ask whether there is something."""
    values = {}
    for name in names:
        match = re.fullmatch(r"((\w+)_(?:at|since)) IS NOT NULL", name)
        if match is not None:
            values[f"is_{match[2]}"] = row[match[1]] is not None
        else:
            values[name] = id_ if name == "external_id" else row[name]
    return values


def columns_of(text: str, before: str) -> list[str]:
    match = re.search(re.escape(before) + r"([^)]*?)(?:\)| FROM)", " ".join(text.split()))
    assert match, text
    return [column.strip() for column in match[1].split(",")]


def rows_of(tx: Transaction, table: str, tenant: str, source: str) -> Iterator[tuple[tuple[Any, ...], Row]]:
    return ((key, row) for key, row in tx.rows(table) if key[:2] == (tenant, source))


async def change(tx: Transaction, table: str, keys: Iterable[tuple[Any, ...]], with_: Callable[[Row], Row]) -> int:
    """UPDATE: the rows as they are once their locks are held."""
    count = 0
    for key in sorted(keys):
        row = await tx.lock(table, *key)
        if row is not None:
            await tx.put(table, with_(row), *key)
            count += 1
    return count


async def stamped(tx: Transaction, tenant: str, source: str, stamp: datetime) -> None:
    row = await tx.lock(SOURCES, tenant, source)
    await tx.put(SOURCES, {"observed_at": greatest(stamp, row and row["observed_at"])}, tenant, source)


@statement("FROM pg_control_system() c LEFT JOIN fence f ON true")
def _fence(_tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [(1, "00000001", 1, 1, "open")]  # workers and connectors are stopped while a ledger is recovered


@statement("SELECT lead_connector(%s, %s)")
def _try_lease(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    holders = tx.database.session_locks
    return [(holders.setdefault(tuple(p), _session(tx)) is _session(tx),)]


def _session(tx: Transaction) -> Session:
    session: Session = tx.notes["session"]
    if session.lost:  # while the statement was on its way
        raise psycopg.OperationalError("the connection is lost")
    return session


@statement("INSERT INTO connectors AS mine (tenant, source, kind, epoch")
async def _take(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    key = tuple(p[:2])
    _session(tx)
    row = await tx.lock(HOLDERS, *key)
    row = NEW_HOLDER if row is None else changed(row, epoch=row["epoch"] + 1)
    await tx.put(HOLDERS, row, *key)
    return [(row["epoch"],)]


@statement("SELECT 1 FROM connectors WHERE tenant = %s AND source = %s AND epoch = %s FOR NO KEY UPDATE")
async def _fenced(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(1,)] if await _holds(tx, *p) else []


@statement("^SELECT 1;")
def _alive(tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [(1,)] if _session(tx) else []


async def _holds(tx: Transaction, tenant: str, source: str, epoch: int) -> bool:
    """Lock the instance's row if this epoch has it."""
    row = tx.get(HOLDERS, tenant, source)
    if row is None or row["epoch"] != epoch:
        return False
    row = await tx.lock(HOLDERS, tenant, source)
    return row is not None and row["epoch"] == epoch


@statement("SELECT changes_cursor, full_cursor, full_state, loaded_at, activities FROM connectors")
def _reading(tx: Transaction, p: Any) -> list[Row]:
    row = tx.get(HOLDERS, *p)
    names = ("changes_cursor", "full_cursor", "full_state", "loaded_at", "activities")
    return [] if row is None else [{name: row[name] for name in names}]


async def _set(tx: Transaction, me: Sequence[Any], **values: Any) -> int:
    if not await _holds(tx, *me):
        return 0
    return await change(tx, HOLDERS, [tuple(me[:2])], lambda row: changed(row, **values))


@statement("UPDATE connectors SET full_cursor = coalesce(%s, full_cursor)")
async def _keep_cursors(tx: Transaction, p: Any) -> int:
    full, changes, *me = p
    names = {"full_cursor": full, "changes_cursor": changes}
    return await _set(tx, me, **{name: json.obj for name, json in names.items() if json is not None})


@statement("UPDATE connectors SET changes_cursor = %s")
async def _started(tx: Transaction, p: Any) -> int:
    return await _set(tx, p[1:], changes_cursor=p[0].obj)


@statement("UPDATE connectors SET full_state = 'done'")
async def _loaded(tx: Transaction, p: Any) -> int:
    row = tx.get(HOLDERS, p[0], p[1])
    since = row and row["loaded_at"]
    return await _set(tx, p, full_state="done", full_cursor=None, loaded_at=since or tx.began)


@statement("UPDATE connectors SET full_state = %s, full_cursor = NULL")
async def _full(tx: Transaction, p: Any) -> int:
    return await _set(tx, p[1:], full_state=p[0], full_cursor=None)


@statement("UPDATE connectors SET guard = %s")
async def _guard(tx: Transaction, p: Any) -> int:
    return await _set(tx, p[1:])


@statement("UPDATE connectors SET reconciliation = %s")
async def _reconciled(tx: Transaction, p: Any) -> int:
    row = tx.get(HOLDERS, p[1], p[2])
    return await _set(tx, p[1:], reconciliation=p[0].obj, comparisons=row["comparisons"] + 1 if row else 0)


@statement("UPDATE connectors SET activities = %s, problems = %s, seen_at = clock_timestamp()")
async def _beat(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(False,)] if await _set(tx, p[3:], activities=p[0].obj) else []


@statement("SELECT id, action, argument FROM connector_asks", "UPDATE connector_asks")
def _no_asks(_tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return []


@statement("UPDATE connectors SET seen_at = NULL")
async def _leave(tx: Transaction, p: Any) -> int:
    return await _set(tx, p)


@statement("SELECT value FROM connector_memory")
def _remembered(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    row = tx.get(MEMORY, *p)
    return [(row["value"],)] if row else []


@statement("INSERT INTO connector_memory VALUES")
async def _remember(tx: Transaction, p: Any) -> int:
    await tx.put(MEMORY, {"value": p[3].obj}, *p[:3])
    return 1


@statement("DELETE FROM connector_memory")
async def _forget(tx: Transaction, p: Any) -> int:
    known = await tx.lock(MEMORY, *p) is not None
    await tx.put(MEMORY, None, *p)
    return int(known)
