"""A worker that only records, durably, what it was given: ``python -m tests.support.pipeline.recording_worker``.

Prints ``ready`` when it has its partitions. The consuming module is the real one; the stage is slow now and then, and
one of the steps in which faust takes partitions over can be made slow too, as on a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from pipeline.core.errors import Retryable
from pipeline.core.model import Lane
from pipeline.observability.metrics import Metrics, configure_logging
from pipeline.runtime.settings import load
from pipeline.stages.stage import FinalStage, Incoming
from pipeline.stores.postgres import open_pool
from pipeline.stream.consume import Consumption
from topics.registry import INDEX_BACKFILL, INDEX_LIVE, Topic

SLOW_SIGNAL_SECONDS = 2.0


class WritesDown(FinalStage):
    name = "writes-down"
    topics: dict[Lane, Topic] = {"live": INDEX_LIVE, "backfill": INDEX_BACKFILL}  # noqa: RUF012
    batch_size = 8

    def __init__(self, log: Path, slow: float) -> None:
        self._file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._slow = slow

    async def handle(self, batch: Sequence[Incoming]) -> None:
        await asyncio.sleep(random.random() * self._slow)
        if random.random() < 0.02:
            raise Retryable("a hiccup", service="postgres")
        lines = "".join(f"{r.topic} {r.partition} {r.offset}\n" for r in batch)
        os.write(self._file, lines.encode())  # one append: whole, and there when this process is killed

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        raise AssertionError(f"nothing here is at fault: {record.offset} {error}")


async def main(log: Path, slow: float, slow_signal: str) -> None:
    settings = load()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def take(*_: object, **__: object) -> None:
        await asyncio.sleep(SLOW_SIGNAL_SECONDS)

    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(settings.postgres))
        consumption = Consumption(
            WritesDown(log, slow), kafka=settings.kafka, stream=settings.stream, metrics=Metrics(), pool=pool
        )
        if slow_signal:
            getattr(consumption.app, slow_signal).connect(take, weak=False)
        await stack.enter_async_context(consumption.running())
        crashed = asyncio.create_task(consumption.crashed())
        assigned = asyncio.create_task(consumption.assigned.wait())
        await asyncio.wait([crashed, assigned], return_when=asyncio.FIRST_COMPLETED)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([crashed, stopping], return_when=asyncio.FIRST_COMPLETED)
        if crashed.done():
            raise RuntimeError("gave up") from crashed.result()
        crashed.cancel()
        assigned.cancel()


if __name__ == "__main__":
    configure_logging()
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))
