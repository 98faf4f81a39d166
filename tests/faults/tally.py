"""Counts of what was done and what was detected in all scenarios of a run, printed at its end.

``make faults`` writes the figures to tests/faults/figures.json; ``python -m tests.faults.tally`` copies them into the
documents.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DONE: Counter[str] = Counter()
"""Numbers of scenarios, changes and queries."""
FAULTS: Counter[str] = Counter()
VIOLATIONS: Counter[str] = Counter({"lost": 0, "leaked": 0, "undead": 0, "orphaned": 0, "needlessly embedded": 0})
SECONDS: Counter[str] = Counter()
"""Duration by layer."""

SEED = int(os.environ.get("FAULTS_SEED") or int.from_bytes(os.urandom(3)))
SCENARIOS = int(os.environ.get("FAULTS_SCENARIOS") or 0)
"""The number of scenarios; 0 for the bounded part that `make test` and `make test-slow` run."""
FIGURES = os.environ.get("FAULTS_FIGURES")
"""The file that the figures are written to; None to write none."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "guarantees.md"
BEGIN, END = "<!-- written by `python -m tests.faults.tally` -->", "<!-- until here -->"

KINDS: Mapping[str, str] = {
    "processes killed": r"^kill(?! of the server| of penstock (?!ingest))",
    "servers killed": r"^kill of the server",
    "processes stopped for longer than their session, or drained": r"^stop ",
    "workers that joined and left": r"^rebalance",
    "connections cut, refused, slowed, swallowed or one-way": r"connections to|refuses connections|(?<!server) slow$"
    r"|swallows|come through",
    "servers frozen or given a tenth of the time": r"frozen|a tenth of the time",
    "full and slow disks, sessions ended": r"disk|sessions ended",
    "clock steps": r"^clock of",
    "workers of the next version": r"of the next version",
    "topics made anew, partitions added": r"made anew|more partitions",
    "failing answers of the model": r"embedding server|model down",
    "refused and late bulks, failed refreshes": r"^Elasticsearch: (?!disk)|bulk of a dead",
    "commands of an operator in the middle (repair, rebuild, recover, cut-over), killed or not": r"penstock (?!ingest)",
    "hints lost, records replayed, broken or unacknowledged": r"hint lost|replay|broken record|^Kafka (away|unsure)",
    "workers left standing at an await": r"left standing",
}
"""By kind of fault in the figures: a pattern for the names in FAULTS. The first match counts."""


def figures() -> dict[str, Any]:
    """Return the counts of this process, for JSON."""
    return {"done": dict(DONE), "faults": dict(FAULTS), "found": dict(VIOLATIONS), "seconds": dict(SECONDS)}


def merge(other: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the counts of another process of the same run."""
    for mine, name in ((DONE, "done"), (FAULTS, "faults"), (VIOLATIONS, "found"), (SECONDS, "seconds")):
        for key, value in other[name].items():
            mine[key] = max(mine[key], value) if "at most" in key else mine[key] + value


def table() -> list[str]:
    parts = (DONE, FAULTS, Counter({"kills in all": kills(FAULTS)}), VIOLATIONS)
    width = max(len(name) for part in parts for name in part)
    return [f"{name:<{width}}  {count:>7}" for part in parts for name, count in sorted(part.items())]


def kills(faults: Mapping[str, int]) -> int:
    return sum(count for fault, count in faults.items() if "kill" in fault)


def by_kind(faults: Mapping[str, int]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for fault, count in faults.items():
        kinds = [kind for kind, pattern in KINDS.items() if re.search(pattern, fault)]
        counted[kinds[0] if kinds else "other"] += count
    return {kind: counted[kind] for kind in [*KINDS, "other"] if counted[kind]}


def write(failed: int) -> None:
    """Write the figures of a whole run to the file FAULTS_FIGURES."""
    if FIGURES:
        git = ["git", "-C", str(DOCUMENT.parent), "log", "-1", "--format=%h"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
        run = {"commit": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}", "seed": SEED, "failed tests": failed}
        Path(FIGURES).write_text(json.dumps(run | figures(), indent=1, sort_keys=True) + "\n")


def section(run: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines about a run in docs/guarantees.md."""
    done, faults, violations = run["done"], run["faults"], run["found"]
    yield (
        f"Last run: `make faults` of {run['date']} at commit {run['commit']}, seed {run['seed']},"
        f" failed tests: {run['failed tests']}."
    )
    yield ""
    yield "| What | How many |"
    yield "|---|---|"
    for layer in ("ends", "processes", "protocol"):
        yield f"| scenarios (`tests/faults/test_{layer}.py`) | {done.get(f'scenarios ({layer})', 0):,} |"
    yield f"| changes of sources and documents | {_sum(done, 'changes', 'source operations'):,} |"
    yield f"| questions asked while faults happened | {done.get('queries', 0):,} |"
    followed = done.get("revocations followed to their acceptance", 0)
    yield f"| revocations checked: accepted, and shown by no question that began later | {followed:,} |"
    yield f"| kills in all | {kills(faults):,} |"
    for kind, count in by_kind(faults).items():
        yield f"| {kind} | {count:,} |"
    yield "| lost / leaked / undead / orphaned / needlessly embedded | " + (
        "**" + " / ".join(f"{violations.get(name, 0):,}" for name in VIOLATIONS) + "** |"
    )


def _sum(counts: Mapping[str, int], *beginnings: str) -> int:
    return sum(count for name, count in counts.items() if name.startswith(beginnings))


def main() -> None:
    path = Path(FIGURES or Path(__file__).with_name("figures.json"))
    lines = "\n".join(section(json.loads(path.read_text())))
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{DOCUMENT} has no place for the figures"
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}")


if __name__ == "__main__":
    main()
