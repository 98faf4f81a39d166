"""Consumer lag, computed once: the metrics, `status`, the page and `why` all read this one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiokafka.partitioner import DefaultPartitioner

from pipeline.core.model import Lane
from pipeline.kafka.groups import Log, group, groups, lag, translate_offset_errors
from pipeline.runtime.settings import KafkaSettings
from topics.registry import Topic

Partition = tuple[str, int]
"""Topic and number of the partition."""
Logs = Mapping[Partition, Log]
Offsets = Mapping[Partition, int]
StageTopics = Mapping[str, Mapping[Lane, Topic]]
"""By stage, the topic that it reads in each lane. The stage's consumer group is ``penstock-STAGE``."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far each stage has read its topics. All lags are records that are still in the log."""

    stages: StageTopics
    logs: Logs
    committed: Mapping[str, Offsets]
    """By stage."""
    hosts: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By stage, the host of each worker in its consumer group; empty where it was not requested."""

    def lag(self, stage: str, topic: str) -> int:
        return lag(self.logs, self.committed[stage], topic)

    def lag_by_lane(self, stage: str) -> dict[Lane, int]:
        return {lane: self.lag(stage, topic.name) for lane, topic in self.stages[stage].items()}

    def partition_of(self, topic: str, key: bytes) -> int:
        """The partition that a key goes to: murmur2 of the key, as our producers and Java's choose it."""
        partitions = sorted(partition for name, partition in self.logs if name == topic)
        return int(DefaultPartitioner()(key, partitions, partitions))

    def partition_lag(self, stage: str, topic: str, partition: int) -> int:
        return self.logs[topic, partition].behind(self.committed[stage].get((topic, partition)))


async def read_progress(kafka: KafkaSettings, stages: StageTopics, *, members: bool = False) -> Progress:
    """members: read the consumer groups' members too. Raises Retryable, Misconfigured."""
    topics = sorted({topic.name for lanes in stages.values() for topic in lanes.values()})
    committed: dict[str, Offsets] = {}
    hosts: dict[str, Collection[str]] = {}
    async with groups(kafka) as client:
        with translate_offset_errors():
            logs = await client.logs(topics, datetime.now(UTC))
            for stage in stages:
                committed[stage] = await client.committed(group(stage))
                if members:
                    hosts[stage] = await client.members(group(stage))
    return Progress(stages, logs, committed, hosts)
