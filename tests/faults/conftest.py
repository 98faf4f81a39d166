"""The seed is printed first, whatever else the run does, and what happened last."""

from __future__ import annotations

from typing import Any

from tests.faults import tally


def pytest_report_header() -> str:
    return f"faults: FAULTS_SEED={tally.SEED} FAULTS_SCENARIOS={tally.SCENARIOS or 'bounded'}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if tally.DONE:
        terminalreporter.section(f"faults, FAULTS_SEED={tally.SEED}")
        for line in tally.table():
            terminalreporter.write_line(line)
