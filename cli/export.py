"""``penstock export``: all data that is stored about a person."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import Json, print_json
from cli.recorded import recording

if TYPE_CHECKING:
    from pipeline.ledger.personal import Scope
    from pipeline.stores.postgres import Pool


def export(
    person: Annotated[str, typer.Argument(help="Name of the person, as in sources and tokens.", show_default=False)],
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant of the person.")] = "default",
    json_output: Json = False,
) -> None:
    """Print all data stored about a person as one JSON document on stdout: rows by table, without embeddings.

    Example: penstock export jane@acme.com --tenant acme > jane.json
    """

    async def run() -> dict[str, Any]:
        from pipeline.runtime.settings import load
        from pipeline.stores.postgres import open_pool

        await recording("export", tenant=tenant, person=person)
        async with open_pool(load().postgres) as pool:
            about = await person_rows(pool, tenant, person)
        at = datetime.now(UTC).isoformat()
        return {"person": person, "tenant": tenant, "at": at, "postgres": about}

    del json_output  # it is JSON in any case
    print_json(asyncio.run(run()))


async def person_scope(pool: Pool, tenant: str, name: str) -> Scope:
    """Return how the rows about a person are recognised: by the name, by its digests in feedback and in the trail, and
    by the answers that were shown in conversations of this person."""
    from pipeline.ledger.personal import Scope
    from pipeline.runtime.settings import load as load_pipeline
    from pipeline.stores.postgres import translated
    from pipeline.trail import keys_of
    from query.answers.review import author_digests_of_person
    from query.settings import load

    with translated("rows about a person"):
        async with pool.connection() as connection:
            answers = await (
                await connection.execute(
                    "SELECT DISTINCT answer_id FROM conversation_mentions WHERE tenant = %s AND member = %s"
                    " AND answer_id IS NOT NULL",
                    [tenant, name],
                )
            ).fetchall()
    givers = author_digests_of_person(load().feedback.secrets(), tenant, name)
    return Scope(
        tenant,
        person=name,
        givers=givers,
        answers=[answer for (answer,) in answers],
        concerned=keys_of(load_pipeline().trail_keys).names(name),
    )


async def person_rows(pool: Pool, tenant: str, name: str) -> dict[str, list[dict[str, Any]]]:
    """The rows about a person by table, as ``penstock export`` prints them."""
    from pipeline.ledger import personal
    from pipeline.stores.postgres import translated

    scope = await person_scope(pool, tenant, name)
    with translated("export"):
        async with pool.connection() as connection:
            return await personal.export(connection, scope)
