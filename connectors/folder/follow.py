"""Follows folders for ``connectors.folder.connector``, as a program of its own: prints each change as a line of JSON.

The library holds the interpreter's lock while it looks through a folder. In the worker, a mount whose server does not
answer would so stop every connector, and a folder with a quarter of a million folders would for seconds at a time."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from watchfiles import Change, watch

QUIET_MS, DEBOUNCE_MS = 20, 400
"""An editor saves a file by several events, which are handled together: until there was none for one to two times the
former, and at most for the latter. Looking so often takes .2 % of a processor."""
STARTED_MS = 200
"""After this time without a change a folder is known to be followed."""
LONGEST_RESTART_SECONDS = 60.0


def main(restart_seconds: float, roots: Sequence[str]) -> None:
    """Follow until the standard input ends, as it does with the process that started this one. restart_seconds: the
    first pause before a folder that could not be followed is followed again."""
    files = {root for root in roots if os.path.isfile(root)}
    watched = [(root, True) for root in roots if root not in files]
    watched += [(parent, False) for parent in sorted({os.path.dirname(file) for file in files})]
    _write([{"following": [path for path, _ in watched]}])
    for path, is_recursive in watched:
        threading.Thread(target=_follow, args=(path, is_recursive, restart_seconds), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # the threads may wait for a mount


def _follow(watched: str, is_recursive: bool, restart_seconds: float) -> None:
    pause = restart_seconds
    while True:
        is_new, since = True, math.inf
        try:
            device = os.stat(watched).st_dev
            for changes in watch(
                watched,
                watch_filter=None,
                recursive=is_recursive,
                debounce=DEBOUNCE_MS,
                step=QUIET_MS,
                rust_timeout=STARTED_MS,
                yield_on_timeout=True,
                raise_interrupt=False,
                ignore_permission_denied=True,
            ):
                _write([{"followed": watched}] * is_new + [{"changed": path} for _, path in changes])
                is_new, since = False, min(since, time.monotonic())
                # The library goes on without a word, and notices nothing any more.
                if os.stat(watched).st_dev != device or (Change.deleted, watched) in changes:
                    raise FileNotFoundError("it was removed, replaced or mounted")
        except (OSError, RuntimeError, ValueError) as error:  # what inotify refuses, and names that are not UTF-8
            _write([{"failed": watched, "reason": str(error)}])
        if time.monotonic() - since > LONGEST_RESTART_SECONDS:
            pause = restart_seconds
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_RESTART_SECONDS)


_writing = threading.Lock()


def _write(messages: Sequence[Mapping[str, object]]) -> None:
    with _writing:
        sys.stdout.write("".join(f"{json.dumps(message)}\n" for message in messages))
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
