"""The connection of commands that need Postgres alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.stores.postgres import Connection


@asynccontextmanager
async def ledger(subject: str) -> AsyncIterator[Connection]:
    """Yield a connection to the ledger. subject: what its errors are about. Raises Retryable, Misconfigured."""
    from pipeline.runtime.settings import load
    from pipeline.stores.postgres import open_pool, translated

    async with open_pool(load().postgres) as pool:
        with translated(subject):
            async with pool.connection() as connection:
                yield connection
