"""Runs a program that speaks Airbyte's protocol."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast

from connectors.airbyte.messages import Broken, Lines, Message, Unstorable, parsed
from connectors.airbyte.options import AirbyteOptions
from pipeline.core.errors import Misconfigured, Retryable

CHUNK_BYTES = 256 * 1024
END_SECONDS = 10.0
"""Between the request to end and the end by force."""
POLL_SECONDS = 0.02
PREFIX = "run-"
Command = Literal["spec", "check", "discover", "read"]


class Ended(Retryable):
    """The program ended with an error, or had to be ended."""


class Program:
    """Law: what is handed to the program is in a folder that only this user can read, which is removed with the run;
    and with a run all processes of its group end."""

    def __init__(self, options: AirbyteOptions, folder: Path) -> None:
        self._options = options
        self._folder = folder

    async def run(self, command: Command, **files: Any) -> AsyncIterator[Sequence[Message]]:
        """Yield what the program writes, in groups. files: contents of JSON files by the option that names them
        (``config``, ``catalog``, ``state``). Raises Ended, Retryable and Misconfigured."""
        with _folder_of_a_run(self._folder) as folder:
            arguments = [part.replace("{folder}", str(folder)) for part in self._options.program]
            arguments += [command, *_written(files, folder)]
            process = await self._started(arguments, folder)
            try:
                async for messages in self._messages(process):
                    yield messages
                await self._finish(process)
            finally:
                await _end(process)

    async def _started(self, arguments: Sequence[str], folder: Path) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd=folder,
                env=self._environment(folder),
                start_new_session=True,
            )
        except OSError as error:
            raise Misconfigured(f"the program {arguments[0]} cannot be started ({error.strerror})") from error

    def _environment(self, folder: Path) -> Mapping[str, str]:
        names = ("PATH", "LANG", "LC_ALL", "TZ", *self._options.pass_environment)
        passed = {name: os.environ[name] for name in names if name in os.environ}
        return {"PATH": os.defpath, "PYTHONUNBUFFERED": "1", "HOME": str(folder), "TMPDIR": str(folder), **passed}

    async def _messages(self, process: asyncio.subprocess.Process) -> AsyncIterator[Sequence[Message]]:
        assert process.stdout is not None
        lines = Lines(self._options.max_record_bytes)
        while chunk := await self._within(process.stdout.read(CHUNK_BYTES)):
            if messages := list(_parsed(lines.feed(chunk))):
                yield messages
        yield list(_parsed(lines.finish()))

    async def _finish(self, process: asyncio.subprocess.Process) -> None:
        code = await self._within(process.wait())
        if code < 0:
            raise Ended(f"the program was ended by {signal.Signals(-code).name}")
        if code > 0:
            raise Ended(f"the program ended with exit code {code}")

    async def _within(self, waiting: Any) -> Any:
        try:
            async with asyncio.timeout(self._options.silence_seconds):
                return await waiting
        except TimeoutError as error:
            raise Ended(
                f"the program wrote nothing for {self._options.silence_seconds:g} s and was ended: if it needs longer,"
                " raise silence_seconds"
            ) from error


def _written(files: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Write files that only this user can read. Yields the arguments that name them."""
    for option, content in files.items():
        path = folder / f"{option}.json"
        with open(path, "x", encoding="utf-8", opener=_private) as file:
            json.dump(content, file)
        yield from (f"--{option}", str(path))


def _parsed(lines: Iterator[bytes | Unstorable]) -> Iterator[Message]:
    for line in lines:
        try:
            message = line if isinstance(line, Unstorable) else parsed(line)
        except Broken as error:
            raise Ended(f"{error}; what was read since the last state is read again") from error
        if message is not None:
            yield message


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program's group: with a signal that it can handle, then by force. ``wait`` would also wait for the end of
    an output that nobody reads any more, which a process that has left the group may hold open."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while process.returncode is None:  # noqa: ASYNC110 — nothing tells of it but wait()
                    await asyncio.sleep(POLL_SECONDS)
    cast(Any, process)._transport.close()  # and its pipe: the object has no method for it


@contextmanager
def _folder_of_a_run(parent: Path) -> Iterator[Path]:
    """Make a folder for the files of a run, after the folders of runs that could not remove theirs are gone."""
    with ExitStack() as stack:
        with open(parent / "runs.lock", "ab") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            for left in parent.glob(f"{PREFIX}*"):
                _remove_unused(left)
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)).absolute()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            fcntl.flock(stack.enter_context(open(folder / "lock", "xb")), fcntl.LOCK_EX)
        yield folder


def _remove_unused(folder: Path) -> None:
    with suppress(OSError), open(folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
