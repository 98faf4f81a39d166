"""``pipeline.ledger.work``: what a sink has to do, claims and confirmations, failures, what is due."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from tests.simulation.database import Row, Transaction
from tests.simulation.statements.registry import changed, document_columns, statement


@statement("WHERE s.generation = %s AND s.store = %s AND s.document_id = ANY(%s) AND s.seq < s.want_seq ORDER BY d.id")
def _work(tx: Transaction, p: Any) -> list[Row]:
    generation, store, ids = p
    results = []
    for id_ in sorted(set(ids)):
        s = tx.get("index_state", id_, generation, store)
        d = tx.get("documents", id_)
        if s is None or d is None or s["seq"] >= s["want_seq"]:
            continue
        names = ("want_seq", "claimed", "confirmed", "confirmed_hashes", "refused", "attempts")
        results.append({**document_columns(tx, id_, generation), **{name: s[name] for name in names}})
    return results


@statement("SELECT b.document_id, b.text, b.metadata, d.content_hash FROM document_bodies b")
def _bodies(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    results = []
    for id_ in sorted(set(p[0])):
        b, d = tx.get("document_bodies", id_), tx.get("documents", id_)
        if b is not None and d is not None:
            results.append((id_, b["text"], b["metadata"], d["content_hash"]))
    return results


@statement("ORDER BY s.generation, s.document_id FOR UPDATE OF s")
async def _lock_wants(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    results = []
    for id_ in sorted(set(p["ids"])):
        key = id_, p["generation"], p["store"]
        if tx.get("index_state", *key) is not None and (row := await tx.lock("index_state", *key)) is not None:
            results.append((id_, row["want_seq"], p["generation"]))
    return results


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
    return (
        key,
        row,
        {
            "claimed": sorted({*row["claimed"], *touched}),
            "confirmed": [i for i, _ in kept],
            "confirmed_hashes": [h for _, h in kept],
        },
    )


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
        tx,
        (id_, generation, "keywords"),
        **values,
        confirmed_hashes=hashes,
        written=row["written"] + written,
        attempts=0,
        error=None,
    )


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


@statement("UPDATE index_state SET error = %s, next_at = clock_timestamp() + least(")
async def _put_off(tx: Transaction, p: Any) -> int:
    error, most, least, *key = p
    row = await tx.lock("index_state", *key)
    if row is None or row["seq"] >= row["want_seq"]:
        return 0
    wait = min(timedelta(seconds=most), max(timedelta(seconds=least), tx.now() - row["pending_since"]))
    return await _update_state(tx, tuple(key), error=error, next_at=tx.now() + wait)


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
            (row["next_at"], key, row)
            for key, row in tx.rows("index_state")
            if row["seq"] < row["want_seq"] and row["next_at"] <= tx.began
        ),
        key=lambda item: (item[0], item[1]),
    )
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
