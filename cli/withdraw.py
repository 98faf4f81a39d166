"""``penstock document withdraw`` and ``penstock tenant withdraw``: out of the index without the source."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from uuid import UUID

import typer

from cli.output import Json, print_json, printable, stderr
from cli.recorded import recording
from pipeline.core.errors import PenstockError

if TYPE_CHECKING:
    from connectors.withdraw import Withdrawal
    from pipeline.kafka.producer import Producer
    from pipeline.stores.postgres import Pool

document = typer.Typer(name="document", help="Withdraw single documents.", no_args_is_help=True)
tenant = typer.Typer(name="tenant", help="Withdraw whole tenants.", no_args_is_help=True)

Yes = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Do not ask for confirmation. Without --yes and a terminal, only count."),
]
Document = Annotated[str, typer.Argument(help="Id, external id or file of the document, in full.", show_default=False)]
Tenant = Annotated[str, typer.Option("--tenant", help="Tenant of the document.")]
Source = Annotated[
    str | None, typer.Option("--source", help="The document's source, if several have one of this name.")
]


@document.callback()
def _documents() -> None:
    """Withdraw single documents."""


@tenant.callback()
def _tenants() -> None:
    """Withdraw whole tenants."""


@document.command("withdraw")
def withdraw_document(
    name: Document,
    tenant: Tenant = "default",
    source: Source = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Undo a withdrawal: the source may publish the document again.")
    ] = False,
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """Take a document out of the index although its source has it. Its connector does not publish it until --undo.

    Needs the operator's login in Postgres and the connectors' login in Kafka.

    Example: penstock document withdraw docs/salaries.md --yes
    """

    async def run() -> dict[str, Any]:
        async with wire() as (pool, kafka):
            id_, of_source, external_id, erased = await the_document(pool, tenant, name, source)
            withdrawn = withdrawal(pool, kafka, tenant, of_source)
            summary: dict[str, Any] = {"tenant": tenant, "source": of_source, "external_id": external_id}
            if undo or not erased:
                action = "document.unwithdraw" if undo else "document.withdraw"
                await recording(action, tenant=tenant, object=f"document:{id_}")
            if undo:
                return {**summary, "done": await withdrawn.undo([external_id]) == 1, "undone": True}
            if erased:
                return {**summary, "documents": 0, "done": True, "already_erased": True}
            if not agreed(f"Withdraw {of_source}/{external_id}?", yes=yes, quiet=json_output):
                return {**summary, "documents": 1, "done": False}
            await withdrawn.documents([external_id])
            return {**summary, "documents": 1, "done": True}

    show_outcome(asyncio.run(run()), json_output)


@tenant.command("withdraw")
def withdraw_tenant(
    name: Annotated[str, typer.Argument(help="The tenant.", show_default=False)],
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """Take a tenant out of the index: remove its connectors, withdraw all documents, and end all group memberships.

    Stop all other producers of this tenant first. `penstock connector resume NAME` brings a connector and its documents
    back. Conversations stay: `penstock forget tenant` erases them.

    Example: penstock tenant withdraw acme --yes
    """

    async def run() -> dict[str, Any]:
        from connectors.withdraw import sources_of

        async with wire() as (pool, kafka):
            every = [withdrawal(pool, kafka, name, source) for source in await sources_of(pool, name)]
            if not every:
                raise PenstockError(f"there is no tenant {name!r}: it has no sources")
            await recording("tenant.withdraw", tenant=name, object=f"tenant:{name}")
            return {"tenant": name, **await withdraw_all(every, what=f"tenant {name}", yes=yes, quiet=json_output)}

    show_outcome(asyncio.run(run()), json_output)


async def withdraw_all(every: list[Withdrawal], *, what: str, yes: bool, quiet: bool) -> dict[str, Any]:
    """Count, ask, and withdraw whole sources."""
    counted = [(withdrawal, await withdrawal.extent()) for withdrawal in every]
    summary: dict[str, Any] = {
        "sources": [withdrawal.source for withdrawal in every],
        "documents": sum(extent.documents for _, extent in counted),
        "principals": sum(extent.principals for _, extent in counted),
    }
    question = f"Withdraw {what}: {summary['documents']} documents, and the groups of {summary['principals']} people?"
    if not agreed(question, yes=yes, quiet=quiet):
        return {**summary, "done": False}
    for withdrawal in every:
        await withdrawal.remove()
    done = [await withdrawal.whole() for withdrawal in every]
    summary |= {"documents": sum(d.documents for d in done), "principals": sum(d.principals for d in done)}
    return {**summary, "done": True}


@asynccontextmanager
async def wire() -> AsyncIterator[tuple[Pool, Producer]]:
    from pipeline.kafka.client import publisher
    from pipeline.runtime.settings import load
    from pipeline.stores.postgres import open_pool

    settings = load()
    async with open_pool(settings.postgres) as pool, publisher(settings) as kafka:
        yield pool, kafka


def withdrawal(pool: Pool, kafka: Producer, of_tenant: str, source: str) -> Withdrawal:
    from connectors.withdraw import Withdrawal

    return Withdrawal(pool, kafka, of_tenant, source)


class Named(NamedTuple):
    id: UUID
    source: str
    external_id: str
    erased: bool
    """Nothing but its row is left, without its name."""


async def the_document(pool: Pool, of_tenant: str, name: str, source: str | None) -> Named:
    """The one document that has precisely this id or external id, or that had it before it was erased. Nothing like it
    is meant: the same command again would find the next best. Raises PenstockError."""
    from cli.why import names
    from connectors.withdraw import sources_of
    from pipeline.core.identity import document_id
    from pipeline.diagnosis import story

    known = names(name)
    sources = await sources_of(pool, of_tenant) if source is None else [source]
    was = {document_id(of_tenant, source_name, called): called for source_name in sources for called in known}
    async with pool.connection() as connection:
        rows = await story.find_exactly(connection, of_tenant, known, list(was), source=source)
        of_connectors = await story.connector_documents(connection, of_tenant, known)
    matches = {}
    for id_, of_source, external_id, erased in rows:
        named = was.get(id_, external_id) if erased else external_id
        matches[of_source, named] = Named(id_, of_source, named, erased)
    for of_source, external_id in of_connectors:
        if external_id in known and source in (None, of_source):
            row = matches.get((of_source, external_id))
            id_ = row.id if row else document_id(of_tenant, of_source, external_id)
            matches[of_source, external_id] = Named(id_, of_source, external_id, erased=False)
    if not matches:
        raise PenstockError(
            f"no document of tenant {of_tenant!r} has the id or external id {name!r}: `penstock why` also finds"
            " documents by a part of the name"
        )
    if len(matches) > 1:
        several = ", ".join(printable(f"{match.source}/{match.external_id} ({match.id})") for match in matches.values())
        raise PenstockError(f"{name!r} matches {len(matches)} documents; choose one with --source or its id: {several}")
    return next(iter(matches.values()))


def agreed(question: str, *, yes: bool, quiet: bool) -> bool:
    """Whether to go on. Without a terminal nobody can be asked: only --yes says so."""
    if yes:
        return True
    if quiet or not sys.stdin.isatty():
        stderr.print(f"{printable(question)} Nothing was changed; add --yes to do it.", markup=False, soft_wrap=True)
        return False
    return typer.confirm(printable(question), err=True)


def show_outcome(summary: Mapping[str, Any], json_output: bool) -> None:
    """Print what was done. Exits with 1 if nothing was."""
    if json_output:
        print_json(summary)
    elif summary.get("already_erased"):
        stderr.print("already erased", markup=False)
    elif summary["done"]:
        counts = ", ".join(f"{summary[key]} {key}" for key in ("documents", "principals") if key in summary)
        stderr.print(
            f"withdrawn: {counts}" if counts else "the withdrawal is undone: the source may publish the document again",
            markup=False,
        )
    if not summary["done"]:
        raise typer.Exit(1)
