"""Errors of a source's own code: where they are, and what its developer sees of them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from ssl import SSLError
from traceback import TracebackException
from types import TracebackType

from pipeline.core.errors import Misconfigured, PenstockError

OURS = frozenset({"canary", "cli", "connectors", "penstock", "pipeline", "query", "topics"})

IMPORTING = frozenset({"importlib", "_frozen_importlib", "_frozen_importlib_external"})
"""The packages whose frame is the last one where a file cannot be compiled."""


OF_DATA = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    SyntaxError,  # parsers of XML raise it
    TypeError,
    ValueError,
)
"""Errors of code that did not expect some data, rather than of a machine that lacks something."""
OUTAGES = (SSLError, asyncio.IncompleteReadError)
"""Errors of a connection or a process that ended. Some count among OF_DATA by their other base: a certificate that is
refused is a ValueError, and a stream that ends early an EOFError."""


class NotImported(Misconfigured):
    """The module of a source raises an error, its cause, while it is imported."""


def foreign(error: BaseException) -> BaseException | None:
    """Return the error of a source's own code, or None if its text is meant for people."""
    if isinstance(error, NotImported):
        return error.__cause__
    return None if isinstance(error, PenstockError) else error


def place(error: BaseException) -> str:
    """Return the type of an error, and the file and line of a source's own code in which it was raised, or that called
    what raised it. Neither the text of the error nor the code: they may quote content."""
    kind = type(error).__name__
    if (line := _file_that_cannot_be_compiled(error)) is not None:
        return f"{kind} at {line}"
    frames = _frames(error.__traceback__)
    if not frames:
        return kind
    own = next((package for package in map(_package, frames) if _is_foreign(package)), None)
    last = next((frame for frame in reversed(frames) if _package(frame) == own), frames[-1])
    return f"{kind} at {Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"


def trace(error: BaseException) -> str:
    """Return the traceback of an error, from the first line of the source's own code. It may quote content: for whoever
    develops the source, and for no log."""
    own = next((frame for frame in _frames(error.__traceback__) if _is_foreign(_package(frame))), error.__traceback__)
    shows_itself = _file_that_cannot_be_compiled(error) is not None
    return "".join(TracebackException(type(error), error, None if shows_itself else own).format())


def _file_that_cannot_be_compiled(error: BaseException) -> str | None:
    """Return the file and line of code that was to be imported. Parsers of data raise such errors too, also with the
    name of a file that they read, which is a document's."""
    if not isinstance(error, SyntaxError) or not error.filename or error.filename.startswith("<"):
        return None
    frames = _frames(error.__traceback__)
    if not frames or _package(frames[-1]) not in IMPORTING:
        return None
    return f"{Path(error.filename).name}:{error.lineno}"


def _frames(traceback: TracebackType | None) -> list[TracebackType]:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def _package(frame: TracebackType) -> str:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_foreign(package: str) -> bool:
    return package not in OURS and package not in sys.stdlib_module_names
