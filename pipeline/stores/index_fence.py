"""Whether an Elasticsearch index is still the one that the ledger filled.

The ledger relies on what it confirmed: entries that are missing after a restored snapshot, from a stale primary or a
recreated index would never be written again, and surplus ones never deleted. See
docs/adr/0043-a-keyword-index-that-changed.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple
from uuid import UUID

from elasticsearch import AsyncElasticsearch
from psycopg.types.json import Jsonb

from pipeline.core.errors import IndexFenced, Misconfigured, Retryable
from pipeline.stores.postgres import Connection

Change = Literal["recreated", "new_history", "rewound"]
"""recreated: another index under the same name; new_history: a shard was restored, or forced from a stale or empty
copy; rewound: a shard lost operations that all of its copies had, as when a disk was set back."""


class Shard(NamedTuple):
    """A primary."""

    history: str
    """Drawn when the shard is made, restored from a snapshot, or forced from a copy that was not in sync."""
    checkpoint: int
    """Up to this number every in-sync copy had each operation, so that no failover loses it."""


@dataclass(frozen=True, slots=True)
class Known:
    """An index as the ledger remembers it."""

    index: str
    uuid: str
    shards: Mapping[int, Shard]
    changes: int = 0
    change: Change | None = None
    """Not None: the index is another one than the ledger filled, and is not searched."""
    changed_at: datetime | None = None
    position: UUID | None = None
    """The last document that was compared since the change."""
    compared: bool = False
    """Every document was compared since the change."""

    def __str__(self) -> str:
        """A line for people about an index that changed."""
        # Document ids are as good as random, so that their place among all ids is the share that was compared.
        share = 1.0 if self.compared else self.position.int / 2**128 if self.position else 0.0
        return f"{self.index} changed ({self.change}, {self.changed_at:%Y-%m-%d %H:%M} UTC), {share:.0%} compared"


@dataclass(frozen=True, slots=True)
class Seen:
    """An index as Elasticsearch reports it now. A shard whose primary has not started is absent."""

    uuid: str
    shards: Mapping[int, Shard]
    last_operations: Mapping[int, int]
    """The highest sequence number of each shard."""


def change(known: Known, now: Seen) -> Change | None:
    """How the index differs from the known one; None: nothing shows a change. ``known`` was read before ``now``.
    Pure."""
    if now.uuid != known.uuid:
        return "recreated"
    both = known.shards.keys() & now.shards.keys()
    if any(now.shards[n].history != known.shards[n].history for n in both):
        return "new_history"
    if any(now.last_operations[n] < known.shards[n].checkpoint for n in both):
        return "rewound"
    return None


def require_all(known: Known, now: Seen) -> None:
    """Raises Retryable when a known shard is missing at the moment, so that it cannot be compared. Pure."""
    if known.shards.keys() - now.shards.keys():
        raise Retryable(f"look at index {known.index}: some of its shards have not started", service="elasticsearch")


def latest_shards(known: Known, now: Seen) -> dict[int, Shard]:
    """The shards to remember, each with the highest checkpoint that was seen in its history. Pure."""
    shards = {**known.shards, **now.shards}
    for n in known.shards.keys() & now.shards.keys():
        before, after = known.shards[n], now.shards[n]
        if before.history == after.history and before.checkpoint <= now.last_operations[n]:
            shards[n] = max(before, after)
    return shards


_STARTED = ("STARTED", "RELOCATING")
"""A primary that starts replays its translog, so that its highest operation may be below the one it has stored. One
that is being moved serves until the move is done."""


async def look(es: AsyncElasticsearch, index: str) -> Seen:
    """One request, which needs the index privilege ``monitor``. The caller translates errors. Raises Retryable when
    none of its shards is there, Misconfigured when the name is an alias of several indexes."""
    answer = await es.indices.stats(
        index=index,
        metric="docs",
        level="shards",
        filter_path=[
            "indices.*.uuid",
            "indices.*.shards.*.routing.primary",
            "indices.*.shards.*.routing.state",
            "indices.*.shards.*.seq_no",
            "indices.*.shards.*.commit.user_data.history_uuid",
        ],
    )
    if not answer.body:
        raise Retryable(f"look at index {index}: its shards have not started", service="elasticsearch")
    stats, *others = answer["indices"].values()
    if others:
        raise Misconfigured(f"{index} is an alias of several indexes: keep one", service="elasticsearch")
    primaries = {
        int(number): copy
        for number, copies in stats.get("shards", {}).items()
        for copy in copies
        if copy["routing"]["primary"] and copy["routing"]["state"] in _STARTED and "seq_no" in copy and "commit" in copy
    }
    if not primaries:
        raise Retryable(f"look at index {index}: its shards have not started", service="elasticsearch")
    return Seen(
        stats["uuid"],
        {
            n: Shard(p["commit"]["user_data"]["history_uuid"], p["seq_no"]["global_checkpoint"])
            for n, p in primaries.items()
        },
        {n: p["seq_no"]["max_seq_no"] for n, p in primaries.items()},
    )


_KNOWN = """k.index_uuid, k.shards, k.changes, k.change, k.changed_at AT TIME ZONE 'UTC', k.position,
    k.compared_at IS NOT NULL"""


async def load(connection: Connection, index: str) -> Known | None:
    """The remembered index; None: it was never recorded."""
    cursor = await connection.execute(f"SELECT {_KNOWN} FROM keyword_indexes k WHERE k.keyword_index = %s", [index])  # noqa: S608 — constants of this module
    row = await cursor.fetchone()
    if row is None:
        return None
    uuid, shards, *rest = row
    return Known(index, uuid, {int(n): Shard(*shard) for n, shard in shards.items()}, *rest)


async def fenced(connection: Connection) -> list[Known]:
    """The indexes of living generations that are not searched, the active generation's first."""
    cursor = await connection.execute(
        "SELECT keyword_index FROM keyword_indexes JOIN generations USING (keyword_index)"
        " WHERE change IS NOT NULL AND state <> 'retired'"
        " GROUP BY keyword_index ORDER BY bool_or(state = 'active') DESC, keyword_index"
    )
    loaded = [await load(connection, index) for (index,) in await cursor.fetchall()]
    return [known for known in loaded if known is not None and known.change is not None]


async def require(known: Known, es: AsyncElasticsearch) -> None:
    """Raises IndexFenced when the index is not the one that the ledger filled, and the errors of ``look``."""
    if known.change is not None:
        raise IndexFenced
    now = await look(es, known.index)
    if change(known, now):
        raise IndexFenced
    require_all(known, now)


async def accept_first(connection: Connection, index: str, now: Seen) -> None:
    """Record an index that was never recorded, as the one that the ledger fills."""
    await connection.execute(
        "INSERT INTO keyword_indexes (keyword_index, index_uuid, shards) VALUES (%s, %s, %s)"
        " ON CONFLICT (keyword_index) DO NOTHING",
        [index, now.uuid, _json(now.shards)],
    )


async def remember(connection: Connection, known: Known, now: Seen) -> None:
    """Record the progress of the same index. Where another worker has recorded it meanwhile, the next look adds to
    that."""
    shards = latest_shards(known, now)
    if shards != known.shards:
        await connection.execute(
            "UPDATE keyword_indexes SET shards = %s WHERE keyword_index = %s AND changes = %s AND shards = %s",
            [_json(shards), known.index, known.changes, _json(known.shards)],
        )


async def fence(connection: Connection, known: Known, now: Seen, why: Change) -> bool:
    """Record that the index is another one: from now on nothing that was confirmed counts. Returns whether this is the
    first process that recorded it."""
    shards = now.shards if why == "recreated" else latest_shards(known, now)
    cursor = await connection.execute(
        "UPDATE keyword_indexes SET index_uuid = %s, shards = %s, changes = changes + 1, change = %s,"
        " changed_at = clock_timestamp(), position = NULL, compared_at = NULL"
        " WHERE keyword_index = %s AND changes = %s",
        [now.uuid, _json(shards), why, known.index, known.changes],
    )
    return cursor.rowcount == 1


async def record_compared(connection: Connection, known: Known, position: UUID | None) -> None:
    """Every document up to ``position`` was compared with the changed index; None: all of them were."""
    await connection.execute(
        "UPDATE keyword_indexes SET position = %(position)s,"
        " compared_at = CASE WHEN %(position)s::uuid IS NULL THEN clock_timestamp() END"
        " WHERE keyword_index = %(index)s AND changes = %(changes)s",
        {"position": position, "index": known.index, "changes": known.changes},
    )


async def accept(connection: Connection, known: Known) -> bool:
    """Let the index be searched again, if everything was compared and the work pending then has been written since.
    Returns whether that is so. Documents that were set aside do not delay it: the ledger knows that they are
    missing."""
    cursor = await connection.execute(
        "UPDATE keyword_indexes k SET change = NULL, changed_at = NULL, position = NULL, compared_at = NULL"
        " WHERE k.keyword_index = %s AND k.changes = %s AND k.compared_at IS NOT NULL AND NOT EXISTS ("
        "  SELECT FROM index_state s JOIN generations g ON g.name = s.generation"
        "  WHERE g.keyword_index = k.keyword_index AND g.state <> 'retired' AND s.store = 'keywords'"
        "   AND s.seq < s.want_seq AND s.attempts = 0 AND s.pending_since <= k.compared_at)",
        [known.index, known.changes],
    )
    return cursor.rowcount == 1


def _json(shards: Mapping[int, Shard]) -> Jsonb:
    return Jsonb({str(n): list(shard) for n, shard in shards.items()})
