"""The report of ``penstock audit``: a JSON document for programs, a table and the next steps for people."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from cli.output import stderr, stdout
from cli.terminal import harmless_json

if TYPE_CHECKING:
    from pipeline.audit.compare import Kind, Place
    from pipeline.audit.repair import RepairResult
    from pipeline.audit.runs import Run, StoredDifference
    from pipeline.audit.sample import Sample
    from pipeline.audit.walk import Pending

MAX_NAMED_DOCUMENTS = 20
"""Documents that are named without --json."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
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
    repaired: RepairResult | None = None
    pending: list[Pending] = field(default_factory=list)

    @property
    def differing(self) -> int:
        return sum(n for n, _ in self.counts.values())

    @property
    def left(self) -> int:
        return sum(left for _, left in self.counts.values())

    @property
    def clean(self) -> bool:
        return not self.left and not (self.sample and self.sample.problem)


async def print_report(
    reports: list[Report], differences: list[AsyncIterator[StoredDifference]], seconds: float
) -> None:
    """One JSON document, written as it is read: there may be millions of differences."""
    head = {
        "documents": sum(r.run.documents for r in reports),
        "chunks": sum(r.run.chunks for r in reports),
        "clean": all(r.clean for r in reports),
        "pending": sum(r.run.pending for r in reports),
        "repaired": sum(r.differing - r.left for r in reports),
        "left": sum(r.left for r in reports),
        "generation": ",".join(r.run.generation for r in reports),
        "sample": _sample_json(reports),
        "failed": [
            {"document_id": str(p.document), "external_id": p.external_id, "reason": p.reason}
            for r in reports
            for p in r.pending
            if p.reason
        ],
        "seconds": round(seconds, 3),
    }
    out = sys.stdout
    out.write(harmless_json(json.dumps(head, ensure_ascii=False))[:-1] + ', "differences": [')
    separator = ""
    for report, recorded in zip(reports, differences, strict=True):
        async for r in recorded:
            difference = {
                "document_id": str(r.finding.document),
                "store": r.finding.store,
                "kind": r.finding.kind,
                "chunks": r.finding.chunks,
                "external_id": r.finding.external_id,
                "generation": report.run.generation,
                "repaired": r.repaired,
            }
            out.write(separator + harmless_json(json.dumps(difference, ensure_ascii=False)))
            separator = ", "
    out.write("]}\n")


def _sample_json(reports: list[Report]) -> dict[str, Any]:
    samples = [r.sample for r in reports if r.sample]
    return {
        "rows": sum(s.rows for s in samples),
        "unreachable": sum(f.chunks for s in samples for f in s.unreachable),
        "problem": next((s.problem for s in samples if s.problem), None),
    }


async def show(
    report: Report, differences: AsyncIterator[StoredDifference], options: AuditOptions, seconds: float
) -> None:
    from rich.text import Text

    run = report.run
    verdict = ("agree", "bold green") if report.clean else ("differ", "bold red")
    sampled = f", {report.sample.rows} rows searched by HNSW" if report.sample else ""
    stdout.print(
        Text.assemble(
            f"{run.generation}: ledger, pgvector and Elasticsearch ",
            verdict,
            f"   {run.documents} documents, {run.chunks} chunks compared{sampled} in {seconds:.1f} s",
        ),
        soft_wrap=True,
    )
    if run.pending:
        stdout.print(f"  {run.pending} documents are pending (not compared where they are pending)", soft_wrap=True)
        for p in report.pending:
            if p.reason:
                stdout.print(f"    {p.external_id}  {p.reason}", soft_wrap=True, markup=False)
    if report.counts:
        _table(report, repaired=options.repair)
        named = 0
        async for r in differences:
            if r.repaired:
                continue
            if named == MAX_NAMED_DOCUMENTS:
                stdout.print("    … (--json lists all)")
                break
            named += 1
            f = r.finding
            stdout.print(
                f"    {f.document}  {f.store:<9} {f.kind:<17} {f.external_id or ''}", soft_wrap=True, markup=False
            )
    _advise(report, options)


def _table(report: Report, *, repaired: bool) -> None:
    from rich.table import Table

    from pipeline.audit.compare import KINDS, MEANING, PLACES

    table = Table(box=None, padding=(0, 2))
    table.add_column("documents", style="bold")
    for place in PLACES:
        table.add_column(place, justify="right")
    table.add_column("meaning", style="dim")
    for kind in KINDS:
        cells = []
        for place in PLACES:
            n, left = report.counts.get((place, kind), (0, 0))
            cells.append("" if not n else f"{n}, {n - left} repaired" if repaired else str(n))
        if any(cells):
            table.add_row(kind, *cells, MEANING[kind])
    stdout.print(table)


def _advise(report: Report, options: AuditOptions) -> None:
    def say(text: str) -> None:
        stderr.print(text, soft_wrap=True, markup=False)

    if report.sample and report.sample.problem:
        say(f"→ {report.sample.problem}")
    if repaired := report.repaired:
        if repaired.idle:
            say(
                f"→ nothing was repaired within {repaired.waited_seconds:.0f} s: no worker is running"
                " (see `penstock status`)."
                " The repair is recorded, and is done as soon as the vectors and keywords workers run."
            )
        elif repaired.unsettled:
            say(
                f"→ {repaired.unsettled} documents are still being repaired:"
                " `penstock audit --since last` compares again"
            )
    unreachable = sum(f.chunks for f in report.sample.unreachable) if report.sample else 0
    if report.sample and unreachable:
        say(
            f"→ {unreachable} of {report.sample.rows} sampled rows cannot be found by vector search; other rows of the"
            " table are as likely to be lost: run `REINDEX INDEX CONCURRENTLY` on its HNSW index"
        )
    left = {kind for (_, kind), (_, n) in report.counts.items() if n}
    if "rotten_body" in left:
        say(
            "→ a rotten body cannot be repaired from the ledger: publish the document again"
            + ("" if options.repair else ", after --repair (so that the ledger accepts it as a change)")
        )
    if left - {"rotten_body"} and not options.repair:
        say("→ penstock audit --repair repairs them; penstock why DOCUMENT explains one document")
