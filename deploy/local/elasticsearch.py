"""Elasticsearch from its own integration-test distribution (Maven Central), with our plugin of analyzers.

A real server with few modules: no ``GET /`` and no delete or update by query.
"""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from deploy.local import dist
from deploy.local.process import write_atomically
from deploy.local.service import (
    FIRST_COMPILER,
    G1,
    HOST,
    SERIAL,
    Command,
    LocalSettings,
    Place,
    as_server_user,
    clean_env,
    own_folder,
)


class Elasticsearch:
    name = "elasticsearch"
    stop_signal = signal.SIGTERM
    start_timeout_seconds = 180.0

    def ports(self) -> tuple[str, ...]:
        return ("elasticsearch", "elasticsearch-transport")

    def prepare(self, place: Place, ports: Mapping[str, int], settings: LocalSettings) -> None:
        own_folder(place.data)
        own_folder(_snapshots(place))
        own_folder(place.config)
        own_folder(place.config / "tmp")
        own_folder(place.log.parent / "elasticsearch")
        (place.config / "elasticsearch.keystore.tmp").unlink(missing_ok=True)  # of a start that was cut short
        configuration = {**_settings(place, ports), **self.more_settings(place)}
        # JSON is YAML: no quoting to get wrong.
        write_atomically(place.config / "elasticsearch.yml", json.dumps(configuration, indent=1) + "\n")
        write_atomically(place.config / "jvm.options", "\n".join(_jvm_options(place, settings)) + "\n")
        write_atomically(place.config / "log4j2.properties", LOG4J)

    def more_settings(self, place: Place) -> dict[str, object]:
        """Further settings of a variant of this server."""
        return {}

    def launch(self, place: Place, settings: LocalSettings) -> Command:
        """The distribution's launcher, called as its shell script would, which starts one more Java.
        It starts the server, waits until it is up, and ends."""
        home = self.distribution()
        argv = [
            str(dist.java()),
            "-Xms4m",
            "-Xmx64m",
            SERIAL,
            FIRST_COMPILER,
            f"-XX:SharedArchiveFile={dist.java_archive()}",
            "-Dcli.name=server",
            "-Dcli.script=elasticsearch",
            "-Dcli.libs=lib/tools/server-cli",
            f"-Des.path.home={home}",
            f"-Des.path.conf={place.config}",
            "-Des.distribution.type=zip",
            "-Des.java.type=ES_JAVA_HOME",
            "-cp",
            f"{home}/lib/*:{home}/lib/cli-launcher/*",
            "org.elasticsearch.launcher.CliToolLauncher",
            "-d",
        ]
        env = {**clean_env(), "ES_TMPDIR": str(place.config / "tmp"), "LIBFFI_TMPDIR": str(place.config / "tmp")}
        return Command(as_server_user(argv, place.home, home, dist.servers(), dist.java()), env, home, daemonizes=True)

    def distribution(self) -> Path:
        """The folder with ``lib`` and ``modules``. Raises Misconfigured."""
        return dist.elasticsearch_home()

    def is_mine(self, place: Place, argv: Sequence[str]) -> bool:
        return f"-Dpenstock.home={place.home}" in argv or f"-Des.path.conf={place.config}" in argv

    def ready(self, address: str, place: Place) -> bool:
        connection = self.connection(urlsplit(address).netloc)
        try:
            connection.request("GET", "/_cluster/health?filter_path=status,timed_out", headers=self.login())
            answer = connection.getresponse()
            return answer.status == 200 and json.loads(answer.read()).get("status") in ("green", "yellow")
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()

    def connection(self, host: str) -> http.client.HTTPConnection:
        """host: with its port."""
        return http.client.HTTPConnection(host, timeout=2)

    def login(self) -> dict[str, str]:
        """Headers that say who asks whether it is ready."""
        return {}

    def complete(self, place: Place, port: int) -> None:
        """Nothing more: indexes are made by ``penstock up`` after all services."""

    def url(self, place: Place, port: int) -> str:
        return f"http://{HOST}:{port}"

    def endpoint(self, place: Place, port: int) -> dict[str, str]:
        return {"url": self.url(place, port)}


def _snapshots(place: Place) -> Path:
    """Where a repository of snapshots may be made."""
    return place.data.with_name("elasticsearch-snapshots")


def _settings(place: Place, ports: Mapping[str, int]) -> dict[str, object]:
    return {
        "cluster.name": "penstock-local",
        "node.name": "local",
        "path.data": str(place.data),
        "path.repo": str(_snapshots(place)),
        "path.logs": str(place.log.parent / "elasticsearch"),
        "network.host": HOST,
        "http.port": ports["elasticsearch"],
        "transport.port": ports["elasticsearch-transport"],
        "discovery.type": "single-node",
        "xpack.security.enabled": False,
        "action.auto_create_index": False,
        "search.max_keep_alive": "10m",  # what is erased stays readable through an open search; the audit needs 5
        "cluster.routing.allocation.disk.threshold_enabled": False,  # a laptop's disk is often 90 % full
    }


def _jvm_options(place: Place, settings: LocalSettings) -> list[str]:
    """The distribution's own, without the incubating vector module (not in our Java) and the GC log; and with less
    memory, unless it runs for long."""
    logs = place.log.parent / "elasticsearch"
    return [
        f"-Xms{settings.heap_elasticsearch_mb}m",
        f"-Xmx{settings.heap_elasticsearch_mb}m",
        # Without them it has 680 MB after a load instead of 340, and takes a tenth more of the processor.
        "-XX:-AlwaysPreTouch",
        *([G1] if settings.elasticsearch_second_compiler else [SERIAL, FIRST_COMPILER]),
        "-Djava.io.tmpdir=${ES_TMPDIR}",
        "-XX:CompileCommand=dontinline,java/lang/invoke/MethodHandle.setAsTypeCache",
        "-XX:CompileCommand=dontinline,java/lang/invoke/MethodHandle.asTypeUncached",
        "-Dorg.apache.lucene.store.defaultReadAdvice=normal",
        "-Dorg.apache.lucene.store.MMapDirectory.sharedArenaMaxPermits=1",
        "-XX:+ExitOnOutOfMemoryError",
        f"-XX:ErrorFile={logs}/crash-%p.log",
        f"-Dpenstock.home={place.home}",
    ]


LOG4J = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d{ISO8601}][%-5p][%-25c{1.}] %m%consoleException%n
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = ${sys:es.logs.base_path}${sys:file.separator}server.log
appender.file.filePattern = ${sys:es.logs.base_path}${sys:file.separator}server-%i.log
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = [%d{ISO8601}][%-5p][%-25c{1.}] %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 32MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
rootLogger.appenderRef.file.ref = file
"""
