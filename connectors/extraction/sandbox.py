"""Reads each document in a fresh process: starts it, watches it, ends it and reads its answer."""

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
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from io import FileIO
from pathlib import Path
from typing import IO

from connectors.extraction import answer, kinds
from connectors.extraction.kinds import Kind, Offered
from connectors.extraction.limits import Limits
from connectors.extraction.remote import RemoteJob
from connectors.extraction.result import Extracted, Unreadable
from connectors.extraction.settings import ExtractionSettings, from_environment
from connectors.extraction.text import MAX_TEXT_BYTES, read_text
from connectors.extraction.turns import Turns
from pipeline.runtime.confinement import available

PROGRAM = (sys.executable, "-I", "-m", "connectors.extraction.process")
MEMORY_SHARE = 0.6
"""A process that fails having used more than this share of its memory limit is taken to have failed for want of
memory."""
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.05
DYING_SECONDS = 10.0
"""How long processes that were killed are waited for: the kernel frees a gigabyte in a tenth of a second."""
_HIGH_WATER = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
"""A line of ``/proc/PID/status`` (proc(5)): the peak resident set since the program was executed."""


async def extract_file(
    path: Path, name: str, media_type: str | None = None, *, settings: ExtractionSettings | None = None
) -> Extracted:
    """Extract the text of a file of any kind. name: the file's name at its source; its ending and ``media_type``, which
    the source declares, count where the first bytes are ambiguous. Raises Unreadable (``UnreadableFile`` in
    ``penstock.source``), whatever the file is or does; OSError if it cannot be opened; Retryable while the extraction
    service cannot read it. Cancelling ends the process."""
    settings = settings or from_environment()
    prepared = await asyncio.to_thread(_prepare, path, name, media_type, settings)
    if isinstance(prepared, Extracted):
        return prepared
    future = _submitted(prepared)
    try:
        try:
            return await _result(future, prepared)
        except Unreadable as error:
            if not _needs_ocr(prepared, error):
                raise
        recognition = replace(prepared, recognises=True)
        future = _submitted(recognition)
        return await _result(future, recognition)
    finally:
        future.add_done_callback(lambda _: prepared.file.close())


async def _result(future: Future[Extracted], job: AnyJob) -> Extracted:
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        job.kill()
        raise


def extract_blocking(file: FileIO, name: str, media_type: str | None) -> Extracted:
    """Extract the text of an open file; blocks. Raises Unreadable and Retryable."""
    file.seek(0)
    job = read_or_job(file, name, media_type, from_environment())
    if isinstance(job, Extracted):
        return job
    try:
        return _submitted(job).result()
    except Unreadable as error:
        if not _needs_ocr(job, error):
            raise
    return _submitted(replace(job, recognises=True)).result()


def _needs_ocr(job: AnyJob, error: Unreadable) -> bool:
    """Whether the same job that ``recognises`` reads what this one could not."""
    return error.code == "needs_ocr" and job.settings.ocr


def _submitted(job: AnyJob) -> Future[Extracted]:
    settings = job.settings
    return _pool(settings.ocr_at_once if job.recognises else settings.at_once, ocr=job.recognises).submit(job.run)


@cache
def _pool(at_once: int, *, ocr: bool) -> Turns:
    """The threads that run jobs; further jobs wait for their turn. OCR has its own. It takes many times as long as
    reading, so that a few scans would hold all threads for ten minutes, again and again, while a file of anybody else
    waited."""
    return Turns(at_once)


def _prepare(path: Path, name: str, media_type: str | None, settings: ExtractionSettings) -> Extracted | AnyJob:
    file = path.open("rb", buffering=0)  # the reading process shares the position, so nothing may be read ahead
    try:
        prepared = read_or_job(file, name, media_type, settings)
    except BaseException:
        file.close()
        raise
    if isinstance(prepared, Extracted):
        file.close()
    return prepared


def read_or_job(file: FileIO, name: str, media_type: str | None, settings: ExtractionSettings) -> Extracted | AnyJob:
    """Read plain text here; return a job for any other file, to be ``run`` in a thread. Raises Unreadable."""
    kind = kinds.kind_of(file.read(kinds.HEAD_BYTES), name, media_type)
    size = os.fstat(file.fileno()).st_size
    if size > settings.max_file_bytes:
        raise Unreadable("too_large", f"is {size:,} bytes, the limit is {settings.max_file_bytes:,}")
    file.seek(0)
    if kind == "text":
        return read_text(file.read(MAX_TEXT_BYTES + 1), name, media_type)
    if kind == "ole":
        raise kinds.refuse_ole(file.read())
    return RemoteJob(file, name, media_type, settings) if settings.url else Job(file, kind, settings)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended."""

    code: int
    """As ``Popen.returncode``: a negative number is the signal."""
    peak_bytes: int
    """Peak resident set size; sampled every 50 ms at least."""
    cpu_seconds: float
    in_time: bool


@dataclass(slots=True)
class Job:
    """Reads one document. ``run`` is called once, in a thread."""

    file: IO[bytes]
    kind: Kind | Offered
    settings: ExtractionSettings
    recognises: bool = False
    """Whether OCR recognises its text first."""
    _killed: threading.Event = field(default_factory=threading.Event)

    def kill(self) -> None:
        """End ``run`` soon. May be called from any thread."""
        self._killed.set()

    def run(self) -> Extracted:
        """Read the document. Raises Unreadable: with the code ``needs_ocr``, a job that recognises reads it."""
        if self.settings.unconfined == "refuse" and not available().is_complete:
            raise Unreadable("unconfined", f"is not read: this machine cannot confine its reader ({available()})")
        with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            if not self.recognises:
                try:
                    return self._read(folder)
                except Unreadable as error:
                    if error.code != "needs_ocr" or (self.settings.ocr and shutil.which(OCR_PROGRAM)):
                        raise
                    raise Unreadable("needs_ocr", f"{error}; {_ocr_advice(self.settings)}") from error
            if (program := shutil.which(OCR_PROGRAM)) is None:
                raise Unreadable("needs_ocr", f"is a scanned PDF; {_ocr_advice(self.settings)}")
            try:
                return self._read_with_ocr(folder, program)
            finally:
                _empty(folder)

    def _read_with_ocr(self, folder: Path, program: str) -> Extracted:
        source, target = folder / "scanned.pdf", folder / "recognised.pdf"
        self.file.seek(0)
        with source.open("wb") as copy:
            shutil.copyfileobj(self.file, copy)
        limits = self.settings.ocr_limits()
        process_exit, _ = self._watch("run", folder, limits, _ocr_command(program, source, target, self.settings))
        if not process_exit.in_time:
            raise Unreadable("needs_ocr", f"is a scanned PDF, and OCR took more than {limits.wall_seconds} s")
        file = _plain_file(target) if process_exit.code == 0 else None
        if file is None:
            raise Unreadable("needs_ocr", f"is a scanned PDF, and OCR failed: {_ocr_failure(process_exit.code)}")
        with file:
            result = Job(file, self.kind, self.settings, _killed=self._killed)._read(folder)
        return replace(result, metadata={**result.metadata, "ocr": True})

    def _read(self, folder: Path) -> Extracted:
        result = self._answer(self.kind, folder)
        if self.kind == "office" and isinstance(result, str):
            result = self._answer(result, folder)
        if isinstance(result, str):
            raise _no_answer()
        return result

    def _answer(self, kind: str, folder: Path) -> Extracted | str:
        """Run a reading process and return its answer, which is not trusted: the document may have taken it over."""
        self.file.seek(0)
        limits = self.settings.limits()
        process_exit, output = self._watch(kind, folder, limits)
        if (refusal := _refusal(process_exit, limits)) is not None:
            raise refusal
        try:
            return answer.read(output)
        except answer.Malformed as error:
            raise _no_answer() from error

    def _watch(self, kind: str, folder: Path, limits: Limits, program: Sequence[str] = ()) -> tuple[ProcessExit, bytes]:
        """Run a process. Return how it ended and what it wrote to standard output. The process and all that it started
        have ended when this returns."""
        confinement = "required" if self.settings.unconfined == "refuse" else "optional"
        with tempfile.TemporaryFile(buffering=0) as output:
            process = subprocess.Popen(
                [*PROGRAM, kind, _json(limits), confinement, *program],
                stdin=self.file,
                stdout=output,
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
            process_exit = self._wait(process, limits)
            output.seek(0)
            return process_exit, output.read(answer.MAX_BYTES + 1)

    def _wait(self, process: subprocess.Popen[bytes], limits: Limits) -> ProcessExit:
        deadline, pause, in_time, peak = time.monotonic() + limits.wall_seconds, _SHORTEST_PAUSE_SECONDS, True, 0
        try:
            # Not reaped yet: its number cannot be reused until it is.
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if self._killed.is_set() or time.monotonic() > deadline:
                    in_time = False
                    break
                peak = max(peak, _peak_bytes(process.pid))
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            _wait_for_group(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        return ProcessExit(process.returncode, peak, usage.ru_utime + usage.ru_stime, in_time)


AnyJob = Job | RemoteJob


def _plain_file(path: Path) -> FileIO | None:
    """Open a file made by a program that may have been taken over, or return None if it is not a plain file: a link
    would have us read for the program what it may not read itself."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return FileIO(descriptor)
    os.close(descriptor)
    return None


def _empty(folder: Path) -> None:
    """Remove all that a folder holds. A program that was taken over may nest folders more deeply than ``shutil.rmtree``
    can follow (RecursionError before Python 3.13), without rights to enter them, and leave more files than fit into a
    list in memory: this holds one name at a time."""
    prefix, moved = secrets.token_hex(8), 0
    is_empty = False
    while not is_empty:
        is_empty = True
        with os.scandir(folder) as entries:
            for entry in entries:
                is_empty = False
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                with os.scandir(entry.path) as inner:
                    for child in inner:
                        if child.is_dir(follow_symlinks=False):
                            os.chmod(child.path, 0o700)
                            os.rename(child.path, folder / f"{prefix}-{moved}")
                            moved += 1
                        else:
                            os.unlink(child.path)
                os.rmdir(entry.path)


def _peak_bytes(pid: int) -> int:
    """Return a process's peak resident set size; 0 if the kernel does not report it. ``ru_maxrss`` is of no use: a
    child inherits it from its parent, so that a large worker would make every crash look like want of memory."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = _HIGH_WATER.search(status)
    return int(match[1]) * 1024 if match else 0


def _wait_for_group(group: int) -> None:
    """Wait until all processes of a killed group have ended but its leader, who is not reaped yet: while the kernel
    frees the memory of one, it still has its files open. Ends after DYING_SECONDS: a file system that does not respond
    can hold a process for ever."""
    deadline = time.monotonic() + DYING_SECONDS
    while time.monotonic() < deadline and _has_members(group):
        time.sleep(_SHORTEST_PAUSE_SECONDS)


def _has_members(group: int) -> bool:
    """Whether a process group has processes beside its leader. False where the kernel does not say."""
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == group:
                continue
            try:
                fields = Path(f"/proc/{name}/stat").read_text("latin-1").rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            state, members, threads = fields[0], int(fields[2]), int(fields[17])
            # A dead process stays until it is reaped; as long as it has threads, it is not dead.
            if members == group and (state not in "ZX" or threads > 1):
                return True
    return False


def _json(limits: Limits) -> str:
    return json.dumps(asdict(limits))


def _refusal(process_exit: ProcessExit, limits: Limits) -> Unreadable | None:
    """Return the error that a process's end means, or None if it has answered."""
    if not process_exit.in_time or process_exit.code == -signal.SIGALRM:
        return Unreadable("too_slow", f"took more than {limits.wall_seconds} s to read")
    if process_exit.code == -signal.SIGXCPU or (
        process_exit.code == -signal.SIGKILL and process_exit.cpu_seconds >= limits.cpu_seconds - 1
    ):
        return Unreadable("too_slow", f"took more than {limits.cpu_seconds} s of CPU time to read")
    if process_exit.code == 0:
        return None
    # A SIGKILL that this class did not send comes from the kernel, when the machine's or container's memory is full.
    if process_exit.code == -signal.SIGKILL or process_exit.peak_bytes > MEMORY_SHARE * limits.memory_bytes:
        return Unreadable("too_much_memory", "needs more memory to be read than a document may have")
    cause = signal.Signals(-process_exit.code).name if process_exit.code < 0 else f"exit code {process_exit.code}"
    return Unreadable("crashed", f"made its reader crash ({cause}): it is damaged or malicious")


def _no_answer() -> Unreadable:
    return Unreadable("crashed", "made its reader end without a result")


OCR_PROGRAM = "ocrmypdf"
"""A separate program, which is used if it is installed; it is not a dependency."""
_OCR_FAILURES = {
    1: "its arguments are invalid",
    2: "the PDF is damaged",
    3: "a program that it needs is missing, such as tesseract",
    4: "its result was not a valid PDF",
    5: "it has no permission to write its files",
    7: "tesseract failed",
    8: "the PDF is encrypted",
    9: "its tesseract configuration is wrong",
    15: "it reports no cause",
}
"""The reasons for its exit codes (ocrmypdf.readthedocs.io, "Advanced features", "Return code policy")."""


def _ocr_command(program: str, source: Path, target: Path, settings: ExtractionSettings) -> list[str]:
    """Return a command line that leaves pages with text as they are, and reads one page at a time: the memory limit is
    that of one page."""
    return [
        program,
        "--skip-text",
        "--quiet",
        "--output-type",
        "pdf",
        "--optimize",
        "0",
        "--jobs",
        "1",
        "--language",
        settings.ocr_languages,
        str(source),
        str(target),
    ]


def _ocr_advice(settings: ExtractionSettings) -> str:
    """Return what the document's owner or the operator can do."""
    if settings.ocr:
        return (
            f"OCR is switched on but {OCR_PROGRAM} is not installed: install it, or recognise the text before uploading"
        )
    return f"recognise its text before uploading, or install {OCR_PROGRAM} and set PENSTOCK_EXTRACTION_OCR=true"


def _ocr_failure(code: int) -> str:
    return _OCR_FAILURES.get(code, f"it ended with {code}")
