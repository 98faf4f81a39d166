"""The penstock command on a machine whose clock is set while it works (FAULTS_CLOCK: seconds ahead, from, until).

``from`` and ``until`` count from the start of the process: then the clock jumps, and is set right again. The clock that
never jumps (time.monotonic) is left alone, as a real step leaves it alone; what Postgres calls now is its own.
"""

from __future__ import annotations

import builtins
import datetime as real
import os
import sys
import time
import types
from typing import Any

OURS = ("canary", "cli", "connectors", "pipeline", "query", "topics")
COMMAND_LINE = "cli"
"""typer knows the real class alone."""

_ahead, _from, _until = map(float, os.environ.get("FAULTS_CLOCK", "0,0,0").split(","))
_began, _time, _time_ns, _import = time.monotonic(), time.time, time.time_ns, builtins.__import__


def _shift() -> float:
    return _ahead if _from <= time.monotonic() - _began < _until else 0.0


class _Alike(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, real.datetime)


class _Datetime(real.datetime, metaclass=_Alike):
    @classmethod
    def now(cls, tz: real.tzinfo | None = None) -> Any:
        return real.datetime.fromtimestamp(time.time(), tz)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, handler: Any) -> Any:
        return handler(real.datetime)


def _install() -> None:
    """What the product imports as ``datetime`` from now on tells the other time, and so does the time module."""
    time.time = lambda: _time() + _shift()
    time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
    shifted = types.ModuleType("datetime")
    shifted.__dict__.update({**vars(real), "datetime": _Datetime})

    def importing(name: str, globals: Any = None, *rest: Any, **named: Any) -> Any:
        by = str((globals or {}).get("__name__", ""))
        if name == "datetime" and by.startswith(OURS) and not by.startswith(COMMAND_LINE):
            return shifted
        return _import(name, globals, *rest, **named)

    assert not any(module.partition(".")[0] in OURS for module in sys.modules), "it is imported already"
    builtins.__import__ = importing


if __name__ == "__main__":
    _install()
    from cli.main import main

    main()
