"""The seed is printed first, whatever else the run does, and what happened last: of all processes of a run."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.faults import tally

os.environ["FAULTS_SEED"] = str(tally.SEED)  # processes that this one starts have the same one


def pytest_report_header() -> str:
    return f"faults: FAULTS_SEED={tally.SEED} FAULTS_SCENARIOS={tally.SCENARIOS or 'bounded'}"


def pytest_sessionfinish(session: Any) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes (pytest-xdist)
        session.config.workeroutput["faults"] = tally.figures()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    if figures := getattr(node, "workeroutput", {}).get("faults"):
        tally.merge(figures)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if tally.DONE:
        terminalreporter.section(f"faults, FAULTS_SEED={tally.SEED}")
        for line in tally.table():
            terminalreporter.write_line(line)
        tally.write(len(terminalreporter.getreports("failed")) + len(terminalreporter.getreports("error")))
