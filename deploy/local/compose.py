"""Docker Compose for a test that reads docker-compose.yml as Docker does: ``python -m deploy.local.compose``.

``$PENSTOCK_COMPOSE`` names one; else ``docker-compose`` on the PATH is used if it is recent enough; else the package of
Debian 13 is downloaded by apt-get and unpacked among the local servers. (Debian 12 has an older one, in Python, which
cannot read the file.) It is one program that needs only libc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from deploy.local.tools import download_debian, show, unpack_debian
from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings

PACKAGE, SUITE = "docker-compose", "trixie"
PROGRAM = Path("usr/libexec/docker/cli-plugins/docker-compose")


def folder() -> Path:
    """Where the package is unpacked."""
    return settings.dist() / f"{PACKAGE}-{SUITE}"


def find() -> Path | None:
    """The one to use; None: there is none. Raises Misconfigured when the one that was named is not there."""
    if named := os.environ.get("PENSTOCK_COMPOSE"):
        path = shutil.which(named)
        if path is None:
            raise Misconfigured(f"PENSTOCK_COMPOSE names {named}, which cannot be run: correct it, or unset it")
        return Path(path)
    if (on_path := shutil.which(PACKAGE)) is not None and _is_recent(on_path):
        return Path(on_path)
    unpacked = folder() / PROGRAM
    return unpacked if os.access(unpacked, os.X_OK) else None


def require() -> Path:
    """The one to use, unpacked now if need be. Raises Misconfigured with one line."""
    if find() is None:
        unpack()
    path = find()
    if path is None:
        raise Misconfigured(
            "no Docker Compose of version 2 or later was found: install one, or name it with PENSTOCK_COMPOSE"
        )
    return path


def unpack() -> None:
    """Debian's package, into ``folder()``. Raises Misconfigured with the line that says why not."""
    unpack_debian(folder(), lambda: os.access(folder() / PROGRAM, os.X_OK), _download)


def _download(apt: str, work: Path) -> None:
    download_debian(apt, work, SUITE, PACKAGE)


def _is_recent(program: str) -> bool:
    done = subprocess.run([program, "version", "--short"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip().lstrip("v").partition(".")[0] not in ("", "0", "1")


def look() -> Iterator[tuple[str, Path]]:
    """Raises Misconfigured when there is none in the end."""
    yield "Docker Compose", require()


if __name__ == "__main__":
    sys.exit(show(look))
