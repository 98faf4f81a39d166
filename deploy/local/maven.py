"""One artifact of Maven Central at a time, for what the secured stack alone needs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from deploy.local import dist
from pipeline.core.errors import Misconfigured

SECONDS = 600


def copy(artifact: str, to: Path) -> Path:
    """The jar of ``group:artifact:version``, in an existing folder that holds no other. Raises Misconfigured."""
    maven = shutil.which("mvn")
    if maven is None:
        raise Misconfigured("mvn is not on the PATH: install Maven (and a Java for it), e.g. apt-get install maven")
    plugin = f"org.apache.maven.plugins:maven-dependency-plugin:{dist.VERSIONS['maven-dependency-plugin']}"
    argv = [maven, "--batch-mode", "--quiet", f"{plugin}:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={to}"]
    try:
        done = subprocess.run(
            argv, cwd=to, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Misconfigured(f"Maven did not fetch {artifact} within {SECONDS} s: is the network there?") from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "[ERROR]" in line] or ["no output"]
        raise Misconfigured(f"Maven could not fetch {artifact}: {lines[0][:400]}")
    [jar] = to.glob("*.jar")
    return jar
