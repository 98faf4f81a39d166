"""``pipeline.ledger.documents``: what a delete may bring back."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any
from uuid import UUID

from pipeline.ledger.documents import REVISION_COLUMNS
from tests.simulation.database import Row, Transaction
from tests.simulation.statements.registry import statement

_INSERT = f"INSERT INTO superseded AS s (document_id, {', '.join(REVISION_COLUMNS)})"


@statement("metadata, text FROM superseded WHERE document_id = ANY(%s)")
def _load_superseded(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(k[0], *(row[c] for c in REVISION_COLUMNS)) for k, row in tx.rows("superseded") if k[0] in p[0]]


@statement("SELECT document_id AS id, octet_length(text) AS size FROM superseded")
def _stored_bytes(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    deleted, overwritten = p
    sizes = Counter[UUID]()
    for key, row in tx.rows("superseded"):
        if key[0] in deleted:
            sizes[key[0]] += len(row["text"].encode())
    for id_ in overwritten:
        if (body := tx.get("document_bodies", id_)) is not None:
            sizes[id_] += len(body["text"].encode())
    return list(sizes.items())


def _current(tx: Transaction, ids: list[UUID]) -> list[tuple[UUID, Row]]:
    results = []
    for id_ in ids:
        d, b = tx.get("documents", id_), tx.get("document_bodies", id_)
        if d is not None and b is not None and d["version"] is not None and d["content_hash"] is not None:
            results.append(
                (
                    id_,
                    {
                        **{c: d[c] for c in REVISION_COLUMNS[:-2]},
                        "metadata": b["metadata"],
                        "text": b["text"],
                        "deleted_at": d["deleted_at"],
                    },
                )
            )
    return results


@statement(f"{_INSERT} SELECT")
async def _keep_current(tx: Transaction, p: Any) -> int:
    for id_, row in _current(tx, p[0]):
        await _keep_one(tx, id_, {c: row[c] for c in REVISION_COLUMNS})
    return 1


@statement(f"{_INSERT} VALUES")
async def _keep(tx: Transaction, p: Any) -> int:
    row = dict(zip(REVISION_COLUMNS, p[1:], strict=True))
    await _keep_one(tx, p[0], {**row, "metadata": row["metadata"].obj})
    return 1


async def _keep_one(tx: Transaction, id_: UUID, row: Row) -> None:
    key = id_, row["observed_at"], row["version"]
    there = await tx.lock("superseded", *key)
    if there is None or (row["content_hash"], row["meta_hash"]) > (there["content_hash"], there["meta_hash"]):
        await tx.put("superseded", row, *key)


@statement("AND d.version IS NOT NULL AND d.content_hash IS NOT NULL AND d.deleted_at IS NULL")
def _current_alive(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(id_, *(row[c] for c in REVISION_COLUMNS)) for id_, row in _current(tx, p[0]) if row["deleted_at"] is None]


@statement("DELETE FROM superseded s USING ranked r")
async def _prune(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    ids, most = p
    gone = []
    forgotten = 0
    for id_ in ids:
        d = tx.get("documents", id_)
        if d is None:
            continue
        rows = sorted(
            ((key, row) for key, row in tx.rows("superseded") if key[0] == id_),
            key=lambda item: (item[1]["version"], item[1]["observed_at"]),
            reverse=True,
        )
        bounds = [d["deleted_floor"], d["observed_at"] if d["deleted_at"] is None else None]
        floor = max((b for b in bounds if b is not None), default=None)
        newest: datetime | None = None
        kept = []
        for key, row in rows:
            limits = [b for b in (floor, newest) if b is not None]
            if limits and row["observed_at"] <= max(limits):
                gone.append(key)
            else:
                kept.append((key, row))
            newest = row["observed_at"] if newest is None else max(newest, row["observed_at"])
        kept.sort(key=lambda item: item[1]["observed_at"], reverse=True)
        gone += [key for key, _ in kept[most:]]
        forgotten += len(kept[most:])
    for key in gone:
        await tx.put("superseded", None, *key)
    return [(forgotten,)]
