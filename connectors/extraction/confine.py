"""What a reading process may not do, put on itself before it has read a byte of the document."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress

from connectors.extraction.limits import Limits

GRACE_SECONDS = 5
"""Beyond its wall-clock limit it ends itself, should whoever started it have died."""
_CLONE_NEWUSER = 0x10000000  # linux/sched.h
_CLONE_NEWNET = 0x40000000
_FORBIDDEN = (
    "socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request",
    "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn",
)  # fmt: skip
"""Audit events of CPython (docs.python.org, "Audit events table")."""


def confine(limits: Limits, *, may_start_programs: bool = False) -> None:
    """may_start_programs: OCR is several processes; each inherits all of this but the ban on them."""
    wanted = [
        (resource.RLIMIT_AS, limits.memory_bytes), (resource.RLIMIT_CPU, limits.cpu_seconds), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.written_bytes), (resource.RLIMIT_NOFILE, limits.open_files),
    ]  # fmt: skip
    if not may_start_programs:
        wanted.append((resource.RLIMIT_NPROC, 0))  # neither processes nor threads (does not hold for root)
    for what, most in wanted:
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(ValueError, OSError):  # macOS knows some of these by name only
            resource.setrlimit(what, (most, most))
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds + GRACE_SECONDS)
    _leave_the_network()
    if not may_start_programs:
        sys.addaudithook(_refuse)


def _leave_the_network() -> None:
    """Into an empty network namespace, where the system lets us (Linux with user namespaces, or root). Not needed by
    anything here: libraries that fetch nothing, held to it."""
    with suppress(OSError, AttributeError):
        flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWUSER | _CLONE_NEWNET
        ctypes.CDLL(None).unshare(flags)


def _refuse(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _FORBIDDEN:
        raise PermissionError(f"a reading process may not do this: {event}")
