"""One fresh process a document: started, watched, ended, and its answer read."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from io import FileIO
from pathlib import Path
from typing import IO

from connectors.extraction import answer, kinds, ocr
from connectors.extraction.confinement import available
from connectors.extraction.kinds import Kind
from connectors.extraction.limits import Limits
from connectors.extraction.remote import RemoteJob
from connectors.extraction.result import Extracted, Unreadable
from connectors.extraction.settings import ExtractionSettings, from_environment
from connectors.extraction.text import MAX_TEXT_BYTES, read_text

PROGRAM = (sys.executable, "-I", "-m", "connectors.extraction.process")
MUCH = 0.6
"""Of the memory limit: who dies having held this much died of it."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
_HIGH_WATER = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
"""A line of ``/proc/PID/status`` (proc(5)): the peak resident set since the program was executed."""


async def extract_file(
    path: Path, name: str, media_type: str | None = None, *, settings: ExtractionSettings | None = None
) -> Extracted:
    """The text of a file of any kind. name: what its owner calls it; its ending and ``media_type`` (as its source
    declares it) tell what its first bytes do not. Raises Unreadable, whatever the file is or does; OSError if it
    cannot be opened; Retryable while an extraction service cannot read it. Cancelling it ends the process."""
    settings = settings or from_environment()
    prepared = await asyncio.to_thread(_prepare, path, name, media_type, settings)
    if isinstance(prepared, Extracted):
        return prepared
    future: Future[Extracted] = _pool(settings.at_once).submit(prepared.run)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        prepared.kill()
        raise
    finally:
        future.add_done_callback(lambda _: prepared.file.close())


def extract_blocking(
    file: FileIO, name: str, media_type: str | None = None, settings: ExtractionSettings | None = None
) -> Extracted:
    """The same for callers in threads of their own. Raises Unreadable and Retryable."""
    settings = settings or from_environment()
    file.seek(0)
    job = read_or_job(file, name, media_type, settings)
    return job if isinstance(job, Extracted) else _pool(settings.at_once).submit(job.run).result()


@cache
def _pool(at_once: int) -> ThreadPoolExecutor:
    """Whoever waits for a place waits in its queue."""
    return ThreadPoolExecutor(at_once, thread_name_prefix="extraction")


def _prepare(path: Path, name: str, media_type: str | None, settings: ExtractionSettings) -> Extracted | AnyJob:
    file = path.open("rb", buffering=0)  # its process shares the position: nothing is read ahead
    try:
        prepared = read_or_job(file, name, media_type, settings)
    except BaseException:
        file.close()
        raise
    if isinstance(prepared, Extracted):
        file.close()
    return prepared


def read_or_job(file: FileIO, name: str, media_type: str | None, settings: ExtractionSettings) -> Extracted | AnyJob:
    """Plain text is read here; all else is somebody's to ``run``, in a thread. Raises Unreadable."""
    kind = kinds.kind_of(file.read(kinds.HEAD_BYTES), name, media_type)
    size = os.fstat(file.fileno()).st_size
    if size > settings.max_file_bytes:
        raise Unreadable("too_large", f"is {size:,} bytes, the limit is {settings.max_file_bytes:,}")
    file.seek(0)
    if kind in ("pdf", "office", "mail"):
        return RemoteJob(file, name, media_type, settings) if settings.url else Job(file, kind, settings)
    if kind == "ole":
        raise kinds.refuse_ole(file.read())
    return read_text(file.read(MAX_TEXT_BYTES + 1), name, media_type)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    code: int
    """As ``Popen.returncode``: negative is the signal."""
    peak_bytes: int
    """Resident at most, as last looked at: every 50 ms at the latest."""
    cpu_seconds: float
    in_time: bool


@dataclass(slots=True)
class Job:
    """One document. ``run`` is called once, in a thread."""

    file: IO[bytes]
    kind: Kind
    settings: ExtractionSettings
    _killed: threading.Event = field(default_factory=threading.Event)

    def kill(self) -> None:
        self._killed.set()

    def run(self) -> Extracted:
        """Raises Unreadable."""
        if self.settings.unconfined == "refuse" and not available().is_complete:
            raise Unreadable("unconfined", f"is not read: this machine cannot confine its reader ({available()})")
        with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            try:
                return self._read(folder)
            except Unreadable as error:
                if error.code != "needs_ocr":
                    raise
                if not self.settings.ocr or (program := ocr.program()) is None:
                    raise Unreadable("needs_ocr", f"{error}; {ocr.advice(self.settings)}") from error
            try:
                return self._recognised(folder, program)
            finally:
                _flatten(folder)

    def _recognised(self, folder: Path, program: str) -> Extracted:
        given, made = folder / "given.pdf", folder / "recognised.pdf"
        self.file.seek(0)
        with given.open("wb") as copy:
            shutil.copyfileobj(self.file, copy)
        limits = self.settings.ocr_limits()
        ended, _ = self._watch("run", folder, limits, ocr.command(program, given, made, self.settings))
        if not ended.in_time:
            raise Unreadable("needs_ocr", f"is a scanned PDF, and OCR took more than {limits.wall_seconds} s")
        file = _plain_file(made) if ended.code == 0 else None
        if file is None:
            raise Unreadable("needs_ocr", f"is a scanned PDF, and OCR failed: {ocr.reason(ended.code)}")
        with file:
            found = Job(file, self.kind, self.settings, self._killed)._read(folder)
        return Extracted(found.text, found.media_type, found.title, found.author, {**found.metadata, "ocr": True})

    def _read(self, folder: Path) -> Extracted:
        found = self._answer(self.kind, folder)
        if self.kind == "office" and isinstance(found, str):
            found = self._answer(found, folder)
        if isinstance(found, str):
            raise _without_an_answer()
        return found

    def _answer(self, kind: str, folder: Path) -> Extracted | str:
        """What a process of its own says of the document, which may have taken it over."""
        self.file.seek(0)
        limits = self.settings.limits()
        ended, told = self._watch(kind, folder, limits)
        if (refusal := _refusal(ended, limits)) is not None:
            raise refusal
        try:
            return answer.read(told)
        except answer.Malformed as error:
            raise _without_an_answer() from error

    def _watch(self, kind: str, folder: Path, limits: Limits, program: Sequence[str] = ()) -> tuple[Ended, bytes]:
        """How it ended, and what it wrote to standard output. The process and all that it started are gone when this
        returns."""
        confinement = "required" if self.settings.unconfined == "refuse" else "optional"
        with tempfile.TemporaryFile(buffering=0) as told:
            process = subprocess.Popen(
                [*PROGRAM, kind, _json(limits), confinement, *program],
                stdin=self.file,
                stdout=told,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "LANG": "C.UTF-8",
                    "HOME": str(folder),
                    "TMPDIR": str(folder),
                },
                start_new_session=True,
            )
            ended = self._awaited(process, limits)
            told.seek(0)
            return ended, told.read(answer.MAX_BYTES + 1)

    def _awaited(self, process: subprocess.Popen[bytes], limits: Limits) -> Ended:
        deadline, pause, in_time, peak = time.monotonic() + limits.wall_seconds, _SHORTEST_PAUSE, True, 0
        try:
            # Not reaped yet: until it is, nobody else can be given its number.
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if self._killed.is_set() or time.monotonic() > deadline:
                    in_time = False
                    break
                peak = max(peak, _peak_bytes(process.pid))
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        return Ended(process.returncode, peak, usage.ru_utime + usage.ru_stime, in_time)


AnyJob = Job | RemoteJob


def _plain_file(path: Path) -> FileIO | None:
    """What a program made that may have been taken over: a link of its making would have us read for it what it may not
    read itself. None: there is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return FileIO(descriptor)
    os.close(descriptor)
    return None


def _flatten(folder: Path) -> None:
    """Leave no folders within folders: a program that was taken over nests them more deeply than Python's removal of
    the whole can follow (RecursionError; before 3.13), and with rights that keep it out."""
    prefix, waiting, moved = secrets.token_hex(8), [folder], 0
    while waiting:
        here = waiting.pop()
        for entry in list(os.scandir(here)):
            if not entry.is_dir(follow_symlinks=False):
                continue
            os.chmod(entry.path, 0o700)
            target = folder / f"{prefix}-{moved}"
            os.rename(entry.path, target)
            waiting.append(target)
            moved += 1


def _peak_bytes(pid: int) -> int:
    """Its largest resident size so far; 0 where the kernel does not tell. ``ru_maxrss`` will not do: a child inherits
    that of the process that started it, so that a large worker would make every crash look like want of memory."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = _HIGH_WATER.search(status)
    return int(found[1]) * 1024 if found else 0


def _json(limits: Limits) -> str:
    return json.dumps(asdict(limits))


def _refusal(ended: Ended, limits: Limits) -> Unreadable | None:
    """None: it has answered."""
    if not ended.in_time or ended.code == -signal.SIGALRM:
        return Unreadable("too_slow", f"took more than {limits.wall_seconds} s to read")
    if ended.code == -signal.SIGXCPU or (ended.code == -signal.SIGKILL and ended.cpu_seconds >= limits.cpu_seconds - 1):
        return Unreadable("too_slow", f"took more than {limits.cpu_seconds} s of computing to read")
    if ended.code == 0:
        return None
    # SIGKILL that is not ours is the kernel's, when the machine's (or container's) memory is full.
    if ended.code == -signal.SIGKILL or ended.peak_bytes > MUCH * limits.memory_bytes:
        return Unreadable("too_much_memory", "needs more memory to be read than a document may have")
    how = signal.Signals(-ended.code).name if ended.code < 0 else f"exit code {ended.code}"
    return Unreadable("crashed", f"made its reader crash ({how}): it is damaged, or made to do so")


def _without_an_answer() -> Unreadable:
    return Unreadable("crashed", "made its reader end without an answer")
