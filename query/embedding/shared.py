"""Vectors of queries, each computed once for all callers, so that no caller notices who else asked.

A vector depends on the text and the model alone, so sharing it reveals nothing but the time that it saves. A caller
whose access differs from that of everybody who sent the same text therefore waits for as long as the computation took,
which costs a timer and neither a processor nor a request (docs/adr/0076-follow-up-questions.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from time import perf_counter
from uuid import uuid4

from cachetools import TTLCache

from pipeline.core.model import Generation
from pipeline.embedding.port import Embedder, Vectors
from query.access.callers import Caller
from query.embedding.embedders import Embedders, is_same

VECTORS_TTL_SECONDS = 3_600.0
"""The longest time that the vector of a caller's query is held in memory; `penstock forget` reports it."""

Embedded = tuple[Embedder, Vectors]
_Query = tuple[str, bytes]
"""A generation's name and a digest of the query, which itself may take 32 kB; random bytes if nothing is shared."""


@dataclass(frozen=True, slots=True)
class _Computed:
    embedded: Embedded
    seconds: float
    """How long it took to compute."""


class SharedVectors:
    """Safe to use within one event loop. It does not close its arguments."""

    def __init__(
        self,
        embedders: Embedders,
        size: int,
        *,
        on_lookup: Callable[[str], None] = lambda outcome: None,
        clock: Callable[[], float] = perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """size: the most vectors that are cached; 0: none is, and none is shared. on_lookup: called with ``hit`` (the
        caller sent this query before), ``shared`` (others did) or ``miss``."""
        self._embedders = embedders
        self._vectors: TTLCache[_Query, _Computed] = TTLCache(size, VECTORS_TTL_SECONDS)
        self._known: TTLCache[tuple[str, int, _Query], bool] = TTLCache(4 * size, VECTORS_TTL_SECONDS)
        """The queries that each caller sent, by tenant and tags: people with the same access count as one caller."""
        self._running: dict[_Query, asyncio.Task[_Computed]] = {}
        self._is_enabled = size > 0
        self._on_lookup = on_lookup
        self._clock = clock
        self._sleep = sleep

    async def embed(self, generation: Generation, caller: Caller, text: str) -> Embedded:
        """The query's vector by the generation's model, and that model. Raises as ``QueryEmbedder.embed``."""
        if not self._is_enabled:
            return (await self._join(generation, (generation.name, uuid4().bytes), text)).embedded
        began = self._clock()
        key = (generation.name, blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest())
        by_caller = (caller.tenant, hash(caller.tags), key)
        is_known = by_caller in self._known
        computed = self._vectors.get(key)
        self._on_lookup("miss" if computed is None and key not in self._running else "hit" if is_known else "shared")
        if computed is None:
            computed = await self._join(generation, key, text)
        if is_same(computed.embedded[0], generation):
            self._vectors[key] = computed
            self._known[by_caller] = True
        left = computed.seconds - (self._clock() - began)
        if left > 0 and not is_known:
            await self._sleep(left)
        return computed.embedded

    async def _join(self, generation: Generation, key: _Query, text: str) -> _Computed:
        """The result of the computation that is under way, or of a new one. A caller that leaves does not cancel it,
        because others may wait for it, and because it is charged at its end."""
        running = self._running.get(key)
        if running is None:
            running = asyncio.create_task(self._compute(generation, text), name="embed")
            self._running[key] = running
            running.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(running)

    def _ended(self, key: _Query, done: asyncio.Task[_Computed]) -> None:
        self._running.pop(key, None)
        if not done.cancelled():
            done.exception()  # so that one for which nobody waits any more is not logged

    async def _compute(self, generation: Generation, text: str) -> _Computed:
        began = self._clock()
        embedded = await self._embedders.of(generation).embed(text)
        return _Computed(embedded, self._clock() - began)
