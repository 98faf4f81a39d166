"""A worker process: one stage, its resources, its health port, and a stop that drains."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import structlog

from pipeline import tracing
from pipeline.audit.background import BackgroundAudit
from pipeline.conversations.embed import ConversationVectors
from pipeline.conversations.record import Conversations
from pipeline.core.errors import Misconfigured
from pipeline.core.model import CountTokens, Generation
from pipeline.embedding.choose import token_counter
from pipeline.embedding.tokens import byte_pairs
from pipeline.generations.models import Models
from pipeline.health import health
from pipeline.kafka import producer
from pipeline.ledger import generations
from pipeline.settings import Settings, dist
from pipeline.spending import Spending
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.detect import Detect
from pipeline.stages.graph import GraphKeeper
from pipeline.stages.identities import Identities
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Stage
from pipeline.stages.sweep import Sweeper
from pipeline.stages.vectors import VectorSink
from pipeline.stores.elasticsearch import connect
from pipeline.stores.keywords import Keywords
from pipeline.stores.postgres import Pool, open_pool, translated
from pipeline.stream.consume import Consumption
from pipeline.telemetry import Metrics
from pipeline.vitals import SINK_TOPICS, Vitals
from topics.producer import Producer

log = structlog.get_logger()

MODELS = "models"
"""Folder under dist() that holds converted models."""

BATCH_FACTOR = {"detect": 0.5, "vectors": 0.25, "keywords": 2.0}
"""Batches relative to settings.stream.batch_size: a vectors batch is embedded as a whole before anything is written."""


def _counter(generation: Generation) -> CountTokens:
    return token_counter(generation, dist() / MODELS)


@dataclass
class _Parts:
    """What the stages are built from."""

    settings: Settings
    pool: Pool
    producer: Producer
    metrics: Metrics
    stack: AsyncExitStack
    models: Models = field(init=False)
    """Of the vectors worker alone."""

    def __post_init__(self) -> None:
        self.counters: Callable[[Generation], CountTokens] = cache(_counter)
        self.dead = DeadLetters(
            self.pool, self.producer, self.metrics, per_minute=self.settings.stream.dead_letters_per_minute
        )
        self.announcer = Announcer(self.pool, self.producer, self.metrics)

    def batch_size(self, name: str) -> int:
        return max(1, round(self.settings.stream.batch_size * BATCH_FACTOR[name]))

    async def generations(self) -> dict[str, Generation]:
        with translated("generations"):
            async with self.pool.connection() as connection:
                return {g.name: g for g in await generations.writable(connection)}

    async def detect(self) -> list[Stage]:
        stage = Detect(
            self.pool, self.producer, self.dead, self.announcer, self.counters, self.metrics,
            batch_size=self.batch_size("detect"), grace_seconds=self.settings.stream.sweep_after_seconds,
        )  # fmt: skip
        conversations = Conversations(
            self.pool, self.dead, byte_pairs().count, self.metrics, self.settings.conversations
        )
        return [stage, Identities(self.pool, self.dead), conversations]

    async def vectors(self) -> list[Stage]:
        self.models = Models(self.pool, self.settings.embedding, self.metrics, dist() / MODELS)
        self.stack.push_async_callback(self.models.aclose)
        self.metrics.embedding_price = self.settings.embedding.price_per_million_tokens
        self.metrics.embedding_budget.set(self.settings.embedding.daily_budget)
        async with self.pool.connection() as connection:
            active = await generations.active(connection)
        await self.models.of(active)  # a wrong one refuses to start; another generation's is met when its work comes

        async def living() -> dict[str, Generation]:
            there = await self.generations()
            await self.models.keep(there.values())
            return there

        stage = VectorSink(
            self.pool, self.models, living, Chunker(self.counters), self.announcer, self.dead, self.metrics,
            batch_size=self.batch_size("vectors"),
        )  # fmt: skip
        return [stage]

    async def keywords(self) -> list[Stage]:
        es = connect(self.settings.elasticsearch)
        store = Keywords(es)
        self.stack.push_async_callback(store.aclose)
        stage = KeywordSink(
            self.pool, store, self.generations, Chunker(self.counters), self.announcer, self.dead, self.metrics,
            batch_size=self.batch_size("keywords"),
        )  # fmt: skip
        return [stage]

    def sweeper(self) -> Sweeper:
        stream = self.settings.stream
        return Sweeper(
            self.pool, self.producer, self.announcer, self.metrics,
            interval_seconds=stream.sweep_interval_seconds, again_in_seconds=stream.sweep_after_seconds * 2,
        )  # fmt: skip

    def conversations(self, documents: Consumption) -> ConversationVectors:
        """documents: whose work goes first."""
        return ConversationVectors(
            self.pool, self.models, self.metrics, self.settings.conversations,
            busy=lambda: bool(documents.report()["in_flight"]),
        )  # fmt: skip

    def graphs(self) -> GraphKeeper:
        return GraphKeeper(self.settings.postgres, self.generations, self.metrics)

    def audit(self) -> BackgroundAudit:
        es = connect(self.settings.elasticsearch)
        self.stack.push_async_callback(es.close)
        return BackgroundAudit(self.pool, es, self.producer, self.metrics, self.settings.audit)


WORKERS = ("detect", "vectors", "keywords")
STOP_SECONDS = 28.0
"""From the signal to the end, at most: Kubernetes kills after 30. A library that waits for Kafka to come back would
hold the process for minutes; what is not drained by then is left to the next worker, as after any kill."""


async def run(name: str, settings: Settings) -> None:
    """Run one worker until SIGTERM or SIGINT. Raises Misconfigured at once when nothing could work, and whatever faust
    crashed with (the supervisor starts the process anew)."""
    if name not in WORKERS:
        raise Misconfigured(f"no worker is called {name!r}: choose one of {', '.join(WORKERS)}")
    stop = asyncio.Event()
    deadline = threading.Timer(STOP_SECONDS, _end_anyway, [name])
    deadline.daemon = True

    def told_to_stop() -> None:
        if not stop.is_set():
            stop.set()
            deadline.start()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop)
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.running(name))
        consuming: list[Consumption] = []
        await stack.enter_async_context(
            health(
                settings.stream, metrics, lambda: bool(consuming) and all(c.ready for c in consuming),
                lambda: {"stages": [c.report() for c in consuming]},
            )
        )  # fmt: skip
        pool = await stack.enter_async_context(open_pool(settings.postgres))
        parts = _Parts(settings, pool, await stack.enter_async_context(producer(settings.kafka)), metrics, stack)
        stages: list[Stage] = await getattr(parts, name)()
        for stage in stages:
            consumption = Consumption(stage, kafka=settings.kafka, stream=settings.stream, metrics=metrics)
            await stack.enter_async_context(consumption.running())
            consuming.append(consumption)
        ending = [c.crashed() for c in consuming]
        if name == "detect":
            watched = {**{stage.name: stage.topics for stage in stages}, **SINK_TOPICS}
            vitals = Vitals(pool, settings.kafka, watched, metrics, every_seconds=settings.stream.vitals_seconds)
            ending += [parts.sweeper().run(), parts.audit().run(), vitals.run()]
        if name == "vectors":
            spending = Spending(pool, metrics)
            stack.push_async_callback(spending.note)  # what the drained batches cost
            ending += [parts.conversations(consuming[0]).run(), parts.graphs().run(), spending.run()]
        log.info("worker_started", worker=name)
        await _until_stopped(stop, ending)
        log.info("worker_draining", worker=name)
        await asyncio.gather(*(c.drain() for c in consuming))
    deadline.cancel()
    log.info("worker_stopped", worker=name)


def _end_anyway(name: str) -> None:
    log.error("worker_stop_overdue", worker=name, after_seconds=STOP_SECONDS)
    sys.stderr.flush()
    os._exit(1)


async def _until_stopped(stop: asyncio.Event, endings: list[Coroutine[Any, Any, BaseException]]) -> None:
    """Wait for the signal to stop. Raises when anything that should run for ever ends before that."""
    stopping = asyncio.create_task(stop.wait())
    running = [asyncio.create_task(ending) for ending in endings]
    done, pending = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        if task is not stopping:
            raise RuntimeError("a part of the worker gave up") from task.result()  # type: ignore[misc]  # an exception
