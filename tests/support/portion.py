"""How much of its random examples a test tries."""

from __future__ import annotations

import os

PORTION = float(os.environ.get("PENSTOCK_TEST_PORTION", "1"))
"""A share of the examples. ``make check`` and ``make test`` try some, other ones each time; pytest alone tries all."""


def portion(examples: int) -> int:
    """The number of examples that this run tries, of so many."""
    return max(1, round(examples * PORTION))
