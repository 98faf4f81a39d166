"""Creates missing topics, adds partitions on request, and reports where topics differ from the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import InvalidPartitionsError, KafkaError, NoError, TopicAlreadyExistsError, for_code

from topics.registry import COPARTITIONED, TOPICS, Topic

LEADER_SECONDS = 30.0
REQUEST_TIMEOUT_MS = 30_000

SHARED = tuple(topic for pair in COPARTITIONED for topic in pair)
"""The topics whose partitions the workers of a stage share: their number is how many workers can work at once."""

Partitions = Sequence[Mapping[str, Any]]


class TopicsNotReady(Exception):
    """Kafka cannot be reached, or has not given every partition a leader in time. A later attempt may succeed."""


class TopicRefused(Exception):
    """Kafka refuses to let us create or read a topic: we lack the permission, or it has fewer brokers than replicas.
    The message is one line."""


async def ensure_topics(
    bootstrap: str,
    *,
    prefix: str = "",
    replication: int = 1,
    partitions: int | None = None,
    security: Mapping[str, object] | None = None,
) -> list[str]:
    """Make every topic of the registry exist. Returns one line for each topic that was created or got partitions, and
    for each difference that is left.

    partitions: the least number of partitions of the topics in COPARTITIONED, which may be added while workers run
    (ADR 97). Nothing else of an existing topic is changed: what differs is for the operator to decide. Repeats are
    harmless, and any number of processes may do it at once. Returns when every partition has a leader. Raises
    TopicsNotReady or TopicRefused.
    """
    desired = {
        f"{prefix}{topic.name}": replace(topic, partitions=partitions) if partitions and topic in SHARED else topic
        for topic in TOPICS
    }
    admin = AIOKafkaAdminClient(
        bootstrap_servers=bootstrap, request_timeout_ms=REQUEST_TIMEOUT_MS, **dict(security or {})
    )
    try:
        await admin.start()
        return await _ensure(admin, desired, replication, may_add=partitions is not None)
    except (KafkaError, TimeoutError, OSError) as error:
        raise TopicsNotReady(
            f"Kafka at {bootstrap}: {type(error).__name__}; check that it is running and reachable"
        ) from error
    finally:
        await admin.close()


async def retention_ms(
    bootstrap: str, *, prefix: str = "", security: Mapping[str, object] | None = None
) -> dict[str, int]:
    """How long Kafka keeps the records of each topic that is not compacted, in milliseconds; -1: for ever. Names come
    without the prefix. Raises TopicsNotReady or TopicRefused."""
    admin = AIOKafkaAdminClient(
        bootstrap_servers=bootstrap, request_timeout_ms=REQUEST_TIMEOUT_MS, **dict(security or {})
    )
    keys = {f"{prefix}{topic.name}": {"retention.ms": ""} for topic in TOPICS if topic.cleanup == "delete"}
    try:
        await admin.start()
        present = await _configs(admin, keys)
        return {name.removeprefix(prefix): int(configs["retention.ms"]) for name, configs in present.items()}
    except (KafkaError, TimeoutError, OSError) as error:
        raise TopicsNotReady(
            f"Kafka at {bootstrap}: {type(error).__name__}; check that it is running and reachable"
        ) from error
    finally:
        await admin.close()


async def topic_settings(admin: Any, topic: str, names: Iterable[str]) -> dict[str, str]:
    """Return these settings of a topic. Raises TopicsNotReady or TopicRefused."""
    return (await _configs(admin, {topic: dict.fromkeys(names, "")}))[topic]


async def _ensure(admin: Any, topics: Mapping[str, Topic], replication: int, *, may_add: bool) -> list[str]:
    before = await _partitions(admin, topics)
    missing = [name for name in topics if name not in before]
    created = await _create(admin, {name: topics[name] for name in missing}, replication)
    added = await _add_partitions(admin, topics, before) if may_add else []
    existing = {name: topic for name, topic in topics.items() if name not in created}
    partitions = await _partitions_with_leaders(admin, topics)
    lines = [f"topic {name}: created ({topics[name].partitions} partitions)" for name in created] + added
    for name, topic in existing.items():
        lines += differing_partitions(name, topic, partitions[name], replication)
    lines += unequal_counts({topic.name: (name, len(partitions[name])) for name, topic in topics.items()})
    lines += await _differing_configs(admin, existing, replication)
    return lines


async def _partitions(admin: Any, names: Iterable[str]) -> dict[str, Partitions]:
    """The partitions of the named topics that exist. (All topics are described: describing by name would create them
    on brokers with ``auto.create.topics.enable``.)"""
    ours = set(names)
    return {
        topic["topic"]: topic["partitions"] for topic in await admin.describe_topics(None) if topic["topic"] in ours
    }


async def _create(admin: Any, topics: Mapping[str, Topic], replication: int) -> list[str]:
    """Create topics. Returns the names that we created: another process may have created some before us."""
    if not topics:
        return []
    answer = await admin.create_topics(
        [
            NewTopic(name, topic.partitions, replication, topic_configs=topic.configs(replication=replication))
            for name, topic in topics.items()
        ]
    )
    created = []
    for name, code, message in answer.topic_errors:
        kind = for_code(code)
        if kind is NoError:
            created.append(name)
        elif kind is not TopicAlreadyExistsError:
            _refuse(f"topic {name} cannot be created", kind, message)
    return created


async def _add_partitions(admin: Any, topics: Mapping[str, Topic], before: Mapping[str, Partitions]) -> list[str]:
    """Add partitions to those topics of SHARED that have fewer than desired. Returns a line for each."""
    shared = {topic.name for topic in SHARED}
    grow = {
        name: topic.partitions
        for name, topic in topics.items()
        if topic.name in shared and len(before.get(name, ())) in range(1, topic.partitions)
    }
    refused: dict[str, KafkaError] = {}
    for name, count in grow.items():
        try:
            await admin.create_partitions({name: NewPartitions(count)})
        except InvalidPartitionsError as error:  # unless another process has added them since
            refused[name] = error
        except KafkaError as error:
            _refuse(f"topic {name} cannot get {count} partitions", type(error), str(error))
    # Brokers learn of new partitions a little late, like of new topics.
    deadline = time.monotonic() + LEADER_SECONDS
    while few := [name for name, has in (await _partitions(admin, grow)).items() if len(has) < grow[name]]:
        if time.monotonic() > deadline:
            if reason := refused.get(few[0]):
                _refuse(f"topic {few[0]} cannot get {grow[few[0]]} partitions", type(reason), str(reason))
            raise TopicsNotReady(f"after {LEADER_SECONDS:.0f} s the new partitions of {', '.join(few)} are not there")
        await asyncio.sleep(0.2)
    return [f"topic {name}: {len(before[name])} partitions are now {count}" for name, count in grow.items()]


async def _partitions_with_leaders(admin: Any, names: Iterable[str]) -> dict[str, Partitions]:
    """The partitions of these topics, once every one has a leader. Raises TopicsNotReady."""
    try:
        async with asyncio.timeout(LEADER_SECONDS):
            while True:
                partitions = await _partitions(admin, names)
                late = [name for name in names if not _has_leaders(partitions.get(name, ()))]
                if not late:
                    return partitions
                await asyncio.sleep(0.2)
    except TimeoutError as error:
        raise TopicsNotReady(
            f"after {LEADER_SECONDS:.0f} s some partition of {', '.join(late[:3])} has no leader: is a broker down?"
        ) from error


def _has_leaders(partitions: Partitions) -> bool:
    return bool(partitions) and all(p["leader"] >= 0 and p["error_code"] == 0 for p in partitions)


async def _differing_configs(admin: Any, topics: Mapping[str, Topic], replication: int) -> list[str]:
    if not topics:
        return []
    desired = {name: topic.configs(replication=replication) for name, topic in topics.items()}
    present = await _configs(admin, desired)
    return [
        f"topic {name}: {key} is {present[name].get(key)}, this version wants {value}; change it with"
        f" `kafka-configs --alter --topic {name} --add-config {key}={value}`, or leave it"
        for name, configs in desired.items()
        for key, value in configs.items()
        if present[name].get(key) != value
    ]


async def _configs(admin: Any, keys: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The present values of the settings whose names are the keys of ``keys[topic]``, by topic. Waits up to
    LEADER_SECONDS, because a broker may learn of a new topic a little late."""
    async with asyncio.timeout(LEADER_SECONDS):
        while True:
            answers = await admin.describe_configs(
                [ConfigResource(ConfigResourceType.TOPIC, name, dict(configs)) for name, configs in keys.items()]
            )
            resources = [resource for answer in answers for resource in answer.resources]
            failed = [(name, for_code(code), message) for code, message, _, name, _ in resources if code]
            for name, kind, message in failed:
                if not kind.retriable:
                    _refuse(f"the settings of topic {name} cannot be read", kind, message)
            if not failed:
                return {name: {entry[0]: entry[1] for entry in entries} for _, _, _, name, entries in resources}
            await asyncio.sleep(0.2)


def _refuse(what: str, kind: type[KafkaError], message: str | None) -> None:
    line = f"{what}: {kind.__name__}{f' ({message})' if message else ''}"
    raise (TopicsNotReady if kind.retriable else TopicRefused)(line)


def differing_partitions(name: str, topic: Topic, partitions: Partitions, replication: int) -> list[str]:
    """Lines about an existing topic with fewer partitions or replicas than desired. More of them are an operator's
    choice."""
    lines = []
    if len(partitions) < topic.partitions:
        lines.append(
            f"topic {name}: {len(partitions)} partitions, this version wants {topic.partitions};"
            f" `penstock migrate --partitions {topic.partitions}` adds them, also while workers run"
        )
    replicas = min(len(partition["replicas"]) for partition in partitions)
    if replicas < replication:
        lines.append(f"topic {name}: {replicas} replicas, the setting asks for {replication}; reassign its partitions")
    return lines


def unequal_counts(counts: Mapping[str, tuple[str, int]]) -> list[str]:
    """Lines about topics that must have equally many partitions, and have not. counts: by registry name, the topic's
    full name and its number of partitions."""
    lines = []
    for first, second in COPARTITIONED:
        (name, n), (other, m) = counts[first.name], counts[second.name]
        if n != m:
            lines.append(
                f"topics {name} ({n} partitions) and {other} ({m}) must have equally many, or a document's events are"
                f" handled by two workers at once: run `penstock migrate --partitions {max(n, m)}`"
            )
    return lines
