"""``penstock audit``: prove that ledger, pgvector and Elasticsearch agree; repair what does not."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.audit_report import AuditOptions, Report, print_report, show
from cli.moment import past_moment
from cli.output import Json, progress_bars
from cli.terminal import echo

if TYPE_CHECKING:
    from elasticsearch import AsyncElasticsearch
    from rich.progress import Progress as Bars

    from pipeline.audit.repair import RepairResult
    from pipeline.audit.runs import Run
    from pipeline.core.model import Generation
    from pipeline.runtime.settings import Settings
    from pipeline.stores.postgres import Pool


def audit(
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Only documents accepted or written since: 2h, 2026-11-20T08:00, or 'last' for the last audit.",
        ),
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Repair the differences, then compare again.")] = False,
    json_output: Json = False,
    generation: Annotated[
        str | None, typer.Option("--generation", help="A generation's name, or 'all'. Default: the active one.")
    ] = None,
    sample: Annotated[
        int,
        typer.Option("--sample", help="Number of random rows to search for by their own vector; 0: none.", min=0),
    ] = 200,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the interrupted audit.")] = False,
    wait_seconds: Annotated[
        float, typer.Option("--wait-seconds", help="Maximum seconds that --repair waits for the workers.", min=0)
    ] = 120,
) -> None:
    """Compare every document's chunks in the ledger, pgvector and Elasticsearch, and list the differences.

    With --repair the differences are repaired. Exit code 0: the stores agree with the ledger. 1: differences remain.
    Pending documents are not a difference.

    Examples:

    penstock audit --repair

    penstock audit --since 2h --json
    """
    moment = None if since in (None, "last") else past_moment(str(since))
    if resume and (since or generation):
        raise typer.BadParameter(
            "--resume continues the audit with its own options: leave out --since and --generation"
        )
    options = AuditOptions(moment, since == "last", generation, sample, resume, repair, wait_seconds)
    try:
        clean = asyncio.run(_audit(options, json_output=json_output))
    except KeyboardInterrupt:
        echo("stopped: `penstock audit --resume` continues from here", err=True)
        raise typer.Exit(130) from None
    if not clean:
        raise typer.Exit(1)


async def _audit(options: AuditOptions, *, json_output: bool) -> bool:
    from pipeline.audit import runs
    from pipeline.observability import lineage
    from pipeline.runtime.settings import load
    from pipeline.stores.elasticsearch import connect
    from pipeline.stores.postgres import open_pool, translated

    start = perf_counter()
    settings = load()
    async with AsyncExitStack() as stack:
        stack.enter_context(lineage.running())
        pool = await stack.enter_async_context(open_pool(settings.postgres, "stores" if options.repair else "any"))
        es = connect(settings.elasticsearch)
        stack.push_async_callback(es.close)
        bars = stack.enter_context(progress_bars(quiet=json_output))
        if options.repair and not (options.since or options.since_last):
            await _compare_changed(settings, pool, es, options, bars)
        with translated("audit"):
            begun = await _begin(pool, options)
        reports = [await _audit_generation(settings, pool, es, g, run, options, bars) for g, run in begun]
        bars.stop()
        with translated("audit"):
            async with pool.connection() as connection:
                for report in reports:
                    differences = runs.differences(connection, report.run.id)
                    if not json_output:
                        await show(report, differences, options, perf_counter() - start)
                if json_output:
                    await print_report(
                        reports, [runs.differences(connection, r.run.id) for r in reports], perf_counter() - start
                    )
    return all(report.clean for report in reports)


async def _compare_changed(
    settings: Settings, pool: Pool, es: AsyncElasticsearch, options: AuditOptions, bars: Bars
) -> None:
    """Compare a keyword index that was restored, or created anew, with the ledger, and have it filled, so that it is
    searched again."""
    from pipeline.audit.refill import IndexGuard
    from pipeline.kafka.client import producer
    from pipeline.observability.metrics import Metrics
    from pipeline.stores.keywords import Keywords

    async with producer(settings.kafka) as kafka:
        guard = IndexGuard(pool, es, Keywords(es), kafka, Metrics())
        if not await guard.look():
            return
        bars.add_task("comparing the keyword index, which changed", total=None)
        if not await guard.finish(options.wait_seconds):
            echo(
                "the keyword index is not searched yet: the keywords workers have not written all missing entries"
                " (see `penstock status`)",
                err=True,
            )


async def _begin(pool: Pool, options: AuditOptions) -> list[tuple[Generation, Run]]:
    from pipeline.audit import runs
    from pipeline.core.errors import Misconfigured
    from pipeline.ledger import generations

    async with pool.connection() as connection:
        writable = {g.name: g for g in await generations.writable(connection)}
        if options.resume:
            run = await runs.unfinished(connection)
            if run.generation not in writable:
                raise Misconfigured(
                    f"generation {run.generation} of the interrupted audit is retired: run it without --resume"
                )
            return [(writable[run.generation], run)]
        if options.generation not in (None, "all", *writable):
            raise typer.BadParameter(
                f"--generation {options.generation!r} does not exist: choose {', '.join(writable)} or all"
            )
        chosen = [
            g
            for g in writable.values()
            if options.generation in ("all", g.name) or (options.generation is None and g.state == "active")
        ]
        if not chosen:
            raise Misconfigured("no active generation: run `penstock migrate`")
        begun = []
        for g in chosen:
            since = await runs.last_finished(connection, g.name) if options.since_last else options.since
            begun.append((g, await runs.start(connection, g.name, "since" if since else "all", since)))
        return begun


async def _audit_generation(
    settings: Settings,
    pool: Pool,
    es: AsyncElasticsearch,
    generation: Generation,
    run: Run,
    options: AuditOptions,
    bars: Bars,
) -> Report:
    """Audit a generation as a run in lineage. Differences are results: the run completes with them."""
    from pipeline.audit import runs
    from pipeline.audit.compare import KINDS
    from pipeline.audit.examine import Examiner
    from pipeline.audit.sample import sample
    from pipeline.audit.walk import Walk
    from pipeline.observability import lineage
    from pipeline.stores import datasets
    from pipeline.stores.postgres import translated

    stores = datasets.vectors(settings.postgres, generation), datasets.keywords(settings.elasticsearch, generation)
    ledger = datasets.ledger(settings.postgres)
    with lineage.job(f"audit.{generation.name}", "AUDIT", inputs=[ledger, *stores]) as job:
        with translated("audit"):
            async with pool.connection() as connection:
                total = await runs.total(connection, run)
        task = bars.add_task(f"comparing {generation.name}", total=total, completed=run.documents)
        examiner = Examiner(pool, es, generation)
        walk = Walk(examiner, run, progress=lambda n: bars.update(task, completed=n))
        run = await walk.run()
        sampled = None
        if options.sample and generation.state != "building":
            sampled = await sample(pool, generation, options.sample)
            with translated("audit"):
                async with pool.connection() as connection:
                    await runs.add(connection, run.id, sampled.unreachable)
        repaired = await _repair(settings, es, examiner, run, options, bars) if options.repair else None
        with translated("audit"):
            async with pool.connection() as connection:
                report = Report(run, await runs.counts(connection, run.id), sampled, repaired, walk.pending)
        job.inputs = [ledger, *datasets.compared(*stores, report.counts, KINDS)]
        return report


async def _repair(
    settings: Settings, es: AsyncElasticsearch, examiner: Any, run: Run, options: AuditOptions, bars: Bars
) -> RepairResult:
    from pipeline.audit.repair import Repairer
    from pipeline.kafka.client import producer
    from pipeline.stores.keywords import Keywords

    task = bars.add_task("repairing", total=None)
    async with producer(settings.kafka) as kafka:
        repairer = Repairer(examiner, Keywords(es), kafka)
        return await repairer.repair(
            run.id,
            wait_seconds=options.wait_seconds,
            progress=lambda done, total: bars.update(task, completed=done, total=total),
        )
