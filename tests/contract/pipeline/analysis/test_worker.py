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

from pipeline.analysis import loop
from pipeline.analysis.loop import Loop
from pipeline.analysis.task import Task
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


class Endless:
    """A task that needs as long for the messages of one tenant as it is let, and no time for those of another."""

    topics: Sequence[Topic] = (DOCUMENTS_INDEXED,)

    def __init__(self, slow: str, quick: str = "") -> None:
        self.name = f"task{uuid4().hex[:8]}"
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self.calls = 0
        self.seen: list[str] = []
        self._slow, self._quick = slow, quick

    async def handle(self, messages: Sequence[Message]) -> None:
        announced = [m for m in messages if isinstance(m, DocumentIndexed)]
        if any(m.tenant == self._slow for m in announced):
            self.calls += 1
            self.begun.set()
            await self.goes_on.wait()
        self.seen += [m.external_id for m in announced if m.tenant in (self._slow, self._quick)]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(loop, "POLL_MS", 50)


@asynccontextmanager
async def running(bench: Bench, task: Task, metrics: Metrics | None = None) -> AsyncIterator[Loop]:
    consuming = Loop(task, bench.kafka, metrics or Metrics())
    running = asyncio.create_task(consuming.run(), name=task.name)
    try:
        yield consuming
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def announce(bench: Bench, *external_ids: str, document_id: str | None = None, tenant: str | None = None) -> None:
    await deliver(
        bench.producer.send(
            DOCUMENTS_INDEXED,
            DocumentIndexed(
                tenant=tenant or bench.tenant,
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
    async with running(bench, task, metrics) as delayed, asyncio.timeout(60):
        while (report := delayed.report())["waiting_for"] != "postgres":
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


async def test_a_tenant_whose_messages_take_long_delays_no_other_tenant(bench: Bench) -> None:
    """One long document, or one after the other, kept the events and comparisons of all tenants waiting for hours."""
    other = f"{bench.tenant}-other"
    task = Endless(bench.tenant, other)
    key = str(uuid4())
    await announce(bench, "long", document_id=key)
    async with running(bench, task):
        await asyncio.wait_for(task.begun.wait(), 60)
        await announce(bench, "behind it", document_id=key)
        await announce(bench, "another's", document_id=key, tenant=other)
        async with asyncio.timeout(30):
            while "another's" not in task.seen:
                await asyncio.sleep(0.02)
        assert task.seen == ["another's"]
        task.goes_on.set()
        async with asyncio.timeout(30):
            while len(task.seen) < 3:
                await asyncio.sleep(0.02)
    await announce(bench, "next", document_id=key)
    async with running(bench, task), asyncio.timeout(60):
        while "next" not in task.seen:
            await asyncio.sleep(0.02)
    assert task.seen == ["another's", "long", "behind it", "next"], "what was handled is committed"


@pytest.mark.slow
async def test_messages_that_take_longer_than_the_poll_interval_are_handled_by_one_process_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LATE_SECONDS", 2.0)
    task = Endless(bench.tenant)
    async with running(bench, task) as first, running(bench, task) as second:
        async with asyncio.timeout(60):
            while not (first.report()["ready"] and second.report()["ready"]):
                await asyncio.sleep(0.1)
        await announce(bench, "long")
        await asyncio.wait_for(task.begun.wait(), 60)
        await asyncio.sleep(10)  # heartbeats, which notice the silence, are three seconds apart
        assert task.calls == 1
        task.goes_on.set()
        await asyncio.sleep(1)
    assert (task.calls, task.seen) == (1, ["long"])
