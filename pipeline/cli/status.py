"""``penstock status``: the whole system, once or live."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from deploy.local.stack import Stack
from pipeline import settings

EVERY_SECONDS = 2.0
WIDTH = 160
"""In a pipe: nothing is cut off that fits a screen."""

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; with --watch one line for each look.")]


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.2, max=3600, help="Between two looks of --watch.")
    ] = EVERY_SECONDS,
    json_output: Json = False,
) -> None:
    """The whole system on one screen: what runs, what waits, how soon changes are found, what needs somebody.

    A part that does not answer is named, and the others are shown. In a pipe --watch prints a line for each look.
    Exit code 0 when all that is meant to run here is ready, else 1; 130 when a watch is ended by Ctrl-C.

    Example: penstock status --watch
    """
    from pipeline.cli.output import quiet_libraries
    from pipeline.cli.stack import errors

    quiet_libraries()
    with errors():
        stack, now = Stack(settings.home()), settings.load()
        try:
            if watch:
                asyncio.run(_watch(stack, now, every, json_output=json_output))
            else:
                _once(stack, now, json_output=json_output)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # whoever read it has seen enough
            _silence()
            raise typer.Exit(0) from None


def _once(stack: Stack, now: settings.Settings, *, json_output: bool) -> None:
    from pipeline.cli.stack import print_page
    from pipeline.cli.status_look import look, ready
    from pipeline.cli.status_screen import screen

    told = asyncio.run(look(stack, now))
    if json_output:
        _print_line(json.dumps(told, ensure_ascii=False))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=WIDTH)
        console.print(screen(told))
        print_page(console, stack)
    if not ready(told):
        raise typer.Exit(1)


async def _watch(stack: Stack, now: settings.Settings, every: float, *, json_output: bool) -> None:
    """Until cancelled. On a terminal the screen is drawn anew at once when its size changes."""
    from pipeline.cli.status_look import look
    from pipeline.cli.status_screen import line, screen

    console = Console(highlight=False)
    if json_output or not console.is_terminal:
        while True:
            told = await look(stack, now)
            _print_line(json.dumps(told, ensure_ascii=False) if json_output else line(told))
            await asyncio.sleep(every)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        live.update("looking …", refresh=True)
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError):  # no such signal on this system: the next look draws it anew
            loop.add_signal_handler(signal.SIGWINCH, live.refresh)
        while True:
            live.update(screen(await look(stack, now)), refresh=True)
            await asyncio.sleep(every)


def _print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _silence() -> None:
    """The interpreter flushes stdout once more when it ends, and would complain that nobody reads it."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
