"""The ``git`` command, and with it a bare mirror of one branch of the remote on our disk, never checked out.

The command runs with an environment of ours, within limits of time and size, and ends when we end.
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
                "git",
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
                limit=RECORD_BYTES,
            )
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


REF = "refs/penstock/head"
ASK_SECONDS = 60.0
PATIENCE_SECONDS = 20.0
"""Of one request to the remote, failed attempts and waits together; the runner waits on."""
_WATCH_SECONDS = 0.5
_DAMAGED = re.compile(
    r"not a git repository|corrupt|bad object|missing blob|unable to read (?:tree|sha1|[0-9a-f]{40})|inflate:|is empty",
    re.I,
)
_REFUSED = re.compile(
    r"Authentication failed|could not read (?:Username|Password)|Permission denied|Host key verification failed"
    r"|returned error: (?:3\d\d|401|403|404|410)|repository .*not found|does not appear to be a git repository"
    r"|not allowed|dubious ownership|unable to update url base from redirection|certificate|No such file or directory"
    r"|Bad owner or permissions|Load key",
    re.I,
)
"""What only a person can mend. Everything else (no connection, 5xx, an early end) may heal."""
_THROTTLED = re.compile(r"returned error: 429|rate limit", re.I)


@dataclass(frozen=True, slots=True)
class Head:
    """Where the remote's branch is. commit None: the repository has nothing in it yet."""

    commit: str | None
    branch: str


class Mirror:
    """One at a time: ``refresh`` is for one task."""

    def __init__(self, folder: Path, options: GitOptions) -> None:
        self._folder = folder
        self._options = options
        home = folder / "home"
        secret = options.token.get_secret_value() if options.token else ""
        secrets = (secret, basic(options.username, options.token)) if options.token else ()
        variables = environment(options, home, os.environ.get("PATH", os.defpath))
        self.git = Command(folder / "mirror.git", variables, secrets)
        self._home = home
        self._damaged = False

    async def ask(self) -> Head | None:
        """Where the branch is now; nothing is fetched. None: the remote is there and holds nothing at all. Raises
        Misconfigured, Retryable."""
        await asyncio.to_thread(self._prepare)
        name = "HEAD" if self._options.branch is None else f"refs/heads/{self._options.branch}"
        answer = await self._remote("ls-remote", "--symref", "--", self._options.url, name, seconds=ASK_SECONDS)
        commit, branch = None, self._options.branch
        for line in answer.decode("utf-8", "replace").splitlines():
            value, _, ref = line.partition("\t")
            if ref == name and value.startswith("ref: "):
                branch = branch or value.removeprefix("ref: ").removeprefix("refs/heads/")
            elif ref == name and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", value):
                commit = value
        if commit is not None:
            return Head(commit, branch or "HEAD")
        refs, found = await self._refs(name)
        if not refs:
            return None
        if found:
            raise Retryable("the branch came back while it was looked for")
        raise Misconfigured(
            f"the repository has no branch {name.removeprefix('refs/heads/')}: set branch to one it has"
        )

    async def _refs(self, name: str) -> tuple[int, bool]:
        """How many the remote has, and whether this is among them."""
        refs, found = 0, False
        async with self.git.running("ls-remote", "--", self._options.url, seconds=ASK_SECONDS) as git:
            while line := await git.stdout.readline():
                refs += 1
                found = found or line.rstrip().endswith(b"\t" + name.encode())
        return refs, found

    async def refresh(self) -> Head | None:
        """The branch as it is now, all of it on our disk. Raises Misconfigured, Retryable."""
        head = await self.ask()
        if head is None or await self.has(head.commit):
            return head
        name = "HEAD" if self._options.branch is None else f"refs/heads/{self._options.branch}"
        watching = asyncio.create_task(self._too_large())
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
                raise await self._refused_as_too_large(fetching)
            await fetching
        finally:
            for task in (watching, fetching):
                task.cancel()
            await asyncio.gather(watching, fetching, return_exceptions=True)
        if await asyncio.to_thread(_size, self.git.folder) > self._options.max_repository_bytes:
            raise await self._refused_as_too_large(None)
        commit = (await self.local("rev-parse", "--verify", f"{REF}^{{commit}}")).decode().strip()
        await self.local("gc", "--auto", "--quiet", "--prune=2.weeks.ago")
        return Head(commit, head.branch)

    async def _refused_as_too_large(self, fetching: asyncio.Task[bytes] | None) -> Misconfigured:
        if fetching is not None:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self.git.folder, ignore_errors=True)
        limit = self._options.max_repository_bytes
        said = f"the repository takes more than max_repository_bytes = {limit:,} on disk"
        return Misconfigured(f"{said}: raise it, or connect a smaller one")

    async def has(self, commit: str | None) -> bool:
        try:
            await self.git.run("cat-file", "-e", f"{commit}^{{commit}}")
        except GitFailed:
            return False
        return True

    async def leads_to(self, old: str, new: str) -> bool:
        """Whether the branch went from one to the other without taking anything back."""
        if not await self.has(old):
            return False
        try:
            await self.git.run("merge-base", "--is-ancestor", old, new)
        except GitFailed as error:
            if error.status == 1:
                return False
            raise self.damaged(error) from error
        return True

    async def local(self, *arguments: str) -> bytes:
        """A command over what we have. Raises Retryable."""
        try:
            return await self.git.run(*arguments)
        except GitFailed as error:
            raise self.damaged(error) from error

    async def each(self, see: Callable[[bytes], bool], *arguments: str) -> None:
        """As ``Command.each``, over what we have. Raises Retryable."""
        try:
            await self.git.each(see, *arguments)
        except GitFailed as error:
            raise self.damaged(error) from error

    def damaged(self, error: GitFailed) -> Retryable:
        """What a failure over our own copy means: if it is damaged, it is fetched anew next time."""
        if _DAMAGED.search(error.said):
            self._damaged = True
            return Retryable(f"{error}: our copy is damaged, and is fetched anew")
        return Retryable(str(error))

    async def _remote(self, *arguments: str, seconds: float) -> bytes:
        """Tried again for up to PATIENCE_SECONDS while the remote cannot answer; git does not tell how long it asks to
        wait."""
        attempt, spent = 0, 0.0
        while True:
            began = time.monotonic()
            try:
                return await self._once(*arguments, seconds=seconds)
            except Retryable as error:
                wait = backoff(attempt, base=0.5, cap=10.0, random=random.random())  # noqa: S311 — jitter, no secret
                spent += time.monotonic() - began + wait
                if spent > PATIENCE_SECONDS:
                    error.retry_after = wait
                    raise
            await asyncio.sleep(wait)
            attempt += 1

    async def _once(self, *arguments: str, seconds: float) -> bytes:
        try:
            return await self.git.run(*arguments, seconds=seconds)
        except GitFailed as error:
            if _THROTTLED.search(error.said):
                raise Deferred(str(error)) from error
            if _REFUSED.search(error.said):
                raise Misconfigured(
                    f"{error}; check url, token or key, and that they may read the repository"
                ) from error
            raise self.damaged(error) from error

    def _prepare(self) -> None:
        """Blocks. An empty bare repository, if there is none; what else lies there was ours, and is damaged."""
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

    async def _too_large(self) -> None:
        """Returns when the repository has grown beyond the limit."""
        while True:
            if await asyncio.to_thread(_size, self.git.folder) > self._options.max_repository_bytes:
                return
            await asyncio.sleep(_WATCH_SECONDS)


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # git renames what it has finished
                continue
    return total
