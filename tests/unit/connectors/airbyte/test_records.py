"""The file with the records of an Airbyte source."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from connectors.airbyte.messages import Record, State, StreamName, parsed
from connectors.airbyte.options import StreamOptions
from connectors.airbyte.records import RecordsFile, Stream
from pipeline.core.errors import Misconfigured


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RecordsFile]:
    file = RecordsFile(tmp_path, 1024**2)
    yield file
    file.close()


def stream(*key: str) -> Stream:
    declared = StreamOptions(title="{title}", text="{body}", acl_tags=("staff",))
    return Stream("notes", StreamName("notes"), declared, key, "full_refresh", None)


def record(id_: str, title: str = "t", body: str = "b") -> Record:
    line = (
        f'{{"type":"RECORD","record":{{"stream":"notes","data":{{"id":"{id_}","title":"{title}","body":"{body}"}}}}}}'
    )
    message = parsed(line.encode())
    assert isinstance(message, Record)
    return message


@pytest.mark.parametrize("key", [("id",), ("id", "title")])
def test_a_record_whose_id_is_half_of_a_character_stops_no_other(records: RecordsFile, key: tuple[str, ...]) -> None:
    """The author of one id stopped the reading of all streams, and so every revocation in them."""
    run, _ = records.begin([stream(*key)], [], reread=False)
    records.fold(run, [record("a"), record(r"\ud800"), record("b")])
    assert len(records.page("", 10, ["notes"])) == 2
    assert records.refused() == {"notes": "a record has an id with half of a character"}


def test_a_page_of_large_records_ends_early_and_loses_none(
    records: RecordsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 records of 10 MB were in memory at once, and ended all connectors."""
    monkeypatch.setattr("connectors.airbyte.records.PAGE_BYTES", 2_500)
    run, _ = records.begin([stream("id")], [], reread=False)
    ids = [f"{number}" for number in range(9)]
    records.fold(run, [record(id_, body="x" * 1_000) for id_ in ids])
    read: list[str] = []
    while page := records.page(read[-1] if read else "", 500, ["notes"]):
        assert len(page) <= 3
        read += [id_ for id_, _, _ in page]
    assert read == [f"notes/{id_}" for id_ in ids]
    assert len(records.rows(read, list)) == 9


def test_records_that_are_read_by_their_ids_are_in_memory_one_at_a_time(tmp_path: Path) -> None:
    """50 records of 16 MB were, for one request."""
    records = RecordsFile(tmp_path, 1024**3)
    run, _ = records.begin([stream("id")], [], reread=False)
    ids = [f"{number}" for number in range(9)]
    records.fold(run, [record(id_, body="x" * 1_000_000) for id_ in ids])
    tracemalloc.start()
    try:
        lengths = records.rows([f"notes/{id_}" for id_ in ids], lambda rows: [len(row["body"]) for _, _, row in rows])
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()
        records.close()
    assert lengths == [1_000_000] * 9


def test_a_program_that_writes_without_end_fills_no_disk(records: RecordsFile) -> None:
    run, _ = records.begin([stream("id")], [], reread=False)

    def write_on() -> None:
        for number in range(200):
            records.fold(run, [record(f"{number}", body="x" * 10_000)])

    with pytest.raises(Misconfigured, match="max_records_bytes"):
        write_on()
    assert 50 < len(records.page("", 500, ["notes"])) < 110
    records.begin([], [], reread=False)  # the stream is no longer declared
    run, _ = records.begin([stream("id")], [], reread=False)
    records.fold(run, [record("a", body="x" * 10_000)])
    assert len(records.page("", 500, ["notes"])) == 1


def test_a_state_that_does_not_fit_names_the_limit(records: RecordsFile) -> None:
    """The instance failed with an error of SQLite."""
    notes = replace(stream("id"), sync="incremental")
    run, _ = records.begin([notes], [], reread=False)
    records.fold(run, [record("a"), State(StreamName("notes"), {"seen": "x" * 2_000_000})])
    with pytest.raises(Misconfigured, match="max_records_bytes"):
        records.complete(["notes"], datetime.now(UTC))
    records.fold(run, [State(StreamName("notes"), {"seen": "x"})])
    records.complete(["notes"], datetime.now(UTC))
    assert [*records.read_at()] == ["notes"]
