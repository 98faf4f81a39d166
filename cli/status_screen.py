"""``penstock status`` for people: the whole system on one screen, and in one line for a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.output import printable
from pipeline.diagnosis.problems import count, duration, problems

CONNECTOR_COLOURS = {
    "following": "green",
    "first load": "cyan",
    "paused": "yellow",
    "waiting": "yellow",
    "needs attention": "red",
    "not running": "red",
}
MAX_ROWS = 12
"""Connectors or sources that are shown."""


def screen(report: Mapping[str, Any]) -> RenderableType:
    """Problems first, then processes, then progress."""
    parts: list[RenderableType] = [_headline(report)]
    if report["away"]:
        parts.append(Group(*(Text(f"  {printable(reason)}", "red") for reason in report["away"])))
    parts += [running(report), _flow(report), _fresh(report)]
    for table in (_connectors(report), _generations(report)):
        if table is not None:
            parts.append(table)
    parts += _facts(report)
    return Group(*(piece for part in parts for piece in (part, Text(""))))


def line(report: Mapping[str, Any]) -> str:
    """The report in one line, for a pipe."""
    lag = sum(sum(stage["lag"].values()) for stage in report["stages"]) if report["stages"] is not None else None
    pending, fresh, dead = report["pending"], report["freshness"], report["dead_letters"]
    waiting = None if pending is None else sum(pending[store]["documents"] for store in ("vectors", "keywords"))
    numbers = {
        "lag": "?" if lag is None else str(lag),
        "pending": "?" if waiting is None else str(waiting),
        "oldest": "?" if pending is None else duration(pending["oldest_seconds"]),
        "fresh p50/p99": "?" if fresh is None else f"{duration(fresh['p50'])}/{duration(fresh['p99'])}",
        "dead": "?" if dead is None else count(dead["waiting"], more=dead["more"]),
    }
    summary = printable("; ".join(problems(report))) or "all is well"
    return f"{report['at']}  {'  '.join(f'{name} {value}' for name, value in numbers.items())}  {summary}"


def _headline(report: Mapping[str, Any]) -> Text:
    lines = [printable(problem) for problem in problems(report)]
    at = report["at"].replace("T", " ")[:19]
    if not lines and not report["away"]:
        return Text.assemble((f"{at}  ", "dim"), ("all is well", "bold green"))
    return Text.assemble((f"{at}  ", "dim"), ("; ".join(lines) or "parts of the system do not answer", "bold red"))


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="ellipsis", no_wrap=True)
    return table


def _row(table: Table, *cells: str | Text) -> None:
    """Names of sources and models are shown as they are, not as markup."""
    table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells))


def running(report: Mapping[str, Any]) -> Table:
    table = _table("running", "address", "pid", "state", "")
    for name, service in report["services"].items():
        _row(table, name, printable(_without_password(service["url"])), _pid(service), _state(service), "")
    for worker in report["workers"]:
        stages = worker["stages"]
        flight = sum(stage.get("in_flight", 0) for stage in stages)
        stuck = next((stage for stage in stages if stage.get("waiting_for")), None)
        activity = Text(f"{flight} records in progress" if flight else "", "dim")
        if stuck is not None:
            seconds = stuck.get("waiting_seconds") or 0
            activity = Text(printable(f"{stuck['stage']} for {duration(seconds)}: {stuck['reason']}"), "yellow")
        address = worker.get("health", "") if worker["pid"] else ""
        _row(table, worker["name"], address, _pid(worker), _state(worker), activity)
    if report["query"]["url"]:
        _row(table, "query", report["query"]["url"], _pid(report["query"]), _state(report["query"]), "")
    return table


def _without_password(url: str | None) -> str:
    before, at, after = (url or "").rpartition("@")
    return f"{before.partition('://')[0]}://{after}" if at and "://" in before else after


def _pid(process: Mapping[str, Any]) -> str:
    return str(process["pid"] or "")


def _state(process: Mapping[str, Any]) -> Text:
    if process.get("waiting_for"):
        return Text(f"waiting for {process['waiting_for']}", "yellow")
    if process["ready"]:
        return Text("ready", "green")
    return Text("not ready", "yellow") if process["pid"] else Text("not running", "red")


def _flow(report: Mapping[str, Any]) -> RenderableType:
    if report["stages"] is None:
        return Text("lag: not known, Kafka did not answer", "dim")
    table = _table("stage", "workers", "lag live", "lag backfill", "pending", "oldest")
    pending = report["pending"] or {}
    for stage in report["stages"]:
        members = Text(str(stage["members"]), "" if stage["members"] else "yellow")
        lag = [
            Text(str(stage["lag"][lane])) if lane in stage["lag"] else Text("–", "dim") for lane in ("live", "backfill")
        ]
        backlog, documents, oldest = pending.get(stage["stage"]), "", ""
        if backlog is not None:
            failing = f" ({backlog['failing']} failing)" if backlog["failing"] else ""
            documents = f"{count(backlog['documents'], more=backlog['more'])}{failing}"
            oldest = duration(backlog["oldest_seconds"]) if backlog["oldest_seconds"] is not None else ""
        _row(table, stage["stage"], members, *lag, documents, oldest)
    return table


def _fresh(report: Mapping[str, Any]) -> RenderableType:
    fresh = report["freshness"]
    if fresh is None:
        return Text("freshness: not known", "dim")
    minutes = round(fresh["window_seconds"] / 60)
    table = _table(f"fresh, last {minutes} min", "changes", "p50", "p99")
    for entry in [{**fresh, "source": "all sources"}, *fresh["by_source"][:MAX_ROWS]]:
        late = entry["p99"] is not None and entry["p99"] > fresh["objective_seconds"]
        p99 = Text(duration(entry["p99"]), "red" if late else "")
        _row(table, printable(entry["source"]), str(entry["documents"]), duration(entry["p50"]), p99)
    return table


def _connectors(report: Mapping[str, Any]) -> Table | None:
    connectors = report["connectors"]
    if not connectors:
        return None
    table = _table("connector", "tenant", "state", "last success", "next", "")
    for connector in connectors[:MAX_ROWS]:
        _row(
            table,
            connector["source"],
            connector["tenant"],
            Text(connector["state"], CONNECTOR_COLOURS.get(connector["state"], "")),
            _ago(connector["last_success_at"], report["at"]),
            _ago(connector["next_at"], report["at"]),
            connector["reason"] or "",
        )
    if len(connectors) > MAX_ROWS:
        _row(table, f"… and {len(connectors) - MAX_ROWS} more (`penstock connector list`)")
    return table


def _generations(report: Mapping[str, Any]) -> Table | None:
    generations = report["generations"]
    if not generations:
        return None
    table = _table("generation", "state", "model", "waiting", "")
    for generation in generations:
        filled, documents, done = generation["filled"], generation["documents"], ""
        if generation["state"] == "building" and documents:
            done = f"{filled} of {documents} documents ({filled / documents:.0%})"
        _row(
            table,
            generation["name"],
            Text(generation["state"], "green" if generation["state"] == "active" else "dim"),
            f"{generation['model']}, {generation['dimensions']}",
            str(generation["waiting"]),
            done,
        )
    return table


def _facts(report: Mapping[str, Any]) -> list[RenderableType]:
    return [Group(*(Text.assemble((f"{name:<16}", "dim"), *parts) for name, *parts in _fact_lines(report)))]


def _fact_lines(report: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    if (dead := report["dead_letters"]) is not None:
        by = ", ".join(f"{entry['code']} {entry['letters']}" for entry in dead["by_code"])
        waiting = count(dead["waiting"], more=dead["more"])
        yield "dead letters", (f"{waiting} wait ({by})", "red") if dead["waiting"] else "none waits"
    if skipped := report["skipped"]:
        by = ", ".join(
            f"{printable(entry['source'])}: {entry['code']} {entry['documents']}" for entry in skipped[:MAX_ROWS]
        )
        documents = sum(entry["documents"] for entry in skipped)
        yield (
            "skipped",
            (f"{documents} documents cannot be read at their source ({by})", "yellow"),
            ": penstock dead list",
        )
    if (audit := report["audit"]) is not None:
        last = audit["last"]
        if last is None:
            yield "audit", "none has finished yet"
        else:
            verdict = (
                "clean" if not last["differing"] else f"{last['differing']} of {last['documents']} documents differ"
            )
            colour = "red" if last["differing"] else "green"
            ago = _ago(last["finished_at"], report["at"])
            yield "audit", (verdict, colour), f", {last['scope']} of {last['generation']}, {ago}"
    if (spent := report["embedding"]) is not None:
        by = ", ".join(
            f"{entry['tokens']} tokens of {printable(entry['purpose'])}s"
            + (f", {entry['cost']:.2f}" if entry["cost"] else "")
            for entry in spent
        )
        yield "embedded today", by or "nothing"
    if (producers := report["producers"]) is not None:
        refused = producers["refused_in_a_day"]
        yield (
            "producers",
            f"{producers['enrolled']} enrolled, signatures: {producers['mode']}",
            (f", {refused} records refused since yesterday" if refused else "", "yellow"),
        )
    if webhooks := report["webhooks"]:
        yield (
            "webhooks",
            ", ".join(
                f"{webhook['webhook']} {webhook['state']} ({webhook['waiting']:,} wait"
                + (f", {webhook['parked']:,} parked)" if webhook["parked"] else ")")
                for webhook in webhooks[:MAX_ROWS]
            ),
        )
    if (canaries := report["canaries"]) is not None:
        ages = ", ".join(
            f"{printable(canary['source'])} {duration(max(canary['found_seconds_ago'].values(), default=0.0))} ago"
            for canary in canaries[:MAX_ROWS]
        )
        yield "canaries", f"found {ages}" if ages else "none is configured"
    files = report["extraction"]
    yield (
        "files",
        (files["files"], "" if files["files"] == "confined" else "yellow"),
        f" ({files['kernel']}), reported by {files['of']}",
    )


def _ago(moment: str | None, now: str) -> str:
    """The time since a moment, or until it."""
    if moment is None:
        return "–"
    seconds = (datetime.fromisoformat(now).astimezone(UTC) - datetime.fromisoformat(moment)).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}"
