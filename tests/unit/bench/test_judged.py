"""The tables of docs/evaluation.md come from results files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench import judged

MEASURED = re.compile(r"^\|.*\.\d{3}.*\|$", re.MULTILINE)
COMMIT = {"at": "2026-11-28T10:00:00+00:00", "commit": "abc1234", "clean": True}


def change(mean: float, p: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01, "p": p, "better": 3, "worse": 1}


RESULTS: dict[str, Any] = {
    "cranfield": {
        **COMMIT,
        "documents": 1398,
        "queries": 225,
        "kinds": ["summary"],
        "lines": [
            {
                "variant": "vector alone",
                "nDCG@10": [0.373, 0.338, 0.409],
                "recall@50": [1.0, 0.9, 1.0],
                "nDCG@5 summary": 0.5,
            },
            {
                "variant": "keyword alone",
                "nDCG@10": [0.376, 0.343, 0.41],
                "nDCG@10 over the line before": change(0.003, 0.02),
                "recall@50": [0.655, 0.618, 0.692],
                "recall@50 over the line before": change(-0.345, 0.0001),
                "nDCG@5 summary": 0.4,
            },
        ],
        "complete over": {"vector alone": {"nDCG@10": change(0.003, 0.0005)}},
    }
}


@pytest.mark.parametrize("document", judged.DOCUMENTS, ids=lambda document: document.name)
def test_the_tables_of_a_page_come_from_the_results_files(document: Path) -> None:
    page = document.read_text("utf-8")
    assert page == judged.written(page, judged.tables()), "run `python -m bench.judged`"


@pytest.mark.parametrize("document", judged.DOCUMENTS, ids=lambda document: document.name)
def test_a_page_has_no_measured_table_of_its_own(document: Path) -> None:
    assert MEASURED.search("| vector alone | .373 [.338, .409] |  |")
    assert MEASURED.findall(judged.MARKED.sub("", document.read_text("utf-8"))) == []


def test_a_table_names_its_commit_and_compares_each_line_with_the_one_before() -> None:
    tables = {"cranfield": judged.collection_table("cranfield", RESULTS)}
    page = judged.written("<!-- cranfield: begin -->\nold\n<!-- cranfield: end -->\n", tables)
    assert page.splitlines()[1:-1] == [
        "| Cranfield | nDCG@10 | Δ (p) | recall@50 | Δ (p) | nDCG@5 summary |",
        "|---|---|---|---|---|---|",
        "| vector alone | .373 [.338, .409] |  | 1.000 [.900, 1.000] |  | .500 |",
        "| keyword alone | .376 [.343, .410] | +.003 (.020) | .655 [.618, .692] | -.345 (≤ .0002) | .400 |",
        "",
        "Complete, over vector alone: nDCG@10 +.003 [-.007, +.013], p = .0005, better on 3 queries and worse on 1.",
        "",
        "225 queries on 1398 documents. Measured 2026-11-28 at abc1234.",
    ]
