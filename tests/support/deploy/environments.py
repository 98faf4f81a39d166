"""Environments of their own into which the built wheels are installed, with what an extra requires."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.space import PROJECT

UV = Path(sys.executable).with_name("uv")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def penstock(self) -> str:
        return str(self.folder / "bin" / "penstock")

    def distributions(self) -> set[str]:
        lines = run(str(UV), "pip", "freeze", "--python", self.python).stdout.splitlines()
        return {line.partition("==")[0].partition(" @ ")[0] for line in lines}

    def megabytes(self) -> float:
        """The size of all files, without bytecode."""
        files = (file for file in self.folder.rglob("*") if file.is_file() and file.suffix != ".pyc")
        return sum(file.lstat().st_size for file in files) / 1e6


def build(folder: Path) -> Path:
    """Build both distributions of this tree; returns the folder of the wheels."""
    for tree in (PROJECT, PROJECT / "packages" / "testing"):
        build_wheel(tree, folder / "wheels")
    return folder / "wheels"


def build_wheel(tree: Path, wheels: Path) -> None:
    """Build the distribution of a tree into the folder ``wheels``, with what is installed here."""
    run(*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(wheels), str(tree))


def install(folder: Path, wheels: Path, *requirements: str) -> Environment:
    """Install requirements, which find Penstock's distributions in ``wheels`` and others, in the pinned versions, where
    this machine's configuration says."""
    run(str(UV), "venv", "--quiet", "--python", sys.executable, str(folder))
    environment = Environment(folder)
    run(
        *(str(UV), "pip", "install", "--quiet", "--python", environment.python, "--find-links", str(wheels)),
        *("--constraints", str(PROJECT / "constraints.txt"), *requirements),
    )
    return environment


def run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", env=outside_the_tree(), timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done


def outside_the_tree() -> dict[str, str]:
    """Our environment, without what leads to modules of the source tree."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
