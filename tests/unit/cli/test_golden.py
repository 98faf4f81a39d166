"""``penstock golden run``: what it prints, and its exit codes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import golden
from cli.main import app
from query.evaluation.baseline import Change
from query.evaluation.service import Run

NAMES = ("nDCG@5", "recall@50", "faithfulness")


def run(monkeypatch: pytest.MonkeyPatch, *options: str, **changes: Change) -> Any:
    """The outcome of a run with these changes of the first measures."""
    compared = {("*", name): Change(0.0, 1.0, 9, 0.95) for name in NAMES}
    compared |= {("*", name): change for name, change in zip(NAMES, changes.values(), strict=False)}
    result = Run(datetime.now(UTC), dict.fromkeys(compared, (0.95, 9)), compared)

    async def made(**chosen: bool) -> Run:
        assert chosen == {"accept": "--accept" in options, "store": "--check" not in options}
        return result

    monkeypatch.setattr(golden, "_run", made)
    return CliRunner().invoke(app, ["golden", "run", *options])


def test_a_checked_version_that_declines_ends_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    decline = Change(-0.05, 0.01, 9, 0.95)
    worse = run(monkeypatch, "--check", first=decline)
    assert worse.exit_code == 3
    assert worse.stderr.splitlines()[-1] == "error: nDCG@5 is 5.00% below the accepted values, p = 0.0100"
    assert run(monkeypatch, first=decline).exit_code == 0, "the alert reports a decline of the running service"


@pytest.mark.parametrize(
    "change", [Change(-0.01, 0.001, 9, 0.95), Change(-0.3, 0.2, 9, 0.95), Change(0.3, 0.001, 9, 1)]
)
def test_a_small_or_chance_change_passes_the_check(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    assert run(monkeypatch, "--check", first=change).exit_code == 0


def test_the_change_is_printed_with_its_p(monkeypatch: pytest.MonkeyPatch) -> None:
    change = Change(-0.05, 0.01, 9, 0.95)
    assert "nDCG@5               0.9500  (9)  -5.00% of 9, p = 0.0100" in run(monkeypatch, first=change).stdout
    rows = json.loads(run(monkeypatch, "--json", first=change).stdout)
    assert {row["measure"]: row["change"] for row in rows}["nDCG@5"] == {"ratio": -0.05, "p": 0.01, "queries": 9}


def test_a_model_that_judges_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    note = "note: the answers were judged by the model that wrote them"
    assert note in run(monkeypatch).stderr
    monkeypatch.setenv("PENSTOCK_EVAL_JUDGE_MODEL", "another")
    assert note not in run(monkeypatch).stderr


def test_check_and_accept_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--check", "--accept").exit_code == 2
