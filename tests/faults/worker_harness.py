"""A worker whose awaits the test controls: it can be paused at any of them, resumed, or killed there.

The stages are the product's own and are called directly. A kill has the effects of SIGKILL: the sockets are closed
(what was sent before still arrives), nothing is cleaned up, and no line of the worker's code runs any more.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pipeline.core.errors import Retryable
from pipeline.core.model import Generation
from pipeline.embedding.choose import token_counter
from pipeline.embedding.port import Embedded, OneModel, Vectors
from pipeline.kafka.producer import DeliveryUnknown, KafkaUnavailable
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import Settings, dist
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Incoming, Stage
from pipeline.stages.vectors import VectorSink
from pipeline.stores.elasticsearch import connect
from pipeline.stores.keywords import Keywords
from pipeline.stores.postgres import Connection, Pool, open_pool
from pipeline.stores.refresh import Refresher
from tests.faults.await_steps import run_in_steps
from tests.faults.elasticsearch_proxy import ElasticsearchProxy, elasticsearch_proxy
from tests.faults.story import UNEMBEDDABLE
from tests.support.query.library import WordEmbedder
from topics.messages import AnyMessage

StageName = Literal["detect", "vectors", "keywords"]
Kafka = Literal["fine", "away", "unsure"]
"""away: refuses every record. unsure: stores the record, but the acknowledgement is lost."""
Model = Literal["fine", "down"]


class TrackedPool:
    """A worker's connection pool, which knows the sockets in use, so that they can be cut."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.used: set[Connection] = set()
        self.gone = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        if self.gone:
            await asyncio.Future()
        async with self.pool.connection() as connection:
            self.used.add(connection)
            try:
                yield connection
            finally:
                self.used.discard(connection)

    def cut(self) -> int:
        """Close the sockets in use, as the end of a process or a broken network does. Returns their number."""
        for connection in self.used:
            with suppress(OSError):
                cut = socket.socket(fileno=os.dup(connection.fileno()))
                cut.shutdown(socket.SHUT_RDWR)
                cut.close()
        return len(self.used)

    def backends(self) -> set[int]:
        return {c.info.backend_pid for c in self.used if not c.closed}


class Outbox:
    """Replaces the producer: delivered messages are collected in ``sent``, and keys of dead letters in
    ``dead_letter_keys``."""

    def __init__(self) -> None:
        self.sent: list[AnyMessage] = []
        self.dead_letter_keys: list[bytes | None] = []
        self.kafka: Kafka = "fine"
        self.gone = False

    async def send(self, _topic: object, message: AnyMessage) -> asyncio.Future[None]:
        await self._reach()
        self.sent.append(message)
        return self._delivered()

    async def send_raw(self, _topic: object, key: bytes | None, *_: object) -> asyncio.Future[None]:
        await self._reach()
        self.dead_letter_keys.append(key)
        return self._delivered()

    async def _reach(self) -> None:
        if self.gone:
            await asyncio.Future()
        await asyncio.sleep(0)
        if self.kafka == "away":
            raise KafkaUnavailable("Kafka is away")

    def _delivered(self) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.kafka == "unsure":
            done.set_exception(DeliveryUnknown("Kafka has not acknowledged"))
        else:
            done.set_result(None)
        return done


class Embeddings(WordEmbedder):
    """An embedding model whose vectors depend on the text alone. It refuses texts with UNEMBEDDABLE permanently."""

    def __init__(self) -> None:
        self.model_is: Model = "fine"

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        await asyncio.sleep(0)
        if self.model_is == "down":
            raise Retryable("the model is down", service="embedding")
        await asyncio.sleep(0)
        rows = np.array([self.vector(text) for text in texts], dtype=np.float32)
        return Embedded(rows, {n: "refused" for n, text in enumerate(texts) if UNEMBEDDABLE in text})

    def vector(self, text: str) -> Vectors:
        return self._vector(text)


@dataclass(eq=False)
class Operation:
    """One call of ``handle`` of one worker, in progress or completed."""

    records: Sequence[Incoming]
    at: Callable[[Operation, int], bool]
    """Called at each await with its number; returns whether to pause there."""
    task: asyncio.Task[None]
    steps: int = 0
    paused: asyncio.Future[None] | None = None
    is_paused: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False
    ended: bool = False

    def step(self, n: int) -> asyncio.Future[None] | None:
        if self.ended:
            return None
        if n > self.steps:
            self.steps = n
            if not self.killed and self.at(self, n):
                self.pause()
        return self.paused

    def pause(self) -> None:
        self.paused = asyncio.get_running_loop().create_future()
        self.is_paused.set()

    def resume(self) -> None:
        if self.paused is not None and not self.killed:
            paused, self.paused = self.paused, None
            self.is_paused.clear()
            paused.set_result(None)


@dataclass(eq=False)
class WorkerHarness:
    """One worker process of a stage, which handles one batch at a time."""

    name: StageName
    stage: Stage
    pool: TrackedPool
    outbox: Outbox
    es_proxy: ElasticsearchProxy
    embedder: Embeddings
    resources: AsyncExitStack
    op: Operation | None = None
    dead: list[Operation] = field(default_factory=list)

    @classmethod
    async def start(cls, name: StageName, settings: Settings, generation: Generation) -> WorkerHarness:
        resources = AsyncExitStack()
        pool: Any = TrackedPool(await resources.enter_async_context(open_pool(settings.postgres)))
        es_proxy = await resources.enter_async_context(elasticsearch_proxy(settings.elasticsearch.url))
        store = Keywords(connect(settings.elasticsearch.model_copy(update={"url": es_proxy.url})), retry_seconds=0.3)
        resources.push_async_callback(store.aclose)
        index = generation.keyword_index
        store._refreshers[index] = Refresher(store._es, index, interval_seconds=0.0)
        outbox, embedder, metrics = Outbox(), Embeddings(), Metrics()
        producer: Any = outbox

        def counters(generation: Generation) -> Any:
            return token_counter(generation, dist() / "models")

        async def known() -> dict[str, Generation]:
            return {generation.name: generation}

        announcer, chunker = Announcer(pool, producer, metrics), Chunker(counters)
        dead = DeadLetters(pool, producer, metrics)
        stage: Any
        match name:
            case "detect":
                stage = Detect(pool, producer, dead, announcer, counters, metrics, batch_size=8, grace_seconds=0)
            case "vectors":
                stage = VectorSink(
                    pool,
                    OneModel(embedder),  # type: ignore[arg-type]
                    known,
                    chunker,
                    announcer,
                    producer,
                    dead,
                    metrics,
                    batch_size=8,
                )
            case "keywords":
                stage = KeywordSink(pool, store, known, chunker, announcer, dead, metrics, batch_size=8)
        return cls(name, stage, pool, outbox, es_proxy, embedder, resources)

    def begin(self, records: Sequence[Incoming], at: Callable[[Operation, int], bool]) -> Operation:
        assert self.op is None

        async def work() -> None:
            await asyncio.sleep(0)
            await run_in_steps(self.stage.handle(records), op.step)  # type: ignore[arg-type]

        op = self.op = Operation(records, at, asyncio.create_task(work()))
        return op

    def kill(self) -> None:
        """Act as SIGKILL does: the sockets are closed, and the operation stays paused for ever."""
        self.pool.gone = self.outbox.gone = True
        self.pool.cut()
        if self.op:
            self.op.killed = True
            if self.op.paused is None:  # it waits for a response, which must never reach it
                self.op.pause()
            self.dead.append(self.op)
        self.op = None

    async def close(self) -> None:
        """Release all resources, also those of a killed worker."""
        if self.op:
            self.kill()
        for connection in self.pool.used:
            connection.pgconn.finish()  # else psycopg asks the server, for seconds, to cancel what it was doing
        for op in self.dead:
            op.ended = True
            op.paused = None
            for _ in range(30):  # repeatedly, because its cleanup may wait for a resource that is gone
                op.task.cancel()
                await asyncio.wait([op.task], timeout=1)
                if op.task.done():
                    break
            assert op.task.done(), "a killed worker's operation does not end"
            assert op.task.cancelled() or op.task.exception() or True  # retrieved
        with suppress(TimeoutError):
            await self.resources.aclose()
