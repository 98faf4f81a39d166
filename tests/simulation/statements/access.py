"""``pipeline.stages.identities``, ``query.access.callers``, ``query.access.verify`` and ``pipeline.ledger.letters``."""

from __future__ import annotations

from typing import Any

from tests.simulation.database import Transaction
from tests.simulation.statements.registry import statement, tags_of


@statement("INSERT INTO memberships AS m (tenant, source, principal, groups, observed_at)")
async def _membership(tx: Transaction, p: Any) -> int:
    tenant, source, principal, groups, observed_at, _ = p  # no history forgets a source or a person
    row = await tx.lock("memberships", tenant, principal, source)
    if row is not None and observed_at < row["observed_at"]:
        return 0
    if row is not None and observed_at == row["observed_at"]:
        groups = sorted(set(row["groups"]) & set(groups))
    await tx.put("memberships", {"groups": list(groups), "observed_at": observed_at}, tenant, principal, source)
    return 1


@statement("WITH RECURSIVE found (source) AS")
def _sources(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [
        (source,) for source in sorted({d["source"] for _, d in tx.rows("documents") if d["tenant"] == p["tenant"]})
    ]


@statement("SELECT source, groups FROM memberships WHERE tenant = %s AND principal = ANY(%s)")
def _groups(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    tenant, principals = p
    return [(k[2], row["groups"]) for k, row in tx.rows("memberships") if k[0] == tenant and k[1] in principals]


@statement("FROM unnest(%(chunks)b::uuid[], %(documents)b::uuid[]) AS c (chunk_id, document_id) CROSS JOIN LATERAL")
def _verify(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    results = []
    held = set(p["tags"])
    for chunk, document in zip(p["chunks"], p["documents"], strict=True):
        d = tx.get("documents", document)
        if d is None or d["tenant"] != p["tenant"] or d["deleted_at"] is not None or d["version"] is None:
            continue
        acl, required = tags_of(tx, d["access_id"])
        m = tx.get("manifests", document, p["generation"])
        if not acl or m is None or not held & set(acl) or not held >= set(required or ()):
            continue
        if chunk in m["chunk_ids"]:
            results.append(
                (
                    chunk,
                    document,
                    d["external_id"],
                    d["source"],
                    d["title"] or "",
                    d["source_url"],
                    m["chunk_ids"].index(chunk),
                    d["author"],
                    d["media_type"],
                    d["source_modified_at"],
                )
            )
    return results


@statement("INSERT INTO dead_letters")
async def _letter(tx: Transaction, p: Any) -> int:
    written = 0
    for id_, stage, code, document in zip(p[0], p[4], p[5], p[7], strict=True):
        if tx.get("dead_letters", id_) is None and await tx.lock("dead_letters", id_) is None:
            row = {"stage": stage, "code": code, "document": document, "at": tx.now()}
            await tx.put("dead_letters", row, id_)
            written += 1
    return written
