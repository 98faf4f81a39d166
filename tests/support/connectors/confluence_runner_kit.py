"""A company's Confluence, and a runner's surroundings on a real Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from connectors.confluence.playground import ConfluencePlayground
from connectors.runner.instance import Instance
from connectors.source import Request
from tests.support.connectors.playground_kit import Played
from topics.messages import AnyMessage

EVENTS = "https://penstock.example.com"


@dataclass
class Office(Played[ConfluencePlayground]):
    """A company's Confluence, and a runner's surroundings."""

    @property
    def everything(self) -> set[str]:
        return {item.id for item in self.play.state.current("page", "blogpost", "attachment")}

    async def deliver_events(self, instance: Instance, requests: Sequence[Request] | None = None) -> list[AnyMessage]:
        """Deliver Confluence's events, and return what is published."""
        for request in self.play.sent() if requests is None else requests:
            await instance.on_event(request)
        await asyncio.sleep(0.05)
        await self.bench.until(lambda: self.idle(instance), 90)
        return await self.bench.take()
