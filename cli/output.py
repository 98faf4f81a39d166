"""Output of commands: results on stdout, progress and messages on stderr, colours on a terminal only."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cli.console import SafeConsole
from cli.terminal import harmless, harmless_json

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; logs go to stderr.")]
FailBelow = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-below",
        metavar="MEASURE=VALUE",
        help="Exit code 3 if a measure is lower, such as nDCG@10=0.44. Repeatable.",
    ),
]
ComparedDataset = Annotated[
    Path | None, typer.Option("--dataset", help="Compare with this dataset instead of the golden questions.")
]
DatasetTenant = Annotated[str, typer.Option("--tenant", help="With --dataset: tenant of the documents.")]
DatasetPrincipals = Annotated[
    list[str] | None,
    typer.Option("--as", metavar="PRINCIPAL", help="With --dataset: search as this person. Repeatable."),
]
DatasetTags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="With --dataset: search as a holder of this access tag. Repeatable."),
]

stderr = SafeConsole(stderr=True, highlight=False)
stdout = SafeConsole(highlight=False)


def quiet_libraries() -> None:
    """Suppress what libraries log on stderr about a server that is away: for commands that report this themselves."""
    logging.getLogger().addHandler(logging.NullHandler())


def log_warnings_to_stderr(context: typer.Context, level: int = logging.WARNING) -> None:
    """Log warnings and errors to stderr until the command ends, so that no log line comes between the lines of its
    result. Workers log everything. level: logging.ERROR, if warnings are part of what the command does."""
    import structlog  # takes 0.1 s: a search by the running service does without

    structlog.configure(
        processors=[_without_control, *structlog.get_config()["processors"]],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    context.find_root().call_on_close(structlog.reset_defaults)


def _without_control(_: Any, __: str, line: Any) -> Any:
    return {name: harmless(value) if isinstance(value, str) else value for name, value in line.items()}


def printable(text: str) -> str:
    """Replace control characters: keys, titles and names come from others and must not control the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def printable_text(text: str) -> str:
    """As ``printable``; the lines and tabs of the text stay."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def print_fault(error: BaseException) -> None:
    """Print the traceback of a source's own error on stderr, for whoever develops it."""
    from connectors.faults import trace

    stderr.print(printable_text(trace(error)), markup=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    text = json.dumps(document, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False)
    sys.stdout.write(f"{harmless_json(text)}\n")


def progress_bars(*, quiet: bool) -> Progress:
    """Progress bars on stderr; none in a pipe and with ``quiet``."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=stderr,
        disable=quiet or not sys.stderr.isatty(),
        transient=True,
    )
