"""Makes the tables and the picture of docs/performance.md that show a library growing to a million chunks.

    python -m bench.million_curves      # bench/results/million_*.json → docs/performance/million.svg and the tables

The results come from ``python -m bench.million``. The same results give the same files, byte for byte; what was not
measured is a dash.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.curves import DOCUMENT, PICTURES, styled
from bench.load_runs import SHARES
from bench.million import EF_SEARCH, WIDEST

RESULTS = Path(__file__).parent / "results"
MARKED = re.compile(r"(<!-- million: begin -->\n).*?(<!-- million: end -->)", re.DOTALL)
PICTURE = "million"
INCHES = (9.0, 6.5)
NOT_THE_PIPELINE = ("model", "commands", "this program")
"""Processes of the measurement."""

Step = Mapping[str, Any]


class Row(NamedTuple):
    name: str
    target: str
    find: Callable[[Step], str]
    """Finds the cell of a step. Raises KeyError, TypeError or ZeroDivisionError where it was not measured."""


def processor_ms(step: Step, name: str | None = None) -> float:
    """Return the processor milliseconds of a loaded chunk: one process's, or those of the whole pipeline."""
    load = step["load"]
    spent = load["processor_s"]
    seconds = spent[name] if name else sum(s for process, s in spent.items() if process not in NOT_THE_PIPELINE)
    return 1_000 * float(seconds) / float(load["chunks"])


def graph_bytes(step: Step) -> int:
    indexes = step["sizes"]["postgres"]["chunks"]["indexes"]
    return int(sum(size for name, size in indexes.items() if name.endswith("_hnsw")))


def row_bytes(step: Step) -> int:
    chunks = step["sizes"]["postgres"]["chunks"]
    return int(chunks["heap"] + chunks["toast"])


def memory(step: Step, process: str) -> int:
    """Return the most memory of a process in all parts of a step, in MiB."""
    parts = [part["memory_mib"] for part in step.values() if isinstance(part, dict) and part.get("memory_mib")]
    return max(int(part[process]["all"]) for part in parts if process in part)


def p95(step: Step, width: str) -> float:
    return float(step["searches"]["widths"][width]["p95_ms"])


def worst_recall(step: Step) -> float:
    return min(float(of["recall@10"]) for of in step["recall"].values())


def of_search(name: str, width: str) -> Callable[[Step], str]:
    return lambda step: f"{step['searches']['widths'][width][name]:.0f} ms"


def of_recall(width: str) -> Callable[[Step], str]:
    return lambda step: f"{step['recall'][width]['recall@10']:.3f} ({', '.join(step['recall'][width]['scans'])})"


def by_ef_search(step: Step, ef_search: int) -> str:
    recalled, milliseconds = step["recall"][WIDEST]["by_ef_search"][str(ef_search)]
    return f"{recalled:.3f}, {milliseconds:.0f} ms"


def of_process(name: str) -> Callable[[Step], str]:
    return lambda step: f"{processor_ms(step, name):.2f} ms"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def audited(step: Step) -> str:
    audit = step["audit"]
    return f"{audit['seconds']:.0f} s, {'clean' if audit['clean'] else 'not clean'}"


def self_checked(step: Step) -> str:
    check = step["searches"]["self_check"]
    return f"{check['recall']:.3f} of {check['compared']:.0f}" + (
        f", {check['unfinished']:.0f} unfinished" if check["unfinished"] else ""
    )


ROWS = (
    Row("loaded, chunks/s", "", lambda step: f"{step['load']['chunks_per_s']:,.0f}"),
    Row("processor time of a loaded chunk", "", lambda step: f"{processor_ms(step):.2f} ms"),
    *(
        Row(f"… {name}", "", of_process(name))
        for name in ("elasticsearch", "postgres", "detect", "keywords", "vectors")
    ),
    Row("until all rows are in the graph, after the load", "", lambda step: f"{step['graph']['seconds']:,.0f} s"),
    *(Row(f"search p50, {width} readable", "", of_search("p50_ms", width)) for width in SHARES),
    *(Row(f"search p95, {width} readable", "≤ 80 ms", of_search("p95_ms", width)) for width in SHARES),
    *(Row(f"recall@10, {width} readable", "≥ 0.97", of_recall(width)) for width in SHARES),
    *(
        Row(f"… all readable, `ef_search` {ef}", "", lambda step, ef=ef: by_ef_search(step, ef))  # type: ignore[misc]
        for ef in EF_SEARCH
    ),
    Row("the service's own check of recall", "", self_checked),
    Row("50 edits/s: change to searchable, p50", "", lambda step: f"{step['edits']['freshness']['both']['p50']:.2f} s"),
    Row("the same, p99", "≤ 5 s", lambda step: f"{step['edits']['freshness']['both']['p99']:.2f} s"),
    Row("audit of everything", "clean", audited),
    Row("rows of the chunk table", "", lambda step: gigabytes(row_bytes(step))),
    Row("the graph", "", lambda step: gigabytes(graph_bytes(step))),
    Row("Postgres's folder, with its log", "", lambda step: gigabytes(step["sizes"]["postgres"]["folder"])),
    Row("Elasticsearch", "", lambda step: gigabytes(step["sizes"]["elasticsearch"]["store"])),
    Row("Kafka", "", lambda step: gigabytes(step["sizes"]["kafka"]["folder"])),
    *(
        Row(f"memory of {name}, at most", "", lambda step, name=name: f"{memory(step, name):,} MiB")  # type: ignore[misc]
        for name in ("postgres", "elasticsearch", "kafka", "detect", "vectors", "keywords", "analysis")
    ),
)


def cell(row: Row, step: Step) -> str:
    try:
        return row.find(step)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return "–"


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a run's table, and what was measured of the migration."""
    steps = report["steps"]
    yield f"### {report['dimensions']:,} dimensions"
    yield ""
    columns = (f"{step.get('chunks', step['size']):,} chunks" for step in steps)
    yield f"| | target | {' | '.join(columns)} |"
    yield "|---" * (len(steps) + 2) + "|"
    for row in ROWS:
        yield f"| {row.name} | {row.target} | {' | '.join(cell(row, step) for step in steps)} |"
    yield ""
    yield from migrated(report.get("migration"))
    machine = report["machine"]
    ended = "" if report["finished"] else f" It did not finish: {report['stopped']}."
    yield (
        f"Measured {machine['at'][:10]} at {machine['commit']}{'' if machine['clean'] else ' with local changes'} on"
        f" {machine['cores']} processors and {machine['memory_gib']} GiB, in {report['minutes']:.0f} minutes; load"
        f" {machine['load_before']:.0f} before it began.{ended}"
    )


def migrated(after: Mapping[str, Any] | None) -> Iterator[str]:
    if not after or "failed" in after.get("build", {"failed": ""}):
        return
    build = after["build"]
    line = (
        "A generation of another model, with everything embedded again, was built in"
        f" {build['seconds'] / 60:.1f} minutes ({sum(build['processor_s'].values()) / 60:.1f} of processors), with at"
        f" most {gigabytes(build['most_disk'])} more on disk; the cut-over took {build['cutover_s']:.1f} s."
    )
    searched, recalled = after.get("searches", {}), after.get("recall", {})
    if "widths" in searched and "failed" not in recalled:
        line += (
            f" Afterwards p95 was {max(p95(after, width) for width in SHARES):.0f} ms at most,"
            f" and recall@10 {worst_recall(after):.3f} at least."
        )
    yield line
    yield ""


def marked(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the text between the document's markers."""
    if not reports:
        return "Not measured yet.\n"
    lines = [f"![curves from the smallest size to the largest](performance/{PICTURE}.svg)", ""]
    for report in reports:
        lines += [*table(report), ""]
    return "\n".join(lines).rstrip() + "\n"


def written(document: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the document with the tables between its markers."""
    return MARKED.sub(lambda match: match[1] + marked(reports) + match[2], document)


def known() -> list[dict[str, Any]]:
    """Return the results, the fewest dimensions first."""
    reports = [json.loads(path.read_text()) for path in RESULTS.glob("million_*.json")]
    return sorted(reports, key=lambda report: report["dimensions"])


CURVES: Mapping[str, Callable[[Step], float]] = {
    "loaded, chunks/s": lambda step: float(step["load"]["chunks_per_s"]),
    "processor time of a loaded chunk, ms": processor_ms,
    "search p95, all readable, ms": lambda step: p95(step, "100 %"),
    "recall@10, the worst width": worst_recall,
    "50 edits/s, p99, s": lambda step: float(step["edits"]["freshness"]["both"]["p99"]),
    "rows and graph, bytes a chunk": lambda step: (row_bytes(step) + graph_bytes(step)) / float(step["chunks"]),
}


def draw(reports: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Draw all curves into one picture."""
    from matplotlib.figure import Figure  # takes a second

    with styled():
        figure = Figure(figsize=INCHES, layout="constrained")
        for place, (name, find) in enumerate(CURVES.items(), start=1):
            axes = figure.add_subplot(2, 3, place)
            for report in reports:
                points = []
                for step in report["steps"]:
                    try:
                        points.append((float(step["chunks"]), find(step)))
                    except (KeyError, TypeError, ValueError):  # not measured
                        continue
                axes.plot(
                    [chunks for chunks, _ in points],
                    [value for _, value in points],
                    marker="o",
                    label=f"{report['dimensions']:,} dimensions",
                )
            axes.set_xscale("log")
            axes.set_title(name, fontsize=10)
            axes.set_ylim(*((0.9, 1.005) if name.startswith("recall") else (0.0, None)))
        axes.legend(frameon=False)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{PICTURE}.svg", metadata={"Date": None, "Creator": None})


def main() -> int:
    reports = known()
    if not reports:
        sys.stderr.write(f"there is no million_*.json in {RESULTS}: run `python -m bench.million` first\n")
        return 1
    draw(reports, PICTURES)
    DOCUMENT.write_text(written(DOCUMENT.read_text(), reports))
    sys.stdout.write(f"{PICTURE}.svg in {PICTURES.name}/; the tables in {DOCUMENT.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
