"""A company's Confluence, and a runner's surroundings on a real Kafka."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from connectors.confluence import Confluence
from connectors.confluence.playground import ConfluencePlayground
from connectors.declared import options as declared_options
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.source import Context, Request
from pipeline.telemetry import Metrics
from tests.runner_kit import Bench
from topics.messages import AnyMessage


@dataclass
class Office:
    """A company's Confluence, and a runner's surroundings."""

    bench: Bench
    play: ConfluencePlayground

    @property
    def everything(self) -> set[str]:
        return {item.id for item in self.play.state.current("page", "blogpost", "attachment")}

    def instance(self) -> Instance:
        def make(context: Context) -> Confluence:
            return Confluence(declared_options(Confluence, self.play.options, "wiki", self.play.environment), context)

        plan = Plan(
            name="wiki", tenant=self.bench.tenant, kind="confluence", make=make, poll_seconds=3600,
            sweep_seconds=3600, groups_seconds=3600,
        )  # fmt: skip
        services = Services(
            postgres=self.bench.postgres, pool=self.bench.pool, producer=self.bench.producer, metrics=Metrics(),
            folder=self.bench.folder, events_url="https://penstock.example.com",
        )  # fmt: skip
        return Instance(plan, services)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Instance]:
        instance = self.instance()
        task = asyncio.create_task(instance.run())
        try:
            yield instance
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @contextlib.asynccontextmanager
    async def loaded(self) -> AsyncIterator[Instance]:
        """Everything read once, its messages taken; nothing more happens by itself."""
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
        return all(not one.waiting and one.status.state != "running" for name, one in instance.activities.items()
                   if name != "listen")  # fmt: skip

    async def told(self, instance: Instance, requests: Sequence[Request] | None = None) -> list[AnyMessage]:
        """What is published once Confluence has told of it."""
        for request in self.play.sent() if requests is None else requests:
            await instance.on_event(request)
        await asyncio.sleep(0.05)
        await self.bench.until(lambda: self.idle(instance), 90)
        return await self.bench.take()

    async def asked(self, action: str) -> list[AnyMessage]:
        await self.bench.ask(action)
        return await self.bench.take()

    async def published(self) -> set[str]:
        rows = await self.bench.mine("external_id", "connector_items", "NOT gone AND version IS NOT NULL")
        return {id_ for (id_,) in rows}
