"""The ids in a generation's chunk table, for stages that need no vectors and so no numpy."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from psycopg import sql

from pipeline.core.model import Generation
from pipeline.stores.postgres import Connection


async def present(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> dict[UUID, set[UUID]]:
    """The ids of the chunks that stand in the table, by document."""
    cursor = await connection.execute(
        sql.SQL("SELECT document_id, id FROM {} WHERE document_id = ANY(%s)").format(
            sql.Identifier(generation.chunk_table)
        ),
        [list(ids)],
    )
    present: dict[UUID, set[UUID]] = {}
    for document, chunk in await cursor.fetchall():
        present.setdefault(document, set()).add(chunk)
    return present
