"""``connectors.runner.freshness``: what is published and not applied, and up to which time a source is complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from tests.simulation.database import Row, Statement, Transaction
from tests.simulation.statements.registry import GENERATION, changed, statement, written_for
from tests.simulation.statements.runner import ITEMS, PRINCIPALS, greatest, rows_of

PUBLICATIONS, FRESHNESS = "connector_publications", "connector_freshness"
NEW: Row = {
    "epoch": 0,
    "tracked_since": None,
    "equal_at": None,
    "every_seconds": None,
    "listed_at": None,
    "complete_until": None,
    "access_until": None,
    "groups_until": None,
    "has_gaps": False,
    "generation": None,
    "reopened_at": None,
}


@statement("INSERT INTO connector_publications AS mine")
async def _record(tx: Transaction, p: Any) -> int:
    tenant, source, *columns = p
    for id_, kind, observed_at, version in zip(*columns, strict=True):
        key = tenant, source, id_, kind
        row = await tx.lock(PUBLICATIONS, *key) or {"observed_at": None, "since": tx.now(), "version": None}
        newest = greatest(row["observed_at"], observed_at), greatest(row["version"], version)
        await tx.put(PUBLICATIONS, changed(row, observed_at=newest[0], version=newest[1]), *key)
    return len(columns[0])


@statement("INSERT INTO connector_freshness AS f")
async def _begin(tx: Transaction, p: Any) -> int:
    tenant, source, epoch, every = p
    row = await tx.lock(FRESHNESS, tenant, source) or NEW
    if row["epoch"] >= epoch:
        return 0
    if row["epoch"] != epoch - 1 or row is NEW:
        row = changed(row, tracked_since=tx.now(), equal_at=None)
    await tx.put(FRESHNESS, changed(row, epoch=epoch, every_seconds=every), tenant, source)
    return 1


@statement("SELECT forget_applied_publications(")
async def _forget(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, most = p
    oldest = sorted(rows_of(tx, PUBLICATIONS, tenant, source), key=lambda pair: pair[1]["since"])[:most]
    applied = [key for key, row in oldest if _is_applied(tx, key[2], key[3], row["observed_at"])]
    for key in applied:
        row = await tx.lock(PUBLICATIONS, *key)
        if row is not None and _is_applied(tx, key[2], key[3], row["observed_at"]):
            await tx.put(PUBLICATIONS, None, *key)
    return [(len(applied),)]


def _is_applied(tx: Transaction, id_: Any, kind: str, observed_at: datetime) -> bool:
    document = tx.get("documents", id_)
    columns = {"access": ["access_observed_at"], "deletion": ["deleted_floor"]}.get(
        kind, ["observed_at", "deleted_floor"]
    )
    times = [document[column] for column in columns] if document is not None else []
    return any(time is not None and time >= observed_at for time in times) and not any(
        key[0] == id_ for key, _ in _pending(tx)
    )


def _pending(tx: Transaction) -> Iterator[tuple[tuple[Any, ...], Row]]:
    return ((key, row) for key, row in tx.rows("index_state") if key[1] == GENERATION and row["seq"] < row["want_seq"])


@statement("SELECT clock_timestamp(), f.tracked_since")
def _state(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, epoch = p
    row = tx.get(FRESHNESS, tenant, source)
    if row is None or row["epoch"] != epoch:
        return []
    since = [publication["since"] for _, publication in rows_of(tx, PUBLICATIONS, tenant, source)]
    items = [item for _, item in rows_of(tx, ITEMS, tenant, source)]
    return [
        (
            tx.now(),
            row["tracked_since"],
            row["equal_at"] is not None,
            row["generation"],
            row["reopened_at"],
            GENERATION,
            min(since, default=None),
            any(item["in_doubt_since"] is not None for item in items),
            any(item["problem_code"] is not None for item in items),
        )
    ]


@statement("SELECT source_is_settled(")
def _settled(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, until = p
    mine = {key[0] for key, row in tx.rows("documents") if (row["tenant"], row["source"]) == (tenant, source)}
    return [(not any(key[0] in mine and row["pending_since"] <= until for key, row in _pending(tx)),)]


@statement("SELECT members_are_applied(")
def _members(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    for key, row in rows_of(tx, PRINCIPALS, *p):
        accepted = tx.get("memberships", key[0], key[2], key[1])
        if not row["digest"] or accepted is None or accepted["observed_at"] < row["observed_at"]:
            return [(False,)]
    return [(True,)]


@statement("UPDATE connector_freshness f SET reopened_at")
async def _hold(tx: Transaction, p: Any) -> int:
    documents = [row for key, row in tx.rows("documents") if key[0] in p[0]]
    sources = {(row["tenant"], row["source"]) for row in documents}
    for key in sorted(sources):
        if (row := await tx.lock(FRESHNESS, *key)) is not None:
            await tx.put(FRESHNESS, changed(row, reopened_at=tx.now()), *key)
    return len(sources)


@statement("UPDATE connector_freshness SET equal_at = NULL")
async def _forget_all(tx: Transaction, _p: Any) -> int:
    keys = [key for key, _ in tx.rows(FRESHNESS)]
    for key in keys:
        row = await tx.lock(FRESHNESS, *key)
        await tx.put(FRESHNESS, changed(row, equal_at=None, reopened_at=tx.now()), *key)
    return len(keys)


@written_for("UPDATE connector_freshness SET")
def _update(text: str) -> Statement:
    assigned = re.findall(r"(\w+) = ", text[: text.index(" WHERE ")])

    async def update(tx: Transaction, p: Any) -> int:
        sort = assigned[0]
        *values, tenant, source, epoch = p[: _values_of(sort) + 3]
        row = await tx.lock(FRESHNESS, tenant, source)
        if row is None or row["epoch"] != epoch:
            return 0
        condition = p[_values_of(sort) + 3 :]
        if sort == "equal_at":
            if row["equal_at"] is not None or row["tracked_since"] >= condition[0]:
                return 0
            row = changed(row, equal_at=tx.now())
        elif sort == "listed_at":
            if row["listed_at"] is not None and row["listed_at"] >= condition[0]:
                return 0
            row = changed(row, listed_at=values[0])
        elif sort == "groups_until":
            row = changed(row, groups_until=greatest(row["groups_until"], values[0]))
        else:
            if row["reopened_at"] != condition[0]:
                return 0
            began, exact, _, generation, has_gaps = values
            row = changed(
                row,
                access_until=greatest(row["access_until"], began),
                complete_until=greatest(row["complete_until"], began) if exact else row["complete_until"],
                generation=generation,
                has_gaps=has_gaps,
                reopened_at=None,
            )
        await tx.put(FRESHNESS, row, tenant, source)
        return 1

    return update


def _values_of(sort: str) -> int:
    return {"equal_at": 0, "listed_at": 1, "groups_until": 1}.get(sort, 5)
