"""``penstock metadata``: the keys of metadata that searches can filter by."""

from __future__ import annotations

import asyncio
from typing import Annotated
from uuid import UUID

import typer

from cli.extras import require
from cli.ledger import ledger
from cli.options import Tenant
from cli.output import Json, print_json, printable, stderr, stdout
from cli.recorded import record
from pipeline.core.errors import PenstockError
from pipeline.core.metadata_keys import KEY_TYPES, NAME, KeyType

metadata = typer.Typer(
    name="metadata",
    help="Keys of metadata that searches can filter by and count (docs/filters.md).",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="Key, as the sources write it: letters, digits, '_', '.' and '-'.")]


@metadata.command()
def declare(
    name: Name,
    kind: Annotated[str, typer.Option("--type", help=f"Type of its values: {', '.join(KEY_TYPES)}.")] = "keyword",
    tenant: Tenant = "default",
    json_output: Json = False,
) -> None:
    """Declare a key, or give it another type. Documents that are indexed already can be filtered by it when the
    keywords workers have written them again; nothing is embedded.

    A value that is not of this type is kept with its document and matches no filter. Repeating the command is harmless,
    and finishes a run that was interrupted.

    Example: penstock metadata declare priority --type number
    """
    from pipeline.ledger import metadata_keys

    of_type = _type(kind)
    if not NAME.fullmatch(name):
        raise typer.BadParameter("a key has letters, digits, '_', '.' and '-' only, at most 100")
    record("metadata.declare", tenant=tenant, object=f"key:{name}")

    async def change() -> int:
        async with ledger("metadata") as connection:
            await metadata_keys.declare(connection, tenant, name, of_type)
        return await _refill(tenant)

    changed = asyncio.run(change())
    if json_output:
        print_json({"tenant": tenant, "name": name, "type": of_type, "documents": changed})
    else:
        stdout.print(f"{name} is a {of_type}; {changed} documents have other values to filter by", markup=False)


@metadata.command()
def adopt(
    kind: Annotated[
        str, typer.Argument(help="Kind of source: confluence, jira, … or package.module:Class of your own.")
    ],
    tenant: Tenant = "default",
    json_output: Json = False,
) -> None:
    """Declare all keys that the documents of a kind of source have (docs/filters.md lists them). A key that is declared
    already keeps its type.

    Columns that the settings of a database or of Airbyte name are declared one by one: penstock metadata declare.

    Example: penstock metadata adopt jira --tenant acme
    """
    require("connectors")
    from connectors.declared import metadata_keys as keys_of
    from pipeline.ledger import metadata_keys

    keys = keys_of(kind)
    if not keys:
        raise PenstockError(f"{printable(kind)} has no keys of its own: run penstock metadata declare NAME")
    record("metadata.declare", tenant=tenant, object=f"kind:{kind}")

    async def change() -> tuple[list[str], int]:
        async with ledger("metadata") as connection:
            known = (await metadata_keys.declared(connection, [tenant])).get(tenant, {})
            new = [name for name in keys if name not in known]
            for name in new:
                await metadata_keys.declare(connection, tenant, name, keys[name])
        return new, await _refill(tenant)

    new, changed = asyncio.run(change())
    if json_output:
        print_json({"tenant": tenant, "kind": kind, "declared": new, "documents": changed})
        return
    for name in keys:
        stdout.print(f"{name}  {keys[name] if name in new else 'declared before'}", markup=False)
    stdout.print(f"{changed} documents have other values to filter by", markup=False)


@metadata.command()
def remove(name: Name, tenant: Tenant = "default", json_output: Json = False) -> None:
    """Undeclare a key: no search can filter by it any more. Its values stay with the documents.

    Example: penstock metadata remove priority
    """
    from pipeline.ledger import metadata_keys

    record("metadata.remove", tenant=tenant, object=f"key:{name}")

    async def change() -> int:
        async with ledger("metadata") as connection:
            if not await metadata_keys.remove(connection, tenant, name):
                raise PenstockError(f"{printable(name)} is no declared key of tenant {printable(tenant)}")
        return await _refill(tenant)

    changed = asyncio.run(change())
    if json_output:
        print_json({"tenant": tenant, "name": name, "documents": changed})
    else:
        stdout.print(f"{name} is not declared any more", markup=False)


@metadata.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Keys of this tenant only. Default: all.")] = None,
    json_output: Json = False,
) -> None:
    """List the declared keys.

    Example: penstock metadata list --tenant acme
    """
    from pipeline.ledger import metadata_keys

    async def read() -> list[metadata_keys.Key]:
        async with ledger("metadata") as connection:
            return await metadata_keys.list_keys(connection, tenant)

    keys = asyncio.run(read())
    if json_output:
        print_json(
            [
                {"tenant": k.tenant, "name": k.name, "type": k.type, "declared_at": k.declared_at.isoformat()}
                for k in keys
            ]
        )
        return
    for key in keys:
        stdout.print(f"{printable(key.tenant)}  {printable(key.name)}  {key.type}", markup=False, soft_wrap=True)
    if not keys:
        stderr.print("no key is declared: run penstock metadata declare NAME", markup=False, soft_wrap=True)


async def _refill(tenant: str) -> int:
    """Write the terms of all documents of a tenant anew; returns how many changed."""
    from cli.withdraw import wire
    from pipeline.ledger import metadata_keys
    from pipeline.ledger.documents import Identity
    from pipeline.stages.hints import send_hints
    from pipeline.stores.postgres import translated

    changed: set[UUID] = set()
    after: UUID | None = None
    async with wire() as (pool, producer):
        while True:
            with translated("metadata"):
                async with pool.connection() as connection:
                    page = await metadata_keys.refill(connection, tenant, after)
            changed |= {document.id for document in page.changed}
            await send_hints(
                producer,
                [(Identity(d.id, tenant, d.source, d.external_id), d.generation, "backfill") for d in page.changed],
            )
            if (after := page.last) is None:
                return len(changed)


def _type(text: str) -> KeyType:
    for kind in KEY_TYPES:
        if kind == text:
            return kind
    raise typer.BadParameter(f"--type is one of {', '.join(KEY_TYPES)}")
