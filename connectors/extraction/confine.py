"""What a reading process may not do, put on itself before it has read a byte of the document."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from connectors.extraction import landlock, seccomp
from connectors.extraction.limits import Limits

GRACE_SECONDS = 5
"""Beyond its wall-clock limit it ends itself, should whoever started it have died."""
_PR_SET_DUMPABLE = 4
_THREADS = Path("/proc/self/task")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FORBIDDEN = (
    "socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request",
    "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn",
)  # fmt: skip
"""Audit events of CPython (docs.python.org, "Audit events table")."""
_OF_THE_SYSTEM = (
    "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/local/bin", "/usr/local/lib",
    "/usr/local/lib64", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/fonts",
    "/etc/ghostscript", "/etc/ld.so.cache", "/etc/localtime", "/proc/cpuinfo", "/proc/meminfo",
    "/sys/devices/system/cpu", "/dev/urandom", "/dev/zero", "/var/cache/fontconfig", "/var/lib/ghostscript",
)  # fmt: skip
"""What programs that recognise text run and read. Neither ``/etc``, ``/home`` nor ``/opt`` as a whole: secrets lie
there."""
_SHARED = (Path("/usr/share"), Path("/usr/local/share"))
_DATA = ("tessdata*", "tesseract*", "ghostscript*", "fonts*", "fontconfig*", "color", "poppler*", "zoneinfo")
"""Folders in a ``share`` that such programs read. In ``~/.local/share`` there are keyrings beside them."""
_OF_PYTHON = ("bin", "lib/python3*", "lib/lib*", "lib64/python3*", "lib64/lib*")


class Unconfined(Exception):
    """The kernel does not let a process confine itself. The text says what is missing."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """What this machine's kernel offers. Whether it can be used is only certain once a process has used it."""

    landlock: int
    """The version of its ABI; 0: none."""
    seccomp: bool

    @property
    def is_complete(self) -> bool:
        return self.landlock > 0 and self.seccomp

    def __str__(self) -> str:
        of_files = f"Landlock {self.landlock}" if self.landlock else "no Landlock"
        return f"{of_files}, {'seccomp' if self.seccomp else 'no seccomp'}"


@cache
def available() -> Confinement:
    return Confinement(landlock.abi(), seccomp.is_available())


def limit(limits: Limits, *, may_start_programs: bool = False) -> None:
    """What it may use up. may_start_programs: OCR is several processes; each inherits all of this."""
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
    with suppress(OSError):  # where memory runs out it is the one to go, not who started it
        _OOM_SCORE.write_text("1000")
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds + GRACE_SECONDS)


def confine(readable: Sequence[Path] = ()) -> None:
    """From here on it computes on what it has open, and nothing else: no file but those below ``readable``, no network,
    no process or thread, no signal, no look at another process. All that it needs is imported before. Raises
    Unconfined."""
    _require_one_thread()
    _be_private()
    try:
        landlock.restrict([(path, landlock.READ) for path in readable])
        seccomp.allow_only([*seccomp.COMPUTING, *(seccomp.READING if readable else ())])
    except OSError as error:
        raise Unconfined(str(error)) from error


def confine_program(program: Path, folder: Path) -> None:
    """For a program that this process becomes, and all that it starts: the system's programs and libraries, the
    program's own environment and a few named folders of data may be run and read, ``folder`` alone may be written. No
    network. Raises Unconfined."""
    _require_one_thread()
    installed = [*map(Path, _OF_THE_SYSTEM), *_found(_SHARED, _DATA), *_around(program)]
    try:
        landlock.restrict(
            [*((path, landlock.RUN) for path in installed), (folder, landlock.CHANGE),
             (Path(os.devnull), landlock.CHANGE)]
        )  # fmt: skip
        seccomp.refuse(seccomp.FOREIGN)
    except OSError as error:
        raise Unconfined(str(error)) from error


def forbid() -> None:
    """Where it cannot be confined and may run all the same: CPython itself refuses. Native code passes it."""
    _be_private()
    sys.addaudithook(_refuse)


def _around(program: Path) -> list[Path]:
    """The folders of a program and of what its links lead to, the data beside them, and the environment of its own
    (virtual, with the Python that it was made from, or conda's) in which it is."""
    folders = list(dict.fromkeys([program.parent, program.resolve().parent]))
    found = [*folders, *_found([folder.parent / "share" for folder in folders], _DATA)]
    for folder in folders:
        if (folder.parent / "pyvenv.cfg").is_file():
            found += [folder.parent, *_found([(folder / "python").resolve().parent.parent], _OF_PYTHON)]
        elif (folder.parent / "conda-meta").is_dir():
            found += [folder.parent / "lib"]
    return found


def _found(folders: Sequence[Path], patterns: Sequence[str]) -> list[Path]:
    return [path for folder in folders for pattern in patterns for path in folder.glob(pattern)]


def _require_one_thread() -> None:
    """Landlock holds for the thread that asks for it."""
    try:
        count = len(os.listdir(_THREADS))
    except OSError as error:
        raise Unconfined("its threads cannot be counted (no /proc)") from error
    if count != 1:
        raise Unconfined(f"it has {count} threads")


def _be_private() -> None:
    """Neither its memory nor its descriptors are open to other processes of its user."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _refuse(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _FORBIDDEN:
        raise PermissionError(f"a reading process may not do this: {event}")
