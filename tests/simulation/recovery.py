"""What an operator runs after Postgres lost its tail: the steps of ``penstock recover``, then the audit with repair.

``Recovery``, ``Examiner`` and ``Mender`` are the product's own. Here are Kafka's offsets as they see them, and what
their statements do in memory. An audit's memory of its runs (``pipeline.audit.runs``) is left out.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from pipeline.audit.examine import Examiner, ranges_end
from pipeline.audit.mend import Mender
from pipeline.audit.walk import SECOND_LOOK_SECONDS
from pipeline.core.errors import PenstockError
from pipeline.recover import Recovery
from pipeline.stores.keywords import Keywords
from tests.simulation.database import Row, Transaction
from tests.simulation.keyword_store import Elasticsearch
from tests.simulation.statements import GENERATION, NEW_DOCUMENT, new_state, statement, tags_of
from topics.offsets import GroupBusy, Log, OffsetsUnavailable

if TYPE_CHECKING:
    from tests.simulation.kafka import Group
    from tests.simulation.world import Process, World

AGAIN_SECONDS = 5.0
"""After a failure the operator runs the command again."""
ROUNDS = 3
"""As pipeline.audit.mend.ROUNDS."""


async def recovered(operator: Process, since: datetime, stop: Callable[[], Callable[[], None]]) -> None:
    """``penstock recover --since``, run until it succeeds. ``stop`` ends the workers that write the ledger and returns
    what starts them again."""
    recovery = _recovery(operator)
    while True:
        start = stop()
        try:
            await recovery.require_stopped()
            await recovery.raise_sequence()
            rewound = await recovery.rewind(since)
            start()
            await recovery.replayed(rewound, lambda: None)
            await recovery.look_again()
            await recovery.settled()
            await audited(operator)
            return
        except PenstockError:
            await asyncio.sleep(AGAIN_SECONDS)


async def audited(operator: Process) -> None:
    """``penstock audit --repair``: look at everything, doubt what differs, wait for the sinks, look again. Raises
    Retryable, Misconfigured."""
    es: Any = Elasticsearch(operator)
    examiner = Examiner(cast(Any, operator.pool), es, operator.world.generation)
    mender = Mender(examiner, Keywords(es), cast(Any, operator.producer))
    for _ in range(ROUNDS):
        await examiner.refresh()
        suspects: set[UUID] = set()
        position: UUID | None = None
        while documents := await examiner.following(position):
            suspects |= await _differing(examiner, position, documents)
            position = documents[-1]
        suspects |= await _differing(examiner, position, [])
        await asyncio.sleep(SECOND_LOOK_SECONDS)
        if not suspects or not await mender.doubt(suspects):
            return
        operator.world.tally["documents mended by the audit"] += len(suspects)
        await _recovery(operator).settled()


async def _differing(examiner: Examiner, after: UUID | None, documents: list[UUID]) -> set[UUID]:
    async with aclosing(examiner.examine(ranges_end(documents, after), documents)) as verdicts:
        return {verdict.document async for verdict in verdicts if not verdict.clean}


def _recovery(operator: Process) -> Recovery:
    es: Any = Elasticsearch(operator)
    return Recovery(cast(Any, operator.pool), es, cast(Any, Offsets(operator)))


class Offsets:
    """What the product sees of ``topics.offsets.Groups``."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world: World = process.world

    async def members(self, group: str) -> list[str]:
        async with self._reached("members"):
            found = self._group(group)
            return [] if found is None else [member.process.name for member in found.members]

    async def committed(self, group: str) -> dict[tuple[str, int], int]:
        async with self._reached("committed"):
            found = self._group(group)
            return {} if found is None else dict(found.committed)

    async def logs(self, topics: Collection[str], moment: datetime) -> dict[tuple[str, int], Log]:
        async with self._reached("logs"):
            return {
                place: Log(0, times[0] if times else None, sum(at < moment for at in times), len(times))
                for place, times in self._world.broker.sent(topics).items()
            }

    async def commit(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        async with self._reached("commit"):
            found = self._group(group)
            if found is None or not offsets:
                return
            if found.members:
                raise GroupBusy(f"{group} has {len(found.members)} members")
            found.committed.update(offsets)
            found.rebalance()

    def _group(self, name: str) -> Group | None:
        return self._world.broker.groups.get(name.removeprefix("penstock-"))

    @asynccontextmanager
    async def _reached(self, doing: str) -> AsyncIterator[None]:
        try:
            await self._process.reach("kafka", doing)
        except ConnectionError as error:
            raise OffsetsUnavailable("Kafka is away") from error
        yield


# What the statements of recover and of the audit do


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


@statement("SELECT clock_timestamp()")
def _now(tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [(tx.now(),)]


def _sizes(tx: Transaction, ids: Collection[UUID]) -> list[tuple[Any, ...]]:
    found = []
    for id_ in sorted(ids):
        m, b = tx.get("manifests", id_, GENERATION), tx.get("document_bodies", id_)
        found.append((id_, len(m["chunk_ids"]) if m else 0, len(b["text"].encode()) if b else 0))
    return found


@statement("WHERE d.id > %(after)s ORDER BY d.id LIMIT %(limit)s) d")
def _next_documents(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return _sizes(tx, [k[0] for k, _ in tx.rows("documents") if k[0] > p["after"]])[: p["limit"]]


@statement("(SELECT id FROM documents WHERE id = ANY(%(ids)s)) d")
def _fitting(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return _sizes(tx, [i for i in set(p["ids"]) if tx.get("documents", i) is not None])


def _states(tx: Transaction, id_: UUID) -> tuple[Any, ...]:
    v, k = (tx.get("index_state", id_, GENERATION, store) for store in ("vectors", "keywords"))
    return (
        *((v["want_seq"], v["seq"], v["refused"], v["attempts"], v["error"]) if v else (None,) * 5),
        *((k["want_seq"], k["seq"], k["attempts"], k["error"]) if k else (None,) * 4),
    )


@statement("b.text, b.metadata, v.want_seq, v.seq, v.refused, v.attempts, v.error, k.want_seq, k.seq")
def _wanted(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    found = []
    for id_ in set(p["ids"]):
        if (d := tx.get("documents", id_)) is None:
            continue
        m, b = tx.get("manifests", id_, GENERATION), tx.get("document_bodies", id_)
        cut = (m["content_hash"], m["chunk_ids"], m["token_counts"], m["spans"], m["headings"]) if m else (None,) * 5
        found.append((
            id_, d["tenant"], d["source"], d["external_id"], d["seq"],
            d["deleted_at"] is None and d["version"] is not None, d["content_hash"], d["access_id"],
            *tags_of(tx, d["access_id"]), d["title"], d["source_url"], d["author"], d["media_type"],
            d["source_modified_at"], d["lane"], *cut, *((b["text"], b["metadata"]) if b else (None, None)),
            *_states(tx, id_),
        ))  # fmt: skip
    return found


@statement("SELECT d.id, d.seq, v.want_seq, v.seq, v.refused, v.attempts, v.error, k.want_seq, k.seq")
def _standings(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(i, d["seq"], *_states(tx, i)) for i in set(p["ids"]) if (d := tx.get("documents", i)) is not None]


@statement("SELECT 1 FROM documents WHERE id = ANY(%s) ORDER BY id FOR UPDATE")
async def _lock_all(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(1,) for id_ in sorted(set(p[0])) if await tx.lock("documents", id_) is not None]


@statement("SELECT document_id, id, access_id, sha256(convert_to(text, 'UTF8')) FROM chunks_g1")
def _rows(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    def is_inside(document: UUID) -> bool:
        if "ids" in p:
            return document in p["ids"]
        after, last = p["after"], p["last"]
        return (after is None or document > after) and (last is None or document <= last)

    rows = sorted((r["document_id"], k[0], r) for k, r in tx.rows("chunks") if is_inside(r["document_id"]))
    start = (p["document"], p["id"]) if "document" in p else None
    return [
        (document, id_, row["access_id"], hashlib.sha256(row["text"].encode()).digest())
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


@statement("SELECT greatest(nextval('ledger_seq'), %s)")
def _draw_above(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(max(tx.database.draw("ledger_seq"), p[0]),)]
