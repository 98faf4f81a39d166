"""Where the processes of a local stack serve their metrics, for Prometheus's file_sd:
``python -m deploy.prometheus.targets > targets.json`` (of $PENSTOCK_HOME)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deploy.local import query, workers
from pipeline.runtime.settings import home

JOB = "penstock"


def targets(folder: Path) -> list[dict[str, object]]:
    """One group a process. A process that was started and has died stays in the list: that it is down should show."""
    endpoints = [(worker.name.partition("-")[0], worker.health) for worker in workers.listed(folder)]
    if (serves := query.look(folder)).is_started:
        endpoints.append((query.NAME, serves.url))
    return [
        {"targets": [address.removeprefix("http://")], "labels": {"job": JOB, "worker": name}}
        for name, address in endpoints
        if address
    ]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(targets(home()), indent=1) + "\n")
