"""The benchmarks' runner goes on after a part that fails, and the document shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import curves, processors, selectivity
from bench.__main__ import LATEST, run_all
from bench.parts import MAIN_LOAD, PARTS, Part
from bench.targets import KEYS, TARGETS, rows, verdict

WRITES = """
import json, sys
json.dump({"first_load_chunks_per_s": 500.5, "given": sys.argv[1:-2]}, open(sys.argv[-1], "w"))
"""
PRINTS = """
import json, sys
print("a line for people", file=sys.stderr)
print(json.dumps({"burst_s": 12.5}))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("writes", WRITES), ("prints", PRINTS), ("fails", "raise SystemExit('no luck')")):
        (tmp_path / f"benched_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_failing_benchmark_is_named_and_the_others_are_run(programs: Path) -> None:
    parts = [
        Part("freshness", "benched_fails"),
        Part(MAIN_LOAD, "benched_writes", ("--documents", "1"), ("--documents", "2")),
        Part("burst", "benched_prints", prints=True),
    ]
    whole = run_all(parts, programs / "latest.json", quick=True)
    assert "benched_fails --json" in whole["parts"]["freshness"]["failed"]
    assert "no luck" in (programs / "home" / "bench-logs" / "freshness.log").read_text()
    assert whole["parts"][MAIN_LOAD]["result"]["given"] == ["--documents", "2"]
    assert (whole["first_load_chunks_per_s"], whole["burst_20k_s"]) == (500.5, 12.5)
    assert whole["freshness_p99_s"] is None
    assert json.loads((programs / "latest.json").read_text()) == whole
    assert {row[3] for row in rows(whole)} == {"a small size", "not measured"}
    states = {row[0]: row[2:] for row in rows(whole | {"quick": False})}
    assert states["20,000 chunks changed at once"] == ("12.5 s", "met")
    assert states["first load into both stores, 1,000 documents"] == ("500.5 chunks/s", "47% of the way")
    assert states["the same, p99"] == ("–", "not measured")


def test_earlier_results_are_retained_only_with_results_of_the_same_size(programs: Path) -> None:
    latest = programs / "latest.json"
    run_all([Part(MAIN_LOAD, "benched_writes")], latest, quick=False)
    both = run_all([Part("burst", "benched_prints", prints=True)], latest, quick=False)
    assert (both["first_load_chunks_per_s"], both["burst_20k_s"]) == (500.5, 12.5)
    hurried = run_all([Part("burst", "benched_prints", prints=True)], latest, quick=True)
    assert hurried["first_load_chunks_per_s"] is None


def test_every_target_belongs_to_a_benchmark_and_the_required_keys_exist() -> None:
    assert {target.part for target in TARGETS} <= {part.name for part in PARTS}
    assert set(KEYS) >= {
        "first_load_chunks_per_s",
        "unchanged_s",
        "edit_s",
        "edit_reembedded_per_document",
        "freshness_p99_s",
        "insert_paragraph_reembedded",
        "chunker_ratio_to_tokenizer",
        "burst_20k_s",
        "query_p95_ms",
        "recall_at_10",
    }


def test_the_verdict_states_how_near_a_target_is() -> None:
    more = next(target for target in TARGETS if target.key == "recall_at_10")
    less = next(target for target in TARGETS if target.key == "burst_20k_s")
    assert [verdict(more, value) for value in (0.98, 0.485, None)] == ["met", "50% of the way", "not measured"]
    assert [verdict(less, value) for value in (30.0, 60.0)] == ["met", "50% of the way"]


LOAD: dict[str, Any] = {
    "chunks": 900,
    "first_load_s": 3.0,
    "first_load_processor_s": {"postgres": 2.0, "vectors": 1.5},
    "memory": {"s": [1.0, 2.0, 3.0], "mib": {"vectors": [100, 120], "detect": [90, None, 95]}},
}


def test_the_same_results_give_identical_charts(tmp_path: Path) -> None:
    results = {"ingest_100": LOAD, MAIN_LOAD: LOAD | {"chunks": 9_000, "first_load_s": 20.0}}
    drawn = curves.draw(results, tmp_path / "first")
    assert drawn == curves.draw(results, tmp_path / "second") == ["first-load", "processor-seconds", "memory"]
    for name in drawn:
        first = (tmp_path / "first" / f"{name}.svg").read_text()
        assert first == (tmp_path / "second" / f"{name}.svg").read_text()
    assert "postgres" in (tmp_path / "first" / "processor-seconds.svg").read_text()


def test_the_benchmark_document_is_up_to_date() -> None:
    document = curves.DOCUMENT.read_text()
    assert curves.MARKED.search(document)
    assert curves.MARKED_SCALE.search(document)
    latest, scale = json.loads(LATEST.read_text()), json.loads(curves.SCALE.read_text())
    assert document == curves.written(document, latest, scale), "run `python -m bench.curves`"


def test_processor_seconds_are_the_difference_of_two_readings_in_descending_order() -> None:
    took = processors.spent({"a": 1.0, "b": 5.0, "gone": 2.0}, {"a": 1.5, "b": 7.25, "new": 9.0})
    assert list(took.items()) == [("b", 2.25), ("a", 0.5)]


def test_the_table_of_recall_under_filters_is_that_of_its_results_file() -> None:
    page = (Path(__file__).parents[3] / "docs" / "performance.md").read_text("utf-8")
    assert selectivity.table(json.loads(selectivity.RESULTS.read_text())) in page
