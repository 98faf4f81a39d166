"""A Slack workspace (the fake) through the runner, Kafka, the workers and both stores, to what its people find."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from connectors.fakes.slack import FakeSlack
from connectors.http import Parts, app
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.slack import Slack, SlackOptions
from pipeline.kafka import producer
from pipeline.serving import served
from pipeline.settings import dist
from pipeline.stores.postgres import open_pool
from pipeline.telemetry import Metrics
from query.embedder import QueryEmbedder
from query.model import MODES
from query.retrieval import Search, open_search
from tests.space import Space

pytestmark = pytest.mark.stack

WITHIN_SECONDS = 60.0
ANN, BEN = "ann@acme.example", "ben@acme.example"


@dataclass
class Company:
    space: Space
    fake: FakeSlack
    instance: Instance
    search: Search
    http: httpx.AsyncClient
    ann: str
    ben: str
    ops: str

    @property
    def workspace(self) -> Any:
        return self.fake.workspace

    async def found(self, who: str, query: str, word: str = "") -> set[str]:
        """The documents with this word that somebody finds by any ranking (nearness alone finds all that they read)."""
        caller = await self.search.identify("acme", principals=[who])
        shown: set[str] = set()
        for mode in MODES:
            answer = await self.search.search(query, caller, mode=mode, top=50)
            shown |= {result.passage.external_id for result in answer.results if word in result.text}
        return shown

    async def until(self, who: str, query: str, ids: set[str], word: str = "") -> None:
        """Wait until somebody finds these documents and no others."""
        async with asyncio.timeout(WITHIN_SECONDS):
            while await self.found(who, query, word) != ids:
                await asyncio.sleep(0.1)

    async def deliver(self) -> None:
        """The events that Slack has for us, over HTTP, as it sends them."""
        for request in self.fake.sent():
            answer = await self.http.post("/v1/events/chat", content=request.body, headers=dict(request.headers))
            assert answer.status_code == 200, answer.text

    async def ask(self, action: str) -> dict[str, Any]:
        [(number,)] = await self.space.query(
            "INSERT INTO connector_asks (tenant, source, action) VALUES ('acme', 'chat', %s) RETURNING id", action
        )
        async with asyncio.timeout(WITHIN_SECONDS):
            while True:
                [(outcome,)] = await self.space.query("SELECT outcome FROM connector_asks WHERE id = %s", number)
                if outcome is not None:
                    return dict(outcome)
                await asyncio.sleep(0.05)


@asynccontextmanager
async def company_in(space: Space, folder: Path) -> AsyncIterator[Company]:
    """Ann and Ben, #ops with three threads; read once, and nothing else happens by itself."""
    fake = FakeSlack()
    w = fake.workspace
    ann, ben = w.user("Ann Lee"), w.user("Ben Roy")
    ops = w.channel("ops", ann)
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(fake.app))
        options = SlackOptions(
            token=fake.token, signing_secret=fake.signing_secret, base_url=f"{url}/api", page_size=3,  # type: ignore[arg-type]
        )  # fmt: skip
        plan = Plan(
            name="chat", tenant="acme", kind="slack", make=lambda context: Slack(options, context),
            poll_seconds=3600, sweep_seconds=3600, groups_seconds=3600,
        )  # fmt: skip
        pool = await stack.enter_async_context(open_pool(space.settings.postgres))
        kafka = await stack.enter_async_context(producer(space.settings.kafka))
        services = Services(
            postgres=space.settings.postgres, pool=pool, producer=kafka, metrics=Metrics(), folder=folder / "sources"
        )
        embedder = QueryEmbedder.by_settings(space.settings.embedding, dist() / "models")
        search = await stack.enter_async_context(open_search(space.settings, embedder))
        instance = Instance(plan, services)
        for topic in ("harbour crane", "harbour ferry", "harbour bridge"):
            ts = w.post(ops, ann, f"Who looks after the {topic}?")
            w.post(ops, ben, f"The {topic} crew does.", thread=ts)
        fake.lose()
        task = asyncio.create_task(instance.run())
        try:
            ours = await stack.enter_async_context(served(app(Parts({"chat": instance}, {}, kafka, services.metrics))))
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=ours))
            yield Company(space, fake, instance, search, http, ann, ben, ops)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
async def company(space: Space, tmp_path: Path) -> AsyncIterator[Company]:
    space.start("detect", "vectors", "keywords")
    async with company_in(space, tmp_path) as company:
        yield company


def ids(company: Company) -> list[str]:
    messages = company.workspace.channels[company.ops].messages.values()
    return [f"{company.ops}:{m['ts']}" for m in messages if "thread_ts" not in m]


async def test_threads_are_found_by_the_workspace_and_follow_what_happens_to_them(company: Company) -> None:
    c, w = company, company.workspace
    crane, ferry, bridge = ids(c)
    everything = {crane, ferry, bridge}
    for reader in (ANN, BEN):
        await c.until(reader, "harbour", everything)
    assert await c.found("slack:U9", "harbour") == set()

    challenge = c.fake.challenge()
    answer = await c.http.post("/v1/events/chat", content=challenge.body, headers=dict(challenge.headers))
    assert (answer.status_code, answer.text) == (200, "3eZbrw1aBm2rZgRNFdxV2595E9CY3gmd")
    forged = await c.http.post("/v1/events/chat", content=challenge.body + b" ", headers=dict(challenge.headers))
    assert forged.status_code == 401
    for action in ("changes", "sweep"):
        outcome = await c.ask(action)
        assert {key for key in ("upserted", "access", "deleted") if outcome.get(key)} == set(), outcome

    w.post(c.ops, c.ann, "The harbour lighthouse keeper has the key.", thread=ferry.partition(":")[2])
    await c.deliver()
    await c.until(BEN, "lighthouse keeper", {ferry}, "lighthouse")
    w.edit(c.ops, crane.partition(":")[2], "Who repairs the harbour windlass?")
    await c.deliver()
    await c.until(BEN, "windlass", {crane}, "windlass")
    assert await c.found(BEN, "harbour") == everything

    kept = dict(w.channels[c.ops].messages)
    for ts in [ts for ts in kept if kept[ts].get("thread_ts", ts) == bridge.partition(":")[2]][::-1]:
        w.delete(c.ops, ts)
    await c.deliver()
    await c.until(BEN, "harbour", {crane, ferry})
    for ts in sorted(set(kept) - set(w.channels[c.ops].messages)):
        w.restore(c.ops, kept[ts])
    await c.deliver()
    await c.until(BEN, "harbour", everything)

    w.rename(c.ops, "quayside")
    await c.deliver()
    async with asyncio.timeout(WITHIN_SECONDS):
        while True:
            rows = await c.space.query("SELECT title FROM documents WHERE deleted_at IS NULL")
            if all(title.endswith("· #quayside") for (title,) in rows):
                break
            await asyncio.sleep(0.1)
    assert len(rows) == 3


async def test_who_loses_a_channel_finds_nothing_of_it_and_no_document_is_written_for_that(company: Company) -> None:
    c, w = company, company.workspace
    everything = set(ids(c))
    await c.until(BEN, "harbour", everything)
    await c.until(ANN, "harbour", everything)
    [(before,)] = await c.space.query("SELECT max(seq) FROM documents")

    w.convert_to_private(c.ops)
    await c.deliver()
    await c.until(BEN, "harbour", set())
    assert await c.found(ANN, "harbour") == everything
    w.join(c.ops, c.ben)
    await c.deliver()
    await c.until(BEN, "harbour", everything)
    w.change_user(c.ben, deleted=True)
    await c.deliver()
    await c.until(BEN, "harbour", set())
    assert (await c.space.query("SELECT max(seq) FROM documents")) == [(before,)]

    w.leave(c.ops, "U0PENSTOCK")
    await c.deliver()
    await c.until(ANN, "harbour", set())
    rows = await c.space.query("SELECT count(*) FROM documents WHERE deleted_at IS NULL")
    assert rows == [(3,)], "forgotten only after a while"
    w.join(c.ops, "U0PENSTOCK")
    await c.deliver()
    await c.until(ANN, "harbour", everything)


async def test_a_sweep_closes_the_gap_that_lost_events_left(company: Company) -> None:
    c, w = company, company.workspace
    crane, ferry, bridge = ids(c)
    await c.until(ANN, "harbour", {crane, ferry, bridge})
    w.edit(c.ops, crane.partition(":")[2], "Who repairs the harbour windlass?")
    w.delete(c.ops, w.channels[c.ops].replies(ferry.partition(":")[2])[0]["ts"])
    w.delete(c.ops, ferry.partition(":")[2])
    new = f"{c.ops}:{w.post(c.ops, c.ann, 'The harbour pilot retires.')}"
    w.leave(c.ops, c.ann)
    w.convert_to_private(c.ops)
    assert c.fake.lose() == 6
    await c.ask("sweep")
    await c.ask("groups")
    await c.until(ANN, "harbour", set())
    w.join(c.ops, c.ann)
    c.fake.lose()
    await c.ask("groups")
    await c.until(ANN, "harbour", {crane, bridge, new})
    await c.until(ANN, "windlass", {crane}, "windlass")
