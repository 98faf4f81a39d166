"""Keeps the table that a topic of changes describes, in a file of SQLite in the connector's folder. Records are folded
in their order; the file is made anew from the topic when it is lost, or may lack something."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from connectors.database.envelopes import BadRecord, change_of, is_unavailable, key_of_record, merged
from connectors.database.options import DatabaseOptions
from connectors.faults import OF_DATA
from connectors.row_file import open_rows, transaction
from connectors.rows import PAGE_BYTES, NoValue, Row, bounded, external_id, has_surrogates, size_of
from connectors.set_aside import SetAside
from connectors.source import Cursor, CursorExpired
from pipeline.core.errors import Misconfigured
from pipeline.kafka.follow import Ends, Followed, Follower

T = TypeVar("T")

SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (
    key TEXT PRIMARY KEY, id TEXT, row TEXT, problem TEXT, partition INTEGER NOT NULL, next INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS rows_id ON rows (id);
CREATE INDEX IF NOT EXISTS rows_next ON rows (partition, next);
CREATE TABLE IF NOT EXISTS positions (partition INTEGER PRIMARY KEY, next INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# A row whose `row` is NULL is deleted; its id remains. `next` is the offset that follows its last record.
RETENTION = ("cleanup.policy", "retention.ms", "retention.bytes", "delete.retention.ms")
MAX_BAD_RECORDS = 1_000
"""The most records without a row that are reported."""
UNKNOWN = NoValue(
    "has a large value that the database did not log: set REPLICA IDENTITY FULL for the table and take a new snapshot"
)
ABSENT = NoValue("is not in the row's last record")


class _Row(dict[str, Any]):
    """A row that may lack columns."""

    def __init__(self, values: Mapping[str, Any], absent: NoValue = ABSENT) -> None:
        super().__init__(values)
        self._absent = absent

    def __missing__(self, _column: str) -> NoValue:
        return self._absent


class TopicTable:
    """A ``connectors.database.reading.Reading`` of a topic: each request first reads what the topic has by then."""

    def __init__(self, options: DatabaseOptions, folder: Path, set_aside: SetAside) -> None:
        assert options.topic is not None
        assert options.kafka is not None
        self._options = options
        self._set_aside = set_aside
        self._follower = Follower(options.kafka.settings(), options.topic)
        self._path = folder / "topic.sqlite"
        self._declared = hashlib.sha256(json.dumps([options.topic, options.id, options.format]).encode()).hexdigest()
        self._file: sqlite3.Connection | None = None
        self._using = Lock()
        self._reading = asyncio.Lock()
        self._tombstones_last: timedelta | None = None
        """How long Kafka retains the record of a deletion."""

    async def close(self) -> None:
        await self._follower.close()
        if self._file is not None:
            self._file.close()

    async def _read_to_end(self) -> None:
        """Fold all records that the topic has. Raises Retryable and Misconfigured."""
        async with self._reading:
            now, topic = datetime.now(UTC), await self._follower.ends()
            if self._tombstones_last is None:
                settings = await self._follower.settings(RETENTION)
                self._tombstones_last = _tombstones_last(str(self._options.topic), settings)
            positions = await asyncio.to_thread(self._prepare, topic, now)
            for partition, end in sorted(topic.ends.items()):
                start = positions.get(partition, topic.begins[partition])
                async for records, following in self._follower.read(partition, start, end):
                    await asyncio.to_thread(self._fold, records, partition, following, len(topic.ends))
            await asyncio.to_thread(self._complete, now)

    async def pages(self, _columns: Sequence[str], after: str | None, limit: int) -> AsyncIterator[Sequence[Row]]:
        """Yield all rows by id. All rows with one id are in one page."""
        reached = after or ""
        while True:
            await self._read_to_end()
            rows = await asyncio.to_thread(self._page, reached, limit)
            if not rows:
                return
            yield [row for _, row in rows]
            reached = rows[-1][0]

    async def rows(self, _columns: Sequence[str], ids: Sequence[str], use: Callable[[Iterable[Row]], T]) -> T:
        await self._read_to_end()
        return await asyncio.to_thread(self._use, ids, use)

    async def start(self) -> Cursor:
        await self._read_to_end()
        return await asyncio.to_thread(self._position)

    async def changes(self, cursor: Cursor, limit: int) -> AsyncIterator[tuple[Sequence[str], Cursor]]:
        while True:
            await self._read_to_end()
            if (changed := await asyncio.to_thread(self._changed, cursor, limit)) is None:
                return
            yield changed
            _, cursor = changed

    def _database(self) -> sqlite3.Connection:
        if self._file is None:
            self._file = open_rows(self._path, self._options.max_topic_bytes)
            self._file.executescript(SCHEMA)
        return self._file

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._using, transaction(self._database(), "max_topic_bytes"):
            yield self._database()

    def _prepare(self, topic: Ends, now: datetime) -> dict[int, int]:
        """Return the offsets from which to read; the file is emptied where it does not belong to the topic, or may lack
        a record that the topic no longer has."""
        assert self._tombstones_last is not None
        with self._transaction() as file:
            facts = dict(file.execute("SELECT name, value FROM facts"))
            positions: dict[int, int] = dict(file.execute("SELECT partition, next FROM positions"))
            is_fitting = (
                (facts.get("log"), facts.get("declared")) == (topic.log_id, self._declared)
                and now - datetime.fromisoformat(facts["read_at"]) < self._tombstones_last / 2
                and all(
                    topic.begins.get(partition, 0) <= position <= topic.ends.get(partition, -1)
                    for partition, position in positions.items()
                )
            )
            if is_fitting:
                return positions
            for table in ("rows", "positions", "facts"):
                file.execute(f"DELETE FROM {table}")  # noqa: S608 — names listed here
            started = {"log": topic.log_id, "declared": self._declared, "epoch": uuid.uuid4().hex}
            file.executemany("INSERT INTO facts VALUES (?, ?)", [*started.items(), ("read_at", now.isoformat())])
            return {}

    def _complete(self, now: datetime) -> None:
        with self._transaction() as file:
            file.execute("UPDATE facts SET value = ? WHERE name = 'read_at'", [now.isoformat()])
            bad = file.execute(
                "SELECT partition, next - 1, problem FROM rows WHERE row IS NULL AND problem IS NOT NULL LIMIT ?",
                [MAX_BAD_RECORDS],
            ).fetchall()
        self._set_aside.replace(
            "topic", {f"record {partition}/{offset} of the topic": problem for partition, offset, problem in bad}
        )

    def _fold(self, records: Sequence[Followed], partition: int, following: int, partitions: int) -> None:
        """Fold a batch, and store the position after it, in one transaction."""
        with self._transaction() as file:
            for record in records:
                self._fold_record(file, record, partitions)
            file.execute("INSERT OR REPLACE INTO positions VALUES (?, ?)", [partition, following])

    def _fold_record(self, file: sqlite3.Connection, record: Followed, partitions: int) -> None:
        key = None
        try:
            key = key_of_record(record.key)
            change = change_of(record.value, self._options.format)
            if change.kind == "truncated":
                self._truncate(file, record, partitions)
            elif change.kind != "nothing" and (key or change.row):
                self._store(file, record, key, change.row)
        except BadRecord as error:
            self._deny(file, record, key, str(error))
        except OF_DATA as error:
            self._deny(file, record, key, f"holds what cannot be read ({type(error).__name__})")

    def _store(self, file: sqlite3.Connection, record: Followed, key: str | None, row: Row | None) -> None:
        """Replace the row of a key. Without a key, the id is the key. Raises BadRecord."""
        key = key or self._id(row)
        before_id, before = self._stored(file, key)
        row = None if row is None else merged(row, before)
        id_ = before_id if row is None else self._id(row)
        if before_id not in (None, id_):  # another row now has the key
            self._write(file, f"{key} was {before_id}", before_id, None, None, record)
        self._write(file, key, id_, row, None, record)

    def _write(
        self,
        file: sqlite3.Connection,
        key: str,
        id_: str | None,
        row: Row | None,
        problem: str | None,
        record: Followed,
    ) -> None:
        try:  # as bytes, because a text of SQLite cannot have half of a character
            stored = None if row is None else json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except RecursionError as error:
            raise BadRecord("has values that are nested too deeply") from error
        values = (key, id_, stored, problem, record.partition, record.offset + 1)
        file.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?)", values)

    def _deny(self, file: sqlite3.Connection, record: Followed, key: str | None, problem: str) -> None:
        """Record a problem of a row, whose values are then not known, or of a record without a row."""
        key = key or f"record {record.partition}/{record.offset}"
        id_, row = self._stored(file, key)
        self._write(file, key, id_, row, f"of its last record is not known, which {problem}", record)

    def _truncate(self, file: sqlite3.Connection, record: Followed, partitions: int) -> None:
        """Delete all rows. The cursors expire, so that a sweep compares, which asks before it deletes many."""
        if partitions > 1:
            raise Misconfigured(
                f"the table was truncated, and the topic {self._options.topic} has several partitions, whose order is"
                " not known: take a new snapshot into a new topic"
            )
        file.execute("UPDATE rows SET row = NULL, problem = NULL, next = ?", [record.offset + 1])
        file.execute("UPDATE facts SET value = ? WHERE name = 'epoch'", [uuid.uuid4().hex])

    def _stored(self, file: sqlite3.Connection, key: str) -> tuple[str | None, Row | None]:
        """Return the id and the row of a key, as far as they are known."""
        stored = file.execute("SELECT id, row FROM rows WHERE key = ?", [key]).fetchone()
        return (None, None) if stored is None else (stored[0], stored[1] and json.loads(stored[1]))

    def _id(self, row: Mapping[str, Any] | None) -> str:
        try:
            key = tuple((row or {})[column] for column in self._options.id)
            if any(isinstance(value, str) and has_surrogates(value) for value in key):
                raise BadRecord("has an id with half of a character")
            return external_id(key)
        except KeyError as error:
            raise BadRecord(f"has no column {error}, which is one of id") from error
        except Misconfigured as error:
            raise BadRecord("has an id that is no whole number and no text") from error

    def _position(self) -> Cursor:
        with self._using:
            file = self._database()
            [[epoch]] = file.execute("SELECT value FROM facts WHERE name = 'epoch'").fetchall()
            offsets = file.execute("SELECT partition, next FROM positions").fetchall()
        return {"epoch": epoch, "offsets": {str(partition): next_ for partition, next_ in offsets}}

    def _page(self, after: str, limit: int) -> list[tuple[str, Row]]:
        rows: list[tuple[str, Row]] = []
        size = 0
        with self._using:
            for id_, row in self._select("id > ? ORDER BY id", [after]):
                if (len(rows) >= limit or size > PAGE_BYTES) and id_ != rows[-1][0]:
                    break
                rows.append((id_, row))
                size += size_of(row)
        return rows

    def _use(self, ids: Sequence[str], use: Callable[[Iterable[Row]], T]) -> T:
        marks = ", ".join("?" * len(ids))
        with self._using:
            return use(row for _, row in self._select(f"id IN ({marks}) ORDER BY id", ids))

    def _changed(self, cursor: Cursor, limit: int) -> tuple[list[str], Cursor] | None:
        now = self._position()
        if cursor["epoch"] != now["epoch"]:
            raise CursorExpired("the topic was read again from its beginning")
        for partition, end in sorted(now["offsets"].items()):
            if (start := cursor["offsets"].get(partition, 0)) < end:
                ids, reached = self._ids_since(int(partition), start, end, limit)
                return ids, {**cursor, "offsets": {**cursor["offsets"], partition: reached}}
        return None

    def _ids_since(self, partition: int, start: int, end: int, limit: int) -> tuple[list[str], int]:
        """Return the ids of the first rows that changed, and the offset after their records."""
        with self._using:
            file = self._database()
            next_ = file.execute(
                "SELECT next FROM rows WHERE partition = ? AND next > ? ORDER BY next LIMIT 1 OFFSET ?",
                [partition, start, limit - 1],
            ).fetchone()
            reached: int = next_[0] if next_ else end
            ids = file.execute(  # a record may change two rows
                "SELECT DISTINCT id FROM rows WHERE partition = ? AND next > ? AND next <= ? AND id IS NOT NULL",
                [partition, start, reached],
            ).fetchall()
        return [id_ for (id_,) in ids], reached

    def _select(self, condition: str, values: Sequence[object]) -> Iterator[tuple[str, Row]]:
        """Yield ids and rows that exist, a row at a time. The caller holds the lock until it has read them."""
        statement = f"SELECT id, row, problem FROM rows WHERE row IS NOT NULL AND {condition}"  # noqa: S608 — callers hand constants
        for id_, row, problem in self._database().execute(statement, values):
            yield id_, self._known(json.loads(row), problem)

    def _known(self, row: dict[str, Any], problem: str | None) -> Row:
        """Return the row without the values that are not known: all, after a record with a problem."""
        if problem is not None:
            return _Row({name: row[name] for name in self._options.id}, NoValue(problem))
        ids = self._options.id  # Debezium logs the values of keys: whoever has the name of its placeholder is a row
        return _Row(
            {
                name: UNKNOWN if is_unavailable(value) and name not in ids else value
                for name, value in bounded(row, ids).items()
            }
        )


def _tombstones_last(topic: str, settings: Mapping[str, str]) -> timedelta:
    """Return how long Kafka retains the record of a deletion. Raises Misconfigured for a topic that forgets rows."""
    if settings["cleanup.policy"] == "compact":
        return timedelta(milliseconds=min(int(settings["delete.retention.ms"]), 10**12))
    if (settings["cleanup.policy"], settings["retention.ms"], settings["retention.bytes"]) == ("delete", "-1", "-1"):
        return timedelta.max
    raise Misconfigured(
        f"the topic {topic} forgets rows that do not change: set cleanup.policy=compact for it and take a new snapshot,"
        " or read the table by SQL (dsn)"
    )
