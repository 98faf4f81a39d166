"""Check the Kubernetes objects and the chart in a real API server: ``python -m deploy.cluster [--json]``.

Builds what it needs (see deploy/cluster/programs.py), starts etcd and kube-apiserver on the loopback address, and ends
both. Their ports are found free, or set: PENSTOCK_CLUSTER_PORT_API, _ETCD, _ETCD_PEER. The exit code is 1 when a check
fails.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.cluster import checks, manifests, programs
from deploy.cluster.checks import Check, Result
from deploy.cluster.control_plane import ClusterSettings, running
from pipeline.core.errors import Misconfigured

WIDTH = 160
progress = Console(stderr=True, highlight=False)


def check_all(report: Callable[[Result], object]) -> None:
    """Perform every check, and report each result when it is there."""

    def perform(named: Iterable[Check]) -> bool:
        passed = True
        for name, check in named:
            progress.print(f"… {name}", markup=False)
            result = checks.perform(name, check)
            report(result)
            passed &= result.passed
        return passed

    if not perform((name, partial(checks.build, name)) for name in programs.PROGRAMS):
        return
    with tempfile.TemporaryDirectory(prefix="penstock-rendered-") as scratch:
        try:
            pairs = list(manifests.pairs(Path(scratch)))
            extra = [manifests.charted("chart, without KEDA", "--set", "keda.enabled=false")]
        except Misconfigured as error:
            report(Result("render", False, 0.0, str(error)))
            return
        perform(checks.of_files(pairs))
        started = time.monotonic()
        try:
            with running(ClusterSettings()) as plane:
                report(Result("etcd and kube-apiserver start", True, round(time.monotonic() - started, 1), plane.url))
                perform(checks.of_cluster(plane, [*(rendered for pair in pairs for rendered in pair), *extra]))
        except Misconfigured as error:
            report(Result("etcd and kube-apiserver start", False, round(time.monotonic() - started, 1), str(error)))


def table(results: list[Result]) -> Table:
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("check")
    rows.add_column("")
    rows.add_column("seconds", justify="right")
    rows.add_column("")
    for result in results:
        rows.add_row(result.check, "ok" if result.passed else "FAILED", f"{result.seconds:.1f}", result.detail)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.cluster", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the results as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    results: list[Result] = []
    try:
        check_all(results.append)
    except KeyboardInterrupt:
        return 130
    passed = all(result.passed for result in results)
    if arguments.json:
        sys.stdout.write(json.dumps({"passed": passed, "checks": [asdict(r) for r in results]}, indent=1) + "\n")
    else:
        Console(highlight=False, width=WIDTH).print(table(results), markup=False)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
