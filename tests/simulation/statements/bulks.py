"""``pipeline.ledger.bulks``: bulks of unknown outcome."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.simulation.database import Row, Transaction
from tests.simulation.statements.registry import GENERATION, changed, statement, tags_of


@statement("INSERT INTO open_bulks AS o (id, keyword_index, documents, chunks, seqs, next_at)")
async def _open_bulk(tx: Transaction, p: Any) -> int:
    id_, index, documents, chunks, seqs, check = p
    row = await tx.lock("open_bulks", id_)
    if row is not None:
        after = changed(row, unanswered=row["unanswered"] + 1, sent_at=tx.now())
    else:
        after = {
            "keyword_index": index,
            "documents": documents,
            "chunks": chunks,
            "seqs": seqs,
            "unanswered": 1,
            "sent_at": tx.now(),
            "next_at": tx.now() + timedelta(seconds=check),
        }
    await tx.put("open_bulks", after, id_)
    return 1


def _is_young(tx: Transaction, row: Row, seconds: float) -> bool:
    return bool(row["sent_at"] > tx.now() - timedelta(seconds=seconds))


@statement("DELETE FROM open_bulks WHERE unanswered = 1 AND id = %s AND sent_at >")
async def _answered(tx: Transaction, p: Any) -> int:
    row = await tx.lock("open_bulks", p[0])
    if row is None or row["unanswered"] != 1 or not _is_young(tx, row, p[1]):
        return 0
    await tx.put("open_bulks", None, p[0])
    return 1


@statement("UPDATE open_bulks SET unanswered = unanswered - 1 WHERE unanswered > 1 AND id = %s AND sent_at >")
async def _one_answered(tx: Transaction, p: Any) -> int:
    row = await tx.lock("open_bulks", p[0])
    if row is None or row["unanswered"] <= 1 or not _is_young(tx, row, p[1]):
        return 0
    await tx.put("open_bulks", changed(row, unanswered=row["unanswered"] - 1), p[0])
    return 1


@statement("WITH taken AS ( SELECT id FROM open_bulks WHERE next_at <= now()")
async def _due_bulks(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    limit, again, expire = p
    waiting = sorted(
        ((row["next_at"], key) for key, row in tx.rows("open_bulks") if row["next_at"] <= tx.began),
    )
    taken = []
    for _, key in waiting[:limit]:
        if tx.try_lock("open_bulks", *key) and (row := tx.get("open_bulks", *key)) is not None:
            now = tx.now()
            await tx.put("open_bulks", changed(row, next_at=now + timedelta(seconds=again)), *key)
            expired = row["sent_at"] < now - timedelta(seconds=expire)
            taken.append((*key, row["keyword_index"], row["documents"], row["chunks"], row["seqs"], expired))
    return taken


@statement("SELECT name FROM generations WHERE keyword_index = %s AND state <> 'retired'")
def _user_of(_tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [(GENERATION,)]


@statement("SELECT s.document_id, s.want_seq, w.wanted, m.chunk_ids, m.content_hash = d.content_hash")
def _unwanted(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    results = []
    for id_ in sorted(set(p[1])):
        s, d = tx.get("index_state", id_, GENERATION, "keywords"), tx.get("documents", id_)
        if s is None or d is None:
            continue
        acl, _ = tags_of(tx, d["access_id"])
        expected = d["deleted_at"] is None and d["version"] is not None and bool(acl)
        m = tx.get("manifests", id_, GENERATION)
        unknown = m is None or d["content_hash"] is None
        is_cut = None if unknown or m is None else m["content_hash"] == d["content_hash"]
        results.append((id_, s["want_seq"], expected, m["chunk_ids"] if m else None, is_cut, s["confirmed"]))
    return results


@statement("DELETE FROM open_bulks WHERE id = %s")
async def _forget_bulk(tx: Transaction, p: Any) -> int:
    await tx.put("open_bulks", None, p[0])
    return 1
