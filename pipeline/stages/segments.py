"""Merging the segments of keyword indexes while little is written to them (docs/adr/0120-few-segments.md)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import structlog
from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.model import Generation
from pipeline.stores.elasticsearch import translated

log = structlog.get_logger()

INTERVAL_SECONDS = 30.0
"""Pause between two looks at the indexes."""
MAX_WRITES_A_SECOND = 30.0
"""With more writes and deletes than these, an index is not merged: that would compete with a load, or with many edits,
whose segments are merged by Elasticsearch itself."""
PAUSE_SECONDS = 600.0
"""The least time between two merges of an index, so that steady small changes rewrite little."""
MERGE_SECONDS = 600.0
"""How long a merge is waited for. Elasticsearch continues it when nobody waits any more."""
FEW_SEGMENTS, SEGMENT_BYTES = 5, 2 * 2**30
"""A shard is merged into so many segments, and one more for each so many bytes."""
MANY = 2
"""A shard with more than this many times its few segments is merged."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of an index, as Elasticsearch reports them."""

    shards: int
    """Primary shards that have started."""
    count: int
    """The segments of all primary shards."""
    size: int
    """The bytes of all primary shards."""
    writes: int
    """Operations since the shards were started."""
    merging: bool

    @property
    def few(self) -> int:
        """How many segments a shard should have."""
        return FEW_SEGMENTS + self.size // max(1, self.shards) // SEGMENT_BYTES

    @property
    def are_many(self) -> bool:
        return self.count > MANY * self.few * self.shards


class SegmentMerger:
    """Merges the small segments of an index that has many, once little is written to it. It runs in every keywords
    worker; a second request finds nothing to merge.

    A search looks up each of its words in each segment. After a load or many edits an index has dozens, and nothing
    merges them before the next write. Indexes with vectors are left alone: merging rebuilds their graphs, and how many
    candidates a search has depends on their segments (docs/adr/0095-vectors-in-elasticsearch.md).
    """

    def __init__(
        self,
        es: AsyncElasticsearch,
        generations: Callable[[], Awaitable[Mapping[str, Generation]]],
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
        max_writes_a_second: float = MAX_WRITES_A_SECOND,
    ) -> None:
        self._es = es
        self._generations = generations
        self._interval = interval_seconds
        self._pause = pause_seconds
        self._max_writes = max_writes_a_second
        self._seen: dict[str, tuple[float, int]] = {}
        """By index: when it was last looked at, and its writes then."""
        self._merged: dict[str, float] = {}
        """By index: when a merge was last requested."""

    async def run(self) -> BaseException:
        """Look and merge until cancelled. A look that fails is followed by the next."""
        while True:
            # First, because Elasticsearch may have begun to start together with this worker.
            await asyncio.sleep(self._interval)
            try:
                await self.look()
            except PenstockError as error:
                log.warning("segments_not_merged", reason=str(error)[:200])

    async def look(self) -> list[str]:
        """Merge where that is due. Returns these indexes. Raises Retryable or Misconfigured when the ledger
        cannot be read; an index that cannot be merged keeps no other from it."""
        generations = (await self._generations()).values()
        started = []
        for index in (g.keyword_index for g in generations if g.vectors != "elasticsearch"):
            try:
                if await self._merge_if_due(index):
                    started.append(index)
            except PenstockError as error:
                log.warning("segments_not_merged", index=index, reason=str(error)[:200])
        return started

    async def _merge_if_due(self, index: str) -> bool:
        with translated(f"merge segments of {index}"):
            segments = await read_segments(self._es, index)
            if not self._is_due(index, segments):
                return False
            self._merged[index] = monotonic()
            log.info("segments_merging", index=index, segments=segments.count, bytes=segments.size)
            # Not wait_for_completion=false: Elasticsearch would keep a document about it for ever.
            es = self._es.options(request_timeout=MERGE_SECONDS)
            await es.indices.forcemerge(index=index, max_num_segments=segments.few)
        return True

    def _is_due(self, index: str, segments: Segments) -> bool:
        now = monotonic()
        before = self._seen.get(index)
        self._seen[index] = now, segments.writes
        if before is None or segments.merging or not segments.are_many:
            return False
        at, writes = before
        is_quiet = 0 <= segments.writes - writes <= self._max_writes * (now - at)
        return is_quiet and now - self._merged.get(index, -math.inf) >= self._pause


async def read_segments(es: AsyncElasticsearch, index: str) -> Segments:
    """One request, which needs the index privilege ``monitor``. The caller translates errors. Raises Retryable when
    none of its shards is there."""
    answer = await es.indices.stats(
        index=index,
        metric=["indexing", "merge", "segments", "store"],
        level="shards",
        filter_path=["indices.*.primaries", "indices.*.shards.*.routing.primary"],
    )
    stats: Mapping[str, Any] = next(iter(answer.get("indices", {}).values()), {})
    if not (primaries := stats.get("primaries")):  # also where replicas alone have answered
        raise Retryable(f"look at index {index}: its shards have not started", service="elasticsearch")
    return Segments(
        shards=sum(any(copy["routing"]["primary"] for copy in copies) for copies in stats.get("shards", {}).values()),
        count=primaries["segments"]["count"],
        size=primaries["store"]["size_in_bytes"],
        writes=primaries["indexing"]["index_total"] + primaries["indexing"]["delete_total"],
        merging=primaries["merges"]["current"] > 0,
    )
