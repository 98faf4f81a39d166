"""The log: one JSON object a line on stderr, whoever speaks; of an exception its types and places, never its words."""

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

CAUSES_SHOWN, FRAMES_SHOWN = 5, 8
"""Of an exception."""


def _without_words(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """An exception as its types and places, the deepest cause last. Its words may quote a row, a request or a key."""
    if line.get("logger") == "asyncio":
        line["event"] = str(line["event"]).partition("\n")[0]  # what follows is the task, which quotes its exception
    given = line.pop("exc_info", None)
    if given:
        error = given if isinstance(given, BaseException) else sys.exc_info()[1] if given is True else given[1]
        told: list[dict[str, Any]] = []
        while error is not None and len(told) < CAUSES_SHOWN:
            told.append(_cause(error))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        line["exception"] = told
    return line


def _cause(error: BaseException) -> dict[str, Any]:
    """Ours say what is wrong, for people; of others a code, which quotes nothing."""
    frames = extract_tb(error.__traceback__)[-FRAMES_SHOWN:]
    told: dict[str, Any] = {"type": type(error).__name__}
    if isinstance(error, PenstockError):
        told["reason"] = str(error)[:300]
    elif (code := getattr(error, "sqlstate", None) or getattr(error, "errno", None)) is not None:
        told["code"] = code
    return told | {"at": [f"{Path(f.filename).name}:{f.lineno}" for f in frames]}


def _arguments_by_type(record: logging.LogRecord) -> bool:
    """A filter: exceptions among a library's arguments ("Crashed reason=%r") by their types, before they are written
    into the message."""
    if isinstance(record.args, Mapping):
        record.args = {name: _by_type(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(_by_type(value) for value in record.args)
    return True


def _by_type(value: object) -> object:
    return type(value).__name__ if isinstance(value, BaseException) and not isinstance(value, PenstockError) else value


def _named(value: object) -> str:
    """Of what JSON has no form for: what is known to be short and no content."""
    return str(value) if isinstance(value, UUID | date | Path) else type(value).__name__


def _said(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """What nobody caught, as a line of the log like any other."""
    if error is None or not issubclass(kind, Exception):
        sys.__excepthook__(kind, error or kind(), trace)
        return
    logging.getLogger("penstock").critical("crashed", exc_info=(kind, error, trace))


def configure_logging(*, level: int = logging.INFO) -> None:
    """structlog and the libraries' loggers as one JSON object a line on stderr."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        in_log,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_arguments_by_type)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _without_words,
                structlog.processors.JSONRenderer(default=_named),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(capture=True)
    sys.excepthook = _said
    threading.excepthook = lambda told: _said(told.exc_type, told.exc_value, told.exc_traceback)
    for noisy in ("faust", "aiokafka", "mode", "elastic_transport", "httpx", "httpx2", "kafka"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
