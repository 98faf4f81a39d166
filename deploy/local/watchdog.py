"""Stop a stack when the process that started it is gone: ``python -m deploy.local.watchdog HOME PID CREATED``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from deploy.local import process
from deploy.local.stack import Stack


def main() -> None:
    home, pid, created = sys.argv[1:]
    parent = process.Record(int(pid), float(created))
    while process.running(parent) is not None:
        time.sleep(0.5)
    Stack(Path(home)).down()


if __name__ == "__main__":
    main()
