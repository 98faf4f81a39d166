"""``penstock search``: ask both stores, as somebody; by the running query service, where that can answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli import logs, search_service
from pipeline.cli.moment import past_moment
from pipeline.cli.search_show import show

if TYPE_CHECKING:
    from query.filters import Filters
    from query.model import Found, Mode

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def search(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="What to look for, in your own words.")],
    tenant: Annotated[str, typer.Option(help="Whose documents.")] = "default",
    principals: Annotated[
        list[str] | None, typer.Option("--as", metavar="PRINCIPAL", help="See what this person sees. Repeatable.")
    ] = None,
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="TAG", help="Hold this access tag (TAG, or SOURCE/TAG). Repeatable."),
    ] = None,
    top: Annotated[int, typer.Option(help="How many passages, 1 to 100.")] = 10,
    mode: Annotated[str, typer.Option(help="hybrid, vector or keyword.")] = "hybrid",
    sources: Annotated[
        list[str] | None, typer.Option("--source", metavar="SOURCE", help="Only from this source. Repeatable.")
    ] = None,
    authors: Annotated[
        list[str] | None, typer.Option("--author", metavar="AUTHOR", help="Only by this author. Repeatable.")
    ] = None,
    media_types: Annotated[
        list[str] | None,
        typer.Option(
            "--type", metavar="TYPE", help="Only of this media type, e.g. text/markdown or text/*. Repeatable."
        ),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(parser=past_moment, metavar="TIME", help="Changed at its source since: 2h, 7d or a time."),
    ] = None,
    before: Annotated[
        datetime | None, typer.Option(parser=past_moment, metavar="TIME", help="Changed at its source before.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Search. Without --as and --tag you are the local user, who reads what `penstock ingest` stored for him.

    Example: penstock search "how do I undo a commit" --top 5 --type text/markdown --since 30d
    """
    if not principals and not tags:
        from pipeline.cli.readers import local_user

        principals = [local_user("say who asks with --as or --tag")]
    principals, tags = principals or [], tags or []
    asked = {
        "query": query, "top": top, "mode": mode,
        "filters": {
            "sources": tuple(sources or ()), "authors": tuple(authors or ()), "media_types": tuple(media_types or ()),
            "since": since, "before": before,
        },
    }  # fmt: skip
    found = None
    if len(principals) == 1 and not tags:  # over HTTP one person asks, and nobody says which tags that person holds
        found = search_service.ask(asked, tenant=tenant, principal=principals[0])
    if found is None:
        logs.beside_the_answer(context)
        found = _here(asked, tenant, principals, tags)
    if json_output:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    show(found, query, tenant, [*(f"user:{p}" for p in principals), *tags])


def _here(asked: dict[str, Any], tenant: str, principals: Sequence[str], tags: Sequence[str]) -> dict[str, Any]:
    """By this process, from the stores themselves."""
    import asyncio

    from query.filters import Filters
    from query.model import BadQuery, as_json

    narrowed = Filters(**asked["filters"])
    try:
        found = asyncio.run(_search(asked["query"], tenant, principals, tags, asked["top"], asked["mode"], narrowed))
    except BadQuery as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    return as_json(found)


async def _search(
    query: str, tenant: str, principals: Sequence[str], tags: Sequence[str], top: int, mode: Mode, filters: Filters
) -> Found:
    from pipeline import tracing
    from query.filters import check as check_filters
    from query.model import check

    check(query, top, mode)
    check_filters(filters)
    with tracing.running("search"), tracing.begin("search", attributes={"penstock.tenant": tenant}):
        return await _found(query, tenant, principals, tags, top, mode, filters)


async def _found(
    query: str, tenant: str, principals: Sequence[str], tags: Sequence[str], top: int, mode: Mode, filters: Filters
) -> Found:
    import asyncio

    from pipeline.settings import dist, load
    from query.embedders import GenerationEmbedders

    settings = load()
    embedders = None
    if mode != "keyword":
        embedders = GenerationEmbedders.by_settings(settings.embedding, dist() / "models")
        embedders.start()  # while the clients are imported and connected
        await asyncio.sleep(0)
    from pipeline.cli.recorded import recording
    from query.model import shown_in
    from query.retrieval import open_search
    from query.settings import load as load_query

    async with open_search(settings, embedders, load_query()) as library:
        caller = await library.identify(tenant, principals=principals, tags=tags)
        found = await library.search(query, caller, top=top, mode=mode, filters=filters)
    documents = shown_in(found.results)
    await recording("search", tenant=tenant, documents=documents, principals=principals, tags=tags)
    return found
