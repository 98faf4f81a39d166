"""The disaster drill: ``python -m deploy.drill > docs/restore-drill.md``.

A stack of its own in a temporary folder loses Postgres, Elasticsearch, the vectors and Kafka, one after another, and
gets each back. What is written is what was typed and what it printed. Ends with 1 at the first step that fails.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from deploy.drill_scenes import SCENES, Say, Step
from deploy.local.dist import postgres_bin
from deploy.local.stack import Stack

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
WIDTH = 120


@dataclass
class Shell:
    process: subprocess.Popen[str]

    def run(self, typed: str) -> tuple[str, int]:
        """Run a command; returns its output and its exit code."""
        mark = uuid.uuid4().hex
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{typed}\necho {mark} $?\n")
        self.process.stdin.flush()
        printed = []
        for line in self.process.stdout:
            before, separator, code = line.partition(mark)
            printed.append(before)
            if separator:
                return _COLOUR.sub("", "".join(printed)), int(code)
        raise RuntimeError(f"the shell ended in the middle of: {typed}")


@contextmanager
def _shell(folder: Path, env: Mapping[str, str]) -> Iterator[Shell]:
    with subprocess.Popen(
        ["bash", "--noprofile", "--norc"],
        cwd=folder,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield Shell(process)


def _environment(folder: Path) -> dict[str, str]:
    """The environment of the drill: of Penstock's variables only the folder of the stack, and the programs of this
    environment and of its Postgres first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    programs = [str(Path(sys.executable).parent), str(postgres_bin()), environment.get("PATH", "")]
    return {
        **environment,
        "PATH": os.pathsep.join(programs),
        "PENSTOCK_HOME": str(folder / "state"),
        "COLUMNS": str(WIDTH),
        "TERM": "dumb",
        "PYTHONSAFEPATH": "1",
        "PENSTOCK_AUDIT_REPAIR": "none",  # what is lost stays lost until a step repairs it
    }


def rehearse(folder: Path, out: IO[str]) -> bool:
    """Play every scene in ``folder``, and write the transcript. Whether each step did what it should."""
    started = time.monotonic()
    stack = Stack(folder / "state", die_with_parent=True)
    stack.up()  # so that everything ends with this process, however it ends
    try:
        with _shell(folder, _environment(folder)) as shell:
            shell.run("exec 2>&1")
            for scene in SCENES:
                match scene:
                    case Say(text):
                        out.write(f"\n{_wrapped(text)}\n")
                    case Step() if not _play(scene, shell, folder, out):
                        return False
                out.flush()
            assert shell.process.stdin is not None
            shell.process.stdin.close()
    finally:
        stack.down()
    out.write(f"\nThe whole drill took {(time.monotonic() - started) / 60:.0f} minutes.\n")
    return True


def _wrapped(text: str) -> str:
    return "\n\n".join(textwrap.fill(part, WIDTH, break_on_hyphens=False) for part in text.split("\n\n"))


def _play(step: Step, shell: Shell, folder: Path, out: IO[str]) -> bool:
    out.write("\n```console\n")
    for typed in step.typed:
        out.write(f"$ {typed}\n")
        out.flush()
        printed, code = shell.run(typed)
        shown = printed.replace(str(folder), "~")
        out.write("".join(f"{line.rstrip()}\n" for line in shown.splitlines() if line.strip()))
        if code != 0:
            sys.stderr.write(f"error: {shlex.quote(typed)} ended with {code}\n")
            out.write("```\n")
            return False
        if step.shows and not re.search(step.shows, printed):
            sys.stderr.write(f"error: {shlex.quote(typed)} did not show {step.shows!r}\n")
            out.write("```\n")
            return False
    out.write("```\n")
    return True


def main() -> int:
    out = sys.stdout
    out.write(
        "# Restore drill\n\n"
        f"This is the transcript of `python -m deploy.drill`, made on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC with real"
        " servers and real losses.\nThe command can be repeated; it ends with exit code 1 if something is not"
        " restored. [Recovery](recovery.md) explains the\nsteps. It runs with PENSTOCK_AUDIT_REPAIR=none, so that each"
        " loss stays until a step repairs it.\n"
    )
    with tempfile.TemporaryDirectory(prefix="penstock-drill-") as folder:
        return 0 if rehearse(Path(folder), out) else 1


if __name__ == "__main__":
    sys.exit(main())
