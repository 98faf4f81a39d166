"""Install real Airbyte sources for the tests: ``python -m tests.contract.connectors.airbyte.fetch``.

They get an environment of their own, because they pin what we use in other versions. Pip takes files with the recorded
hashes only, and builds nothing.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

from deploy.local.lock import exclusive
from deploy.local.tools import console, run, show
from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
IS_SUPPORTED = sys.version_info < (3, 13)
"""The sources run on no later Python."""


INSTALL_SECONDS = 1_800
OPTIONS = ("--quiet", "--no-compile", "--no-deps", "--require-hashes", "--only-binary=:all:")


def folder() -> Path:
    """Return the folder of the environment, another one for other requirements."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    return settings.dist() / f"airbyte-{sys.version_info.major}.{sys.version_info.minor}-{digest}"


def program(name: str) -> Path:
    """Return an installed program. Raises Misconfigured."""
    path = folder() / "bin" / name
    if not (folder() / "complete").exists():
        raise Misconfigured(f"{path} is not installed: make test-servers")
    return path


def install() -> None:
    """Install what is missing. Raises Misconfigured."""
    if (folder() / "complete").exists():
        return
    shutil.rmtree(folder(), ignore_errors=True)
    venv.create(folder(), with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder() / "bin" / "python"), "--disable-pip-version-check"]
    done = run(
        [*pip, "install", *OPTIONS, "-r", REQUIREMENTS],
        seconds=INSTALL_SECONDS,
        late=f"pip did not install the Airbyte sources of the tests within {INSTALL_SECONDS} s: is the network there?",
    )
    if done.returncode != 0:
        reason = next(iter(done.stderr.strip().splitlines()), "no output")
        raise Misconfigured(f"pip could not install the Airbyte sources of the tests: {reason[:300]}")
    (folder() / "complete").touch()


def main() -> int:
    """Install what is missing; returns the exit code."""
    if not IS_SUPPORTED:
        console.print("the Airbyte sources of the tests need Python 3.12 or older: their tests are skipped")
        return 0
    return show(_installed)


def _installed() -> Iterator[tuple[str, Path]]:
    with exclusive(settings.dist() / ".airbyte.lock", waiting=lambda: console.print("waiting for another install")):
        install()
    yield "Airbyte sources", folder()


if __name__ == "__main__":
    sys.exit(main())
