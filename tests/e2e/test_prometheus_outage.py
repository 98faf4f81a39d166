"""Postgres does not respond: exactly the alerts fire that docs/runbooks/README.md says, and people are notified of the
cause alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from deploy.local.stack import Stack
from tests.fakes.notifications import FakeReceiver
from tests.faults.tcp_proxy import tcp_proxy
from tests.support.deploy.alerting_kit import alertmanager, webhooks
from tests.support.deploy.prometheus_kit import Watched, page, watched
from tests.support.waiting import until

SLOWEST = "PenstockQueryErrorsBurnsSlowly"

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@asynccontextmanager
async def without_answers(world: Watched) -> AsyncIterator[None]:
    """Meanwhile, people search without success, and a source publishes."""

    async def try_on() -> None:
        n = 0
        while True:
            n += 1
            await world.space.publish(page(n % 10, n))
            answer = await world.query.post("/v1/search", json={"query": f"heron {n}"})
            assert answer.status_code == 503, answer.text
            await asyncio.sleep(0.5)

    trying = asyncio.create_task(try_on())
    try:
        yield
    finally:
        trying.cancel()
        with suppress(asyncio.CancelledError):
            await trying


def notified(receiver: FakeReceiver, name: str) -> dict[str, str]:
    """The last states of what a receiver was notified of, without slow searches: a busy machine is right to report
    them."""
    return {alert: state for alert, state in receiver.received(name).items() if "SearchLatency" not in alert}


@pytest.mark.timeout(900)
async def test_an_outage_of_postgres_raises_exactly_its_alerts_and_notifies_people_of_the_outage_alone(
    stack: Stack, tmp_path: Path
) -> None:
    endpoints = json.loads((stack.home / "endpoints.json").read_text())
    address = conninfo_to_dict(endpoints["postgres"]["dsn"])
    async with (
        FakeReceiver() as receiver,
        alertmanager(tmp_path / "alertmanager", webhooks(receiver)) as manager,
        tcp_proxy(str(address["host"]), int(str(address["port"]))) as proxy,
        watched(stack, tmp_path, postgres_port=proxy.listening, alertmanager=manager.address) as world,
    ):
        await world.use()
        await world.fires()
        receiver.notifications.clear()  # while everything started
        proxy.refusing = True
        proxy.cut()
        await until(lambda: notified(receiver, "page") == {"PenstockOutage": "firing"})
        async with without_answers(world):
            await world.fires(
                "PenstockOutage",
                "PenstockVitalsMissing",
                "PenstockQueryErrorsBurnsFast",
                "PenstockQueryErrorsBurns",
                "PenstockQueryErrorsBurnsSlowly",
                "PenstockTrailNotWritten",
                "PenstockCanaryLate",
                "PenstockCanaryIdle",
                "PenstockBreakerOpen",
            )
        assert notified(receiver, "page") == {"PenstockOutage": "firing"}
        assert notified(receiver, "ticket") == {}
        proxy.refusing = False
        await until(lambda: notified(receiver, "page")["PenstockOutage"] == "resolved")

        # The one on the errors of three days counts them for longer.
        left: set[str] = set()
        try:
            async with asyncio.timeout(180):
                while (left := {alert for alert in await manager.states() if "SearchLatency" not in alert}) - {SLOWEST}:
                    await asyncio.sleep(1)
        except TimeoutError:
            pytest.fail(f"{left} still fire")
