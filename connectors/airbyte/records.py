"""Keeps the records of all streams in a file of SQLite in the connector's folder, with the states up to which they were
read: a program can only be asked for what is new, and not for a record."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from urllib.parse import quote

from connectors.airbyte.messages import Record, State, StreamName, Unstorable, value_at
from connectors.airbyte.options import StreamOptions, Sync
from connectors.faults import OF_DATA
from connectors.row_file import open_rows, transaction
from connectors.rows import PAGE_BYTES, Row, Template, bounded, external_id, has_surrogates, is_true, size_of
from pipeline.core.errors import Misconfigured

T = TypeVar("T")
SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    id TEXT PRIMARY KEY, stream TEXT NOT NULL, row TEXT, change INTEGER NOT NULL, run INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS records_change ON records (change);
CREATE INDEX IF NOT EXISTS records_stream ON records (stream, run);
CREATE TABLE IF NOT EXISTS states (stream TEXT PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS streams (
    stream TEXT PRIMARY KEY, declared TEXT NOT NULL, since_run INTEGER, reread_at TEXT, read_at TEXT
);
CREATE TABLE IF NOT EXISTS refused (stream TEXT NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (stream, reason));
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# A record whose `row` is NULL is deleted. `change` is the number of its last change, `run` the last run that wrote it.
# streams: since_run is the run that began to read the stream from its beginning, until one has ended; reread_at is when
# that was, read_at when the last complete run began.
ALL = ""
"""In place of a stream, for a state that concerns all of them."""


@dataclass(frozen=True)
class Stream:
    """A stream as it is read."""

    label: str
    """Its name in the settings."""
    name: StreamName
    options: StreamOptions
    key: tuple[str, ...]
    """The fields that identify a record."""
    sync: Sync
    cursor: str | None

    @property
    def is_incremental(self) -> bool:
        return self.sync == "incremental"

    @cached_property
    def template(self) -> Template:
        return Template(self.options, self.key, prefix=prefix_of(self.label))

    def declaration(self) -> str:
        """Return what the stored records depend on: after a change they are read again."""
        name, columns = [self.name.name, self.name.namespace], sorted(self.template.columns)
        fields = [name, self.key, columns, self.options.deleted, self.sync, self.cursor]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def prefix_of(label: str) -> str:
    """Return how the ids of a stream's documents begin."""
    return f"{quote(label, safe='')}/"


class _Refused(Exception):
    """A record that cannot be stored. The text never quotes it."""


class RecordsFile:
    """Law: a state is stored after the records that the program wrote before it, and only if more records of its stream
    followed it in the same run, or the run read the stream to its end; the state is thus never ahead of the records.
    (Programs were seen to write the last state although they failed, or before its records.) Methods block."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._path = folder / "records.sqlite"
        self._max_bytes = max_bytes
        self._file: sqlite3.Connection | None = None
        self._using = Lock()
        self._streams: dict[StreamName, Stream] = {}
        self._shown: set[str] = set()
        """The labels of the streams of which the run has shown a record."""
        self._pending: dict[str, tuple[str, bool]] = {}
        """By label: the last state, which is not stored yet, and whether the run had shown a record before it."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _database(self) -> sqlite3.Connection:
        if self._file is None:
            self._file = open_rows(self._path, self._max_bytes)
            self._file.executescript(SCHEMA)
            self._file.execute("INSERT OR IGNORE INTO facts VALUES ('epoch', ?)", [uuid.uuid4().hex])
        return self._file

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._using, transaction(self._database(), "max_records_bytes"):
            yield self._database()

    def begin(
        self, streams: Sequence[Stream], unknown: Collection[str], *, reread: bool
    ) -> tuple[int, list[Mapping[str, Any]]]:
        """Begin a run of these streams. Returns its number, and the states with which to continue. reread: everything
        is read from the beginning. Records of streams that are no longer declared so are removed.

        unknown: labels of declared streams that the program does not have now. Their records are kept."""
        self._streams = {stream.name: stream for stream in streams}
        self._shown, self._pending = set(), {}
        with self._transaction() as file:
            run = self._number(file, "run") + 1
            self._set(file, "run", run)
            self._remove_others(file, streams, unknown)
            due = self._due(file, streams, reread)
            for stream in due:
                file.execute("UPDATE streams SET since_run = ? WHERE stream = ?", [run, stream.label])
                file.execute("DELETE FROM states WHERE stream = ?", [stream.label])
                file.execute("DELETE FROM refused WHERE stream = ?", [stream.label])
            if any(stream.is_incremental for stream in due):
                file.execute("DELETE FROM states WHERE stream = ?", [ALL])
            if len(due) == len(streams):
                file.execute("DELETE FROM refused WHERE stream = ?", [ALL])
            states = file.execute("SELECT state FROM states ORDER BY stream").fetchall()
        return run, [json.loads(state) for (state,) in states]

    def _remove_others(self, file: sqlite3.Connection, streams: Sequence[Stream], unknown: Collection[str]) -> None:
        declared = {stream.label: stream.declaration() for stream in streams}
        for label, was in file.execute("SELECT stream, declared FROM streams").fetchall():
            if label not in unknown and declared.get(label) != was:
                for table in ("records", "states", "streams", "refused"):
                    file.execute(f"DELETE FROM {table} WHERE stream = ?", [label])  # noqa: S608 — names listed here
        file.executemany("INSERT OR IGNORE INTO streams (stream, declared) VALUES (?, ?)", declared.items())

    def _due(self, file: sqlite3.Connection, streams: Sequence[Stream], reread: bool) -> list[Stream]:
        """Return the streams that are read from their beginning."""
        now = datetime.now(UTC)
        due = []
        for stream in streams:
            since_run, reread_at = file.execute(
                "SELECT since_run, reread_at FROM streams WHERE stream = ?", [stream.label]
            ).fetchone()
            every = timedelta(seconds=stream.options.reread_seconds)
            is_new = reread_at is None and since_run is None
            is_old = reread_at is not None and bool(every) and now - datetime.fromisoformat(reread_at) >= every
            if reread or not stream.is_incremental or is_new or (is_old and since_run is None):
                due.append(stream)
        if any(stream.is_incremental for stream in due) and _has_common_state(file):
            return list(streams)
        return due

    def fold(self, run: int, messages: Iterable[Record | State | Unstorable]) -> None:
        """Store records, and the states that they follow. Raises Misconfigured when the file is full."""
        with self._transaction() as file:
            change = self._number(file, "change")
            for message in messages:
                match message:
                    case Record():
                        change = self._store(file, message, run, change)
                    case State():
                        self._hold(message)
                    case Unstorable():
                        labels = [stream.label for name, stream in self._streams.items() if name.name == message.stream]
                        for label in labels or [ALL]:
                            self._refuse(file, label, message.reason)
            self._set(file, "change", change)

    def _store(self, file: sqlite3.Connection, record: Record, run: int, change: int) -> int:
        """Store a record. Returns the number of the last change."""
        stream = self._streams.get(record.stream)
        if stream is None:
            return change
        for label in (stream.label, ALL):
            if self._pending.get(label, ("", False))[1]:
                self._keep(file, label)
        self._shown |= {stream.label, ALL}
        try:
            id_, row = self._row(stream, record.data)
        except (_Refused, *OF_DATA) as error:
            reason = f"a record holds what cannot be read ({type(error).__name__})"
            if isinstance(error, RecursionError):
                reason = "a record is nested too deeply"
            elif isinstance(error, _Refused):
                reason = str(error)
            self._refuse(file, stream.label, reason)
            return change
        stored = file.execute("SELECT row FROM records WHERE id = ?", [id_]).fetchone()
        if stored == (row,) or (stored is None and row is None):
            file.execute("UPDATE records SET run = ? WHERE id = ?", [run, id_])
            return change
        change += 1
        values = [id_, stream.label, row, change, run]
        file.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", values)
        return change

    def _row(self, stream: Stream, data: Mapping[str, Any]) -> tuple[str, str | None]:
        """Return the id and the text of a record's row, None if it is deleted."""
        row = {column: value_at(data, column) for column in stream.template.columns}
        missing = [column for column in stream.key if row[column] is None]
        if missing:
            raise _Refused(f"a record has no {missing[0]}, which is part of its id")
        if any(isinstance(row[column], str) and has_surrogates(row[column]) for column in stream.key):
            raise _Refused("a record has an id with half of a character")
        try:
            id_ = prefix_of(stream.label) + external_id(tuple(row[column] for column in stream.key))
        except Misconfigured as error:
            raise _Refused("a record has an id that is no whole number and no text") from error
        deleted = stream.options.deleted
        if deleted and is_true(row[deleted]):
            return id_, None
        return id_, json.dumps(row, ensure_ascii=False, sort_keys=True).encode("utf-8", "replace").decode()

    def _hold(self, state: State) -> None:
        stream = self._streams.get(state.stream) if state.stream is not None else None
        if state.stream is not None and (stream is None or not stream.is_incremental):
            return  # a state of a full refresh continues only the run that wrote it
        label = ALL if stream is None else stream.label
        self._pending[label] = json.dumps(state.value), label in self._shown

    def _keep(self, file: sqlite3.Connection, label: str) -> None:
        """Store the last state of a stream, if there is one."""
        if label in self._pending:
            state, _ = self._pending.pop(label)
            file.execute("INSERT OR REPLACE INTO states VALUES (?, ?)", [label, state])

    def complete(self, labels: Collection[str], began: datetime) -> None:
        """Record that a run has read these streams to their end. Where it is the end of a reading from the beginning,
        records that it has not shown are removed, unless one that it has shown could not be stored."""
        with self._transaction() as file:
            refused = {label for (label,) in file.execute("SELECT DISTINCT stream FROM refused")}
            if {stream.label for stream in self._streams.values()} <= {*labels}:
                self._keep(file, ALL)
            for label in labels:
                self._keep(file, label)
                [since_run] = file.execute("SELECT since_run FROM streams WHERE stream = ?", [label]).fetchone()
                file.execute("UPDATE streams SET read_at = ? WHERE stream = ?", [began.isoformat(), label])
                if since_run is None:
                    continue
                if not refused & {label, ALL}:
                    file.execute("DELETE FROM records WHERE stream = ? AND run < ?", [label, since_run])
                file.execute(
                    "UPDATE streams SET since_run = NULL, reread_at = ? WHERE stream = ?", [began.isoformat(), label]
                )

    def page(self, after: str, limit: int, streams: Collection[str]) -> list[tuple[str, str, Row]]:
        """Return the first records of these streams after an id: id, stream and row."""
        marks = ", ".join("?" * len(streams))
        where = f"id > ? AND stream IN ({marks}) ORDER BY id LIMIT ?"
        page: list[tuple[str, str, Row]] = []
        size = 0
        with self._using:
            for selected in self._select(where, [after, *streams, limit]):
                page.append(selected)
                if (size := size + size_of(selected)) > PAGE_BYTES:
                    break
        return page

    def rows(self, ids: Sequence[str], use: Callable[[Iterable[tuple[str, str, Row]]], T]) -> T:
        """Return what ``use`` makes of these records, of which one at a time is in memory."""
        marks = ", ".join("?" * len(ids))
        with self._using:
            return use(self._select(f"id IN ({marks}) ORDER BY id", ids))

    def position(self) -> tuple[str, int]:
        """Return the making of the file, and the number of the last change."""
        with self._using:
            file = self._database()
            [epoch] = file.execute("SELECT value FROM facts WHERE name = 'epoch'").fetchone()
            return epoch, self._number(file, "change")

    def changed(self, after: int, limit: int) -> tuple[list[str], int]:
        """Return the ids of the first records that changed after a number, and the last number of these changes."""
        with self._using:
            rows = (
                self._database()
                .execute("SELECT id, change FROM records WHERE change > ? ORDER BY change LIMIT ?", [after, limit])
                .fetchall()
            )
        return [id_ for id_, _ in rows], rows[-1][1] if rows else after

    def read_at(self) -> dict[str, datetime]:
        """Return when the last complete run of each stream began, for those that were ever read to their end."""
        with self._using:
            rows = self._database().execute(
                "SELECT stream, read_at FROM streams WHERE read_at IS NOT NULL AND reread_at IS NOT NULL"
            )
            return {label: datetime.fromisoformat(at) for label, at in rows.fetchall()}

    def refused(self) -> dict[str, str]:
        """Return the reasons for which records could not be stored, by stream."""
        with self._using:
            rows = self._database().execute("SELECT stream, reason FROM refused ORDER BY stream, reason").fetchall()
        reasons: dict[str, list[str]] = {}
        for label, reason in rows:
            reasons.setdefault(label, []).append(reason)
        return {label: "; ".join(several) for label, several in reasons.items()}

    def _refuse(self, file: sqlite3.Connection, label: str, reason: str) -> None:
        file.execute("INSERT OR IGNORE INTO refused VALUES (?, ?)", [label, reason])

    def _select(self, where: str, values: Sequence[Any]) -> Iterator[tuple[str, str, Row]]:
        """The caller holds the lock until it has read them."""
        keys = {stream.label: stream.key for stream in self._streams.values()}
        statement = f"SELECT id, stream, row FROM records WHERE row IS NOT NULL AND {where}"  # noqa: S608 — callers hand constants
        for id_, label, row in self._database().execute(statement, values):
            yield id_, label, bounded(json.loads(row), keys.get(label, ()))

    def _number(self, file: sqlite3.Connection, name: str) -> int:
        stored = file.execute("SELECT value FROM facts WHERE name = ?", [name]).fetchone()
        return int(stored[0]) if stored else 0

    def _set(self, file: sqlite3.Connection, name: str, value: object) -> None:
        file.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", [name, str(value)])


def _has_common_state(file: sqlite3.Connection) -> bool:
    return file.execute("SELECT 1 FROM states WHERE stream = ?", [ALL]).fetchone() is not None
