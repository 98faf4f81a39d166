"""``connectors.runner.membership``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.simulation.database import Statement, Transaction
from tests.simulation.statements.registry import changed, statement, written_for
from tests.simulation.statements.runner import GROUPS, ITEMS, PRINCIPALS, greatest, rows_of


@statement("SELECT tag, members, of, observed_at FROM connector_groups")
def _groups(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, *some = p
    rows = rows_of(tx, GROUPS, tenant, source)
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
        groups = list(rows_of(tx, GROUPS, tenant, source))
        return [(name, key[2]) for name in names for key, row in groups if name in row[column]]

    return containing


@statement("SELECT tag, count(*) FROM connector_items CROSS JOIN LATERAL unnest(acl_tags || required_tags) tag")
def _documents_by_tag(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, own = p
    counts = Counter(
        tag
        for _, row in rows_of(tx, ITEMS, tenant, source)
        if row["version"] is not None and not row["gone"]
        for tag in (*row["acl_tags"], *row["required_tags"])
        if not tag.startswith(own)
    )
    return list(counts.items())


@statement("SELECT principal FROM connector_principals WHERE tenant = %s AND source = %s AND digest = ''")
def _principals_in_doubt(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, after, limit = p
    rows = rows_of(tx, PRINCIPALS, tenant, source)
    return sorted((key[2],) for key, row in rows if not row["digest"] and key[2] > after)[:limit]


@statement("FROM connector_principals WHERE tenant = %s AND source = %s AND principal > %s ORDER BY principal LIMIT")
def _principals_page(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, after, limit = p
    rows = sorted((key[2], row) for key, row in rows_of(tx, PRINCIPALS, tenant, source) if key[2] > after)
    return [(principal, row["digest"], row["observed_at"]) for principal, row in rows[:limit]]


@statement("SELECT principal, digest, observed_at FROM connector_principals WHERE tenant = %s AND source = %s")
def _principals(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, *some = p
    rows = rows_of(tx, PRINCIPALS, tenant, source)
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
    after = {"digest": b"", "observed_at": greatest(at, row and row["observed_at"])}
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
        (key[1], row["observed_at"], bool(row["groups"]))
        for key, row in tx.rows("memberships")
        if (key[0], key[2]) == (tenant, source) and key[1] > after
    ]
    return sorted(mine)[:limit]


@statement("SELECT ledger_lacks_members(%s, %s, %s)")
def _ledger_lacks_members(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, source, principals = p
    return [(principal,) for principal in principals if tx.get("memberships", tenant, principal, source) is None]
