"""Where the tests' servers keep their state."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.local.postgres import SHARED_MEMORY

FREE_BYTES = 6 << 30
"""Three workers' servers use less than 1 GiB; a container has 64 MiB by default, which is too little."""
PREFIX = "penstock-tests-"


@contextmanager
def servers_state(folder: Path) -> Iterator[Path]:
    """An empty folder in memory, removed afterwards; where there is not enough memory, one in ``folder``.

    A new database has 570 files and the topics of a test have hundreds: creating and removing them on disk took two
    thirds of the processor time of an ordinary contract test."""
    _remove_abandoned()
    try:
        enough = shutil.disk_usage(SHARED_MEMORY).free >= FREE_BYTES and os.access(SHARED_MEMORY, os.W_OK)
    except OSError:
        enough = False
    if not enough:
        yield folder
        return
    memory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=SHARED_MEMORY))
    try:
        yield memory
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def _remove_abandoned() -> None:
    """Removes what processes that were killed could not."""
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)
