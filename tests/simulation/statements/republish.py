"""``pipeline.maintenance.recover``: recover has the connectors look again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pipeline.core.identity import document_id, qualify
from tests.simulation.database import Row, Transaction
from tests.simulation.statements.registry import changed, statement, tags_of
from tests.simulation.statements.rows import is_alive, is_published
from tests.simulation.statements.runner import ITEMS, NEVER, NEW_ITEM, PRINCIPALS, SOURCES, change, greatest


def _document(tx: Transaction, key: Sequence[Any]) -> Row | None:
    return tx.get("documents", document_id(*key))


def _differs(tx: Transaction, key: Sequence[Any], item: Row) -> bool:
    if not is_published(item):
        return False
    d = _document(tx, key)
    if d is None or d["deleted_at"] is not None or d["version"] != item["version"]:
        return True
    theirs = [tags if tags is None else tuple(tags) for tags in tags_of(tx, d["access_id"])]
    return theirs != [qualify(key[1], item["acl_tags"]), qualify(key[1], item["required_tags"])]


async def _look_again(tx: Transaction, keys: Collection[tuple[Any, ...]], **values: Any) -> int:
    again = {"fingerprint": None, "revision": None, "in_doubt_since": tx.now()}
    return await change(tx, ITEMS, keys, lambda row: changed(row, **again, **values))


@statement("UPDATE connector_items mine SET fingerprint = NULL")
async def _publish_again(tx: Transaction, _p: Any) -> int:
    count = 0
    for key, row in list(tx.rows(ITEMS)):
        if _differs(tx, key, row):
            d = _document(tx, key)
            count += await _look_again(tx, [key], version=greatest(row["version"], d and d["version"]))
    return count


@statement("UPDATE connector_items i SET gone = false")
async def _delete_again(tx: Transaction, _p: Any) -> int:
    count = 0
    for key, row in list(tx.rows(ITEMS)):
        d = _document(tx, key)
        if row["gone"] and d is not None and is_alive(d):
            count += await _look_again(tx, [key], gone=False, version=greatest(row["version"], d["version"]))
    return count


@statement("INSERT INTO connector_items (tenant, source, scope, external_id, version, swept_at, in_doubt_since) SELECT")
async def _remember_again(tx: Transaction, _p: Any) -> int:
    count = 0
    for _, d in list(tx.rows("documents")):
        key = d["tenant"], d["source"], d["external_id"]
        if is_alive(d) and tx.get(SOURCES, *key[:2]) is not None and await tx.lock(ITEMS, *key) is None:
            marked = changed(NEW_ITEM, version=d["version"], swept_at=NEVER, in_doubt_since=tx.now())
            await tx.put(ITEMS, marked, *key)
            count += 1
    return count


@statement("UPDATE connector_principals SET digest = ''")
async def _members_again(tx: Transaction, _p: Any) -> int:
    return await change(tx, PRINCIPALS, [k for k, _ in tx.rows(PRINCIPALS)], lambda row: changed(row, digest=b""))
