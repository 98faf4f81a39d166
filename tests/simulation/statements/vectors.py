"""``pipeline.stores.vectors`` and ``pipeline.stores.graph``: the chunk table."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.simulation.database import Transaction
from tests.simulation.statements.registry import changed, statement


@statement("SELECT wanted.n, same.id, same.document_id FROM unnest(%b::text[]) WITH ORDINALITY AS wanted (text, n)")
def _of_equal_texts(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    texts, most = p
    there: dict[str, list[tuple[Any, ...]]] = {}
    for (id_,), row in tx.rows("chunks"):
        there.setdefault(row["text"], []).append((id_, row["document_id"]))
    return [(n, *same) for n, text in enumerate(texts, start=1) for same in there.get(text, [])[:most]]


@statement("SELECT id, embedding::real[] FROM chunks_g1 WHERE id = ANY(%s)")
def _embeddings(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(id_, row["embedding"].to_list()) for id_ in p[0] if (row := tx.get("chunks", id_)) is not None]


@statement("SELECT document_id, id FROM chunks_g1 WHERE document_id = ANY(%s)")
def _present(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    ids = set(p[0])
    return [(row["document_id"], key[0]) for key, row in tx.rows("chunks") if row["document_id"] in ids]


@statement("INSERT INTO chunks_g1 (id, document_id, tenant, access_id, text, embedding, in_graph, sketch)")
async def _insert_chunks(tx: Transaction, p: Any) -> int:
    inserted = 0
    for id_, document, tenant, access_id, text, embedding, in_graph, _sketch in zip(*p, strict=True):
        if tx.get("chunks", id_) is not None or await tx.lock("chunks", id_) is not None:
            continue
        row = {
            "document_id": document,
            "tenant": tenant,
            "access_id": access_id,
            "text": text,
            "embedding": embedding,
            "in_graph": in_graph,
            "stood": asyncio.get_running_loop().time(),
        }
        await tx.put("chunks", row, id_)
        inserted += 1
    return inserted


@statement("DELETE FROM chunks_g1 WHERE id = ANY(%s)")
async def _delete_chunks(tx: Transaction, p: Any) -> int:
    for id_ in p[0]:
        if await tx.lock("chunks", id_) is not None:
            await tx.put("chunks", None, id_)
    return len(p[0])


@statement("UPDATE chunks_g1 c SET access_id = stale.access_id")
async def _restamp(tx: Transaction, p: Any) -> int:
    ids, accesses, limit = p
    expected = dict(zip(ids, accesses, strict=True))
    stale = []
    for key, row in tx.rows("chunks"):
        access = expected.get(row["document_id"])
        if access is not None and row["access_id"] != access:
            stale.append((key, access))
    for key, access in stale[:limit]:
        row = await tx.lock("chunks", *key)
        if row is not None:
            await tx.put("chunks", changed(row, access_id=access), *key)
    return min(len(stale), limit)


@statement("FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid")
def _graphs(_tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [("chunks_g1_hnsw", True, True)]  # as after `penstock migrate`: new rows wait outside of it


@statement("SELECT count(*) FROM (SELECT id FROM chunks_g1 WHERE NOT in_graph")
def _outside(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(min(p[0], sum(not row["in_graph"] for _, row in tx.rows("chunks"))),)]
