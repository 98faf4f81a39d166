"""Tells whether a change made something slower: the working tree against a commit, in alternating runs.

python -m bench.compare COMMIT [--minutes 10] [--documents 150] [--json FILE]
python -m bench.compare main        # before you push
python -m bench.compare HEAD        # the working tree against itself: what noise on this machine looks like

Both sides run whole: servers, workers and the query service, in a state folder of each, with bench.zero_cost as their
model. In each round both do the same work on the same new texts, one after the other, and the order changes with every
round, so that what else the machine does falls on both. Each measure is compared as a ratio, round by round. A measure
is slower if the mean ratio is above 1 + --margin and a randomisation test of the rounds says so (p < 0.05).

Processor seconds count all processes of the side, and are what to look at on a busy machine. The exit code is 0 if
nothing is slower, 1 if something is, 2 for a commit that cannot be compared."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from math import exp
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import processors
from bench.ingest import CHUNKS, Run, edit, write
from bench.machine import moment
from bench.prose import WORDS_A_CHUNK, sentences, text
from bench.running import started
from pipeline.runtime.settings import home
from query.evaluation.measures import interval, randomisation_test

PROJECT = Path(__file__).parents[1]
MARGIN = 0.03
"""A change of less than this is none (CONTRIBUTING: nothing more than 3 % slower)."""
SIGNIFICANT = 0.05
FEWEST_ROUNDS = 6
"""With five rounds even equal signs have a p of 0.06."""
SEARCHES = 40
EDITED = 5
LIBRARIES = ("requirements",)
"""The folder that decides which libraries are installed: one environment serves both sides."""

MEASURES = {
    "load_s": "first load, seconds",
    "load_cpu_s": "first load, processor seconds",
    "unchanged_s": "nothing changed, seconds",
    "edit_s": f"{EDITED} edits, seconds",
    "delete_s": f"{EDITED} deletes, seconds",
    "changes_cpu_s": "all changes, processor seconds",
    "search_ms": "a search, milliseconds (median)",
    "search_cpu_ms": "a search, processor milliseconds",
    "command_cpu_s": "penstock status, processor seconds",
    "memory_mib": "memory of the workers and the query service, MiB",
}

console = Console(highlight=False)
progress_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Verdict:
    """A measure of all rounds. Ratios are the working tree's value over the commit's."""

    measure: str
    before: float
    after: float
    """Medians."""
    ratio: float
    low: float
    high: float
    """95 % of the mean ratios of resampled rounds lie between."""
    p: float

    def is_slower(self, margin: float) -> bool:
        return self.ratio > 1 + margin and self.p < SIGNIFICANT

    def is_faster(self, margin: float) -> bool:
        return self.ratio < 1 / (1 + margin) and self.p < SIGNIFICANT


def verdict(measure: str, before: Sequence[float], after: Sequence[float]) -> Verdict:
    """before, after: positive values of the same rounds in the same order."""
    logarithms = np.log(np.asarray(after, dtype=np.float64) / np.asarray(before, dtype=np.float64))
    mean = interval(logarithms)
    return Verdict(
        measure,
        before=float(np.median(before)),
        after=float(np.median(after)),
        ratio=exp(mean.mean),
        low=exp(mean.low),
        high=exp(mean.high),
        p=randomisation_test(logarithms),
    )


class Side(Run):
    """One version of the code, as a running system."""

    def __init__(self, folder: Path, embedding: str, code: Path) -> None:
        super().__init__(folder, embedding)
        self.code = code
        self.environment |= {"PYTHONPATH": str(code), "PENSTOCK_QUERY_CACHED_QUERIES": "0"}

    def all_processes(self) -> dict[str, int]:
        """Return the pid of each worker, of the query service and of each server."""
        return self.workers_and_servers() | {"query": self.penstock("status")["query"]["pid"]}


def round_of(side: Side, number: int, documents: int) -> dict[str, float]:
    """Load new documents, change some, search. Return each measure's value."""
    processes = side.all_processes()
    workers = {name: pid for name, pid in processes.items() if name not in ("kafka", "postgres", "elasticsearch")}
    folder = side.library / f"{number:03}"
    folder.mkdir(parents=True)
    for n in range(documents):
        write(folder / f"{n:05}.md", text(number * 10_000 + n, CHUNKS * WORDS_A_CHUNK))
    values: dict[str, float] = {}
    before = processors.seconds(processes)
    values["load_s"] = side.ingest()["seconds"]
    loaded = processors.seconds(processes)
    values["load_cpu_s"] = sum(processors.spent(before, loaded).values())
    values["unchanged_s"] = side.ingest()["seconds"]
    some = sorted(folder.glob("*.md"))[:EDITED]
    for path in some:
        edit(path)
    values["edit_s"] = side.ingest()["seconds"]
    for path in some:
        path.unlink()
    values["delete_s"] = side.ingest()["seconds"]
    changed = processors.seconds(processes)
    values["changes_cpu_s"] = sum(processors.spent(loaded, changed).values())
    values |= searches(side, number, processes)
    began = processors.seconds({})
    side.penstock("status")
    values["command_cpu_s"] = sum(processors.spent(began, processors.seconds({})).values())
    values["memory_mib"] = sum(processors.mebibytes(pid) for pid in workers.values())
    return values


def searches(side: Side, number: int, processes: Mapping[str, int]) -> dict[str, float]:
    address = side.endpoint("serve", "url")
    questions = [sentence[:120] for sentence in sentences()[number * SEARCHES :][:SEARCHES]]
    took = []
    before = processors.seconds(processes)
    with httpx.Client(base_url=address, headers=side.bearer(), timeout=60) as client:
        for question in questions:
            began = time.perf_counter()
            client.post("/v1/search", json={"query": question}).raise_for_status()
            took.append(time.perf_counter() - began)
    spent = processors.spent(before, processors.seconds(processes))
    spent.pop("commands", None)
    return {
        "search_ms": float(np.median(took)) * 1_000,
        "search_cpu_ms": sum(spent.values()) / len(questions) * 1_000,
    }


@contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Path]:
    """The commit's files, in a work tree that is removed afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    git("worktree", "prune")
    git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"error: git {arguments[0]}: {done.stderr.strip()}", file=sys.stderr)
        raise SystemExit(2)
    return done.stdout.strip()


def compare(commit: str, minutes: float, documents: int) -> tuple[list[Verdict], int]:
    """Return the verdict of each measure, and the number of rounds."""
    began = time.monotonic()
    values: dict[str, dict[str, list[float]]] = {"before": defaultdict(list), "after": defaultdict(list)}
    with ExitStack() as stack, Progress(console=progress_console, transient=True) as progress:
        task = progress.add_task("starting both versions", total=minutes * 60)
        before = stack.enter_context(checkout(commit, home() / "bench-compare-code"))
        sides = {
            name: stack.enter_context(started(f"bench-compare-{name}", partial(Side, code=code)))
            for name, code in (("before", before), ("after", PROJECT))
        }
        for name, side in sides.items():
            round_of(side, 0, documents)  # compiles code, fills caches, makes connections
            progress.update(task, description=f"warmed up: {name}", completed=time.monotonic() - began)
        rounds, longest = 0, 0.0
        while rounds < FEWEST_ROUNDS or time.monotonic() - began + longest < minutes * 60:
            at, rounds = time.monotonic(), rounds + 1
            for name in ("before", "after") if rounds % 2 else ("after", "before"):
                for measure, value in round_of(sides[name], rounds, documents).items():
                    values[name][measure].append(value)
            longest = max(longest, time.monotonic() - at)
            progress.update(task, description=f"round {rounds}", completed=time.monotonic() - began)
    return [verdict(m, values["before"][m], values["after"][m]) for m in MEASURES], rounds


def show(verdicts: Sequence[Verdict], commit: str, rounds: int, margin: float) -> None:
    table = Table(title=f"working tree against {commit}, {rounds} rounds")
    for column in ("measure", "before", "now", "ratio", "95 %", "p", ""):
        table.add_column(column, justify="left" if column in ("measure", "") else "right")
    for v in verdicts:
        word = "[red]slower[/]" if v.is_slower(margin) else "[green]faster[/]" if v.is_faster(margin) else ""
        table.add_row(
            MEASURES[v.measure],
            f"{v.before:.3g}",
            f"{v.after:.3g}",
            f"{v.ratio:.3f}",
            f"{v.low:.3f} to {v.high:.3f}",
            f"{v.p:.3f}",
            word,
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--documents", type=int, default=150, help="of each round")
    parser.add_argument("--margin", type=float, default=MARGIN)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both systems are stopped
    commit = git("rev-parse", "--verify", "--quiet", f"{options.commit}^{{commit}}")
    if git("diff", "--name-only", commit, "--", *LIBRARIES):
        print(f"error: {options.commit} needs other libraries: compare in an environment of each", file=sys.stderr)
        raise SystemExit(2)
    verdicts, rounds = compare(commit, options.minutes, options.documents)
    show(verdicts, commit[:8], rounds, options.margin)
    if options.json:
        written = {"commit": commit, "rounds": rounds, **moment(), "measures": [asdict(v) for v in verdicts]}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    raise SystemExit(any(v.is_slower(options.margin) for v in verdicts))


if __name__ == "__main__":
    main()
