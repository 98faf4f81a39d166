"""The internal packages have general names, so that another module of the same name may hide one of them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

INTERNAL = ("topics", "pipeline", "connectors", "query", "canary", "cli", "deploy")
_HOME = Path(__file__).parents[1]


@cache  # once a process: looking takes a millisecond
def check() -> None:
    """Raises ImportError, with one line that names the module, where another one hides an internal package. Imports
    none of them."""
    for name in INTERNAL:
        place = _HOME / name / "__init__.py"
        spec = find_spec(name)
        if spec is None:
            raise ImportError(f"Penstock is not installed completely: {place} is missing", name=name)
        other = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
        if other != str(place) and not _is_same(Path(other), place):
            raise ImportError(
                f"{other} hides Penstock's own package {name!r}: rename it, or take its folder off PYTHONPATH",
                name=name,
                path=other,
            )


def _is_same(one: Path, other: Path) -> bool:
    """Whether both are one file, however it is reached. A missing file is no other."""
    return one.exists() and other.exists() and one.samefile(other)
