"""Settings → the reranker, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pipeline.core.errors import Misconfigured
from query.rerank.guarded import Guarded, Outcome
from query.rerank.port import Reranker
from query.settings import RerankSettings


async def open_reranker(
    settings: RerankSettings, on_outcome: Callable[[Outcome], None] = lambda outcome: None
) -> Reranker | None:
    """None: reranking is not set up. To be closed by whoever opened it. Loads a local model in a thread. on_outcome:
    see ``Guarded``. Raises Misconfigured, naming the setting."""
    if settings.url and settings.onnx_path:
        raise Misconfigured("PENSTOCK_RERANK_URL and PENSTOCK_RERANK_ONNX_PATH are both set: choose one")
    inner: Reranker
    if settings.url:
        from query.rerank.http import HttpReranker

        inner = HttpReranker(settings)
    elif settings.onnx_path:
        from query.rerank.cross_encoder import CrossEncoder

        inner = await asyncio.to_thread(CrossEncoder, settings.onnx_path)
    else:
        return None
    return Guarded(
        inner,
        timeout_seconds=settings.timeout_seconds,
        cached_pairs=settings.cached_pairs,
        on_outcome=on_outcome,
    )
