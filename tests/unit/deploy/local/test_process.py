"""Child processes of the local stack: told apart from others, and stopped whole."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deploy.local import process, run_as
from deploy.local.service import as_server_user

SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
DEAF = [sys.executable, "-c", f"import signal; signal.signal(15, signal.SIG_IGN); {SLEEPS[2]}"]
ENDS_LATER = [
    sys.executable,
    "-c",
    "import ctypes, signal, threading, time; signal.signal(15, signal.SIG_IGN);"
    " threading.Thread(target=time.sleep, args=(60,)).start(); print('up', flush=True);"
    " ctypes.CDLL(None).pthread_exit(None)",
]
"""Its first thread has ended, and another has not: the kernel calls it a zombie."""
PARENT = [sys.executable, "-c", f"import subprocess; subprocess.Popen(['sleep', '60']); {SLEEPS[2]}"]


def started(argv: list[str], tmp_path: Path) -> process.Record:
    log = tmp_path / "log"
    entry = process.spawn(argv, log=log, env=os.environ)
    while "up" not in log.read_text():
        assert process.running(entry), log.read_text()
    return entry


def test_a_process_is_identified_by_its_pid_file_and_stopped(tmp_path: Path) -> None:
    entry = started(SLEEPS, tmp_path)
    process.save(tmp_path / "pid", replace(entry, address="here"))
    loaded = process.load(tmp_path / "pid")
    assert loaded == replace(entry, address="here")
    results = process.running(loaded)
    assert results is not None
    assert os.getsid(results.pid) == results.pid  # no Ctrl-C of ours reaches it
    process.stop([results], ask=signal.SIGTERM, grace_seconds=10)
    assert process.running(loaded) is None
    assert process.exit_code(entry.pid) == -signal.SIGTERM


def test_a_later_process_with_the_same_pid_is_not_taken_for_ours(tmp_path: Path) -> None:
    me = psutil.Process()
    assert process.running(process.Record(me.pid, me.create_time())) is not None
    assert process.running(process.Record(me.pid, me.create_time() - 60)) is None


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    entry = started(DEAF, tmp_path)
    process.stop([psutil.Process(entry.pid)], ask=signal.SIGTERM, grace_seconds=0.3)
    assert process.exit_code(entry.pid) == -signal.SIGKILL


def test_a_process_whose_first_thread_ended_is_still_stopped_and_waited_for(tmp_path: Path) -> None:
    """Java is so for a while when it ends: it was taken for gone, and nobody asked for its exit status."""
    entry = started(ENDS_LATER, tmp_path)
    server = psutil.Process(entry.pid)
    while server.status() != psutil.STATUS_ZOMBIE:
        assert server.is_running()
    process.stop([server], ask=signal.SIGTERM, grace_seconds=0.3)
    assert process.exit_code(entry.pid) == -signal.SIGKILL


def test_stopping_a_process_also_stops_its_children(tmp_path: Path) -> None:
    entry = started(PARENT, tmp_path)
    (child,) = psutil.Process(entry.pid).children()
    process.stop([psutil.Process(entry.pid)], ask=None, grace_seconds=0)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("written", [None, "", "[]", "null", '{"pid": 1}', '{"pid": "x", "created": 1}', "12345"])
def test_a_missing_or_malformed_pid_file_loads_as_none(tmp_path: Path, written: str | None) -> None:
    file = tmp_path / "pid"
    if written is not None:
        file.write_text(written)
    assert process.load(file) is None


def test_files_are_replaced_atomically_with_their_mode(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.json"
    process.write_atomically(file, "old")
    process.write_atomically(file, "new", mode=0o600)
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_below_a_closed_folder_is_not_reachable_by_others(tmp_path: Path) -> None:
    open_folder, closed = tmp_path / "open", tmp_path / "closed"
    for folder in (open_folder, closed):
        folder.mkdir()
        (folder / "file").write_text("text")
        (folder / "file").chmod(0o644)
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            assert not run_as.reachable_by_others(str(open_folder / "file"))
            break
    closed.chmod(0o700)
    assert not run_as.reachable_by_others(str(closed / "file"))
    assert run_as.reachable_by_others("/")
    assert run_as.reachable_by_others("/etc/passwd")


def test_a_server_runs_without_root_and_can_read_its_closed_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    secret = tmp_path / "file"
    secret.write_text("text")
    secret.chmod(0o600)
    show = "import os,sys; print(os.geteuid(), os.getuid(), open(sys.argv[1]).read(), os.access(sys.argv[1], os.R_OK))"
    argv = as_server_user([sys.executable, "-c", show, str(secret)], tmp_path)
    entry = process.spawn(argv, log=tmp_path / "log", env=os.environ)
    process._wait_gone([psutil.Process(entry.pid)], 20)
    expected = run_as.nobody()[0] if os.geteuid() == 0 else os.geteuid()
    assert (tmp_path / "log").read_text().split() == [str(expected), str(expected), "text", "True"]


def test_a_large_log_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LARGE_LOG_BYTES", 10)
    log = tmp_path / "kafka.log"
    assert process.rotate(log) == 0
    log.write_text("small")
    assert process.rotate(log) == 5
    log.write_text("grown large")
    assert process.rotate(log) == 0
    assert (tmp_path / "kafka.log.1").read_text() == "grown large"
    assert not log.exists()
