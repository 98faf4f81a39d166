"""Finds and installs the tools of tests and of the local stack: output, and Debian's apt-get and dpkg."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from pipeline.core.errors import Misconfigured

DEBIAN_SECONDS = 600
console = Console(stderr=True, highlight=False)


def show(find: Callable[[], Iterator[tuple[str, Path]]]) -> int:
    """Print ``name: path`` for every tool that ``find`` yields, on stderr. Returns the exit code: 1 when it raises
    Misconfigured."""
    try:
        for name, path in find():
            console.print(f"{name}: {path}", soft_wrap=True)
    except Misconfigured as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    return 0


def debian_mirror() -> str:
    """The address from which this machine's apt installs Debian's packages. Raises Misconfigured."""
    options = ("indextargets", "--format", "$(ORIGIN) $(CODENAME) $(REPO_URI)")
    listed = subprocess.run(["apt-get", *options], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        origin, codename, address = line.split(" ", 2)
        if origin == "Debian" and codename and "-" not in codename:
            return address
    raise Misconfigured("apt knows no mirror of Debian: this needs a Debian machine, and `apt-get update` once")


def run_debian(*command: str, at: Path | None = None) -> None:
    """Run apt-get or dpkg without questions, in the folder ``at``. Raises Misconfigured with the line that says why it
    failed."""
    name = f"{Path(command[0]).name} {command[1]}"
    try:
        done = subprocess.run(
            command,
            cwd=at,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=DEBIAN_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise Misconfigured(f"{name} did not end within {DEBIAN_SECONDS} s: is the network there?") from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if line.startswith("E:")]
        raise Misconfigured(f"{name} failed: {(errors or lines)[-1][:300]}")
