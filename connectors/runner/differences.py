"""What the comparison with the ledger remembers from one time to the next: ``connector_differences``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from connectors.runner.rows import Holder, require_lease
from pipeline.stores.postgres import Connection, Pool, translated

Key = tuple[Literal["document", "principal"], str]


@dataclass(frozen=True, slots=True)
class Remembered:
    """A document or principal that differed."""

    published: bytes
    """Digest of what had been published of it."""
    seen_at: datetime
    """When it was first seen to differ while that was published, by Postgres' clock."""
    repaired_at: datetime | None = None
    """When it was last marked to be published again."""


class Differences:
    """Of one instance. Law: a process that is killed at any moment leaves what an earlier comparison saw, and never the
    word that something was repaired that was not. Methods raise Retryable while Postgres is away; those that write
    raise LeaseLost."""

    def __init__(self, pool: Pool, holder: Holder) -> None:
        self._pool = pool
        self._holder = holder

    async def load(self) -> dict[Key, Remembered]:
        with translated("connector_differences"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "SELECT subject, name, published, seen_at, repaired_at FROM connector_differences"
                    " WHERE tenant = %s AND source = %s",
                    self._me,
                )
                return {
                    (subject, name): Remembered(bytes(published), seen_at, repaired_at)
                    async for subject, name, published, seen_at, repaired_at in cursor
                }

    async def save(self, found: Mapping[Key, Remembered], gone: Collection[Key]) -> None:
        """Write what was found, and forget what is gone."""
        columns = zip(*((*key, one.published, one.seen_at) for key, one in found.items()), strict=True)
        with translated("connector_differences"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self._holder)
                if found:
                    await connection.execute(
                        "INSERT INTO connector_differences AS mine (tenant, source, subject, name, published, seen_at)"
                        " SELECT %s, %s, * FROM unnest(%s::text[], %s::text[], %s::bytea[], %s::timestamptz[])"
                        " ON CONFLICT (tenant, source, subject, name) DO UPDATE SET"
                        " published = EXCLUDED.published, seen_at = EXCLUDED.seen_at",
                        [*self._me, *(list(column) for column in columns)],
                    )
                await self._of(connection, "DELETE FROM connector_differences mine", gone)

    async def repaired(self, keys: Collection[Key]) -> None:
        """These were marked to be published again."""
        with translated("connector_differences"):
            async with self._pool.connection() as connection:
                await require_lease(connection, self._holder)
                await self._of(
                    connection, "UPDATE connector_differences mine SET repaired_at = clock_timestamp()", keys
                )

    async def _of(self, connection: Connection, statement: str, keys: Collection[Key]) -> None:
        await connection.execute(
            f"{statement} {'USING' if statement.startswith('DELETE') else 'FROM'}"
            " unnest(%s::text[], %s::text[]) given (subject, name) WHERE mine.tenant = %s AND mine.source = %s"
            " AND mine.subject = given.subject AND mine.name = given.name".encode(),
            [[subject for subject, _ in keys], [name for _, name in keys], *self._me],
        )

    @property
    def _me(self) -> tuple[str, str]:
        return self._holder.tenant, self._holder.source
