"""Apache Kafka, one node that is broker and controller at once (KRaft), from the jars on Maven Central."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from deploy.local import dist
from deploy.local.process import write_atomically
from deploy.local.service import (
    G1,
    HOST,
    Command,
    LocalSettings,
    Place,
    as_server_user,
    clean_env,
    java_command,
    own_file,
    own_folder,
    reason,
)
from pipeline.core.errors import Misconfigured
from topics.registry import MAX_MESSAGE_BYTES

LARGEST_RECORD_BYTES = MAX_MESSAGE_BYTES + 1024 * 1024
"""The largest message of any topic, its headers and a batch's overhead."""
LOGGING = {
    "showDateTime": "true",
    "dateTimeFormat": "yyyy-MM-dd'T'HH:mm:ss.SSS",
    "defaultLogLevel": "warn",
    "log.kafka.server": "info",
}
QUIET = ("-Djava.awt.headless=true", "--sun-misc-unsafe-memory-access=allow", "--enable-native-access=ALL-UNNAMED")
FORMATTER = "kafka.tools.StorageTool"
METADATA_REQUEST = struct.pack(">hhih8si", 3, 1, 1, 8, b"penstock", 0)
"""Metadata v1 (api key 3), correlation id 1, our client id, no topics: asks for the brokers only."""


class Kafka:
    name = "kafka"
    stop_signal = signal.SIGTERM
    start_timeout_seconds = 120.0
    collector = G1
    """The garbage collector; a variant of this server may have another one."""

    def ports(self) -> tuple[str, ...]:
        return ("kafka", "kafka-controller")

    def prepare(self, place: Place, ports: Mapping[str, int], settings: LocalSettings) -> None:
        own_folder(place.data)
        place.config.mkdir(parents=True, exist_ok=True)
        if "," in str(place.data):
            raise Misconfigured(f"Kafka cannot keep data under a path with a comma: {place.home} (set PENSTOCK_HOME)")
        properties = {**_properties(place, ports), **self.more_properties(place, ports)}
        lines = [f"{name}={_escaped(str(value))}\n" for name, value in properties.items() if value is not None]
        write_atomically(_properties_file(place), "".join(lines), mode=0o600)
        own_file(_properties_file(place))
        if not (place.data / "meta.properties").exists():
            _format(place)

    def more_properties(self, place: Place, ports: Mapping[str, int]) -> dict[str, object]:
        """Further properties of a variant of this server; None removes a property."""
        return {}

    def launch(self, place: Place, settings: LocalSettings) -> Command:
        logging = (f"-Dorg.slf4j.simpleLogger.{name}={value}" for name, value in LOGGING.items())
        java = [
            *java_command(place, settings.heap_kafka_mb, dist.kafka_archive()),
            self.collector,
            *QUIET,
            *logging,
        ]
        argv = [*java, "-cp", dist.kafka_classpath(), "kafka.Kafka", str(_properties_file(place))]
        return Command(as_server_user(argv, place.home, dist.servers(), dist.java()), clean_env())

    def is_mine(self, place: Place, argv: Sequence[str]) -> bool:
        return str(_properties_file(place)) in argv and bool({"kafka.Kafka", FORMATTER}.intersection(argv))

    def ready(self, address: str, place: Place) -> bool:
        """It lists at least one broker: itself, registered and no longer fenced."""
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=2) as connection:
                connection.sendall(struct.pack(">i", len(METADATA_REQUEST)) + METADATA_REQUEST)
                answer = connection.makefile("rb").read(12)
        except OSError:
            return False
        if len(answer) < 12:
            return False
        _size, _correlation, brokers = struct.unpack(">iii", answer)
        return bool(brokers >= 1)

    def complete(self, place: Place, port: int) -> None:
        """Nothing more: topics are made by ``penstock up`` after all services."""

    def url(self, place: Place, port: int) -> str:
        return f"{HOST}:{port}"

    def endpoint(self, place: Place, port: int) -> dict[str, str]:
        return {"bootstrap": self.url(place, port)}


def _properties_file(place: Place) -> Path:
    return place.config / "server.properties"


def _properties(place: Place, ports: Mapping[str, int]) -> dict[str, object]:
    client, controller = f"{HOST}:{ports['kafka']}", f"{HOST}:{ports['kafka-controller']}"
    return {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@{controller}",
        "listeners": f"PLAINTEXT://{client},CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://{client}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": place.data,
        "auto.create.topics.enable": "false",
        "num.partitions": 8,
        "default.replication.factor": 1,
        "min.insync.replicas": 1,
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 8,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 4,
        "group.initial.rebalance.delay.ms": 0,
        "message.max.bytes": LARGEST_RECORD_BYTES,
        "replica.fetch.max.bytes": LARGEST_RECORD_BYTES,
        "log.segment.bytes": 256 * 1024 * 1024,
        "log.retention.check.interval.ms": 5 * 60 * 1000,
        "log.cleaner.dedupe.buffer.size": 32 * 1024 * 1024,  # of the heap; the default takes 128 MB
        # After a SIGKILL the controller lets the broker register again only when its old session is over (default 9 s).
        "broker.session.timeout.ms": 6000,
        "broker.heartbeat.interval.ms": 1000,
    }


def _escaped(value: str) -> str:
    """As Java reads a properties file: Latin-1, everything else as UTF-16 escapes."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    pairs = (int.from_bytes(units[i : i + 2]) for i in range(0, len(units), 2))
    return "".join(chr(unit) if unit < 0x80 else f"\\u{unit:04x}" for unit in pairs)


def _format(place: Place) -> None:
    """Give the data folder its cluster id, once. It is whole when meta.properties is there."""
    offset = place.log.stat().st_size if place.log.exists() else 0
    argv = [
        *java_command(place, 128, dist.kafka_archive()),
        "-cp",
        dist.kafka_classpath(),
        FORMATTER,
        "format",
        "--ignore-formatted",
        "--cluster-id",
        _cluster_id(),
        "--config",
        str(_properties_file(place)),
    ]
    with place.log.open("ab") as log:
        done = subprocess.run(
            as_server_user(argv, place.home, dist.servers(), dist.java()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=clean_env(),
            check=False,
        )
    if done.returncode != 0:
        raise Misconfigured(f"kafka cannot format {place.data}: {reason(place.log, offset)} (log: {place.log})")


def _cluster_id() -> str:
    """A random UUID in Kafka's spelling (base64, 22 characters, not beginning with a dash)."""
    from base64 import urlsafe_b64encode

    while (spelled := urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return spelled
