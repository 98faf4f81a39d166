"""The small decisions of the local stack: ports, the telling log line, configuration that survives odd paths."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from deploy.local import dist, fetch, postgres
from deploy.local.kafka import _cluster_id, _escaped
from deploy.local.ports import Ports
from deploy.local.service import (
    HOST,
    PORT_RANGE,
    LocalSettings,
    Place,
    _candidates,
    free_port,
    is_free,
    java_command,
    reason,
)
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured

POSTGRES_LOG = """
2026-01-01 10:00:00.000 UTC [1] LOG:  starting PostgreSQL 18
2026-01-01 10:00:00.001 UTC [1] FATAL:  could not create lock file "postmaster.pid": No space left on device
2026-01-01 10:00:00.002 UTC [1] LOG:  database system is shut down
"""
JAVA_LOG = """
2026-01-01T10:00:00 [main] ERROR kafka.server.BrokerServer - Fatal error during startup
org.apache.kafka.common.KafkaException: Socket server failed to bind to 127.0.0.1:9092: Address already in use.
\tat kafka.network.DataPlaneAcceptor.openServerSocket(SocketServer.scala:1)
Caused by: java.net.BindException: Address already in use
\tat java.base/sun.nio.ch.Net.bind0(Native Method)
\t... 14 more
"""


@pytest.mark.parametrize(
    ("log", "telling"),
    [
        (POSTGRES_LOG, "No space left on device"),
        (JAVA_LOG, "java.net.BindException: Address already in use"),
        ("Error: VM option 'X' is odd.\nError: A fatal exception has occurred. Program will exit.\n", "'X' is odd"),
        ("all is well\nbye\n", "bye"),
        ("", "it wrote nothing"),
    ],
)
def test_the_reason_is_the_telling_line_of_the_log(tmp_path: Path, log: str, telling: str) -> None:
    file = tmp_path / "log"
    file.write_text("FATAL: of an earlier run\n" + log)
    assert telling in reason(file, offset=len("FATAL: of an earlier run\n"))


def test_assigned_ports_are_remembered_unless_in_use(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ports = Ports(tmp_path, LocalSettings())
    first = ports.assign(["kafka", "kafka-controller"])
    assert set(first.values()) <= set(PORT_RANGE)
    assert first["kafka"] != first["kafka-controller"]
    assert Ports(tmp_path, LocalSettings()).assign(["kafka", "kafka-controller"]) == first
    with closing(socket.create_server((HOST, first["kafka"]))):
        assert not is_free(first["kafka"])
        changed = ports.assign(["kafka", "kafka-controller"])
    assert changed["kafka"] != first["kafka"]
    assert changed["kafka-controller"] == first["kafka-controller"]


def test_a_malformed_ports_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ports.json").write_text("[1, 2")
    assert set(Ports(tmp_path, LocalSettings()).assign(["postgres"])) == {"postgres"}


@pytest.fixture
def two_ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("deploy.local.service.PORT_RANGE", range(31_000, 31_002))
    _candidates.cache_clear()
    yield
    _candidates.cache_clear()


@pytest.mark.usefixtures("two_ports")
def test_a_free_port_is_not_one_already_assigned() -> None:
    assert free_port(taken=frozenset({31_000})) == 31_001
    with pytest.raises(Misconfigured, match="no free port"):
        free_port(taken=frozenset({31_000, 31_001}))


@pytest.mark.usefixtures("two_ports")
def test_two_servers_that_do_not_listen_yet_get_two_ports() -> None:
    for _ in range(10):
        assert {free_port(), free_port()} == {31_000, 31_001}


def test_paths_are_escaped_for_kafkas_properties() -> None:
    assert _escaped("/tmp/a b/é/漢/😀\\x") == "/tmp/a b/\\u00e9/\\u6f22/\\ud83d\\ude00\\\\x"


def test_a_cluster_id_never_looks_like_an_option() -> None:
    ids = {_cluster_id() for _ in range(300)}
    assert len(ids) == 300
    assert all(len(spelled) == 22 and not spelled.startswith("-") for spelled in ids)


@pytest.mark.parametrize(("version", "fine"), [("0.8.3", False), ("0.8.4", True), ("0.10.0", True), (None, False)])
def test_a_pgvector_that_corrupts_indexes_is_refused(tmp_path: Path, version: str | None, fine: bool) -> None:
    extension = tmp_path / "share" / "extension"
    extension.mkdir(parents=True)
    if version:
        (extension / "vector.control").write_text(f"default_version = '{version}'\n")
    if fine:
        postgres._require_pgvector(tmp_path / "bin")
    else:
        with pytest.raises(Misconfigured, match=r"pgvector 0\.8\.4 or newer is needed .* found (0\.8\.3|none)"):
            postgres._require_pgvector(tmp_path / "bin")


def test_starting_without_fetched_servers_names_make_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DIST", str(tmp_path / "dist"))
    with pytest.raises(Misconfigured, match="make setup"):
        Stack(tmp_path / "home").up()
    assert not (tmp_path / "home").exists()


def test_servers_of_another_version_count_as_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DIST", str(tmp_path))
    (tmp_path / "servers").mkdir()
    assert not dist.is_fetched()
    stamp = tmp_path / "servers" / dist.STAMP
    stamp.write_text(fetch.json.dumps(dist.expected_versions()))  # type: ignore[attr-defined]
    assert dist.is_fetched()
    monkeypatch.setitem(dist.VERSIONS, "kafka", "9.9.9")
    assert not dist.is_fetched()
    stamp.write_text("{half")
    assert not dist.is_fetched()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("The JAVA_HOME environment variable is not defined correctly,\n", "finds no Java"),
        ("[ERROR] Could not transfer artifact a:b: Connection refused -> [Help 1]\n[ERROR] \n", "check the network"),
        ("[ERROR] Failed: No space left on device\n", "No space left on device"),
        ("", "no output"),
    ],
)
def test_mavens_output_is_reduced_to_a_one_line_reason(output: str, said: str) -> None:
    reason = fetch._maven_reason(output)
    assert said in reason
    assert "\n" not in reason


def test_missing_maven_is_a_one_line_error_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_DIST", str(tmp_path / "dist"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch.main() == 1
    assert "error: mvn is not on the PATH: install Maven" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "dist").iterdir()] == [".fetch.lock"]


def test_java_reads_only_the_archives_of_classes_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "java", lambda: tmp_path / "java")
    monkeypatch.setattr(dist, "java_archive", lambda: tmp_path / "java.jsa")
    (tmp_path / "kafka.jsa").touch()
    command = java_command(Place(tmp_path, "kafka"), 512, tmp_path / "kafka.jsa", tmp_path / "missing.jsa")
    assert f"-XX:SharedArchiveFile={tmp_path / 'java.jsa'}:{tmp_path / 'kafka.jsa'}" in command


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(
    ("limit", "megabytes"), [("536870912\n", 256), ("max\n", 4096), ("9223372036854771712\n", 4096)]
)
def test_postgres_counts_on_the_memory_of_its_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, limit: str, megabytes: int
) -> None:
    monkeypatch.setattr(postgres, "CGROUPS", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 << 30))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(limit)
    assert postgres._settings(1, LocalSettings())["effective_cache_size"] == f"{megabytes}MB"
    chosen = LocalSettings(postgres_effective_cache_mb=300)
    assert postgres._settings(1, chosen)["effective_cache_size"] == "300MB"
