"""Output of ``penstock generation`` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from cli.output import printable

if TYPE_CHECKING:
    from pipeline.generations.lifecycle import Standing, Switched
    from pipeline.generations.migration import Plan, Result
    from query.evaluation.generations import Comparison


def generations_table(standings: Sequence[Standing]) -> Table:
    rows = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("name", "state", "since", "model"):
        rows.add_column(column, no_wrap=True)
    for column in ("chunk tokens", "documents", "chunks", "pending", "failed", "MB"):
        rows.add_column(column, justify="right")
    for s in standings:
        state = f"{s.state}, ready" if s.state == "building" and s.ready else s.state
        documents = f"{s.documents:,}" if s.documents >= s.of else f"{s.documents:,} of {s.of:,}"
        rows.add_row(
            s.name,
            state,
            f"{s.since:%Y-%m-%d %H:%M}",
            f"{printable(s.model)}, {s.dimensions}"
            + (f", {s.vectors}" if s.vectors != "pgvector" else "")
            + (f", {s.quantisation}" if s.quantisation != "halfvec" else ""),
            str(s.chunk_tokens),
            documents,
            f"{s.chunks:,}",
            f"{s.pending:,}",
            f"{s.failed:,}",
            f"{s.bytes / 1e6:,.1f}",
        )
    return rows


def planned(plan: Plan) -> str:
    e = plan.estimate
    about = "" if e.exact else "about "
    money = f", {about}{e.money:,.2f} at {plan.price:g} a million" if plan.price else ""
    begins = "Continuing" if plan.resumes else "A new"
    return (
        f"{begins} generation {plan.generation} alongside {plan.replaces}: {printable(plan.model)}, {plan.dimensions}"
        f" dimensions, chunks of {plan.chunk_tokens} tokens.\n"
        f"{e.documents:,} documents, {about}{e.chunks:,} chunks: {about}{e.copied:,} vectors to copy, {about}"
        f"{e.embedded:,} chunks to embed ({about}{e.tokens:,} tokens{money})."
    )


def built(result: Result) -> str:
    done = (
        f"Generation {result.generation} is complete alongside {result.active} and follows every change:"
        f" {result.documents:,} documents, {result.chunks:,} chunks, {result.embedded:,} embedded,"
        f" {result.seconds:.0f} s."
    )
    if result.ready:
        return f"{done}\nNext: `penstock generation compare`, then `penstock generation cutover`."
    return (
        f"Every document of generation {result.generation} is queued for the workers; `penstock generation list` shows"
        " their progress. Then run `penstock generation build --wait`, which builds the graph and makes a cut-over"
        " possible."
    )


def calibrated(calibration: Mapping[str, Any]) -> str:
    line = (
        f"Generation {calibration['generation']}: passages from a cosine of {calibration['cosine']:.2f} on are relevant"
        f" ({calibration['chunks']:,} chunks; three quarters of {calibration['questions']} unrelated questions stay"
        f" below {calibration['unrelated']:.2f}, median of known items {calibration['known']:.2f}, mean of random"
        f" passages {calibration['random']:.2f})."
    )
    if calibration["rerank"] is not None:
        line += f"\nReranker {printable(calibration['reranker'])}: from a score of {calibration['rerank']:.3f} on."
    return line


def comparison_table(comparison: Comparison) -> Group:
    measures = Table(title=f"{comparison.questions} questions, nDCG@5 {comparison.change:+.1%}", title_justify="left")
    measures.add_column("measure")
    for column in (f"{comparison.active} (active)", comparison.candidate):
        measures.add_column(column, justify="right")
    for measure, value in comparison.before.items():
        measures.add_row(measure, f"{value:.3f}", f"{comparison.after[measure]:.3f}")
    d = comparison.difference
    beneath = f"nDCG@5 {d.mean:+.3f} (95 %: {d.low:+.3f} to {d.high:+.3f}), p = {comparison.p:.4f}"
    if comparison.shadow.queries:
        beneath += (
            f"\nOn {comparison.shadow.queries:,} real questions: overlap@10 {comparison.shadow.overlap:.2f},"
            f" rank-biased {comparison.shadow.agreement:.2f}"
        )
    return Group(measures, beneath)


def switched(done: Switched) -> str:
    retired = f" Retired: {', '.join(done.retired)}." if done.retired else ""
    return (
        f"Generation {done.active} serves searches now; {done.previous} is still written:"
        f" `penstock generation rollback` returns to it, `penstock generation retire {done.previous}` deletes it."
        f"{retired}"
    )
