"""``pipeline.ledger.documents``, and where a sink cuts a text itself (``pipeline.stages.manifests``)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from pipeline.ledger.documents import FIELD_COLUMNS
from tests.simulation.database import Row, Transaction
from tests.simulation.statements.registry import changed, statement

NEW_DOCUMENT: Row = {
    "seq": 0,
    "announced_seq": 0,
    "version": None,
    "observed_at": None,
    "deleted_floor": None,
    "deleted_at": None,
    "access_observed_at": None,
    "access_id": None,
    "content_hash": None,
    "meta_hash": None,
    **dict.fromkeys(FIELD_COLUMNS),
    "keys": [],
    "changed_at": None,
    "lane": "live",
    "event_count": 0,
}
_STATE_COLUMNS = (
    "version",
    "observed_at",
    "content_hash",
    "meta_hash",
    "deleted_floor",
    "deleted_at",
    "access_observed_at",
    "access_id",
    "seq",
)
_KNOWN_COLUMNS = (*_STATE_COLUMNS, "event_count", "media_type", "title")


@statement("INSERT INTO documents (id, tenant, source, external_id) SELECT *")
async def _insert_documents(tx: Transaction, p: Any) -> int:
    inserted = 0
    for id_, tenant, source, external_id in zip(*p, strict=True):
        if tx.get("documents", id_) is None and await tx.lock("documents", id_) is None:
            names = {"tenant": tenant, "source": source, "external_id": external_id, "received_at": tx.began}
            await tx.put("documents", {**NEW_DOCUMENT, **names}, id_)
            inserted += 1
    return inserted


@statement("access_id, seq, event_count, media_type, title FROM documents WHERE id = ANY(%s) ORDER BY id FOR UPDATE")
async def _lock_documents(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    results = []
    for id_ in sorted(set(p[0])):
        if tx.get("documents", id_) is not None and (row := await tx.lock("documents", id_)) is not None:
            results.append((id_, *(row[c] for c in _KNOWN_COLUMNS)))
    return results


@statement("access_id, seq, event_count, media_type, title FROM documents WHERE id = ANY(%s)")
def _peek(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(i, *(row[c] for c in _KNOWN_COLUMNS)) for i in set(p[0]) if (row := tx.get("documents", i)) is not None]


@statement("SELECT id, acl_tags, required_tags FROM access_sets WHERE id = ANY(%s)")
def _access(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    expected = set(p[0])
    return [
        (row["id"], row["acl_tags"], row["required_tags"]) for _, row in tx.rows("access_sets") if row["id"] in expected
    ]


@statement("SELECT DISTINCT document_id FROM index_state WHERE document_id = ANY(%s) AND seq < want_seq")
def _pending(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    ids = set(p[0])
    pending = {k[0] for k, row in tx.rows("index_state") if k[0] in ids and row["seq"] < row["want_seq"]}
    return [(id_,) for id_ in sorted(pending)]


@statement("SELECT nextval('ledger_seq') FROM generate_series(1, %s)")
def _draw(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(tx.database.draw("ledger_seq"),) for _ in range(p[0])]


@statement("INSERT INTO access_sets (tenant, digest, acl_tags, required_tags)")
async def _insert_access(tx: Transaction, p: Any) -> int:
    tenant, digest, acl, required = p
    number = tx.database.draw("access_sets")  # also where the row is there already
    if tx.get("access_sets", tenant, digest) is not None or await tx.lock("access_sets", tenant, digest) is not None:
        return 0
    row = {"id": number, "tenant": tenant, "acl_tags": acl, "required_tags": required}
    await tx.put("access_sets", row, tenant, digest)
    return 1


@statement("SELECT a.tenant, a.digest, a.id FROM access_sets a")
def _access_ids(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    keys = zip(*p, strict=True)
    return [(*key, row["id"]) for key in keys if (row := tx.get("access_sets", *key)) is not None]


@statement("UPDATE documents SET version = %s, observed_at = %s")
async def _update_document(tx: Transaction, p: Any) -> int:
    *all_values, id_ = p
    row = await tx.lock("documents", id_)
    assert row is not None
    state, rest = all_values[: len(_STATE_COLUMNS)], all_values[len(_STATE_COLUMNS) :]
    events, drew, lane, drew_too, _, changed_at, *fields = rest
    values = dict(zip(_STATE_COLUMNS, state, strict=True)) | {"event_count": row["event_count"] + events}
    if drew:
        values["lane"] = lane
    if drew_too:
        values |= {"received_at": tx.now(), "changed_at": changed_at}
    if fields:
        values |= zip((*FIELD_COLUMNS, "keys", "external_id"), fields, strict=True)
    await tx.put("documents", changed(row, **values), id_)
    return 1


@statement("INSERT INTO document_bodies AS b (document_id, text, metadata)")
async def _upsert_body(tx: Transaction, p: Any) -> int:
    id_, text, metadata = p[:3]
    row = await tx.lock("document_bodies", id_) or {"text": "", "metadata": {}}
    after = changed(row, text=row["text"] if text is None else text)
    if metadata is not None:
        after = changed(after, metadata=metadata.obj)
    await tx.put("document_bodies", after, id_)
    return 1


@statement("INSERT INTO manifests (document_id, generation, content_hash, chunk_ids")
async def _upsert_manifest(tx: Transaction, p: Any) -> int:
    id_, generation, content_hash, chunk_ids, counts, spans, headings = p
    row = {
        "content_hash": content_hash,
        "chunk_ids": chunk_ids,
        "token_counts": counts,
        "spans": [[list(span) for span in chunk] for chunk in spans.obj],
        "headings": [list(path) for path in headings.obj],
    }
    await tx.put("manifests", row, id_, generation)
    return 1


@statement("DELETE FROM manifests WHERE document_id = ANY(%s)")
async def _delete_manifests(tx: Transaction, p: Any) -> int:
    gone = [key for key, _ in tx.rows("manifests") if key[0] in p[0]]
    for key in gone:
        await tx.put("manifests", None, *key)
    return len(gone)


@statement("UPDATE document_bodies SET text = '', metadata = '{}'")
async def _erase_bodies(tx: Transaction, p: Any) -> int:
    there = [id_ for id_ in p[0] if tx.get("document_bodies", id_) is not None]
    for id_ in there:
        await tx.put("document_bodies", {"text": "", "metadata": {}}, id_)
    return len(there)


@statement("UPDATE documents SET keys = '{}' WHERE id = ANY(%s)")
async def _erase_keys(tx: Transaction, p: Any) -> int:
    there = [id_ for id_ in p[0] if (row := tx.get("documents", id_)) is not None and row["keys"]]
    for id_ in there:
        await tx.put("documents", changed(tx.get("documents", id_), keys=[]), id_)
    return len(there)


@statement("SELECT tenant, name, type FROM metadata_keys")
def _declared(_tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return []  # histories declare no key


def new_state(want: int, now: datetime) -> Row:
    """A fresh row of index_state."""
    return {
        "want_seq": want,
        "seq": 0,
        "pending_since": now,
        "next_at": now,
        "settled_at": None,
        "claimed": [],
        "confirmed": [],
        "confirmed_hashes": [],
        "refused": [],
        "written": 0,
        "attempts": 0,
        "error": None,
    }


@statement("INSERT INTO index_state AS s (document_id, generation, store, want_seq, next_at) VALUES (%s")
async def _want(tx: Transaction, p: Any) -> int:
    id_, generation, store, want, grace = p
    row = await tx.lock("index_state", id_, generation, store)
    next_at = tx.now() + timedelta(seconds=grace)
    if row is None:
        after = changed(new_state(want, tx.began), next_at=next_at)
    else:
        since = row["pending_since"] if row["seq"] < row["want_seq"] else tx.now()
        after = changed(
            row, want_seq=max(want, row["want_seq"]), next_at=next_at, attempts=0, error=None, pending_since=since
        )
    await tx.put("index_state", after, id_, generation, store)
    return 1


@statement("INSERT INTO document_events")
async def _event(tx: Transaction, p: Any) -> int:
    id_, slot, _, _, _, observed_at, _, lane = p
    await tx.put("document_events", {"observed_at": observed_at, "lane": lane, "at": tx.now()}, id_, slot)
    return 1


@statement("SELECT content_hash, media_type, title FROM documents WHERE id = %s FOR UPDATE")
async def _lock_text(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    row = await tx.lock("documents", p[0])
    return [] if row is None else [(row["content_hash"], row["media_type"], row["title"])]
