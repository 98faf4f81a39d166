"""``pipeline.ledger.arrivals``."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from tests.simulation.database import Transaction
from tests.simulation.statements.registry import GENERATION, changed, statement, tags_of


@statement("GROUP BY document_id HAVING bool_and(seq >= want_seq)")
def _reached(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    states: dict[UUID, bool] = {}
    for key, row in tx.rows("index_state"):
        if key[0] in p[0] and key[1] == GENERATION:
            states[key[0]] = states.get(key[0], True) and row["seq"] >= row["want_seq"]
    return [(id_,) for id_, reached in states.items() if reached]


@statement("WHERE d.announced_seq < d.seq AND v.seq >= v.want_seq AND k.seq >= k.want_seq")
def _ready(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    results = []
    for id_ in sorted(set(p[0])):
        d = tx.get("documents", id_)
        v, k = (tx.get("index_state", id_, GENERATION, store) for store in ("vectors", "keywords"))
        if d is None or v is None or k is None or d["announced_seq"] >= d["seq"]:
            continue
        if v["seq"] < v["want_seq"] or k["seq"] < k["want_seq"]:
            continue
        acl, _ = tags_of(tx, d["access_id"])
        gone = d["deleted_at"] is not None or acl == []
        state = "retired" if gone else "partial" if v["refused"] else "searchable"
        m = tx.get("manifests", id_, GENERATION)
        results.append(
            (
                id_,
                d["tenant"],
                d["source"],
                d["external_id"],
                d["seq"],
                d["version"],
                state,
                GENERATION,
                len(m["chunk_ids"]) if m else 0,
                d["lane"],
                d["changed_at"],
                d["received_at"],
            )
        )
    return sorted(results, key=lambda row: row[4])


@statement("SELECT id, seq FROM documents WHERE announced_seq < seq AND seq > %s ORDER BY seq LIMIT %s")
def _unannounced(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    after, limit = p
    rows = [(k[0], d["seq"]) for k, d in tx.rows("documents") if d["announced_seq"] < d["seq"] and d["seq"] > after]
    return sorted(rows, key=lambda row: row[1])[:limit]


@statement("UPDATE documents d SET announced_seq = greatest(d.announced_seq, w.seq)")
async def _announced(tx: Transaction, p: Any) -> int:
    for id_, seq in sorted(zip(p[1], p[2], strict=True)):
        row = await tx.lock("documents", id_)
        if row is not None:
            await tx.put("documents", changed(row, announced_seq=max(row["announced_seq"], seq)), id_)
    return len(p[1])
