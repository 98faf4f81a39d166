"""Which texts go together in one request. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def batched(sizes: Sequence[int], most_inputs: int, most_tokens: int) -> list[list[int]]:
    """Indexes, in order, in groups within both limits (a text larger than a limit stands alone)."""
    batches: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not batches or len(batches[-1]) >= most_inputs or filled + size > most_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += size
    return batches
