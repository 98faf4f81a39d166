"""A real Prometheus that scrapes real processes: every query of every alert and panel is answered, with numbers."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local import prometheus
from deploy.prometheus.targets import JOB
from pipeline.kafka import deliver, producer
from tests.space import PROJECT, Space, now
from tests.unit.test_alerts import alerts, filled, panels
from topics.messages import DocumentUpserted
from topics.registry import DOCUMENTS_LIVE

pytestmark = pytest.mark.stack

RULES = PROJECT / "deploy" / "prometheus"
WORKERS = ("detect", "vectors", "keywords", "connectors")
NEEDS_MORE = {
    "max by (slice) (penstock_eval_ndcg)": "golden judgements, which somebody has to import",
    "max by (slice) (penstock_eval_faithfulness)": "golden judgements, and a model that writes answers",
    "histogram_quantile(0.95, sum by (le) (rate(penstock_query_first_token_seconds_bucket{}[1m])))":
        "a model that writes answers: quotations come whole",
}  # fmt: skip
"""Queries of panels that nothing answers in this world, and what they lack. All others must have a number."""


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def serving(space: Space) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pipeline.cli.main", "serve", "--port", "0", cwd=PROJECT, stdout=PIPE, stderr=DEVNULL,
        env={**space.environment, "PENSTOCK_SERVE_DEVELOPMENT": "true"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1]
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


@asynccontextmanager
async def watching(folder: Path, targets: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    """Prometheus as deploy/prometheus/local.yml says, only more often, and alerts without their patience.
    targets: address by worker."""
    folder.mkdir()
    for rules in ("recording.yml", "alerts.yml"):
        (folder / rules).write_text(re.sub(r"for: \d+[mh]", "for: 1s", (RULES / rules).read_text()))
    (folder / "prometheus.yml").write_text((RULES / "local.yml").read_text().replace("_interval: 5s", "_interval: 1s"))
    (folder / "targets.json").write_text(
        json.dumps([{"targets": [at], "labels": {"job": JOB, "worker": worker}} for worker, at in targets.items()])
    )
    address = f"127.0.0.1:{port()}"
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            prometheus.require("prometheus"), f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}", stdout=log, stderr=log,
        )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20, trust_env=False) as client:
            async with asyncio.timeout(60):
                while not await _ready(client):
                    assert process.returncode is None, (folder / "log").read_text()[-2000:]
                    await asyncio.sleep(0.1)
            yield client
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/-/ready")).status_code == 200
    except httpx.ConnectError:
        return False


async def values(client: httpx.AsyncClient, expression: str) -> list[float]:
    """What it evaluates to now, without what is no number. Fails when it cannot be evaluated."""
    answer = await client.get("/api/v1/query", params={"query": expression})
    told: dict[str, Any] = answer.json()
    assert told["status"] == "success", f"{expression}: {told.get('error')}"
    found = [float(sample["value"][1]) for sample in told["data"]["result"]]
    return [value for value in found if not math.isnan(value)]


async def use(space: Space, query: httpx.AsyncClient, folder: Path, n: int) -> None:
    """A bit of everything that people and sources do."""
    (folder / f"note-{n}.md").write_text(f"# Note {n}\n\nThe otter of note {n} swims.\n")
    await space.publish(
        DocumentUpserted(
            tenant="default",
            source="wiki",
            external_id="page",
            observed_at=now(),
            version=n + 1,
            title="A page",
            content=f"The heron of page {n} waits.",
            media_type="text/plain",
            acl_tags=("everyone",),
        )
    )
    for path, asked in (("/v1/search", {"query": "heron"}), ("/v1/answers", {"question": f"Who waits on page {n}?"})):
        answer = await query.post(path, json=asked)
        assert answer.status_code == 200, answer.text


async def firing(client: httpx.AsyncClient, wanted: set[str]) -> None:
    """Wait until exactly these alerts fire. Slow searches apart, which a busy machine is right to raise."""
    names: set[str] = set()
    try:
        async with asyncio.timeout(150):
            while True:
                told = (await client.get("/api/v1/alerts")).json()["data"]["alerts"]
                names = {one["labels"]["alertname"] for one in told if one["state"] == "firing"}
                names -= {name for name in names if "SearchLatency" in name}
                if names == wanted:
                    return
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"{sorted(names)} fire, and not {sorted(wanted)}")


def changed_target(folder: Path, worker: str, address: str) -> None:
    groups = json.loads((folder / "targets.json").read_text())
    for group in groups:
        if group["labels"]["worker"] == worker:
            group["targets"] = [address]
    (folder / "targets.json").write_text(json.dumps(groups))


@pytest.mark.timeout(700)
async def test_every_panel_and_alert_has_its_numbers_from_the_running_system(space: Space, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    declared = tmp_path / "connectors.toml"
    declared.write_text(
        f'[connector.notes]\nkind = "folder"\npaths = ["{folder}"]\nacl_tags = ["everyone"]\npoll_seconds = 1\n'
        "sweep_seconds = 2\n"
    )
    space.environment["PENSTOCK_CONNECTORS_FILE"] = str(declared)
    await asyncio.to_thread(space.start, *WORKERS)
    async with serving(space) as url, httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as query:
        addresses = {worker: f"127.0.0.1:{space.ports[worker]}" for worker in WORKERS}
        async with watching(tmp_path / "prometheus", {**addresses, "query": url.removeprefix("http://")}) as client:
            empty = {
                filled(target["expr"]): title
                for title, panel in panels()
                for target in panel.get("targets", ())
                if filled(target["expr"]) not in NEEDS_MORE
            }
            assert len(empty) > 60
            n = 0
            try:
                async with asyncio.timeout(150):
                    while empty:
                        await use(space, query, folder, n)
                        n += 1
                        await asyncio.sleep(1)
                        for expression in list(empty):
                            if await values(client, expression):
                                del empty[expression]
            except TimeoutError:
                pytest.fail(f"nothing to show: {json.dumps(empty, indent=1)}")
            for expression in NEEDS_MORE:
                assert not await values(client, expression), f"{expression} has numbers: expect it to"
            for alert in alerts():
                await values(client, alert["expr"])
            assert await values(client, 'sum(up{job="penstock"})') == [5.0]
            await firing(client, set())

            await asyncio.to_thread(space.stop, "vectors")
            await firing(client, {"PenstockWorkerAbsent", "PenstockWorkerDown"})
            await asyncio.to_thread(space.start, "vectors")
            changed_target(tmp_path / "prometheus", "vectors", f"127.0.0.1:{space.ports['vectors']}")
            await firing(client, set())

            async with producer(space.settings.kafka) as kafka:
                await deliver([kafka.send_raw(DOCUMENTS_LIVE, b"default/wiki/page", b"no JSON", [])])
            await firing(client, {"PenstockDeadLetters"})
            [(id_,)] = await space.query("SELECT id FROM dead_letters")
            await space.execute("UPDATE dead_letters SET at = now() - interval '8 days' WHERE id = %s", id_)
            await firing(client, set())
