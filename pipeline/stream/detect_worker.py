"""The detect worker: writes documents, identities and conversations from their topics to the ledger; besides, it runs
the sweeper, the background audit, the vitals and retention."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Sequence
from functools import partial
from importlib import import_module
from typing import Any
from uuid import UUID

import structlog

from pipeline.conversations.record import Conversations
from pipeline.diagnosis.vitals import SINK_TOPICS, Vitals
from pipeline.embedding.tokens import byte_pairs
from pipeline.maintenance.retention import Retention
from pipeline.stages.detect import Detect
from pipeline.stages.hints import Sweeper
from pipeline.stages.identities import Identities
from pipeline.stages.manifests import build_manifest
from pipeline.stages.stage import Stage
from pipeline.stream.consume import Consumption
from pipeline.stream.parts import Parts

log = structlog.get_logger()


class DetectWorker:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._stages: list[Stage] = []

    async def stages(self) -> list[Stage]:
        parts, settings = self._parts, self._parts.settings
        detect = Detect(
            parts.pool,
            parts.producer,
            parts.dead,
            parts.announcer,
            parts.counters,
            parts.metrics,
            batch_size=parts.batch_size("detect"),
            grace_seconds=settings.stream.sweep_after_seconds,
            live_per_second=settings.stream.live_documents_per_second,
            admission=parts.admission,
        )
        conversations = Conversations(
            parts.pool,
            parts.dead,
            lambda texts: byte_pairs().count(texts),
            parts.metrics,
            settings.conversations,
            parts.admission,
        )
        self._stages = [detect, Identities(parts.pool, parts.dead, parts.admission), conversations]
        return self._stages

    def background(self, consuming: Sequence[Consumption]) -> list[Coroutine[Any, Any, BaseException]]:
        parts, stream = self._parts, self._parts.settings.stream
        sweeper = Sweeper(
            parts.pool,
            parts.producer,
            parts.announcer,
            parts.metrics,
            interval_seconds=stream.sweep_interval_seconds,
            again_in_seconds=stream.sweep_after_seconds * 2,
        )
        watched = {**{stage.name: stage.topics for stage in self._stages}, **SINK_TOPICS}
        vitals = Vitals(parts.pool, parts.settings.kafka, watched, parts.metrics, every_seconds=stream.vitals_seconds)
        retention = Retention(parts.pool, parts.metrics, parts.settings.retention)
        return [sweeper.run(), self._audit(), vitals.run(), retention.run()]

    async def _warm(self) -> None:
        """Chunk a text for each generation, so that the parsers and tokenizers are loaded (which takes half a second)
        before the first document arrives. A failure is only logged: the first document will meet it, and report it.
        """
        parts = self._parts
        try:
            for generation in (await parts.generations()).values():
                cut = partial(build_manifest, UUID(int=0), "A", "# A\n\nB.", "text/markdown", b"", generation)
                await asyncio.to_thread(cut, parts.counters(generation))
        except Exception as error:  # noqa: BLE001 # anything that loading a tokenizer or reading the ledger may raise
            log.warning("warmup_failed", error=type(error).__name__)

    async def _audit(self) -> BaseException:
        await self._warm()
        # In a thread, because it takes half a second: only the audit needs Elasticsearch's client in this worker.
        await asyncio.to_thread(import_module, "pipeline.audit.background")
        gc.freeze()
        from pipeline.audit.background import BackgroundAudit
        from pipeline.stores.elasticsearch import connect

        parts = self._parts
        es = connect(parts.settings.elasticsearch)
        parts.stack.push_async_callback(es.close)
        return await BackgroundAudit(parts.pool, es, parts.producer, parts.metrics, parts.settings.audit).run()
