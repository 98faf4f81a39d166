"""Computing with very many hits, without keeping other requests waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from query.retrieval.arrange import Hit

T = TypeVar("T")

MAX_AT_ONCE = 300
"""With more hits, a result is computed in a thread: with the 2,000 of a page far down it takes a third of a second, and
seconds if their texts are made for it. With fewer it is not, because answers and previews may have taken all threads,
and the time limit of a search goes on."""


async def computed(hits: Sequence[Hit], compute: Callable[[], T]) -> T:
    """The result of ``compute``, which takes as long as there are hits."""
    return compute() if len(hits) <= MAX_AT_ONCE else await asyncio.to_thread(compute)
