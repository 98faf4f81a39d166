"""``penstock generation build``: begins a generation beside the active one, or goes on with it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipeline.cli import generation_show as show
from pipeline.cli.building import confirmed, shown
from pipeline.cli.output import Json, print_json, stderr, stdout

if TYPE_CHECKING:
    from pipeline.generations.limits import Limits
    from pipeline.generations.migration import Change, Plan, Result


def build(
    model: Annotated[str | None, typer.Option("--model", help="Another model, by its name at its service.")] = None,
    dimensions: Annotated[int | None, typer.Option("--dimensions", min=1)] = None,
    chunk_tokens: Annotated[int | None, typer.Option("--chunk-tokens", help="What a chunk aims at.")] = None,
    provider: Annotated[
        Literal["local", "openai"] | None, typer.Option("--provider", help="Default with --model: openai.")
    ] = None,
    base_url: Annotated[str | None, typer.Option("--base-url", help="Of an OpenAI-compatible server.")] = None,
    input_window: Annotated[int | None, typer.Option("--input-window", help="Most tokens it reads.", min=1)] = None,
    document_prefix: Annotated[str | None, typer.Option("--document-prefix")] = None,
    query_prefix: Annotated[str | None, typer.Option("--query-prefix")] = None,
    send_dimensions: Annotated[bool | None, typer.Option("--send-dimensions/--no-send-dimensions")] = None,
    encoding_format: Annotated[Literal["float", "base64"] | None, typer.Option("--encoding-format")] = None,
    price: Annotated[
        float | None, typer.Option("--price", min=0, help="Of a million tokens. Default: as it is set.")
    ] = None,
    tokens_per_minute: Annotated[int | None, typer.Option("--tokens-per-minute", min=1)] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Most that it may cost in all: money, or tokens as in 5000000tokens."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until it may be cut over to.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do and cost, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_output: Json = False,
) -> None:
    """Build a generation beside the active one, or go on with the one that is being built.

    Searches and live changes go on meanwhile; live changes reach both. What is not said stays as in the active
    generation; another model begins with its own defaults. Keys come from the environment alone: OPENAI_API_KEY, or
    PENSTOCK_EMBEDDING_API_KEYS='{"host": "key"}', here and at the workers and the query service. Stopped or killed, it
    goes on when it is run again.

    Example: penstock generation build --model text-embedding-3-small --dimensions 1024 --budget 20 --wait
    """
    from pipeline.generations.migration import Change

    asked = {
        "model": model, "dimensions": dimensions, "provider": provider, "base_url": base_url,
        "input_window": input_window, "document_prefix": document_prefix, "query_prefix": query_prefix,
        "send_dimensions": send_dimensions, "encoding_format": encoding_format,
    }  # fmt: skip
    change = Change({k: v for k, v in asked.items() if v is not None}, chunk_tokens, price)
    result = asyncio.run(
        _build(change, tokens_per_minute, budget, wait=wait, dry_run=dry_run, yes=yes, quiet=json_output)
    )
    if result is None:
        raise typer.Exit(1)
    if json_output:
        print_json(asdict(result))
    elif not dry_run:
        stdout.print(show.built(result), soft_wrap=True)  # type: ignore[arg-type]  # only a dry run ends with a plan


async def _build(
    change: Change, tokens_per_minute: int | None, budget: str | None, *, wait: bool, dry_run: bool, yes: bool,
    quiet: bool,
) -> Plan | Result | None:  # fmt: skip
    """None: the person at the terminal said no."""
    from pipeline.generations.limits import Limits
    from pipeline.generations.migration import Migration
    from pipeline.generations.opening import open_builder
    from pipeline.settings import dist, load

    settings = load()
    with shown(quiet=quiet) as (bars, tell, note):
        async with open_builder(settings, tell, note) as builder:
            work = Migration(builder, settings.embedding, dist() / "models")
            plan = await work.plan(change)
            limits: Limits = Limits(tokens_per_minute, _budget(budget, plan.price), plan.price)
            if not quiet:
                stderr.print(show.planned(plan), soft_wrap=True)
            if dry_run:
                return plan
            if not confirmed(bars, yes=yes or quiet):
                return None
            return await work.run(change, limits, wait=wait)


def _budget(text: str | None, price: float) -> int | None:
    """In tokens."""
    if text is None:
        return None
    found = re.fullmatch(r"([\d_.]+)\s*(tokens)?", text.strip())
    try:
        amount = float(found[1].replace("_", "")) if found else None
    except ValueError:
        amount = None
    if found is None or amount is None:
        raise typer.BadParameter(f"--budget {text}: say money as in 20, or tokens as in 5000000tokens")
    if found[2]:
        return round(amount)
    if price <= 0:
        raise typer.BadParameter("--budget in money needs a price: give --price, or say tokens as in 5000000tokens")
    return round(amount / price * 1e6)
