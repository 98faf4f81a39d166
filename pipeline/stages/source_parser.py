"""Parsing source code in another process, because a text may crash its native parser or take it over."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import IO, Annotated

import structlog
from pydantic import BaseModel, FailFast, Field

from pipeline.core.chunking import code
from pipeline.core.chunking.units import GLUE, MAX_HEADING_CHARS, MAX_HEADINGS, Block
from pipeline.core.errors import Retryable
from pipeline.stages.source_parser_process import CRASH, DONE, LIMITS, MESSAGE_BYTES

log = structlog.get_logger()

PROGRAM = (sys.executable, "-I", "-m", "pipeline.stages.source_parser_process")
_ATTEMPTS = 2
"""A crash that does not happen again was not the text's fault, and its chunks must not depend on it."""
_WAIT_SECONDS = LIMITS.wall_seconds + 15
"""Longest wait for a response: the process ends each parse after ``LIMITS.wall_seconds`` and a few more."""

_MOST_PARTS, _FEW_PARTS, _PARTS_PER_CHARACTER = 4_000_000, 10_000, 64
"""The most arrays and commas of a result, in all and for each character of its text: reading it takes up to 100 bytes
of memory for each. A text of nothing but statements of a letter has two and a half for each character."""
_Offset = Annotated[int, Field(ge=0)]
_Headings = Annotated[
    tuple[Annotated[str, Field(max_length=MAX_HEADING_CHARS)], ...], Field(max_length=MAX_HEADINGS), FailFast()
]
_Prefix = Annotated[tuple[tuple[_Offset, _Offset], ...], FailFast()]


class _Result(BaseModel):
    """The content of a result. It is not trusted: the text may have taken the process over. Reading ends at the first
    error, because an error takes hundreds of bytes."""

    contexts: Annotated[list[tuple[_Headings, _Prefix]], FailFast()]
    blocks: Annotated[
        list[tuple[_Offset, Annotated[int, Field(ge=0, le=GLUE)], bool, _Offset]],
        Field(min_length=1),
        FailFast(),
    ]


class SourceParser:
    """Parses source code in a process that is started when first needed, and ends with this one. Its methods may be
    called from any thread."""

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def parse(self, text: str, media_type: str, target: int) -> list[Block]:
        """Return the blocks of ``code.parse``; where that fails or crashes, the text is cut at its blank lines. Raises
        Retryable if no process can be started."""
        if not text:
            return []
        reason = ""
        for _ in range(_ATTEMPTS):
            with self._lock, _file() as source, _file() as result:
                source.write(text.encode())
                reason = self._request(json.dumps({"media_type": media_type, "target": target}), source, result)
                if reason == DONE:
                    try:
                        return _blocks(result, text)
                    except ValueError:  # also pydantic's and json's
                        reason = "its result is invalid"
            if not reason.startswith(CRASH):
                break
        log.warning("source_code_unparsed", media_type=media_type, characters=len(text), reason=reason)
        return code.cut_at_blank_lines(text)

    def close(self) -> None:
        """End the process. The next text starts another."""
        with self._lock:
            self._end()

    def _request(self, request: str, source: IO[bytes], result: IO[bytes]) -> str:
        """Return the response, or how there came to be none."""
        source.seek(0)  # which also writes what is buffered
        try:
            connection = self._connection or self._start()
        except OSError as error:
            raise Retryable(f"the process that parses source code cannot be started: {error}") from error
        try:
            socket.send_fds(connection, [request.encode()], [source.fileno(), result.fileno()])
            response = connection.recv(MESSAGE_BYTES).decode(errors="replace")
        except TimeoutError:
            self._end()
            return f"it took more than {_WAIT_SECONDS} s"
        except OSError:
            response = ""
        if not response:
            self._end()
            return f"{CRASH} and ended its process"
        return response

    def _start(self) -> socket.socket:
        connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*self._program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                start_new_session=True,
            )
        connection.settimeout(_WAIT_SECONDS)
        self._connection = connection
        return connection

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@cache
def source_parser() -> SourceParser:
    """The parser that all threads of this process share."""
    parser = SourceParser()
    atexit.register(parser.close)
    return parser


def _file() -> IO[bytes]:
    """An unnamed file, in memory where the system offers that."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("penstock"), "w+b")
    return tempfile.TemporaryFile()


def _blocks(result: IO[bytes], text: str) -> list[Block]:
    """Read a result. Raises ValueError unless it is one that ``code.parse`` may have for this text."""
    result.seek(0)
    data = result.read(LIMITS.written_bytes)
    if data.count(b"[") + data.count(b",") > min(_MOST_PARTS, _FEW_PARTS + _PARTS_PER_CHARACTER * len(text)):
        raise ValueError("it has more parts than the text can have")
    parsed = _Result.model_validate_json(data, strict=True)
    blocks = [Block(start, rank, prose, *parsed.contexts[n]) for start, rank, prose, n in parsed.blocks]
    starts = [block.start for block in blocks]
    if starts[0] != 0 or starts[-1] >= len(text) or any(a >= b for a, b in pairwise(starts)):
        raise ValueError("blocks are not in order")
    if any(a >= b or b > len(text) for _, prefix in parsed.contexts for a, b in prefix):
        raise ValueError("a prefix is not in the text")
    return blocks
