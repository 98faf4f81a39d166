"""Check the Kubernetes objects and the chart in a real API server: ``python -m deploy.cluster``.

Builds what it needs (see deploy/cluster/programs.py), starts etcd and kube-apiserver on the loopback address, and ends
both. Their ports are found free, or set: PENSTOCK_CLUSTER_PORT_API, _ETCD, _ETCD_PEER.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.cluster import checks, manifests, programs
from deploy.cluster.checks import Check
from deploy.cluster.control_plane import ClusterSettings, ControlPlane, running
from deploy.cluster.manifests import Rendered
from deploy.report import Report


def check_all(report: Report) -> None:
    """Perform every check."""
    for name in programs.PROGRAMS:
        report.run(name, partial(checks.build, name), needed=True)
    pairs: list[tuple[Rendered, Rendered]] = []
    extra: list[Rendered] = []
    planes: list[ControlPlane] = []
    with tempfile.TemporaryDirectory(prefix="penstock-rendered-") as scratch, ExitStack() as stack:

        def render() -> str:
            pairs.extend(manifests.pairs(Path(scratch)))
            extra.append(manifests.charted("chart, without KEDA", "--set", "keda.enabled=false"))
            return f"{2 * len(pairs) + len(extra)} variants"

        def start() -> str:
            planes.append(stack.enter_context(running(ClusterSettings())))
            return planes[0].url

        report.run("kustomize and Helm render", render, needed=True)
        if pairs:
            perform(report, checks.of_files(pairs))
        report.run("etcd and kube-apiserver start", start, needed=True)
        for plane in planes:
            perform(report, checks.of_cluster(plane, [*(rendered for pair in pairs for rendered in pair), *extra]))


def perform(report: Report, named: Iterable[Check]) -> None:
    for name, check in named:
        report.run(name, check)


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as one JSON document.")] = False,
) -> None:
    """Check the Kubernetes objects and the chart in a real API server. Exit code 1: a check failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    report = Report(Console(stderr=True, highlight=False))
    try:
        check_all(report)
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
    report.end(as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
