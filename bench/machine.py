"""Describes the machine of a measurement and the versions of the measured software."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from deploy.local import dist

PROJECT = Path(__file__).parent.parent
NOT_CODE = (":!bench/results", ":!docs")


def moment() -> dict[str, Any]:
    """Return the time and the commit; clean: without local changes."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "clean": not _output("git", "status", "--porcelain", "--untracked-files=no", "--", ".", *NOT_CODE),
    }


def description() -> dict[str, Any]:
    return {
        **moment(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and the local stack's servers."""
    binaries = dist.postgres_bin()
    control = next(binaries.parent.glob("share/**/extension/vector.control")).read_text()
    return {
        "python": platform.python_version(),
        "postgres": (_output(str(binaries / "postgres"), "--version") or "").split()[-1],
        "pgvector": re.findall(r"default_version = '(.+)'", control)[0],
        "kafka": dist.VERSIONS["kafka"],
        "elasticsearch": dist.VERSIONS["elasticsearch"],
    }


def _processor() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.machine()


def _output(*command: str) -> str | None:
    """Return a command's output, or None if the command is missing or fails."""
    try:
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
