"""``penstock generation``: another embedding model, other dimensions or another way of cutting, without an outage."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli import generation_show as show
from pipeline.cli.generation_build import build
from pipeline.cli.output import Json, print_json, stderr, stdout

if TYPE_CHECKING:
    from pipeline.generations.lifecycle import Retired, Switched
    from query.evaluation.generations import Comparison

generation = typer.Typer(
    name="generation",
    help="Another embedding model, other dimensions or another way of cutting, without an outage.",
    no_args_is_help=True,
)
generation.command()(build)

Dataset = Annotated[
    Path | None, typer.Option("--dataset", help="Judge by this collection instead of the golden questions.")
]
Tenant = Annotated[str, typer.Option("--tenant", help="With --dataset: whose documents.")]
Principals = Annotated[
    list[str] | None, typer.Option("--as", metavar="PRINCIPAL", help="With --dataset: who asks. Repeatable.")
]
Tags = Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="With --dataset: a tag the asker holds.")]


@generation.command("list")
def list_(json_output: Json = False) -> None:
    """Every generation with its model, how far it is, what it lacks and how large it is."""
    from pipeline.generations.lifecycle import standings
    from pipeline.generations.opening import connect
    from pipeline.settings import load

    async def found() -> Any:
        async with connect(load().postgres, lock=False) as connection:
            return await standings(connection)

    standing = asyncio.run(found())
    if json_output:
        print_json([{**asdict(s), "since": s.since.isoformat()} for s in standing])
    else:
        stdout.print(show.table(standing))


@generation.command()
def compare(
    name: Annotated[str | None, typer.Argument(help="Default: the one that is being built.")] = None,
    dataset: Dataset = None,
    tenant: Tenant = "default",
    principals: Principals = None,
    tags: Tags = None,
    json_output: Json = False,
) -> None:
    """Ask both generations the golden questions, or a dataset's, and say which one finds the better answers.

    Example: penstock generation compare
    """
    found = asyncio.run(_compared(name, dataset, tenant, principals or [], tags or []))
    if json_output:
        print_json(asdict(found))
    else:
        stdout.print(show.comparison(found))


async def _compared(
    name: str | None, dataset: Path | None, tenant: str, principals: list[str], tags: list[str]
) -> Comparison:
    from pipeline.generations.lifecycle import candidate
    from pipeline.settings import load
    from pipeline.stores.postgres import open_pool
    from query.evaluation.dataset import BadDataset
    from query.evaluation.generations import compare as compared

    settings = load()
    async with open_pool(settings.postgres) as pool:
        async with pool.connection() as connection:
            chosen = await candidate(connection, name)
        try:
            return await compared(
                settings, pool, chosen.name, dataset=dataset, tenant=tenant, principals=principals, tags=tags
            )
        except BadDataset as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


@generation.command()
def cutover(
    force: Annotated[bool, typer.Option("--force", help="Even if it finds less, or nothing could be judged.")] = False,
    evaluation: Annotated[bool, typer.Option("--evaluation/--no-evaluation", help="Compare both before.")] = True,
    dataset: Dataset = None,
    tenant: Tenant = "default",
    principals: Principals = None,
    tags: Tags = None,
    json_output: Json = False,
) -> None:
    """Make the generation that was built the active one: vectors, keywords and the query's model in one transaction.

    Refused while its stores lack anything, and when nDCG@5 is more than 2 % below the active generation's (unless
    --force). The one that was active stays, written as before, for `rollback`; an older previous one is retired.

    Example: penstock generation cutover
    """
    compared, switched = asyncio.run(
        _cutover(dataset, tenant, principals or [], tags or [], force=force, evaluation=evaluation)
    )
    if worse := compared and compared.worse:
        stderr.print(f"Forced: {worse}.", soft_wrap=True)
    if json_output:
        judged = asdict(compared) if compared else None
        print_json({**asdict(switched), "evaluation": judged, "forced": bool(worse)})
    else:
        stdout.print(show.switched(switched), soft_wrap=True)


async def _cutover(
    dataset: Path | None, tenant: str, principals: list[str], tags: list[str], *, force: bool, evaluation: bool
) -> tuple[Comparison | None, Switched]:
    from pipeline.core.errors import Misconfigured, PenstockError
    from pipeline.generations.lifecycle import cutover as cut
    from pipeline.generations.lifecycle import require_complete
    from pipeline.generations.opening import connect, open_builder
    from pipeline.settings import load
    from pipeline.stores.postgres import translated
    from query.evaluation.generations import NothingJudged

    settings = load()
    async with connect(settings.postgres, lock=False) as connection:
        await require_complete(connection)  # before minutes of questions
    found = None
    if evaluation:
        try:
            found = await _compared(None, dataset, tenant, principals, tags)
        except NothingJudged as error:
            if not force:
                raise Misconfigured(f"{error}; or cut over unjudged, with --no-evaluation") from error
            stderr.print(f"Not judged: {error}", soft_wrap=True)
    if found is not None:
        stderr.print(show.comparison(found))
        if found.worse and not force:
            raise Misconfigured(f"{found.worse}: nothing was changed (2 % is the most; --force does it all the same)")
    async with connect(settings.postgres) as connection:
        switched = await cut(connection)
    if switched.retired:
        try:
            with translated("generation"):
                async with open_builder(settings) as builder:
                    await builder.clear(after_queries=True)
        except PenstockError as error:  # what was asked for is done
            stderr.print(
                f"Cut over. What is left of {', '.join(switched.retired)} is removed by the next build: {error}",
                soft_wrap=True,
            )
    return found, switched


@generation.command()
def rollback(
    force: Annotated[bool, typer.Option("--force", help="Even if it lacks changes.")] = False, json_output: Json = False
) -> None:
    """Go back to the generation that was active before, at once; again: forth. It was written all along.

    Example: penstock generation rollback
    """
    from pipeline.generations.lifecycle import rollback as back
    from pipeline.generations.opening import connect
    from pipeline.settings import load

    async def switch() -> Switched:
        async with connect(load().postgres, lock=False) as connection:
            return await back(connection, force=force)

    switched = asyncio.run(switch())
    if json_output:
        print_json(asdict(switched))
    else:
        stdout.print(show.switched(switched), soft_wrap=True)


@generation.command()
def retire(
    name: Annotated[str | None, typer.Argument(help="Default: the only one beside the active one.")] = None,
    json_output: Json = False,
) -> None:
    """Free the rows, the table and the index of a generation that is not active; there is no way back to it.

    Exit code 0 once it is retired, also where a store could not be cleared: what is left is named, and goes with the
    next build, or when this is run again. 1: nothing was done.

    Example: penstock generation retire g1
    """
    from pipeline.generations.lifecycle import retire as gone
    from pipeline.generations.opening import open_builder
    from pipeline.settings import load

    async def free() -> Retired:
        async with open_builder(load()) as builder:
            return await gone(builder, name)

    done = asyncio.run(free())
    if done.left is not None:
        stderr.print(
            f"Generation {done.name} is retired. What is left of it is removed by the next build, or by `penstock"
            f" generation retire {done.name}`: {done.left}",
            soft_wrap=True, markup=False,
        )  # fmt: skip
    if json_output:
        print_json({"retired": done.name, "cleared": done.left is None})
    elif done.left is None:
        stdout.print(f"Generation {done.name} is retired: its rows, table and index are gone.")
