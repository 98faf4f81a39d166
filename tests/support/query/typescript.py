"""The TypeScript client, generated and built anew, for tests that run where Node.js is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.space import PROJECT

PACKAGE = PROJECT / "packages" / "typescript"


def build(root: Path) -> Path:
    """A copy of the package below ``root``, built. Skips the test where Node.js is missing."""
    modules = PACKAGE / "node_modules"
    if not shutil.which("npm") or not modules.is_dir():
        pytest.skip("needs Node.js, and `make test-servers` with it")
    (root / "docs").mkdir()
    shutil.copy(PROJECT / "docs" / "openapi.json", root / "docs")
    package = root / "packages" / "typescript"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("node_modules", "dist"))
    (package / "node_modules").symlink_to(modules)
    npm(package, "run", "generate")
    npm(package, "run", "build")
    return package


def npm(at: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["npm", *arguments], cwd=at, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
