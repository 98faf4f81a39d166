"""``penstock search``: ask both stores, as somebody; by the running query service, where that can answer."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from cli.extras import require
from cli.moment import past_moment
from cli.options import AtLeast, Principals, Tags, Tenant, WaitSeconds
from cli.search_show import show
from cli.terminal import echo, harmless_json
from pipeline.core.errors import Misconfigured
from pipeline.core.publication import DEFAULT_WAIT_SECONDS, publications_of
from pipeline.runtime.home import DEVELOPMENT_FILE, ENDPOINTS_FILE, development_token, home

if TYPE_CHECKING:
    from query.access.filters import Filters
    from query.model import SearchResults


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def search(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="The query, in your own words.")],
    tenant: Tenant = "default",
    principals: Principals = None,
    tags: Tags = None,
    top: Annotated[int, typer.Option(help="Maximum number of passages, 1 to 100.")] = 10,
    mode: Annotated[str, typer.Option(help="Search mode: hybrid, vector or keyword.")] = "hybrid",
    sources: Annotated[
        list[str] | None, typer.Option("--source", metavar="SOURCE", help="Only documents of this source. Repeatable.")
    ] = None,
    authors: Annotated[
        list[str] | None, typer.Option("--author", metavar="AUTHOR", help="Only documents by this author. Repeatable.")
    ] = None,
    media_types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="Only documents of this media type, e.g. text/markdown or text/*. Repeatable.",
        ),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=past_moment, metavar="TIME", help="Only documents changed at their source since: 2h, 7d or a time."
        ),
    ] = None,
    before: Annotated[
        datetime | None,
        typer.Option(
            parser=past_moment, metavar="TIME", help="Only documents changed at their source before: 2h, 7d or a time."
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="KEY=VALUE",
            help="Only documents with this value of a declared key: KEY=VALUE (any of the values given), KEY+=VALUE"
            " (all of them), KEY!=VALUE (none), or KEY with >=, >, <= or < and a number, date or text. Repeatable.",
        ),
    ] = None,
    sort: Annotated[
        str, typer.Option(help="Order: relevance, newest or oldest (passages that have most of the words).")
    ] = "relevance",
    cursor: Annotated[
        str | None,
        typer.Option(metavar="CURSOR", help="Next page of the same search: the cursor of the previous one."),
    ] = None,
    facets: Annotated[
        list[str] | None,
        typer.Option("--facet", metavar="KEY", help="Also count the values of this declared key. Repeatable."),
    ] = None,
    at_least: AtLeast = None,
    wait_seconds: WaitSeconds = DEFAULT_WAIT_SECONDS,
    json_output: Json = False,
) -> None:
    """Search the documents and print the best passages, with their ranks.

    Without --as and --tag you read as the local user, who may read what `penstock ingest` stored for that user.

    Examples:

    penstock search "how do I undo a commit" --top 5 --type text/markdown --since 30d

    penstock search "leave policy" --filter labels=policy --filter "priority>=2" --facet status --sort newest

    penstock search "release plan" --at-least $(penstock ingest docs/ --json | jq -r .token)
    """
    if not principals and not tags:
        from cli.readers import local_user

        principals = [local_user("name a person with --as, or an access tag with --tag")]
    principals, tags = principals or [], tags or []
    request = {
        "query": query,
        "top": top,
        "mode": mode,
        "filters": {
            "sources": tuple(sources or ()),
            "authors": tuple(authors or ()),
            "media_types": tuple(media_types or ()),
            "since": since,
            "before": before,
            **({"metadata": metadata_conditions(metadata)} if metadata else {}),
        },
        **{n: v for n, v in (("sort", sort), ("cursor", cursor), ("facets", facets)) if v not in (None, "relevance")},
        **({"at_least": at_least, "wait_seconds": wait_seconds} if at_least is not None else {}),
    }
    response = None
    if len(principals) == 1 and not tags:  # over HTTP one person asks, and nobody says which tags that person holds
        response = ask_service(request, tenant=tenant, principal=principals[0])
    if response is None:
        from cli.output import log_warnings_to_stderr

        log_warnings_to_stderr(context)
        response = _here(request, tenant, principals, tags)
    if json_output:
        echo(harmless_json(json.dumps(response, ensure_ascii=False)))
        return
    show(response, query, tenant, [*(f"user:{p}" for p in principals), *tags])


def _here(request: dict[str, Any], tenant: str, principals: Sequence[str], tags: Sequence[str]) -> dict[str, Any]:
    """Search in this process, in the stores themselves. Raises Misconfigured if the extra ``query`` is not
    installed."""
    require("query")
    import asyncio

    from pipeline.core.metadata_keys import key_filter
    from query.access.filters import Filters
    from query.model import BadQuery, as_json

    filters = dict(request["filters"])
    try:
        keys = tuple(key_filter(name, **of_key) for name, of_key in filters.pop("metadata", {}).items())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    narrowed = Filters(**filters, keys=keys)
    try:
        response = asyncio.run(_search(request, tenant, principals, tags, narrowed))
    except BadQuery as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    return as_json(response)


async def _search(
    request: Mapping[str, Any], tenant: str, principals: Sequence[str], tags: Sequence[str], filters: Filters
) -> SearchResults:
    from pipeline.observability import tracing
    from query.access.filters import check as check_filters
    from query.model import check, check_sort

    check(request["query"], request["top"], request["mode"])
    check_sort(request.get("sort", "relevance"), request["mode"])
    check_filters(filters)
    with tracing.running("search"), tracing.begin("search", attributes={"penstock.tenant": tenant}):
        return await _run_search(request, tenant, principals, tags, filters)


async def _run_search(
    request: Mapping[str, Any], tenant: str, principals: Sequence[str], tags: Sequence[str], filters: Filters
) -> SearchResults:
    import asyncio
    from dataclasses import replace

    from pipeline.runtime.settings import dist, load
    from query.embedding.embedders import GenerationEmbedders

    settings = load()
    embedders = None
    if request["mode"] != "keyword":
        embedders = GenerationEmbedders.by_settings(settings.embedding, dist() / "models")
        embedders.start()  # while the clients are imported and connected
        await asyncio.sleep(0)
    from cli.recorded import recording
    from query.model import shown_documents
    from query.retrieval.search import open_search
    from query.settings import load as load_query

    async with open_search(settings, embedders, load_query()) as library:
        seen = await library.wait_for(
            publications_of(request["at_least"]) if "at_least" in request else (),
            tenant,
            principals=principals,
            tags=tags,
            seconds=request.get("wait_seconds", 0),
        )
        caller = await library.identify(tenant, principals=principals, tags=tags)
        response = await library.search(
            request["query"],
            caller,
            top=request["top"],
            mode=request["mode"],
            filters=filters,
            sort=request.get("sort", "relevance"),
            cursor=request.get("cursor"),
            facets=request.get("facets", ()),
        )
    response = replace(response, at_least=seen)
    documents = shown_documents(response.results)
    await recording("search", tenant=tenant, documents=documents, principals=principals, tags=tags)
    return response


PATIENCE_SECONDS = 30.0
"""A search's whole budget (query/retrieval/timeouts.py) and more."""
WHERE = frozenset({"PENSTOCK_HOME", "PENSTOCK_DIST"})
"""Variables that say where the stack is, and nothing of how to search."""


def ask_service(request: Mapping[str, Any], *, tenant: str, principal: str) -> dict[str, Any] | None:
    """The response of the service to ``POST /v1/search``. request: the body; times are datetimes.

    None: none runs, it does not believe its own user, or it does not answer this well; then the command works it
    out by itself, and says in its own words what is wrong. So it does where anything is set in its environment, which
    may be set otherwise for the service, and for names that a header cannot carry as they are.
    """
    if any(name.startswith(("PENSTOCK_", "OTEL_")) and name not in WHERE for name in os.environ):
        return None
    if not _is_plain(tenant) or not _is_plain(principal):
        return None
    place = urlsplit(_address())
    if place.hostname is None:
        return None
    try:
        token = development_token(home() / DEVELOPMENT_FILE)
    except (FileNotFoundError, Misconfigured):
        return None
    patience = PATIENCE_SECONDS + request.get("wait_seconds", 0)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=patience)
    headers = {
        "Content-Type": b"application/json",
        "Authorization": f"Bearer {token}".encode(),
        "X-Penstock-Tenant": tenant.encode(),
        "X-Penstock-As": principal.encode(),
    }
    try:
        connection.request("POST", "/v1/search", json.dumps(request, default=datetime.isoformat), headers)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return dict(json.loads(body)) if answer.status == 200 else None


def _is_plain(name: str) -> bool:
    """A header keeps it as it is. An empty one would stand for somebody else."""
    return name != "" and name.isprintable() and name == name.strip()


def _address() -> str:
    """http://host:port, or "" where no service runs."""
    try:
        written = json.loads((home() / ENDPOINTS_FILE).read_text())
    except FileNotFoundError:
        return ""
    return str(written.get("serve", {}).get("url", ""))


_FILTER = re.compile(r"(?P<name>[\w.-]{1,100}?)(?P<sign>>=|<=|!=|\+=|=|>|<)(?P<value>.+)", re.DOTALL)
_LISTS = {"=": "any", "+=": "all", "!=": "none"}
_BOUNDS = {">=": "gte", ">": "gt", "<=": "lte", "<": "lt"}


def metadata_conditions(filters: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The ``filters.metadata`` of a request from ``KEY=VALUE`` (any of the values given for a key), ``KEY+=VALUE`` (all
    of them), ``KEY!=VALUE`` (none of them), ``KEY>=VALUE``, ``>``, ``<=`` and ``<``. A bound that is a number is
    compared as one. Raises typer.BadParameter."""
    by_key: dict[str, dict[str, Any]] = {}
    for text in filters:
        written = _FILTER.fullmatch(text)
        if written is None:
            raise typer.BadParameter("write a filter as KEY=VALUE, KEY+=VALUE, KEY!=VALUE, or with >=, >, <= or <")
        name, sign, value = written["name"], written["sign"], written["value"]
        of_key = by_key.setdefault(name, {})
        if sign in _LISTS:
            of_key.setdefault(_LISTS[sign], []).append(value)
        elif _BOUNDS[sign] in of_key:
            raise typer.BadParameter(f"{name}{sign} is given twice")
        else:
            of_key[_BOUNDS[sign]] = _number(value)
    return by_key


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
