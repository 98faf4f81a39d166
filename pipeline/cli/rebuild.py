"""``penstock rebuild``: one store from nothing, beside the old one, then swapped."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.building import confirmed, shown
from pipeline.cli.output import Json, print_json, stderr, stdout

if TYPE_CHECKING:
    from pipeline.rebuild import Plan, Result


class What(StrEnum):
    keywords = "keywords"
    vectors = "vectors"


def rebuild(
    what: Annotated[What, typer.Argument(help="keywords (Elasticsearch) or vectors (pgvector)")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_output: Json = False,
) -> None:
    """Make one store anew from the ledger, beside the old one, and swap it in when it is complete.

    Searches and live changes go on meanwhile. Vectors of unchanged chunks are copied where the old table still has
    them; what is missing is embedded. Stopped or killed, it goes on when it is run again.

    Example: penstock rebuild keywords
    """
    result = asyncio.run(_rebuild(what, dry_run=dry_run, yes=yes, quiet=json_output))
    if result is None:
        raise typer.Exit(1)
    if json_output:
        print_json(asdict(result))
    elif not dry_run:
        stdout.print(_done(result), soft_wrap=True)  # type: ignore[arg-type]  # only a dry run ends with a plan


async def _rebuild(what: What, *, dry_run: bool, yes: bool, quiet: bool) -> Plan | Result | None:
    """None: the person at the terminal said no."""
    from pipeline.rebuild import open_rebuild
    from pipeline.settings import load

    with shown(quiet=quiet) as (bars, tell, note):
        async with open_rebuild(load(), tell, note) as work:
            plan = await work.plan(what.value)
            if not quiet:
                stderr.print(_planned(plan), soft_wrap=True)
            if dry_run:
                return plan
            if not confirmed(bars, yes=yes or quiet):
                return None
            return await work.run(what.value)


def _planned(plan: Plan) -> str:
    goes_on = f"Going on with generation {plan.resumes}: " if plan.resumes else ""
    if plan.store == "keywords":
        return f"{goes_on}{plan.documents:,} documents with {plan.chunks:,} entries into a new index."
    return (
        f"{goes_on}{plan.documents:,} documents, {plan.chunks:,} chunks: {plan.copied:,} vectors to copy from"
        f" the old table, {plan.embedded:,} chunks to embed (about {plan.tokens:,} tokens)."
    )


def _done(result: Result) -> str:
    made = "chunks embedded" if result.store == "vectors" else "entries written"
    return (
        f"{result.store} rebuilt: generation {result.generation} answers searches now in place of {result.replaced};"
        f" {result.documents:,} documents, {result.written:,} {made}, {result.seconds:.0f} s."
    )
