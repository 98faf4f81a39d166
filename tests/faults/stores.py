"""The database and the index of the state machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from deploy.local.stack import Stack
from pipeline.core.model import ChunkParams
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import Settings
from pipeline.stages.keywords import LateBulks
from pipeline.stores.elasticsearch import GC_DELETES
from pipeline.stores.keywords import Keywords
from tests.faults.worker_harness import Embeddings
from tests.support.query.library import Library

SMALL = ChunkParams(80, 32, 120)
"""Small chunks, so that each text has many."""


@dataclass
class Stores:
    library: Library
    embeddings: Embeddings
    tenant: str = ""
    """The tenant of the current scenario."""

    @property
    def settings(self) -> Settings:
        return self.library.settings

    @classmethod
    @asynccontextmanager
    async def create(cls, stack: Stack) -> AsyncIterator[Stores]:
        embeddings = Embeddings()
        async with Library.create(stack, embeddings, params=SMALL) as library:
            yield cls(library, embeddings)

    async def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        return await self.library.execute(statement, *parameters)

    async def entries(self) -> dict[UUID, dict[str, Any]]:
        """Return the entries that a search finds now, without a refresh."""
        es, index = self.library.es, self.library.generation.keyword_index
        page = await es.search(index=index, size=10_000, query={"term": {"tenant": self.tenant}})
        return {UUID(hit["_id"]): hit["_source"] for hit in page["hits"]["hits"]}

    async def refresh(self) -> None:
        await self.library.es.indices.refresh(index=self.library.generation.keyword_index)

    async def forget_deletes(self) -> None:
        """Let Elasticsearch forget its deletes, as after index.gc_deletes: it accepts older writes then."""
        es, index = self.library.es, self.library.generation.keyword_index
        await es.indices.put_settings(index=index, settings={"index.gc_deletes": "1ms"})
        await asyncio.sleep(0.5)  # its clock ticks every 200 ms
        await es.indices.refresh(index=index)
        await es.indices.put_settings(index=index, settings={"index.gc_deletes": GC_DELETES})

    async def check_open_bulks(self) -> int:
        """Check all open bulks, as if they were due. Returns how many entries were removed."""
        await self.query("UPDATE open_bulks SET next_at = now()")
        keywords = Keywords(self.library.es)
        return await LateBulks(self.library.pool, keywords, Metrics()).check_due()

    async def blockers(self) -> set[int]:
        """Return the backends for whose locks another one of this database waits."""
        rows = await self.query(
            "SELECT DISTINCT unnest(pg_blocking_pids(pid)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return {pid for (pid,) in rows}

    async def clear(self) -> None:
        """Empty the ledger and pgvector. The index keeps its entries, since the next scenario has another tenant."""
        table = self.library.generation.chunk_table
        await self.query(f"TRUNCATE documents, open_bulks, dead_letters, memberships, access_sets, {table} CASCADE")
