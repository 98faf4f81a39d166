"""``penstock status --watch`` on a real terminal: colours, another size, Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from tests.support.space import PROJECT

pytestmark = pytest.mark.stack

SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[=>()][A-B0-2]?)")
WITHIN_SECONDS = 120


def _take_terminal() -> None:
    """With the terminal as its own, and Ctrl-C heard: whoever runs the tests in the background has it ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The terminal of a program: what the program has written, and keys for it. It is the program's controlling
    terminal, so that Ctrl-C reaches it."""

    def __init__(self, argv: list[str], environment: dict[str, str], rows: int, columns: int) -> None:
        self._side, theirs = pty.openpty()
        self.resize(rows, columns)
        self.process = subprocess.Popen(
            argv,
            env=environment,
            cwd=PROJECT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._side, keys)

    def until(self, text: str) -> str:
        """Everything written from now until the text is there, or (text empty) to the end."""
        shown, deadline = "", time.monotonic() + WITHIN_SECONDS
        while not text or text not in shown:
            assert time.monotonic() < deadline, f"no {text!r} in {shown[-3000:]!r}"
            if not select.select([self._side], [], [], 0.5)[0]:
                continue
            try:
                shown += os.read(self._side, 65_536).decode(errors="replace")
            except OSError:  # the program has ended
                assert not text, f"it ended without {text!r}: {shown[-3000:]}"
                return shown
        return shown

    def drain(self) -> None:
        """Pass over what is still being written."""
        while select.select([self._side], [], [], 1.0)[0]:
            os.read(self._side, 65_536)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._side)


@contextmanager
def terminal(home: Path, *arguments: str, rows: int = 50, columns: int = 150) -> Iterator[Terminal]:
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"PENSTOCK_HOME": str(home), "TERM": "xterm-256color"}
    argv = [sys.executable, "-m", "cli.main", "status", *arguments]
    shown = Terminal(argv, environment, rows, columns)
    try:
        yield shown
    finally:
        shown.close()


def test_status_watch_is_drawn_in_colours_resizes_and_ends_with_ctrl_c(stack: Stack) -> None:
    with terminal(stack.home, "--watch", "--every", "3600") as shown:
        first = shown.until("running")  # a part that the shared servers tell too late is named, and not asked again
        assert "\x1b[?1049h" in first  # a screen of its own: what stood there before comes back
        assert re.search(r"\x1b\[[0-9;]*32m *ready", first)  # green
        shown.drain()
        shown.resize(12, 50)  # the next look is an hour away: the signal alone draws it anew
        narrow = shown.until("running")
        drawn = SEQUENCE.sub("", narrow)
        assert drawn.splitlines()
        assert all(len(row) <= 50 for row in drawn.splitlines())
        shown.press(b"\x03")
        end = shown.until("")
        assert shown.process.wait(60) == 130
        assert "\x1b[?1049l" in end
        assert "\x1b[?25h" in end  # the cursor is back
        assert "Traceback" not in first + narrow + end


def test_status_watch_is_drawn_cleanly_while_all_services_are_unreachable(tmp_path: Path) -> None:
    with terminal(tmp_path, "--watch", "--every", "0.2") as shown:
        drawn = shown.until("kafka is down")
        drawn += shown.until("kafka is down")  # libraries had time to complain
        assert "Unable connect" not in drawn
        shown.press(b"\x03")
        shown.until("")
        assert shown.process.wait(60) == 130
