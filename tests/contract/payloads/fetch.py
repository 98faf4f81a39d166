"""Fetch the packages whose payloads are read: ``python -m tests.contract.payloads.fetch``.

Each is one file of PyPI's index that pip is configured with, or of the registry that npm is configured with; without
npm its packages are left out, as the tests of the TypeScript client are. A file is kept if its hash is the recorded
one. Nothing is built, installed or run.
"""

from __future__ import annotations

import hashlib
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx

from deploy.local.lock import exclusive
from deploy.local.tools import console, show
from pipeline.core.errors import Misconfigured
from tests.contract.payloads.sources import Package, folder, packages, verify

SECONDS = 180
_SIMPLE = "application/vnd.pypi.simple.v1+json"


def index() -> tuple[str, str | None]:
    """Return the address of the index that pip is configured with, and the file of certificates, if it has one."""
    from pip._internal.commands import create_command

    options = create_command("download").parser.get_default_values()
    return str(options.index_url), options.cert


def from_pypi(package: Package, address: str, certificates: str | None) -> bytes:
    """Return a file of PyPI's index. Raises Misconfigured."""
    verify = ssl.create_default_context(cafile=certificates) if certificates else True
    try:
        with httpx.Client(timeout=SECONDS, follow_redirects=True, verify=verify) as client:
            page = client.get(f"{address.rstrip('/')}/{package.name}/", headers={"Accept": _SIMPLE}).raise_for_status()
            urls = [row["url"] for row in page.json()["files"] if row["filename"] == package.file]
            if not urls:
                raise Misconfigured(f"pip's index has no {package.file}: was the release withdrawn?")
            return client.get(urljoin(str(page.url), urls[0])).raise_for_status().content
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise Misconfigured(
            f"{package.file} could not be fetched from pip's index ({type(error).__name__}): check the network, and"
            " `pip config list`; the index must offer its simple API as JSON"
        ) from error


def from_npm(package: Package) -> bytes:
    """Return a package of npm's registry. Raises Misconfigured."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", scratch]
        done = subprocess.run(
            [*command, f"{package.name}@{package.version}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        file = Path(scratch, package.file)
        if done.returncode != 0 or not file.exists():
            reason = next(iter(done.stderr.strip().splitlines()), "no output")
            raise Misconfigured(f"npm could not fetch {package.name}@{package.version}: {reason[:300]}")
        return file.read_bytes()


def fetch(package: Package) -> None:
    """Put the package's archive into place, if it is not there. Raises Misconfigured."""
    if package.archive.exists():
        verify(package)
        return
    content = from_npm(package) if package.registry == "npm" else from_pypi(package, *index())
    if hashlib.sha256(content).hexdigest() != package.sha256:
        raise Misconfigured(f"{package.file} is not what was recorded: do not use what this registry hands out")
    partial = package.archive.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(package.archive)


def main() -> int:
    """Fetch what is missing; returns the exit code."""
    return show(_fetched)


def _fetched() -> Iterator[tuple[str, Path]]:
    with exclusive(folder() / ".lock", waiting=lambda: console.print("waiting for another fetch")):
        for package in packages().values():
            if package.registry == "pypi" or shutil.which("npm"):
                fetch(package)
    yield "recorded payloads", folder()


if __name__ == "__main__":
    sys.exit(main())
