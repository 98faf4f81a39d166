"""A real Prometheus that scrapes real processes: every query of every alert and panel is answered, with numbers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from tests.fakes.webhooks import FakeWebhook
from tests.support.deploy.prometheus_kit import page, watched
from tests.support.space import PROJECT
from tests.unit.deploy.test_alerts import alerts, filled, panels

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.mark.timeout(600)
async def test_every_panel_query_of_a_running_system_returns_values(stack: Stack, tmp_path: Path) -> None:
    settings = {"PENSTOCK_QUERY_COSINE_FLOOR": "-1"}  # the vectors of the model are random
    async with (
        FakeWebhook() as taking,
        FakeWebhook() as paused,
        watched(stack, tmp_path, settings=settings) as world,
    ):
        empty = {filled(target["expr"]): title for title, panel in panels() for target in panel.get("targets", ())}
        assert len(empty) > 60
        await world.use()
        # A question whose answer is judged, by whom nothing else is found: the query service measures itself by it.
        known = page(1000, 1).model_copy(update={"acl_tags": ["golden"]})
        await world.space.publish(known)
        await world.space.settled([known])
        judged = {"source": known.source, "external_id": known.external_id, "anchor": "", "gain": 1}
        (tmp_path / "golden.jsonl").write_text(
            json.dumps({"tenant": "default", "query": "heron", "as": [], "tags": ["golden"], "judgements": [judged]})
        )
        importing = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cli.main",
            "golden",
            "import",
            str(tmp_path / "golden.jsonl"),
            env=world.space.environment,
            cwd=PROJECT,
        )
        assert await importing.wait() == 0
        add = ("webhook", "add", "--allow-private", "--json")
        # One that takes what is sent to it, and one that is paused: each has panels of its own.
        for name, receiver in {"taking": taking, "paused": paused}.items():
            code, added = await world.space.penstock(*add, name, receiver.url)
            assert code == 0, added
            receiver.secrets.append(added["secret"])
        code, _ = await world.space.penstock("webhook", "pause", "paused", "--json")
        assert code == 0
        try:
            async with asyncio.timeout(150), world.in_use():
                while empty:
                    await asyncio.sleep(1)
                    for expression in list(empty):
                        if await world.values(expression):
                            del empty[expression]
        except TimeoutError:
            pytest.fail(f"nothing to show: {json.dumps(empty, indent=1)}")
        code, _ = await world.space.penstock("webhook", "resume", "paused", "--json")
        assert code == 0
        async with asyncio.timeout(60):  # until this is seen, the alert of a paused webhook may begin to fire
            while await world.values("penstock_webhook_paused == 1"):
                await asyncio.sleep(1)
        for alert in alerts():
            await world.values(alert["expr"])
        await world.fires()
