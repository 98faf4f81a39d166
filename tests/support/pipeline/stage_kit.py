"""Shared parts of tests of stages: hints and events as records, and a stage at work in its lanes."""

from __future__ import annotations

from typing import Any

from pipeline.core.identity import document_id
from pipeline.observability.metrics import Metrics
from pipeline.stages.stage import Incoming
from pipeline.stream.lanes import Lanes
from tests.support.pipeline.build_kit import Event
from tests.support.space import now
from tests.support.waiting import until
from topics.codec import encode
from topics.messages import IndexHint


def hint(name: str, generation: str) -> Incoming:
    record = encode(
        IndexHint(
            tenant="acme",
            source="wiki",
            external_id=name,
            observed_at=now(),
            document_id=str(document_id("acme", "wiki", name)),
            generation=generation,
        )
    )
    return Incoming("index.live.v1", 0, 0, record.key, record.value, record.headers, "live")


def event(message: Event) -> Incoming:
    record = encode(message)
    return Incoming("documents.live.v1", 0, 0, record.key, record.value, record.headers, "live")


class Working:
    """A stage in its lanes: records go in, and say when they are done."""

    def __init__(self, stage: Any, *, lanes: int = 4) -> None:
        self.done: list[str] = []
        self.metrics = Metrics()
        self.lanes = Lanes(
            stage,
            count=lanes,
            queue_size=1000,
            batch_wait_seconds=0,
            backfill_share=0.1,
            metrics=self.metrics,
            on_done=lambda _record, name: self.done.append(str(name)),
        )

    async def __aenter__(self) -> Working:
        self.lanes.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.lanes.stop(within_seconds=10)

    @property
    def tries(self) -> float:
        value = [
            s.value for m in self.metrics.registry.collect() for s in m.samples if s.name.endswith("retries_total")
        ]
        return sum(value)

    until = staticmethod(until)
