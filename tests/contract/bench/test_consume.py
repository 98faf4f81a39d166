"""The comparison of faust with aiokafka alone, on a real broker: both read everything and commit it."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from bench.consume import PARTITIONS, TOPIC, WAYS, fill
from deploy.local.stack import Stack
from pipeline.kafka.stopping import stop_consumer
from tests.support.space import PROJECT

RECORDS = 400

pytestmark = [pytest.mark.stack, pytest.mark.slow]


async def committed(bootstrap: str, group: str) -> int:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False)
    await consumer.start()
    try:
        return sum([await consumer.committed(TopicPartition(TOPIC, n)) or 0 for n in range(PARTITIONS)])
    finally:
        await stop_consumer(consumer)


async def test_both_ways_of_consuming_read_and_commit_every_record(stack: Stack) -> None:
    bootstrap = stack.endpoints()["kafka"]["bootstrap"]
    await fill(bootstrap, RECORDS)
    for way in WAYS:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.consume", "--records", str(RECORDS), "--one", way, bootstrap, way),
            cwd=PROJECT,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 120)
        assert json.loads(out)["read_s"] >= 0
        group = f"penstock-{way}" if way == "faust" else way
        assert await committed(bootstrap, group) == RECORDS, way
