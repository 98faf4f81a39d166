"""Every process of a real pipeline as its own role of Postgres, from the source to the query."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from connectors.declared import VARIABLE
from connectors.fakes.notes import SECRET, TOKEN, NotesPlayground, NotesService, app
from pipeline.runtime.http_server import served
from tests.e2e.test_canary import metrics
from tests.support.deploy.roles_kit import define_roles, logins
from tests.support.space import Space

pytestmark = pytest.mark.stack


async def test_a_document_reaches_the_query_with_every_process_in_its_own_postgres_role(
    space: Space, tmp_path: Path
) -> None:
    admin = space.settings.postgres.dsn.get_secret_value()
    define_roles(admin)
    service = NotesService(page_size=3)
    declared = tmp_path / "connectors.toml"
    space.environment |= {"PENSTOCK_BOOK_TOKEN": TOKEN, "PENSTOCK_BOOK_SECRET": SECRET, VARIABLE: str(declared)}
    with logins(admin) as dsns:
        dsn = {role: {"PENSTOCK_POSTGRES_DSN": value} for role, value in dsns.items()}
        async with served(app(service)) as url:
            declared.write_text(f'[connector.book]\nkind = "examples.notes:Notes"\nurl = "{url}"\n')
            await NotesPlayground(service, url).write("numbat", "The numbat eats termites, and nothing else.")
            space.start("detect", "vectors", "keywords", env=dsn["penstock_worker"])
            space.start("analysis", env=dsn["penstock_analysis"])
            space.start("connectors", env=dsn["penstock_connectors"])
            space.environment |= dsn["penstock_query"]
            space.start("canary", env={**dsn["penstock_canaries"], "PENSTOCK_CANARY_EVERY_SECONDS": "1"})

            async def search_ids() -> list[str]:
                code, output = await space.penstock(
                    "search", "what do numbats eat", "--as", NotesPlayground.inside, "--json"
                )
                assert code == 0, output
                return [result["external_id"] for result in output["results"]]

            async with asyncio.timeout(60):
                while await search_ids() != ["numbat"]:
                    await asyncio.sleep(0.2)
            async with asyncio.timeout(
                60
            ):  # the canary was deleted at the end of its third round: nothing is refused it
                while not (await metrics(space, "canary")).get(
                    ("penstock_canary_withdrawn_seconds_count", "book", "delete")
                ):
                    await asyncio.sleep(0.2)
        logs = {name: space.log(name) for name in space.processes}
        space.stop_all()
    assert not [name for name, log in logs.items() if "permission denied" in log or "42501" in log]
