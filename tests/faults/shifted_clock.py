"""The penstock command with a clock that is shifted for a while (FAULTS_CLOCK: seconds ahead, from, until).

``from`` and ``until`` count from the start of the process: the clock jumps, and jumps back. The monotonic
clock and the clock of Postgres are not changed, as in reality.
"""

from __future__ import annotations

import builtins
import datetime as real
import os
import sys
import time
import types
from typing import Any

PRODUCT = ("canary", "cli", "connectors", "pipeline", "query", "topics")
COMMAND_LINE = "cli"
"""Not shifted, because typer recognises only the real class."""

_ahead, _from, _until = map(float, os.environ.get("FAULTS_CLOCK", "0,0,0").split(","))
_began, _time, _time_ns, _import = time.monotonic(), time.time, time.time_ns, builtins.__import__


def _shift() -> float:
    return _ahead if _from <= time.monotonic() - _began < _until else 0.0


class _AnyDatetime(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, real.datetime)


class _Datetime(real.datetime, metaclass=_AnyDatetime):
    @classmethod
    def now(cls, tz: real.tzinfo | None = None) -> Any:
        return real.datetime.fromtimestamp(time.time(), tz)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, handler: Any) -> Any:
        return handler(real.datetime)


def _install() -> None:
    """Shift the time module, and the ``datetime`` that modules of the product import from now on."""
    time.time = lambda: _time() + _shift()
    time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
    shifted = types.ModuleType("datetime")
    shifted.__dict__.update({**vars(real), "datetime": _Datetime})

    def importing(name: str, globals: Any = None, *rest: Any, **named: Any) -> Any:
        by = str((globals or {}).get("__name__", ""))
        if name == "datetime" and by.startswith(PRODUCT) and not by.startswith(COMMAND_LINE):
            return shifted
        return _import(name, globals, *rest, **named)

    assert not any(module.partition(".")[0] in PRODUCT for module in sys.modules), "it is imported already"
    builtins.__import__ = importing


if __name__ == "__main__":
    _install()
    from cli.main import main

    main()
