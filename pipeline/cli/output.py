"""How commands speak: progress and messages on stderr, results on stdout, colours only on a terminal."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; logs go to stderr.")]

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


def quiet_libraries() -> None:
    """Libraries complain on stderr of a server that is away, in their own words and over whatever is drawn there: for
    commands that say themselves what is away."""
    logging.getLogger().addHandler(logging.NullHandler())


def printable(text: str) -> str:
    """Text that cannot steer a terminal: keys, headers, titles and names are whatever somebody sent."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    json.dump(document, sys.stdout, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False)
    sys.stdout.write("\n")


def progress_bars(*, quiet: bool = False) -> Progress:
    """Bars on stderr; in a pipe, and with ``quiet``, nothing moves."""
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=stderr, disable=quiet or not sys.stderr.isatty(), transient=True,
    )  # fmt: skip
