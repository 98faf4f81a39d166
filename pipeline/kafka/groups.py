"""Consumer groups: their members, their committed offsets, and resetting the offsets to a point in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    KafkaError,
    NotCoordinatorForGroupError,
    for_code,
)

from pipeline.core.errors import Retryable
from pipeline.kafka.client import refusal, security
from pipeline.kafka.stopping import stop_consumer
from pipeline.runtime.settings import KafkaSettings

REQUEST_SECONDS = 30.0
SETTLE_SECONDS = 6.0
"""How long to wait for a coordinator that is being created or elected. Measured for a cluster's first: 2.5 s."""
POLL_SECONDS = 0.1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)
SETTLING = (GroupLoadInProgressError, NotCoordinatorForGroupError)


class OffsetsUnavailable(Exception):
    """Kafka cannot be reached, or refuses. The message is one line; a later attempt may succeed."""


class GroupBusy(Exception):
    """The group has members, which would overwrite offsets that are committed for it now."""


@dataclass(frozen=True, slots=True)
class Log:
    """The extent of one partition, in offsets."""

    begin: int
    """The offset of the oldest record that Kafka still has."""
    oldest: datetime | None
    """When that record was sent, according to its producer; None: the partition is empty."""
    since: int
    """The offset of the first record sent at the requested moment or later; the end if there is none."""
    end: int
    """The offset of the next record."""

    def behind(self, committed: int | None) -> int:
        """How many records a group that continues at ``committed`` (None: it never committed) has still to read.
        Records that Kafka has deleted cannot be read any more and do not count."""
        return max(0, self.end - max(self.begin, committed or 0))


def lag(logs: Mapping[tuple[str, int], Log], committed: Mapping[tuple[str, int], int], topic: str) -> int:
    """How many records of a topic a consumer group has still to read."""
    return sum(log.behind(committed.get(place)) for place, log in logs.items() if place[0] == topic)


class Groups:
    """An async context manager. Names of topics and groups are given without the prefix and come back without it."""

    def __init__(
        self,
        bootstrap: str,
        topic_prefix: str = "",
        security: Mapping[str, object] | None = None,
        *,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        """bootstrap: ``host:port``, several separated by commas. security: aiokafka's TLS and SASL options."""
        self._bootstrap = bootstrap
        self._prefix = topic_prefix
        self._options: dict[str, Any] = {
            "bootstrap_servers": bootstrap,
            "request_timeout_ms": int(REQUEST_SECONDS * 1000),
            **dict(security or {}),
        }
        self._admin: Any = AIOKafkaAdminClient(**self._options)
        self._patience = settle_seconds
        """Seconds of waiting that are left, for all groups together."""

    async def __aenter__(self) -> Self:
        """Raises OffsetsUnavailable."""
        try:
            async with self._explained():
                await self._admin.start()
        except BaseException:
            await self._admin.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._admin.close()

    async def members(self, group: str) -> list[str]:
        """The hosts of the group's members; empty for a group that is unknown or has none."""
        described = await self._described(group)
        if described is None:
            return []
        code, _, _, _, _, members, *_ = described
        if code and for_code(code).__name__ != "GroupIdNotFound":
            raise OffsetsUnavailable(f"Kafka at {self._bootstrap} does not describe group {self._prefix}{group}")
        return [str(member[2]).lstrip("/") for member in members]

    async def committed(self, group: str) -> dict[tuple[str, int], int]:
        """The offsets at which the group continues, by (topic, partition). Partitions without one are absent."""
        if await self._described(group) is None:
            return {}
        # With a coordinator that is not ready aiokafka would return no offsets; _described has waited for it.
        async with self._explained():
            offsets = await self._admin.list_consumer_group_offsets(self._prefix + group)
        return {
            (tp.topic.removeprefix(self._prefix), tp.partition): o.offset for tp, o in offsets.items() if o.offset >= 0
        }

    async def logs(self, topics: Collection[str], moment: datetime) -> dict[tuple[str, int], Log]:
        """The extent of each partition of these topics. moment: for ``Log.since``. Raises OffsetsUnavailable."""
        async with self._explained(), self._consumer(None) as kafka:
            names = {self._prefix + topic for topic in topics}
            partitions = [
                TopicPartition(topic["topic"], partition["partition"])
                for topic in await self._admin.describe_topics(None)
                if topic["topic"] in names
                for partition in topic["partitions"]
            ]
            if missing := names - {tp.topic for tp in partitions}:
                raise OffsetsUnavailable(
                    f"Kafka at {self._bootstrap} has no topic {min(missing)}: run `penstock migrate`"
                )
            ends = await kafka.end_offsets(partitions)
            begins = await kafka.beginning_offsets(partitions)
            firsts = await kafka.offsets_for_times(dict.fromkeys(partitions, 0))
            after = await kafka.offsets_for_times(dict.fromkeys(partitions, int(moment.timestamp() * 1000)))
        return {
            (tp.topic.removeprefix(self._prefix), tp.partition): Log(
                begins[tp],
                _moment(firsts[tp].timestamp) if firsts[tp] else None,
                after[tp].offset if after[tp] else ends[tp],
                ends[tp],
            )
            for tp in partitions
        }

    async def commit(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commit these offsets, at which the group then continues. Raises GroupBusy, OffsetsUnavailable."""
        if not offsets:
            return
        if hosts := await self.members(group):
            raise GroupBusy(f"{self._prefix}{group} has {len(hosts)} members (on {', '.join(sorted(set(hosts)))})")
        prefixed = {TopicPartition(self._prefix + topic, n): offset for (topic, n), offset in offsets.items()}
        async with self._explained(), self._consumer(self._prefix + group) as kafka:
            kafka.assign(list(prefixed))
            await kafka.commit(prefixed)

    async def _described(self, group: str) -> Sequence[Any] | None:
        """Kafka's description of the group (its code, …, its members) once its coordinator is ready. None: the cluster
        has never had a group. The first request makes Kafka create the topic in which it stores groups, which takes a
        few seconds; until then it reports any group as loading or as another coordinator's. Raises OffsetsUnavailable
        when that takes too long, because "nothing committed" would be a wrong answer."""
        while True:
            async with self._explained():
                try:
                    [answer] = await self._admin.describe_consumer_groups([self._prefix + group])
                    described: Sequence[Any] | None = answer.groups[0]
                except GroupCoordinatorNotAvailableError:
                    described = None
            if described is not None and for_code(described[0]) not in SETTLING:
                return described
            if self._patience <= 0 and described is not None:
                why = for_code(described[0]).__name__
                raise OffsetsUnavailable(f"Kafka at {self._bootstrap}: {why}; its groups are not ready yet, try again")
            if self._patience <= 0:
                return None
            self._patience -= POLL_SECONDS
            await asyncio.sleep(POLL_SECONDS)

    @asynccontextmanager
    async def _consumer(self, group: str | None) -> AsyncIterator[Any]:
        kafka = AIOKafkaConsumer(group_id=group, enable_auto_commit=False, **self._options)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await kafka.start()
            yield kafka
        finally:
            await stop_consumer(kafka)

    @asynccontextmanager
    async def _explained(self) -> AsyncIterator[None]:
        try:
            yield
        except (KafkaError, TimeoutError, OSError) as error:
            raise OffsetsUnavailable(
                f"Kafka at {self._bootstrap}: {type(error).__name__}; check that it is running and reachable"
            ) from error


def _moment(sent_ms: int) -> datetime:
    """The time of a record, for which its producer may name any number: the end of the calendar for a later one."""
    return _EPOCH + timedelta(milliseconds=min(sent_ms, _LAST_MS))


def group(stage: str) -> str:
    """The consumer group of a stage, without the prefix that settings may put before it."""
    return f"penstock-{stage}"


@asynccontextmanager
async def groups(kafka: KafkaSettings) -> AsyncIterator[Groups]:
    """A started client for consumer groups. Raises Retryable when Kafka cannot be reached, Misconfigured when it
    refuses us."""
    client = Groups(kafka.bootstrap, kafka.topic_prefix, security(kafka))
    try:
        await client.__aenter__()
    except OffsetsUnavailable as error:
        raise await refusal(kafka) or Retryable(str(error), service="kafka") from error
    try:
        yield client
    finally:
        await client.__aexit__(None, None, None)


@contextmanager
def translate_offset_errors() -> Iterator[None]:
    try:
        yield
    except OffsetsUnavailable as error:
        raise Retryable(str(error), service="kafka") from error
