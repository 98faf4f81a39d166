"""Draws the results' curves as SVG, and writes the tables of docs/performance.md.

    python -m bench.curves      # bench/results/latest.json → docs/performance/*.svg and the marked part of the document

The table of what grows with the library comes from bench/results/scale.json (``python -m bench.scale``).

The same results give the same files, byte for byte. A curve whose part was not measured is left as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.__main__ import LATEST
from bench.parts import MAIN_LOAD, PARTS
from bench.targets import rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parent.parent / "docs"
DOCUMENT = DOCS / "performance.md"
PICTURES = DOCS / "performance"
SCALE = LATEST.with_name("scale.json")
MARKED_SCALE = re.compile(r"(<!-- scale: begin -->\n).*?(<!-- scale: end -->)", re.DOTALL)
MARKED = re.compile(r"(<!-- measured: begin -->\n).*?(<!-- measured: end -->)", re.DOTALL)
INCHES = (7.0, 3.5)

Results = Mapping[str, Any]
"""The results by part."""


def results(latest: Mapping[str, Any]) -> Results:
    return {name: part["result"] for name, part in latest["parts"].items() if "result" in part}


# Curves: each raises KeyError where its part was not measured


def first_load(axes: Axes, measured: Results) -> None:
    """Draw cost against size."""
    loads = sorted(
        (measured[part.name] for part in PARTS if part.name.startswith("ingest_") and part.name in measured),
        key=lambda load: load["chunks"],
    )
    if not loads:
        raise KeyError(MAIN_LOAD)
    axes.plot([load["chunks"] for load in loads], [load["first_load_s"] for load in loads], marker="o")
    axes.set_xlabel("chunks")
    axes.set_ylabel("first load into both stores, s")
    axes.set_xlim(left=0)


def memory(axes: Axes, measured: Results) -> None:
    if long := measured.get("hour", measured.get("freshness")):
        sampled = long["memory_mib_every_5_s"]
        series = {name: ([5.0 * n for n in range(len(values))], values) for name, values in sampled.items()}
    else:
        load = measured[MAIN_LOAD]["memory"]
        series = {name: (load["s"][: len(values)], values) for name, values in load["mib"].items()}
    for name, (at, values) in sorted(series.items()):
        axes.plot(at, [float("nan") if value is None else value for value in values], label=name)
    axes.set_xlabel("seconds of load")
    axes.set_ylabel("resident, MiB")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def processor_seconds(axes: Axes, measured: Results) -> None:
    took = measured[MAIN_LOAD]["first_load_processor_s"]
    axes.barh(list(took)[::-1], list(took.values())[::-1])
    axes.set_xlabel("processor seconds of the first load")


def query(axes: Axes, measured: Results) -> None:
    sizes = measured["query"]["sizes"]
    for share in ("p95", "p50"):
        times = [size["searches"]["100 %"][f"{share}_ms"] for size in sizes]
        axes.plot([size["chunks"] for size in sizes], times, marker="o", label=share)
    axes.set_xlabel("chunks")
    axes.set_ylabel("hybrid search, one client, ms")
    axes.set_xlim(left=0)
    axes.legend(frameon=False)


def freshness(axes: Axes, measured: Results) -> None:
    """Draw the median, the 99th percentile and the maximum by store."""
    of = measured["freshness"]["freshness"]
    shares = ("p50", "p99", "max")
    for name, spread in of.items():
        axes.plot(shares, [spread[share] for share in shares], marker="o", label=name)
    axes.set_ylabel("from change to searchable, s")
    axes.legend(frameon=False)


CURVES: Mapping[str, Callable[[Axes, Results], None]] = {
    "first-load": first_load,
    "processor-seconds": processor_seconds,
    "memory": memory,
    "query": query,
    "freshness": freshness,
}


@contextmanager
def styled() -> Iterator[None]:
    """Let all pictures that are drawn while the block runs look alike, with the same bytes for the same results."""
    import matplotlib as mpl

    with mpl.rc_context(
        {
            "svg.hashsalt": "penstock",
            "svg.fonttype": "none",
            "font.size": 10,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        yield


def draw(measured: Results, folder: Path) -> list[str]:
    """Draw the curves and return their names."""
    from matplotlib.figure import Figure  # takes a second, and only drawing needs it

    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with styled():
        for name, curve in CURVES.items():
            figure = Figure(figsize=INCHES, layout="constrained")
            axes = figure.add_subplot()
            try:
                curve(axes, measured)
            except KeyError:
                continue
            if name != "processor-seconds":
                axes.set_ylim(bottom=0)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
            drawn.append(name)
    return drawn


# The document


def marked(latest: Mapping[str, Any]) -> str:
    """Return the text between the document's markers."""
    machine = latest["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"Measured {machine['at'][:10]} at {machine['commit']}{'' if machine['clean'] else ' with local changes'}:"
        f" {machine['processor']}, {machine['cores']} processors, {machine['memory_gib']} GiB; {versions};"
        f" load {machine['load_before']} before and {machine.get('load_after', '?')} after.{_earlier(latest)}",
        "**In a hurry** (`--quick`): the sizes are small, the numbers a smoke test." if latest["quick"] else "",
        "",
        "| | target | measured | |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows(latest)),
    ]
    seconds = latest["parts"].get(MAIN_LOAD, {}).get("result", {}).get("first_load_processor_s")
    if seconds:
        lines += [
            "",
            "| processor seconds of the first load | |",
            "|---|---|",
            *(f"| {name} | {value:.1f} |" for name, value in seconds.items()),
            f"| together | {sum(seconds.values()):.1f} |",
        ]
    lines += [
        f"\n![{name.replace('-', ' ')}](performance/{name}.svg)"
        for name in CURVES
        if (PICTURES / f"{name}.svg").exists()
    ]
    failed = [f"{name}: {part['failed']}" for name, part in latest["parts"].items() if "failed" in part]
    if failed:
        lines += ["", "Parts that failed: " + "; ".join(failed)]
    return "\n".join(line for n, line in enumerate(lines) if line or lines[n - 1]) + "\n"


def _earlier(latest: Mapping[str, Any]) -> str:
    """Return a sentence that names the parts that were measured at other commits, or with local changes."""
    commit = latest["machine"]["commit"]
    others = [
        f"{name} ({part['at'][:10]} at {part['commit']}{'' if part.get('clean', True) else ' with local changes'})"
        for name, part in latest["parts"].items()
        if part.get("commit", commit) != commit or not part.get("clean", True)
    ]
    return f" Measured at other commits: {', '.join(others)}." if others else ""


def scale_table(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table by size: milliseconds of a step, those of processors in brackets, and the last size over the
    first."""
    sizes = [str(size) for size in report["sizes"]]
    yield "| | " + " | ".join(f"{int(size):,} documents" for size in sizes) + " | ratio |"
    yield "|---" * (len(sizes) + 2) + "|"
    for name, took in report["steps"].items():
        first, last = took[sizes[0]], took[sizes[-1]]
        cells = " | ".join(f"{took[size]['ms']:.0f} ms ({took[size]['processor_ms']:.0f})" for size in sizes)
        processor = last["processor_ms"] / max(first["processor_ms"], 1)
        yield f"| {name} | {cells} | {last['ms'] / first['ms']:.1f} ({processor:.1f}) |"
    machine = report["machine"]
    yield ""
    yield (
        f"Measured {machine['at'][:10]} at {machine['commit']} on {machine['cores']} processors, load"
        f" {machine['load_before']:.0f} before it began. At this cost an audit of 1,000,000 such documents is"
        f" {report['audit_minutes']} minutes of pages at a quarter of a processor."
    )


def written(document: str, latest: Mapping[str, Any], scale: Mapping[str, Any]) -> str:
    """Return the document with the measurements between its markers."""
    document = MARKED.sub(lambda match: match[1] + marked(latest) + match[2], document)
    table = "\n".join(scale_table(scale)) + "\n"
    return MARKED_SCALE.sub(lambda match: match[1] + table + match[2], document)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=LATEST, metavar="FILE")
    options = parser.parse_args(arguments)
    if not options.results.exists():
        sys.stderr.write(f"{options.results} is missing: run `python -m bench` first\n")
        return 1
    latest = json.loads(options.results.read_text())
    drawn = draw(results(latest), PICTURES)
    DOCUMENT.write_text(written(DOCUMENT.read_text(), latest, json.loads(SCALE.read_text())))
    sys.stdout.write(f"{', '.join(drawn)} in {PICTURES.name}/; the tables in {DOCUMENT.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
