"""Whether a library that an extra brings is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def is_installed(*modules: str) -> bool:
    """Return whether all these modules can be imported, without importing them. A dotted name imports its parents."""
    return all(_is_present(module) for module in modules)


def _is_present(module: str) -> bool:
    # faust puts another module in its place when it is imported, without the spec that find_spec expects.
    if sys.modules.get(module) is not None:
        return True
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the folder that it would be in
        return False
