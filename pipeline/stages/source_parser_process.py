"""The process that parses source code: ``python -m pipeline.stages.source_parser_process SOCKET``. The argument is the
number of an inherited descriptor: one end of a pair of Unix sockets, whose other end sends one request at a time.

A request is JSON, {"media_type", "target"}, with two open files: the text in UTF-8, and an empty one for the result,
which is JSON: {"contexts": [[headings, prefix], …], "blocks": [[start, rank, prose, index of a context], …]}. The
response is DONE, or the reason why there is no result.

Each text is parsed in a process of its own, forked from this one, which has the parsers loaded: 5 ms instead of 200.
That process confines itself before it reads the text, because a text may exploit a defect of the native parsers, and it
sees nothing of other texts, which may be another tenant's: this one never reads any.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from time import thread_time

from pipeline.core.chunking import code
from pipeline.runtime.confinement import GRACE_SECONDS, ResourceLimits, Unconfined, confine, forbid, limit

LIMITS = ResourceLimits(
    memory_bytes=1024**3, cpu_seconds=20, wall_seconds=60, written_bytes=32 * 1024**2, open_files=16
)
"""A file of 1 MiB, the largest that is parsed, takes half a second, 150 MB and a result of 3 MB; a hostile one the 5
seconds of ``code.parse``, after which its last step may take some more."""
MESSAGE_BYTES = 4096
"""More than any request or response has: each is received by one call."""
DONE = "done"
CRASH = "its parser crashed"
_TOO_MUCH = (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL, signal.SIGXFSZ)


def serve(connection: socket.socket) -> None:
    """Respond to requests until the other end is closed."""
    while True:
        request, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
        if not request:
            return
        if (child := os.fork()) == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                connection.close()
                _parse(json.loads(request), *files)
            finally:
                os._exit(1)  # reached by exceptions only
        for file in files:
            os.close(file)
        _, status = _waited(child)
        connection.send(_response(os.waitstatus_to_exitcode(status)).encode())


def _waited(child: int) -> tuple[int, int]:
    """Wait for a parse as ``os.waitpid`` does. One that has not ended itself in time is killed: whatever has taken it
    over may ignore its alarm, and nobody else would be left after the death of the worker."""
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, LIMITS.wall_seconds + 2 * GRACE_SECONDS)
    try:
        return os.waitpid(child, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _parse(request: dict[str, str | int], source: int, result: int) -> None:
    """Parse a text, write the result and end this process."""
    limit(LIMITS)
    try:
        confine()
    except Unconfined:  # a kernel without Landlock: at least a crash ends no worker
        forbid()
    with open(source, encoding="utf-8", newline="") as file:
        text = file.read()
    blocks = code.parse(text, str(request["media_type"]), int(request["target"]), thread_time)
    contexts: dict[tuple[object, object], int] = {}
    rows = [(b.start, b.rank, b.prose, contexts.setdefault((b.headings, b.prefix), len(contexts))) for b in blocks]
    with open(result, "w", encoding="utf-8") as file:
        json.dump({"contexts": list(contexts), "blocks": rows}, file)
    os._exit(0)


def _response(exit_code: int) -> str:
    if exit_code == 0:
        return DONE
    if exit_code > 0:
        return "its parser failed"
    cause = signal.Signals(-exit_code)
    return f"{'it needs too much time or memory' if cause in _TOO_MUCH else CRASH} ({cause.name})"


def main() -> None:
    for media_type in code.GRAMMARS:
        code.language(media_type)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
