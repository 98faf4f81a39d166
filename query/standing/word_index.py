"""Finds the standing questions that a passage has enough words of: their words in memory, by word.

A frequent word is one of thousands of questions, and reading these in Postgres for each passage costs more than
counting the words of all questions here, which takes 2 ms for 100,000.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import numpy as np
from cachetools import TTLCache

from pipeline.stores.postgres import Connection

INDEX_SECONDS = 600.0
"""How long an index is used. Questions that are kept or asked again meanwhile are read at each look; those that are
removed are still in it, and have to be looked up."""
MOST_RECENT = 2_000
"""So many questions since an index was made, and it is made again."""
MOST_NUMBERS, MOST_TENANT_NUMBERS = 4_000_000, 1_000_000
"""The words and identifiers that are held, of all tenants and of one: of its questions, those that were asked last.
Each takes 24 bytes, and 140 while an index is made: 20,000 of the longest questions, which have 200, took 540 MiB.
Usual ones have ten."""
ROWS_AT_ONCE = 2_000


class Entry(NamedTuple):
    """The words of a question, as ``query.standing.words`` made them."""

    id: UUID
    words: Sequence[int]
    names: Sequence[int]
    floor: int


class WordIndex:
    """Immutable."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.ids = [entry.id for entry in entries]
        self._floors = np.array([entry.floor for entry in entries], dtype=np.int64)
        words = np.array([n for entry in entries for n in (*entry.words, *entry.names)], dtype=np.int64)
        sizes = [len(entry.words) + len(entry.names) for entry in entries]
        rows = np.repeat(np.arange(len(entries)), np.array(sizes, dtype=np.int64))
        weights = np.array(
            [w for e in entries for w in (*[1] * len(e.words), *[len(e.words) + 1] * len(e.names))], dtype=np.float64
        )
        order = np.argsort(words, kind="stable")
        self._words, starts = np.unique(words[order], return_index=True)
        self._bounds = np.append(starts, len(words))
        self._rows, self._weights = rows[order], weights[order]

    @property
    def size(self) -> int:
        """The words and identifiers of all questions."""
        return len(self._rows)

    def above(self, passage: Collection[int], most: int) -> list[tuple[float, UUID]]:
        """The questions whose floor a passage with these words exceeds, with how far: at most so many, the farthest
        first."""
        contents = np.fromiter(passage, dtype=np.int64, count=len(passage))
        at = np.flatnonzero(np.isin(self._words, contents, assume_unique=True))
        if not len(at):
            return []
        places = [slice(self._bounds[n], self._bounds[n + 1]) for n in at]
        rows = np.concatenate([self._rows[place] for place in places])
        weights = np.concatenate([self._weights[place] for place in places])
        margins = np.bincount(rows, weights=weights, minlength=len(self.ids)) - self._floors
        above = np.flatnonzero(margins > 0)
        if len(above) > most:
            above = above[np.argpartition(-margins[above], most)[:most]]
        first = above[np.argsort(-margins[above], kind="stable")]
        return [(margin, self.ids[n]) for margin, n in zip(margins[first].tolist(), first.tolist(), strict=True)]


class _Read(NamedTuple):
    """The time from which questions have to be compared with the snapshot, and the snapshot in which an index was
    read."""

    since: datetime
    snapshot: str


class WordIndexes:
    """The indexes of tenants. Not to be shared between tasks that read the same tenant at the same time, which would
    only read it twice. Law: a question that was committed before a look is considered in it, if it is one of those of
    its tenant that were asked last and have MOST_TENANT_NUMBERS words together."""

    def __init__(self) -> None:
        self._known: TTLCache[str, tuple[_Read, WordIndex]] = TTLCache(
            MOST_NUMBERS, INDEX_SECONDS, getsizeof=lambda known: known[1].size + 1
        )

    async def of(self, connection: Connection, tenant: str) -> tuple[WordIndex, WordIndex]:
        """The tenant's index, and that of the questions that were kept or asked again since: a question in both counts
        in the second. Raises psycopg.Error."""
        if (known := self._known.get(tenant)) is not None:
            read, index = known
            recent = await _recent(connection, tenant, read)
            if len(recent) < MOST_RECENT:
                return index, await asyncio.to_thread(WordIndex, recent)
        # A transaction may commit a minute after its questions' time.
        cursor = await connection.execute(
            "SELECT clock_timestamp() - interval '5 minutes', pg_current_snapshot()::text"
        )
        [row] = await cursor.fetchall()
        index = await asyncio.to_thread(WordIndex, await _all(connection, tenant))
        self._known[tenant] = _Read(*row), index
        return index, WordIndex(())


def best(indexes: tuple[WordIndex, WordIndex], passage: Collection[int], most: int) -> list[UUID]:
    """The questions whose floors the passage exceeds by the most. indexes: of ``WordIndexes.of``."""
    index, recent = indexes
    since_ids = set(recent.ids)
    results = [result for result in index.above(passage, most + len(since_ids)) if result[1] not in since_ids]
    results += recent.above(passage, most)
    return [id_ for _, id_ in sorted(results, key=lambda result: -result[0])[:most]]


_ENTRIES = "SELECT id, words, names, words_floor FROM standing_questions WHERE tenant = %s AND words IS NOT NULL"


async def _all(connection: Connection, tenant: str) -> list[Entry]:
    async with connection.transaction(), connection.cursor(name="standing_words", binary=True) as cursor:
        cursor.itersize = ROWS_AT_ONCE  # decoding a hundred thousand at once would stop the event loop for a second
        await cursor.execute(f"{_ENTRIES} ORDER BY asked_at DESC", [tenant])
        entries, numbers = [], 0
        async for row in cursor:
            entry = Entry(*row)
            numbers += len(entry.words) + len(entry.names)
            if numbers > MOST_TENANT_NUMBERS:
                break
            entries.append(entry)
        return entries


_NEWEST = "pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
_COMMITTED_SINCE = f"""
    AND asked_at >= %s AND NOT pg_visible_in_snapshot((
        {_NEWEST} - ({_NEWEST} %% 4294967296 - xmin::text::bigint + 4294967296) %% 4294967296
    )::text::xid8, %s::pg_snapshot)
"""
"""xmin has the lower 32 bits of a transaction's number. That of some minutes ago has the same upper ones as the newest,
or one less."""


async def _recent(connection: Connection, tenant: str, read: _Read) -> list[Entry]:
    """The questions that were kept or asked again since, at most MOST_RECENT."""
    async with connection.cursor(binary=True) as cursor:
        await cursor.execute(f"{_ENTRIES} {_COMMITTED_SINCE} LIMIT {MOST_RECENT}", [tenant, read.since, read.snapshot])
        return [Entry(*row) for row in await cursor.fetchall()]
