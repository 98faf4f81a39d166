"""The keywords worker: keeps Elasticsearch equal to the ledger."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from pipeline.audit.refill import IndexGuard
from pipeline.stages.keywords import KeywordSink, LateBulks
from pipeline.stages.manifests import Chunker
from pipeline.stages.segments import SegmentMerger
from pipeline.stages.stage import Stage
from pipeline.stores.elasticsearch import connect
from pipeline.stores.keywords import Keywords
from pipeline.stream.consume import Consumption
from pipeline.stream.parts import Parts


class KeywordsWorker:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._es = connect(parts.settings.elasticsearch)
        self._store = Keywords(self._es)
        parts.stack.push_async_callback(self._store.aclose)

    async def stages(self) -> list[Stage]:
        parts = self._parts
        stage = KeywordSink(
            parts.pool,
            self._store,
            parts.generations,
            Chunker(parts.counters),
            parts.announcer,
            parts.dead,
            parts.metrics,
            batch_size=parts.batch_size("keywords"),
        )
        return [stage]

    def background(self, consuming: Sequence[Consumption]) -> list[Coroutine[Any, Any, BaseException]]:
        parts = self._parts
        guard = IndexGuard(
            parts.pool,
            self._es,
            self._store,
            parts.producer,
            parts.metrics,
            repairs=parts.settings.audit.repair != "none",
        )
        late, merger = LateBulks(parts.pool, self._store, parts.metrics), SegmentMerger(self._es, parts.generations)
        return [late.run(), merger.run(), guard.run()]
