"""Processes that start without importing anything: forks of one that has Penstock's modules loaded already.

A process is real in every respect: it has a pid, descriptors, an environment and a session of its own, and is killed as
any other. It runs a module as ``python -m`` does. What it saves are the imports, which are most of the processor time
of a short command (2.7 s of the query service, 1.4 s of a worker).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

PROJECT = Path(__file__).parents[2]
PRELOADED = (
    "canary.worker",
    "cli.ingest",
    "cli.search",
    "cli.status",
    "cli.why",
    "connectors.worker",
    "pipeline.analysis.conflicts",
    "pipeline.analysis.worker",
    "pipeline.embedding.local",
    "pipeline.stream.worker",
    "query.http.app",
    "query.standing.task",
)
"""Modules that are slow to import; whatever else a command needs it imports itself."""
REQUEST_BYTES = 200_000
_one_request = threading.Lock()


class Forked:
    """A process that was forked, with the methods of ``subprocess.Popen`` that the tests use."""

    def __init__(self, pid: int, status: int, args: Sequence[str]) -> None:
        """status: the pipe on which the process's exit code arrives."""
        self.pid = pid
        self.args = args
        self.returncode: int | None = None
        self._status = status
        self._process: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended before we come to look, on a busy machine
            self._process = os.pidfd_open(pid)  # a pid that another process has by now is never sent a signal

    def poll(self) -> int | None:
        return self._await(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        code = self._await(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _await(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if poll.poll(None if seconds is None else seconds * 1000):
                code = os.read(self._status, 16)
                self.returncode = int(code) if code else -signal.SIGKILL  # the server ended, and its processes with it
                os.close(self._status)
                if self._process is not None:
                    os.close(self._process)
        return self.returncode


def fork(
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    stdout: IO[bytes],
    stderr: IO[bytes],
    stdin: IO[bytes] | None = None,
) -> Forked:
    """Run a module with these arguments, in the project's folder and with exactly this environment. Without stdin, it
    reads nothing."""
    reading, writing = os.pipe()
    with open(os.devnull, "rb") as nothing:
        descriptors = [(stdin or nothing).fileno(), stdout.fileno(), stderr.fileno(), writing]
        request = json.dumps({"module": module, "arguments": list(arguments), "env": dict(env)}).encode()
        assert len(request) <= REQUEST_BYTES, "the request is too long for one packet"
        with _one_request:
            socket.send_fds(_server(), [request], descriptors)
            os.close(writing)
            pid = int(_server().recv(16))
    return Forked(pid, reading, (sys.executable, "-m", module, *arguments))


def may_fork(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a fork does the same as this command: it is one of Penstock's, of this interpreter, in the same
    environment as far as the interpreter itself reads it."""
    return list(argv[:3]) == [sys.executable, "-m", "cli.main"] and _of_python(env) == _of_python(os.environ)


def _of_python(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(("PYTHON", "LD_", "MALLOC_"))}


@cache
def _server() -> socket.socket:
    """The connection to this process's server, which ends with it and ends its forks then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * REQUEST_BYTES)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=PROJECT,
            start_new_session=True,
        )
    atexit.register(_stop, ours, process)
    return ours


def _stop(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait(30)


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._running: dict[int, int] = {}
        """Pid → the pipe that its exit code is written to."""

    def serve(self) -> dict[str, Any] | None:
        """Returns twice: in each fork its request, and in the server None, once its client has gone."""
        ended, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        while True:
            readable, _, _ = select.select([self._connection.fileno(), ended], [], [])
            if ended in readable:
                os.read(ended, 4096)
                self._reap()
            if self._connection.fileno() not in readable:
                continue
            request, descriptors, _, _ = socket.recv_fds(self._connection, REQUEST_BYTES, 4)
            if not request:
                for pid in self._running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return None
            pid = os.fork()
            if pid == 0:
                for descriptor in (ended, wake, *self._running.values()):
                    os.close(descriptor)
                self._become(descriptors)
                self._connection.send(str(os.getpid()).encode())
                self._connection.close()
                return dict(json.loads(request))
            self._running[pid] = descriptors[3]
            for descriptor in descriptors[:3]:
                os.close(descriptor)

    def _reap(self) -> None:
        for pid in list(self._running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                pipe = self._running.pop(pid)
                with contextlib.suppress(BrokenPipeError):
                    os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(pipe)

    def _become(self, descriptors: list[int]) -> None:
        """A new process's session, signals and descriptors."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)


def _main() -> None:
    import gc
    import runpy
    from importlib import import_module

    for module in PRELOADED:
        import_module(module)
    from pipeline.core.errors import Misconfigured
    from pipeline.embedding.convert import prepare
    from pipeline.runtime.settings import dist

    with contextlib.suppress(Misconfigured):  # whoever needs the model will say so
        prepare(dist() / "models")  # a fork need not read the weights again
    gc.freeze()
    request = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is None:
        return
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
