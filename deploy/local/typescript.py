"""The packages of npm for the TypeScript client's tests: ``python -m deploy.local.typescript`` installs them.

The versions and hashes are in packages/typescript/package-lock.json. npm takes the packages from where it is configured
to, and runs no script of theirs. They are kept among the local servers until the lock file changes.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deploy.local.lock import exclusive
from deploy.local.tools import run, show
from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings

PACKAGE = Path(__file__).parents[2] / "packages" / "typescript"
FILES = ("package.json", "package-lock.json", ".npmrc")
INSTALL_SECONDS = 600


def find() -> Path | None:
    """The folder ``node_modules``, if it is that of today's lock file and there is a Node to use it."""
    modules = _folder() / "node_modules"
    return modules if shutil.which("node") and modules.is_dir() else None


def require() -> Path:
    """The folder ``node_modules``, installed now if need be. Raises Misconfigured with one line."""
    return find() or _install()


def _folder() -> Path:
    content = b"".join((PACKAGE / name).read_bytes() for name in FILES)
    return settings.dist() / f"typescript-{hashlib.sha256(content).hexdigest()[:12]}"


def _install() -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Misconfigured("the TypeScript client needs Node 20 or later with npm, which are not on the PATH")
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        if (modules := find()) is not None:
            return modules  # another process was faster
        made = Path(scratch) / "made"
        made.mkdir()
        for name in FILES:
            shutil.copy(PACKAGE / name, made)
        late = f"npm did not end within {INSTALL_SECONDS} s: is the network there?"
        options = ("--ignore-scripts", "--no-audit", "--no-fund")
        done = run(["npm", "ci", *options], seconds=INSTALL_SECONDS, late=late, at=made)
        if done.returncode != 0:
            raise Misconfigured(f"npm failed: {(done.stderr.strip() or 'no output').splitlines()[0][:300]}")
        for replaced in folder.parent.glob("typescript-*"):
            if replaced.is_dir():
                shutil.rmtree(replaced, ignore_errors=True)
        made.rename(folder)
    return folder / "node_modules"


def look() -> Iterator[tuple[str, Path]]:
    """Raises Misconfigured when the packages cannot be installed."""
    yield "typescript", require()


if __name__ == "__main__":
    sys.exit(show(look))
