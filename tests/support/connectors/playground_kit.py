"""A connector's playground behind a runner on a real Kafka: what the tests of the vendors' sources share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from connectors.conform.trial import NAME, environment
from connectors.declared import options
from connectors.runner.instance import Instance
from connectors.source import Context, Playground, Source
from tests.support.connectors.runner_kit import Bench
from topics.messages import AnyMessage, DocumentUpserted

P = TypeVar("P", bound=Playground)


def made(kind: type[Source], play: Playground) -> Callable[[Context], Source]:
    """A source with the playground's settings and secrets."""
    given = options(kind, play.options, NAME, environment(kind, play.environment))
    return lambda context: kind(given, context)


@dataclass
class Played(Generic[P]):
    """A playground, and a runner of its source (``bench.make``), which does nothing by itself after its first load."""

    bench: Bench
    play: P

    def running(self) -> AbstractAsyncContextManager[Instance]:
        return self.bench.running()

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[Instance]:
        """Everything read once, its messages and the source's events taken; nothing more happens by itself."""
        async with self.running() as instance:
            await self.settle(instance)
            await self.bench.take()
            yield instance

    async def settle(self, instance: Instance) -> None:
        await self.bench.until(lambda: self.bench.done(instance, "full", "changes", "groups", "sweep"), 90)
        await self.bench.until(lambda: self.idle(instance), 90)
        self.play.sent()

    @staticmethod
    def idle(instance: Instance) -> bool:
        return all(
            not activity.pending and activity.status.state != "running"
            for name, activity in instance.activities.items()
            if name != "listen"
        )

    async def run_action(self, action: str) -> list[AnyMessage]:
        """Have the runner do ``changes``, ``sweep``, ``groups`` …, and return what is published."""
        await self.bench.ask(action)
        return await self.bench.take()

    async def published(self) -> list[str]:
        """External ids that the runner keeps as published and there."""
        rows = await self.bench.mine("external_id", "connector_items", "NOT gone AND version IS NOT NULL")
        return [id_ for (id_,) in rows]


def upserted(*ids: str) -> list[tuple[str, str]]:
    """As ``kinds`` would say it."""
    return sorted(("document.upserted", id_) for id_ in ids)


def documents(messages: list[AnyMessage]) -> list[DocumentUpserted]:
    return [message for message in messages if isinstance(message, DocumentUpserted)]
