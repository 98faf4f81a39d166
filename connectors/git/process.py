"""The ``git`` command: with an environment of ours, within time and size, and gone when we are."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from connectors.protocol import printable
from pipeline.core.errors import Misconfigured, Retryable

LOCAL_SECONDS = 600.0
"""For one command over what is on our disk; the longest is the walk over all history."""
ANSWER_BYTES = 1024 * 1024
RECORD_BYTES = 1024 * 1024
"""A path is shorter; a longer record is no answer of git's."""
_ERROR_BYTES = 16 * 1024
_PIECE = 64 * 1024


class GitFailed(Exception):
    """git ended with an error. The text is its own first line about it, without secrets; ``status``: its exit code."""

    def __init__(self, message: str, status: int, said: str) -> None:
        super().__init__(message)
        self.status = status
        self.said = said
        """All that it wrote to stderr, cut; to be matched, not to be shown."""


class Running:
    """A git that runs. Its stdout is to be read to the end, or it is to be left."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self.process = process
        self.stdout = process.stdout
        self.left = False
        """We have what we wanted: how it ends does not matter."""


class Command:
    def __init__(self, folder: Path, environment: Mapping[str, str], secrets: Collection[str]) -> None:
        """folder: the bare repository. secrets: shown nowhere, whatever git writes."""
        self.folder = folder
        self._environment = environment
        self._secrets = [secret for secret in secrets if secret]

    async def run(self, *arguments: str, seconds: float = LOCAL_SECONDS) -> bytes:
        """stdout, at most ANSWER_BYTES. Raises GitFailed, Retryable (too slow), Misconfigured (no git)."""
        async with self.running(*arguments, seconds=seconds) as git:
            answer = await git.stdout.read(ANSWER_BYTES)
            while piece := await git.stdout.read(_PIECE):
                answer += piece
                if len(answer) > ANSWER_BYTES:
                    raise Retryable(f"git {arguments[0]} answered with more than {ANSWER_BYTES:,} bytes")
        return answer

    async def each(self, see: Callable[[bytes], bool], *arguments: str, seconds: float = LOCAL_SECONDS) -> None:
        """Shows what ``-z`` separates, as it comes, until ``see`` says False: it has seen enough."""
        async with self.running(*arguments, seconds=seconds) as git:
            rest = b""
            while piece := await git.stdout.read(_PIECE):
                *whole, rest = (rest + piece).split(b"\0")
                if not all(see(record) for record in whole):
                    git.left = True
                    return
                if len(rest) > RECORD_BYTES:
                    raise Retryable(f"git {arguments[0]} answered with a record of more than {RECORD_BYTES:,} bytes")
            if rest:
                see(rest)

    @asynccontextmanager
    async def running(
        self, *arguments: str, seconds: float = LOCAL_SECONDS, input: bytes | None = None
    ) -> AsyncIterator[Running]:
        """At a normal end of the block the exit code is awaited and judged; whatever else ends it kills git and all
        that it started."""
        try:
            process = await asyncio.create_subprocess_exec(
                "git", f"--git-dir={self.folder}", "--no-pager", "--literal-pathspecs", *arguments,
                stdin=asyncio.subprocess.DEVNULL if input is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=self._environment,
                cwd=self.folder.parent, start_new_session=True, limit=RECORD_BYTES,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise Misconfigured("git is not installed, or not on PATH: install it (2.35 or newer)") from error
        errors = asyncio.create_task(_head(process.stderr))
        helpers: list[asyncio.Task[Any]] = [errors]
        if input is not None:
            helpers.append(asyncio.create_task(_feed(process.stdin, input)))
        try:
            async with asyncio.timeout(seconds):
                running = Running(process)
                yield running
                if running.left:
                    return
                status = await process.wait()
            said = (await errors).decode("utf-8", "replace")
            if status:
                raise GitFailed(self._shown(arguments[0], said, status), status, said)
        except TimeoutError as error:
            raise Retryable(f"git {arguments[0]} took more than {seconds:g} s") from error
        finally:
            await _end(process)
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    def _shown(self, command: str, said: str, status: int) -> str:
        """The first line that git itself wrote: those that begin with ``remote:`` are somebody else's."""
        for secret in self._secrets:
            said = said.replace(secret, "…")
        lines = [line for line in said.splitlines() if re.match(r"(?:fatal|error):|ssh:|.*(?:denied|failed)", line)]
        lines = [line for line in lines if not line.startswith("remote:")]
        why = printable(lines[0])[:200] if lines else f"exit code {status}"
        return f"git {command}: {why}"


async def _head(stream: asyncio.StreamReader | None) -> bytes:
    """Reads to the end and keeps the beginning."""
    assert stream is not None
    kept = b""
    while piece := await stream.read(_PIECE):
        kept = (kept + piece)[:_ERROR_BYTES]
    return kept


async def _feed(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    assert stream is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # its exit code tells why it went
        stream.write(data)
        await stream.drain()
        stream.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """It and its helpers (its own process group), whether or not it has ended by itself."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:  # or wait() would wait for what nobody reads
        while await process.stdout.read(_PIECE):
            pass
    await process.wait()
