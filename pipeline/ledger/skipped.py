"""Skipped documents: those that cannot be published as they are, such as a file that is damaged, too large or not
readable. `penstock ingest` and the connectors record them in their own table; this module reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.errors import InsufficientPrivilege

from pipeline.stores.postgres import Connection

MOST_COUNTED = 10_000
"""Documents are counted up to this number."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A document that was not published, and why."""

    tenant: str
    source: str
    external_id: str
    code: str
    message: str
    seen_at: datetime
    """When its row was last written: when it was last read, or last listed with another access set."""
    older: bool
    """Whether an earlier revision was published and is still searchable."""


async def page(
    connection: Connection,
    *,
    tenant: str | None = None,
    source: str | None = None,
    code: str | None = None,
    limit: int = 50,
) -> tuple[Sequence[Skipped], int]:
    """The first ``limit`` matching documents by name, and the number of all matching ones (at most MOST_COUNTED).
    Returns nothing for a database role that may not read the connectors' table."""
    chosen = (
        "problem_code IS NOT NULL AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)"
        " AND (%(source)s::text IS NULL OR source = %(source)s) AND (%(code)s::text IS NULL OR problem_code = %(code)s)"
    )
    values = {"tenant": tenant, "source": source, "code": code, "limit": limit, "most": MOST_COUNTED}
    try:
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT tenant, source, external_id, problem_code, coalesce(problem_message, ''), swept_at,"  # noqa: S608 — literals of this function
                f" version IS NOT NULL AND NOT gone FROM connector_items WHERE {chosen}"
                " ORDER BY tenant, source, external_id LIMIT %(limit)s".encode(),
                values,
            )
            skipped = [Skipped(*row) for row in await cursor.fetchall()]
            cursor = await connection.execute(
                f"SELECT count(*) FROM (SELECT FROM connector_items WHERE {chosen} LIMIT %(most)s) few".encode(),  # noqa: S608 — literals of this function
                values,
            )
            [total] = await cursor.fetchone() or (0,)
    except InsufficientPrivilege:
        return [], 0
    return skipped, int(total)


async def by_source(connection: Connection) -> list[dict[str, Any]] | None:
    """{source, code, documents}: the numbers of skipped documents, the highest first; at most MOST_COUNTED are counted.
    None: this database role may not read the table."""
    try:
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT source, problem_code, count(*) FROM (SELECT source, problem_code FROM connector_items"
                " WHERE problem_code IS NOT NULL LIMIT %s) few GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2",
                [MOST_COUNTED],
            )
            rows = await cursor.fetchall()
    except InsufficientPrivilege:
        return None
    return [{"source": source, "code": code, "documents": documents} for source, code, documents in rows]
