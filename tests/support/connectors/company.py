"""A company's documents in a pretended service, through the runner, Kafka, the workers and both stores, to what its
people find: what the end-to-end tests of the vendors' sources share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.source import Context, Source
from pipeline.kafka.client import producer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import dist
from pipeline.stores.postgres import open_pool
from query.embedding.embedders import GenerationEmbedders
from query.model import MODES, Result
from query.retrieval.search import Search, open_search
from tests.support.connectors.runner_kit import running
from tests.support.space import Space


@dataclass
class Company:
    """``play``: what the tests play with; its ``sent()`` gives the service's events."""

    space: Space
    play: Any
    services: Services
    instance: Instance
    search: Search
    within_seconds: float
    """For what is waited for."""

    async def results(self, who: str, query: str) -> list[Result]:
        """Return the results of each ranking for a person. Vector search alone returns everything that the person may
        read."""
        caller = await self.search.identify("acme", principals=[who])
        answers = [await self.search.search(query, caller, mode=mode, top=50) for mode in MODES]
        return [result for answer in answers for result in answer.results]

    async def search_ids(self, who: str, query: str, word: str = "") -> set[str]:
        """The documents with this word that somebody finds by any ranking."""
        return {result.passage.external_id for result in await self.results(who, query) if word in result.text}

    async def until(self, who: str, query: str, ids: set[str], word: str = "") -> None:
        """Wait until somebody finds these documents and no others."""
        async with asyncio.timeout(self.within_seconds):
            while await self.search_ids(who, query, word) != ids:
                await asyncio.sleep(0.1)

    async def deliver_events(self) -> None:
        for request in self.play.sent():
            await self.instance.on_event(request)

    async def ask(self, action: str) -> dict[str, Any]:
        """Ask the runner and wait for its answer."""
        [(number,)] = await self.space.query(
            "INSERT INTO connector_asks (tenant, source, action) VALUES ('acme', %s, %s) RETURNING id",
            self.instance.plan.name,
            action,
        )
        async with asyncio.timeout(self.within_seconds):
            while True:
                [(outcome,)] = await self.space.query("SELECT outcome FROM connector_asks WHERE id = %s", number)
                if outcome is not None:
                    return dict(outcome)
                await asyncio.sleep(0.05)


@asynccontextmanager
async def company_in(
    space: Space,
    folder: Path,
    play: Any,
    make: Callable[[Context], Source],
    *,
    name: str,
    events_url: str | None = None,
    within_seconds: float = 90.0,
) -> AsyncIterator[Company]:
    """Workers, and a runner of ``make``'s source under this name that begins its first read; after it nothing more
    happens by itself."""
    space.start("detect", "vectors", "keywords")
    plan = Plan(
        name=name, tenant="acme", kind=name, make=make, poll_seconds=3600, sweep_seconds=3600, groups_seconds=3600
    )
    embedder = GenerationEmbedders.by_settings(space.settings.embedding, dist() / "models")
    async with (
        open_pool(space.settings.postgres) as pool,
        producer(space.settings.kafka) as kafka,
        open_search(space.settings, embedder) as search,
    ):
        services = Services(
            postgres=space.settings.postgres,
            pool=pool,
            producer=kafka,
            metrics=Metrics(),
            folder=folder / "sources",
            events_url=events_url,
        )
        async with running(Instance(plan, services)) as instance:
            yield Company(space, play, services, instance, search, within_seconds)
