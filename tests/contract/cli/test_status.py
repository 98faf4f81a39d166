"""``penstock status`` on real servers, and on a world that is half down."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.stack import local_processes
from cli.status import look
from deploy.local.stack import Stack
from pipeline.diagnosis.problems import is_ready
from pipeline.maintenance.spending import Spending
from pipeline.observability.metrics import Metrics
from pipeline.runtime import settings as all_settings
from pipeline.runtime.settings import Settings
from pipeline.stores.postgres import Pool, open_pool
from tests.support.query.library import document
from tests.support.space import PROJECT, Space
from topics.registry import DOCUMENTS_BACKFILL

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

LEDGER = {
    "generations",
    "freshness",
    "pending",
    "dead_letters",
    "skipped",
    "connectors",
    "audit",
    "embedding",
    "producers",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def town(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Space, Pool]]:
    """A system with something of everything, and no workers."""
    async with AsyncExitStack() as closing:
        space = await closing.enter_async_context(Space.create(stack, tmp_path_factory.mktemp("status")))
        pool = await closing.enter_async_context(open_pool(space.settings.postgres))
        await space.publish(*(document(f"{n}.md", "Some text.") for n in range(3)), topic=DOCUMENTS_BACKFILL)
        async with pool.connection() as connection:
            await connection.execute(_FILL.encode())
        yield space, pool


_FILL = """
    INSERT INTO connectors (tenant, source, kind, loaded_at, activities, seen_at)
    VALUES ('acme', 'wiki', 'confluence', now(),
            '{"changes": {"state": "idle", "succeeded_at": "2026-11-20T08:00:00Z"}}', now() + interval '1 hour');
    INSERT INTO embedding_days (day, purpose, tokens, cost) VALUES ('2026-01-01', 'document', 9, 9);
    INSERT INTO documents (id, tenant, source, external_id, changed_at, received_at)
    SELECT gen_random_uuid(), 'acme', CASE WHEN n < 3 THEN 'wiki' ELSE 'drive' END, n::text,
        now() - interval '9 seconds', now() FROM generate_series(0, 3) n;
    INSERT INTO index_state (document_id, generation, store, want_seq, seq, settled_at)
    SELECT id, 'g1', store, 1, 1, now() FROM documents, unnest('{vectors,keywords}'::text[]) store
    WHERE external_id <> '0';
    INSERT INTO index_state (document_id, generation, store, want_seq, attempts, pending_since)
    SELECT id, 'g1', 'vectors', 1, 2, now() - interval '1 hour' FROM documents WHERE external_id = '0';
    INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, first_failed_at, dismissed_at)
    VALUES ('t:0:1', 't', 0, 1, 'detect', 'invalid', 'm', now(), NULL), ('t:0:2', 't', 0, 2, 'detect', 'invalid', 'm',
            now(), now());
    INSERT INTO audit_runs (generation, scope, finished_at, documents) VALUES ('g1', 'all', now(), 4);
"""


async def test_penstock_status_reports_every_part(town: tuple[Space, Pool]) -> None:
    space, _ = town
    report = await look(partial(local_processes, Stack(space.home)), space.settings)
    assert report["away"] == []
    assert json.loads(json.dumps(report)) == report
    assert {name: service["ready"] for name, service in report["services"].items()} == dict.fromkeys(
        ("kafka", "postgres", "elasticsearch"), True
    )
    assert is_ready(report)
    lag = {stage["stage"]: (stage["members"], stage["lag"]) for stage in report["stages"]}
    assert lag["detect"] == (0, {"live": 0, "backfill": 3})
    assert set(lag) == {"detect", "identities", "conversations", "vectors", "keywords", "conflicts", "standing"}
    assert [
        (generation["name"], generation["state"], generation["waiting"]) for generation in report["generations"]
    ] == [("g1", "active", 1)]
    assert report["freshness"]["documents"] == 3
    assert [(source["source"], source["documents"]) for source in report["freshness"]["by_source"]] == [
        ("wiki", 2),
        ("drive", 1),
    ]
    assert all(source["p99"] >= 9 for source in report["freshness"]["by_source"])
    assert (report["pending"]["vectors"]["documents"], report["pending"]["vectors"]["failing"]) == (1, 1)
    assert report["pending"]["oldest_seconds"] >= 3600
    assert report["dead_letters"]["waiting"] == 1  # the dismissed one does not count
    [connector] = report["connectors"]
    assert (connector["state"], connector["last_success_at"]) == ("following", "2026-11-20T08:00:00Z")
    assert report["audit"]["last"]["documents"] == 4
    assert report["embedding"] == []
    assert report["producers"] == {"mode": "off", "enrolled": 0, "refused_in_a_day": 0}
    assert report["canaries"] is None


def settings_with_port_of(settings: Settings, name: str, port: int) -> Settings:
    """The same, but that one service is said to be at this port."""
    parts = {
        "kafka": {"kafka": settings.kafka.model_copy(update={"bootstrap": f"127.0.0.1:{port}"})},
        "postgres": {
            "postgres": all_settings.PostgresSettings(dsn=f"postgresql://me:secret-canary@127.0.0.1:{port}/penstock")  # type: ignore[arg-type]
        },
        "elasticsearch": {"elasticsearch": all_settings.ElasticsearchSettings(url=f"http://127.0.0.1:{port}")},
    }
    return settings.model_copy(update=parts[name])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where somebody takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield listening.getsockname()[1]


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("name", ["kafka", "postgres", "elasticsearch"])
async def test_penstock_status_names_an_unreachable_service_and_shows_the_others(
    town: tuple[Space, Pool], silent_port: int, name: str, hangs: bool
) -> None:
    space, _ = town
    port = silent_port if hangs else 9
    report = await look(partial(local_processes, Stack(space.home)), settings_with_port_of(space.settings, name, port))
    assert {service for service, item in report["services"].items() if not item["ready"]} == {name}
    assert not is_ready(report)
    assert len(report["away"]) == 1
    assert f"127.0.0.1:{port}" in report["services"][name]["url"]
    assert "secret-canary" not in json.dumps(report)
    missing = {part for part in (*LEDGER, "stages") if report[part] is None}
    assert missing == {"kafka": {"stages"}, "postgres": LEDGER, "elasticsearch": set()}[name]


async def test_a_failing_part_of_the_ledger_report_hides_no_other_part(town: tuple[Space, Pool]) -> None:
    space, pool = town
    async with pool.connection() as connection:
        await connection.execute("ALTER TABLE embedding_days RENAME TO hidden")
    try:
        report = await look(partial(local_processes, Stack(space.home)), space.settings)
    finally:
        async with pool.connection() as connection:
            await connection.execute("ALTER TABLE hidden RENAME TO embedding_days")
    assert {part for part in LEDGER if report[part] is None} == {"embedding"}
    assert len(report["away"]) == 1
    assert "embedding" in report["away"][0]


async def test_todays_embedding_usage_is_summed_over_workers_and_outages(town: tuple[Space, Pool]) -> None:
    space, pool = town
    first, second = Metrics(), Metrics()
    for metrics in (first, second):
        metrics.embedding_price = 10.0
    mine, other = Spending(pool, first), Spending(pool, second)
    first.embedding_billed(100_000)
    await mine.record()
    await mine.record()  # nothing new: nothing is added
    first.embedding_billed(50_000)
    second.embedding_billed(50_000)
    async with pool.connection() as connection:
        await connection.execute("ALTER TABLE embedding_days RENAME TO hidden")
    await mine.record()  # cannot be written: it is kept
    async with pool.connection() as connection:
        await connection.execute("ALTER TABLE hidden RENAME TO embedding_days")
    await mine.record()
    await other.record()
    report = await look(partial(local_processes, Stack(space.home)), space.settings)
    assert report["embedding"] == [{"purpose": "document", "tokens": 200_000, "cost": 2.0}]
    async with pool.connection() as connection:
        await connection.execute("DELETE FROM embedding_days WHERE day > '2026-01-01'")


async def test_penstock_status_shows_a_running_worker_and_its_stages(town: tuple[Space, Pool]) -> None:
    space, _ = town
    stack = Stack(space.home)
    worker = await asyncio.to_thread(stack.start_worker, "vectors")
    try:
        report = await look(partial(local_processes, stack), space.settings)
        [mine] = report["workers"]
        assert (mine["name"], mine["pid"], mine["ready"], mine["waiting_for"]) == ("vectors", worker.pid, True, None)
        [stage] = mine["stages"]
        assert (stage["stage"], stage["ready"]) == ("vectors", True)
        assert {stage["stage"]: stage["members"] for stage in report["stages"]}["vectors"] == 1
    finally:
        await asyncio.to_thread(stack.stop, "vectors")


async def test_penstock_status_works_when_every_service_is_unreachable(tmp_path: Path) -> None:
    nowhere = all_settings.load()
    for name in ("kafka", "postgres", "elasticsearch"):
        nowhere = settings_with_port_of(nowhere, name, 9)
    report = await look(partial(local_processes, Stack(tmp_path)), nowhere)
    assert not any(service["ready"] for service in report["services"].values())
    assert len(report["away"]) == 3


# The command, in a pipe


def command(home: Path, *arguments: str) -> tuple[list[str], dict[str, Any]]:
    environment = {**os.environ, "PENSTOCK_HOME": str(home)}
    return [sys.executable, "-m", "cli.main", "status", *arguments], {"env": environment, "cwd": PROJECT}


async def test_status_watch_in_a_pipe_prints_one_line_each_time_until_it_is_closed(town: tuple[Space, Pool]) -> None:
    space, _ = town
    argv, options = command(space.home, "--watch", "--every", "0.2")
    with subprocess.Popen(argv, **options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(2)]
        process.stdout.close()
        said = await asyncio.to_thread(process.stderr.read)
        assert await asyncio.to_thread(process.wait, 60) == 0
    assert said == ""
    assert all("lag 3" in line and "dead 1" in line and "\x1b" not in line for line in lines)
    assert all("1 dead letters wait" in line for line in lines)


async def test_status_watch_in_json_prints_one_document_per_line(town: tuple[Space, Pool]) -> None:
    space, _ = town
    argv, options = command(space.home, "--watch", "--json", "--every", "0.2")
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored by what a shell runs in the background
    with subprocess.Popen(
        argv, **options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    ) as process:
        assert process.stdout is not None
        output = [json.loads(await asyncio.to_thread(process.stdout.readline)) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 60) == 130
    assert [item["dead_letters"]["waiting"] for item in output] == [1, 1]


async def test_penstock_status_prints_the_dead_letters_without_colours_in_a_pipe(town: tuple[Space, Pool]) -> None:
    space, _ = town
    argv, options = command(space.home)
    shown = await asyncio.to_thread(subprocess.run, argv, **options, capture_output=True, text=True, timeout=120)
    assert (shown.returncode, shown.stderr) == (0, ""), shown.stdout
    assert "1 wait (invalid 1)" in shown.stdout
    assert "\x1b" not in shown.stdout
