"""The processes of the tests that are forks: they end, and are ended, as those that are started anew."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.forking import Forked, fork, may_fork
from tests.support.processes import PENSTOCK, run_penstock

pytestmark = pytest.mark.heavy


@pytest.fixture
def server() -> Iterator[Forked]:
    """Runs until it is ended."""
    with tempfile.TemporaryFile() as output:
        process = fork("http.server", ["0", "--bind", "127.0.0.1"], dict(os.environ), stdout=output, stderr=output)
        yield process
        process.kill()


def test_a_forked_command_returns_its_exit_code_and_what_it_printed() -> None:
    done = run_penstock("--version", env=os.environ)
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "penstock", "")
    wrong = run_penstock("nonsense", env=os.environ)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "nonsense" in wrong.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_forked_process_ends_by_the_signal_that_it_is_sent(server: Forked, number: signal.Signals) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.01)
    assert os.getsid(server.pid) == server.pid, "a signal to its group reaches nothing else"
    server.send_signal(number)
    assert server.wait(60) == -number
    server.send_signal(number)


def test_a_process_that_ended_before_anybody_looked_has_its_exit_code() -> None:
    """On a busy machine, a command that was used wrongly ended before the test held it."""
    ended = subprocess.Popen([*PENSTOCK[:1], "-c", ""])
    ended.wait()
    reading, writing = os.pipe()
    process = Forked(ended.pid, reading, ("nonsense",))
    process.kill()
    os.write(writing, b"2")
    os.close(writing)
    assert process.wait(5) == 2


def test_only_commands_of_the_same_interpreter_and_its_environment_are_forked() -> None:
    assert may_fork([*PENSTOCK, "status"], os.environ)
    assert not may_fork([*PENSTOCK, "status"], {**os.environ, "PYTHONPATH": "/elsewhere"})
    assert not may_fork(["python-of-elsewhere", *PENSTOCK[1:], "status"], os.environ)
    assert not may_fork([PENSTOCK[0], "-m", "deploy.libpq"], os.environ)
