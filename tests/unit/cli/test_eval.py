"""The exit codes of ``penstock eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import eval as evaluation
from cli.main import app
from query.evaluation.measures import Rankings

QUERIES = [f"q{n}" for n in range(12)]
GOOD: Rankings = {query: ["right", "other"] for query in QUERIES}
BAD: Rankings = {query: ["other", "right"] for query in QUERIES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"_id": "right", "text": "text"}))
    (tmp_path / "queries.jsonl").write_text("\n".join(json.dumps({"_id": query, "text": query}) for query in QUERIES))
    (tmp_path / "qrels" / "test.tsv").write_text("\n".join(f"{query}\tright\t1" for query in QUERIES))
    return tmp_path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, ranking: Rankings, *options: str, **degraded: int) -> Any:
    async def ranked(*_: object, **__: object) -> tuple[dict[str, Rankings], dict[str, int]]:
        return {"keyword": ranking, "vector": ranking, "hybrid": ranking}, degraded

    monkeypatch.setattr(evaluation, "_evaluate", ranked)
    return CliRunner().invoke(app, ["eval", str(folder), *options])


def test_eval_ends_with_3_when_a_measure_is_below_its_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(folder, monkeypatch, GOOD, "--fail-below", "nDCG@10=0.9").exit_code == 0
    low = run(folder, monkeypatch, BAD, "--fail-below", "nDCG@10=0.9", "--fail-below", "MRR=0.4")
    assert (low.exit_code, low.stderr) == (3, "error: nDCG@10 of hybrid is 0.6309, below 0.9\n")


@pytest.mark.parametrize("bound", ["nDCG@10", "nDCG@10=", "nDCG@7=0.4", "nDCG@10=40", "nDCG@10=nan"])
def test_an_invalid_bound_is_refused_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    refused = run(folder, monkeypatch, GOOD, "--fail-below", bound)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: --fail-below {bound}: give MEASURE=VALUE")


def test_eval_ends_with_3_when_it_is_significantly_worse_than_the_saved_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = folder / "saved.json"
    assert run(folder, monkeypatch, GOOD, "--save", str(saved)).exit_code == 0
    assert run(folder, monkeypatch, GOOD, "--against", str(saved)).exit_code == 0
    worse = run(folder, monkeypatch, BAD, "--against", str(saved))
    assert worse.exit_code == 3
    assert worse.stderr.startswith("error: nDCG@10 of hybrid is significantly worse than the saved one: -0.3691")
    saved.write_text("{}")
    assert run(folder, monkeypatch, BAD, "--against", str(saved)).exit_code == 2


def test_an_incomplete_evaluation_ends_with_1_whatever_its_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(folder, monkeypatch, BAD, "--fail-below", "MRR=0.9", timeout=2).exit_code == 1
