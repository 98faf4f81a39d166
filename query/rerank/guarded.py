"""A reranker with a cache, a time limit and a circuit breaker."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import Literal

from cachetools import TTLCache

from pipeline.core.breaker import Breaker
from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Poison, Retryable
from pipeline.runtime import plugins
from query.rerank.reranker import Reranker
from query.settings import RerankSettings

Outcome = Literal[
    "reranked", "cached", "timeout", "cancelled", "throttled", "unavailable", "misconfigured", "rejected", "skipped"
]
"""The outcome of a reranking: all but the first two leave the order of the fusion. cancelled: the search was given up
meanwhile. skipped: not called, because it was failing or had requested a pause."""

SCORE_TTL_SECONDS = 3600.0
"""The lifetime of cached scores, because a server may get another model under the same name."""


class Guarded:
    """A ``Reranker`` around another one: it caches scores, waits at most ``timeout_seconds``, and during failures calls
    it only for one trial at a time."""

    def __init__(
        self,
        inner: Reranker,
        *,
        timeout_seconds: float,
        cached_pairs: int,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cached_pairs: the most cached scores, by model, tenant, query and text; 0: none. on_outcome: called once for
        each reranking."""
        self._inner = inner
        self._timeout = timeout_seconds
        self._cache: TTLCache[bytes, float] = TTLCache(cached_pairs, SCORE_TTL_SECONDS, timer=clock)
        self._on_outcome = on_outcome
        self._clock = clock
        self._breaker = Breaker()
        self._deferred_until = 0.0
        self._attempts = count()

    @property
    def model(self) -> str:
        return self._inner.model

    async def rerank(self, query: str, texts: Sequence[str], *, tenant: str = "") -> Sequence[float]:
        keys = [self._key(tenant, query, text) for text in texts]
        scores = {key: score for key in keys if (score := self._cache.get(key)) is not None}
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in scores}
        if missing:
            answered = await self._ask(query, list(missing.values()))
            fresh = dict(zip(missing, answered, strict=True))
            scores |= fresh
            if self._cache.maxsize:
                self._cache.update(fresh)
        self._on_outcome("reranked" if missing else "cached")
        return [scores[key] for key in keys]

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _ask(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        self._require_open()
        with self._watched():
            try:
                async with asyncio.timeout(self._timeout) as box:
                    return await self._inner.rerank(query, texts)
            except TimeoutError as error:
                if not box.expired():
                    raise
                self._on_outcome("timeout")
                raise Retryable(f"the reranker did not answer within {self._timeout:g} s", service="rerank") from error
            except PenstockError as error:
                self._on_outcome(_outcome(error))
                raise
            except asyncio.CancelledError:
                self._on_outcome("cancelled")
                raise

    def _require_open(self) -> None:
        now = self._clock()
        if (wait := self._deferred_until - now) > 0:
            reason = "it requested a pause"
        elif (wait := self._breaker.enter(now)) > 0:
            reason = self._breaker.trouble.reason if self._breaker.trouble else "its last requests failed"
        else:
            return
        self._on_outcome("skipped")
        raise Retryable(f"the reranker is not called at present: {reason}", retry_after=wait, service="rerank")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Report to the breaker what becomes of the body."""
        try:
            yield
        except Poison:
            self._breaker.ended({"rerank"})  # the question's fault: the other side answers
            raise
        except PenstockError as error:
            retry_after = error.retry_after if isinstance(error, Retryable) else None
            if isinstance(error, Deferred):
                self._deferred_until = self._clock() + (retry_after or 1.0)
            self._breaker.failed(
                next(self._attempts),
                "rerank",
                str(error),
                now=self._clock(),
                random=random.random(),  # noqa: S311  jitter
                retry_after=retry_after,
            )
            raise
        except BaseException:
            if self._breaker.trouble:
                self._breaker.ended(())  # whoever was the trial has left: the next one is
            raise
        else:
            self._breaker.ended({"rerank"})

    def _key(self, tenant: str, query: str, text: str) -> bytes:
        digest = blake2b(digest_size=16)
        for part in (self.model, tenant, query, text):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8) + encoded)
        return digest.digest()


def _outcome(error: PenstockError) -> Outcome:
    if isinstance(error, Deferred):
        return "throttled"
    if isinstance(error, Poison):
        return "rejected"
    return "unavailable" if isinstance(error, Retryable) else "misconfigured"


async def open_reranker(
    settings: RerankSettings,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    *,
    threads: int | None = None,
) -> Reranker | None:
    """None: reranking is not set up. To be closed by whoever opened it. Loads a local model in a thread. on_outcome:
    see ``Guarded``. threads: of a local model, see ``CrossEncoder``. Raises Misconfigured, naming the setting."""
    chosen = [name for name in ("url", "onnx_path", "plugin") if getattr(settings, name)]
    if len(chosen) > 1:
        both = " and ".join(f"PENSTOCK_RERANK_{name.upper()}" for name in chosen)
        raise Misconfigured(f"{both} are {'both' if len(chosen) == 2 else 'all'} set: choose one")
    inner: Reranker
    if settings.url:
        from query.rerank.http import HttpReranker

        inner = HttpReranker(settings)
    elif settings.onnx_path:
        from query.rerank.cross_encoder import CrossEncoder

        inner = await asyncio.to_thread(CrossEncoder, settings.onnx_path, threads=threads)
    elif settings.plugin:
        make: Callable[[RerankSettings], Reranker] = await asyncio.to_thread(
            plugins.load, "penstock.rerankers", settings.plugin
        )
        inner = await asyncio.to_thread(make, settings)
    else:
        return None
    return Guarded(
        inner,
        timeout_seconds=settings.timeout_seconds,
        cached_pairs=settings.cached_pairs,
        on_outcome=on_outcome,
    )
