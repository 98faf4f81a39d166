"""How a build shows what it is at: bars with an estimate on a terminal, else a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

import typer
from rich.progress import Progress, TaskID, TimeRemainingColumn

from pipeline.cli.output import progress_bars, stderr

if TYPE_CHECKING:
    from pipeline.generations.building import OnProgress, Phase

DOING = {
    "copying": "documents", "converging": "documents in the new stores", "graph": "building the graph",
    "swapping": "swapping", "clearing": "removing what is retired",
}  # fmt: skip
LINE_SECONDS = 30.0
"""Between two lines where there is no terminal: whoever reads the log of a long build sees that it lives."""


@contextmanager
def shown(*, quiet: bool) -> Iterator[tuple[Progress, OnProgress, Callable[[str], None]]]:
    """(bars, what to tell of a phase, what to say in a line). quiet: no bars; lines go to stderr all the same."""
    with progress_bars(quiet=quiet) as bars:
        bars.columns = (*bars.columns, TimeRemainingColumn())
        tasks: dict[str, TaskID] = {}
        began: dict[str, tuple[float, int]] = {}
        said = monotonic()

        def tell(phase: Phase, done: int, total: int) -> None:
            nonlocal said
            if phase not in tasks:
                tasks[phase] = bars.add_task(DOING[phase])
                began[phase] = monotonic(), done
            bars.update(tasks[phase], completed=done, total=total)
            if bars.disable and monotonic() - said >= LINE_SECONDS:
                said = monotonic()
                stderr.print(f"{DOING[phase]}: {done:,} of {total:,}{_left(*began[phase], done, total)}")

        def note(line: str) -> None:
            stderr.print(line, soft_wrap=True)

        yield bars, tell, note


def confirmed(bars: Progress, *, yes: bool) -> bool:
    """Whether to go on: asked of a person at a terminal, unless that was said beforehand."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    bars.stop()
    if not typer.confirm("Go on?", default=True, err=True):
        return False
    bars.start()
    return True


def _left(since: float, first: int, done: int, total: int) -> str:
    """What the rest takes at the mean rate so far."""
    if done <= first:
        return ""
    minutes = (total - done) * (monotonic() - since) / (done - first) / 60
    return f", about {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left"
