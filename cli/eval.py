"""``penstock eval``: how well the three modes rank, on a collection with judgements."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import FailBelow, Json, print_json, progress_bars, stdout
from cli.terminal import echo

if TYPE_CHECKING:
    from query.evaluation.dataset import Dataset
    from query.evaluation.measures import Rankings

WORSE = 3
"""The exit code if a measure is below its bound, or significantly worse than before."""


def evaluate(
    dataset: Annotated[Path, typer.Argument(help="Folder with documents, queries and judgements.")],
    load: Annotated[
        bool,
        typer.Option(
            "--load/--no-load",
            help="Load the documents into a temporary database and index, or search those of --tenant.",
        ),
    ] = True,
    tenant: Annotated[str, typer.Option(help="With --no-load: the tenant to search.")] = "default",
    principals: Annotated[
        list[str] | None,
        typer.Option("--as", metavar="PRINCIPAL", help="With --no-load: search as this person. Repeatable."),
    ] = None,
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="TAG", help="With --no-load: search as a holder of this access tag. Repeatable."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write each query's values to this file, for a later --against.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            exists=True,
            dir_okay=False,
            help="Compare with this file, written by --save. Exit code 3: nDCG@10 or recall@50 is significantly worse.",
        ),
    ] = None,
    rerank: Annotated[
        bool, typer.Option("--rerank", help="Also measure hybrid search with the configured reranker.")
    ] = False,
    fail_below: FailBelow = None,
    json_output: Json = False,
) -> None:
    """Measure keyword, vector and hybrid search: nDCG@5 and @10, recall@50, MRR, with 95 % intervals and paired tests.

    DATASET is in BEIR's layout (corpus.jsonl, queries.jsonl, qrels/test.tsv) or holds the Cranfield files. The
    pipeline's own stages load the documents into a database and an index that are removed afterwards; your data is not
    touched. --fail-below and --against judge the reranked ranking if there is one, otherwise the hybrid one. A
    difference is significant if p of the paired randomisation test is below 0.05.

    Exit code 1: the evaluation failed, or a search was incomplete. 3: a measure is below its bound, or significantly
    worse than the saved one.

    Examples:

      penstock eval FOLDER --json

      penstock eval FOLDER --rerank --against before.json --fail-below nDCG@10=0.44
    """
    from query.evaluation.dataset import BadDataset, read
    from query.evaluation.report import failures, report, values_of

    if load and (principals or tags):
        echo("error: --as and --tag need --no-load", err=True)
        raise typer.Exit(2)
    bounds = bounds_of(fail_below or [])
    try:
        collection = read(dataset)
        before = _saved(against) if against else None
    except BadDataset as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    rankings, degraded = asyncio.run(
        _evaluate(collection, load, tenant, principals or [], tags or [], rerank=rerank, quiet=json_output)
    )
    result = report(collection, rankings, degraded, before)
    if save:
        save.write_text(json.dumps(values_of(collection, rankings)), "utf-8")
    if json_output:
        print_json(result)
    else:
        _show(result)
    if result["degraded"]:
        for reason, times in result["degraded"].items():
            echo(f"error: {times} searches were incomplete: {reason}", err=True)
        raise typer.Exit(1)
    try:
        reasons = failures(result, bounds, against=against is not None)
    except BadDataset as error:
        echo(f"error: {against}: {error}", err=True)
        raise typer.Exit(2) from error
    for reason in reasons:
        echo(f"error: {reason}", err=True)
    if reasons:
        raise typer.Exit(WORSE)


def bounds_of(texts: Sequence[str]) -> dict[str, float]:
    """The least value of each measure. Exits with 2 where a text is not ``MEASURE=VALUE``."""
    from query.evaluation.measures import MEASURES

    bounds = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            bounds[name] = float(value)
        except ValueError:
            name = ""
        if name not in MEASURES or not 0 <= bounds[name] <= 1:
            echo(
                f"error: --fail-below {text}: give MEASURE=VALUE, a measure of {', '.join(MEASURES)} and a value from 0"
                " to 1",
                err=True,
            )
            raise typer.Exit(2)
    return bounds


async def _evaluate(
    dataset: Dataset,
    load: bool,
    tenant: str,
    principals: Sequence[str],
    tags: Sequence[str],
    *,
    rerank: bool,
    quiet: bool,
) -> tuple[dict[str, Rankings], dict[str, int]]:
    from cli.readers import local_user
    from pipeline.core.errors import Misconfigured
    from pipeline.embedding.choose import embedder
    from pipeline.runtime.settings import dist
    from pipeline.runtime.settings import load as settings_now
    from pipeline.stores.elasticsearch import connect
    from pipeline.stores.postgres import open_pool
    from query.embedding.embedders import Embedders, GenerationEmbedders, QueryEmbedder
    from query.evaluation import place
    from query.evaluation import rank as ranks
    from query.evaluation.questions import PATIENT, TIMEOUT_SECONDS
    from query.model import MODES
    from query.rerank.guarded import open_reranker
    from query.retrieval.search import Search
    from query.settings import load as query_settings_now

    settings, query = settings_now(), query_settings_now()
    async with AsyncExitStack() as closing:
        bars = closing.enter_context(progress_bars(quiet=quiet))
        asking: Embedders
        reranker = None
        if rerank:
            reranker = await open_reranker(query.rerank.model_copy(update={"timeout_seconds": TIMEOUT_SECONDS}))
            if reranker is None:
                raise Misconfigured("--rerank needs a reranker: set PENSTOCK_RERANK_URL, _ONNX_PATH or _PLUGIN")
            closing.push_async_callback(reranker.aclose)
        if load:
            model = await asyncio.to_thread(embedder, settings.embedding, dist() / "models")
            closing.push_async_callback(model.aclose)
            asking = QueryEmbedder(lambda: model, embed_seconds=TIMEOUT_SECONDS)
            here = await closing.enter_async_context(place.opened(settings, model, dataset))
            bar = bars.add_task("loading", total=len(dataset.documents))
            await here.load(dataset.documents, lambda n: bars.advance(bar, n))
            pool, es = here.pool, here.es
            tenant, principals, tags = place.TENANT, (), (place.TAG,)
        else:
            asking = GenerationEmbedders.by_settings(
                settings.embedding, dist() / "models", embed_seconds=TIMEOUT_SECONDS
            )
            closing.push_async_callback(asking.aclose)
            pool = await closing.enter_async_context(open_pool(settings.postgres))
            es = connect(settings.elasticsearch)
            closing.push_async_callback(es.close)
            if not principals and not tags:
                principals = [local_user("name a person with --as, or an access tag with --tag")]
        search = Search(
            pool,
            es,
            asking,
            timeouts=PATIENT,
            settings=query.retrieval,
            reranker=reranker,
            rerank_pool=query.rerank.pool,
            rerank_floor=query.rerank.floor,
        )
        caller = await search.identify(tenant, principals=principals, tags=tags)
        bar = bars.add_task("asking", total=len(dataset.queries) * (len(MODES) + rerank))
        return await ranks.rank(search, caller, dataset, MODES, rerank=rerank, done=lambda: bars.advance(bar))


def _saved(path: Path) -> dict[str, Any]:
    """Raises BadDataset."""
    from query.evaluation.dataset import BadDataset

    try:
        saved = json.loads(path.read_text("utf-8"))
        if all(isinstance(measures[name], dict) for measures in saved.values() for name in measures):
            return dict(saved)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BadDataset(f"{path} was not written by --save") from error
    raise BadDataset(f"{path} was not written by --save")


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    from cli.output import printable

    head = f"{printable(result['dataset'])}: {result['queries']} queries, {result['documents']} documents"
    table = Table(title=head, title_justify="left")
    table.add_column("run")
    names = [name for name in next(iter(result["runs"].values())) if name != "intervals"]
    for name in names:
        table.add_column(f"{name} (95 %)", justify="right")
    for mode, run in result["runs"].items():
        cells = (f"{run[n]:.3f} ({run['intervals'][n][0]:.3f}-{run['intervals'][n][1]:.3f})" for n in names)
        table.add_row(mode, *cells)
    stdout.print(table)
    if result["slices"]:
        kinds = Table(title="nDCG@5 by the queries' kind", title_justify="left")
        for column in ("kind", "queries", *result["runs"]):
            kinds.add_column(column, justify="left" if column == "kind" else "right")
        for kind, values in result["slices"].items():
            cells = (f"{values[mode]['nDCG@5']:.3f}" for mode in result["runs"])
            kinds.add_row(printable(kind), str(values["queries"]), *cells)
        stdout.print(kinds)
    for name, compared in result["comparisons"].items():
        for measure, c in compared.items():
            stdout.print(
                f"{name}, {measure}: {c['difference']:+.3f} ({c['interval'][0]:+.3f} to {c['interval'][1]:+.3f}),"
                f" p = {c['p_randomisation']:.4f} (randomisation), {c['p_t']:.2g} (t); better {c['wins']},"
                f" worse {c['losses']}"
            )
