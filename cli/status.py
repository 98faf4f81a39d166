"""``penstock status``: the whole system, once or live."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live

from cli.console import SafeConsole
from cli.terminal import harmless_json

if TYPE_CHECKING:
    from pipeline.diagnosis.connector_status import Schedule
    from pipeline.diagnosis.health import LocalProcesses
    from pipeline.runtime.settings import Settings


INTERVAL_SECONDS = 2.0
PIPE_WIDTH = 160
"""Columns of the table where stdout is no terminal."""

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout; with --watch, one line per report.")
]


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat the report until Ctrl-C.")] = False,
    every: Annotated[
        float,
        typer.Option("--every", metavar="SECONDS", min=0.2, max=3600, help="Seconds between two reports of --watch."),
    ] = INTERVAL_SECONDS,
    json_output: Json = False,
) -> None:
    """Show the whole system on one screen: processes, pending work, freshness, and the problems that need attention.

    Parts that do not answer are named; the rest is shown. In a pipe, --watch prints one line per report.
    Exit code 0: everything that should run on this machine is ready. 1: something is not. 130: Ctrl-C ended --watch.

    Example: penstock status --watch
    """
    from cli.output import quiet_libraries
    from cli.stack import errors
    from pipeline.runtime.settings import load

    quiet_libraries()
    with errors():
        settings = load()
        try:
            if watch:
                asyncio.run(_watch(settings, every, json_output=json_output))
            else:
                _once(settings, json_output=json_output)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader has closed the pipe
            _silence()
            raise typer.Exit(0) from None


def _once(settings: Settings, *, json_output: bool) -> None:
    from cli.stack import local_processes, local_stack, print_page
    from cli.status_screen import screen
    from pipeline.diagnosis.problems import is_ready

    report = asyncio.run(look(local_processes, settings))
    if json_output:
        _print_line(harmless_json(json.dumps(report, ensure_ascii=False)))
    else:
        console = SafeConsole(highlight=False)
        if not console.is_terminal:
            console = SafeConsole(highlight=False, width=PIPE_WIDTH)
        console.print(screen(report))
        print_page(console, local_stack())
    if not is_ready(report):
        raise typer.Exit(1)


async def look(processes: LocalProcesses, settings: Settings) -> dict[str, Any]:
    """The health report of the whole system."""
    from pipeline.diagnosis.health import health_report

    async def extraction() -> dict[str, str]:
        from connectors.extraction.remote import condition  # imports an HTTP client

        return await condition()

    return await health_report(processes, settings, schedules=declared_schedules(), extraction=extraction)


def declared_schedules() -> dict[str, Schedule]:
    """The connectors that the file here declares, by source; none where there is no file or it cannot be read
    (`penstock connector list` says why)."""
    from connectors.declared import file_of, load
    from pipeline.core.errors import Misconfigured
    from pipeline.diagnosis.connector_status import Schedule

    if not file_of().is_file():
        return {}
    try:
        plans = load().plans
    except Misconfigured:
        return {}
    return {
        name: Schedule(plan.tenant, plan.kind, plan.poll_seconds, plan.sweep_seconds) for name, plan in plans.items()
    }


async def _watch(settings: Settings, every: float, *, json_output: bool) -> None:
    """Show the status again and again until cancelled. On a terminal the screen is redrawn at once when its size
    changes."""
    from cli.stack import local_processes
    from cli.status_screen import line, screen

    console = SafeConsole(highlight=False)
    if json_output or not console.is_terminal:
        while True:
            report = await look(local_processes, settings)
            _print_line(json.dumps(report, ensure_ascii=False) if json_output else line(report))
            await asyncio.sleep(every)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        live.update("reading the state …", refresh=True)
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError):  # this system has no such signal: the next report is drawn in the new size
            loop.add_signal_handler(signal.SIGWINCH, live.refresh)
        while True:
            live.update(screen(await look(local_processes, settings)), refresh=True)
            await asyncio.sleep(every)


def _print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _silence() -> None:
    """Redirect stdout: the interpreter flushes it when it ends, and would report the closed pipe."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
