"""The local stack, really started: it comes up, survives kills with its data, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from typer import Typer
from typer.testing import CliRunner

from cli import stack as commands
from cli.status import status
from deploy.local import process, workers
from deploy.local.service import HOST
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured
from pipeline.kafka.stopping import stop_consumer

pytestmark = pytest.mark.stack

ALL = {"kafka", "postgres", "elasticsearch"}
READY_WORKER = """
import http.server, os
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(os.environ["PENSTOCK_STREAM_HEALTH_PORT"])), Ready).serve_forever()
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A state folder whose stack is stopped at the end, and of which no process may then be left."""
    folder = tmp_path / "state of é 1"  # a space and a letter beyond ASCII: paths like this exist
    yield folder
    Stack(folder).down()
    assert processes_of(folder) == []


def processes_of(folder: Path) -> list[psutil.Process]:
    """Live processes that name the folder. They may end at any moment: ask them nothing without expecting that."""
    return process.find(lambda argv: any(str(folder) in word for word in argv))


def endpoints(folder: Path) -> dict[str, dict[str, str]]:
    return dict(json.loads((folder / "endpoints.json").read_text()))


def eventually(holds: Callable[[], bool], *, within_seconds: float) -> bool:
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.1)
    return holds()


def command_line() -> Typer:
    app = Typer()
    for command in (commands.up, commands.down, status):
        app.command()(command)
    return app


@pytest.mark.slow
async def test_the_stack_survives_kills_with_its_data_and_leaves_no_process(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = Stack(home)
    took = {}

    def timed(what: str, action: Callable[[], object]) -> None:
        began = time.monotonic()
        action()
        took[what] = round(time.monotonic() - began, 2)

    timed("first up", stack.up)
    assert {service.name for service in stack.services() if service.ready and service.pid} == ALL
    before = {service.name: (service.pid, service.url) for service in stack.services()}

    timed("second up", stack.up)
    assert {service.name: (service.pid, service.url) for service in stack.services()} == before

    remember_in_postgres(home)
    await remember_in_kafka(home)
    remember_in_elasticsearch(home)
    for name in sorted(ALL):
        stack.kill(name)
    assert [(service.pid, service.ready) for service in stack.services()] == [(None, False)] * 3

    timed("up after SIGKILL of all", stack.up)
    assert {service.name: service.url for service in stack.services()} == {
        name: url for name, (_, url) in before.items()
    }
    assert recall_from_postgres(home) == [("kept",)]
    assert await recall_from_kafka(home) == [b"kept"]
    assert recall_from_elasticsearch(home) == 1

    timed("down", stack.down)
    assert processes_of(home) == []
    assert not (home / "endpoints.json").exists()
    assert stack.down() == []
    with capsys.disabled():
        print(f"\nlocal stack, seconds: {took}")


def remember_in_postgres(home: Path) -> None:
    with psycopg.connect(endpoints(home)["postgres"]["dsn"]) as connection:
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE kept (word text, place vector(2))")
        connection.execute("INSERT INTO kept VALUES ('kept', '[1,2]')")


def recall_from_postgres(home: Path) -> list[tuple[str]]:
    with psycopg.connect(endpoints(home)["postgres"]["dsn"]) as connection:
        return connection.execute("SELECT word FROM kept ORDER BY place <=> '[1,1]'").fetchall()


async def remember_in_kafka(home: Path) -> None:
    bootstrap = endpoints(home)["kafka"]["bootstrap"]
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic("kept", 1, 1)])
    finally:
        await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all")
    await producer.start()
    try:
        await producer.send_and_wait("kept", b"kept")
    finally:
        await producer.stop()


async def recall_from_kafka(home: Path) -> list[bytes]:
    consumer = AIOKafkaConsumer(bootstrap_servers=endpoints(home)["kafka"]["bootstrap"])
    await consumer.start()
    try:
        partition = TopicPartition("kept", 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        records = await consumer.getmany(partition, timeout_ms=10_000)
        return [record.value for record in records.get(partition, [])]
    finally:
        await stop_consumer(consumer)


def remember_in_elasticsearch(home: Path) -> None:
    """By the analyzer that our mapping names: "searching" is found as "searched"."""
    url = endpoints(home)["elasticsearch"]["url"]
    body = {
        "settings": {"number_of_replicas": 0, "analysis": {"analyzer": {"body": {"type": "english"}}}},
        "mappings": {"properties": {"text": {"type": "text", "analyzer": "body"}}},
    }
    assert httpx.put(f"{url}/kept", json=body).status_code == 200
    assert httpx.put(f"{url}/kept/_doc/1", json={"text": "the searching of indexes"}).status_code == 201
    assert httpx.put(f"{url}/never-made/_doc/1", json={"text": "x"}).status_code == 404  # no automatic indexes


def recall_from_elasticsearch(home: Path) -> int:
    url = endpoints(home)["elasticsearch"]["url"]
    answer = httpx.get(f"{url}/kept/_search", params={"q": "text:searched"}).raise_for_status()
    return int(answer.json()["hits"]["total"]["value"])


@pytest.mark.slow
def test_a_killed_up_leaves_no_orphaned_processes_after_down(home: Path) -> None:
    script = f"from pathlib import Path; from deploy.local.stack import Stack; Stack(Path({str(home)!r})).up()"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as starting:
        assert eventually(lambda: len(processes_of(home)) > 3, within_seconds=30)
        starting.kill()
    Stack(home).down()
    assert processes_of(home) == []


@pytest.mark.slow
def test_the_stack_ends_with_the_process_that_started_it(home: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from deploy.local.stack import Stack;"
        f"Stack(Path({str(home)!r}), die_with_parent=True).up(services=['postgres']);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    assert eventually(lambda: processes_of(home) == [], within_seconds=20)


def test_a_configured_port_in_use_is_misconfigured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server((HOST, 0))) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("PENSTOCK_PORT_POSTGRES", str(port))
        with pytest.raises(Misconfigured, match=rf"port {port} \(PENSTOCK_PORT_POSTGRES\) is taken"):
            Stack(home).up(services=["postgres"])


@pytest.mark.slow
def test_a_configured_port_is_used_and_a_remembered_port_in_use_is_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(socket.create_server((HOST, 0))) as finder:
        port = finder.getsockname()[1]
    monkeypatch.setenv("PENSTOCK_PORT_POSTGRES", str(port))
    stack = Stack(home)
    stack.up(services=["postgres"])
    assert f":{port}/" in endpoints(home)["postgres"]["dsn"]
    stack.down()
    monkeypatch.delenv("PENSTOCK_PORT_POSTGRES")
    with closing(socket.create_server((HOST, port))):
        stack.up(services=["postgres"])
    assert f":{port}/" not in endpoints(home)["postgres"]["dsn"]


@pytest.mark.parametrize("written", ["not json", "[]", '{"pid": %d, "created": 1.0}', '{"pid": %d}'])
def test_a_wrong_pid_file_kills_no_process(home: Path, written: str) -> None:
    bystander = psutil.Process()
    run = home / "run"
    run.mkdir(parents=True)
    for name in (*ALL, "worker-detect", "watchdog"):
        (run / f"{name}.json").write_text(written % os.getpid() if "%" in written else written)
    stack = Stack(home)
    assert [service.pid for service in stack.services()] == [None] * 3
    assert [worker.pid for worker in stack.workers()] == [None]
    assert stack.down() == []
    assert bystander.is_running()


@pytest.mark.slow
def test_postgres_starts_despite_a_stale_lock_that_names_a_living_process(home: Path) -> None:
    """After a reboot the pid in postmaster.pid may belong to anything."""
    stack = Stack(home)
    stack.up(services=["postgres"])
    stack.kill("postgres")
    lock = home / "data" / "postgres" / "postmaster.pid"
    lock.write_text(f"{os.getppid()}\n{lock.read_text().partition(chr(10))[2]}")
    stack.up(services=["postgres"])
    assert endpoints(home)["postgres"]["dsn"]


@pytest.mark.slow
def test_a_service_that_cannot_start_gives_a_one_line_reason(home: Path) -> None:
    stack = Stack(home)
    stack.up(services=["postgres"])
    stack.down()
    (home / "data" / "postgres" / "global" / "pg_control").unlink()
    with pytest.raises(Misconfigured) as caught:
        stack.up(services=["postgres"])
    assert "pg_control" in str(caught.value)
    assert "postgres.log" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert processes_of(home) == []


@pytest.mark.slow
def test_workers_are_started_killed_and_stopped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "command", lambda name: [sys.executable, "-c", READY_WORKER, name, str(home)])
    stack = Stack(home)
    first = stack.start_worker("detect")
    second = stack.start_worker("detect", instance=1)
    assert (first.name, first.ready, second.name, second.ready) == ("detect", True, "detect-1", True)
    assert stack.start_worker("detect").pid == first.pid  # runs already
    assert httpx.get(f"{second.health}/readyz").status_code == 200

    stack.kill("detect")
    assert [(worker.name, worker.ready, worker.pid is None) for worker in stack.workers()] == [
        ("detect", False, True),
        ("detect-1", True, False),
    ]
    assert sorted(stack.down()) == ["detect-1"]
    assert stack.workers() == []


@pytest.mark.slow
def test_a_worker_that_ends_at_once_is_misconfigured_with_its_last_line(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "command", lambda name: [sys.executable, "-c", "raise SystemExit('error: no topic')"])
    with pytest.raises(Misconfigured, match=r"worker detect stopped while starting: error: no topic \(log: "):
        Stack(home).start_worker("detect")


def test_status_and_down_when_nothing_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    shown = CliRunner().invoke(command_line(), ["status", "--json"])
    nothing = {"url": None, "pid": None, "ready": False}
    output = json.loads(shown.stdout)
    assert {name: output[name] for name in ("services", "workers", "query")} == {
        "services": dict.fromkeys(["kafka", "postgres", "elasticsearch"], nothing),
        "workers": [],
        "query": nothing,
    }
    assert shown.exit_code == 1
    down = CliRunner().invoke(command_line(), ["down"])
    assert (down.stdout, down.exit_code) == ("Nothing is running.\n", 0)
    assert json.loads(CliRunner().invoke(command_line(), ["down", "--json"]).stdout) == {"stopped": []}


@pytest.mark.slow
def test_up_with_an_invalid_port_fails_with_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    monkeypatch.setenv("PENSTOCK_PORT_KAFKA", "70000")
    outcome = CliRunner().invoke(command_line(), ["up"])
    assert outcome.exit_code == 1
    assert outcome.stderr == "error: setting PENSTOCK_PORT_KAFKA: Input should be less than or equal to 65535\n"
