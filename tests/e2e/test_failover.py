"""A Postgres standby that never received the last transactions of its primary is promoted, and takes its place."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from deploy.local import dist
from deploy.local.stack import Stack
from pipeline.kafka.groups import Groups, group
from query.http.serve import serving
from query.settings import AuthSettings, QuerySettings, ServeSettings
from tests.e2e.test_recover import access, answer, deletion, document, run, start, stop
from tests.support.pipeline.oracle import assert_equal
from tests.support.query.http_kit import DEVELOPMENT, as_, problem
from tests.support.space import Space, now
from topics.messages import IdentityChanged
from topics.registry import DOCUMENTS_LIVE, IDENTITIES

pytestmark = pytest.mark.slow

WORKERS = ("detect", "vectors", "keywords")
PATIENCE_SECONDS = 60.0


class Pair:
    """A primary with a streaming standby of its own port, which can take the primary's place."""

    def __init__(self, folder: Path) -> None:
        self.primary = Stack(folder / "primary", die_with_parent=True)
        self.standby = Stack(folder / "standby", die_with_parent=True)

    def start(self) -> None:
        self.primary.up(services=("postgres",))
        data = self.standby.home / "data"
        data.mkdir(parents=True)
        shutil.copy(self.primary.home / "data" / "postgres.password", data)
        binary = dist.postgres_bin() / "pg_basebackup"
        argv = [
            str(binary),
            "-D",
            str(data / "postgres"),
            "-d",
            self.dsn(self.primary, ""),
            "-R",
            "-X",
            "stream",
            "--checkpoint=fast",
        ]
        subprocess.run(argv, check=True, capture_output=True, timeout=120)
        self.standby.up(services=("postgres",))

    @staticmethod
    def dsn(stack: Stack, database: str = "postgres") -> str:
        dsn = stack.endpoints()["postgres"]["dsn"]
        return f"{dsn.rpartition('/')[0]}/{database}"

    def ask(self, stack: Stack, statement: str) -> Any:
        with psycopg.connect(self.dsn(stack), autocommit=True, connect_timeout=10) as connection:
            row = connection.execute(statement.encode()).fetchone()
        return row[0] if row else None

    def lose_what_comes_now(self) -> None:
        """The standby has all there is, and receives nothing more."""
        written = self.ask(self.primary, "SELECT pg_current_wal_lsn()::text")
        wait_until(lambda: self.ask(self.standby, f"SELECT pg_last_wal_replay_lsn() >= '{written}'"))
        with psycopg.connect(self.dsn(self.standby), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
        wait_until(lambda: self.ask(self.standby, "SELECT count(*) = 0 FROM pg_stat_wal_receiver"))

    def lose_the_primary(self) -> None:
        """The standby stands where the primary stood, not promoted yet."""
        ports = (self.primary.home / "run" / "ports.json").read_text()
        self.primary.kill("postgres")
        self.standby.stop("postgres")
        (self.standby.home / "run" / "ports.json").write_text(ports)
        self.standby.up(services=("postgres",))
        assert self.dsn(self.standby) == self.dsn(self.primary), "at the same address"

    def promote(self) -> None:
        assert self.ask(self.standby, "SELECT pg_promote()")

    def stop(self) -> None:
        self.standby.down()
        self.primary.down()


def wait_until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()


@pytest.fixture
async def space(stack: Stack, pair: Pair, tmp_path: Path) -> AsyncIterator[Space]:
    """On the pair's primary, and on the shared Kafka and Elasticsearch."""
    home = tmp_path / "shared"
    home.mkdir()
    endpoints = {**stack.endpoints(), "postgres": {"dsn": pair.dsn(pair.primary)}}
    (home / "endpoints.json").write_text(json.dumps(endpoints))
    async with Space.create(Stack(home), tmp_path) as space:
        yield space


@pytest.fixture
def local(space: Space) -> Iterator[Stack]:
    stack = Stack(space.home)
    yield stack
    for name in [worker.name for worker in stack.workers()]:
        stack.stop(name)


@asynccontextmanager
async def client_of(space: Space) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a query service that runs throughout the failover."""
    query = QuerySettings(serve=ServeSettings(port=0, requests_per_minute=100_000, **DEVELOPMENT), auth=AuthSettings())
    async with (
        serving(space.settings, query) as (address, service),
        httpx.AsyncClient(base_url=address, timeout=60) as client,
    ):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await service.following.warm.wait()
        yield client


async def search(client: httpx.AsyncClient) -> httpx.Response:
    question = {"query": "handbook chapter", "top": 50}
    return await client.post("/v1/search", json=question, headers=as_("mallory"))


def shown(response: httpx.Response) -> set[str]:
    assert response.status_code == 200, response.text
    return {result["external_id"] for result in response.json()["results"]}


async def refused(client: httpx.AsyncClient, *, saying: str) -> None:
    """Nothing is answered until it is refused for this reason, and nothing after it."""
    deadline, times = time.monotonic() + PATIENCE_SECONDS, 0
    while times < 10:
        response = await search(client)
        assert response.status_code == 503, f"such a ledger is not asked, and it showed {shown(response)}"
        _, kind = problem(response)
        times += kind == "ledger-fenced" and saying in response.json()["detail"]
        assert time.monotonic() < deadline, response.text
        await asyncio.sleep(0.05)


async def metric(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    [line] = [line for line in lines if line.startswith("penstock_query_ledger_fenced ")]
    return float(line.split()[1])


async def committed(space: Space) -> None:
    """Kafka will not give detect again what it has handled."""
    kafka = space.settings.kafka
    async with Groups(kafka.bootstrap, kafka.topic_prefix) as groups, asyncio.timeout(PATIENCE_SECONDS):
        logs = await groups.logs([DOCUMENTS_LIVE.name], now())
        while any(log.behind(at) for log, at in zip(logs.values(), await _at(groups, logs), strict=True)):
            await asyncio.sleep(0.1)


async def _at(groups: Groups, logs: Mapping[tuple[str, int], Any]) -> list[int | None]:
    done = await groups.committed(group("detect"))
    return [done.get(partition) for partition in logs]


async def test_a_failover_that_loses_a_revocation_does_not_expose_the_document(
    pair: Pair, space: Space, local: Stack
) -> None:
    start(local, space, *WORKERS)
    old = {name: document(name, f"{name} before") for name in ("same.md", "revoked.md", "deleted.md")}
    await space.publish(*old.values())
    mallory = IdentityChanged(tenant="acme", source="wiki", principal="mallory", observed_at=now(), groups=["staff"])
    await space.publish(mallory, topic=IDENTITIES)
    await space.settled(old.values())
    async with client_of(space) as client:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while shown(await search(client)) != set(old):
                await asyncio.sleep(0.1)
        await asyncio.to_thread(pair.lose_what_comes_now)
        created = document("created.md", "created meanwhile")
        lost = [access("revoked.md", "board"), deletion("deleted.md"), created]
        await space.publish(*lost)
        await space.settled(lost)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while shown(await search(client)) != {"same.md", "created.md"}:
                await asyncio.sleep(0.1)
        await committed(space)

        await asyncio.to_thread(pair.lose_the_primary)
        await refused(client, saying="Postgres is a standby")
        await asyncio.to_thread(pair.promote)
        # What the promoted ledger would show if it were asked:
        assert await space.query(
            "SELECT a.acl_tags FROM documents d JOIN access_sets a ON a.id = d.access_id"
            " WHERE external_id = 'revoked.md'"
        ) == [(["wiki/staff"],)]
        await refused(client, saying="`penstock recover --failover`")
        assert await metric(client) == 1
        assert (await client.get("/readyz")).text == "not ready: ledger fenced\n"
        command = await asyncio.to_thread(
            run, space, "search", "handbook chapter", "--tenant", "acme", "--as", "mallory"
        )
        assert command.returncode == 1
        assert "`penstock recover --failover`" in command.stderr
        assert "revoked.md" not in command.stdout
        status_report = await asyncio.to_thread(run, space, "status", "--json")
        assert any("`penstock recover --failover`" in line for line in json.loads(status_report.stdout)["away"])

        recovering = asyncio.create_task(answer(space, "recover", "--failover"))
        while not recovering.done():
            response = await search(client)
            assert response.status_code == 503 or not {"revoked.md", "deleted.md"} & shown(response)
            await asyncio.sleep(0.05)
        result = await recovering
        assert (result["audit"]["clean"], result["failed"], result["missing"]) == (True, 0, [])
        expected = {"same.md", "created.md"}
        assert shown(await search(client)) == expected
        assert await metric(client) == 0
        assert {w.name for w in local.workers() if w.ready} == set(WORKERS)

        again = document("again.md", "again")
        await space.publish(again)
        await space.settled([again])
        assert shown(await search(client)) == {*expected, "again.md"}
    stop(local, *WORKERS)
    revoked = old["revoked.md"].model_copy(update={"acl_tags": ["board"]})
    await assert_equal(space, [old["same.md"], revoked, created, again])


async def test_workers_started_behind_the_fence_wait_for_recovery_after_a_lossless_switchover(
    pair: Pair, space: Space, local: Stack
) -> None:
    start(local, space, *WORKERS)
    kept = document("kept.md", "kept")
    await space.publish(kept)
    await space.settled([kept])
    stop(local, *WORKERS)
    await asyncio.to_thread(pair.lose_what_comes_now)
    await asyncio.to_thread(pair.lose_the_primary)
    await asyncio.to_thread(pair.promote)
    for name in ("vectors", "keywords"):
        env = {k: v for k, v in space.environment.items() if k not in os.environ}
        await asyncio.to_thread(local.start_worker, name, env=env, wait=False)
    logs = [space.home / "logs" / f"worker-{name}.log" for name in ("vectors", "keywords")]
    await asyncio.to_thread(
        wait_until, lambda: all(log.is_file() and "ledger_fenced" in log.read_text() for log in logs)
    )
    recovering = asyncio.create_task(answer(space, "recover", "--failover"))
    await asyncio.to_thread(wait_until, lambda: asyncio.run(space.query("SELECT state FROM fence")) == [("replaying",)])
    start(local, space, "detect")
    assert (await recovering)["audit"]["clean"] is True
    assert await space.query("SELECT state FROM fence") == [("open",)]
    await assert_equal(space, [kept])
