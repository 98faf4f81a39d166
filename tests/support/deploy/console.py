"""The commands of a guide, run as its reader would: one shell, from the first block to the last.

A block ```` ```console ```` holds commands (``$ …``, continued by ``> …``), each with what it prints. ``…`` stands for
anything within a line, and alone on a line for any lines. In a block ``console eventually`` a command is repeated
until it prints that.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deploy import drill
from deploy.local.service import free_port
from tests.support.space import PROJECT

EVENTUALLY_SECONDS = 120.0
_BLOCK = re.compile(r"^```console( eventually)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    line: int
    """The number of its line in the guide."""
    text: str
    prints: str
    eventually: bool

    def matches(self, printed: str) -> bool:
        return re.fullmatch(_pattern(self.prints), _tidy(printed), re.DOTALL) is not None


def clean_environment(home: Path) -> dict[str, str]:
    """A person's environment: none of ours is set, but where the environment with everything in it is."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTEST_", "PYTHON"))
    }
    return {**kept, "HOME": str(home), "PROMETHEUS_PORT": str(free_port()), "TERM": "dumb", "COLUMNS": "160"}


def commands(guide: str) -> list[Command]:
    results = []
    for block in _BLOCK.finditer(guide):
        first = guide.count("\n", 0, block.start(2)) + 1
        text: list[str] = []
        prints: list[str] = []
        started = first
        for n, line in enumerate([*block.group(2).splitlines(), "$ "], first):
            if line.startswith("$ "):
                if text:
                    results.append(Command(started, "\n".join(text), "\n".join(prints), block.group(1) is not None))
                text, prints, started = [line[2:]], [], n
            elif line.startswith(">") and text and not prints and (line == ">" or line[1] == " "):
                text.append(line[2:])
            else:
                assert text, f"line {n}: what prints this?"
                prints.append(line)
    return results


def _pattern(prints: str) -> str:
    """``…`` alone on a line: any lines, none too."""
    parts = []
    for line in prints.splitlines():
        if line == "…":
            parts.append(r"(?:[^\n]*\n)*?")
        else:
            parts.append(r"[^\n]*".join(re.escape(part) for part in line.split("…")) + r"\n")
    return "".join(parts)


def _tidy(printed: str) -> str:
    return "".join(line.rstrip() + "\n" for line in printed.rstrip("\n").splitlines())


class Shell:
    """Bash, its output and that of what it runs together as a reader sees them."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._typed = drill.Shell(self._process)

    def run(self, command: Command) -> str:
        """Return the output of the command. Raises AssertionError if its exit code is not 0, or its output differs."""
        deadline = time.monotonic() + EVENTUALLY_SECONDS
        while True:
            printed, code = self._typed.run(command.text)
            if code == 0 and command.matches(printed):
                return printed
            if not command.eventually or time.monotonic() > deadline:
                raise AssertionError(
                    f"line {command.line}: $ {command.text}\nended with {code} and printed:\n{printed}\n"
                    f"where the guide shows:\n{command.prints}"
                )
            time.sleep(0.5)

    def end(self) -> None:
        """Everything that the guide started and did not stop ends with the shell."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def shell(folder: Path, env: Mapping[str, str]) -> Iterator[Shell]:
    one = Shell(folder, env)
    try:
        yield one
    finally:
        one.end()


def follow(guide: Path, folder: Path, *, state: Path, least: int) -> str:
    """Run all commands of a guide of the documentation, in a home of their own, and stop the stack that they start.
    Returns their output. state: the stack's. least: the fewest commands that the guide has."""
    documented = commands(guide.read_text())
    assert len(documented) >= least
    env = clean_environment(folder)
    with shell(PROJECT, env) as bash:
        try:
            return "".join(bash.run(command) for command in documented)
        finally:
            subprocess.run(
                [sys.executable, "-m", "cli.main", "down"],
                cwd=PROJECT,
                capture_output=True,
                check=True,
                env={**env, "PENSTOCK_HOME": str(state)},
            )
