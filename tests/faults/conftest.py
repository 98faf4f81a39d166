"""Prints the seed at the start of a run, and the counts of all its processes at the end."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults import tally

os.environ["FAULTS_SEED"] = str(tally.SEED)  # processes that this one starts have the same one


@pytest.fixture(autouse=True)
def _connections_lost_in_a_cut_are_collected() -> Iterator[None]:
    """Collect connections that aiokafka leaked because its client was cut off or closed while it connected, so that
    the warning is raised in the test that caused it, which ignores it."""
    yield
    gc.collect()


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
