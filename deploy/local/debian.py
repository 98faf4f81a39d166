"""Debian's tools, run so that what they say is handed on in one line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pipeline.core.errors import Misconfigured

SECONDS = 600


def run(*command: str, at: Path | None = None) -> None:
    """apt-get or dpkg, asking nothing. at: the folder that it works in. Raises Misconfigured with the line that says
    why not."""
    name = f"{Path(command[0]).name} {command[1]}"
    try:
        done = subprocess.run(
            command, cwd=at, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", check=False, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Misconfigured(f"{name} did not end within {SECONDS} s: is the network there?") from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if line.startswith("E:")]
        raise Misconfigured(f"{name} failed: {(errors or lines)[-1][:300]}")
