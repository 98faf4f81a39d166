"""How connectors are shown to people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.console import SafeConsole
from cli.output import printable, stderr, stdout
from connectors.operate import Summary
from pipeline.core.publication import publications_of

MAX_PRINTED_CHANGES = 30
"""The most changes that a token names which is printed for people; it then has 1,002 characters."""
COLOURS = {
    "following": "green",
    "first load": "cyan",
    "paused": "yellow",
    "waiting": "yellow",
    "needs attention": "red",
    "not running": "red",
    "removed": "bright_black",
}


def _console() -> Console:
    return stdout if stdout.is_terminal else SafeConsole(highlight=False, width=200)


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def show_list(connectors: Sequence[Summary]) -> None:
    table = _table("name", "kind", "tenant", "state", "")
    for connector in connectors:
        table.add_row(connector.name, connector.kind, connector.tenant, _state(connector), _safe(connector.reason))
    _console().print(table)


def _state(connector: Summary) -> str:
    return f"[{COLOURS[connector.state]}]{connector.state}[/]"


def show_status(connector: Summary) -> None:
    console = _console()
    reason = _safe(connector.reason)
    console.print(f"[bold]{_safe(connector.name)}[/]  {connector.kind}  {_state(connector)}  {reason}")
    row = connector.row
    if row is None:
        return
    published = ", ".join(f"{kind} {n}" for kind, n in sorted(row.counts.items())) or "nothing"
    console.print(f"  {connector.documents} documents; published so far: {published}", markup=False)
    if connector.uploads is not None:
        console.print(f"  uploads: {_quota(connector.uploads)}", markup=False)
    if row.address and connector.state != "not running":
        console.print(f"  events: {row.address}/v1/events/{connector.name}", markup=False)
    if row.guard:
        console.print(
            f"  [red]a sweep misses {row.guard['missing']} of {row.guard['published']} documents: nothing is deleted[/]"
            f" until you run penstock connector run {_safe(connector.name)} --allow-mass-delete"
        )
    if (compared := row.reconciliation) is not None:
        differences = ", ".join(f"{kind} {n}" for kind, n in compared["found"].items()) or "no difference"
        console.print(
            f"  compared with the ledger {_ago(compared['at'])}: {compared['documents']} documents,"
            f" {compared['principals']} people's groups: {differences}",
            markup=False,
        )
    table = _table("  activity", "state", "last success", "")
    for name, activity in row.activities.items():
        table.add_row(
            f"  {name}", activity.get("state", ""), _ago(activity.get("succeeded_at")), _safe(activity.get("reason"))
        )
    console.print(table)
    for problem in row.problems:
        console.print(f"  {problem['code']}: {problem['message']}", markup=False, soft_wrap=True)
    if connector.unpublishable_by_code:
        total = sum(connector.unpublishable_by_code.values())
        console.print(f"  {total} documents cannot be published:", markup=False)
        for external_id, code, message in connector.unpublishable:
            console.print(f"    {printable(external_id)}: {code}: {printable(message)}", markup=False, soft_wrap=True)
        if total > len(connector.unpublishable):
            console.print(f"    … and {total - len(connector.unpublishable)} more")


def show_outcome(result: Mapping[str, Any]) -> None:
    for action, outcome in result["outcomes"].items():
        if "error" in outcome:
            stderr.print(f"[red]{action}[/]", end=": ")
            stderr.print(outcome["error"], markup=False, soft_wrap=True)
            continue
        nothing = "complete" if action == "load" else "nothing new"
        counts = ", ".join(f"{kind} {n}" for kind, n in outcome.items() if isinstance(n, int) and n)
        stdout.print(f"{action}: {counts or nothing}", markup=False)
        for message in outcome.get("warnings", ()):
            stderr.print("[yellow]warning[/]", end=": ")
            stderr.print(message, markup=False, soft_wrap=True)
    for message in result["problems"]:
        stderr.print("[red]problem[/]", end=": ")
        stderr.print(message, markup=False, soft_wrap=True)
    if result["ok"] or result["token"] is None or publications_of(result["token"]):
        stdout.print(_token_line(result["token"]), markup=False, soft_wrap=True)


def _token_line(token: str | None) -> str:
    if token is None:
        return "no token: more was published and is not in both stores yet than one can name"
    changes = len(publications_of(token))
    if not changes:
        return "everything that was published is in both stores"
    if changes > MAX_PRINTED_CHANGES:
        return f"token: of {changes} changes; --json prints it"
    return f"token: {token}"


def _quota(uploads: Mapping[str, Mapping[str, int]]) -> str:
    """E.g. ``12 of 100,000 files, 3.4 of 50,000.0 MB (all tenants: …)``."""
    used, quota = uploads["used"], uploads["quota"]

    def shown(of: str) -> str:
        most = {unit: quota[f"{of}_{unit}"] for unit in ("files", "bytes")}
        files = f" of {most['files']:,}" if most["files"] else ""
        size = f" of {most['bytes'] / 1e6:,.1f}" if most["bytes"] else ""
        return f"{used[f'{of}_files']:,}{files} files, {used[f'{of}_bytes'] / 1e6:,.1f}{size} MB"

    return f"{shown('tenant')}; all tenants: {shown('all')}"


def _ago(moment: str | None) -> str:
    if moment is None:
        return "never"
    seconds = max(0, int((datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def _safe(text: str | None) -> str:
    """Escape the text for a cell, where markup is interpreted."""
    return printable(text or "").replace("[", "\\[")
