"""``penstock generation``: another embedding model, other dimensions or another way of cutting, without an outage."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import Progress, TaskID, TimeRemainingColumn

from cli import generation_show as show
from cli.extras import require
from cli.output import (
    ComparedDataset,
    DatasetPrincipals,
    DatasetTags,
    DatasetTenant,
    Json,
    print_json,
    progress_bars,
    stderr,
    stdout,
)
from cli.terminal import echo
from pipeline.core.model import EmbeddingProvider, Generation, Quantisation, VectorIndex

if TYPE_CHECKING:
    from pipeline.generations.building import OnProgress, Phase
    from pipeline.generations.lifecycle import Retired, Switched
    from pipeline.generations.limits import Limits
    from pipeline.generations.migration import Change, Plan, Result
    from pipeline.maintenance.rebuild import Plan as RebuildPlan
    from pipeline.maintenance.rebuild import Result as RebuildResult
    from pipeline.observability.lineage import Run
    from pipeline.runtime.settings import Settings
    from query.evaluation.generations import Comparison


generation = typer.Typer(
    name="generation",
    help="Change the embedding model, its dimensions or the size of chunks without an outage.",
    no_args_is_help=True,
)

PHASES = {
    "copying": "documents",
    "converging": "documents in the new stores",
    "graph": "building the graph",
    "swapping": "swapping",
    "clearing": "removing what is retired",
}
LINE_INTERVAL_SECONDS = 30.0
"""Where there is no terminal, a line shows progress this often."""


@generation.command("list")
def list_(json_output: Json = False) -> None:
    """List the generations with their models, how far each is, what it lacks and how large it is.

    Example: penstock generation list --json
    """
    from pipeline.generations.building import connect
    from pipeline.generations.lifecycle import standings
    from pipeline.runtime.settings import load

    async def read() -> Any:
        async with connect(load().postgres, lock=False) as connection:
            return await standings(connection)

    standing = asyncio.run(read())
    if json_output:
        print_json([{**asdict(s), "since": s.since.isoformat()} for s in standing])
    else:
        stdout.print(show.generations_table(standing))


@generation.command()
def compare(
    name: Annotated[str | None, typer.Argument(help="Name of the generation. Default: the one being built.")] = None,
    dataset: ComparedDataset = None,
    tenant: DatasetTenant = "default",
    principals: DatasetPrincipals = None,
    tags: DatasetTags = None,
    json_output: Json = False,
) -> None:
    """Compare how well two generations answer the golden questions, or those of a dataset.

    Example: penstock generation compare
    """
    compared = asyncio.run(_compared(name, dataset, tenant, principals or [], tags or []))
    if json_output:
        print_json(asdict(compared))
    else:
        stdout.print(show.comparison_table(compared))


async def _compared(
    name: str | None, dataset: Path | None, tenant: str, principals: list[str], tags: list[str]
) -> Comparison:
    require("eval", "query")
    from pipeline.generations.lifecycle import candidate
    from pipeline.runtime.settings import load
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
            echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


@generation.command()
def calibrate(
    name: Annotated[str | None, typer.Argument(help="Name of the generation. Default: the active one.")] = None,
    json_output: Json = False,
) -> None:
    """Measure from which similarity on a passage is relevant, on the generation's own vectors.

    Workers do so when a collection is new or has grown to three times its size, and `build` does it for a new
    generation. Needed after a reranker was set or replaced, whose floor is measured here alone. It embeds 240 short
    questions, and the reranker reads five passages for each of 80.

    Example: penstock generation calibrate
    """
    calibrated = asyncio.run(_calibrated(name))
    if json_output:
        print_json(calibrated)
    else:
        stdout.print(show.calibrated(calibrated), soft_wrap=True)


async def _calibrated(name: str | None) -> dict[str, Any]:
    require("query")
    from pipeline.core.errors import Misconfigured
    from pipeline.embedding.choose import for_generation
    from pipeline.generations.building import connect
    from pipeline.generations.calibration import calibrate as measured
    from pipeline.ledger import generations
    from pipeline.runtime.settings import dist, load
    from pipeline.stores.elasticsearch import connect as elasticsearch
    from pipeline.stores.postgres import translated
    from query.rerank.guarded import open_reranker
    from query.settings import load as load_query

    settings, reranking = load(), load_query().rerank
    async with connect(settings.postgres, lock=False) as connection:
        with translated("calibration"):
            living = await generations.writable(connection)
            chosen = next((g for g in living if (g.state == "active" if name is None else g.name == name)), None)
            if chosen is None:
                raise Misconfigured(f"there is no generation {name or 'to calibrate'}: see `penstock generation list`")
            embedder = await asyncio.to_thread(for_generation, chosen, settings.embedding, dist() / "models")
            reranker, es = None, elasticsearch(settings.elasticsearch)
            try:
                await generations.check_model(connection, chosen, embedder)
                reranker = await open_reranker(reranking)
                calibration = await measured(connection, chosen, embedder, scorer=reranker, es=es)
            finally:
                await es.close()
                await embedder.aclose()
                if reranker is not None:
                    await reranker.aclose()
    if calibration is None:
        raise Misconfigured(f"generation {chosen.name} has no chunks to calibrate on: ingest documents first")
    return {"generation": chosen.name, **asdict(calibration)}


@generation.command()
def cutover(
    force: Annotated[
        bool, typer.Option("--force", help="Cut over even if results are worse or cannot be judged.")
    ] = False,
    evaluation: Annotated[
        bool, typer.Option("--evaluation/--no-evaluation", help="Compare both generations first.")
    ] = True,
    dataset: ComparedDataset = None,
    tenant: DatasetTenant = "default",
    principals: DatasetPrincipals = None,
    tags: DatasetTags = None,
    json_output: Json = False,
) -> None:
    """Make the generation that was built the active one: vectors, keywords and the query's model in one transaction.

    Refused while its stores are incomplete, and when nDCG@5 is more than 2 % below the active generation's (unless
    --force). The replaced generation stays, and is still written, for `rollback`; an older previous one is retired.

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
    from pipeline.generations.building import connect, open_builder
    from pipeline.generations.lifecycle import candidate, require_complete
    from pipeline.generations.lifecycle import cutover as cut
    from pipeline.observability import lineage
    from pipeline.runtime.settings import load
    from pipeline.stores.postgres import translated

    settings = load()
    async with connect(settings.postgres, lock=False) as connection:
        await require_complete(connection)  # before minutes of questions
    compared = None
    if evaluation:
        require("eval", "query")
        from query.evaluation.questions import NothingJudged

        try:
            compared = await _compared(None, dataset, tenant, principals, tags)
        except NothingJudged as error:
            if not force:
                raise Misconfigured(f"{error}; or cut over without a comparison: --no-evaluation") from error
            stderr.print(f"Not judged: {error}", soft_wrap=True)
    if compared is not None:
        stderr.print(show.comparison_table(compared))
        if compared.worse and not force:
            raise Misconfigured(
                f"{compared.worse}: nothing was changed (at most 2 % is allowed; --force cuts over anyway)"
            )
    with lineage.running():
        async with connect(settings.postgres) as connection:
            with _switching("cutover", settings, await candidate(connection)):
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
    return compared, switched


@generation.command()
def rollback(
    force: Annotated[bool, typer.Option("--force", help="Roll back even if it lacks changes.")] = False,
    json_output: Json = False,
) -> None:
    """Go back to the previous generation at once. It was written all the time; a second rollback returns to this one.

    Example: penstock generation rollback
    """
    from pipeline.generations.building import connect
    from pipeline.generations.lifecycle import previous
    from pipeline.generations.lifecycle import rollback as back
    from pipeline.observability import lineage
    from pipeline.runtime.settings import load

    async def switch() -> Switched:
        settings = load()
        with lineage.running():
            async with connect(settings.postgres, lock=False) as connection:
                with _switching("rollback", settings, await previous(connection)):
                    return await back(connection, force=force)

    switched = asyncio.run(switch())
    if json_output:
        print_json(asdict(switched))
    else:
        stdout.print(show.switched(switched), soft_wrap=True)


def _switching(name: str, settings: Settings, to: Generation) -> AbstractContextManager[Run]:
    """The choice of the active generation as a run in lineage: what is searched comes from its stores afterwards."""
    from pipeline.observability import lineage
    from pipeline.stores import datasets

    stores = [datasets.vectors(settings.postgres, to), datasets.keywords(settings.elasticsearch, to)]
    return lineage.job(
        f"generation.{name}",
        "MIGRATION",
        inputs=[datasets.ledger(settings.postgres), *stores],
        outputs=[datasets.searched(settings.postgres)],
    )


@generation.command()
def retire(
    name: Annotated[
        str | None, typer.Argument(help="Name of the generation. Default: the only non-active one.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Delete the rows, the table and the index of a generation that is not active. This cannot be undone.

    Exit code 0: it is retired. If a store could not be cleared, the rest is named, and is removed by the next build or
    by running this command again. 1: nothing was done.

    Example: penstock generation retire g1
    """
    from pipeline.generations.building import open_builder
    from pipeline.generations.lifecycle import retire as gone
    from pipeline.runtime.settings import load

    async def free() -> Retired:
        async with open_builder(load()) as builder:
            return await gone(builder, name)

    done = asyncio.run(free())
    if done.left is not None:
        stderr.print(
            f"Generation {done.name} is retired. What is left of it is removed by the next build, or by `penstock"
            f" generation retire {done.name}`: {done.left}",
            soft_wrap=True,
            markup=False,
        )
    if json_output:
        print_json({"retired": done.name, "cleared": done.left is None})
    elif done.left is None:
        stdout.print(f"Generation {done.name} is retired: its rows, table and index are gone.")


@generation.command()
def build(
    model: Annotated[
        str | None, typer.Option("--model", help="Name of another embedding model, as its service calls it.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option("--dimensions", min=1, help="Number of dimensions of the model's vectors.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option("--chunk-tokens", help="Target size of a chunk, in tokens.")
    ] = None,
    provider: Annotated[
        EmbeddingProvider | None,
        typer.Option("--provider", help="Where the model runs. Default with --model: openai."),
    ] = None,
    base_url: Annotated[str | None, typer.Option("--base-url", help="URL of an OpenAI-compatible server.")] = None,
    input_window: Annotated[
        int | None, typer.Option("--input-window", help="Maximum number of tokens of the model's input.", min=1)
    ] = None,
    document_prefix: Annotated[
        str | None, typer.Option("--document-prefix", help="Text that the model expects before a document.")
    ] = None,
    query_prefix: Annotated[
        str | None, typer.Option("--query-prefix", help="Text that the model expects before a query.")
    ] = None,
    send_dimensions: Annotated[
        bool | None,
        typer.Option("--send-dimensions/--no-send-dimensions", help="Send the number of dimensions to the service."),
    ] = None,
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        typer.Option("--encoding-format", help="Format in which the service returns vectors."),
    ] = None,
    vectors: Annotated[
        VectorIndex | None,
        typer.Option("--vectors", help="Where the nearest vectors are searched. Default: as in the active generation."),
    ] = None,
    quantisation: Annotated[
        Quantisation | None,
        typer.Option(
            "--quantisation",
            help="What a graph in pgvector holds of each vector; binary: a sketch, which takes a seventh of the"
            " memory and of the far ones finds less. Default: as in the active generation.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", min=0, help="Price of a million tokens. Default: the setting.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option("--tokens-per-minute", min=1, help="Limit of the build. Default: none.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Maximum total cost: money, or tokens as in 5000000tokens."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until a cut-over is possible.")] = False,
    without_failing: Annotated[
        bool,
        typer.Option(
            "--without-failing",
            help="Bring in the documents that always fail at the model without the passages that fail: these are"
            " found by their words alone.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and its cost, and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json_output: Json = False,
) -> None:
    """Build a generation while the active one stays in use, or continue the one that is being built.

    Searches and live changes continue meanwhile; live changes reach both generations. Options that are not given are
    taken from the active generation; another model starts with its own defaults. API keys come from the environment,
    OPENAI_API_KEY or PENSTOCK_EMBEDDING_API_KEYS='{"host": "key"}': here, and at the workers and the query service. If
    stopped or killed, it continues when it is run again.

    Example: penstock generation build --model text-embedding-3-small --dimensions 1024 --budget 20 --wait
    """
    from pipeline.generations.migration import Change

    settings = {
        "model": model,
        "dimensions": dimensions,
        "provider": provider,
        "base_url": base_url,
        "input_window": input_window,
        "document_prefix": document_prefix,
        "query_prefix": query_prefix,
        "send_dimensions": send_dimensions,
        "encoding_format": encoding_format,
    }
    change = Change({k: v for k, v in settings.items() if v is not None}, chunk_tokens, price, vectors, quantisation)
    result = asyncio.run(
        _build(
            change,
            tokens_per_minute,
            budget,
            wait=wait,
            without_failing=without_failing,
            dry_run=dry_run,
            yes=yes,
            quiet=json_output,
        )
    )
    if result is None:
        raise typer.Exit(1)
    if json_output:
        print_json(asdict(result))
    elif not dry_run:
        stdout.print(show.built(result), soft_wrap=True)  # type: ignore[arg-type]  # only a dry run ends with a plan


async def _build(
    change: Change,
    tokens_per_minute: int | None,
    budget: str | None,
    *,
    wait: bool,
    without_failing: bool,
    dry_run: bool,
    yes: bool,
    quiet: bool,
) -> Plan | Result | None:
    """None: the person at the terminal said no."""
    from pipeline.generations.building import open_builder
    from pipeline.generations.limits import Limits
    from pipeline.generations.migration import Migration
    from pipeline.observability import lineage
    from pipeline.runtime.settings import dist, load

    settings = load()
    with lineage.running(), shown(quiet=quiet) as (bars, on_progress, note):
        async with open_builder(settings, on_progress, note) as builder:
            work = Migration(builder, settings.embedding, dist() / "models")
            plan = await work.plan(change)
            limits: Limits = Limits(tokens_per_minute, _budget(budget, plan.price), plan.price)
            if not quiet:
                stderr.print(show.planned(plan), soft_wrap=True)
            if dry_run:
                return plan
            if not confirmed(bars, yes=yes or quiet):
                return None
            return await work.run(change, limits, wait=wait, without_failing=without_failing)


def _budget(text: str | None, price: float) -> int | None:
    """The budget in tokens; None: there is none."""
    if text is None:
        return None
    match = re.fullmatch(r"([\d_.]+)\s*(tokens)?", text.strip())
    try:
        amount = float(match[1].replace("_", "")) if match else None
    except ValueError:
        amount = None
    if match is None or amount is None:
        raise typer.BadParameter(
            f"--budget {text}: give an amount of money, such as 20, or of tokens, such as 5000000tokens"
        )
    if match[2]:
        return round(amount)
    if price <= 0:
        raise typer.BadParameter("--budget in money needs --price; or give a number of tokens, such as 5000000tokens")
    return round(amount / price * 1e6)


class What(StrEnum):
    keywords = "keywords"
    vectors = "vectors"


def rebuild(
    what: Annotated[What, typer.Argument(help="The store: keywords (Elasticsearch) or vectors (pgvector).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json_output: Json = False,
) -> None:
    """Rebuild one store from the ledger while the old one stays in use, and replace it when the new one is complete.

    Searches and live changes continue meanwhile. Vectors are copied from the old table where it still has them; missing
    ones are embedded. If stopped or killed, it continues when it is run again.

    Example: penstock rebuild keywords
    """
    result = asyncio.run(_rebuild(what, dry_run=dry_run, yes=yes, quiet=json_output))
    if result is None:
        raise typer.Exit(1)
    if json_output:
        print_json(asdict(result))
    elif not dry_run:
        stdout.print(_rebuild_result_line(result), soft_wrap=True)  # type: ignore[arg-type]  # only a dry run ends with a plan


async def _rebuild(what: What, *, dry_run: bool, yes: bool, quiet: bool) -> RebuildPlan | RebuildResult | None:
    """None: the person at the terminal said no."""
    from pipeline.maintenance.rebuild import open_rebuild
    from pipeline.observability import lineage
    from pipeline.runtime.settings import load

    with lineage.running(), shown(quiet=quiet) as (bars, on_progress, note):
        async with open_rebuild(load(), on_progress, note) as work:
            plan = await work.plan(what.value)
            if not quiet:
                stderr.print(_rebuild_plan_line(plan), soft_wrap=True)
            if dry_run:
                return plan
            if not confirmed(bars, yes=yes or quiet):
                return None
            return await work.run(what.value)


def _rebuild_plan_line(plan: RebuildPlan) -> str:
    goes_on = f"Continuing generation {plan.resumes}: " if plan.resumes else ""
    if plan.store == "keywords":
        return f"{goes_on}{plan.documents:,} documents with {plan.chunks:,} entries into a new index."
    return (
        f"{goes_on}{plan.documents:,} documents, {plan.chunks:,} chunks: {plan.copied:,} vectors to copy from"
        f" the old table, {plan.embedded:,} chunks to embed (about {plan.tokens:,} tokens)."
    )


def _rebuild_result_line(result: RebuildResult) -> str:
    made = "chunks embedded" if result.store == "vectors" else "entries written"
    return (
        f"{result.store} rebuilt: generation {result.generation} serves searches now instead of {result.replaced};"
        f" {result.documents:,} documents, {result.written:,} {made}, {result.seconds:.0f} s."
    )


@contextmanager
def shown(*, quiet: bool) -> Iterator[tuple[Progress, OnProgress, Callable[[str], None]]]:
    """Show progress. Yields the bars, the function that receives the progress of a phase, and the one that prints a
    line. quiet: no bars; lines go to stderr all the same."""
    with progress_bars(quiet=quiet) as bars:
        bars.columns = (*bars.columns, TimeRemainingColumn())
        tasks: dict[str, TaskID] = {}
        began: dict[str, tuple[float, int]] = {}
        printed_at = monotonic()

        def on_progress(phase: Phase, done: int, total: int) -> None:
            nonlocal printed_at
            if phase not in tasks:
                tasks[phase] = bars.add_task(PHASES[phase])
                began[phase] = monotonic(), done
            bars.update(tasks[phase], completed=done, total=total)
            if bars.disable and monotonic() - printed_at >= LINE_INTERVAL_SECONDS:
                printed_at = monotonic()
                stderr.print(f"{PHASES[phase]}: {done:,} of {total:,}{_left(*began[phase], done, total)}")

        def note(line: str) -> None:
            stderr.print(line, soft_wrap=True)

        yield bars, on_progress, note


def confirmed(bars: Progress, *, yes: bool) -> bool:
    """Return whether to go on. A person at a terminal is asked, unless the command has --yes."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    bars.stop()
    if not typer.confirm("Continue?", default=True, err=True):
        return False
    bars.start()
    return True


def _left(since: float, first: int, done: int, total: int) -> str:
    """The time that the rest takes at the mean rate so far."""
    if done <= first:
        return ""
    minutes = (total - done) * (monotonic() - since) / (done - first) / 60
    return f", about {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left"
