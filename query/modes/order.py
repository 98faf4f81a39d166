"""In which order what was found by meaning and by time is handed on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from query.model import Result

BEST_A_RECENT = 4
"""Passages by meaning for one by time, so that a smaller context still holds some of the newest."""


def interleave(best: Sequence[Result], recent: Sequence[Result]) -> list[Result]:
    """BEST_A_RECENT of the first, one of the second, and so on; the rest of either at the end."""
    mixed: list[Result] = []
    rest = list(recent)
    for n, result in enumerate(best, start=1):
        mixed.append(result)
        if n % BEST_A_RECENT == 0 and rest:
            mixed.append(rest.pop(0))
    return [*mixed, *rest]
