"""Sending messages, without Kafka."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from topics.messages import MAX_GROUPS, IdentityChanged
from topics.registry import IDENTITIES


async def test_other_tasks_have_turns_while_large_messages_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of people with very many tags stopped all connectors for seconds."""
    turns = 0

    async def send(*_: object, **__: object) -> asyncio.Future[Any]:
        sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        sent.set_result(SimpleNamespace(partition=0, offset=0))
        return sent

    async def connected(_: Producer) -> Any:
        return SimpleNamespace(send=send)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def message(number: int) -> IdentityChanged:
        groups = [f"issue:{n}" for n in range(MAX_GROUPS // 4)]
        now = datetime.now(UTC)
        return IdentityChanged(tenant="t", source="s", observed_at=now, principal=f"{number}", groups=groups)

    monkeypatch.setattr(Producer, "_connected", connected)
    producer = Producer("kafka:9092")
    others = asyncio.create_task(count_turns())
    await asyncio.sleep(0)
    before = turns
    await deliver(producer.send(IDENTITIES, message(n)) for n in range(20))
    others.cancel()
    assert turns - before >= 20
