"""The state of a connector, computed once: `status`, the page, `why` and `penstock connector` all show this one.

A runner describes itself in its row of the table ``connectors``; nothing else is known about it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from psycopg.rows import class_row

from pipeline.stores.postgres import Connection

State = Literal["removed", "not running", "paused", "needs attention", "waiting", "first load", "following"]
Activities = Mapping[str, Mapping[str, Any]]
"""By name of the activity: state, reason, since, succeeded_at (RFC 3339)."""

SILENT_SECONDS = 15.0
"""A runner writes a sign of life every second. After this long without one it counts as stopped."""
MAX_CONNECTORS = 500
MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ConnectorRow:
    """A runner's description of itself."""

    tenant: str
    source: str
    kind: str
    paused: bool
    removed: bool
    loaded: bool
    """The first load is complete."""
    guard: Mapping[str, Any] | None
    """A sweep that would have deleted too much and was held back: missing, published, at."""
    activities: Activities
    counts: Mapping[str, Any]
    silent_seconds: float | None
    """Since the last sign of life; None: no runner has it."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often a declared connector reads its source."""

    tenant: str
    kind: str
    poll_seconds: float
    sweep_seconds: float


COLUMNS = (
    "tenant, source, kind, paused, removed_at IS NOT NULL AS removed, loaded_at IS NOT NULL AS loaded, guard,"
    " activities, counts, extract(epoch FROM clock_timestamp() - seen_at)::float8 AS silent_seconds"
)


def problem(activities: Activities) -> tuple[Literal["needs attention", "waiting"], str] | None:
    """The worst activity's state, and its name with the reason."""
    states: tuple[Literal["needs attention", "waiting"], ...] = ("needs attention", "waiting")
    for state in states:
        for name, activity in activities.items():
            if activity.get("state") == state:
                return state, f"{name}: {activity.get('reason')}"
    return None


def last_success_at(activities: Activities) -> str | None:
    """When the source last answered as it should, RFC 3339."""
    return max((str(at) for activity in activities.values() if (at := activity.get("succeeded_at"))), default=None)


def connector_state(
    *,
    paused: bool,
    loaded: bool,
    guard: Mapping[str, Any] | None,
    activities: Activities,
    silent_seconds: float | None,
    removed: bool,
) -> tuple[State, str | None]:
    """The state of a connector and the reason for it, worst first."""
    if removed:
        return "removed", None
    if silent_seconds is None or silent_seconds > SILENT_SECONDS:
        return (
            "not running",
            "no worker reports it: check that `penstock worker connectors` runs, and that the file declared it when"
            " the worker started",
        )
    if paused:
        return "paused", None
    if (worst := problem(activities)) is not None:
        return worst
    if guard:
        return "following", f"{guard.get('missing')} of {guard.get('published')} documents look deleted"
    return ("following" if loaded else "first load"), None


def state_of(row: ConnectorRow) -> tuple[State, str | None]:
    return connector_state(
        paused=row.paused,
        loaded=row.loaded,
        guard=row.guard,
        activities=row.activities,
        silent_seconds=row.silent_seconds,
        removed=row.removed,
    )


async def connectors(
    connection: Connection, schedules: Mapping[str, Schedule] | None = None, *, with_next: bool = False
) -> list[dict[str, Any]]:
    """Every connector that was not removed, unhealthy ones first.

    schedules: of the connectors that a file here declares, by source; one that nobody has run yet is reported too.
    with_next: add ``next_at``, when changes or the sweep are due (None where no file here declares the connector).
    """
    async with connection.cursor(row_factory=class_row(ConnectorRow)) as cursor:
        await cursor.execute(
            f"SELECT {COLUMNS} FROM connectors WHERE removed_at IS NULL ORDER BY tenant, source LIMIT %s".encode(),  # noqa: S608 — a constant of this module
            [MAX_CONNECTORS],
        )
        rows = await cursor.fetchall()
    summaries = sorted((_summary(row) for row in rows), key=lambda summary: _rank(summary["state"]))
    if not with_next:
        return summaries
    schedules = schedules or {}
    activities = {(row.tenant, row.source): row.activities for row in rows}
    for summary in summaries:
        schedule = schedules.get(summary["source"])
        summary["next_at"] = _next_at(activities[summary["tenant"], summary["source"]], schedule)
    known = {summary["source"] for summary in summaries}
    return summaries + [_never_run(source, schedule) for source, schedule in schedules.items() if source not in known]


def _summary(row: ConnectorRow) -> dict[str, Any]:
    state, reason = state_of(row)
    return {
        "tenant": row.tenant,
        "source": row.source,
        "kind": row.kind,
        "state": state,
        "reason": reason[:MAX_REASON_CHARACTERS] if reason else None,
        "last_success_at": last_success_at(row.activities),
        "last_sweep_at": row.activities.get("sweep", {}).get("succeeded_at") or None,
        "published": sum(count for count in row.counts.values() if isinstance(count, int)),
    }


def _never_run(source: str, schedule: Schedule) -> dict[str, Any]:
    return {
        "tenant": schedule.tenant,
        "source": source,
        "kind": schedule.kind,
        "state": "not running",
        "reason": "no worker has started it yet",
        "last_success_at": None,
        "last_sweep_at": None,
        "published": 0,
        "next_at": None,
    }


def _rank(state: State) -> int:
    order: Sequence[State] = ("needs attention", "not running", "waiting")
    return order.index(state) if state in order else len(order)


def _next_at(activities: Activities, schedule: Schedule | None) -> str | None:
    if schedule is None:
        return None
    intervals = {"changes": schedule.poll_seconds, "sweep": schedule.sweep_seconds}
    due = [
        datetime.fromisoformat(str(succeeded_at)) + timedelta(seconds=seconds)
        for name, seconds in intervals.items()
        if (succeeded_at := activities.get(name, {}).get("succeeded_at"))
    ]
    return min(due).isoformat() if due else None
