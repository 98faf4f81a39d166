"""The report of checks that `make engines` and `make cluster` print."""

from __future__ import annotations

import json
import re
from io import StringIO

from rich.console import Console

from deploy.report import CheckFailed, LeftOut, Report


def check(outcome: Exception | str) -> str:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def test_the_report_runs_no_check_after_a_needed_one_has_failed() -> None:
    report = Report(Console(file=StringIO()))
    report.run("one", lambda: check("as wanted"))
    report.run("two", lambda: check(LeftOut("no registry")))
    assert report.passed
    report.run("three", lambda: check(CheckFailed("no answer")))
    report.run("four", lambda: check("as wanted"))
    report.run("five", lambda: check(CheckFailed("did not start")), needed=True)
    report.run("six", lambda: check("never made"))
    assert [entry.status for entry in report.checks] == ["passed", "left out", "failed", "passed", "failed", "not run"]
    assert not report.passed
    written = json.loads(report.as_json())
    assert written["passed"] is False
    seconds = report.checks[2].seconds
    assert written["checks"][2] == {
        "name": "three",
        "status": "failed",
        "seconds": round(seconds, 1),
        "detail": "no answer",
    }


def test_the_table_is_plain_in_a_pipe_and_has_a_line_for_each_check() -> None:
    report, out = Report(Console(file=StringIO())), StringIO()
    report.run("a check [with] brackets", lambda: check("d" * 300))
    report.run("another", lambda: check(""))
    report.print(Console(file=out))
    first, second, summary = re.sub(r"\d+(\.\d)? s\b", "N s", out.getvalue()).splitlines()
    assert re.fullmatch(rf"a check \[with\] brackets  passed +N s  {'d' * 300}", first)
    assert re.fullmatch(r"another                  passed +N s", second)
    assert summary.startswith("2 of 2 checks passed in N s (")
