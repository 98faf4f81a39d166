"""``connectors.runner.rows``: what was published of documents, and the comparison with the ledger."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from tests.simulation.database import Row, Statement, Transaction
from tests.simulation.statements.registry import changed, statement, tags_of, written_for
from tests.simulation.statements.runner import (
    DIFFERENCES,
    ITEMS,
    NEVER,
    NEW_ITEM,
    SOURCES,
    change,
    columns_of,
    greatest,
    read,
    rows_of,
    stamped,
)


@statement("SELECT observed_at FROM connector_sources")
def _last_stamp(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    row = tx.get(SOURCES, *p)
    return [] if row is None else [(row["observed_at"],)]


@written_for("FROM connector_items WHERE tenant = %s AND source = %s AND external_id = ANY(%s);")
def _find(text: str) -> Statement:
    names = columns_of(text, "SELECT ")

    def find(tx: Transaction, p: Any) -> list[Row]:
        tenant, source, ids = p
        rows = ((id_, tx.get(ITEMS, tenant, source, id_)) for id_ in set(ids))
        return [read(names, id_, row) for id_, row in rows if row is not None]

    return find


@statement("SELECT external_id, version IS NOT NULL AND NOT gone, swept_at < %s, acl_tags FROM connector_items")
def _sweepable(tx: Transaction, p: Any) -> list[Row]:
    since, tenant, source, after, limit = p
    rows = sorted(
        (key[2], row)
        for key, row in rows_of(tx, ITEMS, tenant, source)
        if key[2] > after and (not row["gone"] or row["version"] is None or row["problem_code"] is not None)
    )
    return [
        {
            "external_id": id_,
            "is_published": is_published(row),
            "is_unchanged": row["swept_at"] < since,
            "acl_tags": row["acl_tags"],
        }
        for id_, row in rows[:limit]
    ]


@written_for("FROM connector_items WHERE tenant = %s AND source = %s AND external_id > %s")
def _page(text: str) -> Statement:
    names = columns_of(text, "SELECT ")

    def page(tx: Transaction, p: Any) -> list[Row]:
        tenant, source, after, limit = p
        rows = sorted((key[2], row) for key, row in rows_of(tx, ITEMS, tenant, source) if key[2] > after)
        return [read(names, id_, row) for id_, row in rows[:limit]]

    return page


@statement("INSERT INTO connector_items (tenant, source, scope, external_id, version, in_doubt_since) SELECT")
async def _intend(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, stamp, ids, versions = p
    returned = []
    for id_, version in zip(ids, versions, strict=True):
        row = await tx.lock(ITEMS, tenant, source, id_) or changed(NEW_ITEM, swept_at=tx.now())
        after = changed(row, version=version, in_doubt_since=stamp, fingerprint=None, gone=False)
        await tx.put(ITEMS, after, tenant, source, id_)
        returned.append((id_, row["withdrawn_at"] is not None))
    return returned


@statement("SELECT external_id FROM connector_items WHERE tenant = %s AND source = %s AND in_doubt_since IS NOT NULL")
def _in_doubt(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, limit = p
    rows = rows_of(tx, ITEMS, tenant, source)
    return [(k[2],) for k, r in rows if r["in_doubt_since"] is not None and r["swept_at"] > NEVER][:limit]


@written_for("INSERT INTO connector_items AS mine (tenant, source, scope, external_id, version, fingerprint")
def _save(text: str) -> Statement:
    names = columns_of(text, "(tenant, source, scope, ")
    assert names[0] == "external_id"
    listed = {"unlisted_since": None} if "unlisted_since = NULL" in text else {}

    async def save(tx: Transaction, p: Any) -> int:
        tenant, source, id_, *values, stamp, _, _ = p
        row = await tx.lock(ITEMS, tenant, source, id_) or NEW_ITEM
        after = changed(row, **dict(zip(names[1:], values, strict=True)), swept_at=tx.now(), **listed)
        if (marked := row["in_doubt_since"]) is not None and marked > stamp:
            known = [item for item in (row["version"], after["version"]) if item is not None]
            after = changed(after, in_doubt_since=marked, gone=False, version=max(known, default=None))
        await tx.put(ITEMS, after, tenant, source, id_)
        return 1

    return save


@statement("^INSERT INTO connector_sources AS mine VALUES (%s, %s, %s) ON CONFLICT")
async def _stamp(tx: Transaction, p: Any) -> int:
    await stamped(tx, *p)
    return 1


def is_published(row: Row) -> bool:
    return row["version"] is not None and not row["gone"]


@statement("SELECT problem_code, count(*) FROM connector_items")
def _problems(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    codes = sorted(row["problem_code"] for _, row in rows_of(tx, ITEMS, *p) if row["problem_code"] is not None)
    return [(code, codes.count(code)) for code in dict.fromkeys(codes)]


@statement("UPDATE connector_items SET unlisted_since = %s")
async def _mark_unlisted(tx: Transaction, p: Any) -> int:
    since, tenant, source, ids, before = p
    rows = rows_of(tx, ITEMS, tenant, source)
    keys = [k for k, r in rows if k[2] in ids and r["swept_at"] < before and r["unlisted_since"] is None]
    return await change(tx, ITEMS, keys, lambda row: changed(row, unlisted_since=since))


@statement("^DELETE FROM connector_items WHERE tenant = %s AND source = %s AND")
async def _forget_unpublished(tx: Transaction, p: Any) -> int:
    tenant, source, ids, since = p
    rows = [(k, r) for k, r in rows_of(tx, ITEMS, tenant, source) if k[2] in ids]
    gone = [k for k, r in rows if r["version"] is None and r["swept_at"] < since]
    for key in gone:
        await tx.put(ITEMS, None, *key)
    return len(gone)


@statement("UPDATE connector_items SET problem_code = NULL")
async def _forget_problems(tx: Transaction, p: Any) -> int:
    tenant, source, ids, since = p
    rows = rows_of(tx, ITEMS, tenant, source)
    keys = [k for k, r in rows if k[2] in ids and r["gone"] and r["swept_at"] < since]
    return await change(tx, ITEMS, keys, lambda row: changed(row, problem_code=None, problem_message=None))


def is_alive(row: Row | None) -> bool:
    return row is not None and row["deleted_at"] is None and row["version"] is not None


def _has_letter(tx: Transaction, document: UUID) -> bool:
    """Histories are shorter than the week for which a letter counts, and none is replayed."""
    return any(row["document"] == document and row["stage"] == "detect" for _, row in tx.rows("dead_letters"))


@statement("FROM ledger_documents(%s, %s, %s, %s)")
def _ledger_documents(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, after, limit = p
    mine = sorted(
        (key[0], d)
        for key, d in tx.rows("documents")
        if (d["tenant"], d["source"]) == (tenant, source) and is_alive(d) and key[0] > after
    )
    results = []
    for id_, d in mine[:limit]:
        acl, required = tags_of(tx, d["access_id"])
        letter = _has_letter(tx, id_)
        results.append(
            (
                id_,
                d["external_id"],
                d["version"],
                d["access_observed_at"],
                acl or [],
                required or [],
                letter,
            )
        )
    return results


@statement("SELECT ledger_lacks(%s)")
def _ledger_lacks(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(i,) for i in p[0] if not is_alive(tx.get("documents", i)) and not _has_letter(tx, i)]


@statement("SELECT id, at FROM ledger_letters(%s)")
def _ledger_letters(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    newest: dict[UUID, datetime] = {}
    for _, row in tx.rows("dead_letters"):
        if row["document"] in p[0] and row["stage"] == "detect":
            newest[row["document"]] = greatest(row["at"], newest.get(row["document"]))
    return list(newest.items())


@statement("SELECT subject, name, published, seen_at, repaired_at FROM connector_differences")
def _differences(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(*k[2:], r["published"], r["seen_at"], r["repaired_at"]) for k, r in rows_of(tx, DIFFERENCES, *p)]


@statement("INSERT INTO connector_differences AS mine")
async def _note_differences(tx: Transaction, p: Any) -> int:
    tenant, source, *columns = p
    for subject, name, published, seen_at in sorted(zip(*columns, strict=True)):
        key = tenant, source, subject, name
        row = await tx.lock(DIFFERENCES, *key) or {"repaired_at": None}
        await tx.put(DIFFERENCES, changed(row, published=published, seen_at=seen_at), *key)
    return len(columns[0])


def _named(p: Any) -> list[tuple[Any, ...]]:
    subjects, names, tenant, source = p
    return [(tenant, source, *key) for key in zip(subjects, names, strict=True)]


@statement("DELETE FROM connector_differences mine")
async def _forget_differences(tx: Transaction, p: Any) -> int:
    keys = [key for key in _named(p) if tx.get(DIFFERENCES, *key) is not None]
    for key in keys:
        await tx.put(DIFFERENCES, None, *key)
    return len(keys)


@statement("UPDATE connector_differences mine SET repaired_at")
async def _note_repaired(tx: Transaction, p: Any) -> int:
    return await change(tx, DIFFERENCES, _named(p), lambda row: changed(row, repaired_at=tx.now()))


@statement("SELECT stage, until FROM handled")
def _handled(tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [(key[0], row["until"]) for key, row in tx.rows("handled")]


@statement("INSERT INTO connector_items AS mine (tenant, source, scope, external_id, version, swept_at")
async def _doubt(tx: Transaction, p: Any) -> int:
    tenant, source, stamp, ids, versions, kinds = p
    count = 0
    for id_, version, kind in sorted(zip(ids, versions, kinds, strict=True)):
        row = await tx.lock(ITEMS, tenant, source, id_)
        since = row["in_doubt_since"] if row is not None else None
        marked = {"in_doubt_since": since or stamp, "difference": kind}
        if row is None:
            after = changed(NEW_ITEM, version=version, swept_at=NEVER, **marked)
        else:
            highest = greatest(row["version"], version)
            after = changed(row, version=highest, fingerprint=None, gone=False, **marked)
        await tx.put(ITEMS, after, tenant, source, id_)
        count += 1
    return count
