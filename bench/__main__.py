"""Runs every benchmark, one after another, each in its own process.

python -m bench [--quick] [--only PART]...      # → bench/results/latest.json, and a table with the targets

--quick: small sizes, some minutes, into $PENSTOCK_HOME/bench-quick.json; without it an hour and a half. --only: only
these parts; the file's results of the others stay. If a part fails, it is named and the others are run. Each part's log
and result are in $PENSTOCK_HOME/bench-logs. ``python -m bench.curves`` draws the curves and the table of
docs/performance.md from latest.json."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.machine import description, moment
from bench.parts import PARTS, Part
from bench.running import FOR_LONG, PENSTOCK
from bench.targets import KEYS, picked, table
from pipeline.runtime.settings import home

LATEST = Path(__file__).parent / "results" / "latest.json"

stderr = Console(stderr=True, highlight=False)


@contextmanager
def stack(log: IO[str]) -> Iterator[Mapping[str, str]]:
    """Run an empty local stack for a part that starts none. Yields the environment for commands that use it."""
    folder = home() / "bench-stack"
    # With further settings `penstock search` would not use the service.
    environment = {**os.environ, "PENSTOCK_HOME": str(folder)}
    subprocess.run([PENSTOCK, "up"], env=FOR_LONG | environment, stdout=log, stderr=log, check=False)
    try:
        yield environment
    finally:
        subprocess.run([PENSTOCK, "down"], env=environment, stdout=log, stderr=log, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def run(part: Part, *, quick: bool) -> dict[str, Any]:
    """Run a part. Return its result with its ``seconds``, the time, the commit and the load; {"failed": reason} if it
    fails."""
    logs = home() / "bench-logs"
    written = logs / f"{part.name}.json"
    logs.mkdir(parents=True, exist_ok=True)
    sizes = part.quick if quick else part.full
    command = [sys.executable, "-m", part.module, *sizes, "--json", *(() if part.prints else (str(written),))]
    shown_command = " ".join(command[1:])
    written.unlink(missing_ok=True)
    load, began, measured = os.getloadavg()[0], time.monotonic(), moment()
    with (
        (logs / f"{part.name}.log").open("w") as log,
        stack(log) if part.stack else nullcontext(os.environ) as environment,
    ):
        output = subprocess.PIPE if part.prints else log
        process = subprocess.run(command, stdout=output, stderr=log, env=environment, check=False)
    if process.returncode:
        return {"failed": f"`{shown_command}` ended with {process.returncode}: {logs / part.name}.log says why"}
    if part.prints:
        written.write_bytes(process.stdout)
    if not written.exists():
        return {"failed": f"`{shown_command}` wrote no result to {written}"}
    try:
        result = json.loads(written.read_text())
    except ValueError:
        return {"failed": f"`{shown_command}` wrote no JSON"}
    around = {"load_before": round(load, 1), "load_after": round(os.getloadavg()[0], 1)}
    return {"seconds": round(time.monotonic() - began, 1), **measured, **around, "result": result}


def run_all(parts: Sequence[Part], latest: Path, *, quick: bool) -> dict[str, Any]:
    """Run parts and return the new content of ``latest``, which is written after each part: an interrupted run loses
    none that are finished."""
    known: Mapping[str, Any] = json.loads(latest.read_text()) if latest.exists() else {}
    done: dict[str, Any] = dict(known.get("parts", {})) if known.get("quick") == quick else {}
    whole: dict[str, Any] = {"quick": quick, "machine": description(), **dict.fromkeys(KEYS), "parts": done}
    bar = Progress(
        TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=stderr
    )
    with bar:
        task = bar.add_task("", total=len(parts))
        for part in parts:
            bar.update(task, description=part.name)
            done[part.name] = run(part, quick=quick)
            if "failed" in done[part.name]:
                stderr.print(f"{part.name} failed: {done[part.name]['failed']}")
            whole |= picked(done)
            whole["machine"]["load_after"] = round(os.getloadavg()[0], 1)
            latest.write_text(json.dumps(whole, indent=1) + "\n")
            bar.advance(task)
    return whole


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: some minutes")
    parser.add_argument(
        "--only",
        action="append",
        choices=[part.name for part in PARTS],
        metavar="PART",
        help=f"may be repeated: {', '.join(part.name for part in PARTS)}",
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="instead of these files")
    return parser.parse_args(argv)


def main() -> int:
    options = arguments()
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    results = options.results or (home() / "bench-quick.json" if options.quick else LATEST)
    results.parent.mkdir(parents=True, exist_ok=True)
    whole = run_all(chosen, results, quick=options.quick)
    Console(highlight=False).print(table(whole))
    return int(any("failed" in whole["parts"][part.name] for part in chosen))


if __name__ == "__main__":
    sys.exit(main())
