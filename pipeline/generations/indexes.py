"""What stands in a generation's index. Apart from its table: a vectors worker does without Elasticsearch's client."""

from __future__ import annotations

from elasticsearch import AsyncElasticsearch

from pipeline.stores.elasticsearch import translated


async def index_exists(es: AsyncElasticsearch, index: str) -> bool:
    with translated(f"look for index {index}"):
        return bool(await es.indices.exists(index=index))


async def holds_entries(es: AsyncElasticsearch, index: str) -> bool:
    with translated(f"look into index {index}"):
        return bool((await es.count(index=index, ignore_unavailable=True, allow_no_indices=True))["count"])
