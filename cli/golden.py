"""``penstock golden``: questions with judged answers, which the running service is measured by."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from cli.options import Tenant
from cli.output import (
    ComparedDataset,
    DatasetPrincipals,
    DatasetTags,
    DatasetTenant,
    FailBelow,
    Json,
    print_json,
    printable,
    stdout,
)
from cli.terminal import echo, harmless_json

if TYPE_CHECKING:
    from pipeline.stores.postgres import Connection
    from query.evaluation.golden import Golden
    from query.evaluation.promotion import Asker, Candidate
    from query.evaluation.ranking_gate import Gate
    from query.evaluation.service import Run

golden = typer.Typer(
    name="golden",
    help="Golden questions, which measure the quality of the running service.",
    no_args_is_help=True,
)
Principals = Annotated[
    list[str] | None, typer.Option("--as", metavar="PRINCIPAL", help="Ask as this person. Repeatable.")
]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="Ask as a holder of this access tag. Repeatable.")
]


@golden.command()
def add(
    query: Annotated[str, typer.Argument(help="The question, in the words of people.")],
    document: Annotated[str, typer.Option("--document", help="Document that answers it: SOURCE/EXTERNAL_ID.")],
    anchor: Annotated[
        str, typer.Option("--anchor", help="Exact words of the passage that answers it. Default: any passage.")
    ] = "",
    gain: Annotated[int, typer.Option("--gain", help="How well it answers the question, 1 to 10.", min=1, max=10)] = 1,
    reference: Annotated[str | None, typer.Option("--reference", help="Text of a correct answer.")] = None,
    principals: Principals = None,
    tags: Tags = None,
    tenant: Tenant = "default",
) -> None:
    """Add a judgement: this document, or a passage of it, answers the question. Run it once for each such document.

    A judgement refers to the words of the passage, not to a chunk, and holds while the document contains them. Without
    --as and --tag the question is asked as the local user.

    Example: penstock golden add "how long do we keep logs" --document wiki/retention --anchor "kept for 90 days"
    """
    from query.evaluation.golden import MAX_ANCHOR_CHARACTERS, Golden, Judged

    source, _, external_id = document.partition("/")
    if not source or not external_id or len(anchor) > MAX_ANCHOR_CHARACTERS or not query.strip():
        echo(
            "error: give a question, --document SOURCE/EXTERNAL_ID and an --anchor of at most"
            f" {MAX_ANCHOR_CHARACTERS} characters",
            err=True,
        )
        raise typer.Exit(2)
    asker = _asker(tenant, principals, tags)
    question = Golden(
        tenant,
        query.strip(),
        (Judged(source, external_id, anchor.strip(), gain),),
        asker.principals,
        asker.tags,
        reference,
    )
    known = asyncio.run(_add(question))
    stdout.print(f"{len(known.judged)} judgements of this question")


@golden.command()
def suggest(
    principals: Principals = None,
    tags: Tags = None,
    tenant: Tenant = "default",
    json_output: Json = False,
) -> None:
    """List reviewed answers and rated passages that can become golden questions.

    Listed are answers that a review called right, and passages that were rated up for a query, if the person may read
    everything they were made from. Without --as and --tag, that is the local user.

    Example: penstock golden suggest --as ann@example.org
    """
    asker = _asker(tenant, principals, tags)
    rows = [
        {"id": str(candidate.subject), "question": candidate.question, "judgements": len(candidate.judged)}
        for candidate in asyncio.run(_suggested(asker))
    ]
    if json_output:
        print_json(rows)
        return
    for row in rows:
        stdout.print(f"{row['id']}  {printable(str(row['question']))}")


@golden.command()
def promote(
    id_: Annotated[UUID, typer.Argument(metavar="ID", help="The id of an answer or passage, as `suggest` lists it.")],
    principals: Principals = None,
    tags: Tags = None,
    tenant: Tenant = "default",
) -> None:
    """Make golden questions of a reviewed answer or of a rated passage.

    The passages that the answer cites, or the rated passage, become judgements, each anchored to one of its sentences.
    The questions are asked as the person named, and are erased with the answer, the feedback or any of the documents.
    Without --as and --tag, that is the local user.

    Example: penstock golden promote 0192f0a4-7a57-7cc0-8a3c-111111111111 --as ann@example.org
    """
    made = asyncio.run(_promoted(_asker(tenant, principals, tags), id_))
    if not made:
        echo(
            f"error: nothing to promote: {id_} is no answer that a review called right and no passage that was rated up"
            " for a query, or this person may not read what it was made from",
            err=True,
        )
        raise typer.Exit(1)
    for question in made:
        stdout.print(f"{len(question.judged)} judgements: {printable(question.text)}")


@golden.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="File with one JSON object per line, as `export` writes it; - for stdin.")
    ],
) -> None:
    """Import golden questions from a file. A question that exists already is replaced.

    Example: penstock golden import golden.jsonl
    """
    from query.evaluation.dataset import BadDataset
    from query.evaluation.golden import read

    try:
        lines = sys.stdin.readlines() if str(file) == "-" else file.read_text("utf-8").splitlines()
        all_of = list(read(lines))
    except (BadDataset, OSError, UnicodeDecodeError) as error:
        echo(f"error: {file}: {error}", err=True)
        raise typer.Exit(2) from error
    asyncio.run(_keep(all_of))
    stdout.print(f"{len(all_of)} questions")


@golden.command()
def export(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant. Default: all.")] = None,
) -> None:
    """Print all golden questions with their judgements, one JSON object per line.

    Example: penstock golden export > golden.jsonl
    """
    from query.evaluation.golden import write

    for line in write(asyncio.run(_stored(tenant))):
        echo(harmless_json(line))


@golden.command()
def remove(
    query: Annotated[str, typer.Argument(help="The question, as it was added.")], tenant: Tenant = "default"
) -> None:
    """Remove a question and its judgements.

    Example: penstock golden remove "how long do we keep logs"
    """
    if not asyncio.run(_forget(tenant, query)):
        echo(f"error: no such question in tenant {printable(tenant)}: `penstock golden export` lists them", err=True)
        raise typer.Exit(1)


@golden.command()
def run(
    accept: Annotated[
        bool, typer.Option("--accept", help="Compare later runs with this one: its values are as they should be.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Store nothing; exit code 3 if a measure is significantly worse than accepted."),
    ] = False,
    json_output: Json = False,
) -> None:
    """Ask all golden questions now, store the result and print it. The service does this every 15 minutes.

    The change is relative to the accepted value of each question: its first one, or that of the last run with --accept.

    With --check, a new version, or other settings of ranking and reranking, are tried on the running stores before they
    are deployed.

    Exit code 1: a measure is below its floor (PENSTOCK_EVAL_NDCG_FLOOR, _FAITHFULNESS_FLOOR), or no question is left.
    3, with --check: a measure is more than 2 % lower than accepted, and p < 0.05.

    Examples:

      penstock golden run --accept

      PENSTOCK_RERANK_URL=http://127.0.0.1:9100/rerank penstock golden run --check
    """
    from query.settings import load

    if accept and check:
        echo("error: --check stores nothing, so there is nothing to --accept", err=True)
        raise typer.Exit(2)
    result = asyncio.run(_run(accept=accept, store=not check))
    if result is None:
        echo("error: there is no valid judgement: add one with `penstock golden add`", err=True)
        raise typer.Exit(1)
    query = load()
    settings = query.evaluation
    shown = [_row(key, result) for key in sorted(result.means)]
    if json_output:
        print_json(shown)
    else:
        for row in shown:
            compared = ""
            if (difference := row["change"]) is not None:
                compared = f"  {difference['ratio']:+.2%} of {difference['queries']}, p = {difference['p']:.4f}"
            slice_ = printable(str(row["slice"]))
            stdout.print(f"{slice_:<20} {row['measure']:<20} {row['value']:.4f}  ({row['queries']}){compared}")
    if ("*", "faithfulness") in result.means and settings.judge_model in ("", query.chat.model):
        echo("note: the answers were judged by the model that wrote them: set PENSTOCK_EVAL_JUDGE_MODEL", err=True)
    worse = [name for (slice_, name), change in result.changes.items() if slice_ == "*" and change.is_decline]
    if check and worse:
        for name in worse:
            change = result.changes["*", name]
            echo(f"error: {name} is {-change.ratio:.2%} below the accepted values, p = {change.p:.4f}", err=True)
        raise typer.Exit(3)
    floors = {"nDCG@5": settings.ndcg_floor, "faithfulness": settings.faithfulness_floor}
    low = [name for name, floor in floors.items() if result.means.get(("*", name), (1.0, 0))[0] < floor]
    for name in low:
        echo(f"error: {name} is below {floors[name]:g}", err=True)
    if low:
        raise typer.Exit(1)


@golden.command()
def compare(
    dataset: ComparedDataset = None,
    tenant: DatasetTenant = "default",
    principals: DatasetPrincipals = None,
    tags: DatasetTags = None,
    fail_below: FailBelow = None,
    json_output: Json = False,
) -> None:
    """Compare candidate settings of ranking and reranking with the current ones, before they take their place.

    Candidate settings are variables with PENSTOCK_SHADOW_ in place of PENSTOCK_. Both rank the same questions, and what
    is found in the same documents; nothing is stored. Also shown is how far both agree on shadow queries.

    Exit code 1: the comparison failed, or no question is judged. 3: nDCG@5 or recall@50 is more than 2 % lower by the
    candidate settings and p < 0.05, or a measure is below its bound.

    Examples:

      PENSTOCK_SHADOW_QUERY_KEYWORD_WEIGHT=1.5 penstock golden compare

      PENSTOCK_SHADOW_RERANK_URL=http://127.0.0.1:9100/rerank penstock golden compare --fail-below nDCG@5=0.8 --json
    """
    from cli.eval import WORSE, bounds_of
    from query.evaluation.dataset import BadDataset
    from query.evaluation.questions import NOTHING_JUDGED

    bounds = bounds_of(fail_below or [])
    try:
        gate = asyncio.run(_judged(dataset, tenant, principals or [], tags or []))
    except BadDataset as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if json_output:
        print_json(asdict(gate))
    else:
        _show(gate)
    if not gate.questions:
        echo(f"error: {NOTHING_JUDGED}", err=True)
        raise typer.Exit(1)
    for reason in (reasons := gate.failures(bounds)):
        echo(f"error: {reason}", err=True)
    if reasons:
        raise typer.Exit(WORSE)


def _show(gate: Gate) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for setting in gate.settings:
        stdout.print(printable(setting), soft_wrap=True)
    if gate.questions:
        title = f"{gate.questions} questions, generation {gate.generation}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("measure")
        for column in ("current", "candidate", "change (95 %)", "p", "better", "worse"):
            table.add_column(column, justify="right")
        for name, measured in gate.measures.items():
            d = measured.difference
            table.add_row(
                name,
                f"{measured.current:.3f}",
                f"{measured.candidate:.3f}",
                f"{d.mean:+.3f} ({d.low:+.3f}, {d.high:+.3f})",
                f"{measured.p:.4f}",
                str(measured.better),
                str(measured.worse),
            )
        stdout.print(table)
    if gate.shadow.queries or gate.shadow.failed:
        stdout.print(
            f"On {gate.shadow.queries:,} real questions: overlap@10 {gate.shadow.overlap:.2f}, rank-biased"
            f" {gate.shadow.agreement:.2f}; {gate.shadow.failed:,} incomplete"
        )


def _row(key: tuple[str, str], run: Run) -> dict[str, Any]:
    (value, queries), change = run.means[key], run.changes.get(key)
    return {
        "slice": key[0],
        "measure": key[1],
        "value": round(value, 4),
        "queries": queries,
        "change": change and {"ratio": round(change.ratio, 4), "p": round(change.p, 5), "queries": change.questions},
    }


def _asker(tenant: str, principals: Sequence[str] | None, tags: Sequence[str] | None) -> Asker:
    from query.evaluation.promotion import Asker

    if not principals and not tags:
        from cli.readers import local_user

        principals = [local_user("name a person with --as, or an access tag with --tag")]
    return Asker(tenant, tuple(principals or ()), tuple(tags or ()))


async def _suggested(asker: Asker) -> list[Candidate]:
    from query.evaluation.promotion import candidates

    async with _connected() as connection:
        return await candidates(connection, asker)


async def _promoted(asker: Asker, subject: UUID) -> list[Golden]:
    from query.evaluation.promotion import promote

    async with _connected() as connection:
        return await promote(connection, asker, subject)


async def _add(question: Golden) -> Golden:
    """Add a judgement to those that the question already has, or replace the one of the same passage."""
    from dataclasses import replace

    from query.evaluation.golden import load, store

    async with _connected() as connection:
        [judged] = question.judged
        for known in await load(connection, question.tenant):
            if known.text == question.text:
                others = tuple(j for j in known.judged if j.key != judged.key)
                question = replace(question, judged=(*others, judged), reference=question.reference or known.reference)
        await store(connection, question)
    return question


async def _keep(all_of: Sequence[Golden]) -> None:
    from query.evaluation.golden import store

    async with _connected() as connection:
        for question in all_of:
            await store(connection, question)


async def _stored(tenant: str | None) -> list[Golden]:
    from query.evaluation.golden import load

    async with _connected() as connection:
        return await load(connection, tenant)


async def _forget(tenant: str, text: str) -> bool:
    from query.evaluation.golden import delete

    async with _connected() as connection:
        return await delete(connection, tenant, text)


@asynccontextmanager
async def _connected() -> AsyncIterator[Connection]:
    from pipeline.runtime.settings import load
    from pipeline.stores.postgres import open_pool
    from query.evaluation.service import connected

    async with open_pool(load().postgres) as pool, connected(pool) as connection:
        yield connection


async def _judged(dataset: Path | None, tenant: str, principals: Sequence[str], tags: Sequence[str]) -> Gate:
    from pipeline.runtime.settings import load
    from pipeline.stores.postgres import open_pool
    from query.evaluation.ranking_gate import candidate_of, judge
    from query.settings import load as query_settings

    settings, query = load(), query_settings()
    candidate = candidate_of(query)
    async with open_pool(settings.postgres) as pool:
        return await judge(
            settings, query, candidate, pool, dataset=dataset, tenant=tenant, principals=principals, tags=tags
        )


async def _run(*, accept: bool, store: bool) -> Run | None:
    from pipeline.runtime.settings import load
    from query.evaluation.service import once
    from query.service import open_service
    from query.settings import load as query_settings

    async with open_service(load(), query_settings()) as service:
        return await once(service, accept=accept, store=store)
