"""``penstock why``: one document's story."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from pipeline.cli.output import Json, print_json, quiet_libraries
from pipeline.cli.recorded import record


def why(
    document: Annotated[str, typer.Argument(help="Id, external id, file, URL, or the end of one; or a title.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose document.")] = "default",
    source: Annotated[
        str | None, typer.Option("--source", help="Of this source: where several have one of that name.")
    ] = None,
    principals: Annotated[
        list[str] | None,
        typer.Option("--as", metavar="PRINCIPAL", help="Say whether this person may read it, and by what. Repeatable."),
    ] = None,
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="TAG", help="The same of whoever holds this tag (TAG, or SOURCE/TAG)."),
    ] = None,
    query: Annotated[
        str | None, typer.Option("--query", metavar="QUERY", help="Say too at which rank a search for this finds it.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Why a document is searchable, or not, and what would change that: its source, events, decisions, both stores,
    access, dead letters.

    For whoever operates the machine: shows any document of the tenant, whoever may read it, and none of another tenant.
    Exit code 0: both stores return it (and, with --as or --tag, to them). 1: not. With --json 1 only where the ledger
    has never accepted it: `searchable` says the rest.

    Example: penstock why docs/guide.md --as ann
    """
    from pipeline.cli.why_look import Asked, look
    from pipeline.cli.why_show import show
    from pipeline.core.errors import PenstockError
    from pipeline.ledger.story_json import around_json, as_json
    from pipeline.ledger.story_verdict import judge
    from query.model import BadQuery

    quiet_libraries()
    try:
        told = asyncio.run(look(Asked(tenant, names(document), source, principals or [], tags or [], query)))
    except BadQuery as error:
        raise typer.BadParameter(f"--query: {error}") from error
    if told.several:
        typer.echo(f"error: {document!r} may mean {len(told.several)} documents; name one of them:", err=True)
        for identity, title in told.several:
            typer.echo(f"  {identity.id}  {identity.source}/{identity.external_id}  {title or ''}", err=True)
        raise typer.Exit(2)
    story, around = told.story, told.around
    shown = [story.document.identity.id] if story.document is not None else []
    record("document.why", tenant=tenant, documents=shown, principals=principals or [], tags=tags or [])
    verdict = judge(story, around)
    known = bool(story.document or story.dead or (around.source and around.source.item))
    if json_output and known:
        print_json(as_json(story, verdict) | around_json(around))
    if story.document is None:
        step = f" ({verdict.next})" if verdict.next and not story.dead else ""
        if known and not json_output:
            show(story, around, verdict)
        raise PenstockError(f"no document {document!r} in tenant {tenant!r}: {verdict.reason}{step}")
    if json_output:
        return
    show(story, around, verdict)
    if not verdict.searchable or (around.person is not None and not around.person.may_read):
        raise typer.Exit(1)


def names(document: str) -> list[str]:
    """What a document may be known as: as typed, and as the file of that name."""
    if document.startswith("file:"):
        return [document, unquote(urlsplit(document).path)]
    path = Path(document).expanduser().absolute()
    return list(dict.fromkeys([document, str(path), str(path.resolve()), path.as_uri()]))
