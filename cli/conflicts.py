"""``penstock conflicts``: passages that contradict or repeat each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, cast
from uuid import UUID

import typer

from cli.options import Tenant
from cli.output import Json, print_json, printable, stdout
from cli.recorded import record
from cli.terminal import echo

if TYPE_CHECKING:
    from pipeline.core.conflicts import Kind
    from pipeline.ledger.conflicts import Listed, State
    from pipeline.stores.postgres import Connection
    from query.conflicts import Quotes

conflicts = typer.Typer(
    name="conflicts",
    help="Passages that contradict or repeat each other. List, dismiss or accept them.",
    no_args_is_help=True,
)

Principals = Annotated[
    list[str] | None,
    typer.Option("--as", metavar="PRINCIPAL", help="Only what this person may read, e.g. ann@example.org. Repeatable."),
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="Only what a holder of this access tag may read. Repeatable."),
]


class Which(NamedTuple):
    """The conflicts to list; None: all of them, or of any."""

    state: State | None
    kinds: Sequence[Kind] | None
    sources: Sequence[str] | None
    document: str | None
    cursor: str | None
    limit: int


@conflicts.command("list")
def list_conflicts(
    tenant: Tenant = "default",
    principals: Principals = None,
    tags: Tags = None,
    state: Annotated[
        Literal["open", "dismissed", "accepted", "all"], typer.Option(help="Only conflicts in this state.")
    ] = "open",
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="Only this kind: number, date, version, unit, name, negation, duplicate or outdated. Repeatable.",
        ),
    ] = None,
    sources: Annotated[
        list[str] | None,
        typer.Option("--source", metavar="SOURCE", help="Only conflicts with a document of this source. Repeatable."),
    ] = None,
    document: Annotated[
        str | None,
        typer.Option("--document", metavar="ID", help="Only conflicts of the document with this external id, or id."),
    ] = None,
    cursor: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="Next page of the same list: the cursor of the previous one.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of conflicts.")] = 100,
    json_output: Json = False,
) -> None:
    """List passages that contradict or repeat each other, the newest first.

    With --as or --tag: those of which that reader may read both passages, with what they say. Without: all of the
    tenant, without any text.

    Example: penstock conflicts list --as ann@example.org --kind number --kind negation --source wiki
    """
    from pipeline.core.conflicts import KINDS

    if unknown := set(kinds or ()) - set(KINDS):
        raise typer.BadParameter(f"--kind {sorted(unknown)[0]}: must be one of {', '.join(KINDS)}")
    record("conflicts.list", tenant=tenant, principals=principals or (), tags=tags or ())
    chosen: State | None = None if state == "all" else state
    which = Which(chosen, cast("list[Kind] | None", kinds), sources, document, cursor, limit)
    from query.conflicts import conflict_json, cursor_after
    from query.model import BadQuery

    try:
        rows, quoted = asyncio.run(_list(tenant, principals or [], tags or [], which))
    except BadQuery as error:
        raise typer.BadParameter(str(error)) from error
    following = cursor_after(rows, limit)

    if json_output:
        conflicts_json = [conflict_json(listed, quoted.get(listed.id)) for listed in rows]
        print_json({"conflicts": conflicts_json, "cursor": following})
        return
    for listed in rows:
        _show(listed, quoted.get(listed.id))
    if not rows:
        stdout.print("No conflicts.", markup=False)
    if following is not None:
        stdout.print(f"more: --cursor {following}", markup=False, soft_wrap=True)


@conflicts.command()
def dismiss(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The conflict's id, from `penstock conflicts list`.")],
    tenant: Tenant = "default",
) -> None:
    """Set a conflict aside that is none or does not matter. It stays so until one of its passages changes.

    Example: penstock conflicts dismiss 0b1a4f0e-5c1d-5a53-9d0e-3f1f6c1a2b3c
    """
    _decide(id_, tenant, "dismissed")


@conflicts.command()
def accept(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The conflict's id, from `penstock conflicts list`.")],
    tenant: Tenant = "default",
) -> None:
    """Confirm that a conflict has to be resolved. It ends when one of its passages changes.

    Example: penstock conflicts accept 0b1a4f0e-5c1d-5a53-9d0e-3f1f6c1a2b3c
    """
    _decide(id_, tenant, "accepted")


def _decide(id_: str, tenant: str, state: State) -> None:
    try:
        conflict_id = UUID(id_)
    except ValueError as error:
        raise typer.BadParameter(f"{id_!r} is no conflict's id: see `penstock conflicts list`") from error
    record(f"conflicts.{'dismiss' if state == 'dismissed' else 'accept'}", tenant=tenant, object=f"conflict:{id_}")
    if not asyncio.run(_record_decision(conflict_id, tenant, state)):
        echo(f"error: no conflict {id_} in tenant {tenant}: see `penstock conflicts list`", err=True)
        raise typer.Exit(1)
    echo(state)


async def _list(
    tenant: str,
    principals: Sequence[str],
    tags: Sequence[str],
    which: Which,
) -> tuple[list[Listed], Quotes]:
    from query.access.callers import identify
    from query.conflicts import every, quotes, visible

    async with _connected(tenant) as connection:
        if not principals and not tags:
            return await every(connection, tenant, **which._asdict()), {}
        caller = await identify(connection, tenant, principals=principals, tags=tags)
        rows = await visible(connection, caller, **which._asdict())
        return rows, await quotes(connection, rows)


async def _record_decision(id_: UUID, tenant: str, state: State) -> bool:
    from pipeline.ledger.conflicts import decide, standing

    async with _connected(tenant) as connection:
        if not await standing(connection, tenant, access_ids=None, state=None, id_=id_):
            return False
        await decide(connection, tenant, id_, state)
        return True


@asynccontextmanager
async def _connected(tenant: str) -> AsyncIterator[Connection]:
    """Yield a connection that reads this tenant's rows alone."""
    from pipeline.runtime.settings import load
    from pipeline.stores.postgres import open_pool, translated
    from query.access.tenant_rows import rows_of

    async with open_pool(load().postgres) as pool:
        with translated("conflicts"):
            async with rows_of(pool, tenant) as connection:
                yield connection


def _show(listed: Listed, quoted: tuple[str, str] | None) -> None:
    stdout.print(f"{listed.kind}  {listed.id}  {listed.state}  {listed.at:%Y-%m-%d %H:%M}", markup=False)
    sides = [(listed.source_a, listed.external_id_a), (listed.source_b, listed.external_id_b)]
    for side, (source, external_id) in enumerate(sides):
        note = "  (older)" if side == listed.older_side else ""
        stdout.print(f"  {printable(source)}/{printable(external_id)}{note}", markup=False, soft_wrap=True)
        if quoted is not None:
            stdout.print(f"    {printable(' '.join(quoted[side].split()))}", markup=False, soft_wrap=True)
