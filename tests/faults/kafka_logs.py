"""Faults of Kafka's topics while workers run: recreation, loss of the newest records, and more partitions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)

from deploy.local.service import Place
from pipeline.kafka.admin import TopicsNotReady, ensure_topics
from tests.faults import tally
from tests.faults.world import World
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, INDEX_BACKFILL, INDEX_LIVE

LOSING = (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, INDEX_LIVE, INDEX_BACKFILL)


async def recreate_topic(world: World, rng: Random) -> None:
    """Delete a topic with all its records, and create it again."""
    topic = rng.choice(LOSING)
    name = f"{world.space.settings.kafka.topic_prefix}{topic.name}"
    partitions = await _partitions(world, name)

    async def delete(admin: Any) -> None:
        _require(await admin.delete_topics([name]), but=UnknownTopicOrPartitionError)
        while name in await admin.list_topics():
            await asyncio.sleep(0.1)

    async def make(admin: Any) -> None:
        again = NewTopic(name, partitions, 1, topic_configs=topic.configs(replication=1))
        _require(await admin.create_topics([again]), but=TopicAlreadyExistsError)
        while name not in await admin.list_topics():
            await asyncio.sleep(0.1)

    await _retry_while_unavailable(world, delete)
    tally.FAULTS[f"topic {topic.name} made anew"] += 1
    await asyncio.sleep(rng.random() * 2)
    await _retry_while_unavailable(world, make)
    await world.publish_again()


NOTICED_SECONDS = 12.0
"""A loss is not detected if the log has grown again within five seconds (ADR 36)."""
COMPARED_SECONDS = 40.0
"""A worker compares its position with the log every 30 seconds; until then its offsets may look committed."""


async def lose_the_tail(world: World, rng: Random) -> None:
    """Restart the broker with a topic's data of some seconds ago, so that acknowledged records are gone. Publishers
    send theirs again."""
    topic = rng.choice((DOCUMENTS_LIVE, INDEX_LIVE))
    name = f"{world.space.settings.kafka.topic_prefix}{topic.name}"
    partitions = await _partitions(world, name)
    folders = [Place(world.stack.home, "kafka").data / f"{name}-{n}" for n in range(partitions)]
    async with world.server_locks["kafka"]:
        before = {path: path.stat().st_size for folder in folders for path in folder.glob("*.log")}
        await asyncio.sleep(2 + rng.random() * 4)
        await asyncio.to_thread(world.stack.kill, "kafka")
        lost = sum(_cut_back(folder, before) for folder in folders)
        await asyncio.to_thread(world.stack.start, "kafka")
    tally.FAULTS[f"topic {topic.name} lost its newest records" if lost else "kill of the server kafka"] += 1
    await asyncio.sleep(NOTICED_SECONDS)
    await world.publish_again()
    await asyncio.sleep(COMPARED_SECONDS)


def _cut_back(folder: Path, before: Mapping[Path, int]) -> int:
    """Truncate the logs to their former sizes; Kafka rebuilds their indexes. Returns how many bytes are lost."""
    lost = 0
    for path in folder.glob("*.log"):
        lost += path.stat().st_size - before.get(path, 0)
        if path in before:
            os.truncate(path, before[path])
        else:
            path.unlink()
    for path in (*folder.glob("*index"), *folder.glob("*.snapshot")):
        path.unlink()
    return lost


async def more_partitions(world: World, rng: Random) -> None:
    """Add one or two partitions to the topics that workers share, as an operator does, so that keys move to others."""
    kafka = world.space.settings.kafka
    partitions = await _partitions(world, f"{kafka.topic_prefix}{DOCUMENTS_LIVE.name}") + rng.randint(1, 2)
    for left in reversed(range(20)):
        try:
            await ensure_topics(kafka.bootstrap, prefix=kafka.topic_prefix, partitions=partitions)
            break
        except TopicsNotReady:
            if not left:
                raise
            await asyncio.sleep(1)
    tally.FAULTS["the topics of the stages get more partitions"] += 1


async def _partitions(world: World, name: str) -> int:
    counts: list[int] = []

    async def count(admin: Any) -> None:
        counts.append(await _count(admin, name))

    await _retry_while_unavailable(world, count)
    return counts[-1]


async def _count(admin: Any, name: str) -> int:
    [count] = [len(topic["partitions"]) for topic in await admin.describe_topics(None) if topic["topic"] == name]
    return count


def _require(answer: Any, but: type[KafkaError] | None = None) -> None:
    """Raise the error of a response, unless it is ``but``, which means that the request was already executed."""
    for error in getattr(answer, "topic_errors", None) or answer.topic_error_codes:
        kind = for_code(error[1])
        if error[1] and kind is not but:
            raise kind(f"{error[0]}")


@asynccontextmanager
async def _admin(world: World) -> AsyncIterator[Any]:
    admin = AIOKafkaAdminClient(bootstrap_servers=world.space.settings.kafka.bootstrap)
    try:
        await admin.start()
        yield admin
    finally:
        await admin.close()


async def _retry_while_unavailable(world: World, action: Callable[[Any], Awaitable[None]]) -> None:
    """Call ``action``; try again for two minutes while Kafka is unavailable. Raises its last error."""
    for left in reversed(range(120)):
        try:
            async with asyncio.timeout(30), _admin(world) as admin:
                await action(admin)
            return
        except (KafkaError, KafkaConnectionError, OSError, ValueError):
            if not left:
                raise
            await asyncio.sleep(1)
