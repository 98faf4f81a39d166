"""Files from Maven are compared with deploy/local/maven.sha256. Maven itself is replaced here."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from deploy.local import dist, fetch, maven, postgres_tls
from pipeline.core.errors import Misconfigured

ECJ = f"org.eclipse.jdt:ecj:{dist.VERSIONS['ecj']}"
JAR = f"ecj-{dist.VERSIONS['ecj']}.jar"
WHERE = f"org/eclipse/jdt/ecj/{dist.VERSIONS['ecj']}/{JAR}"


@pytest.fixture
def hands_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose content this Maven puts into the local repository, and from there where it is wanted."""
    content = tmp_path / "content"
    cached = tmp_path / ".m2/repository" / WHERE
    cached.parent.mkdir(parents=True)
    program = tmp_path / "bin" / "mvn"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ -e "{cached}" ] || cp "{content}" "{cached}"\ncp "{cached}" {JAR}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    return content


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def test_a_jar_with_a_wrong_checksum_is_refused_and_removed_from_the_cache(
    hands_out: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands_out.write_bytes(b"somebody else's")
    checksums = target.with_name("maven.sha256")
    checksums.write_text(f"{hashlib.sha256(b'the compiler').hexdigest()}  {WHERE}\n")
    monkeypatch.setattr(maven, "CHECKSUMS", checksums)
    with pytest.raises(Misconfigured, match=f"{JAR} is not what was recorded .* removed") as refused:
        maven.copy(ECJ, target)
    assert "\n" not in str(refused.value)
    assert [*target.iterdir()] == []
    hands_out.write_bytes(b"the compiler")
    assert maven.copy(ECJ, target).read_bytes() == b"the compiler", "the local repository still had the refused one"


def test_a_jar_without_a_recorded_checksum_is_refused(
    hands_out: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands_out.write_bytes(b"new")
    monkeypatch.setattr(maven, "CHECKSUMS", target.with_name("none"))
    maven.CHECKSUMS.write_text("")
    with pytest.raises(Misconfigured, match=r"no line in none: .* --record-checksums"):
        maven.copy(ECJ, target)
    assert [*target.iterdir()] == []


def test_setup_refuses_a_compiler_with_a_wrong_checksum(
    hands_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_DIST", str(tmp_path / "dist"))
    maven_ = tmp_path / "bin" / "mvn"  # one run for Kafka and the compiler, by --file
    maven_.write_text(
        '#!/bin/sh\nfor given; do [ "$last" = --file ] && at=$(dirname "$given"); last=$given; done\n'
        f'mkdir "$at/kafka" "$at/archives" && echo changed > "$at/archives/{JAR}"\n'
    )
    assert fetch.main() == 1
    assert f"error: {JAR} is not what was recorded" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "dist").iterdir()] == [".fetch.lock"]


def test_every_fetched_version_has_a_recorded_checksum() -> None:
    names = {path: digest for digest, path in maven.recorded().values()}
    expected = [
        *(f"org/apache/kafka/{name}/{dist.VERSIONS['kafka']}/" for name in ("kafka_2.13", "kafka-tools")),
        f"org/slf4j/slf4j-simple/{dist.VERSIONS['slf4j']}/",
        f"org/elasticsearch/distribution/integ-test-zip/elasticsearch/{dist.VERSIONS['elasticsearch']}/",
        *(f"io/zonky/test/postgres/{name}/{postgres_tls.VERSION}/" for name in postgres_tls.ARTIFACTS.values()),
        str(Path(WHERE).parent),
    ]
    assert [part for part in expected if not any(path.startswith(part) for path in names)] == []
    assert all(len(bytes.fromhex(digest)) == 32 for digest in names.values())
    assert len(names) == len(maven.CHECKSUMS.read_text().splitlines()), "two files of one name"


def test_the_local_stacks_jars_have_their_recorded_checksums() -> None:
    jars = [*(dist.servers() / "kafka").glob("*.jar")]
    assert {jar.name: maven.sha256(jar) for jar in jars} == {jar.name: maven.recorded()[jar.name][0] for jar in jars}
