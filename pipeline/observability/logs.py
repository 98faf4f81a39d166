"""The log: one JSON object a line on stderr, from our code and from libraries. An exception appears as its types and
places, never with its text, which may quote content."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping, MutableMapping
from datetime import date
from pathlib import Path
from traceback import extract_tb
from types import TracebackType
from typing import Any
from uuid import UUID

import structlog

from pipeline.core.errors import PenstockError
from pipeline.observability.traced_records import in_log

MAX_CAUSES, MAX_FRAMES = 5, 8
"""How many causes of an exception, and frames of each, a line holds."""


def _without_texts(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace an exception by its types and places, the deepest cause last. Its text may quote a row, a request or a
    key."""
    if line.get("logger") == "asyncio":
        line["event"] = str(line["event"]).partition("\n")[0]  # what follows is the task, which quotes its exception
    info = line.pop("exc_info", None)
    if info:
        error = info if isinstance(info, BaseException) else sys.exc_info()[1] if info is True else info[1]
        causes: list[dict[str, Any]] = []
        while error is not None and len(causes) < MAX_CAUSES:
            causes.append(_cause(error))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        line["exception"] = causes
    return line


def _cause(error: BaseException) -> dict[str, Any]:
    """One exception. Our own errors show their text, which quotes no content; others show their code, if any."""
    frames = extract_tb(error.__traceback__)[-MAX_FRAMES:]
    cause: dict[str, Any] = {"type": type(error).__name__}
    if isinstance(error, PenstockError):
        cause["reason"] = str(error)[:300]
    elif (code := getattr(error, "sqlstate", None) or getattr(error, "errno", None)) is not None:
        cause["code"] = code
    return cause | {"at": [f"{Path(f.filename).name}:{f.lineno}" for f in frames]}


def _arguments_by_type(record: logging.LogRecord) -> bool:
    """A filter that replaces exceptions among a library's arguments ("Crashed reason=%r") by their types, before they
    are written into the message."""
    if isinstance(record.args, Mapping):
        record.args = {name: _by_type(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(_by_type(value) for value in record.args)
    return True


def _by_type(value: object) -> object:
    return type(value).__name__ if isinstance(value, BaseException) and not isinstance(value, PenstockError) else value


def _as_json(value: object) -> str:
    """A value that JSON has no form for: its text where that is short and no content, else its type."""
    return str(value) if isinstance(value, UUID | date | Path) else type(value).__name__


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Log an exception that nobody caught."""
    if error is None or not issubclass(kind, Exception):
        sys.__excepthook__(kind, error or kind(), trace)
        return
    logging.getLogger("penstock").critical("crashed", exc_info=(kind, error, trace))


def configure_logging() -> None:
    """Write the lines of structlog and of the libraries' loggers as JSON objects to stderr."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        in_log,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_arguments_by_type)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _without_texts,
                structlog.processors.JSONRenderer(default=_as_json),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda raised: _log_uncaught(raised.exc_type, raised.exc_value, raised.exc_traceback)
    for noisy in ("faust", "aiokafka", "mode", "elastic_transport", "httpx", "httpx2", "kafka"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
