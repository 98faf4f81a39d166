"""Checks in the order in which they ran, each with its time: printed as they end, and as a table or JSON at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.core.errors import Misconfigured

Status = Literal["passed", "failed", "left out", "not run"]
COLOURS: dict[Status, str] = {"passed": "green", "failed": "red", "left out": "yellow", "not run": "yellow"}


class CheckFailed(Exception):
    """An expectation was not met; the message has it and the observation in one line."""


class LeftOut(Exception):
    """A check that cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    seconds: float
    detail: str


class Report:
    """``run`` makes checks. Once one has failed that later ones need, these are not run."""

    def __init__(self, progress: Console) -> None:
        self.checks: list[Check] = []
        self._progress = progress
        self._began = time.monotonic()
        self._stopped = False

    @property
    def passed(self) -> bool:
        """Every check was made and none failed; one that was left out says so in the table."""
        return bool(self.checks) and all(check.status in ("passed", "left out") for check in self.checks)

    def run(self, name: str, make: Callable[[], str], *, needed: bool = False) -> None:
        """Make a check; ``make`` returns a detail for the table, or raises CheckFailed, Misconfigured or LeftOut.
        needed: later checks make no sense when it fails."""
        if self._stopped:
            self._add(Check(name, "not run", 0.0, ""))
            return
        began = time.monotonic()
        status: Status
        with self._progress.status(escape(name)):
            try:
                status, detail = "passed", make()
            except LeftOut as reason:
                status, detail = "left out", str(reason)
            except (CheckFailed, Misconfigured) as reason:
                status, detail = "failed", str(reason)
                self._stopped = needed
        self._add(Check(name, status, time.monotonic() - began, detail))

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        line = f"{check.status}: {check.name} ({check.seconds:.1f} s) {check.detail}".rstrip()
        self._progress.print(line, style=COLOURS[check.status], markup=False, soft_wrap=True)

    def end(self, *, as_json: bool) -> None:
        """Print the result to standard output. Raises typer.Exit with code 1 unless ``passed``."""
        if as_json:
            sys.stdout.write(f"{self.as_json()}\n")
        else:
            self.print(Console(highlight=False))
        if not self.passed:
            raise typer.Exit(1)

    def print(self, console: Console) -> None:
        """As a table, with one line for each check where the output is not a terminal."""
        if not console.is_terminal:
            width = max(len(check.name) for check in self.checks)
            for check in self.checks:
                line = f"{check.name:<{width}}  {check.status:<8}  {check.seconds:7.1f} s  {check.detail}"
                console.print(line.rstrip(), markup=False, soft_wrap=True)
        else:
            table = Table("check", "result", "seconds", "detail", box=box.SIMPLE, pad_edge=False)
            table.columns[2].justify = "right"
            for check in self.checks:
                result = f"[{COLOURS[check.status]}]{check.status}[/]"
                table.add_row(escape(check.name), result, f"{check.seconds:.1f}", escape(check.detail))
            console.print(table)
        console.print(self.summary(), soft_wrap=True, markup=False)

    def summary(self) -> str:
        load = os.getloadavg()[1]
        count = sum(check.status == "passed" for check in self.checks)
        total = time.monotonic() - self._began
        return (
            f"{count} of {len(self.checks)} checks passed in {total:.0f} s"
            f" ({os.cpu_count()} processors, load {load:.1f} over five minutes)"
        )

    def as_json(self) -> str:
        """One document: the checks, whether all passed, the whole time, and the machine's load."""
        return json.dumps(
            {
                "passed": self.passed,
                "seconds": round(time.monotonic() - self._began, 1),
                "processors": os.cpu_count(),
                "load_five_minutes": os.getloadavg()[1],
                "checks": [{**asdict(check), "seconds": round(check.seconds, 1)} for check in self.checks],
            },
            ensure_ascii=False,
            indent=2,
        )
