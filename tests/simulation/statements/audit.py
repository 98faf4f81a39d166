"""``pipeline.maintenance.recover``, ``pipeline.audit`` and ``pipeline.ledger.repair``."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from datetime import timedelta
from typing import Any
from uuid import UUID

from tests.simulation.database import Row, Transaction
from tests.simulation.statements.documents import NEW_DOCUMENT, new_state
from tests.simulation.statements.registry import GENERATION, changed, document_columns, statement


@statement("SELECT last_value, (SELECT max(seq) FROM documents) FROM ledger_seq")
def _sequence(tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [(tx.database.sequences["ledger_seq"], max((d["seq"] for _, d in tx.rows("documents")), default=None))]


@statement("SELECT setval('ledger_seq', %(to)s) FROM ledger_seq WHERE last_value < %(to)s")
def _setval(tx: Transaction, p: Any) -> int:
    before = tx.database.sequences["ledger_seq"]
    tx.database.sequences["ledger_seq"] = max(before, p["to"])
    return int(before < p["to"])


@statement("SELECT e.lane, min(e.observed_at) FROM document_events e")
def _floors(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    events = [row for _, row in tx.rows("document_events")]
    floors = []
    for lane in {e["lane"] for e in events}:
        last = max(e["at"] for e in events if e["lane"] == lane) - timedelta(seconds=p[0])
        floors.append((lane, min(e["observed_at"] for e in events if e["lane"] == lane and e["at"] >= last)))
    return floors


@statement("WHERE s.seq < s.want_seq AND s.pending_since <= %s GROUP BY s.store")
def _waiting(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    counts: dict[str, list[int]] = {}
    for key, s in tx.rows("index_state"):
        if s["seq"] < s["want_seq"] and s["pending_since"] <= p[0]:
            counts.setdefault(key[2], [0, 0])[s["attempts"] > 0] += 1
    return [(store, *both) for store, both in counts.items()]


@statement("SELECT clock_timestamp();")
def _now(tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [(tx.now(),)]


def _sizes(tx: Transaction, ids: Collection[UUID]) -> list[tuple[Any, ...]]:
    results = []
    for id_ in sorted(ids):
        m, b = tx.get("manifests", id_, GENERATION), tx.get("document_bodies", id_)
        results.append((id_, len(m["chunk_ids"]) if m else 0, len(b["text"].encode()) if b else 0))
    return results


@statement("WHERE d.id > %(after)s ORDER BY d.id LIMIT %(limit)s) d")
def _next_documents(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return _sizes(tx, [k[0] for k, _ in tx.rows("documents") if k[0] > p["after"]])[: p["limit"]]


@statement("(SELECT id FROM documents WHERE id = ANY(%(ids)s)) d")
def _fitting(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return _sizes(tx, [i for i in set(p["ids"]) if tx.get("documents", i) is not None])


def _states(tx: Transaction, id_: UUID) -> Row:
    v, k = (tx.get("index_state", id_, GENERATION, store) for store in ("vectors", "keywords"))
    columns = ("want_seq", "seq", "refused", "attempts", "error")
    return {f"vectors_{name}": v[name] if v else None for name in columns} | {
        f"keywords_{name}": k[name] if k else None for name in columns if name != "refused"
    }


@statement("b.text, b.metadata, v.want_seq AS vectors_want_seq, v.seq AS vectors_seq")
def _desired(tx: Transaction, p: Any) -> list[Row]:
    results = []
    for id_ in set(p["ids"]):
        if (d := tx.get("documents", id_)) is None:
            continue
        b = tx.get("document_bodies", id_)
        body = {name: b[name] if b else None for name in ("text", "metadata")}
        results.append({**document_columns(tx, id_, GENERATION), **body, "seq": d["seq"], **_states(tx, id_)})
    return results


@statement("SELECT d.id, d.seq, v.want_seq AS vectors_want_seq, v.seq AS vectors_seq")
def _standings(tx: Transaction, p: Any) -> list[Row]:
    return [
        {"id": i, "seq": d["seq"], **_states(tx, i)} for i in set(p["ids"]) if (d := tx.get("documents", i)) is not None
    ]


@statement("SELECT 1 FROM documents WHERE id = ANY(%s) ORDER BY id FOR UPDATE")
async def _lock_all(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(1,) for id_ in sorted(set(p[0])) if await tx.lock("documents", id_) is not None]


@statement("SELECT document_id, id, access_id, sha256(convert_to(text, 'UTF8')), tenant FROM chunks_g1")
def _rows(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    def is_inside(document: UUID) -> bool:
        if "ids" in p:
            return document in p["ids"]
        after, last = p["after"], p["last"]
        return (after is None or document > after) and (last is None or document <= last)

    rows = sorted((r["document_id"], k[0], r) for k, r in tx.rows("chunks") if is_inside(r["document_id"]))
    start = (p["document"], p["id"]) if "document" in p else None
    return [
        (document, id_, row["access_id"], hashlib.sha256(row["text"].encode()).digest(), row["tenant"])
        for document, id_, row in rows
        if start is None or (document, id_) > start
    ][: p["limit"]]


@statement("VALUES (%(document)s, %(generation)s, %(store)s, %(seq)s, clock_timestamp() + %(grace)s")
async def _want_again(tx: Transaction, p: Any) -> int:
    key = p["document"], p["generation"], p["store"]
    row = await tx.lock("index_state", *key) or new_state(p["seq"], tx.now())
    next_at = tx.now() + timedelta(seconds=p["grace"])
    again: Row = {"want_seq": p["seq"], "next_at": next_at, "pending_since": tx.now(), "attempts": 0, "error": None}
    await tx.put("index_state", {**row, **again}, *key)
    return 1


@statement("WHERE document_id = %(document)s AND store = %(store)s AND want_seq < %(seq)s")
def _others_want_again(_tx: Transaction, _p: Any) -> int:
    return 0  # there is one generation


@statement("DELETE FROM manifests WHERE document_id = %s AND generation = %s")
async def _forget_manifest(tx: Transaction, p: Any) -> int:
    await tx.put("manifests", None, *p)
    return 1


@statement("INSERT INTO documents (id, tenant, source, external_id) SELECT one, '', '', one::text")
async def _stubs(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    inserted = []
    for id_ in sorted(p[0]):
        if tx.get("documents", id_) is None and await tx.lock("documents", id_) is None:
            names = {"tenant": "", "source": "", "external_id": str(id_), "received_at": tx.began}
            await tx.put("documents", {**NEW_DOCUMENT, **names}, id_)
            inserted.append((id_,))
    return inserted


@statement("DELETE FROM documents WHERE id = ANY(%s)")
async def _take_back(tx: Transaction, p: Any) -> int:
    for id_ in p[0]:
        await tx.put("documents", None, id_)
    return len(p[0])


@statement("DELETE FROM chunks_g1 WHERE document_id = %s")
async def _delete_rows_of(tx: Transaction, p: Any) -> int:
    gone = [key for key, row in tx.rows("chunks") if row["document_id"] == p[0]]
    for key in gone:
        await tx.put("chunks", None, *key)
    return len(gone)


@statement("UPDATE chunks_g1 c SET tenant = d.tenant")
async def _correct_tenant(tx: Transaction, p: Any) -> int:
    corrected = 0
    for id_ in p[0]:
        row = await tx.lock("chunks", id_)
        document = row and tx.get("documents", row["document_id"])
        if row and document and row["tenant"] not in (None, document["tenant"]):
            await tx.put("chunks", changed(row, tenant=document["tenant"]), id_)
            corrected += 1
    return corrected


@statement("SELECT greatest(nextval('ledger_seq'), %s)")
def _draw_above(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(max(tx.database.draw("ledger_seq"), p[0]),)]
