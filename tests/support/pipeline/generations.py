"""A generation for tests without a database, and what a model adds to one that has a database."""

from __future__ import annotations

from typing import Any

from pipeline.core.model import ChunkParams, Generation
from pipeline.stores.postgres import Pool

_FIELDS: dict[str, Any] = {
    "name": "g1",
    "state": "active",
    "model": "words",
    "revision": "",
    "dimensions": 8,
    "input_window": 254,
    "params": ChunkParams(),
    "document_prefix": "",
    "query_prefix": "",
    "chunk_table": "chunks_g1",
    "keyword_index": "chunks-g1",
}


def generation(**differences: Any) -> Generation:
    return Generation(**{**_FIELDS, **differences})


async def record_centre(pool: Pool) -> None:
    """Record a centre of the first generation's sketches, as its model does when a worker starts."""
    async with pool.connection() as connection:
        await connection.execute("UPDATE generations SET centre = array_fill(0.02::real, ARRAY[dimensions])::vector")
