"""Measures the cost of faust over aiokafka alone: ``python -m bench.consume [--records N] [--rounds N]``.

Both read the same topic (8 partitions, records of 1 KB) as groups of their own, in processes of their own and in turns.
The work for each record is the same: it is tracked in ``Progress``, finished at once, and the done prefix is committed
every second. faust has the settings of the workers (``pipeline.stream.consume``), without lanes and the log guard,
which would be the same with either. Reported are ratios of medians, because the machine has other work, too.

Processor seconds are those of the reading process from its first record to its last; ``join`` is the time from the
start of the consumer to its first record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from deploy.local.stack import Stack
from pipeline.core.progress import Progress
from pipeline.kafka.stopping import stop_consumer
from pipeline.runtime.settings import KafkaSettings, StreamSettings
from pipeline.stream import consume

TOPIC, PARTITIONS, RECORD_BYTES = "bench.consume.v1", 8, 1_000
COMMIT_SECONDS = 1.0
WAYS = ("faust", "aiokafka")


@dataclass
class Meter:
    """Counts records from the first to the last one that is expected."""

    expected: int
    started: float = 0.0
    first: float = 0.0
    processor: float = 0.0
    count: int = 0
    result: dict[str, float] | None = None

    def read(self) -> bool:
        """Count one record; True for the last."""
        if not self.count:
            self.first, self.processor = time.perf_counter(), _processor_seconds()
        self.count += 1
        if self.count == self.expected:
            self.result = {
                "join_s": self.first - self.started,
                "read_s": time.perf_counter() - self.first,
                "processor_s": _processor_seconds() - self.processor,
                "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        return self.count >= self.expected


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def by_aiokafka(bootstrap: str, group: str, meter: Meter) -> None:
    progress: Progress[TopicPartition] = Progress()
    consumer = AIOKafkaConsumer(
        TOPIC,
        bootstrap_servers=bootstrap,
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        heartbeat_interval_ms=1_000,
        max_poll_records=consume.POLL_RECORDS * PARTITIONS,
    )
    await consumer.start()
    opened: set[TopicPartition] = set()
    done: dict[TopicPartition, int] = {}
    due = time.monotonic() + COMMIT_SECONDS
    try:
        while True:
            for tp, records in (await consumer.getmany(timeout_ms=200)).items():
                if tp not in opened:
                    progress.open([tp])
                    opened.add(tp)
                for record in records:
                    token = progress.arrived(tp, record.offset)
                    assert token is not None
                    progress.finished(tp, token)
                    done[tp] = record.offset + 1
                    if meter.read():
                        await consumer.commit(done)
                        return
            if time.monotonic() >= due and done:
                await consumer.commit(done)
                due = time.monotonic() + COMMIT_SECONDS
    finally:
        await stop_consumer(consumer)


async def by_faust(bootstrap: str, group: str, meter: Meter) -> None:
    topic = SimpleNamespace(name=TOPIC, partitions=PARTITIONS)
    stage: Any = SimpleNamespace(name=group, topics={"live": topic})
    options = consume._options(KafkaSettings(bootstrap=bootstrap), StreamSettings(), stage)
    app: Any = import_module("faust").App(**options)
    app.finalize()
    progress: Progress[Any] = Progress()
    ended = asyncio.Event()

    base: Any = import_module("faust.transport.drivers.aiokafka").Consumer

    class Consumer(base):
        async def on_partitions_assigned(self, assigned: Any, generation_id: int = 0) -> None:
            progress.open(assigned)
            await super().on_partitions_assigned(assigned, generation_id)

        def _new_offset(self, tp: Any) -> int | None:
            return progress.committable(tp)

    app.transport.Consumer = Consumer

    @app.agent(app.topic(TOPIC), concurrency=1)
    async def read(stream: Any) -> None:
        async for event in stream.noack().events():
            token = progress.arrived(event.message.tp, event.message.offset)
            if token is None:
                continue
            progress.finished(event.message.tp, token)
            event.ack()
            if meter.read():
                ended.set()
                return

    await app.start()
    await ended.wait()
    await app.consumer.commit()
    await app.stop()


async def run(way: str, bootstrap: str, group: str, expected: int) -> dict[str, float]:
    meter = Meter(expected, started=time.perf_counter())
    await (by_faust if way == "faust" else by_aiokafka)(bootstrap, group, meter)
    assert meter.result is not None
    return meter.result


async def fill(bootstrap: str, records: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=50, compression_type="zstd")
    await producer.start()
    for number in range(records):
        await producer.send(TOPIC, bytes(RECORD_BYTES), partition=number % PARTITIONS)
    await producer.stop()


def ratios(runs: Sequence[tuple[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """By measure: both medians, and faust's over aiokafka's."""
    result = {}
    for measure in runs[0][1]:
        by_way = {way: median(run[measure] for name, run in runs if name == way) for way in WAYS}
        result[measure] = {**by_way, "ratio": by_way["faust"] / by_way["aiokafka"]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=3, metavar=("WAY", "BOOTSTRAP", "GROUP"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        way, bootstrap, group = arguments.one
        sys.stdout.write(json.dumps(asyncio.run(run(way, bootstrap, group, arguments.records))))
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        stack = Stack(Path(folder), die_with_parent=True)
        stack.up(services=("kafka",))
        try:
            bootstrap = stack.endpoints()["kafka"]["bootstrap"]
            asyncio.run(fill(bootstrap, arguments.records))
            runs = []
            for number in range(arguments.rounds):
                for way in WAYS if number % 2 else WAYS[::-1]:
                    command = [sys.executable, "-m", "bench.consume", "--records", str(arguments.records)]
                    done = subprocess.run(
                        [*command, "--one", way, bootstrap, f"{way}-{number}"],
                        stdout=subprocess.PIPE,
                        check=True,
                        timeout=300,
                    )
                    runs.append((way, json.loads(done.stdout)))
        finally:
            stack.down()
    print(f"{arguments.records:,} records of {RECORD_BYTES:,} bytes, {arguments.rounds} rounds: medians")
    for measure, values in ratios(runs).items():
        faust, alone = values["faust"], values["aiokafka"]
        print(f"{measure:12} faust {faust:8.2f}  aiokafka {alone:8.2f}  ratio {values['ratio']:.2f}")


if __name__ == "__main__":
    main()
