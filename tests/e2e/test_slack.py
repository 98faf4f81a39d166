"""A Slack workspace (the fake) through the runner, Kafka, the workers and both stores, to what its people find."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from connectors.fakes.slack import FakeSlack
from connectors.http import Parts, app
from connectors.slack import Slack, SlackOptions
from pipeline.runtime.http_server import served
from tests.support.connectors.company import Company, company_in
from tests.support.space import Space

pytestmark = pytest.mark.stack

ANN, BEN = "ann@acme.example", "ben@acme.example"


@dataclass
class Workplace(Company):
    """Ann and Ben in #ops; ``http``: our side, where Slack's events arrive."""

    http: httpx.AsyncClient
    ann: str
    ben: str
    ops: str

    @property
    def fake(self) -> FakeSlack:
        return self.play

    @property
    def workspace(self) -> Any:
        return self.fake.workspace

    async def deliver(self) -> None:
        """The events that Slack has for us, over HTTP, as it sends them."""
        for request in self.fake.sent():
            answer = await self.http.post("/v1/events/chat", content=request.body, headers=dict(request.headers))
            assert answer.status_code == 200, answer.text


@pytest.fixture
async def company(space: Space, tmp_path: Path) -> AsyncIterator[Workplace]:
    """#ops with three threads; read once, and nothing else happens by itself."""
    fake = FakeSlack()
    w = fake.workspace
    ann, ben = w.user("Ann Lee"), w.user("Ben Roy")
    ops = w.channel("ops", ann)
    for topic in ("harbour crane", "harbour ferry", "harbour bridge"):
        ts = w.post(ops, ann, f"Who looks after the {topic}?")
        w.post(ops, ben, f"The {topic} crew does.", thread=ts)
    fake.drop_events()
    async with served(fake.app) as url:
        options = SlackOptions(
            token=fake.token,
            signing_secret=fake.signing_secret,
            base_url=f"{url}/api",
            page_size=3,  # type: ignore[arg-type]
        )
        async with company_in(
            space, tmp_path, fake, lambda context: Slack(options, context), name="chat", within_seconds=60
        ) as company:
            parts = Parts({"chat": company.instance}, {}, company.services.producer, company.services.metrics)
            async with served(app(parts)) as ours, httpx.AsyncClient(base_url=ours) as http:
                yield Workplace(**vars(company), http=http, ann=ann, ben=ben, ops=ops)


def ids(company: Workplace) -> list[str]:
    messages = company.workspace.channels[company.ops].messages.values()
    return [f"{company.ops}:{m['ts']}" for m in messages if "thread_ts" not in m]


@pytest.mark.slow
async def test_threads_are_searchable_by_the_workspace_and_follow_their_changes(company: Workplace) -> None:
    c, w = company, company.workspace
    crane, ferry, bridge = ids(c)
    everything = {crane, ferry, bridge}
    for reader in (ANN, BEN):
        await c.until(reader, "harbour", everything)
    assert await c.search_ids("slack:U9", "harbour") == set()

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
    assert await c.search_ids(BEN, "harbour") == everything

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
    async with asyncio.timeout(c.within_seconds):
        while True:
            rows = await c.space.query("SELECT title FROM documents WHERE deleted_at IS NULL")
            if all(title.endswith("· #quayside") for (title,) in rows):
                break
            await asyncio.sleep(0.1)
    assert len(rows) == 3


@pytest.mark.slow
async def test_losing_a_channel_hides_its_threads_without_rewriting_documents(company: Workplace) -> None:
    c, w = company, company.workspace
    everything = set(ids(c))
    await c.until(BEN, "harbour", everything)
    await c.until(ANN, "harbour", everything)
    [(before,)] = await c.space.query("SELECT max(seq) FROM documents")

    w.convert_to_private(c.ops)
    await c.deliver()
    await c.until(BEN, "harbour", set())
    assert await c.search_ids(ANN, "harbour") == everything
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


@pytest.mark.slow
async def test_a_sweep_makes_changes_searchable_whose_events_were_lost(company: Workplace) -> None:
    c, w = company, company.workspace
    crane, ferry, bridge = ids(c)
    await c.until(ANN, "harbour", {crane, ferry, bridge})
    w.edit(c.ops, crane.partition(":")[2], "Who repairs the harbour windlass?")
    w.delete(c.ops, w.channels[c.ops].replies(ferry.partition(":")[2])[0]["ts"])
    w.delete(c.ops, ferry.partition(":")[2])
    new = f"{c.ops}:{w.post(c.ops, c.ann, 'The harbour pilot retires.')}"
    w.leave(c.ops, c.ann)
    w.convert_to_private(c.ops)
    assert c.fake.drop_events() == 6
    await c.ask("sweep")
    await c.ask("groups")
    await c.until(ANN, "harbour", set())
    w.join(c.ops, c.ann)
    c.fake.drop_events()
    await c.ask("groups")
    await c.until(ANN, "harbour", {crane, bridge, new})
    await c.until(ANN, "windlass", {crane}, "windlass")
