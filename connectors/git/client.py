"""Runs the ``git`` command, and maintains a bare mirror of one branch of the remote, which is never checked out.

The command runs in its own environment, within limits of time and size, and never outlives its caller.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connectors.git.options import GitOptions, basic, environment
from connectors.protocol import printable
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.core.retry import backoff

LOCAL_SECONDS = 600.0
"""Limit for one command on the mirror; the longest is the walk over the whole history."""
MAX_OUTPUT_BYTES = 1024 * 1024
MAX_RECORD_BYTES = 1024 * 1024
"""A path is shorter; a longer record cannot come from git."""
_MAX_ERROR_BYTES = 16 * 1024
_PIECE_BYTES = 64 * 1024
_LIMITED = ("/bin/sh", "-c", 'ulimit -d "$0" 2> /dev/null; exec git "$@"')
"""Runs git with so many KiB of memory (RLIMIT_DATA) for each of its processes: a repository of some kilobytes can hold
trees that git needs gigabytes to compare. The limit is set before git starts, because its first act may be to start
others."""


class GitFailed(Exception):
    """git ended with an error. The message is the first line of its error output, without secrets; ``status`` is its
    exit code."""

    def __init__(self, message: str, status: int, stderr: str) -> None:
        super().__init__(message)
        self.status = status
        self.stderr = stderr
        """The beginning of its error output, which is matched but never shown."""


class RepositoryMissing(Misconfigured):
    """The remote has no repository at this address, or hides it from the credential."""


class RunningGit:
    """A running git process. Read its stdout to the end, or set ``is_abandoned``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self.process = process
        self.stdout = process.stdout
        self.is_abandoned = False
        """The caller has read enough: the exit code does not matter."""


class Command:
    """Runs git on one repository."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], secrets: Collection[str], memory_bytes: int
    ) -> None:
        """folder: the bare repository. secrets: removed from error messages. memory_bytes: the most for one process."""
        self.folder = folder
        self._limited = (*_LIMITED, str(memory_bytes // 1024))
        self._environment = environment
        self._secrets = [secret for secret in secrets if secret]

    async def run(self, *arguments: str, seconds: float = LOCAL_SECONDS) -> bytes:
        """Run a command and return its stdout, at most MAX_OUTPUT_BYTES. Raises GitFailed, Retryable (too slow or too
        long) and Misconfigured (no git)."""
        async with self.running(*arguments, seconds=seconds) as git:
            output = await git.stdout.read(MAX_OUTPUT_BYTES)
            while piece := await git.stdout.read(_PIECE_BYTES):
                output += piece
                if len(output) > MAX_OUTPUT_BYTES:
                    raise Retryable(f"git {arguments[0]} wrote more than {MAX_OUTPUT_BYTES:,} bytes")
        return output

    async def read_records(
        self, consume: Callable[[bytes], bool], *arguments: str, seconds: float = LOCAL_SECONDS
    ) -> None:
        """Pass each record that ``-z`` separates to ``consume``, until it returns False."""
        async with self.running(*arguments, seconds=seconds) as git:
            rest = b""
            while piece := await git.stdout.read(_PIECE_BYTES):
                *whole, rest = (rest + piece).split(b"\0")
                if not all(consume(record) for record in whole):
                    git.is_abandoned = True
                    return
                if len(rest) > MAX_RECORD_BYTES:
                    raise Retryable(f"git {arguments[0]} wrote a record of more than {MAX_RECORD_BYTES:,} bytes")
            if rest:
                consume(rest)

    @asynccontextmanager
    async def running(
        self, *arguments: str, seconds: float = LOCAL_SECONDS, input: bytes | None = None
    ) -> AsyncIterator[RunningGit]:
        """Run a command while the block runs. At its normal end the exit code is checked; if the block is left by an
        error or cancelled, git and all processes that it started are killed."""
        if shutil.which("git", path=self._environment["PATH"]) is None:
            raise Misconfigured("git is not installed, or not on PATH: install it (2.35 or newer)")
        try:
            process = await asyncio.create_subprocess_exec(
                *self._limited,
                f"--git-dir={self.folder}",
                "--no-pager",
                "--literal-pathspecs",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL if input is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                cwd=self.folder.parent,
                start_new_session=True,
                limit=MAX_RECORD_BYTES,
            )
        except FileNotFoundError as error:
            raise Misconfigured(f"{_LIMITED[0]}, which starts git, is missing") from error
        errors = asyncio.create_task(_head(process.stderr))
        helpers: list[asyncio.Task[Any]] = [errors]
        if input is not None:
            helpers.append(asyncio.create_task(_feed(process.stdin, input)))
        try:
            async with asyncio.timeout(seconds):
                running = RunningGit(process)
                yield running
                if running.is_abandoned:
                    return
                status = await process.wait()
            stderr = (await errors).decode("utf-8", "replace")
            if status:
                raise GitFailed(self._message(arguments[0], stderr, status), status, stderr)
        except TimeoutError as error:
            raise Retryable(f"git {arguments[0]} took more than {seconds:g} s") from error
        finally:
            await _end(process)
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    def _message(self, command: str, stderr: str, status: int) -> str:
        """Return the first error line that git itself wrote: lines that begin with ``remote:`` come from the server."""
        for secret in self._secrets:
            stderr = stderr.replace(secret, "…")
        lines = [line for line in stderr.splitlines() if re.match(r"(?:fatal|error):|ssh:|.*(?:denied|failed)", line)]
        lines = [line for line in lines if not line.startswith("remote:")]
        reason = printable(lines[0])[:200] if lines else f"exit code {status}"
        return f"git {command}: {reason}"


async def _head(stream: asyncio.StreamReader | None) -> bytes:
    """Read a stream to its end and return its beginning."""
    assert stream is not None
    head = b""
    while piece := await stream.read(_PIECE_BYTES):
        head = (head + piece)[:_MAX_ERROR_BYTES]
    return head


async def _feed(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    assert stream is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # its exit code says why it ended
        stream.write(data)
        await stream.drain()
        stream.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a process and its process group, unless it has ended."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:  # or wait() would wait for output that nobody reads
        while await process.stdout.read(_PIECE_BYTES):
            pass
    await process.wait()


REF = "refs/penstock/head"
LS_REMOTE_SECONDS = 60.0
PATIENCE_SECONDS = 20.0
"""Longest time for one request to the remote, with retries and delays; afterwards the runner retries."""
_SIZE_CHECK_SECONDS = 0.5
_DAMAGED = re.compile(
    r"not a git repository|corrupt|bad object|missing blob|unable to read (?:tree|sha1|[0-9a-f]{40})|inflate:|is empty",
    re.I,
)
_REFUSED = re.compile(
    r"Authentication failed|could not read (?:Username|Password)|Permission denied|Host key verification failed"
    r"|returned error: (?:3\d\d|401|403|404|410)|repository .*not found|does not appear to be a git repository"
    r"|not valid: is this a git repository"
    r"|not allowed|dubious ownership|unable to update url base from redirection|certificate|No such file or directory"
    r"|Bad owner or permissions|Load key",
    re.I,
)
"""Errors that only an operator can correct. All others (no connection, 5xx, an early end) are retryable."""
_MISSING = re.compile(r"returned error: 404|repository .*not found", re.I)
_OUT_OF_MEMORY = re.compile(r"out of memory|cannot allocate memory", re.I)
_THROTTLED = re.compile(r"returned error: 429|rate limit", re.I)


@dataclass(frozen=True, slots=True)
class Head:
    """The commit of the remote's branch. commit None: the repository is empty."""

    commit: str | None
    branch: str


@dataclass(frozen=True, slots=True)
class Room:
    """How many bytes a mirror may take on disk, and the option that says so."""

    bytes: Callable[[], int]
    """Blocks."""
    option: str


class Mirror:
    """A bare mirror of the remote's branch. Only one task at a time may call ``refresh``."""

    def __init__(self, folder: Path, options: GitOptions, room: Room | None = None) -> None:
        """room: None: ``max_repository_bytes`` of the options."""
        self._folder = folder
        self._options = options
        self._room = room or Room(lambda: options.max_repository_bytes, "max_repository_bytes")
        self.max_files = options.max_files
        home = folder / "home"
        secret = options.token.get_secret_value() if options.token else ""
        secrets = (secret, basic(options.username, options.token)) if options.token else ()
        variables = environment(options, home, os.environ.get("PATH", os.defpath))
        self.git = Command(folder / "mirror.git", variables, secrets, options.max_memory_bytes)
        self._home = home
        self._damaged = False

    async def head(self) -> Head | None:
        """Return the branch's current commit at the remote, without fetching it. None: the repository is empty. Raises
        Misconfigured and Retryable."""
        await asyncio.to_thread(self._prepare)
        name = "HEAD" if self._options.branch is None else f"refs/heads/{self._options.branch}"
        output = await self._remote("ls-remote", "--symref", "--", self._options.url, name, seconds=LS_REMOTE_SECONDS)
        commit, branch = None, self._options.branch
        for line in output.decode("utf-8", "replace").splitlines():
            value, _, ref = line.partition("\t")
            if ref == name and value.startswith("ref: "):
                branch = branch or value.removeprefix("ref: ").removeprefix("refs/heads/")
            elif ref == name and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", value):
                commit = value
        if commit is not None:
            return Head(commit, branch or "HEAD")
        refs, has_branch = await self._refs(name)
        if not refs:
            return None
        if has_branch:
            raise Retryable("the remote listed the branch only at the second request")
        raise Misconfigured(
            f"the repository has no branch {name.removeprefix('refs/heads/')}: set branch to one it has"
        )

    async def _refs(self, name: str) -> tuple[int, bool]:
        """Return the number of the remote's refs, and whether this is one of them."""
        refs, has_name = 0, False
        async with self.git.running("ls-remote", "--", self._options.url, seconds=LS_REMOTE_SECONDS) as git:
            while line := await git.stdout.readline():
                refs += 1
                has_name = has_name or line.rstrip().endswith(b"\t" + name.encode())
        return refs, has_name

    async def refresh(self) -> Head | None:
        """Fetch the branch. Return its commit, or None if the repository is empty. Raises Misconfigured and
        Retryable."""
        head = await self.head()
        if head is None or await self.has_commit(head.commit):
            return head
        name = "HEAD" if self._options.branch is None else f"refs/heads/{self._options.branch}"
        room = await asyncio.to_thread(self._room.bytes)
        watching = asyncio.create_task(self._wait_until_larger(room))
        fetching = asyncio.create_task(
            self._remote(
                "fetch",
                "--quiet",
                "--no-tags",
                "--no-recurse-submodules",
                "--no-auto-gc",
                "--no-write-fetch-head",
                "--force",
                "--",
                self._options.url,
                f"+{name}:{REF}",
                seconds=self._options.fetch_seconds,
            )
        )
        try:
            done, _ = await asyncio.wait({watching, fetching}, return_when=asyncio.FIRST_COMPLETED)
            if fetching not in done:
                raise await self._remove_too_large(fetching, room)
            await fetching
        finally:
            for task in (watching, fetching):
                task.cancel()
            await asyncio.gather(watching, fetching, return_exceptions=True)
        if await asyncio.to_thread(size, self.git.folder) > room:
            raise await self._remove_too_large(None, room)
        commit = (await self.run_local("rev-parse", "--verify", f"{REF}^{{commit}}")).decode().strip()
        await self.run_local("gc", "--auto", "--quiet", "--prune=2.weeks.ago")
        return Head(commit, head.branch)

    async def _remove_too_large(self, fetching: asyncio.Task[bytes] | None, room: int) -> Misconfigured:
        """Stop fetching, remove the mirror and return the error."""
        if fetching is not None:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self.git.folder, ignore_errors=True)
        return Misconfigured(
            f"the repository takes more than the {max(0, room):,} bytes on disk that {self._room.option} leaves to it:"
            f" raise {self._room.option}, or connect a smaller one"
        )

    async def has_commit(self, commit: str | None) -> bool:
        try:
            await self.git.run("cat-file", "-e", f"{commit}^{{commit}}")
        except GitFailed:
            return False
        return True

    async def is_ancestor(self, old: str, new: str) -> bool:
        """Whether one commit is an ancestor of the other. Raises Retryable and Misconfigured."""
        if not await self.has_commit(old):
            return False
        try:
            await self.git.run("merge-base", "--is-ancestor", old, new)
        except GitFailed as error:
            if error.status == 1:
                return False
            raise self.local_error(error) from error
        return True

    async def run_local(self, *arguments: str) -> bytes:
        """Run a command on the mirror. Raises Retryable and Misconfigured."""
        try:
            return await self.git.run(*arguments)
        except GitFailed as error:
            raise self.local_error(error) from error

    async def read_records(
        self, consume: Callable[[bytes], bool], *arguments: str, seconds: float = LOCAL_SECONDS
    ) -> None:
        """Call ``Command.read_records`` on the mirror. Raises Retryable and Misconfigured."""
        try:
            await self.git.read_records(consume, *arguments, seconds=seconds)
        except GitFailed as error:
            raise self.local_error(error) from error

    def local_error(self, error: GitFailed) -> Retryable | Misconfigured:
        """Return the error for a failure on the mirror. A damaged mirror is fetched again at the next refresh."""
        if _OUT_OF_MEMORY.search(error.stderr):
            return Misconfigured(
                f"{error}; it may take max_memory_bytes = {self._options.max_memory_bytes:,}: raise it, or set"
                " authors = false if git log fails"
            )
        if _DAMAGED.search(error.stderr):
            self._damaged = True
            return Retryable(f"{error}: the mirror is damaged and will be fetched again")
        return Retryable(str(error))

    async def _remote(self, *arguments: str, seconds: float) -> bytes:
        """Run a command that contacts the remote, with retries for up to PATIENCE_SECONDS. (git does not report a
        Retry-After.)"""
        attempt, spent = 0, 0.0
        while True:
            began = time.monotonic()
            try:
                return await self._attempt(*arguments, seconds=seconds)
            except Retryable as error:
                wait = backoff(attempt, base=0.5, cap=10.0, random=random.random())  # noqa: S311 — jitter, no secret
                spent += time.monotonic() - began + wait
                if spent > PATIENCE_SECONDS:
                    error.retry_after = wait
                    raise
            await asyncio.sleep(wait)
            attempt += 1

    async def _attempt(self, *arguments: str, seconds: float) -> bytes:
        try:
            return await self.git.run(*arguments, seconds=seconds)
        except GitFailed as error:
            if _THROTTLED.search(error.stderr):
                raise Deferred(str(error)) from error
            if _REFUSED.search(error.stderr):
                kind = RepositoryMissing if _MISSING.search(error.stderr) else Misconfigured
                raise kind(f"{error}; check url, token or key, and that they may read the repository") from error
            raise self.local_error(error) from error

    def _prepare(self) -> None:
        """Create an empty bare repository if there is none. A folder that is not one is a damaged mirror, and removed.
        Blocks."""
        self._home.mkdir(parents=True, exist_ok=True)
        folder = self.git.folder
        if self._damaged or (folder.exists() and not (folder / "HEAD").is_file()):
            shutil.rmtree(folder, ignore_errors=True)
            self._damaged = False
        if not folder.exists():
            for part in ("objects/info", "objects/pack", "refs/heads"):
                (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = true\n")
            (folder / "HEAD").write_text("ref: refs/penstock/none\n")

    async def _wait_until_larger(self, room: int) -> None:
        """Return when the repository takes more bytes than that."""
        while True:
            if await asyncio.to_thread(size, self.git.folder) > room:
                return
            await asyncio.sleep(_SIZE_CHECK_SECONDS)


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder. Blocks."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # git renames what it has finished
                continue
    return total
