"""Rows of very many bytes: a page ends after them, and no value that no document can hold stays in memory."""

from __future__ import annotations

import json
import sqlite3
import tracemalloc
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from connectors.database.envelopes import PLACEHOLDER
from connectors.database.source import Database
from connectors.database.sql import Table
from connectors.declared import options
from connectors.rows import Key, Row
from connectors.set_aside import SetAside
from connectors.source import Context, Document, Entry, Listed, Unreadable
from pipeline.core.errors import Misconfigured
from pipeline.kafka.follow import Ends, Followed

LARGE = "x" * 100_000
DECLARED = {"title": "{subject}", "text": "{body}", "acl": ["team"]}


class Topic:
    """A topic of one partition, in the place of ``pipeline.kafka.follow.Follower``."""

    records: Sequence[Followed] = ()

    def __init__(self, *_: object) -> None:
        return None

    async def close(self) -> None:
        return None

    async def settings(self, _names: Sequence[str]) -> Mapping[str, str]:
        return {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}

    async def ends(self) -> Ends:
        return Ends("log", {0: 0}, {0: len(self.records)})

    async def read(self, _partition: int, start: int, end: int) -> AsyncIterator[tuple[Sequence[Followed], int]]:
        if start < end:
            yield self.records[start:end], end


def table(folder: Path, rows: Sequence[tuple[Any, ...]], *, key: str = "id", **more: Any) -> Database:
    with sqlite3.connect(folder / "source.sqlite") as file:
        file.execute("CREATE TABLE tickets (id INTEGER, subject TEXT, body TEXT, team TEXT)")
        file.executemany("INSERT INTO tickets VALUES (?, ?, ?, ?)", rows)
    dsn = f"sqlite:///{folder / 'source.sqlite'}"
    return source(folder, {"table": "tickets", "id": [key], **more}, {"PENSTOCK_S_DSN": dsn})


def topic(folder: Path, rows: Sequence[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, **more: Any) -> Database:
    values = [json.dumps(dict(zip(("id", "subject", "body", "team"), row, strict=True))).encode() for row in rows]
    records = [Followed(0, at, str(at).encode(), value) for at, value in enumerate(values)]
    monkeypatch.setattr(Topic, "records", records)
    monkeypatch.setattr("connectors.database.topic.Follower", Topic)
    return source(folder, {"topic": "t", "kafka": {"bootstrap": "k:1"}, "format": "flat", **more}, {})


def source(folder: Path, more: Mapping[str, Any], environment: Mapping[str, str]) -> Database:
    context = Context(name="s", tenant="t", memory=None, folder=folder, set_aside=SetAside())  # type: ignore[arg-type]
    return Database(options(Database, {**DECLARED, **more}, "s", environment), context)


async def listed_pages(database: Database) -> list[list[Listed]]:
    return [[entry for entry in page if isinstance(entry, Listed)] async for page in database.list()]


async def everything(database: Database) -> list[Entry]:
    return [entry async for page in database.full(None) for entry in page.entries]


@pytest.mark.parametrize("kind", ["table", "topic"])
async def test_a_page_of_large_rows_ends_early_and_loses_none(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 rows of 10 MB were in memory at once, and ended all connectors."""
    for module in ("sql", "topic"):
        monkeypatch.setattr(f"connectors.database.{module}.PAGE_BYTES", 250_000)
    rows = [(number, f"Subject {number}", LARGE, "staff") for number in range(10, 20)]
    database = table(tmp_path, rows) if kind == "table" else topic(tmp_path, rows, monkeypatch)
    pages = await listed_pages(database)
    assert [entry.external_id for page in pages for entry in page] == [str(number) for number in range(10, 20)]
    assert max(map(len, pages)) <= 4
    read = await everything(database)
    assert [entry.external_id for entry in read if isinstance(entry, Document)] == [str(n) for n in range(10, 20)]
    await database.close()


async def test_large_rows_are_requested_in_small_numbers_and_small_rows_in_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MySQL sent the 201 rows that were requested, and 17 were used."""
    monkeypatch.setattr("connectors.database.sql.PAGE_BYTES", 450_000)
    requested: list[int] = []
    page = Table.page

    def counted(self: Table, columns: Sequence[str], after: Key | None, limit: int) -> tuple[list[Row], bool]:
        requested.append(limit)
        return page(self, columns, after, limit)

    monkeypatch.setattr(Table, "page", counted)
    rows = [(number, "A subject", LARGE if number < 40 else "Short.", "staff") for number in range(1_000)]
    database = table(tmp_path, rows)
    pages = await listed_pages(database)
    assert [entry.external_id for page in pages for entry in page] == [str(number) for number in range(1_000)]
    assert requested[:3] == [200, 10, 10]
    assert requested[-1] == 200
    assert len(requested) < 20
    await database.close()


async def test_several_large_rows_with_one_id_can_be_read_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that ends between them must not make a document of one of them."""
    monkeypatch.setattr("connectors.database.sql.PAGE_BYTES", 50_000)
    rows = [(1, "One", LARGE, "staff"), (2, "Two", LARGE, "staff"), (2, "Two", LARGE, "everybody"), (3, "x", "y", "z")]
    database = table(tmp_path, rows)
    read = {entry.external_id: entry for entry in await everything(database)}
    ambiguous = read["2"]
    assert isinstance(ambiguous, Unreadable)
    assert (ambiguous.code, ambiguous.acl_tags, len(read)) == ("ambiguous", (), 3)
    await database.close()


@pytest.mark.parametrize("kind", ["table", "topic"])
async def test_a_value_that_no_document_can_hold_is_not_retained(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(1, "One", "x" * 5_000_000, "staff"), (2, "Two", "Short.", "a," * 2_500_000), (3, "Three", "y", "staff")]
    database = table(tmp_path, rows) if kind == "table" else topic(tmp_path, rows, monkeypatch)
    large, open_to_many, fine = await database.fetch(["1", "2", "3"])
    assert isinstance(large, Unreadable)
    assert (large.code, large.acl_tags) == ("bad_value", ("staff",))
    assert "holds more than 4 MiB" in large.message
    assert isinstance(open_to_many, Unreadable)
    assert (open_to_many.code, open_to_many.acl_tags) == ("bad_access", ())
    assert isinstance(fine, Document)
    listed = {entry.external_id: entry for page in await listed_pages(database) for entry in page}
    assert listed["1"].revision == large.revision
    await database.close()


@pytest.mark.parametrize("kind", ["table", "topic"])
async def test_a_text_of_characters_of_four_bytes_is_measured_in_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a text of 16 MB was in memory for each of 50 rows."""
    rows = [(1, "One", "\N{OTTER}" * 1_100_000, "staff"), (2, "Two", "\N{OTTER}" * 1_000_000, "staff")]
    database = table(tmp_path, rows) if kind == "table" else topic(tmp_path, rows, monkeypatch)
    large, fine = await database.fetch(["1", "2"])
    assert isinstance(large, Unreadable)
    assert "holds more than 4 MiB" in large.message
    assert isinstance(fine, Document)
    await database.close()


@pytest.mark.parametrize("kind", ["table", "topic"])
async def test_rows_that_are_read_by_their_ids_are_in_memory_one_at_a_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 rows of several values of 4 MB were, for one request."""
    rows = [(number, "x" * 3_000_000, "x" * 3_000_000, "staff") for number in range(8)]
    declared = {"title": "A title", "text": "{subject}{body}"}
    database = table(tmp_path, rows, **declared) if kind == "table" else topic(tmp_path, rows, monkeypatch, **declared)
    await database.fetch(["1"])  # whatever is set up, and the topic is read
    tracemalloc.start()
    try:
        read = await database.fetch([str(number) for number in range(8)])
        assert tracemalloc.get_traced_memory()[1] < 35_000_000
    finally:
        tracemalloc.stop()
    assert all(isinstance(entry, Unreadable) and "the text holds more than 4 MiB" in entry.message for entry in read)
    await database.close()


async def test_a_topic_of_very_many_bytes_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(number, f"Subject {number}", LARGE, "staff") for number in range(30)]
    database = topic(tmp_path, rows, monkeypatch, max_topic_bytes=2 * 1024**2)
    with pytest.raises(Misconfigured, match="max_topic_bytes"):
        await listed_pages(database)
    monkeypatch.setattr(Topic, "records", Topic.records[:9])
    assert sum(map(len, await listed_pages(database))) == 9
    await database.close()


async def test_a_row_whose_id_is_the_placeholder_of_debezium_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The author of one id stopped the reading of all rows, and so every revocation among them."""
    rows = [(1, "One", "Text.", "staff"), (PLACEHOLDER, "Two", "Text.", "staff")]
    database = topic(tmp_path, rows, monkeypatch)
    assert [entry.external_id for page in await listed_pages(database) for entry in page] == ["1", PLACEHOLDER]
    await database.close()
