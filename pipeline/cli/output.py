"""How commands speak: progress and messages on stderr, results on stdout, colours only on a terminal."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; logs go to stderr.")]

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


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
