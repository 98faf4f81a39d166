"""How Kafka's answers about topics are read, where a real broker cannot be made to give them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import TopicAuthorizationFailedError, UnknownTopicOrPartitionError

from pipeline.kafka import admin
from pipeline.kafka.admin import TopicRefused, TopicsNotReady
from topics.registry import DOCUMENTS_LIVE


class Answers:
    """An admin client that gives the answers it was made with, one after another."""

    def __init__(self, *answers: list[tuple[Any, ...]]) -> None:
        self._answers = list(answers)

    async def describe_configs(self, resources: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(resources=self._answers.pop(0))]

    async def create_topics(self, topics: object) -> SimpleNamespace:
        return SimpleNamespace(topic_errors=self._answers.pop(0))


def settings(code: int, *entries: tuple[str, str]) -> list[tuple[Any, ...]]:
    return [(code, "", 2, "t", [(name, value, False, 1, False, []) for name, value in entries])]


async def test_topic_settings_are_requested_again_while_the_broker_does_not_know_the_topic() -> None:
    late = settings(UnknownTopicOrPartitionError.errno)
    client = Answers(late, late, settings(0, ("retention.ms", "5")))
    assert await admin._configs(client, {"t": {"retention.ms": "9"}}) == {"t": {"retention.ms": "5"}}


async def test_a_missing_topic_permission_is_reported_in_one_line() -> None:
    with pytest.raises(TopicRefused, match="settings of topic t cannot be read: TopicAuthorizationFailedError"):
        await admin._configs(Answers(settings(TopicAuthorizationFailedError.errno)), {"t": {"retention.ms": "9"}})
    refusal = [("t", TopicAuthorizationFailedError.errno, "not allowed")]
    with pytest.raises(TopicRefused, match=r"topic t cannot be created: TopicAuthorizationFailedError \(not allowed\)"):
        await admin._create(Answers(refusal), {"t": DOCUMENTS_LIVE}, 1)


async def test_a_transient_broker_error_raises_topics_not_ready() -> None:
    with pytest.raises(TopicsNotReady, match="topic t cannot be created: NotControllerError"):
        await admin._create(Answers([("t", 41, None)]), {"t": DOCUMENTS_LIVE}, 1)


def test_partitions_without_a_leader_are_not_ready() -> None:
    led, leaderless = {"leader": 1, "error_code": 0}, {"leader": -1, "error_code": 5}
    assert admin._has_leaders([led, led])
    assert not admin._has_leaders([led, leaderless])
    assert not admin._has_leaders([])
