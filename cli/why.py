"""``penstock why``: one document's story."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import typer

from cli.output import Json, print_json, printable, quiet_libraries
from cli.recorded import record
from cli.terminal import echo

if TYPE_CHECKING:
    from pipeline.diagnosis.story_gather import StoryReport
    from pipeline.diagnosis.story_model import Person, QueryRank, Story
    from pipeline.runtime.settings import Settings
    from pipeline.stores.postgres import Connection
    from query.model import Result, SearchResults


def why(
    document: Annotated[
        str,
        typer.Argument(help="Id, external id, file or URL of the document, or the end of one of these; or its title."),
    ],
    tenant: Annotated[str, typer.Option("--tenant", help="The document's tenant.")] = "default",
    source: Annotated[
        str | None,
        typer.Option("--source", help="The document's source, if several sources have a document of this name."),
    ] = None,
    principals: Annotated[
        list[str] | None,
        typer.Option(
            "--as", metavar="PRINCIPAL", help="Show whether this person may read it, and by which tags. Repeatable."
        ),
    ] = None,
    tags: Annotated[
        list[str] | None,
        typer.Option(
            "--tag", metavar="TAG", help="Show whether holders of this access tag (TAG or SOURCE/TAG) may read it."
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option("--query", metavar="QUERY", help="Show the rank at which a search for this query returns it."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Show why a document is searchable or not, and what to do: its source, events, both stores, access, dead letters.

    For operators: it shows any document of the tenant, regardless of who may read it, and none of another tenant.
    Exit code 0: both stores return the document (with --as or --tag: to them). 1: they do not. With --json, 1 only
    if the ledger has never accepted the document; the field `searchable` has the verdict.

    Example: penstock why docs/guide.md --as ann
    """
    from cli.why_show import show
    from pipeline.core.errors import PenstockError
    from pipeline.diagnosis.story_json import as_json, context_json
    from pipeline.diagnosis.story_verdict import judge
    from query.model import BadQuery

    quiet_libraries()
    try:
        report = asyncio.run(_report(document, tenant, source, principals or [], tags or [], query))
    except BadQuery as error:
        raise typer.BadParameter(f"--query: {error}") from error
    if report.candidates:
        echo(f"error: {document!r} matches {len(report.candidates)} documents; give the id of one of them:", err=True)
        for identity, title in report.candidates:
            named = f"{identity.source}/{identity.external_id}  {title or ''}"
            echo(f"  {identity.id}  {printable(named)}", err=True)
        raise typer.Exit(2)
    story, context = report.story, report.context
    shown = [story.document.identity.id] if story.document is not None else []
    record("document.why", tenant=tenant, documents=shown, principals=principals or [], tags=tags or [])
    verdict = judge(story, context)
    known = bool(story.document or story.dead or (context.source and context.source.item))
    if json_output and known:
        print_json(as_json(story, verdict) | context_json(context))
    if story.document is None:
        step = f" ({verdict.next})" if verdict.next and not story.dead else ""
        if known and not json_output:
            show(story, context, verdict)
        raise PenstockError(f"no document {document!r} in tenant {tenant!r}: {verdict.reason}{step}")
    if json_output:
        return
    show(story, context, verdict)
    if not verdict.searchable or (context.person is not None and not context.person.may_read):
        raise typer.Exit(1)


def names(document: str) -> list[str]:
    """The names that a document may have: as typed, and as the file of that name."""
    if document.startswith("file:"):
        return [document, unquote(urlsplit(document).path)]
    path = Path(document).expanduser().absolute()
    return list(dict.fromkeys([document, str(path), str(path.resolve()), path.as_uri()]))


async def _report(
    document: str, tenant: str, source: str | None, principals: Sequence[str], tags: Sequence[str], query: str | None
) -> StoryReport:
    from cli.stack import local_outages
    from pipeline.diagnosis.story_gather import StoryReport, StoryRequest, gather
    from pipeline.runtime.settings import load
    from query.access.callers import storable

    async def check_access(connection: Connection, story: Story) -> Person:
        return await _person(connection, story, tenant, principals, tags)

    if not storable([tenant]):
        return StoryReport()
    settings = load()
    report = await gather(
        StoryRequest(tenant, storable(names(document)), source),
        settings,
        outages=local_outages,
        check_access=check_access if principals or tags else None,
    )
    if query is None or report.story.document is None:
        return report
    rank = await _query_rank(settings, report.story, query, principals, tags)
    return replace(report, context=replace(report.context, query_rank=rank))


async def _person(
    connection: Connection, story: Story, tenant: str, principals: Sequence[str], tags: Sequence[str]
) -> Person:
    from pipeline.diagnosis.story import memberships
    from pipeline.diagnosis.story_model import Person
    from query.access.callers import decide, identify, storable

    caller = await identify(connection, tenant, principals=principals, tags=tags)
    groups = await memberships(connection, tenant, storable(principals))
    decision = decide(caller, story.access.acl_tags, story.access.required_tags)
    return Person((*principals, *tags), decision.may_read, decision.by, decision.lacks, groups)


async def _query_rank(
    settings: Settings, story: Story, query: str, principals: Sequence[str], tags: Sequence[str]
) -> QueryRank:
    """The document's rank among the first MAX_TOP passages, for these people; without any, for one of its readers.
    Raises BadQuery."""
    from pipeline.core.errors import PenstockError
    from pipeline.diagnosis.story_model import QueryRank
    from pipeline.runtime.settings import dist
    from query.access.callers import Caller
    from query.embedding.embedders import GenerationEmbedders
    from query.model import MAX_TOP, RANKERS, BadQuery
    from query.retrieval.search import open_search
    from query.settings import load as load_query

    assert story.document is not None
    identity = story.document.identity
    embedders = GenerationEmbedders.by_settings(settings.embedding, dist() / "models")
    embedders.start()
    try:
        async with open_search(settings, embedders, load_query()) as library:
            if principals or tags:
                caller = await library.identify(identity.tenant, principals=principals, tags=tags)
            else:
                caller = Caller(identity.tenant, frozenset((*story.access.acl_tags, *story.access.required_tags)))
            response = await library.search(query, caller, top=MAX_TOP)
    except BadQuery:
        raise
    except PenstockError as error:
        return QueryRank(query, None, 0, {}, f"the search failed: {error}")
    name = (identity.source, identity.external_id)
    for rank, result in enumerate(response.results, start=1):
        if name in _documents(result):
            return QueryRank(
                query, rank, len(response.results), {ranker: result.ranks.get(ranker) for ranker in RANKERS}
            )
    return QueryRank(query, None, len(response.results), {}, _why_not(response, MAX_TOP))


def _documents(result: Result) -> set[tuple[str, str]]:
    """The result's document, and those with the same text."""
    return {(passage.source, passage.external_id) for passage in (result.passage, *result.also)}


def _why_not(response: SearchResults, max_results: int) -> str:
    degraded = f" ({'; '.join(response.degraded)})" if response.degraded else ""
    if not response.relevant:
        return f"the search found no relevant passage{degraded}"
    if len(response.results) < max_results and response.cursor is None:
        return f"no passage of it is a candidate; the search returned {len(response.results)} other passages{degraded}"
    return f"{len(response.results)} passages of other documents rank higher{degraded}"
