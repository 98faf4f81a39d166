"""What was done and found, over all scenarios of a run: printed at its end."""

from __future__ import annotations

import os
from collections import Counter

DONE: Counter[str] = Counter()
"""Scenarios, changes, queries."""
FAULTS: Counter[str] = Counter()
FOUND: Counter[str] = Counter({"lost": 0, "resurrected": 0, "orphans": 0, "leaks": 0})

SEED = int(os.environ.get("FAULTS_SEED") or int.from_bytes(os.urandom(3)))
SCENARIOS = int(os.environ.get("FAULTS_SCENARIOS") or 0)
"""0: the bounded part that `make test` runs."""


def table() -> list[str]:
    kills = sum(n for fault, n in FAULTS.items() if "kill" in fault)
    parts = (DONE, FAULTS, Counter({"kills in all": kills}), FOUND)
    width = max(len(name) for part in parts for name in part)
    return [f"{name:<{width}}  {count:>7}" for part in parts for name, count in sorted(part.items())]
