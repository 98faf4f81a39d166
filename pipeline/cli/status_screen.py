"""``penstock status`` for people: the whole system on one screen, and in one line for a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cli.output import printable

CONNECTOR_COLOURS = {
    "following": "green", "first load": "cyan", "paused": "yellow", "waiting": "yellow", "needs attention": "red",
    "not running": "red",
}  # fmt: skip
MOST = 12
"""Connectors, or sources, that are shown: those that need somebody come first."""
STALE_CANARY_SECONDS = 300.0
"""A change is searchable within five minutes at the latest."""


def screen(told: Mapping[str, Any]) -> RenderableType:
    """What is broken first, then what runs, then how far it is."""
    parts: list[RenderableType] = [_headline(told)]
    if told["away"]:
        parts.append(Group(*(Text(f"  {printable(one)}", "red") for one in told["away"])))
    parts += [running(told), _flow(told), _fresh(told)]
    for table in (_connectors(told), _generations(told)):
        if table is not None:
            parts.append(table)
    parts += _facts(told)
    return Group(*(piece for part in parts for piece in (part, Text(""))))


def trouble(told: Mapping[str, Any]) -> list[str]:
    """What needs somebody, worst first; each in a few words."""
    found = [f"{name} is down" for name, one in told["services"].items() if not one["ready"]]
    found += [
        f"{one['name']} {'stands still' if one['waiting_for'] else 'is not ready'}"
        for one in told["workers"]
        if not one["ready"] or one["waiting_for"]
    ]
    if told["query"]["pid"] and not told["query"]["ready"]:
        found.append("the query service is not ready")
    idle = [one["stage"] for one in told["stages"] or () if not one["members"] and sum(one["lag"].values())]
    found += [f"nobody takes {stage}'s records" for stage in idle]
    if (fresh := told["freshness"]) and fresh["p99"] is not None and fresh["p99"] > fresh["objective_seconds"]:
        found.append(f"changes take {_seconds(fresh['p99'])} at p99")
    if (dead := told["dead_letters"]) and dead["waiting"]:
        found.append(f"{_number(dead['waiting'], more=dead['more'])} dead letters wait")
    if (pending := told["pending"]) and pending["oldest_seconds"] > STALE_CANARY_SECONDS:
        found.append(f"a document waits for {_seconds(pending['oldest_seconds'])}")
    unwell = [one for one in told["connectors"] or () if one["state"] in ("needs attention", "not running")]
    found += [f"connector {printable(one['source'])}: {one['state']}" for one in unwell[:3]]
    if (audit := told["audit"]) and audit["divergent_documents"]:
        found.append(f"{audit['divergent_documents']} documents differ between ledger and stores")
    for one in told["canaries"] or ():
        if max(one["found_seconds_ago"].values(), default=0.0) > STALE_CANARY_SECONDS:
            found.append(f"the canary of {printable(one['source'])} is not found")
    if unread := sum(one["documents"] for one in told["skipped"] or () if one["code"] == "unconfined"):
        found.append(f"{unread} files wait for a connectors worker that can confine their readers")
    if told["extraction"]["files"] == "unreachable":
        found.append("the extraction service does not answer")
    return found


def line(told: Mapping[str, Any]) -> str:
    """All of it in one line, for a pipe."""
    lag = sum(sum(one["lag"].values()) for one in told["stages"]) if told["stages"] is not None else None
    pending, fresh, dead = told["pending"], told["freshness"], told["dead_letters"]
    waiting = None if pending is None else sum(pending[store]["documents"] for store in ("vectors", "keywords"))
    numbers = {
        "lag": "?" if lag is None else str(lag),
        "pending": "?" if waiting is None else str(waiting),
        "oldest": "?" if pending is None else _seconds(pending["oldest_seconds"]),
        "fresh p50/p99": "?" if fresh is None else f"{_seconds(fresh['p50'])}/{_seconds(fresh['p99'])}",
        "dead": "?" if dead is None else _number(dead["waiting"], more=dead["more"]),
    }
    told_in_words = "; ".join(trouble(told)) or "all is well"
    return f"{told['at']}  {'  '.join(f'{name} {value}' for name, value in numbers.items())}  {told_in_words}"


def _headline(told: Mapping[str, Any]) -> Text:
    found = trouble(told)
    at = told["at"].replace("T", " ")[:19]
    if not found and not told["away"]:
        return Text.assemble((f"{at}  ", "dim"), ("all is well", "bold green"))
    return Text.assemble((f"{at}  ", "dim"), ("; ".join(found) or "not everything answers", "bold red"))


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="ellipsis", no_wrap=True)
    return table


def _row(table: Table, *cells: str | Text) -> None:
    """Whatever somebody called something is no markup."""
    table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells))


def running(told: Mapping[str, Any]) -> Table:
    table = _table("running", "address", "pid", "state", "")
    for name, one in told["services"].items():
        _row(table, name, printable(_shown(one["url"])), _pid(one), _state(one), "")
    for one in told["workers"]:
        stages = one["stages"]
        flight = sum(stage.get("in_flight", 0) for stage in stages)
        stuck = next((stage for stage in stages if stage.get("waiting_for")), None)
        told_of = Text(f"{flight} records at work" if flight else "", "dim")
        if stuck is not None:
            seconds = stuck.get("waiting_seconds") or 0
            told_of = Text(printable(f"{stuck['stage']} for {_seconds(seconds)}: {stuck['reason']}"), "yellow")
        _row(table, one["name"], one.get("health", "") if one["pid"] else "", _pid(one), _state(one), told_of)
    if told["query"]["url"]:
        _row(table, "query", told["query"]["url"], _pid(told["query"]), _state(told["query"]), "")
    return table


def _shown(url: str | None) -> str:
    """Without a password."""
    before, at, after = (url or "").rpartition("@")
    return f"{before.partition('://')[0]}://{after}" if at and "://" in before else after


def _pid(one: Mapping[str, Any]) -> str:
    return str(one["pid"] or "")


def _state(one: Mapping[str, Any]) -> Text:
    if one.get("waiting_for"):
        return Text(f"waiting for {one['waiting_for']}", "yellow")
    if one["ready"]:
        return Text("ready", "green")
    return Text("not ready", "yellow") if one["pid"] else Text("not running", "red")


def _flow(told: Mapping[str, Any]) -> RenderableType:
    if told["stages"] is None:
        return Text("lag: Kafka did not tell", "dim")
    table = _table("stage", "workers", "lag live", "lag backfill", "pending", "oldest")
    pending = told["pending"] or {}
    for one in told["stages"]:
        members = Text(str(one["members"]), "" if one["members"] else "yellow")
        lag = [Text(str(one["lag"][lane])) if lane in one["lag"] else Text("–", "dim") for lane in ("live", "backfill")]
        waits = pending.get(one["stage"])
        failing = f" ({waits['failing']} failing)" if waits and waits["failing"] else ""
        _row(
            table, one["stage"], members, *lag,
            "" if waits is None else f"{_number(waits['documents'], more=waits['more'])}{failing}",
            "" if waits is None or waits["oldest_seconds"] is None else _seconds(waits["oldest_seconds"]),
        )  # fmt: skip
    return table


def _fresh(told: Mapping[str, Any]) -> RenderableType:
    fresh = told["freshness"]
    if fresh is None:
        return Text("freshness: not known", "dim")
    minutes = round(fresh["window_seconds"] / 60)
    table = _table(f"fresh, last {minutes} min", "changes", "p50", "p99")
    for one in [{**fresh, "source": "all sources"}, *fresh["by_source"][:MOST]]:
        late = one["p99"] is not None and one["p99"] > fresh["objective_seconds"]
        p99 = Text(_seconds(one["p99"]), "red" if late else "")
        _row(table, printable(one["source"]), str(one["documents"]), _seconds(one["p50"]), p99)
    return table


def _connectors(told: Mapping[str, Any]) -> Table | None:
    found = told["connectors"]
    if not found:
        return None
    table = _table("connector", "tenant", "state", "last success", "next", "")
    for one in found[:MOST]:
        state = Text(one["state"], CONNECTOR_COLOURS.get(one["state"], ""))
        _row(
            table, printable(one["source"]), printable(one["tenant"]), state, _ago(one["last_success_at"], told["at"]),
            _ago(one["next_at"], told["at"]), printable(one["reason"] or ""),
        )  # fmt: skip
    if len(found) > MOST:
        _row(table, f"… and {len(found) - MOST} more (`penstock connector list`)")
    return table


def _generations(told: Mapping[str, Any]) -> Table | None:
    found = told["generations"]
    if not found:
        return None
    table = _table("generation", "state", "model", "waiting", "")
    for one in found:
        done = ""
        if one["state"] == "building" and one["documents"]:
            done = f"{one['filled']} of {one['documents']} documents ({one['filled'] / one['documents']:.0%})"
        _row(
            table, one["name"], Text(one["state"], "green" if one["state"] == "active" else "dim"),
            f"{printable(one['model'])}, {one['dimensions']}", str(one["waiting"]), done,
        )  # fmt: skip
    return table


def _facts(told: Mapping[str, Any]) -> list[RenderableType]:
    return [Group(*(Text.assemble((f"{name:<16}", "dim"), *parts) for name, *parts in _told_facts(told)))]


def _told_facts(told: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    if (dead := told["dead_letters"]) is not None:
        by = ", ".join(f"{one['code']} {one['letters']}" for one in dead["by_code"])
        waiting = _number(dead["waiting"], more=dead["more"])
        yield "dead letters", (f"{waiting} wait ({by})", "red") if dead["waiting"] else "none waits"
    if skipped := told["skipped"]:
        by = ", ".join(f"{printable(one['source'])}: {one['code']} {one['documents']}" for one in skipped[:MOST])
        documents = sum(one["documents"] for one in skipped)
        yield (
            "skipped",
            (f"{documents} documents cannot be read at their source ({by})", "yellow"),
            ": penstock dead list",
        )
    if (audit := told["audit"]) is not None:
        last = audit["last"]
        if last is None:
            yield "audit", "none has finished yet"
        else:
            verdict = (
                "clean" if not last["differing"] else f"{last['differing']} of {last['documents']} documents differ"
            )
            colour = "red" if last["differing"] else "green"
            ago = _ago(last["finished_at"], told["at"])
            yield "audit", (verdict, colour), f", {last['scope']} of {last['generation']}, {ago}"
    if (spent := told["embedding"]) is not None:
        by = ", ".join(
            f"{one['tokens']} tokens of {printable(one['purpose'])}s" + (f", {one['cost']:.2f}" if one["cost"] else "")
            for one in spent
        )
        yield "embedded today", by or "nothing"
    if (producers := told["producers"]) is not None:
        refused = producers["refused_in_a_day"]
        yield (
            "producers", f"{producers['enrolled']} enrolled, signatures: {producers['mode']}",
            (f", {refused} records refused since yesterday" if refused else "", "yellow"),
        )  # fmt: skip
    if (canaries := told["canaries"]) is not None:
        ages = ", ".join(
            f"{printable(one['source'])} {_seconds(max(one['found_seconds_ago'].values(), default=0.0))} ago"
            for one in canaries[:MOST]
        )
        yield "canaries", f"found {ages}" if ages else "none is looked for"
    files = told["extraction"]
    yield (
        "files", (files["files"], "" if files["files"] == "confined" else "yellow"),
        f" ({files['kernel']}), says {files['of']}",
    )  # fmt: skip


def _number(n: int, *, more: bool) -> str:
    return f"more than {n}" if more else str(n)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _ago(moment: str | None, now: str) -> str:
    """Or in how long."""
    if moment is None:
        return "–"
    seconds = (datetime.fromisoformat(now).astimezone(UTC) - datetime.fromisoformat(moment)).total_seconds()
    return f"{_seconds(seconds)} ago" if seconds >= 0 else f"in {_seconds(-seconds)}"
