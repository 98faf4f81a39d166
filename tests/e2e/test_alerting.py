"""A real Prometheus with our rules, a real Alertmanager with our routes, and receivers: who is notified of what.

The metrics are those that a worker exports, with values that the test sets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client import start_http_server

from pipeline.observability.metrics import Metrics
from tests.fakes.notifications import FakeMailServer, FakeReceiver, mail_server
from tests.support.deploy.alerting_kit import Alertmanager, alertmanager, webhooks
from tests.support.deploy.prometheus_kit import WORKERS, free_port, watching

pytestmark = pytest.mark.slow

STOPPED = "vectors"
"""The worker that the test stops."""


@dataclass
class Alerted:
    metrics: Metrics
    receiver: FakeReceiver
    mail: FakeMailServer
    alertmanager: Alertmanager
    port: int
    """Where the worker that the test stops exports its metrics."""

    async def received(self, receiver: str, **expected: str) -> None:
        """Wait until these are the alerts that were received, and these their last states."""
        try:
            async with asyncio.timeout(60):
                while self.receiver.received(receiver) != expected:
                    await asyncio.sleep(0.1)
        except TimeoutError:
            pytest.fail(f"{receiver}: {self.receiver.notifications}, not {expected}")

    async def inhibited(self, *alerts: str) -> None:
        """Wait until Alertmanager has these alerts and suppresses them."""
        states: dict[str, str] = {}
        try:
            async with asyncio.timeout(60):
                while not all(states.get(alert) == "suppressed" for alert in alerts):
                    await asyncio.sleep(0.2)
                    states = await self.alertmanager.states()
        except TimeoutError:
            pytest.fail(f"{states}, and not all of {alerts} are suppressed")


@contextmanager
def exported(metrics: Metrics, port: int) -> Iterator[None]:
    server, thread = start_http_server(port, addr="127.0.0.1", registry=metrics.registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@asynccontextmanager
async def alerted(folder: Path) -> AsyncIterator[Alerted]:
    """All workers but one export the same metrics. That one does not respond."""
    metrics = Metrics()
    for store in ("vectors", "keywords"):
        metrics.oldest_pending.labels(store=store, lane="live").set(0)
    async with AsyncExitStack() as open_:
        receiver = await open_.enter_async_context(FakeReceiver())
        mail = await open_.enter_async_context(mail_server())
        settings = webhooks(
            receiver,
            ticket_mail_to="team@example.com",
            mail_from="alerts@example.com",
            smtp_server=mail.address,
            smtp_require_tls=False,
        )
        manager = await open_.enter_async_context(alertmanager(folder / "alertmanager", settings))
        port, others = free_port(), free_port()
        open_.enter_context(exported(metrics, others))
        targets = dict.fromkeys((*WORKERS, "query"), f"127.0.0.1:{others}") | {STOPPED: f"127.0.0.1:{port}"}
        prometheus = await open_.enter_async_context(watching(folder / "prometheus", targets, manager.address))
        with exported(metrics, port):
            async with asyncio.timeout(60):
                while not await monitors(prometheus, targets):
                    await asyncio.sleep(0.2)
        yield Alerted(metrics, receiver, mail, manager, port)


async def monitors(prometheus: httpx.AsyncClient, targets: Collection[str]) -> bool:
    """Whether every target responds to Prometheus, no alert is even pending, and Alertmanager is known."""
    up = (await prometheus.get("/api/v1/query", params={"query": "sum(up)"})).json()["data"]["result"]
    alerts = (await prometheus.get("/api/v1/alerts")).json()["data"]["alerts"]
    managers = (await prometheus.get("/api/v1/alertmanagers")).json()["data"]["activeAlertmanagers"]
    return bool(up and int(up[0]["value"][1]) == len(targets) and not alerts and managers)


@pytest.mark.timeout(300)
async def test_causes_are_notified_by_severity_consequences_are_not_and_the_end_is_reported(tmp_path: Path) -> None:
    async with alerted(tmp_path) as world:
        waiting, dead = world.metrics.oldest_pending, world.metrics.waiting_dead_letters
        # The worker has stopped: this is the cause …
        await world.received("page", PenstockWorkerAbsent="firing")
        # … and these follow from it, of which nobody is notified.
        waiting.labels(store=STOPPED, lane="live").set(400)
        await world.inhibited("PenstockWorkerDown", "PenstockOldestPending")
        # Something else is wrong, too: a ticket, by webhook and by mail.
        dead.labels(stage="detect").set(1)
        await world.received("ticket", PenstockDeadLetters="firing")
        # The same alert about the other store does not follow from the stopped worker.
        waiting.labels(store="keywords", lane="live").set(400)
        await world.received("page", PenstockWorkerAbsent="firing", PenstockOldestPending="firing")
        # All of it ends.
        waiting.labels(store=STOPPED, lane="live").set(0)
        waiting.labels(store="keywords", lane="live").set(0)
        dead.labels(stage="detect").set(0)
        await world.received("page", PenstockWorkerAbsent="firing", PenstockOldestPending="resolved")
        with exported(world.metrics, world.port):
            await world.received("page", PenstockWorkerAbsent="resolved", PenstockOldestPending="resolved")
            await world.received("ticket", PenstockDeadLetters="resolved")
        labels = [json.loads(notified.labels) for notified in world.receiver.notifications]
        assert {of["store"] for of in labels if of["alertname"] == "PenstockOldestPending"} == {"keywords"}
        assert {of["worker"] for of in labels if of["alertname"] == "PenstockWorkerAbsent"} == {STOPPED}
        mailed = [message for message in world.mail.messages if "To: team@example.com" in message]
        assert any("PenstockDeadLetters" in message for message in mailed)
