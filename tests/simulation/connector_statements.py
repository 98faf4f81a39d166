"""What the statements of the connector runner do, in memory: its lease, its rows, its memberships and its state.

Statements that name their columns are read for them, so that a new column needs no change here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg

from pipeline.core.identity import document_id, qualify
from tests.simulation.database import Row, Session, Statement, Transaction
from tests.simulation.statements import changed, statement, tags_of, written_for

NEVER = datetime.min.replace(tzinfo=UTC)
"""'-infinity'"""
SOURCES, ITEMS, HOLDERS = "connector_sources", "connector_items", "connectors"
GROUPS, PRINCIPALS, DIFFERENCES = "connector_groups", "connector_principals", "connector_differences"

NEW_ITEM: Row = {
    "version": None, "fingerprint": None, "revision": None, "acl_tags": [], "required_tags": [], "problem_code": None,
    "problem_message": None, "content_at": None, "access_at": None, "gone": False, "in_doubt_since": None,
    "difference": None, "withdrawn_at": None, "unlisted_since": None,
}  # fmt: skip
NEW_HOLDER: Row = {
    "epoch": 1, "changes_cursor": None, "full_cursor": None, "full_state": "due", "loaded_at": None, "activities": {},
    "paused": False, "reconciliation": None, "comparisons": 0,
}  # fmt: skip


def _greatest(*given: Any) -> Any:
    """As SQL has it: of those that are not NULL."""
    return max((one for one in given if one is not None), default=None)


def _read(names: Sequence[str], id_: str, row: Row) -> Row:
    """A row of ``connector_items`` as these columns, of which some only ask whether there is something."""
    values = {}
    for name in names:
        asked = re.fullmatch(r"((\w+)_(?:at|since)) IS NOT NULL", name)
        if asked is not None:
            values[f"is_{asked[2]}"] = row[asked[1]] is not None
        else:
            values[name] = id_ if name == "external_id" else row[name]
    return values


def _columns(text: str, before: str) -> list[str]:
    found = re.search(re.escape(before) + r"([^)]*?)(?:\)| FROM)", " ".join(text.split()))
    assert found, text
    return [column.strip() for column in found[1].split(",")]


def _mine(tx: Transaction, table: str, tenant: str, source: str) -> Iterator[tuple[tuple[Any, ...], Row]]:
    return ((key, row) for key, row in tx.rows(table) if key[:2] == (tenant, source))


async def _change(tx: Transaction, table: str, keys: Iterable[tuple[Any, ...]], with_: Callable[[Row], Row]) -> int:
    """UPDATE: the rows as they are once their locks are held."""
    count = 0
    for key in sorted(keys):
        row = await tx.lock(table, *key)
        if row is not None:
            await tx.put(table, with_(row), *key)
            count += 1
    return count


async def _stamped(tx: Transaction, tenant: str, source: str, stamp: datetime) -> None:
    row = await tx.lock(SOURCES, tenant, source)
    await tx.put(SOURCES, {"observed_at": _greatest(stamp, row and row["observed_at"])}, tenant, source)


# The lease


@statement("FROM pg_control_system() c LEFT JOIN fence f ON true")
def _fence(_tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [(1, "00000001", 1, 1, "open")]  # workers and connectors are stopped while a ledger is recovered


@statement("SELECT pg_try_advisory_lock(%s, hashtext(%s))")
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


# The instance's state


@statement("SELECT changes_cursor, full_cursor, full_state, loaded_at, activities FROM connectors")
def _reading(tx: Transaction, p: Any) -> list[Row]:
    row = tx.get(HOLDERS, *p)
    names = ("changes_cursor", "full_cursor", "full_state", "loaded_at", "activities")
    return [] if row is None else [{name: row[name] for name in names}]


async def _set(tx: Transaction, me: Sequence[Any], **values: Any) -> int:
    if not await _holds(tx, *me):
        return 0
    return await _change(tx, HOLDERS, [tuple(me[:2])], lambda row: changed(row, **values))


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


# What was published of documents


@statement("SELECT observed_at FROM connector_sources")
def _last_stamp(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    row = tx.get(SOURCES, *p)
    return [] if row is None else [(row["observed_at"],)]


@written_for("FROM connector_items WHERE tenant = %s AND source = %s AND external_id = ANY(%s);")
def _find(text: str) -> Statement:
    names = _columns(text, "SELECT ")

    def find(tx: Transaction, p: Any) -> list[Row]:
        tenant, source, ids = p
        rows = ((id_, tx.get(ITEMS, tenant, source, id_)) for id_ in set(ids))
        return [_read(names, id_, row) for id_, row in rows if row is not None]

    return find


@statement("SELECT external_id, version IS NOT NULL AND NOT gone, swept_at < %s FROM connector_items")
def _sweepable(tx: Transaction, p: Any) -> list[Row]:
    since, tenant, source, after, limit = p
    rows = sorted(
        (key[2], row) for key, row in _mine(tx, ITEMS, tenant, source)
        if key[2] > after and (not row["gone"] or row["version"] is None or row["problem_code"] is not None)
    )  # fmt: skip
    return [
        {"external_id": id_, "is_published": _is_published(row), "is_old": row["swept_at"] < since}
        for id_, row in rows[:limit]
    ]


@written_for("FROM connector_items WHERE tenant = %s AND source = %s AND external_id > %s")
def _page(text: str) -> Statement:
    names = _columns(text, "SELECT ")

    def page(tx: Transaction, p: Any) -> list[Row]:
        tenant, source, after, limit = p
        rows = sorted((key[2], row) for key, row in _mine(tx, ITEMS, tenant, source) if key[2] > after)
        return [_read(names, id_, row) for id_, row in rows[:limit]]

    return page


@statement("INSERT INTO connector_items (tenant, source, scope, external_id, version, in_doubt_since) SELECT")
async def _intend(tx: Transaction, p: Any) -> int:
    tenant, source, stamp, ids, versions = p
    for id_, version in zip(ids, versions, strict=True):
        row = await tx.lock(ITEMS, tenant, source, id_) or changed(NEW_ITEM, swept_at=tx.now())
        after = changed(row, version=version, in_doubt_since=stamp, fingerprint=None, gone=False)
        await tx.put(ITEMS, after, tenant, source, id_)
    return len(ids)


@statement("SELECT external_id FROM connector_items WHERE tenant = %s AND source = %s AND in_doubt_since IS NOT NULL")
def _in_doubt(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, limit = p
    rows = _mine(tx, ITEMS, tenant, source)
    return [(k[2],) for k, r in rows if r["in_doubt_since"] is not None and r["swept_at"] > NEVER][:limit]


@written_for("INSERT INTO connector_items AS mine (tenant, source, scope, external_id, version, fingerprint")
def _save(text: str) -> Statement:
    names = _columns(text, "(tenant, source, scope, ")
    assert names[0] == "external_id"
    listed = {"unlisted_since": None} if "unlisted_since = NULL" in text else {}

    async def save(tx: Transaction, p: Any) -> int:
        tenant, source, id_, *values, stamp, _, _ = p
        row = await tx.lock(ITEMS, tenant, source, id_) or NEW_ITEM
        after = changed(row, **dict(zip(names[1:], values, strict=True)), swept_at=tx.now(), **listed)
        if (doubted := row["in_doubt_since"]) is not None and doubted > stamp:
            known = [one for one in (row["version"], after["version"]) if one is not None]
            after = changed(after, in_doubt_since=doubted, gone=False, version=max(known, default=None))
        await tx.put(ITEMS, after, tenant, source, id_)
        return 1

    return save


@statement("^INSERT INTO connector_sources AS mine VALUES (%s, %s, %s) ON CONFLICT")
async def _stamp(tx: Transaction, p: Any) -> int:
    await _stamped(tx, *p)
    return 1


def _is_published(row: Row) -> bool:
    return row["version"] is not None and not row["gone"]


@statement("SELECT problem_code, count(*) FROM connector_items")
def _problems(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    codes = sorted(row["problem_code"] for _, row in _mine(tx, ITEMS, *p) if row["problem_code"] is not None)
    return [(code, codes.count(code)) for code in dict.fromkeys(codes)]


@statement("UPDATE connector_items SET unlisted_since = %s")
async def _mark_unlisted(tx: Transaction, p: Any) -> int:
    since, tenant, source, ids, before = p
    rows = _mine(tx, ITEMS, tenant, source)
    keys = [k for k, r in rows if k[2] in ids and r["swept_at"] < before and r["unlisted_since"] is None]
    return await _change(tx, ITEMS, keys, lambda row: changed(row, unlisted_since=since))


@statement("^DELETE FROM connector_items WHERE tenant = %s AND source = %s AND")
async def _forget_unpublished(tx: Transaction, p: Any) -> int:
    tenant, source, ids, since = p
    rows = [(k, r) for k, r in _mine(tx, ITEMS, tenant, source) if k[2] in ids]
    gone = [k for k, r in rows if r["version"] is None and r["swept_at"] < since]
    for key in gone:
        await tx.put(ITEMS, None, *key)
    return len(gone)


@statement("UPDATE connector_items SET problem_code = NULL")
async def _forget_problems(tx: Transaction, p: Any) -> int:
    tenant, source, ids, since = p
    rows = _mine(tx, ITEMS, tenant, source)
    keys = [k for k, r in rows if k[2] in ids and r["gone"] and r["swept_at"] < since]
    return await _change(tx, ITEMS, keys, lambda row: changed(row, problem_code=None, problem_message=None))


# Compared with the ledger


def _is_alive(row: Row | None) -> bool:
    return row is not None and row["deleted_at"] is None and row["version"] is not None


def _has_letter(tx: Transaction, document: UUID) -> bool:
    """Histories are shorter than the week for which a letter counts, and none is replayed."""
    return any(row["document"] == document and row["stage"] == "detect" for _, row in tx.rows("dead_letters"))


@statement("FROM ledger_documents(%s, %s, %s, %s)")
def _ledger_documents(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, after, limit = p
    mine = sorted(
        (key[0], d) for key, d in tx.rows("documents")
        if (d["tenant"], d["source"]) == (tenant, source) and _is_alive(d) and key[0] > after
    )  # fmt: skip
    found = []
    for id_, d in mine[:limit]:
        acl, required = tags_of(tx, d["access_id"])
        letter = _has_letter(tx, id_)
        found.append((
            id_, d["external_id"], d["version"], d["access_observed_at"], acl or [], required or [], letter,
        ))  # fmt: skip
    return found


@statement("SELECT ledger_lacks(%s)")
def _ledger_lacks(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(i,) for i in p[0] if not _is_alive(tx.get("documents", i)) and not _has_letter(tx, i)]


@statement("SELECT id, at FROM ledger_letters(%s)")
def _ledger_letters(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    newest: dict[UUID, datetime] = {}
    for _, row in tx.rows("dead_letters"):
        if row["document"] in p[0] and row["stage"] == "detect":
            newest[row["document"]] = _greatest(row["at"], newest.get(row["document"]))
    return list(newest.items())


@statement("SELECT subject, name, published, seen_at, repaired_at FROM connector_differences")
def _differences(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(*k[2:], r["published"], r["seen_at"], r["repaired_at"]) for k, r in _mine(tx, DIFFERENCES, *p)]


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
    return await _change(tx, DIFFERENCES, _named(p), lambda row: changed(row, repaired_at=tx.now()))


@statement("SELECT stage, until FROM handled")
def _handled(tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [(key[0], row["until"]) for key, row in tx.rows("handled")]


@statement("INSERT INTO connector_items AS mine (tenant, source, scope, external_id, version, swept_at")
async def _doubt(tx: Transaction, p: Any) -> int:
    tenant, source, stamp, ids, versions, kinds = p
    count = 0
    for id_, version, kind in sorted(zip(ids, versions, kinds, strict=True)):
        row = await tx.lock(ITEMS, tenant, source, id_)
        if row is not None and row["in_doubt_since"] is not None:
            continue
        doubted = {"in_doubt_since": stamp, "difference": kind}
        if row is None:
            after = changed(NEW_ITEM, version=version, swept_at=NEVER, **doubted)
        else:
            highest = _greatest(row["version"], version)
            after = changed(row, version=highest, fingerprint=None, gone=False, **doubted)
        await tx.put(ITEMS, after, tenant, source, id_)
        count += 1
    return count


# Memberships


@statement("SELECT tag, members, of, observed_at FROM connector_groups")
def _groups(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, *some = p
    rows = _mine(tx, GROUPS, tenant, source)
    return [(k[2], r["members"], r["of"], r["observed_at"]) for k, r in rows if not some or k[2] in some[0]]


@statement("DELETE FROM connector_groups")
async def _delete_groups(tx: Transaction, p: Any) -> int:
    for tag in p[2]:
        await tx.put(GROUPS, None, p[0], p[1], tag)
    return len(p[2])


@statement("INSERT INTO connector_groups VALUES")
async def _write_group(tx: Transaction, p: Any) -> int:
    tenant, source, tag, members, of, at = p
    await tx.put(GROUPS, {"members": members, "of": of, "observed_at": at}, tenant, source, tag)
    return 1


@written_for("FROM unnest(%s::text[]) name CROSS JOIN LATERAL (SELECT tag FROM connector_groups")
def _containing(text: str) -> Statement:
    column = "members" if "members @>" in text else "of"

    def containing(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
        names, tenant, source = p
        groups = list(_mine(tx, GROUPS, tenant, source))
        return [(name, key[2]) for name in names for key, row in groups if name in row[column]]

    return containing


@statement("SELECT principal FROM connector_principals WHERE tenant = %s AND source = %s AND digest = ''")
def _principals_in_doubt(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, after, limit = p
    rows = _mine(tx, PRINCIPALS, tenant, source)
    return sorted((key[2],) for key, row in rows if not row["digest"] and key[2] > after)[:limit]


@statement("FROM connector_principals WHERE tenant = %s AND source = %s AND principal > %s ORDER BY principal LIMIT")
def _principals_page(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, after, limit = p
    rows = sorted((key[2], row) for key, row in _mine(tx, PRINCIPALS, tenant, source) if key[2] > after)
    return [(principal, row["digest"], row["observed_at"]) for principal, row in rows[:limit]]


@statement("SELECT principal, digest, observed_at FROM connector_principals WHERE tenant = %s AND source = %s")
def _principals(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, *some = p
    rows = _mine(tx, PRINCIPALS, tenant, source)
    return [(k[2], r["digest"], r["observed_at"]) for k, r in rows if not some or k[2] in some[0]]


@statement("INSERT INTO connector_principals VALUES (%s, %s, %s, %s, %s)")
async def _mark_principal(tx: Transaction, p: Any) -> int:
    tenant, source, principal, digest, at = p
    await tx.put(PRINCIPALS, {"digest": digest, "observed_at": at}, tenant, source, principal)
    return 1


@statement("INSERT INTO connector_principals AS mine VALUES (%s, %s, %s, '', %s)")
async def _doubt_principal(tx: Transaction, p: Any) -> int:
    tenant, source, principal, at = p
    row = await tx.lock(PRINCIPALS, tenant, source, principal)
    after = {"digest": b"", "observed_at": _greatest(at, row and row["observed_at"])}
    await tx.put(PRINCIPALS, after, tenant, source, principal)
    return 1


@statement("UPDATE connector_principals SET digest = %s WHERE tenant = %s AND source = %s AND principal = %s")
async def _confirm_principal(tx: Transaction, p: Any) -> int:
    digest, *key, at = p
    row = await tx.lock(PRINCIPALS, *key)
    if row is None or row["digest"] or row["observed_at"] != at:
        return 0
    await tx.put(PRINCIPALS, changed(row, digest=digest), *key)
    return 1


@statement("FROM ledger_members(%s, %s, %s, %s)")
def _ledger_members(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, after, limit = p
    mine = [
        (key[1], row["observed_at"], bool(row["groups"])) for key, row in tx.rows("memberships")
        if (key[0], key[2]) == (tenant, source) and key[1] > after
    ]  # fmt: skip
    return sorted(mine)[:limit]


@statement("SELECT ledger_lacks_members(%s, %s, %s)")
def _ledger_lacks_members(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, principals = p
    return [(one,) for one in principals if tx.get("memberships", tenant, one, source) is None]


# Recover has the connectors look again (pipeline.republish)


def _document(tx: Transaction, key: Sequence[Any]) -> Row | None:
    return tx.get("documents", document_id(*key))


def _differs(tx: Transaction, key: Sequence[Any], item: Row) -> bool:
    if not _is_published(item):
        return False
    d = _document(tx, key)
    if d is None or d["deleted_at"] is not None or d["version"] != item["version"]:
        return True
    theirs = [tags if tags is None else tuple(tags) for tags in tags_of(tx, d["access_id"])]
    return theirs != [qualify(key[1], item["acl_tags"]), qualify(key[1], item["required_tags"])]


async def _look_again(tx: Transaction, keys: Collection[tuple[Any, ...]], **values: Any) -> int:
    again = {"fingerprint": None, "revision": None, "in_doubt_since": tx.now()}
    return await _change(tx, ITEMS, keys, lambda row: changed(row, **again, **values))


@statement("UPDATE connector_items mine SET fingerprint = NULL")
async def _publish_again(tx: Transaction, _p: Any) -> int:
    return await _look_again(tx, [key for key, row in tx.rows(ITEMS) if _differs(tx, key, row)])


@statement("UPDATE connector_items i SET gone = false")
async def _delete_again(tx: Transaction, _p: Any) -> int:
    count = 0
    for key, row in list(tx.rows(ITEMS)):
        d = _document(tx, key)
        if row["gone"] and d is not None and _is_alive(d):
            count += await _look_again(tx, [key], gone=False, version=_greatest(row["version"], d["version"]))
    return count


@statement("INSERT INTO connector_items (tenant, source, scope, external_id, version, swept_at, in_doubt_since) SELECT")
async def _remember_again(tx: Transaction, _p: Any) -> int:
    count = 0
    for _, d in list(tx.rows("documents")):
        key = d["tenant"], d["source"], d["external_id"]
        if _is_alive(d) and tx.get(SOURCES, *key[:2]) is not None and await tx.lock(ITEMS, *key) is None:
            doubted = changed(NEW_ITEM, version=d["version"], swept_at=NEVER, in_doubt_since=tx.now())
            await tx.put(ITEMS, doubted, *key)
            count += 1
    return count


@statement("UPDATE connector_principals SET digest = ''")
async def _members_again(tx: Transaction, _p: Any) -> int:
    return await _change(tx, PRINCIPALS, [k for k, _ in tx.rows(PRINCIPALS)], lambda row: changed(row, digest=b""))
