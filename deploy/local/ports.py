"""Assigns ports to services: the configured one, else the previous one, else a free one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from deploy.local.process import write_atomically
from deploy.local.service import LocalSettings, free_port, is_free
from pipeline.core.errors import Misconfigured

FREED_SECONDS = 3.0
"""How long a killed server's port may stay taken: its threads give back half a gigabyte before its sockets close."""


def _becomes_free(port: int) -> bool:
    deadline = time.monotonic() + FREED_SECONDS
    while not is_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Ports:
    """Remembered in the state folder, so that a restarted stack keeps its addresses."""

    def __init__(self, home: Path, settings: LocalSettings) -> None:
        self._file = home / "run" / "ports.json"
        self._settings = settings

    def remembered(self) -> dict[str, int]:
        try:
            return {str(name): int(port) for name, port in json.loads(self._file.read_text()).items()}
        except (FileNotFoundError, ValueError, AttributeError):
            return {}

    def assign(self, names: Iterable[str]) -> dict[str, int]:
        """Ports for these names, none of them in use. Raises Misconfigured for a set port that is taken."""
        known = self.remembered()
        for name in names:
            configured = getattr(self._settings, f"port_{name}", None)
            if configured is not None:
                if not is_free(configured):
                    raise Misconfigured(
                        f"port {configured} (PENSTOCK_PORT_{name.upper()}) is taken by another program: stop it,"
                        " set another port, or unset the variable to find a free one"
                    )
                known[name] = configured
            elif name not in known or not _becomes_free(known[name]):
                known[name] = free_port(taken=frozenset(known.values()))
        write_atomically(self._file, json.dumps(known) + "\n")
        return known
