"""``penstock preview``: the answers that a proposed edit would change, before it is published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.extras import require
from cli.options import Principals, Tags, Tenant
from cli.output import Json, print_json
from cli.terminal import echo
from pipeline.core.errors import PenstockError

if TYPE_CHECKING:
    from cli.preview_files import Proposal

CLIENT_SECONDS = 180.0
"""A preview's own time limit (query/http/previews.py) and more."""


def preview(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders as they would be.")],
    source: Annotated[str, typer.Option("--source", help="Name of the source that publishes them.")] = "folder",
    root: Annotated[
        Path | None,
        typer.Option(
            "--root", help="Folder that the source's paths are relative to. Default with --git: the repository."
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option("--git", metavar="REF", help="Only what differs from this branch or commit, deleted files too."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", envvar="PENSTOCK_URL", help="Address of a query service. Default: the stack of the settings."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the token or API key for --url. Default: $PENSTOCK_TOKEN."),
    ] = None,
    token: Annotated[str | None, typer.Option(envvar="PENSTOCK_TOKEN", hidden=True)] = None,
    principals: Principals = None,
    tags: Tags = None,
    tenant: Tenant = "default",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a comment for a pull request.")] = False,
    json_output: Json = False,
) -> None:
    """Show which answers an edit would change, before it is published. Nothing is stored.

    The golden questions (`penstock golden`) and your own standing questions are asked twice: of the index as it is, and
    as if these files were published. Only golden questions count whose judged documents you may read. Without --git, a
    folder is taken as it is: documents of files that it lacks are deleted. With --url the token decides who reads, else
    --as and --tag, or the local user.

    Exit code 0: no answer is lost. 1: an answer is lost, loses its citation or starts to contradict another document,
    or the preview could not be made (stderr says why). 2: a path, a revision or the edit is wrong.

    Examples:

    penstock preview handbook/leave.md

    penstock preview docs --git origin/main --source handbook --markdown > comment.md

    PENSTOCK_TOKEN=... penstock preview . --git origin/main --source wiki --url https://search.example.org --json
    """
    from cli.preview_files import BadPath, in_folders, since_revision
    from query.preview.model import MAX_DOCUMENTS

    if markdown and json_output:
        _refuse("choose --json or --markdown")
    if url is not None and (principals or tags):
        _refuse("with --url, the token decides who reads: leave out --as and --tag")
    try:
        proposal = since_revision(paths, root, revision) if revision is not None else in_folders(paths, root)
    except BadPath as error:
        _refuse(str(error))
    for problem in proposal.problems:
        echo(f"warning: {problem}", err=True)
    if len(proposal.files) > MAX_DOCUMENTS:
        _refuse(f"{len(proposal.files)} files are too many (maximum {MAX_DOCUMENTS}): name fewer, or use --git REF")
    named = [
        {
            "path": file.path,
            "content": file.content,
            "title": file.title,
            "media_type": file.media_type,
            # A folder's documents have the paths of this machine as ids; a repository's do not.
            **({} if revision is not None or root is not None else {"external_id": file.absolute}),
        }
        for file in proposal.files
    ]
    body = {"source": source, "documents": named, "folders": _folders(proposal, root)}
    report = _by_service(url, token, token_file, body) if url is not None else _here(body, tenant, principals, tags)
    if json_output:
        print_json(report)
    else:
        from cli.preview_show import as_markdown, as_text

        echo(as_markdown(report) if markdown else as_text(report), nl=False)
    if report["fails"]:
        raise typer.Exit(1)


def _refuse(reason: str) -> None:
    echo(f"error: {reason}", err=True)
    raise typer.Exit(2)


def _folders(proposal: Proposal, root: Path | None) -> list[str]:
    import os

    if root is None:
        return proposal.folders
    relative = [os.path.relpath(folder, os.path.realpath(root)) for folder in proposal.folders]
    return ["" if folder == "." else folder for folder in relative]


def _by_service(url: str, token: str | None, token_file: Path | None, body: dict[str, Any]) -> dict[str, Any]:
    """Have a query service make the preview. Raises PenstockError."""
    import httpx

    try:
        key = token_file.read_text("utf-8").strip() if token_file is not None else token
        with httpx.Client(timeout=CLIENT_SECONDS, headers={"Authorization": f"Bearer {key}"} if key else {}) as client:
            response = client.post(f"{url.rstrip('/')}/v1/previews", json=body)
            answer = response.json()
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise PenstockError(f"{url} gave no preview: {type(error).__name__}: {error}") from error
    if response.status_code == 200:
        return dict(answer)
    reason = f"{url} responded with {response.status_code}: {answer.get('detail', '')}"
    if response.status_code == 422:
        _refuse(reason)
    raise PenstockError(reason)


def _here(
    body: dict[str, Any], tenant: str, principals: Sequence[str] | None, tags: Sequence[str] | None
) -> dict[str, Any]:
    """Make the preview in this process, from the stores themselves."""
    require("query", "worker")
    import asyncio

    from query.model import BadQuery

    if not principals and not tags:
        from cli.readers import local_user

        principals = [local_user("name a person with --as, or an access tag with --tag")]
    try:
        return asyncio.run(_preview(body, tenant, principals or [], tags or []))
    except BadQuery as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


async def _preview(body: dict[str, Any], tenant: str, principals: Sequence[str], tags: Sequence[str]) -> dict[str, Any]:
    from cli.recorded import recording
    from pipeline.runtime.settings import load
    from query.preview.model import Edit, ProposedDocument, as_json, shown_documents
    from query.service import open_service
    from query.settings import load as load_query

    edit = Edit(body["source"], [ProposedDocument(**document) for document in body["documents"]], body["folders"])
    async with open_service(load(), load_query()) as service:
        caller = await service.search.identify(tenant, principals=principals, tags=tags)
        own = principals[0] if len(principals) == 1 and not tags else None
        report = await service.previews.preview(edit, caller, operator=True, principal=own)
    documents = shown_documents(report)
    await recording("preview", tenant=tenant, documents=documents, principals=principals, tags=tags)
    return as_json(report)
