"""What the programs that look for a tool have in common: each line says where one lies, or the only one why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from pipeline.core.errors import Misconfigured

console = Console(stderr=True, highlight=False)


def show(look: Callable[[], Iterator[tuple[str, Path]]]) -> int:
    """``name: path`` for everything that ``look`` finds, on stderr. Returns the exit code: 1 when it raises
    Misconfigured."""
    try:
        for name, path in look():
            console.print(f"{name}: {path}", soft_wrap=True)
    except Misconfigured as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    return 0
