"""Judges a health report: is this machine ready, and which problems need somebody? Pure, and quick to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Report = Mapping[str, Any]
"""A report of ``health.health_report``."""

UNHEALTHY = ("needs attention", "not running")
"""States of a connector in which somebody has to act."""
LATE_SECONDS = 300.0
"""A canary or a pending document that is older than this is a problem: changes are searchable within five minutes."""
MAX_CONNECTOR_PROBLEMS = 3


def is_ready(report: Report) -> bool:
    """True: everything that should run on this machine does."""
    processes = [report["machine"], *report["services"].values(), *report["workers"]]
    if report["query"]["url"]:
        processes.append(report["query"])
    return all(process["ready"] for process in processes)


def problems(report: Report) -> list[str]:
    """The problems that somebody has to act on, worst first; each in a few words."""
    lines = [f"{name} is down" for name, service in report["services"].items() if not service["ready"]]
    lines += [
        f"{worker['name']} {'is stalled' if worker['waiting_for'] else 'is not ready'}"
        for worker in report["workers"]
        if not worker["ready"] or worker["waiting_for"]
    ]
    if report["query"]["pid"] and not report["query"]["ready"]:
        lines.append("the query service is not ready")
    lines += [
        f"no worker reads {stage['stage']}'s records"
        for stage in report["stages"] or ()
        if not stage["members"] and sum(stage["lag"].values())
    ]
    fresh, dead, pending, audit = (report[part] for part in ("freshness", "dead_letters", "pending", "audit"))
    if fresh and fresh["p99"] is not None and fresh["p99"] > fresh["objective_seconds"]:
        lines.append(f"changes take {duration(fresh['p99'])} at p99")
    if dead and dead["waiting"]:
        lines.append(f"{count(dead['waiting'], more=dead['more'])} dead letters wait")
    if pending and pending["oldest_seconds"] > LATE_SECONDS:
        lines.append(f"the oldest pending document waits for {duration(pending['oldest_seconds'])}")
    unhealthy = [connector for connector in report["connectors"] or () if connector["state"] in UNHEALTHY]
    lines += [
        f"connector {connector['source']}: {connector['state']}" for connector in unhealthy[:MAX_CONNECTOR_PROBLEMS]
    ]
    if audit and audit["divergent_documents"]:
        lines.append(f"{audit['divergent_documents']} documents differ between ledger and stores")
    lines += [
        f"the canary of {canary['source']} is not found"
        for canary in report["canaries"] or ()
        if max(canary["found_seconds_ago"].values(), default=0.0) > LATE_SECONDS
    ]
    lines += [
        f"webhook {webhook['webhook']} is paused"
        if webhook["state"] == "paused"
        else f"{webhook['parked']} events of webhook {webhook['webhook']} are parked"
        for webhook in report["webhooks"] or ()
        if webhook["state"] == "paused" or webhook["parked"]
    ]
    unread = sum(entry["documents"] for entry in report["skipped"] or () if entry["code"] == "unconfined")
    if unread:
        lines.append(f"{unread} files wait for a connectors worker that can confine their readers")
    if report["extraction"]["files"] == "unreachable":
        lines.append("the extraction service does not answer")
    return lines


def count(n: int, *, more: bool) -> str:
    return f"more than {n}" if more else str(n)


def duration(seconds: float | None) -> str:
    """Seconds as people read them: ``1.5 s``, ``3 min``; ``–`` for None."""
    if seconds is None:
        return "–"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
