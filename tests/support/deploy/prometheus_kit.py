"""A real Penstock that a real Prometheus watches, with time running faster for the alerts; the services that it calls
outside are fakes with knobs."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from psycopg.conninfo import make_conninfo

from deploy.local import prometheus
from deploy.local.service import free_port
from deploy.local.stack import Stack
from deploy.prometheus.targets import JOB
from pipeline.runtime.home import DEVELOPMENT_FILE
from query.auth.authenticator import AS
from tests.fakes.chat import FakeChat
from tests.fakes.openai import FakeOpenAI
from tests.fakes.rerank import FakeRerank
from tests.support.processes import serving
from tests.support.query.http_kit import bearer
from tests.support.space import PROJECT, Space, now
from topics.messages import DocumentUpserted

RULES = PROJECT / "deploy" / "prometheus"
WORKERS = ("detect", "vectors", "keywords", "analysis", "connectors", "canary")
FASTER = 60
"""The factor by which time is shortened: an hour passes in a minute."""
LEAST_FOR, LEAST_WINDOW, LEAST_AGE = 4, 15, 20
"""The shortest time limit, window or age in seconds: within it a busy machine gets its work done, and Prometheus, which
scrapes every second, has seen enough."""
READER = "reader"
"""The principal that searches: it must have results, or nothing is reranked."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SETTINGS = {
    "PENSTOCK_STREAM_VITALS_SECONDS": "1",
    "PENSTOCK_AUDIT_DOCUMENTS_PER_SECOND": "500",
    "PENSTOCK_CANARY_EVERY_SECONDS": "1",
    "PENSTOCK_EVAL_EVERY_SECONDS": "5",
    "PENSTOCK_WEBHOOKS_KEY": "a key of thirty-two characters and more",
}


def faster(rules: str) -> str:
    """The same alerts and ratios in less time: how long, over how long, and how old."""

    def seconds(amount: str, unit: str, least: int) -> str:
        return f"{max(least, int(amount) * UNITS[unit] // FASTER)}s"

    rules = re.sub(r"for: (\d+)([smhd])", lambda m: f"for: {seconds(m[1], m[2], LEAST_FOR)}", rules)
    rules = re.sub(
        r"(_seconds\)), (\d{2,})\)$", lambda m: f"{m[1]}, {max(LEAST_AGE, int(m[2]) // FASTER)})", rules, flags=re.M
    )
    rules = re.sub(r"\[(\d+)([smhd])\]", lambda m: f"[{seconds(m[1], m[2], LEAST_WINDOW)}]", rules)
    return re.sub(
        r"(_seconds.*) > (\d{2,})$", lambda m: f"{m[1]} > {max(LEAST_AGE, int(m[2]) // FASTER)}", rules, flags=re.M
    )


@dataclass
class Watched:
    space: Space
    query: httpx.AsyncClient
    prometheus: httpx.AsyncClient
    folder: Path
    """The folder of Prometheus."""
    notes: Path
    """The notes that the connector ``notes`` reads."""
    model: FakeOpenAI
    reranker: FakeRerank
    _used: int = 0

    async def values(self, expression: str) -> list[float]:
        """Return the present values of an expression, without those that are no numbers. Fails if it cannot be
        evaluated."""
        answer = await self.prometheus.get("/api/v1/query", params={"query": expression})
        body: dict[str, Any] = answer.json()
        assert body["status"] == "success", f"{expression}: {body.get('error')}"
        results = [float(sample["value"][1]) for sample in body["data"]["result"]]
        return [value for value in results if not math.isnan(value)]

    async def use(self) -> None:
        """A bit of everything that people and sources do."""
        n = self._used = self._used + 1
        if self.notes.is_dir():
            (self.notes / f"note-{n}.md").write_text(f"# Note {n}\n\nThe otter of note {n} swims.\n")
        await self.space.publish(page(n % 10, n))
        answer = await self.query.post("/v1/search", json={"query": f"heron {n}"})
        assert answer.status_code == 200, answer.text
        answer = await self.query.post("/v1/answers", json={"question": f"Who waits on page {n}?", "stream": True})
        assert answer.status_code == 200, answer.text

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """All the while, as on any day."""

        async def go_on() -> None:
            while True:
                await self.use()
                await asyncio.sleep(1)

        using = asyncio.create_task(go_on())
        try:
            yield
        finally:
            using.cancel()
            with suppress(asyncio.CancelledError):
                await using

    async def fires(self, *expected: str, within_seconds: float = 120) -> None:
        """Wait until exactly these alerts fire. On the way there no other begins to. Slow searches apart, which a busy
        machine is right to raise."""
        before = set(await self._firing())
        values: dict[str, str] = {}
        try:
            async with asyncio.timeout(within_seconds):
                while set(values := await self._firing()) != set(expected):
                    others = {why for name, why in values.items() if name not in before | set(expected)}
                    assert not others, f"{sorted(others)}, while {sorted(expected)} were to fire"
                    await asyncio.sleep(0.2)
        except TimeoutError:
            pytest.fail(f"{sorted(values)} fire, and not {sorted(expected)}")

    async def _firing(self) -> dict[str, str]:
        """Name → what it says."""
        body = (await self.prometheus.get("/api/v1/alerts")).json()["data"]["alerts"]
        return {
            item["labels"]["alertname"]: f"{item['labels']['alertname']}: {item['annotations']['summary']}"
            for item in body
            if item["state"] == "firing" and "SearchLatency" not in item["labels"]["alertname"]
        }

    async def starts(self, worker: str) -> None:
        """Where it listens may have changed."""
        await asyncio.to_thread(self.space.start, worker)
        groups = json.loads((self.folder / "targets.json").read_text())
        for group in groups:
            if group["labels"]["worker"] == worker:
                group["targets"] = [f"127.0.0.1:{self.space.ports[worker]}"]
        (self.folder / "targets.json").write_text(json.dumps(groups))

    async def stops(self, worker: str) -> None:
        await asyncio.to_thread(self.space.stop, worker)

    @contextmanager
    def unreadable(self) -> Iterator[None]:
        """The source's folder is not there."""
        away = self.notes.with_name("away")
        self.notes.rename(away)
        try:
            yield
        finally:
            away.rename(self.notes)


def page(n: int, version: int) -> DocumentUpserted:
    return DocumentUpserted(
        tenant="default",
        source="wiki",
        external_id=f"page-{n}",
        observed_at=now(),
        version=version,
        title="A page",
        content=f"The heron of page {version} waits.",
        media_type="text/plain",
        acl_tags=["everyone", f"user:{READER}"],
        source_modified_at=now(),
    )


@asynccontextmanager
async def watched(
    stack: Stack,
    folder: Path,
    *,
    postgres_port: int | None = None,
    alertmanager: str = "",
    settings: Mapping[str, str] | None = None,
) -> AsyncIterator[Watched]:
    """Every process runs and has been seen by Prometheus. postgres_port: where they reach Postgres, if not directly.
    alertmanager: the address that Prometheus reports to. settings: further ones of all processes."""
    async with AsyncExitStack() as open_:
        model = await open_.enter_async_context(FakeOpenAI(dimensions=64))
        reranker = await open_.enter_async_context(FakeRerank())
        chat = await open_.enter_async_context(FakeChat())
        embedding = {"provider": "openai", "base_url": model.url, "dimensions": 64, "timeout_seconds": 2}
        space = await open_.enter_async_context(Space.create(stack, folder, embedding=embedding))
        notes = folder / "notes"
        notes.mkdir()
        (notes / "first.md").write_text(
            "# First\n\nAn empty folder may be one that is not mounted: it would be waited for.\n"
        )
        declared = folder / "connectors.toml"
        declared.write_text(
            f'[connector.notes]\nkind = "folder"\npaths = ["{notes}"]\nacl_tags = ["everyone"]\npoll_seconds = 1\n'
            "sweep_seconds = 2\ngroups_seconds = 2\n"
        )
        space.environment |= SETTINGS | {"PENSTOCK_CONNECTORS_FILE": str(declared)} | dict(settings or {})
        if postgres_port is not None:
            dsn = space.settings.postgres.dsn.get_secret_value()
            proxied = make_conninfo(dsn, host="127.0.0.1", port=postgres_port)
            space.environment["PENSTOCK_POSTGRES_DSN"] = proxied
        await asyncio.to_thread(space.start, *WORKERS)
        outside = {
            "PENSTOCK_RERANK_URL": reranker.url(),
            "PENSTOCK_RERANK_MODEL": reranker.model,
            "PENSTOCK_CHAT_BASE_URL": chat.url,
            "PENSTOCK_CHAT_MODEL": chat.model,
        }
        serve = {"PENSTOCK_SERVE_DEVELOPMENT": "true", "PENSTOCK_SERVE_REQUESTS_PER_MINUTE": "100000"}
        url, _ = await open_.enter_async_context(serving({**space.environment, **outside, **serve}))
        query = await open_.enter_async_context(
            httpx.AsyncClient(
                base_url=url,
                timeout=60,
                trust_env=False,
                headers={AS: READER, **bearer(space.home / DEVELOPMENT_FILE)},
            )
        )
        targets = {worker: f"127.0.0.1:{space.ports[worker]}" for worker in WORKERS}
        targets["query"] = url.removeprefix("http://")
        client = await open_.enter_async_context(watching(folder / "prometheus", targets, alertmanager))
        world = Watched(space, query, client, folder / "prometheus", notes, model, reranker)
        async with asyncio.timeout(60):
            while await world.values(f'sum(up{{job="{JOB}"}})') != [len(targets)]:
                await asyncio.sleep(0.2)
        yield world


def write_targets(folder: Path, targets: Mapping[str, str]) -> None:
    """targets: address by worker. Prometheus reads them again within seconds."""
    (folder / "targets.json").write_text(
        json.dumps([{"targets": [at], "labels": {"job": JOB, "worker": worker}} for worker, at in targets.items()])
    )


@asynccontextmanager
async def watching(
    folder: Path, targets: Mapping[str, str], alertmanager: str = ""
) -> AsyncIterator[httpx.AsyncClient]:
    """Prometheus as deploy/prometheus/local.yml says, only faster. targets: address by worker. alertmanager: its
    address."""
    folder.mkdir()
    for rules in ("recording.yml", "alerts.yml"):
        (folder / rules).write_text(faster((RULES / rules).read_text()))
    written = (RULES / "local.yml").read_text().replace("_interval: 5s", "_interval: 1s")
    if alertmanager:
        written += f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{alertmanager}']}}]}}]}}\n"
    (folder / "prometheus.yml").write_text(written)
    write_targets(folder, targets)
    address = f"127.0.0.1:{free_port()}"
    options = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}")
    async with started("prometheus", *options, address=address, log=folder / "log") as client:
        yield client


@asynccontextmanager
async def started(
    program: prometheus.Program, *options: str, address: str, log: Path, cwd: Path | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """One of Prometheus' servers, which listens on an address and is ready; yields a client of it."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(prometheus.require(program), *options, f"--web.listen-address={address}"),
            cwd=cwd,
            stdout=output,
            stderr=output,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20, trust_env=False) as client:
            async with asyncio.timeout(60):
                while not await _is_ready(client):
                    assert process.returncode is None, log.read_text()[-2000:]
                    await asyncio.sleep(0.1)
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/-/ready")).status_code == 200
    except httpx.ConnectError:
        return False
