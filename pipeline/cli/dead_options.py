"""What the commands of ``penstock dead`` share: which letters are meant, and the ledger that lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.moment import past_moment

if TYPE_CHECKING:
    from pipeline.settings import Settings
    from pipeline.stores.postgres import Connection

Stage = Annotated[str | None, typer.Option("--stage", help="detect, identities, conversations, vectors or keywords.")]
Code = Annotated[str | None, typer.Option("--code", help="Why it is dead, e.g. invalid.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Whose documents. Default: all.")]
Source = Annotated[str | None, typer.Option("--source", help="Which source. Default: all.")]
Since = Annotated[
    datetime | None,
    typer.Option("--since", metavar="TIME", parser=past_moment, help="Failed since: 30m, 2h, 7d, 2026-11-20T08:00."),
]


@asynccontextmanager
async def ledger(settings: Settings) -> AsyncIterator[Connection]:
    from pipeline.stores.postgres import open_pool, translated

    async with open_pool(settings.postgres) as pool:
        with translated("dead letters"):
            async with pool.connection() as connection:
                yield connection
