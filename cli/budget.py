"""``penstock budget``: what tenants and callers of the query service have used today."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.ledger import ledger
from cli.output import Json, print_json, printable, stderr, stdout

if TYPE_CHECKING:
    from query.limits.quotas import Quotas

AMOUNTS = ("requests", "tokens", "money")


def budget(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Show only this tenant. Default: all.")] = None,
    limits: Annotated[
        Path | None,
        typer.Option("--limits", help="The file of limits. Default: PENSTOCK_SERVE_LIMITS_FILE, the service's own."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Show the budget of each tenant and caller, and how much of it was used since midnight (UTC).

    Used amounts include what a process has reserved in advance. Use without a budget is counted within 15 seconds.

    Example: penstock budget --tenant acme --json
    """
    from query.limits.quotas import Quotas
    from query.settings import load

    quotas = Quotas(limits or load().serve.limits_file)
    usages = [_usage(row, quotas) for row in asyncio.run(_rows(tenant))]
    if json_output:
        print_json(usages)
        return
    if not usages:
        stderr.print("the query service has had no requests today", soft_wrap=True)
        return
    _show(usages)


async def _rows(tenant: str | None) -> list[Any]:
    async with ledger("budgets") as connection:
        cursor = await connection.execute(
            "SELECT tenant, caller, requests, tokens, money FROM overview_use"
            " WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s)"
            " ORDER BY tenant, caller <> '', money DESC, tokens DESC, requests DESC, caller",
            {"tenant": tenant},
        )
        return await cursor.fetchall()


def _usage(row: Any, quotas: Quotas) -> dict[str, Any]:
    tenant, caller, *used = row
    quota = quotas.of(tenant)
    most = (quota.caller if caller else quota).amounts
    parts = {
        name: {"used": round(amount, 6), "budget": limit, "ratio": _ratio(amount, limit)}
        for name, amount, limit in zip(AMOUNTS, used, most, strict=True)
    }
    return {"tenant": tenant, "caller": caller or None, **parts}


def _ratio(used: float, limit: float | None) -> float | None:
    if limit is None:
        return None
    return round(used / limit, 4) if limit else 1.0


def _show(usages: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("tenant", "caller", *AMOUNTS, "most used")
    for usage in usages:
        cells = []
        for name in AMOUNTS:
            digits = 2 if name == "money" else 0
            cells.append(f"{usage[name]['used']:,.{digits}f}")
            if usage[name]["budget"] is not None:
                cells[-1] += f" of {usage[name]['budget']:,.{digits}f}"
        ratios = [usage[name]["ratio"] for name in AMOUNTS if usage[name]["ratio"] is not None]
        table.add_row(
            printable(usage["tenant"]), printable(usage["caller"] or ""), *cells, f"{max(ratios):.0%}" if ratios else ""
        )
    stdout.print(table)
