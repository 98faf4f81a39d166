"""``penstock why``: one document's story."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

from pipeline.cli.output import Json, print_json, printable, stdout

if TYPE_CHECKING:
    from pipeline.ledger.documents import Identity
    from pipeline.ledger.story import StoreProgress, Story
    from query.access import Decision


def why(
    document: Annotated[str, typer.Argument(help="Id, external id, file, URL, or the end of one; or a title.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose document.")] = "default",
    principals: Annotated[
        list[str] | None,
        typer.Option("--as", metavar="PRINCIPAL", help="Say whether this person may read it, and by what. Repeatable."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Why a document is searchable, or not: its events, what was decided, both stores, access, dead letters.

    For whoever operates the machine: shows any document of the tenant, whoever may read it, and none of another tenant.

    Example: penstock why docs/guide.md --as ann
    """
    from pipeline.core.errors import PenstockError
    from pipeline.ledger.story import verdict
    from pipeline.ledger.story_json import as_json

    found, story, decision = asyncio.run(_tell(tenant, names(document), principals or []))
    if len(found) > 1:
        typer.echo(f"error: {document!r} may mean {len(found)} documents; name one of them:", err=True)
        for identity, title in found:
            typer.echo(f"  {identity.id}  {identity.source}/{identity.external_id}  {title or ''}", err=True)
        raise typer.Exit(2)
    searchable, reason = verdict(story)
    if json_output and (story.document or story.dead):
        print_json(as_json(story) | (_decision_json(principals or [], decision) if decision else {}))
    if story.document is None:
        raise PenstockError(f"no document {document!r} in tenant {tenant!r}: {reason}")
    if not json_output:
        _show(story, searchable, reason)
        if decision:
            stdout.print(f"  may read  {_decision_line(principals or [], decision)}", markup=False, soft_wrap=True)


def names(document: str) -> list[str]:
    """What a document may be known as: as typed, and as the file of that name."""
    if document.startswith("file:"):
        return [document, unquote(urlsplit(document).path)]
    path = Path(document).expanduser().absolute()
    return list(dict.fromkeys([document, str(path), str(path.resolve()), path.as_uri()]))


async def _tell(
    tenant: str, known_as: Sequence[str], principals: Sequence[str]
) -> tuple[list[tuple[Identity, str | None]], Story, Decision | None]:
    from pipeline.ledger import story
    from pipeline.settings import load
    from pipeline.stores.postgres import open_pool, translated
    from query.access import decide, identify, sayable

    known_as = sayable(known_as)
    if not sayable([tenant]):
        return [], story.Story(None), None
    async with open_pool(load().postgres) as pool:
        with translated("why"):
            async with pool.connection() as connection:
                found = await story.find(connection, tenant, known_as)
                if len(found) != 1:
                    return found, await story.dead_letters(connection, tenant, known_as), None
                told = await story.tell(connection, found[0][0].id)
                if not principals:
                    return found, told, None
                caller = await identify(connection, tenant, principals=principals)
                return found, told, decide(caller, told.access.acl_tags, told.access.required_tags)


def _decision_json(principals: Sequence[str], decision: Decision) -> dict[str, Any]:
    return {
        "readable_by": {
            "principals": list(principals),
            "may_read": decision.may_read,
            "by": list(decision.by),
            "lacks": list(decision.lacks),
        }
    }


def _decision_line(principals: Sequence[str], decision: Decision) -> str:
    who = " and ".join(principals)
    if decision.may_read:
        return f"{who}: yes, by {', '.join(decision.by)}"
    if not decision.by:
        return f"{who}: no, holds none of its access tags"
    return f"{who}: no, lacks {', '.join(decision.lacks)}"


def _show(story: Story, searchable: bool, reason: str) -> None:
    from rich.text import Text

    document = story.document
    assert document is not None
    identity = document.identity

    def line(*parts: str | tuple[str, str]) -> None:
        clean = [printable(p) if isinstance(p, str) else (printable(p[0]), p[1]) for p in parts]
        stdout.print(Text.assemble(*clean), soft_wrap=True)

    mark = ("searchable", "bold green") if searchable else ("not searchable", "bold red")
    line((document.title or identity.external_id, "bold"), "  ", mark)
    line(f"  {reason}")
    line(("  document  ", "dim"), f"{identity.tenant}/{identity.source}/{identity.external_id}")
    line(("            ", "dim"), f"{identity.id}  version {document.version}  seq {document.seq}")
    required = f"  and all of {', '.join(story.access.required_tags)}" if story.access.required_tags else ""
    line(("  access    ", "dim"), (", ".join(story.access.acl_tags) or "nobody") + required)
    for g in story.generations:
        line((f"  {g.name:<9} ", "dim"), f"{g.chunks} chunks{'' if g.active else '  (not active)'}")
        for name, progress in (("vectors", g.vectors), ("keywords", g.keywords)):
            line(f"            {name:<9} ", (progress.state, _COLOURS[progress.state]), _detail(progress))
    entries = [(e.at, f"{e.kind}  {e.outcome}" + (f"  seq {e.seq}" if e.seq else ""), "") for e in story.events]
    for d in story.dead:
        again = f"  attempt {d.attempt}" if d.attempt > 1 else ""
        entries.append((d.at, f"dead letter {d.id}  {d.code}: {d.message}{again}", "dim" if d.replayed_at else "red"))
        if d.replayed_at is not None:
            entries.append((d.replayed_at, f"replayed    {d.id}", ""))
    for n, (at, what, style) in enumerate(sorted(entries)):
        line(("  history   " if n == 0 else "            ", "dim"), f"{at:%Y-%m-%d %H:%M:%S}  ", (what, style))


_COLOURS = {"settled": "green", "partial": "yellow", "pending": "yellow", "failed": "red", "withdrawn": "dim"}


def _detail(progress: StoreProgress) -> str:
    parts = [f"seq {progress.seq}" + (f" of {progress.want_seq}" if not progress.reached else "")]
    if progress.reached and progress.at:
        parts.append(f"since {progress.at:%H:%M:%S}")
    if progress.pending_since:
        parts.append(f"waiting since {progress.pending_since:%H:%M:%S}")
    if progress.attempts:
        parts.append(f"{progress.attempts} attempts")
    if progress.next_retry:
        parts.append(f"next {progress.next_retry:%H:%M:%S}")
    if progress.error:
        parts.append(progress.error)
    return "  " + ", ".join(parts)
