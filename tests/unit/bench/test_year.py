"""The verdict on a simulated year."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import pytest

from bench.year import bloated, compress_time, judge

MIDDLE: dict[str, Any] = {
    "events": {"deleted": 0},
    "living": 100,
    "tables": {"manifests": {"bytes": 10_000_000, "rows": 1}, "documents": {"bytes": 10_000_000, "rows": 1}},
    "indexes": {"manifests_pkey": 10_000_000, "documents_source": 10_000_000},
    "elasticsearch": {"bytes": 10_000_000},
    "memory_mib": {"detect": 200},
    "folder": {"logs": 10_000, "run": 10_000},
}


def changed(part: str, name: str, value: object) -> dict[str, Any]:
    last = deepcopy(MIDDLE)
    last[part][name] = value
    return last


def test_a_year_without_growth_has_no_findings() -> None:
    assert judge(MIDDLE, MIDDLE) == []


def test_growth_of_what_should_stay_flat_is_named() -> None:
    larger = {"bytes": 13_000_000, "rows": 1}
    assert judge(MIDDLE, changed("tables", "manifests", larger)) == ["bytes of manifests: 10000000 → 13000000"]
    assert judge(MIDDLE, changed("indexes", "manifests_pkey", 13_000_000)) == [
        "bytes of manifests_pkey: 10000000 → 13000000"
    ]
    assert judge(MIDDLE, changed("memory_mib", "detect", 300)) == ["MiB of detect: 200 → 300"]
    assert judge(MIDDLE, changed("elasticsearch", "bytes", 20_000_000)) != []
    assert judge(MIDDLE, changed("folder", "run", 1_000_000)) != []
    assert judge(MIDDLE, changed("folder", "logs", 1_000_000)) == []


def test_a_table_grows_by_no_more_than_deleted_documents_leave() -> None:
    last = changed("tables", "documents", {"bytes": 13_000_000, "rows": 1})
    last["indexes"]["documents_source"] = 13_000_000
    assert len(judge(MIDDLE, last)) == 2
    last["events"]["deleted"] = 2_000
    assert judge(MIDDLE, last) == []


def test_a_table_that_fills_has_at_most_so_many_rows_of_a_document() -> None:
    assert judge(MIDDLE, changed("tables", "document_events", {"bytes": 90_000_000, "rows": 1_600})) == []
    assert judge(MIDDLE, changed("tables", "document_events", {"bytes": 1, "rows": 1_700})) == [
        "rows of document_events: 1700, at most 1600"
    ]


def test_what_is_much_larger_than_made_anew_is_named() -> None:
    searches = {"lived": {"recall": 0.96}, "fresh": {"recall": 0.97}}
    compact = {"manifests": [2_000_000, 1_000_000]}
    assert bloated({"bytes": compact, "searches": searches}) == []
    assert bloated({"bytes": {"manifests": [4_000_000, 1_000_000]}, "searches": searches}) == [
        "manifests: 4000000 bytes, 1000000 anew"
    ]
    worse = {"lived": {"recall": 0.8}, "fresh": {"recall": 0.97}}
    assert bloated({"bytes": compact, "searches": worse}) == ["recall of the graph: 0.8, 0.97 anew"]


def test_time_is_compressed_in_every_function_or_the_year_does_not_begin() -> None:
    """A function that was written anew would have erased nothing, and its table would have seemed to grow."""

    class Definitions:
        def sql(self, statement: str) -> list[tuple[str]]:
            return [("now() - days",)] if statement.startswith("SELECT pg_get") else []

    with pytest.raises(AssertionError, match="nothing to compress"):
        compress_time(cast("Any", Definitions()))
