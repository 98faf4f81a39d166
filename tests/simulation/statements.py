"""What each of the product's statements does, in memory.

The product's ledger functions run as they are; only Postgres is replaced. A statement is recognised by a part of its
text that says what it does, and one that nobody here knows fails loudly. ``test_servers`` runs the same random
sequences of calls on this and on the real Postgres and compares everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from tests.simulation.database import Row, Statement, Transaction

GENERATION = "g1"
Maker = Callable[[str], Statement]
"""Makes an implementation from a statement's text."""
_KNOWN: list[tuple[str, Maker]] = []
_FOUND: dict[str, Statement] = {}


class UnknownStatement(BaseException):
    """Nobody has taught the simulation this statement. It is no error that the product may handle."""


def written_for(*parts: str) -> Callable[[Maker], Maker]:
    """Register a maker of implementations under a part of the statement's text (between ``^`` and ``;``, its begin and
    end); the first one registered that fits counts."""

    def register(maker: Maker) -> Maker:
        _KNOWN.extend((part, maker) for part in parts)
        return maker

    return register


def statement(*parts: str) -> Callable[[Statement], Statement]:
    """Register an implementation likewise."""

    def register(implementation: Statement) -> Statement:
        written_for(*parts)(lambda _text: implementation)
        return implementation

    return register


def find(text: str) -> Statement:
    """The implementation of a statement."""
    implementation = _FOUND.get(text)
    if implementation is None:
        flat = f"^{' '.join(text.split())};"
        maker = next((known for part, known in _KNOWN if part in flat), None)
        if maker is None:
            raise UnknownStatement(f"teach tests/simulation/statements.py this statement: {flat}")
        implementation = _FOUND[text] = maker(text)
    return implementation


def changed(row: Row | None, **values: Any) -> Row:
    return {**(row or {}), **values}


# Locks


@statement("SELECT pg_advisory_xact_lock_shared(")
def _shared(_tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [("",)]  # generations never change in a history


@statement("SELECT pg_try_advisory_xact_lock(")
def _try_lock(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(tx.try_lock("advisory", p[0]),)]


@statement("SET LOCAL ")
def _set(_tx: Transaction, _p: Any) -> int:
    return 0


# Detect's side of the ledger

NEW_DOCUMENT: Row = {
    "seq": 0, "announced_seq": 0, "version": None, "observed_at": None, "deleted_floor": None, "deleted_at": None,
    "access_observed_at": None, "access_id": None, "content_hash": None, "meta_hash": None, "title": None,
    "source_url": None, "author": None, "media_type": None, "source_modified_at": None, "changed_at": None,
    "lane": "live", "event_count": 0,
}  # fmt: skip
_KNOWN_COLUMNS = (
    "version", "observed_at", "content_hash", "meta_hash", "deleted_floor", "deleted_at", "access_observed_at",
    "access_id", "seq", "event_count", "media_type",
)  # fmt: skip


@statement("INSERT INTO documents (id, tenant, source, external_id) SELECT *")
async def _insert_documents(tx: Transaction, p: Any) -> int:
    inserted = 0
    for id_, tenant, source, external_id in zip(*p, strict=True):
        if tx.get("documents", id_) is None and await tx.lock("documents", id_) is None:
            names = {"tenant": tenant, "source": source, "external_id": external_id, "received_at": tx.began}
            await tx.put("documents", {**NEW_DOCUMENT, **names}, id_)
            inserted += 1
    return inserted


@statement("access_id, seq, event_count, media_type FROM documents WHERE id = ANY(%s) ORDER BY id FOR UPDATE")
async def _lock_documents(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    found = []
    for id_ in sorted(set(p[0])):
        if tx.get("documents", id_) is not None and (row := await tx.lock("documents", id_)) is not None:
            found.append((id_, *(row[c] for c in _KNOWN_COLUMNS)))
    return found


@statement("access_id, seq, event_count, media_type FROM documents WHERE id = ANY(%s)")
def _peek(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(i, *(row[c] for c in _KNOWN_COLUMNS)) for i in set(p[0]) if (row := tx.get("documents", i)) is not None]


@statement("SELECT id, acl_tags, required_tags FROM access_sets WHERE id = ANY(%s)")
def _access(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    wanted = set(p[0])
    return [
        (row["id"], row["acl_tags"], row["required_tags"]) for _, row in tx.rows("access_sets") if row["id"] in wanted
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
    *state, events, drew, lane, drew_too, _, changed_at, id_ = p
    row = await tx.lock("documents", id_)
    assert row is not None
    columns = (
        "version", "observed_at", "content_hash", "meta_hash", "deleted_floor", "deleted_at", "access_observed_at",
        "access_id", "seq",
    )  # fmt: skip
    values = dict(zip(columns, state, strict=True)) | {"event_count": row["event_count"] + events}
    if drew:
        values["lane"] = lane
    if drew_too:
        values |= {"received_at": tx.now(), "changed_at": changed_at}
    await tx.put("documents", changed(row, **values), id_)
    return 1


@statement("UPDATE documents SET title = %s")
async def _update_fields(tx: Transaction, p: Any) -> int:
    title, url, author, media_type, modified, external_id, id_ = p
    row = await tx.lock("documents", id_)
    fields = {"title": title, "source_url": url, "author": author, "media_type": media_type, "external_id": external_id}
    await tx.put("documents", changed(row, **fields, source_modified_at=modified), id_)
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
        "content_hash": content_hash, "chunk_ids": chunk_ids, "token_counts": counts,
        "spans": [[list(span) for span in chunk] for chunk in spans.obj],
        "headings": [list(path) for path in headings.obj],
    }  # fmt: skip
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


def new_state(want: int, now: datetime) -> Row:
    """A fresh row of index_state."""
    return {
        "want_seq": want, "seq": 0, "pending_since": now, "next_at": now, "settled_at": None, "claimed": [],
        "confirmed": [], "confirmed_hashes": [], "refused": [], "written": 0, "attempts": 0, "error": None,
    }  # fmt: skip


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


# What a delete may bring back

_SUPERSEDED = (
    "version", "observed_at", "content_hash", "meta_hash", "title", "source_url", "author", "media_type",
    "source_modified_at", "metadata", "text",
)  # fmt: skip


@statement("source_modified_at, metadata, text FROM superseded WHERE document_id = ANY(%s)")
def _load_superseded(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(k[0], *(row[c] for c in _SUPERSEDED)) for k, row in tx.rows("superseded") if k[0] in p[0]]


def _current(tx: Transaction, ids: list[UUID]) -> list[tuple[UUID, Row]]:
    found = []
    for id_ in ids:
        d, b = tx.get("documents", id_), tx.get("document_bodies", id_)
        if d is not None and b is not None and d["version"] is not None and d["content_hash"] is not None:
            found.append((id_, {**{c: d[c] for c in _SUPERSEDED[:9]}, "metadata": b["metadata"], "text": b["text"],
                                "deleted_at": d["deleted_at"]}))  # fmt: skip
    return found


@statement("INSERT INTO superseded AS s SELECT")
async def _keep_current(tx: Transaction, p: Any) -> int:
    for id_, row in _current(tx, p[0]):
        await _keep_one(tx, id_, {c: row[c] for c in _SUPERSEDED})
    return 1


@statement("INSERT INTO superseded AS s VALUES")
async def _keep(tx: Transaction, p: Any) -> int:
    row = dict(zip(_SUPERSEDED, p[1:], strict=True))
    await _keep_one(tx, p[0], {**row, "metadata": row["metadata"].obj})
    return 1


async def _keep_one(tx: Transaction, id_: UUID, row: Row) -> None:
    key = id_, row["observed_at"], row["version"]
    there = await tx.lock("superseded", *key)
    if there is None or (row["content_hash"], row["meta_hash"]) > (there["content_hash"], there["meta_hash"]):
        await tx.put("superseded", row, *key)


@statement("AND d.version IS NOT NULL AND d.content_hash IS NOT NULL AND d.deleted_at IS NULL")
def _current_alive(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(id_, *(row[c] for c in _SUPERSEDED)) for id_, row in _current(tx, p[0]) if row["deleted_at"] is None]


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
            key=lambda item: (item[1]["version"], item[1]["observed_at"]), reverse=True,
        )  # fmt: skip
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


# Generations


@statement("vector_type, service FROM generations WHERE state")
def _generations(tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [tuple(row["columns"]) for _, row in tx.rows("generations")]


# The sinks' side of the ledger


@statement("WHERE s.generation = %s AND s.store = %s AND s.document_id = ANY(%s) AND s.seq < s.want_seq ORDER BY d.id")
def _work(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    generation, store, ids = p
    found = []
    for id_ in sorted(set(ids)):
        s = tx.get("index_state", id_, generation, store)
        d = tx.get("documents", id_)
        if s is None or d is None or s["seq"] >= s["want_seq"]:
            continue
        acl, required = tags_of(tx, d["access_id"])
        m = tx.get("manifests", id_, generation)
        cut = (m["content_hash"], m["chunk_ids"], m["token_counts"], m["spans"], m["headings"]) if m else (None,) * 5
        found.append((
            id_, d["tenant"], d["source"], d["external_id"], s["want_seq"],
            d["deleted_at"] is None and d["version"] is not None, d["content_hash"], d["access_id"], acl, required,
            d["title"], d["source_url"], d["author"], d["media_type"], d["source_modified_at"], d["lane"],
            s["claimed"], s["confirmed"], s["confirmed_hashes"], s["refused"], s["attempts"], *cut,
        ))  # fmt: skip
    return found


def tags_of(tx: Transaction, access_id: int | None) -> tuple[list[str] | None, list[str] | None]:
    if access_id is None:
        return None, None
    return next((r["acl_tags"], r["required_tags"]) for _, r in tx.rows("access_sets") if r["id"] == access_id)


@statement("SELECT b.document_id, b.text, b.metadata, d.content_hash FROM document_bodies b")
def _bodies(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    found = []
    for id_ in sorted(set(p[0])):
        b, d = tx.get("document_bodies", id_), tx.get("documents", id_)
        if b is not None and d is not None:
            found.append((id_, b["text"], b["metadata"], d["content_hash"]))
    return found


@statement("ORDER BY s.generation, s.document_id FOR UPDATE OF s")
async def _lock_wants(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    found = []
    for id_ in sorted(set(p["ids"])):
        key = id_, p["generation"], p["store"]
        if tx.get("index_state", *key) is not None and (row := await tx.lock("index_state", *key)) is not None:
            found.append((id_, row["want_seq"], p["generation"]))
    return found


async def _update_state(tx: Transaction, key: tuple[Any, ...], **values: Any) -> int:
    row = await tx.lock("index_state", *key)
    if row is None:
        return 0
    await tx.put("index_state", changed(row, **values), *key)
    return 1


@statement("refused = %s, written = written + %s")
async def _settle(tx: Transaction, p: Any) -> int:
    seq, refused, embedded, error, id_, generation = p
    row = await tx.lock("index_state", id_, generation, "vectors")
    assert row is not None
    values = {"seq": seq, "settled_at": tx.now(), "refused": refused, "written": row["written"] + embedded}
    return await _update_state(tx, (id_, generation, "vectors"), **values, attempts=0, error=error)


async def _claimed(tx: Transaction, p: Any) -> tuple[tuple[Any, ...], Row | None, dict[str, Any]]:
    key = p["document"], p["generation"], "keywords"
    row = await tx.lock("index_state", *key)
    if row is None:
        return key, None, {}
    touched = set(p["ids"])
    kept = [(i, h) for i, h in zip(row["confirmed"], row["confirmed_hashes"], strict=True) if i not in touched]
    return key, row, {
        "claimed": sorted({*row["claimed"], *touched}), "confirmed": [i for i, _ in kept],
        "confirmed_hashes": [h for _, h in kept],
    }  # fmt: skip


@statement("seq = least(s.seq, %(seq)s)")
async def _reopen(tx: Transaction, p: Any) -> int:
    key, row, values = await _claimed(tx, p)
    return 0 if row is None else await _update_state(tx, key, **values, seq=min(row["seq"], p["seq"]))


@statement("UPDATE index_state s SET claimed = ARRAY(SELECT unnest(s.claimed) UNION")
async def _claim(tx: Transaction, p: Any) -> int:
    key, row, values = await _claimed(tx, p)
    return 0 if row is None else await _update_state(tx, key, **values)


@statement("claimed = %s, confirmed = %s, confirmed_hashes = %s")
async def _confirm(tx: Transaction, p: Any) -> int:
    seq, claimed, confirmed, hashes, written, id_, generation = p
    row = await tx.lock("index_state", id_, generation, "keywords")
    assert row is not None
    values = {"seq": seq, "settled_at": tx.now(), "claimed": claimed, "confirmed": confirmed}
    return await _update_state(
        tx, (id_, generation, "keywords"), **values, confirmed_hashes=hashes, written=row["written"] + written,
        attempts=0, error=None,
    )  # fmt: skip


@statement("SELECT seq FROM documents WHERE id = %s FOR UPDATE")
async def _lock_seq(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    row = await tx.lock("documents", p[0])
    return [] if row is None else [(row["seq"],)]


@statement("SELECT greatest(nextval('ledger_seq'), seq + 1, %s + 1) AS seq")
async def _raise_seq(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    above, id_, _ = p
    row = await tx.lock("documents", id_)
    if row is None:
        return []
    seq = max(tx.database.draw("ledger_seq"), row["seq"] + 1, above + 1)
    announced = seq if row["announced_seq"] == row["seq"] else row["announced_seq"]
    await tx.put("documents", changed(row, seq=seq, announced_seq=announced), id_)
    return [(seq,)]


@statement("UPDATE index_state SET want_seq = %s,")
async def _raise_want(tx: Transaction, p: Any) -> int:
    want, *key = p
    row = await tx.lock("index_state", *key)
    if row is None:
        return 0
    since = row["pending_since"] if row["seq"] < row["want_seq"] else tx.now()
    return await _update_state(tx, tuple(key), want_seq=want, pending_since=since)


@statement("UPDATE index_state SET attempts = attempts + 1")
async def _failed(tx: Transaction, p: Any) -> int:
    error, seconds, *key = p
    row = await tx.lock("index_state", *key)
    assert row is not None
    next_at = tx.now() + timedelta(seconds=seconds)
    return await _update_state(tx, tuple(key), attempts=row["attempts"] + 1, error=error, next_at=next_at)


@statement("SELECT s.store, count(*), min(s.pending_since) FROM index_state s")
def _pending_backfill(tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    waiting: dict[str, list[datetime]] = {}
    for (id_, _, store), s in tx.rows("index_state"):
        d = tx.get("documents", id_)
        if d is not None and s["seq"] < s["want_seq"] and s["attempts"] == 0 and d["lane"] == "backfill":
            waiting.setdefault(store, []).append(s["pending_since"])
    return [(store, len(since), min(since)) for store, since in waiting.items()]


@statement("WITH taken AS ( SELECT document_id, generation, store FROM index_state WHERE seq < want_seq")
async def _due(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    limit, again = p
    waiting = sorted(
        (
            (row["next_at"], key, row) for key, row in tx.rows("index_state")
            if row["seq"] < row["want_seq"] and row["next_at"] <= tx.began
        ),
        key=lambda item: (item[0], item[1]),
    )  # fmt: skip
    taken = {}
    for _, key, row in waiting[:limit]:
        if tx.try_lock("index_state", *key):
            now = tx.now()
            wait = max(timedelta(seconds=again), now - row["pending_since"])
            await tx.put("index_state", changed(row, next_at=now + wait), *key)
            d = tx.get("documents", key[0])
            assert d is not None
            taken[key[0], key[1]] = (key[0], d["tenant"], d["source"], d["external_id"], key[1], d["lane"])
    return [taken[key] for key in sorted(taken)]


# Announcements


@statement("GROUP BY document_id HAVING bool_and(seq >= want_seq)")
def _reached(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    states: dict[UUID, bool] = {}
    for key, row in tx.rows("index_state"):
        if key[0] in p[0] and key[1] == GENERATION:
            states[key[0]] = states.get(key[0], True) and row["seq"] >= row["want_seq"]
    return [(id_,) for id_, reached in states.items() if reached]


@statement("WHERE d.announced_seq < d.seq AND v.seq >= v.want_seq AND k.seq >= k.want_seq")
def _ready(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    found = []
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
        found.append((
            id_, d["tenant"], d["source"], d["external_id"], d["seq"], d["version"], state, GENERATION,
            len(m["chunk_ids"]) if m else 0, d["lane"], d["changed_at"], d["received_at"],
        ))  # fmt: skip
    return sorted(found, key=lambda row: row[4])


@statement("SELECT id, seq FROM documents WHERE announced_seq < seq AND seq > %s ORDER BY seq LIMIT %s")
def _unannounced(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    after, limit = p
    found = [(k[0], d["seq"]) for k, d in tx.rows("documents") if d["announced_seq"] < d["seq"] and d["seq"] > after]
    return sorted(found, key=lambda row: row[1])[:limit]


@statement("UPDATE documents d SET announced_seq = greatest(d.announced_seq, w.seq)")
async def _announced(tx: Transaction, p: Any) -> int:
    for id_, seq in sorted(zip(p[1], p[2], strict=True)):
        row = await tx.lock("documents", id_)
        if row is not None:
            await tx.put("documents", changed(row, announced_seq=max(row["announced_seq"], seq)), id_)
    return len(p[1])


# A sink that cuts a text itself


@statement("SELECT content_hash, media_type FROM documents WHERE id = %s FOR UPDATE")
async def _lock_text(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    row = await tx.lock("documents", p[0])
    return [] if row is None else [(row["content_hash"], row["media_type"])]


# The chunk table


@statement("SELECT wanted.text, found.embedding::real[] FROM unnest(%s::text[]) AS wanted (text)")
def _of_texts(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    there = {row["text"]: row["embedding"] for _, row in tx.rows("chunks")}
    return [(text, there[text].to_list()) for text in p[0] if text in there]


@statement("SELECT document_id, id FROM chunks_g1 WHERE document_id = ANY(%s)")
def _present(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    ids = set(p[0])
    return [(row["document_id"], key[0]) for key, row in tx.rows("chunks") if row["document_id"] in ids]


@statement("INSERT INTO chunks_g1 (id, document_id, access_id, text, embedding, in_graph)")
async def _insert_chunk(tx: Transaction, p: Any) -> int:
    id_, document, access_id, text, embedding, in_graph = p
    if tx.get("chunks", id_) is not None or await tx.lock("chunks", id_) is not None:
        return 0
    row = {"document_id": document, "access_id": access_id, "text": text, "embedding": embedding, "in_graph": in_graph}
    row["stood"] = asyncio.get_running_loop().time()
    await tx.put("chunks", row, id_)
    return 1


@statement("DELETE FROM chunks_g1 WHERE id = ANY(%s)")
async def _delete_chunks(tx: Transaction, p: Any) -> int:
    for id_ in p[0]:
        if await tx.lock("chunks", id_) is not None:
            await tx.put("chunks", None, id_)
    return len(p[0])


@statement("UPDATE chunks_g1 c SET access_id = stale.access_id")
async def _restamp(tx: Transaction, p: Any) -> int:
    ids, accesses, limit = p
    wanted = dict(zip(ids, accesses, strict=True))
    stale = []
    for key, row in tx.rows("chunks"):
        access = wanted.get(row["document_id"])
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


# Bulks of unknown outcome


@statement("INSERT INTO open_bulks AS o (id, keyword_index, documents, chunks, seqs, next_at)")
async def _open_bulk(tx: Transaction, p: Any) -> int:
    id_, index, documents, chunks, seqs, check = p
    row = await tx.lock("open_bulks", id_)
    if row is not None:
        after = changed(row, unanswered=row["unanswered"] + 1, sent_at=tx.now())
    else:
        after = {
            "keyword_index": index, "documents": documents, "chunks": chunks, "seqs": seqs, "unanswered": 1,
            "sent_at": tx.now(), "next_at": tx.now() + timedelta(seconds=check),
        }  # fmt: skip
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
    found = []
    for id_ in sorted(set(p[1])):
        s, d = tx.get("index_state", id_, GENERATION, "keywords"), tx.get("documents", id_)
        if s is None or d is None:
            continue
        acl, _ = tags_of(tx, d["access_id"])
        wanted = d["deleted_at"] is None and d["version"] is not None and bool(acl)
        m = tx.get("manifests", id_, GENERATION)
        unknown = m is None or d["content_hash"] is None
        is_cut = None if unknown or m is None else m["content_hash"] == d["content_hash"]
        found.append((id_, s["want_seq"], wanted, m["chunk_ids"] if m else None, is_cut, s["confirmed"]))
    return found


@statement("DELETE FROM open_bulks WHERE id = %s")
async def _forget_bulk(tx: Transaction, p: Any) -> int:
    await tx.put("open_bulks", None, p[0])
    return 1


# Access and queries


@statement("INSERT INTO memberships AS m (tenant, source, principal, groups, observed_at)")
async def _membership(tx: Transaction, p: Any) -> int:
    tenant, source, principal, groups, observed_at = p
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


@statement("FROM unnest(%(chunks)s::uuid[], %(documents)s::uuid[]) AS c (chunk_id, document_id) CROSS JOIN LATERAL")
def _verify(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    found = []
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
            found.append((
                chunk, document, d["external_id"], d["source"], d["title"] or "", d["source_url"],
                m["chunk_ids"].index(chunk), d["author"], d["media_type"], d["source_modified_at"],
            ))  # fmt: skip
    return found


@statement("INSERT INTO dead_letters")
async def _letter(tx: Transaction, p: Any) -> int:
    written = 0
    for id_, stage, code, document in zip(p[0], p[4], p[5], p[7], strict=True):
        if tx.get("dead_letters", id_) is None and await tx.lock("dead_letters", id_) is None:
            row = {"stage": stage, "code": code, "document": document, "at": tx.now()}
            await tx.put("dead_letters", row, id_)
            written += 1
    return written
