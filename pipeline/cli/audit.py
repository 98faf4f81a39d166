"""``penstock audit``: prove that ledger, pgvector and Elasticsearch agree; mend what does not."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.output import Json, progress_bars, stderr, stdout

if TYPE_CHECKING:
    from elasticsearch import AsyncElasticsearch
    from rich.progress import Progress as Bars

    from pipeline.audit.compare import Kind, Place
    from pipeline.audit.mend import Mended
    from pipeline.audit.runs import Recorded, Run
    from pipeline.audit.sample import Sample
    from pipeline.audit.walk import Pending
    from pipeline.core.model import Generation
    from pipeline.settings import Settings
    from pipeline.stores.postgres import Pool

SHOWN = 20
"""Documents named to people; --json names all."""
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def audit(
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Only documents accepted or settled since then: 2h, 2026-11-20T08:00, or 'last' (finished audit).",
        ),
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what differs, then look again.")] = False,
    json_output: Json = False,
    generation: Annotated[
        str | None, typer.Option("--generation", help="A generation's name, or 'all'. Default: the active one.")
    ] = None,
    sample: Annotated[
        int, typer.Option("--sample", help="Random rows that must find themselves through HNSW; 0: none.", min=0)
    ] = 200,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the audit that was interrupted.")] = False,
    wait_seconds: Annotated[
        float, typer.Option("--wait-seconds", help="How long --repair waits for the workers.", min=0)
    ] = 120,
) -> None:
    """Compare every document's chunks in the ledger, pgvector and Elasticsearch; name and mend every difference.

    Exit code 0: they agree. 1: differences are left. Documents still on their way are no difference.

    Examples:

    penstock audit --repair

    penstock audit --since 2h --json
    """
    moment = _moment(since)
    if resume and (since or generation):
        raise typer.BadParameter("--resume goes on with the audit as it was begun: leave --since and --generation out")
    asked = Asked(moment, since == "last", generation, sample, resume, repair, wait_seconds)
    try:
        clean = asyncio.run(_audit(asked, json_output=json_output))
    except KeyboardInterrupt:
        typer.echo("stopped: `penstock audit --resume` goes on from here", err=True)
        raise typer.Exit(130) from None
    if not clean:
        raise typer.Exit(1)


def _moment(since: str | None) -> datetime | None:
    """A time in the past. Raises BadParameter."""
    if since is None or since == "last":
        return None
    try:
        if span := _SPAN.fullmatch(since.strip()):
            return datetime.now(UTC) - timedelta(**{_UNITS[span[2]]: float(span[1])})
        return datetime.fromisoformat(since).astimezone()
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"--since {since!r}: say 30m, 2h, 7d, 2026-11-20T08:00, or last") from error


@dataclass(frozen=True, slots=True)
class Asked:
    since: datetime | None
    since_last: bool
    generation: str | None
    sample: int
    resume: bool
    repair: bool
    wait_seconds: float


@dataclass(slots=True)
class Report:
    """One generation's audit."""

    run: Run
    counts: dict[tuple[Place, Kind], tuple[int, int]]
    sample: Sample | None
    mended: Mended | None = None
    pending: list[Pending] = field(default_factory=list)

    @property
    def found(self) -> int:
        return sum(n for n, _ in self.counts.values())

    @property
    def left(self) -> int:
        return sum(left for _, left in self.counts.values())

    @property
    def clean(self) -> bool:
        return not self.left and not (self.sample and self.sample.problem)


async def _audit(asked: Asked, *, json_output: bool) -> bool:
    from pipeline.audit import runs
    from pipeline.settings import load
    from pipeline.stores.elasticsearch import connect
    from pipeline.stores.postgres import open_pool, translated

    start = perf_counter()
    settings = load()
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(settings.postgres))
        es = connect(settings.elasticsearch)
        stack.push_async_callback(es.close)
        bars = stack.enter_context(progress_bars(quiet=json_output))
        with translated("audit"):
            begun = await _begin(pool, asked)
        reports = [await _one(settings, pool, es, g, run, asked, bars) for g, run in begun]
        bars.stop()
        with translated("audit"):
            async with pool.connection() as connection:
                for report in reports:
                    found = runs.differences(connection, report.run.id)
                    if not json_output:
                        await _show(report, found, asked, perf_counter() - start)
                if json_output:
                    await _print_json(
                        reports, [runs.differences(connection, r.run.id) for r in reports], perf_counter() - start
                    )
    return all(report.clean for report in reports)


async def _begin(pool: Pool, asked: Asked) -> list[tuple[Generation, Run]]:
    from pipeline.audit import runs
    from pipeline.core.errors import Misconfigured
    from pipeline.ledger import generations

    async with pool.connection() as connection:
        writable = {g.name: g for g in await generations.writable(connection)}
        if asked.resume:
            run = await runs.unfinished(connection)
            if run.generation not in writable:
                raise Misconfigured(f"the interrupted audit was of {run.generation}, which is retired: begin a new one")
            return [(writable[run.generation], run)]
        if asked.generation not in (None, "all", *writable):
            raise typer.BadParameter(f"--generation {asked.generation!r}: there is {', '.join(writable)} (or all)")
        chosen = [
            g for g in writable.values()
            if asked.generation in ("all", g.name) or (asked.generation is None and g.state == "active")
        ]  # fmt: skip
        if not chosen:
            raise Misconfigured("no active generation: run `penstock migrate`")
        begun = []
        for g in chosen:
            since = await runs.last_finished(connection, g.name) if asked.since_last else asked.since
            begun.append((g, await runs.start(connection, g.name, "since" if since else "all", since)))
        return begun


async def _one(
    settings: Settings, pool: Pool, es: AsyncElasticsearch, generation: Generation, run: Run, asked: Asked, bars: Bars
) -> Report:
    from pipeline.audit import runs
    from pipeline.audit.examine import Examiner
    from pipeline.audit.sample import sample
    from pipeline.audit.walk import Walk
    from pipeline.stores.postgres import translated

    with translated("audit"):
        async with pool.connection() as connection:
            total = await runs.total(connection, run)
    task = bars.add_task(f"comparing {generation.name}", total=total, completed=run.documents)
    examiner = Examiner(pool, es, generation)
    walk = Walk(examiner, run, progress=lambda n: bars.update(task, completed=n))
    run = await walk.run()
    sampled = None
    if asked.sample and generation.state != "building":
        sampled = await sample(pool, generation, asked.sample)
        with translated("audit"):
            async with pool.connection() as connection:
                await runs.add(connection, run.id, sampled.unreachable)
    mended = await _mend(settings, es, examiner, run, asked, bars) if asked.repair else None
    with translated("audit"):
        async with pool.connection() as connection:
            return Report(run, await runs.counts(connection, run.id), sampled, mended, walk.pending)


async def _mend(
    settings: Settings, es: AsyncElasticsearch, examiner: Any, run: Run, asked: Asked, bars: Bars
) -> Mended:
    from pipeline.audit.mend import Mender
    from pipeline.kafka import producer
    from pipeline.stores.keywords import Keywords

    task = bars.add_task("repairing", total=None)
    async with producer(settings.kafka) as kafka:
        mender = Mender(examiner, Keywords(es), kafka)
        return await mender.mend(
            run.id,
            wait_seconds=asked.wait_seconds,
            progress=lambda done, total: bars.update(task, completed=done, total=total),
        )


# Speaking


async def _print_json(reports: list[Report], found: list[AsyncIterator[Recorded]], seconds: float) -> None:
    """One JSON document, written as it is read: there may be millions of differences."""
    head = {
        "documents": sum(r.run.documents for r in reports),
        "chunks": sum(r.run.chunks for r in reports),
        "clean": all(r.clean for r in reports),
        "pending": sum(r.run.pending for r in reports),
        "repaired": sum(r.found - r.left for r in reports),
        "left": sum(r.left for r in reports),
        "generation": ",".join(r.run.generation for r in reports),
        "sample": _sample_json(reports),
        "failed": [
            {"document_id": str(p.document), "external_id": p.external_id, "reason": p.reason}
            for r in reports for p in r.pending if p.reason
        ],
        "seconds": round(seconds, 3),
    }  # fmt: skip
    out = sys.stdout
    out.write(json.dumps(head, ensure_ascii=False)[:-1] + ', "differences": [')
    separator = ""
    for report, recorded in zip(reports, found, strict=True):
        async for r in recorded:
            difference = {
                "document_id": str(r.finding.document), "store": r.finding.store, "kind": r.finding.kind,
                "chunks": r.finding.chunks, "external_id": r.finding.external_id, "generation": report.run.generation,
                "repaired": r.repaired,
            }  # fmt: skip
            out.write(separator + json.dumps(difference, ensure_ascii=False))
            separator = ", "
    out.write("]}\n")


def _sample_json(reports: list[Report]) -> dict[str, Any]:
    samples = [r.sample for r in reports if r.sample]
    return {
        "rows": sum(s.rows for s in samples),
        "unreachable": sum(f.chunks for s in samples for f in s.unreachable),
        "problem": next((s.problem for s in samples if s.problem), None),
    }


async def _show(report: Report, found: AsyncIterator[Recorded], asked: Asked, seconds: float) -> None:
    from rich.text import Text

    run = report.run
    verdict = ("agree", "bold green") if report.clean else ("differ", "bold red")
    sampled = f", {report.sample.rows} rows asked of HNSW" if report.sample else ""
    stdout.print(
        Text.assemble(
            f"{run.generation}: ledger, pgvector and Elasticsearch ", verdict,
            f"   {run.documents} documents, {run.chunks} chunks compared{sampled} in {seconds:.1f} s",
        ),
        soft_wrap=True,
    )  # fmt: skip
    if run.pending:
        stdout.print(f"  {run.pending} still on their way (not compared where they are)", soft_wrap=True)
        for p in report.pending:
            if p.reason:
                stdout.print(f"    {p.external_id}  {p.reason}", soft_wrap=True, markup=False)
    if report.counts:
        _table(report, repaired=asked.repair)
        named = 0
        async for r in found:
            if r.repaired:
                continue
            if named == SHOWN:
                stdout.print("    … (--json names all)")
                break
            named += 1
            f = r.finding
            stdout.print(
                f"    {f.document}  {f.store:<9} {f.kind:<17} {f.external_id or ''}", soft_wrap=True, markup=False
            )
    _advise(report, asked)


def _table(report: Report, *, repaired: bool) -> None:
    from rich.table import Table

    from pipeline.audit.compare import KINDS, MEANING, PLACES

    table = Table(box=None, padding=(0, 2))
    table.add_column("documents", style="bold")
    for place in PLACES:
        table.add_column(place, justify="right")
    table.add_column("what that means", style="dim")
    for kind in KINDS:
        cells = []
        for place in PLACES:
            n, left = report.counts.get((place, kind), (0, 0))
            cells.append("" if not n else f"{n}, {n - left} repaired" if repaired else str(n))
        if any(cells):
            table.add_row(kind, *cells, MEANING[kind])
    stdout.print(table)


def _advise(report: Report, asked: Asked) -> None:
    def say(text: str) -> None:
        stderr.print(text, soft_wrap=True, markup=False)

    if report.sample and report.sample.problem:
        say(f"→ {report.sample.problem}")
    if mended := report.mended:
        if mended.idle:
            say(
                f"→ nothing was settled in {mended.waited_seconds:.0f} s: no worker is running (`penstock status`)."
                " The repair is written down; it will be done as soon as the vectors and keywords workers run."
            )
        elif mended.unsettled:
            say(f"→ {mended.unsettled} documents are still being repaired: `penstock audit --since last` looks again")
    unreachable = sum(f.chunks for f in report.sample.unreachable) if report.sample else 0
    if report.sample and unreachable:
        say(
            f"→ {unreachable} of {report.sample.rows} sampled rows are lost to vector search; the rest of the table is"
            " as likely to be: `REINDEX INDEX CONCURRENTLY` on its HNSW index mends all of it"
        )
    left = {kind for (_, kind), (_, n) in report.counts.items() if n}
    if "rotten_body" in left:
        say(
            "→ a rotten body cannot be mended from the ledger: publish the document again"
            + ("" if asked.repair else " after --repair (which makes the ledger take it for a change)")
        )
    if left - {"rotten_body"} and not asked.repair:
        say("→ penstock audit --repair mends it; penstock why DOCUMENT tells one document's story")
