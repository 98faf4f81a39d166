"""The loop of the analysis worker on real Kafka: every message reaches every task, whatever one of them does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from prometheus_client import generate_latest

from pipeline.analysis import worker
from pipeline.analysis.worker import Loop
from pipeline.core.errors import Retryable
from pipeline.kafka.client import deliver
from pipeline.observability.metrics import Metrics
from tests.support.connectors.runner_kit import Bench
from topics.messages import DocumentIndexed, Message
from topics.registry import DOCUMENTS_INDEXED, Topic

pytestmark = pytest.mark.stack


@dataclass
class Seen:
    """A task that remembers the external ids of a tenant, and fails as often as it is said."""

    tenant: str
    name: str = field(default_factory=lambda: f"task{uuid4().hex[:8]}")
    topics: Sequence[Topic] = (DOCUMENTS_INDEXED,)
    failures: int = 0
    seen: list[str] = field(default_factory=list)

    async def handle(self, messages: Sequence[Message]) -> None:
        announced = [m for m in messages if isinstance(m, DocumentIndexed) and m.tenant == self.tenant]
        mine = [str(UUID(m.document_id)) and m.external_id for m in announced]
        if mine and self.failures:
            self.failures -= 1
            raise Retryable("the database is away", service="postgres")
        self.seen += mine

    async def until(self, *external_ids: str) -> None:
        async with asyncio.timeout(60):
            while self.seen[-len(external_ids) :] != list(external_ids):
                await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(worker, "POLL_MS", 50)


@asynccontextmanager
async def running(bench: Bench, task: Seen, metrics: Metrics | None = None) -> AsyncIterator[Loop]:
    loop = Loop(task, bench.kafka, metrics or Metrics())
    running = asyncio.create_task(loop.run(), name=task.name)
    try:
        yield loop
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def announce(bench: Bench, *external_ids: str, document_id: str | None = None) -> None:
    await deliver(
        bench.producer.send(
            DOCUMENTS_INDEXED,
            DocumentIndexed(
                tenant=bench.tenant,
                source="wiki",
                external_id=external_id,
                observed_at=datetime.now(UTC),
                document_id=document_id or str(uuid4()),
                seq=1,
                state="searchable",
                generation="g1",
            ),
        )
        for external_id in external_ids
    )


async def test_a_restarted_task_goes_on_where_it_stopped(bench: Bench) -> None:
    task = Seen(bench.tenant)
    await announce(bench, "before")
    async with running(bench, task):
        await task.until("before")
        await announce(bench, "same", "same")
        await task.until("before", "same", "same")
    await announce(bench, "away")
    async with running(bench, task):
        await task.until("away")
    assert task.seen == ["before", "same", "same", "away"]


async def test_a_failing_task_repeats_its_messages_and_delays_no_other(bench: Bench) -> None:
    failing, other, metrics = Seen(bench.tenant, failures=3), Seen(bench.tenant), Metrics()
    async with running(bench, failing, metrics) as delayed, running(bench, other):
        await announce(bench, "page")
        await other.until("page")
        await failing.until("page")
        async with asyncio.timeout(10):
            while delayed.report()["waiting_for"] is not None:
                await asyncio.sleep(0.02)
    assert (
        f'penstock_analysis_failures_total{{task="{failing.name}"}} 3.0' in generate_latest(metrics.registry).decode()
    )


async def test_a_delayed_task_says_why_and_shows_its_backlog(bench: Bench) -> None:
    task, metrics = Seen(bench.tenant, failures=10_000), Metrics()
    await announce(bench, *(["page"] * 5))
    async with running(bench, task, metrics) as loop, asyncio.timeout(60):
        while (report := loop.report())["waiting_for"] != "postgres":
            await asyncio.sleep(0.02)
        assert report["reason"] == "the database is away"
        task.failures = 0
        await task.until(*(["page"] * 5))
        while f'penstock_analysis_backlog_messages{{task="{task.name}"}} 0.0' not in (
            generate_latest(metrics.registry).decode()
        ):
            await asyncio.sleep(0.02)


async def test_an_unreadable_record_is_passed_over(bench: Bench) -> None:
    task = Seen(bench.tenant)
    await bench.producer.send_raw(DOCUMENTS_INDEXED, b"key", b"{", [])
    await announce(bench, "page")
    async with running(bench, task):
        await task.until("page")


async def test_a_message_that_no_task_can_compute_with_is_passed_over_and_no_other(bench: Bench) -> None:
    task, metrics = Seen(bench.tenant), Metrics()
    await announce(bench, "same")
    await announce(bench, "same", document_id="hostile")
    await announce(bench, "same")
    async with running(bench, task, metrics):
        await task.until("same", "same")
        await announce(bench, "next")
        await task.until("next")
    assert task.seen == ["same", "same", "next"]
    assert f'penstock_analysis_failures_total{{task="{task.name}"}} 1.0' in generate_latest(metrics.registry).decode()
